"""What users hold on to: exported names, errors, the version, a light import."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

import shmlane
from shmlane import errors

ROOT = Path(__file__).resolve().parents[2]
RAISED = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException)
    ),
    key=lambda cls: cls.__name__,
)
# Warnings are told and not raised: they have no hint, and no root to catch.
ERRORS = [cls for cls in RAISED if not issubclass(cls, Warning)]
OPTIONAL = ("cv2", "matplotlib", "rich", "typer")

# Runs the code after it in an interpreter that does not find the packages named in its
# first argument.
HIDE = """
import json, sys
hidden = set(json.loads(sys.argv[1]))

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)

sys.meta_path.insert(0, Hide())
"""
# Prints what came along, so that the parent judges and a failure shows the list.
IMPORT_ALL = """
before = set(sys.modules)
import shmlane
for name in shmlane.__all__:
    getattr(shmlane, name)
came = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps(sorted(came)))
"""
RUN_COMMAND = "from shmlane.cli import main; main()"


def exported(module: ModuleType) -> set[str]:
    """Public names that a module binds, other than its submodules."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and name != "annotations"
    }


def run_without(hidden: Sequence[str], code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HIDE + code, json.dumps(hidden)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def imported_without(*hidden: str) -> set[str]:
    child = run_without(hidden, IMPORT_ALL)
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout))


def test_all_lists_exactly_what_the_package_binds() -> None:
    listed = [name for name in shmlane.__all__ if name != "__version__"]
    submodules = {name for name in listed if inspect.ismodule(getattr(shmlane, name))}
    assert set(listed) - submodules == exported(shmlane)
    assert len(listed) == len(set(listed))


def test_every_error_is_exported() -> None:
    assert {cls.__name__ for cls in RAISED} <= set(shmlane.__all__)


def test_every_public_object_has_a_docstring() -> None:
    bare = [
        name
        for name in shmlane.__all__
        if callable(value := getattr(shmlane, name)) and not inspect.getdoc(value)
    ]
    assert bare == []


@pytest.mark.parametrize("cls", ERRORS)
def test_error_has_the_root(cls: type[Exception]) -> None:
    assert issubclass(cls, errors.ShmlaneError)


@pytest.mark.parametrize("cls", RAISED)
def test_error_or_warning_says_what_it_means(cls: type[Exception]) -> None:
    assert (vars(cls).get("__doc__") or "").strip().endswith(".")


@pytest.mark.parametrize("cls", RAISED)
def test_error_is_listed_in_the_docs(cls: type[Exception]) -> None:
    listed = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert f"`{cls.__name__}`" in listed or f"`shmlane.{cls.__name__}`" in listed


@pytest.mark.parametrize("cls", ERRORS)
def test_error_survives_pickling_with_hint_and_context(
    cls: type[errors.ShmlaneError],
) -> None:
    error = cls("It broke.", hint="Mend it.", retryable=True, slot=3, names=("a", "b"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "It broke. Mend it."
    assert (copy.hint, copy.retryable) == ("Mend it.", True)
    assert copy.context == {"slot": 3, "names": ("a", "b")}


def test_only_the_errors_module_defines_exceptions() -> None:
    strangers = [
        name
        for name in shmlane.__all__
        if isinstance(value := getattr(shmlane, name), type)
        and issubclass(value, BaseException)
        and value.__module__ != errors.__name__
    ]
    assert strangers == []


def test_version_is_the_newest_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == shmlane.__version__


def test_installed_metadata_has_the_version_of_the_source() -> None:
    assert importlib.metadata.version("shmlane") == shmlane.__version__


def test_import_pulls_in_numpy_and_the_standard_library_only() -> None:
    # ml_dtypes is NumPy's bfloat16, where it is installed.
    allowed = {"shmlane", "numpy", "ml_dtypes"} | sys.stdlib_module_names
    assert imported_without() - allowed == set()


def test_import_works_without_any_optional_package() -> None:
    assert "shmlane" in imported_without(*OPTIONAL)


def test_command_without_its_extra_says_what_to_install() -> None:
    child = run_without(OPTIONAL, RUN_COMMAND)
    assert child.returncode == 2
    assert "pip install 'shmlane[cli]'" in child.stderr
    assert "Traceback" not in child.stderr


def test_the_package_ships_its_types() -> None:
    assert (Path(shmlane.__file__).parent / "py.typed").is_file()

"""README.md and docs/ hold true: their Python runs, their commands and links exist.

Every block fenced as `python` is run as a reader would run it: as a script of its own,
by a fresh interpreter with warnings as errors, against a real server.

- Addresses are those in `ADDRESSES`; the runner puts a test server's in their place. It
  serves the demo models of `shmlane serve` and the stand-in `yolov8`.
- A block may use the names in `GIVEN` without binding them.
- `<!-- docs: continues -->` on the line above the fence: the block is run after the one
  before it, as one script.
- `<!-- docs: not run: REASON -->` there: the block must compile, no more.

Line numbers in a traceback are those of the page. A `console` block is not run, but
each `$ shmlane ...` in it must name a command and options that exist, and each `$ make
...` a target.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from shmlane.cli.app import app
from shmlane.server import TritonServer, demo_models
from shmlane.server.models import ECHO_MODELS, NETWORKS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

CONTINUES = "continues"
NOT_RUN = "not run"
FENCE = re.compile(
    r"(?:^<!-- docs: (?P<order>.+?) -->\n)?"
    r"^```(?P<language>\w+)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHELL_LINE = re.compile(r"^\$ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")

MODELS = ROOT / "tests" / "models"
# What the pages say, and the fixture that knows what to put there.
ADDRESSES = {
    "unix:///run/triton/http.sock": "unix_url",
    "localhost:8000": "http_url",
}
# What readers have under these names already. One line each; order is that of use.
GIVEN = {
    "shmlane": "import shmlane",
    "np": "import numpy as np",
    "url": "url = 'localhost:8000'",
    "frame": "frame = np.ones((1, 3, 640, 640), np.float32)",
    "session": "import atexit; session = shmlane.Session(url, 'yolov8');"
    " atexit.register(session.close)",
}


@dataclass(frozen=True)
class Block:
    """One fenced piece of a page; `line` is where its first line of code stands."""

    page: Path
    line: int
    code: str
    order: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    return [
        Block(
            page=page,
            line=text.count("\n", 0, match.start("code")) + 1,
            code=match["code"],
            order=match["order"] or "",
        )
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
        if match["language"] in languages
    ]


def scripts() -> list[list[Block]]:
    """Blocks as they are run together: each with those that continue it."""
    groups: list[list[Block]] = []
    for block in blocks("python"):
        if block.order == CONTINUES:
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def free_names(code: str) -> set[str]:
    """Names that `code` reads and never binds."""
    bound: set[str] = set()
    read: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Name(ctx=ast.Load()):
                read.add(node.id)
            case ast.Name():
                bound.add(node.id)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
            case ast.arg():
                bound.add(node.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound.add(node.name)
    return read - bound


def with_what_is_given(code: str) -> str:
    """Put the given names that `code` needs on its first line, which is blank."""
    needed = free_names(code) & GIVEN.keys()
    while (
        more := {
            name for used in needed for name in free_names(GIVEN[used]) & GIVEN.keys()
        }
        - needed
    ):
        needed |= more
    return "; ".join(GIVEN[name] for name in GIVEN if name in needed) + code


def as_script(group: list[Block]) -> str:
    """One script in which every line has the number that it has in the page."""
    code = ""
    for block in group:
        code += "\n" * (block.line - 1 - code.count("\n")) + block.code
    return with_what_is_given(code)


@pytest.fixture(scope="session")
def repositories() -> list[Path]:
    """The demo models that some page names, and the stand-ins."""
    code = "".join(block.code for block in blocks("python"))
    named = [name for name in (*ECHO_MODELS, *NETWORKS) if f'"{name}"' in code]
    return [*demo_models(*named), MODELS]


@pytest.fixture(scope="session")
def http_url(repositories: list[Path]) -> Iterator[str]:
    with TritonServer(repositories) as server:
        yield server.http_url


@pytest.fixture(scope="session")
def unix_url(
    repositories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    path = tmp_path_factory.mktemp("docs") / "http.sock"
    with TritonServer(repositories, unix_socket=path) as server:
        yield server.unix_url


@pytest.mark.parametrize("group", scripts(), ids=lambda group: group[0].place)
def test_python_runs_as_printed(
    group: list[Block], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for block in group:
        compile(block.code, block.place, "exec")
        if block.order.startswith(NOT_RUN):
            pytest.skip(block.order)
    script = tmp_path / group[0].page.name
    code = as_script(group)
    for documented, fixture in ADDRESSES.items():
        if documented in code:
            code = code.replace(documented, request.getfixturevalue(fixture))
    script.write_text(code, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # What finalisers warn of goes to stderr and leaves the exit status alone.
    passed = ended.returncode == 0 and not ended.stderr
    assert passed, f"{group[0].place}\n{ended.stdout}{ended.stderr}"


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.place)
def test_directive_above_a_block_is_one_that_exists(block: Block) -> None:
    known = block.order in ("", CONTINUES) or re.match(NOT_RUN + r": \w+", block.order)
    assert known, f"unknown directive: {block.order}"


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.place)
def test_commands_and_options_in_console_blocks_exist(block: Block) -> None:
    known = shmlane_options()
    for line in SHELL_LINE.findall(block.code):
        program, *words = shlex.split(line, comments=True)
        if Path(program).name == "shmlane" and words != ["--help"]:
            command, *arguments = words
            assert command in known, line
            assert options(arguments) <= known[command] | {"--help"}, line
        elif program == "make":
            targets = {word for word in words if "=" not in word}
            assert targets <= make_targets(), line


def shmlane_options() -> dict[str, set[str]]:
    """The options of each command."""
    group: Any = typer.main.get_command(app)
    return {
        name: {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in group.commands.items()
    }


def options(arguments: list[str]) -> set[str]:
    own = itertools.takewhile(lambda word: word not in ("--", "|", "&"), arguments)
    return {word.partition("=")[0] for word in own if re.match("--?[a-z]", word)}


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    broken = [
        target
        for target in LINK.findall(prose)
        if ":" not in target and not (page.parent / target).exists()
    ]
    assert broken == []

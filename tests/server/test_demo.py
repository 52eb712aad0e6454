"""The demo without its benchmark: findings, checks, the picture and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

pytest.importorskip("cv2", reason="needs the extra [preprocess]")
pytest.importorskip("matplotlib", reason="needs the extra [bench]")

import cv2

from shmlane import ExtraMissing
from shmlane.cli.app import app
from shmlane.demo import program, require_extras, show
from shmlane.demo.look import Check, Findings, Text, look
from shmlane.demo.pictures import PAGE_SIDE
from shmlane.server import TritonServer, networks

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

pytestmark = pytest.mark.usefixtures("no_leftovers")
SHMLANE = (sys.executable, "-c", "from shmlane.cli import main; main()")


def test_the_demo_reads_the_page_and_every_check_passes(tmp_path: Path) -> None:
    arguments = ("demo", "--skip-bench", "--json", "--output", str(tmp_path))
    done = subprocess.run(
        (*SHMLANE, *arguments), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["passed"]
    assert facts["boxes"]
    assert facts["lines_found"] == facts["lines"] > 5
    assert {check["passed"] for check in facts["checks"]} == {True}
    picture = cv2.imread(facts["picture"])
    assert picture is not None
    assert picture.shape == (PAGE_SIDE, PAGE_SIDE, 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["shmlane-demo.png"]


def test_a_wrong_value_fails_its_check(
    networks_server: TritonServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off_by_a_little(name: str, given: NDArray[np.float32]) -> NDArray[np.float32]:
        expected = right(name, given)
        expected[0].flat[0] += 0.01
        return expected

    right = networks.reference
    monkeypatch.setattr(networks, "reference", off_by_a_little)
    findings = look(networks_server.http_url, picture=tmp_path / "page.png")
    failed = [check for check in findings.checks if not check.passed]
    assert [check.claim.partition(",")[0] for check in failed] == [
        "resnet50",
        "ocr_det",
    ]
    assert all(check.detail == "largest difference 0.01" for check in failed)


def test_what_it_prints_fits_eighty_columns(
    networks_server: TritonServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("deep" * 20)
    findings = look(networks_server.http_url, picture=folder / "page.png")
    console = show.make_console(quiet=False)
    show.show_findings(console, findings)
    show.show_checks(console, findings.checks)
    lines = capsys.readouterr().out.splitlines()
    assert str(folder / "page.png") in lines
    assert lines[-1] == f"All {len(findings.checks)} checks passed."
    assert max(len(line) for line in lines if str(folder) not in line) <= 80


@pytest.mark.parametrize("arguments", [["demo"], ["demo", "--json"]])
def test_a_failed_check_is_exit_code_one(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Text(boxes=[], lines=3, lines_found=2, picture=tmp_path / "page.png")
    checks = [Check("one", passed=True), Check("two", passed=False)]
    findings = Findings(classes=[], text=text, checks=checks)
    outcome = program.Outcome("2.51.0", findings, checks, None, seconds=1.0)
    monkeypatch.setattr(program, "run", lambda folder, *, quiet, with_bench: outcome)
    arguments = [*arguments, "--output", str(tmp_path)]
    assert CliRunner().invoke(app, arguments).exit_code == 1


def test_a_folder_that_cannot_be_made_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(program, "run", None)
    (tmp_path / "file").touch()
    for folder in ("/proc/shmlane-demo", str(tmp_path / "file" / "folder")):
        told = CliRunner().invoke(app, ["demo", "--output", folder])
        assert told.exit_code == 2
        assert folder in "".join(told.output.replace("│", "").split())


def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmlane.demo.find_spec", lambda name: None)
    with pytest.raises(ExtraMissing, match=r"rich, cv2, matplotlib.*'shmlane\[all\]'"):
        require_extras()

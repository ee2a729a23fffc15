"""Pages of the commands: where they are written, what is never replaced, warnings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest

from partitioner import examples, load
from partitioner.cli import report as cli_report
from partitioner.cli.main import main
from partitioner.foundations.files import FileError


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """m.onnx, its plan m.partition, and stale/: the same plan with a certificate of another."""
    folder = tmp_path_factory.mktemp("plans")
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), folder / "m.onnx")
    options = ["--devices", "2", "--plan-only", "-q", "-o", str(folder / "m.partition")]
    assert main([str(folder / "m.onnx"), *options]) == 0
    shutil.copytree(folder / "m.partition", folder / "stale")
    plan = json.loads((folder / "stale" / "plan.json").read_text())
    plan["certificate"]["cost"] *= 2
    plan["certificate"]["bound"] *= 2
    (folder / "stale" / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.fixture
def here(plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(plans, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = (
    ["report", "m.partition"],
    ["diff", "m.partition", "stale"],
    ["sweep", "m.onnx", "--devices", "1", "-q"],
)


@pytest.mark.parametrize("name", ["m.onnx", "page", ""])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_page_is_html(
    here: Path, command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    was = (here / "m.onnx").read_bytes()
    code = main([*command, "-o", name])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{name!r} does not end in .html or .htm" in err
    assert (here / "m.onnx").read_bytes() == was


@pytest.mark.parametrize("command", COMMANDS)
def test_the_model_is_not_replaced(
    here: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    was = (here / "m.onnx").read_bytes()
    (here / "page.html").symlink_to("m.onnx")
    assert main([*command, "-o", "page.html"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "partition: cannot write page.html: it is the model itself; name another file"
    )
    assert (here / "m.onnx").read_bytes() == was
    with pytest.raises(FileError, match="the model itself"):
        load("m.partition").report("m.onnx")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_target_is_looked_at_before_any_work(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def work(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("partitioner.api.compiled.reload.load", work)
    monkeypatch.setattr("partitioner.frontends.onnx.load.load_onnx", work)
    for name in ("none/page.html", f"{'x' * 300}.html"):
        assert main([*command, "-o", name]) == 1
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"cannot write {name}: " in err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", COMMANDS[1:])
def test_a_result_is_printed_though_its_page_is_not_written(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise FileError("the disk is full")

    monkeypatch.setattr(cli_report, "_write", full)
    assert main([*command, "--json", "-o", "page.html"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["kind"] == command[0]
    assert err.endswith("partition: the disk is full\n")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "command",
    [
        ["show", "stale"],
        ["explain", "stale"],
        ["report", "stale"],
        ["diff", "m.partition", "stale"],
        ["diff", "stale", "stale"],
        ["draw", "stale", "--dot", "p.dot"],
    ],
)
def test_a_stale_certificate_is_warned_of(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("partition: warning: stale: the certificate in plan.json is left")


@pytest.mark.usefixtures("here")
def test_a_sweep_asks_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "2,1,2", "--memory", "1GiB,1024MiB", "--json", "-q"]
    assert main(["sweep", "m.onnx", *options]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["devices"] for point in points] == [2, 1]


@pytest.mark.usefixtures("here")
def test_the_report_is_a_stage_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["m.onnx", "--plan-only", "-o", "again"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["partition: writing again ...", "partition: drawing the report ..."]

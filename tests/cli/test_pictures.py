"""Picture options, `draw` and `check`: exit codes, errors of one line, no half-written file."""

import json
import sys
from pathlib import Path

import onnx
import pytest

from helpers.drawn import drawn_plans
from partitioner.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.onnx and its partition."""
    folder = tmp_path_factory.mktemp("pictures")
    onnx.save(drawn_plans.mlp(), folder / "m.onnx")
    options = ["--cluster", "2xideal", "--strategy", "intra", "-q"]
    assert main([str(folder / "m.onnx"), *options, "-o", str(folder / "m.partition")]) == 0
    return folder


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, with a link to the partition and a copy of the model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "saved").symlink_to(home / "m.partition")
    (tmp_path / "m.onnx").write_bytes((home / "m.onnx").read_bytes())
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"m.onnx", "saved"}


ALL = ["--dot", "p.dot", "--graph", "g.svg", "--timeline", "t.png", "--annotate", "a.onnx"]


def test_all_pictures_beside_a_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["m.onnx", "--cluster", "2xideal", "-o", "x", "-q", *ALL]) == 0
    assert names(here) == {"x", "p.dot", "g.svg", "t.png", "a.onnx"}
    assert capsys.readouterr().out == ""
    assert main(["check", "a.onnx"]) == 0
    assert capsys.readouterr().out == "ok: 3 nodes annotated for 2 devices\n"


def test_draw_a_saved_plan(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "g.svg").write_text("older")
    assert main(["draw", "saved", *ALL, "--boxes", "2"]) == 0
    assert names(here) == {"p.dot", "g.svg", "t.png", "a.onnx"}
    assert (here / "g.svg").read_text().startswith("<?xml")
    assert capsys.readouterr().out == ""


def test_a_json_timeline_of_requests(here: Path) -> None:
    assert main(["draw", "saved", "--timeline", "t.json", "--requests", "3"]) == 0
    events = json.loads((here / "t.json").read_text())["traceEvents"]
    assert {e["args"]["request"] for e in events if e["ph"] == "X"} == {0, 1, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.onnx", "--dot", "p.txt"], "'p.txt' does not end in .dot or .gv"),
        (["m.onnx", "--graph", "g.jpg"], "'g.jpg' does not end in .svg or .png or .pdf"),
        (["m.onnx", "--timeline", "t"], "'t' does not end in .svg or .png or .pdf or .json"),
        (["m.onnx", "--annotate", "a.json"], "'a.json' does not end in .onnx"),
        (["m.onnx", "--graph", "a.svg", "--timeline", "./a.svg"], "a.svg is given twice"),
        (["draw", "saved"], "nothing to draw: give --dot, --graph"),
        (["draw", "saved", "--dot", "p.dot", "--requests", "0"], "at least 1"),
        (["check"], "Missing argument 'FILE'"),
    ],
)
def test_wrong_usage_exits_2(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert names(here) == set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.onnx", "--dot", "no/p.dot"], "cannot write no/p.dot: there is no folder no"),
        (["m.onnx", "--annotate", "m.onnx"], "it is the model itself"),
        (["draw", "none", "--dot", "p.dot"], "none is not a folder that `partition MODEL` wrote"),
        (["check", "none.onnx"], "none.onnx: cannot be read"),
    ],
)
def test_bad_input_exits_1_before_the_search(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)  # no line of progress either
    assert message in err
    assert names(here) == set()


def test_a_missing_matplotlib_is_told_before_the_search(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["m.onnx", "--graph", "g.svg", "-o", "x"]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert names(here) == set()


@pytest.mark.slow
def test_infeasible_writes_no_picture(here: Path) -> None:
    assert main(["m.onnx", "--devices", "2", "--memory", "100", "-o", "x", "-q", *ALL]) == 3
    assert names(here) == set()


def test_what_is_left_out_is_told_even_when_quiet(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "pins.toml").write_text("[[pin]]\ntensor = 'layer1.weight'\ndim = 0\n")
    options = ["--cluster", "2xideal", "--mesh", "tp=2", "--constraints", "pins.toml", "-q"]
    assert main(["m.onnx", *options, "-o", "x", "--annotate", "a.onnx"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("partition: not annotated: ")
    assert line.endswith("'y' of 'y': a pending sum over tp")


@pytest.mark.usefixtures("here")
def test_check_prints_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "saved", "--annotate", "a.onnx"]) == 0
    model = onnx.load("a.onnx")
    for node in model.graph.node[:2]:
        node.name = "bell\a"
        node.device_configurations[0].configuration_id = "gone"
    onnx.save(model, "a.onnx")
    capsys.readouterr()
    assert main(["check", "a.onnx"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and line.endswith("is not one of the model") for line in lines)

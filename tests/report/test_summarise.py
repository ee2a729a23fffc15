"""The best plans of the searched spaces, beside the chosen one."""

import json
from pathlib import Path

import onnx
import pytest

import partitioner
from helpers.pages import schema_check
from partitioner import examples
from partitioner.api.compiled.folder import load_summary
from partitioner.cli.main import main
from partitioner.foundations.files import ResultError
from partitioner.report import summarise
from partitioner.report.page.data import space_rows
from partitioner.report.schema import Changes


@pytest.fixture(scope="module")
def result() -> partitioner.Compiled:
    return partitioner.compile(examples.build("mlp", layers=4, hidden=1024, batch=64), devices=4)


def test_each_losing_space_keeps_how_its_plan_differs(result: partitioner.Compiled) -> None:
    rows = space_rows(result.summary, result.objective)
    chosen, *others = [row for row in rows if row["cost"] is not None]
    assert chosen["chosen"]
    assert chosen["changes"] is None
    assert others
    for row in others:
        changes = row["changes"]
        assert changes is not None
        schema_check.check(changes, Changes)
        assert changes["moved_count"] + changes["same"] == len(result.graph.nodes)
        step = next(figure for figure in changes["figures"] if figure["name"] == "step")
        assert step["before"] == result.evaluation.step_s
        assert step["after"] == row["cost"]
        assert "chosen plan" in changes["verdict"]


def test_the_same_plan_from_the_space_alone(result: partitioner.Compiled, tmp_path: Path) -> None:
    onnx.save(examples.build("mlp", layers=4, hidden=1024, batch=64), tmp_path / "m.onnx")
    options = ["--devices", "4", "--strategy", "intra", "--mesh", "x=4", "--plan-only", "-q"]
    assert main([str(tmp_path / "m.onnx"), *options, "-o", str(tmp_path / "intra")]) == 0
    cost = json.loads((tmp_path / "intra" / "plan.json").read_text())["certificate"]["cost"]
    (row,) = (row for row in result.summary["spaces"] if row["space"] == "intra (x=4)")
    assert row["cost"] == pytest.approx(cost)


def test_the_changes_are_stored_and_read(result: partitioner.Compiled, tmp_path: Path) -> None:
    folder = result.save(tmp_path / "m", plan_only=True)
    file = folder / "summary.json"
    data = json.loads(file.read_text())
    assert data["spaces"] == result.summary["spaces"]
    assert any("changes" in row for row in data["spaces"])


def test_large_graphs_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summarise, "MOST_NODES", 1)
    model = examples.build("mlp", layers=4, hidden=1024, batch=64)
    rows = partitioner.compile(model, devices=4).summary["spaces"]
    assert len(rows) > 1
    assert not any("changes" in row for row in rows)


def test_neighbours_that_move_alike_are_one_row() -> None:
    def moved(name: str, after: str, seconds: float) -> dict[str, object]:
        row = {"name": name, "op": "MatMul", "before": "on 0: whole", "after": after}
        return {**row, "seconds_before": 1.0, "seconds_after": seconds}

    rows = summarise._runs([moved("a", "x", 1), moved("b", "x", 2), moved("c", "y", 5)])  # type: ignore[list-item]
    assert [row["name"] for row in rows] == ["c", "a … b (2 nodes)"]
    assert rows[1]["seconds_before"] == 2
    assert rows[1]["seconds_after"] == 3


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("verdict",), 1),
        (("moved_count",), -1),
        (("figures", 0, "before"), "x"),
        (("figures", 0, "better"), "worst"),
        (("moved", 0, "name"), None),
        (("moved", 0, "seconds_after"), -1.0),
        (("traffic", 0, "bytes_before"), 2.5),
        (("more",), 1),
    ],
)
def test_spoilt_changes_are_refused(
    result: partitioner.Compiled, tmp_path: Path, at: tuple[str | int, ...], value: object
) -> None:
    folder = result.save(tmp_path / "m", plan_only=True)
    file = folder / "summary.json"
    data = json.loads(file.read_text())
    inner = next(row["changes"] for row in data["spaces"] if "changes" in row)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    file.write_text(json.dumps(data))
    with pytest.raises(ResultError, match=r"summary.json has spaces = "):
        load_summary(folder)

"""The best plans of the searched spaces, beside the chosen one."""

import json
from pathlib import Path

import onnx
import pytest
import torch

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


def test_a_verdict_says_which_launches_were_asked_for(result: partitioner.Compiled) -> None:
    model = examples.build("mlp", layers=4, hidden=1024, batch=64)
    graphs = partitioner.compile(model, devices=4, launches="graphs")
    assert result.summary["launches"] == {"native": 4e-6}
    assert graphs.summary["launches"] == {"graphs": 1.3e-6}
    assert "; native launches, 4 µs a kernel" in str(result)
    assert "; CUDA graphs, 1.3 µs a kernel" in str(graphs)
    assert result.verdict().line.startswith("Predicted from published rates, nothing was run")
    assert graphs.verdict().line.startswith("Predicted from published rates with CUDA graphs, no")
    said = [note for note in graphs.summary["notes"] if note.startswith("CUDA graphs")]
    note = "CUDA graphs are priced, and recorded by ONNX Runtime's enable_cuda_graph, which "
    assert said == [f"{note}partition run does not set"]
    assert not any(note.startswith("CUDA graphs") for note in result.summary["notes"])
    assert graphs.one_device.latency_s < result.one_device.latency_s


def test_launches_are_asked_for_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "m.onnx", tmp_path / "out"
    onnx.save(examples.build("mlp", layers=1, hidden=64, batch=8), model)
    options = ["--devices", "2", "--plan-only", "-q", "-o", str(out), "--force", "--json"]
    for name, kernel_s in (("graphs", 1.3e-6), ("eager", 18e-6)):
        assert main([str(model), *options, "--launches", name]) == 0
        assert json.loads(capsys.readouterr().out)["launches"] == {name: kernel_s}
        assert load_summary(out)["launches"] == {name: kernel_s}
    assert main([str(model), *options, "--launches", "python"]) == 2
    assert "'python' is not one of 'native', 'eager'" in capsys.readouterr().err
    assert main([str(model), *options, "--cluster", "2xcpu", "--launches", "graphs"]) != 0
    assert "is of GPUs, and device 'cpu' is none" in capsys.readouterr().err


def test_a_sweep_prices_launches_as_a_plan_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(examples.build("mlp", layers=1, hidden=64, batch=8), tmp_path / "m.onnx")
    args = ["sweep", str(tmp_path / "m.onnx"), "--devices", "1", "--json", "-q"]
    latencies = []
    for options in ([], ["--launches", "native"], ["--launches", "graphs"]):
        assert main([*args, *options]) == 0
        (point,) = json.loads(capsys.readouterr().out)["points"]
        latencies.append(point["latency_s"])
    assert latencies[0] == latencies[1] > latencies[2]
    module, x = torch.nn.Linear(64, 64), torch.zeros(8, 64)
    (point,) = partitioner.sweep(module, x, [1]).data["points"]
    assert point["latency_s"] == partitioner.compile(module, x, 1).evaluation.latency_s == 18e-6


def test_what_devices_say_themselves_is_no_name_of_launches() -> None:
    model = examples.build("mlp", layers=1, hidden=64, batch=8)
    plan = partitioner.compile(model, devices=2, cluster="2xcpu")
    assert plan.summary["launches"] == {}
    assert " a kernel" not in str(plan)


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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fewer_devices", {"a": 1}),
        ("launches", {"a": 1}),
        ("launches", "zzz"),
    ],
)
def test_spoilt_facts_are_refused(
    result: partitioner.Compiled, tmp_path: Path, key: str, value: object
) -> None:
    folder = result.save(tmp_path / "m", plan_only=True)
    file = folder / "summary.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ResultError, match=f"summary.json has {key} = "):
        load_summary(folder)

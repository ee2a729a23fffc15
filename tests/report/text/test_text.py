"""`partition explain`, `diff` and `sweep`."""

import json
import re
from pathlib import Path

import onnx
import pytest

from helpers.pages import schema_check
from partitioner import examples
from partitioner.api import sweeping
from partitioner.cli.main import main
from partitioner.frontends.onnx.load import load_onnx
from partitioner.report.schema import Diff, Point, Sweep


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """m.onnx, planned as inter/, as intra/ and as copies/."""
    folder = tmp_path_factory.mktemp("plans")
    onnx.save(examples.build("mlp", layers=4, hidden=64), folder / "m.onnx")
    for strategy in ("inter", "intra", "copies"):
        options = ["--devices", "2", "--strategy", strategy, "--plan-only", "-q"]
        assert main([str(folder / "m.onnx"), *options, "-o", str(folder / strategy)]) == 0
    return folder


def _nodes(plans: Path) -> int:
    return len(load_onnx(plans / "m.onnx").graph.nodes)


def _said(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([str(arg) for arg in args]) == 0
    return capsys.readouterr().out


def test_explain(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _said(capsys, "explain", plans / "inter")
    assert text.startswith("inter plan on 2 of 2 devices of 2xh100\n")
    for part in (
        "  limit  ",
        "  instead  ",
        "time of device ",
        "longest tasks",
        "tightest memory",
    ):
        assert part in text


def test_explain_a_node(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _said(capsys, "explain", plans / "intra", "layer1.out")
    assert text.startswith("layer1.out (Gemm) on x=2 on 0,1")
    assert "factors: m = 8, k = 64, n = 64" in text
    rows = text[text.index("strategies, all other nodes") :].splitlines()
    assert sum(row.startswith("*") for row in rows) == 1
    assert any("n/x" in row for row in rows)
    assert any("k/x" in row for row in rows)


def test_explain_takes_a_tensor_and_helps_with_a_typo(
    plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "(Gemm)" in _said(capsys, "explain", plans / "inter", "layer1.out")
    assert main(["explain", str(plans / "inter"), "layer1.outt"]) == 1
    error = capsys.readouterr().err
    assert "no node or tensor 'layer1.outt'; did you mean 'layer1.out'" in error
    assert error.count("\n") == 1


def test_diff(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _said(capsys, "diff", plans / "inter", plans / "intra")
    assert "nodes moved" in text
    assert "x=2 on 0,1" in text
    changes = json.loads(_said(capsys, "diff", plans / "inter", plans / "intra", "--json"))
    assert text.splitlines()[0] == changes["verdict"], "the verdict is not shortened"
    assert text.splitlines()[1:3] == changes["verdicts"]
    pairs = [tuple(pair) for pair in changes["devices"]]
    verdicts = tuple(changes["verdicts"])
    schema_check.check({**changes, "devices": pairs, "verdicts": verdicts}, Diff)
    assert changes["moved"]
    assert changes["same"] + len(changes["moved"]) == _nodes(plans)
    back = json.loads(_said(capsys, "diff", plans / "intra", plans / "inter", "--json"))
    assert {row["name"] for row in back["moved"]} == {row["name"] for row in changes["moved"]}
    for one, two in zip(changes["figures"], back["figures"], strict=True):
        assert (one["before"], one["after"]) == (two["after"], two["before"])


def test_a_diff_has_what_one_request_takes_of_whole_copies(
    plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = json.loads(_said(capsys, "diff", plans / "inter", plans / "copies", "--json"))
    figures = {figure["name"]: figure["after"] for figure in changes["figures"]}
    assert figures["busy seconds of all devices"] == pytest.approx(2 * figures["step"])


def test_a_plan_does_not_differ_from_itself(
    plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = json.loads(_said(capsys, "diff", plans / "inter", plans / "inter", "--json"))
    assert changes["moved"] == changes["only_before"] == changes["only_after"] == []
    assert all(figure["before"] == figure["after"] for figure in changes["figures"])
    text = _said(capsys, "diff", plans / "inter", plans / "inter")
    assert "0 nodes moved" in text


@pytest.mark.slow
def test_sweep(plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("sweep", plans / "m.onnx", "--devices", "1,2,4", "--memory", "2KiB,1GiB")
    sweep = json.loads(_said(capsys, *args, "--time-limit", "3", "--json", "-q"))
    schema_check.check(sweep, Sweep)
    points = {(p["devices"], p["memory_bytes"]): p for p in sweep["points"]}
    assert sorted(points) == sorted((n, m) for n in (1, 2, 4) for m in (2 * 1024, 2**30))
    assert "bytes are short" in points[1, 2 * 1024]["why"]
    assert points[1, 2 * 1024]["latency_s"] is None
    assert points[1, 2**30]["speedup"] == pytest.approx(1.0)
    front = [p for p in sweep["points"] if p["pareto"]]
    assert points[1, 2**30] in front
    for point in front:  # nothing dominates a point of the front
        for other in sweep["points"]:
            if other["latency_s"] is None or other is point:
                continue
            keys = ("devices", "latency_s", "step_s", "peak_bytes")
            assert any(other[k] > point[k] for k in keys) or all(other[k] == point[k] for k in keys)
    text = _said(capsys, *args, "--time-limit", "3", "-q")
    assert "Pareto" in text
    assert "bytes are short" in text
    last = text.splitlines()[-1]
    assert re.match(
        r"Best is \d devices? .*\. (Predicted from published rates|Splitting is)", last
    ), last


def test_sweep_over_clusters_with_their_own_counts(
    plans: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("sweep", plans / "m.onnx", "--clusters", "1xcpu,2xcpu", "--json", "-q")
    sweep = json.loads(_said(capsys, *args, "--time-limit", "3"))
    assert [(p["devices"], p["cluster"]) for p in sweep["points"]] == [(1, "cpu"), (2, "cpu")]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--devices", "1,x"], 2, "not a whole number"),
        ([], 2, "give --devices"),
        (["--devices", "2", "--clusters", "4xh100"], 2, "4"),
        (["--devices", "2", "--clusters", "nonsense"], 2, "nonsense"),
        (["--devices", "2", "-o", "none/x.html"], 1, "there is no folder none"),
        (["--devices", "2", "--mesh", "tp=2", "--strategy", "inter"], 2, "with strategy 'inter'"),
    ],
)
def test_refused_sweeps(
    plans: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert main(["sweep", str(plans / "m.onnx"), "-q", *args]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def _points(*rows: tuple[int, str, float | None, float | None]) -> list[Point]:
    """(devices, cluster, step seconds, gain over one device)."""
    return [
        Point(
            devices=devices, cluster=cluster, memory_bytes=None, strategy="inter",
            latency_s=step, throughput_per_s=None, step_s=step, peak_bytes=100,
            devices_used=devices, gap=0.0, speedup=gain,
            efficiency=None if gain is None else gain / devices,
            verdict=f"{gain} times on {devices} {cluster}", pareto=False, why="",
        )
        for devices, cluster, step, gain in rows
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([(1, "cpu", 160.0, 1.0), (4, "h100", 1.0, 3.6)], "4 devices (h100): .*. 3.6 times on 4 h"),
        ([(1, "h100", 1.0, 1.0)], "No split was tried"),
        (
            [(2, "h100", 1.0, 1.02), (4, "h100", 1.0, 1.02)],
            "^Best is 2 devices (h100): .* 1 s",
        ),
        ([(1, "h100", 1.0, 1.0), (4, "h100", 2.0, 0.5)], "Splitting is not worth it: that"),
        ([(4, "a100", 2.7, 1.9), (4, "h100", 1.9, 1.4)], "^Best is 4 devices (h100): .* 1.4 times"),
        ([(2, "h100", None, None)], "No point of the sweep has a plan"),
    ],
)
def test_the_answer_compares_with_one_device_of_the_same_cluster(
    rows: list[tuple[int, str, float | None, float | None]], answer: str
) -> None:
    sentence = sweeping.answer(_points(*rows), "throughput", "request")
    assert re.search(answer.replace("(", r"\(").replace(")", r"\)"), sentence), sentence
    assert sentence.endswith(".")


def test_a_diff_of_different_models_says_so(
    plans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(examples.build("tiny"), tmp_path / "t.onnx")
    assert main([str(tmp_path / "t.onnx"), "--plan-only", "-q", "-o", str(tmp_path / "t")]) == 0
    text = _said(capsys, "diff", plans / "inter", tmp_path / "t")
    assert "the two plans are of different models: they share no node" in text

"""Whole copies of models, run: requests go to copies in turn, and each copy computes the model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import partitioner
from helpers.onnx_files.rank_files import save_edited
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.backends.errors import BackendError
from partitioner.backends.launch import LocalJob
from partitioner.backends.onnx.local import run_local
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.cli.main import main
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.ir.mesh import copies_on
from partitioner.ir.plan import Plan
from partitioner.report.page.data import report_data
from partitioner.solver.outcome import Infeasible


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two copies of an mlp, on disk with the weights inside the rank files."""
    folder = tmp_path_factory.mktemp("copies")
    onnx.save(examples.build("mlp", hidden=16), folder / "mlp.onnx")
    options = ["--devices", "2", "--strategy", "copies", "-q", "-o", str(folder / "out")]
    assert main([str(folder / "mlp.onnx"), *options]) == 0
    return folder / "out"


def requests(result: Compiled, count: int) -> list[dict[str, np.ndarray]]:
    return [dict(result.model.random_inputs(seed)) for seed in range(count)]


def test_each_request_has_its_own_results_whatever_copy_serves_it(saved: Path) -> None:
    result = partitioner.load(saved)
    asked = requests(result, 5)
    answers = Simulator(saved).run(asked)
    for one, answer in zip(asked, answers, strict=True):
        np.testing.assert_array_equal(answer.outputs["y"], result.run(one)["y"])
    assert result.verify_written(saved)


def test_processes_serve_a_stream(saved: Path) -> None:
    result = partitioner.load(saved)
    one = requests(result, 1)[0]
    for count in (1, 5):
        run = run_local(saved, one, count)
        np.testing.assert_allclose(run.outputs["y"], result.run(one)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_differs_is_found(saved: Path, tmp_path: Path, rank: int) -> None:
    result = partitioner.load(saved)
    folder = result.save(tmp_path / "out")
    file = folder / f"rank{rank}.onnx"
    model = onnx.load(file)
    tensor = next(t for t in model.graph.initializer if t.name.endswith("weight"))
    array = numpy_helper.to_array(tensor).copy()
    array.flat[0] += 1
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    save_edited(model, file)
    found = result.verify_written(folder)
    assert str(found).startswith("DIFFERENT: 2 whole copies on 2 ranks")
    assert found.first.ranks == (rank,)


def test_commands_name_the_copies(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((saved / "summary.json").read_text())
    assert (summary["strategy"], summary["searched"]) == (
        "copies",
        "2 whole copies, one on each device",
    )
    assert summary["one_device"]["copies"] == 0  # they are no rival of themselves
    for command, said in (
        (["show"], "copies plan by "),
        (["explain"], "copies plan on 2 of 2 devices"),
        (["verify"], "equal: 2 whole copies on 2 ranks"),
        (["report", "-o", str(saved.parent / "page.html")], ""),
        (["diff", str(saved)], ""),
    ):
        assert main([command[0], str(saved), *command[1:]]) == 0
        out = capsys.readouterr().out
        assert said in out
        assert "would serve" not in out
    model = str(saved.parent / "mlp.onnx")
    swept = [model, "--devices", "1,3", "--strategy", "copies", "--json", "-q"]
    assert main(["sweep", *swept]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["strategy"] for point in points] == ["single", "copies"]
    assert points[1]["efficiency"] == pytest.approx(1)


def grouped() -> Compiled:
    """Two copies on two of five devices each, none of which holds the model."""
    model = examples.build("mlp", layers=4, hidden=32, batch=9)
    memory = int(0.75 * partitioner.compile(model, devices=1).evaluation.needed_bytes[0])
    return partitioner.compile(model, None, 5, strategy="copies", memory=memory)


def test_requests_of_a_timeline_are_each_on_one_copy() -> None:
    """Each copy had run all of them."""
    result = grouped()
    copies, evaluation = copies_on(result.plan.groups), result.evaluation
    timeline = simulate(result.schedule, 6)
    served = [
        {
            devices
            for devices in copies
            for event in timeline.events
            if event.request == number and event.device in devices
        }
        for number in range(6)
    ]
    assert served == [{copies[number % 2]} for number in range(6)]
    one_s, between_s = simulate(result.schedule, 1).makespan_s, max(evaluation.load_s.values())
    assert timeline.makespan_s == pytest.approx(one_s + 2 * between_s)
    assert len({event.device for event in simulate(result.schedule).events}) == 4


def test_pictures_and_the_page_name_the_copies() -> None:
    result = grouped()
    page = report_data(result)
    verdict = ": 2 whole copies, each on 2 devices (one h100 holds none): "
    assert verdict in page["head"]["verdict"]
    assert all(not box["cuts"] for box in page["ribbon"]["boxes"])
    assert [lane["mesh"] for lane in page["ribbon"]["lanes"]] == ["copies=2", "copies=2"]
    assert [one["label"] for one in page["timelines"]] == [
        "one request on each whole copy",
        "4 requests in flight, in turn on 2 whole copies",
    ]


def test_copies_that_share_a_rank_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = partitioner.load(saved).save(tmp_path / "out")
    model = onnx.load(folder / "rank0.onnx")
    (entry,) = (one for one in model.metadata_props if '"copies"' in one.value)
    entry.value = entry.value.replace('"devices":[[0],[1]]', '"devices":[[0],[0]]')
    save_edited(model, folder / "rank0.onnx")
    with pytest.raises(BackendError, match="are not on devices of their own"):
        run_local(folder, requests(partitioner.load(saved), 1)[0])


class Layers(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y


@pytest.mark.parametrize(("devices", "per_copy"), [(2, 1), (3, 1), (5, 2)])
def test_copies_of_a_module(devices: int, per_copy: int, tmp_path: Path) -> None:
    model, x = Layers().eval(), torch.randn(8, 16)
    alone = partitioner.compile(model, x, devices=1).evaluation.needed_bytes[0]
    memory = int(0.75 * alone) if per_copy > 1 else None
    program = partitioner.compile(model, x, devices, strategy="copies", memory=memory)
    assert [len(own) for own in copies_on(program.plan.groups)] == [per_copy] * (
        devices // per_copy
    )
    assert program.verify()
    torch.testing.assert_close(program(x), model(x))
    folder = program.save(tmp_path / "out")
    assert program.verify_written(folder)
    loaded = partitioner.load(folder, module=model, example_inputs=x)
    assert loaded.plan == Plan.from_json(program.plan.to_json())
    assert loaded.verify()


@pytest.mark.slow
def test_a_modules_files_serve_a_stream(tmp_path: Path) -> None:
    model, x = Layers().eval(), torch.randn(8, 16)
    program = partitioner.compile(model, x, devices=2, strategy="copies")
    folder = program.save(tmp_path / "out")
    run = program.ranks.run_written(folder, LocalJob(requests=5))
    assert run.seconds > 0
    (name,) = run.outputs
    assert run.outputs[name].shape == (8, 16)
    comparison = program.profile(x, steps=2)
    assert len(comparison.measured.ranks) == 2


#: Small models of several forms: chains, branches, attention, convolutions.
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"layers": 4, "hidden": 32, "batch": 4},
    "tiny": {"batch": 3, "channels": 6},
    "llama": {"batch": 1, "seq": 6, "layers": 1, "hidden": 48, "heads": 6, "kv_heads": 3}
    | {"intermediate": 66, "vocab": 51},
}


def drawn(count: int) -> Iterator[tuple[str, Cluster, float]]:
    """Models on equal and unlike devices, which hold this share of the model each."""
    from partitioner.cost_model.cluster.resolve import resolve_cluster

    rng = np.random.default_rng(0)
    names = [*MODELS]
    for _ in range(count):
        cluster = resolve_cluster(str(rng.choice(["4xh100", "2x2xh100", "5xa100", "6xl4"])))
        share = float(rng.choice([1.0, 0.8, 0.6, 0.4]))
        yield names[int(rng.integers(len(names)))], cluster, share


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_drawn_copies_verify_and_cost_what_their_groups_do(number: int) -> None:
    *_, (name, cluster, share) = drawn(number + 1)
    model = examples.build(name, **MODELS[name])
    need = partitioner.compile(model, cluster=cluster.first(1)).evaluation.needed_bytes[0]
    cluster = cluster.with_memory(max(1, int(share * need)))
    options = {"cluster": cluster, "strategy": "copies", "time_limit_s": 5}
    try:
        result = partitioner.compile(model, **options)
    except Infeasible:
        with pytest.raises(Infeasible, match="no two whole copies fit"):
            partitioner.compile(model, **options)
        return
    copies = copies_on(result.plan.groups)
    size = len(copies[0])
    assert len(copies) > 1
    assert result.evaluation.fits_exactly
    alone = partitioner.compile(model, cluster=cluster.first(size), time_limit_s=5)
    if size == 1:
        assert result.cost == pytest.approx(alone.cost / len(copies))
    assert result.plan.certificate.bound <= result.cost
    assert result.verify()
    kept = partitioner.compile(model, cluster=cluster, constraints=result.plan)
    assert kept.cost == pytest.approx(result.cost)

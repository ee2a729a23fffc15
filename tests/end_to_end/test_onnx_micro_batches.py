"""One request of an ONNX model in micro-batches over stages: its outputs are ONNX Runtime's own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files.onnx_models import model
from helpers.onnx_files.rank_files import save_edited
from helpers.plans.cost_cases import far_apart
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.load import load_rank, read_directory
from partitioner.backends.onnx.files.steps import Cut
from partitioner.backends.onnx.local import run_local
from partitioner.cli.main import main
from partitioner.foundations.files import ResultError
from partitioner.ir.errors import OptionError
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.pipeline.text import from_csv, to_csv
from partitioner.ir.plan import NodePlan, Pipeline
from partitioner.ir.program import CommKind
from partitioner.search.request import Request
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.spaces import SearchError

BATCH = 6
Arrays = dict[str, np.ndarray]


def skips(batch: int | str = BATCH, dim: str = "n") -> onnx.ModelProto:
    """Two inputs with the batch and one without, two outputs, values that skip stages."""
    rows = dim if isinstance(batch, str) else batch
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal((8, 8), np.float32) / 3 for i in range(4)}
    nodes = [
        helper.make_node("MatMul", ["x", "w0"], ["a"], name="mm0"),
        helper.make_node("Add", ["a", "bias"], ["b"], name="shifted"),
        helper.make_node("Relu", ["b"], ["c"], name="relu0"),
        helper.make_node("MatMul", ["c", "w1"], ["d"], name="mm1"),
        helper.make_node("Mul", ["d", "gate"], ["e"], name="gated"),
        helper.make_node("Tanh", ["e"], ["f"], name="tanh1"),
        helper.make_node("MatMul", ["f", "w2"], ["g"], name="mm2"),
        helper.make_node("Add", ["g", "c"], ["h"], name="skip"),  # of the first stage
        helper.make_node("Exp", ["bias"], ["i"], name="exponents"),
        helper.make_node("MatMul", ["h", "w3"], ["j"], name="mm3"),
        helper.make_node("Mul", ["j", "i"], ["y"], name="last"),
        helper.make_node("Transpose", ["f"], ["z"], name="turned", perm=[1, 0]),
        helper.make_node("Neg", ["bias"], ["same"], name="same"),
    ]
    inputs = {
        "x": ("float32", (rows, 8)),
        "bias": ("float32", (8,)),
        "gate": ("float32", (rows, 1)),
    }
    outputs = {"y": ("float32", (rows, 8)), "z": ("float32", (8, rows)), "same": ("float32", (8,))}
    return model(nodes, inputs, outputs, weights)


def mlp(batch: int = BATCH, layers: int = 4) -> onnx.ModelProto:
    return examples.build("mlp", layers=layers, hidden=16, batch=batch)


def net(batch: int = BATCH) -> onnx.ModelProto:
    """Convolutions, BatchNormalization and a residual sum."""
    return examples.build("tiny", batch=batch)


def transformer(batch: int = BATCH) -> onnx.ModelProto:
    return examples.build(
        "llama", layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=64, batch=batch,
        seq=8,
    )  # fmt: skip


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "skips": skips,
    "mlp": mlp,
    "net": net,
    "transformer": transformer,
}


def inputs_of(proto: onnx.ModelProto, batch: int = BATCH, seed: int = 0) -> Arrays:
    random, feeds = np.random.default_rng(seed), {}
    for value in proto.graph.input:
        type_ = value.type.tensor_type
        shape = [dim.dim_value or batch for dim in type_.shape.dim]
        floats = type_.elem_type == onnx.TensorProto.FLOAT
        feeds[value.name] = (
            random.standard_normal(shape, np.float32)
            if floats
            else random.integers(0, 60, shape, np.int64)
        )
    return feeds


def expected(proto: onnx.ModelProto, feeds: Arrays) -> Arrays:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def check(got: Mapping[str, np.ndarray], wanted: Arrays) -> None:
    assert list(got) == list(wanted)
    for name, array in wanted.items():
        assert got[name].shape == array.shape
        np.testing.assert_allclose(got[name], array, 1e-4, 1e-5)


def compiled(proto: onnx.ModelProto, devices: int, count: int, **options: Any) -> Compiled:
    """A plan of as many stages as devices, if no mesh is given."""
    options = {"mesh": {"pp": devices}, "objective": "latency", **options}
    result = partitioner.compile(proto, devices=devices, micro_batches=count, **options)
    assert isinstance(result, Compiled)
    return result


@pytest.mark.parametrize(
    ("name", "devices", "count"),
    [
        *((name, 2, 3) for name in MODELS),
        ("skips", 3, 6),
        ("skips", 3, 2),
        ("net", 3, 2),
        ("transformer", 3, 6),
        ("mlp", 2, 1),
        ("skips", 5, 3),
    ],
)
def test_outputs_are_those_of_the_whole_model(
    name: str, devices: int, count: int, tmp_path: Path
) -> None:
    proto = MODELS[name]()
    feeds = inputs_of(proto)
    result = compiled(proto, devices, count)
    assert result.plan.pipeline is not None
    assert set(result.plan.stages) == set(range(devices))
    assert result.plan.micro_batches == count
    check(result.run(feeds), expected(proto, feeds))
    assert result.verify().equal
    assert result.cost == result.evaluation.latency_s == result.evaluation.step_s
    folder = result.save(tmp_path / "plan")
    loaded = partitioner.load(folder)
    assert loaded.plan == result.plan
    assert not loaded.warnings
    check(loaded.run(feeds), expected(proto, feeds))
    assert loaded.verify_written(folder).equal


@pytest.mark.parametrize(
    ("name", "devices"), [("skips", 3), pytest.param("transformer", 2, marks=pytest.mark.slow)]
)
def test_ranks_are_processes(name: str, devices: int, tmp_path: Path) -> None:
    proto = MODELS[name]()
    feeds = inputs_of(proto)
    folder = compiled(proto, devices, 3).save(tmp_path / "plan")
    check(run_local(folder, feeds, 4).outputs, expected(proto, feeds))


def test_the_command_plans_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    proto, file = skips("n"), tmp_path / "skips.onnx"
    file.write_bytes(proto.SerializeToString())
    feeds, out = inputs_of(proto, 8), tmp_path / "out.npz"
    np.savez(tmp_path / "in.npz", **feeds)
    folder = tmp_path / "plan"
    size = ["--dim", "n=8", "--devices", "2", "--mesh", "pp=2"]
    options = ["--objective", "latency", "--micro-batches", "4", "-o", str(folder)]
    assert main([str(file), *size, *options]) == 0
    assert "2 stages, 4 micro-batches, forward, bubble" in capsys.readouterr().out
    run = ["run", str(folder), "--inputs", str(tmp_path / "in.npz"), "--outputs", str(out)]
    assert main([*run, "--requests", "3"]) == 0
    with np.load(out) as outputs:
        check(dict(outputs), expected(proto, feeds))
    assert main(["verify", str(folder)]) == 0
    assert main(["run", str(folder)]) == 0  # draws inputs of the whole batch
    assert "y: float32[8, 8]" in capsys.readouterr().out
    assert main(["run", str(folder), "--profile"]) == 1
    assert "profiles do not serve plans in micro-batches" in capsys.readouterr().err
    assert main(["draw", str(folder), "--annotate", str(tmp_path / "a.onnx")]) == 1
    assert "--annotate has no micro-batches" in capsys.readouterr().err
    feeds["x"] = feeds["x"][:4]
    np.savez(tmp_path / "in.npz", **feeds)
    assert main(run) == 1
    assert "input 'x' has shape (4, 8), not (8, 8)" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    proto = skips()
    feeds, out = inputs_of(proto), tmp_path / "out.npz"
    np.savez(tmp_path / "in.npz", **feeds)
    folder = compiled(proto, 2, 3).save(tmp_path / "plan")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "partitioner.run", str(folder)]
    command += ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(out), "--requests", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(out) as outputs:
        check(dict(outputs), expected(proto, feeds))


@pytest.mark.slow
def test_stages_are_sharded(tmp_path: Path) -> None:
    """Two stages of two devices each; each rank gets its part of each micro-batch."""
    proto = transformer()
    feeds = inputs_of(proto)
    result = compiled(proto, 4, 3, mesh={"pp": 2, "tp": 2}, cluster="4xideal")
    assert [mesh.size() for mesh in result.plan.groups] == [2, 2]
    assert result.evaluation.sharded_flops_share > 0.9
    check(result.run(feeds), expected(proto, feeds))
    folder = result.save(tmp_path / "plan")
    check(run_local(folder, feeds, 2).outputs, expected(proto, feeds))


@pytest.mark.slow
def test_stages_share_what_they_send(tmp_path: Path) -> None:
    """Both devices of the second stage get half of what they both hold, and gather the whole."""
    proto, cluster = mlp(), far_apart(nodes=2, devices=2)
    feeds = inputs_of(proto)
    cut = compiled(proto, 4, 3, mesh={"pp": 2, "tp": 2}, cluster=cluster).plan
    nodes = {name: NodePlan(node.group, {}) for name, node in cut.nodes.items()}
    whole = replace(cut, nodes=nodes, certificate=None)
    result = partitioner.compile(proto, constraints=whole, cluster=cluster)
    comms = [task.comm for task in result.schedule.tasks if task.comm is not None]
    kinds = [CommKind.SEND, CommKind.SEND, CommKind.ALL_GATHER]
    assert [comm.kind for comm in comms] == kinds
    assert result.verify(symbolic=True)
    folder = result.save(tmp_path / "plan")
    check(run_local(folder, feeds, 2).outputs, expected(proto, feeds))


def test_a_device_that_has_two_stages(tmp_path: Path) -> None:
    """The schedule is a file: stages on devices 0, 1 and again 0."""
    proto = skips()
    feeds, file = inputs_of(proto), tmp_path / "table.csv"
    table = pipeline_schedule("forward", (0, 1, 0), 3)
    file.write_text(to_csv(table))
    result = compiled(proto, 2, 3, schedule=str(file))
    assert result.plan.pipeline is not None
    assert set(result.plan.stages) == {0, 1, 2}
    check(result.run(feeds), expected(proto, feeds))
    folder = result.save(tmp_path / "plan")
    check(run_local(folder, feeds, 2).outputs, expected(proto, feeds))
    header = read_directory(folder)[0]
    assert header.batch is not None
    order = header.batch.order
    assert (order.table.lanes, order.lanes) == (from_csv(to_csv(table)).lanes, ((0,), (1,)))


def test_a_batch_in_micro_batches_of_unequal_sizes_is_refused() -> None:
    message = r"^micro_batches=3: the batch of 7 \(dim 0 of 'x'\) has no 3 equal parts: give one of"
    with pytest.raises(OptionError, match=message):
        compiled(mlp(7), 2, 3)
    proto = mlp(7)
    check(compiled(proto, 2, 7).run(inputs_of(proto)), expected(proto, inputs_of(proto)))


def averaged() -> onnx.ModelProto:
    """A result of each sample less the mean of all."""
    nodes = [
        helper.make_node("Exp", ["x"], ["e"], name="exp"),
        helper.make_node("ReduceMean", ["e"], ["m"], name="mean", axes=[0]),
        helper.make_node("Sub", ["e", "m"], ["y"], name="centred"),
    ]
    shape = ("float32", (8, 4))
    return model(nodes, {"x": shape}, {"y": shape})


def test_a_model_that_combines_samples_is_refused_by_name() -> None:
    message = r"^micro_batches=2: 'mean' \(ReduceMean\) combines the samples of a batch"
    with pytest.raises(OptionError, match=message):
        compiled(averaged(), 2, 2)


def test_random_numbers_are_refused_by_name() -> None:
    nodes = [
        helper.make_node("RandomNormal", [], ["r"], name="noise", shape=[4]),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    shape = ("float32", (8, 4))
    with pytest.raises(
        OptionError, match=r"micro_batches=2: 'noise' \(RandomNormal\) draws random"
    ):
        compiled(model(nodes, {"x": shape}, {"y": shape}), 2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "intra"}, "strategy 'intra' cuts operators over devices, and the mesh gives"),
        ({"schedule": "forwards"}, "schedule 'forwards' is not one of"),
    ],
)
def test_options_that_contradict_micro_batches_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises((OptionError, SearchError), match=message):
        compiled(mlp(), 2, 2, **options)


def test_auto_takes_what_is_faster() -> None:
    """Where a launch takes no time, four devices that work at once are faster than one."""
    cheap = partitioner.compile(mlp(8), devices=2, objective="latency", micro_batches="auto")
    assert cheap.plan.pipeline is None  # launches count: a micro-batch has as many as a batch
    assert any(note.startswith("not in stages: none of these") for note in cheap.summary["notes"])
    links = {"cluster": "2xcpu", "objective": "latency"}
    proto = examples.build("mlp", layers=8, hidden=256, batch=2048)
    whole = partitioner.compile(proto, devices=2, **links)
    best = partitioner.compile(proto, devices=2, micro_batches="auto", **links)
    assert best.cost <= whole.cost
    assert best.summary["cost"] == best.cost
    assert best.summary["bound"] <= best.cost


def test_auto_says_why_a_model_runs_as_a_whole() -> None:
    result = partitioner.compile(averaged(), devices=2, micro_batches="auto")
    assert result.plan.pipeline is None
    assert any(note.startswith("not in stages: ") for note in result.summary["notes"])
    staged = partitioner.compile(averaged(), devices=2, parallel="pp")
    assert staged.plan.micro_batches == 1
    (note,) = [note for note in staged.summary["notes"] if "micro-batches" in note]
    assert "'mean' (ReduceMean) combines the samples of a batch" in note


@pytest.mark.slow
def test_auto_runs_in_parts_what_does_not_fit_as_a_whole() -> None:
    proto = examples.build("tiny", batch=64, channels=16)
    assert partitioner.compile(proto, devices=1).evaluation.held_bytes[0] > 1_000_000
    result = partitioner.compile(proto, devices=1, memory=1_000_000, micro_batches="auto")
    in_parts = partitioner.compile(proto, devices=1, memory=1_000_000, micro_batches=8)
    assert (result.plan.micro_batches or 1) > 1 or result.plan.blocks
    assert result.cost <= in_parts.cost
    assert result.evaluation.fits_exactly
    feeds = inputs_of(proto)
    check(result.run(feeds), expected(proto, feeds))
    with pytest.raises(Infeasible):
        partitioner.compile(proto, devices=1, memory=600, micro_batches="auto")


def test_inputs_and_outputs_of_all_micro_batches_count() -> None:
    proto = examples.build("mlp", layers=2, hidden=8, batch=256)
    result = compiled(proto, 2, 16)
    first, last = (result.evaluation.exact_peak[rank].activation_bytes for rank in range(2))
    part = 16 * 8 * 4  # bytes of a value of one micro-batch
    assert 16 * part <= first <= 16 * part + 4 * part  # x of all of them
    assert 16 * part <= last <= 16 * part + 4 * part  # y of all of them


def test_a_changed_batch_is_a_changed_model(tmp_path: Path) -> None:
    file = tmp_path / "m.onnx"
    file.write_bytes(mlp(6).SerializeToString())
    result = partitioner.compile(file, devices=2, micro_batches=3, mesh={"pp": 2})
    folder = result.save(tmp_path / "plan")
    for batch in (7, 12):
        file.write_bytes(mlp(batch).SerializeToString())
        with pytest.raises(ResultError, match="has changed since; partition it again"):
            partitioner.load(folder)


def test_a_rank_that_computes_something_else_is_found(tmp_path: Path) -> None:
    folder = compiled(skips(), 2, 3).save(tmp_path / "plan")
    for file in sorted(folder.glob("rank*.onnx")):
        proto = onnx.load(file)
        for tensor in proto.graph.initializer:
            if tensor.name == "w3":
                other = numpy_helper.to_array(tensor) * 2
                tensor.CopyFrom(numpy_helper.from_array(other, "w3"))
                save_edited(proto, file)
    verified = partitioner.load(folder).verify_written(folder)
    assert not verified.equal
    assert verified.first is not None
    assert verified.first.node == "'mm3' (MatMul)"


def spoil(folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a rank's file."""
    file = folder / f"rank{rank}.onnx"
    proto = onnx.load(file, load_external_data=False)
    entry = next(e for e in proto.metadata_props if e.key == "partitioner.program")
    data = json.loads(entry.value)
    change(data["batch"])
    entry.value = json.dumps(data)
    file.write_bytes(proto.SerializeToString())


def with_rows(*rows: str) -> Callable[[dict[str, Any]], None]:
    return lambda batch: batch.update(schedule=list(rows))


def fewer_regions(batch: dict[str, Any]) -> None:
    batch["regions"]["x"].pop()


def wide_region(batch: dict[str, Any]) -> None:
    batch["regions"]["x"][0][0][0][1] = 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_rows("0F0,0F1", "1F0,1F1"), "'x' has no 2 equal parts"),
        (with_rows("0F0,0F1,0F2,1F0,1F1,1F2"), "are not those of a schedule of 1 lanes"),
        (with_rows("0F0,0F1,0F1", "1F0,1F1,1F2"), "0F1"),
        (with_rows("nonsense"), "nonsense"),
        (lambda batch: batch.update(lanes=[[0], [7]]), "have more than 2 ranks"),
        (lambda batch: batch.update(lanes=[[0], [0]]), "are not those of a schedule of 2 lanes"),
        (fewer_regions, "'x' has no 3 equal parts"),
        (wide_region, "is not within"),
        (lambda batch: batch.update(lanes=[[1], [0]]), "which its schedule does not run there"),
    ],
)
def test_spoilt_files_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    folder = compiled(mlp(), 2, 3).save(tmp_path / "plan")
    for rank in range(2):
        spoil(folder, rank, change)
    with pytest.raises(BackendError, match=message):
        read_directory(folder)


def test_an_order_in_which_ranks_wait_for_ever_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(to_csv(pipeline_schedule("forward", (0, 1, 0), 3)))
    folder = compiled(mlp(layers=6), 2, 3, schedule=str(table)).save(tmp_path / "plan")
    rows = "2F0,2F1,2F2,0F0,0F1,0F2", "1F0,1F1,1F2"
    for rank in range(2):
        spoil(folder, rank, with_rows(*rows))
    with pytest.raises(BackendError, match="the schedule of micro-batches cannot run: "):
        read_directory(folder)


def test_an_order_in_which_a_value_is_read_before_it_is_made_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(to_csv(pipeline_schedule("forward", (0, 0), 2)))
    folder = compiled(mlp(), 1, 2, mesh=None, schedule=str(table)).save(tmp_path / "plan")
    spoil(folder, 0, with_rows("1F0,1F1,0F0,0F1"))
    with pytest.raises(BackendError, match="is made in phase 1, but read in phase 2"):
        load_rank(folder / "rank0.onnx")


def test_files_of_two_orders_are_refused(tmp_path: Path) -> None:
    folder = compiled(mlp(), 2, 3).save(tmp_path / "plan")
    spoil(folder, 1, with_rows("0F0,0F1,0F2", "1F1,1F0,1F2"))
    with pytest.raises(BackendError):
        read_directory(folder)


def test_values_pass_once_a_micro_batch_and_stages_work_at_the_same_time(tmp_path: Path) -> None:
    """The simulated step is shorter than stages one after the other."""
    result = compiled(mlp(layers=6), 2, 6, cluster="2xideal")
    folder = result.save(tmp_path / "plan")
    cuts = [step for step in load_rank(folder / "rank1.onnx").steps if isinstance(step, Cut)]
    assert [cut.pipelined for cut in cuts] == [True]
    one = compiled(mlp(layers=6), 2, 1, cluster="2xideal")
    assert result.cost < 0.75 * one.cost  # 7 turns of a sixth of half the work each, ideally


def test_the_plan_keeps_the_model_and_its_part() -> None:
    result = compiled(mlp(), 2, 3)
    assert isinstance(result.model, OnnxModel)
    assert result.plan.pipeline == Pipeline("forward", 3)
    assert result.model.part is not None
    assert result.graph is result.model.part.graph
    assert result.graph.types["x"].shape[0] == 2
    assert result.model.traced.graph.types["x"].shape[0] == BATCH
    assert result.summary["micro_batches"] == 3
    assert Request(micro_batches=3).is_pipelined


def test_a_plan_in_micro_batches_is_kept() -> None:
    result = compiled(mlp(), 2, 3)
    assert compiled(mlp(), 2, 3, constraints=result.plan).plan.digest == result.plan.digest

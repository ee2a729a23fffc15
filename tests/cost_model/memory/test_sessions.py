"""Bytes that ONNX Runtime's sessions hold, predicted and by its own profile."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import partitioner
from helpers.onnx_files import detectors
from helpers.plans import cost_cases
from helpers.plans.measured import measured_bytes
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.memory.cpu_kernels import CHANNEL_BLOCK
from partitioner.cost_model.memory.sessions import Held, sessions_of
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.inputs import random_inputs
from partitioner.ir.graph import Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.types import TensorType
from partitioner.solver.outcome import Infeasible

SIZE = 24


def image_net(channels: int, path: Path, activation: str = "Relu") -> Path:
    """Convolutions, a normalization, a pool, a residual sum, an upsampling and a concatenation."""
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def node(op: str, *inputs: str, **attrs: Any) -> str:
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        return name

    def constant(array: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(array, f"c{len(constants)}"))
        return str(constants[-1].name)

    def conv(value: str, before: int, after: int, kernel: int = 3) -> str:
        weights = constant(rng.standard_normal((after, before, kernel, kernel)).astype(np.float32))
        bias = constant(rng.standard_normal(after).astype(np.float32))
        pads = [kernel // 2] * 4
        return node("Conv", value, weights, bias, kernel_shape=[kernel] * 2, pads=pads)

    few, more = channels, 2 * channels
    first = node("Relu", conv("x", 3, few))
    low = node("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2])
    low = conv(low, few, more)
    moments = [constant(np.ones(more, np.float32)) for _ in range(4)]
    low = node("Relu", node("BatchNormalization", low, *moments, epsilon=1e-5))
    low = node("Relu", node("Add", conv(low, more, more), low))
    scales = constant(np.array([1, 1, 2, 2], np.float32))
    modes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    high = node("Resize", conv(low, more, few, 1), "", scales, mode="nearest", **modes)
    joined = node("Concat", node(activation, high), first, axis=1)
    last = node("Sigmoid", conv(node("Relu", conv(joined, more, few)), few, 2, 1))
    graph = helper.make_graph(
        nodes,
        "image_net",
        [helper.make_tensor_value_info("x", 1, (1, 3, SIZE, SIZE))],
        [helper.make_tensor_value_info(last, 1, (1, 2, SIZE, SIZE))],
        constants,
    )
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def compiled_for(model: Path, **options: Any) -> Compiled:
    settings: dict[str, Any] = {"devices": 1, **options}
    compiled = partitioner.compile(model, **settings)
    assert isinstance(compiled, Compiled)
    return compiled


def measured(compiled: Compiled, folder: Path, rank: int = 0) -> int:
    """Most bytes beside constants."""
    if not folder.exists():
        compiled.save(folder)
    return measured_bytes(folder, rank, random_inputs(compiled.graph, 0)).peak


def has_wide_vectors() -> bool:
    """Whether this machine's blocks have as many channels as the model's."""
    try:
        return CHANNEL_BLOCK == 16 and " avx512f " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("channels", [1, 3, 4, 5, 12, 16, 17])
def test_sessions_hold_what_is_predicted(channels: int, tmp_path: Path) -> None:
    """Layouts are blocked only where channels fill blocks."""
    compiled = compiled_for(image_net(channels, tmp_path / "net.onnx"))
    predicted = compiled.evaluation.executor_peak[0].activation_bytes
    held = measured(compiled, tmp_path / "out")
    plain = compiled.programs.plain
    assert bool(plain) == (channels % CHANNEL_BLOCK > 0)
    assert held <= predicted
    if plain or has_wide_vectors():
        assert predicted <= 1.02 * held
    assert compiled.summary["peak_bytes"][0] >= held
    assert compiled.verify(seed=1).equal


def fits(model: onnx.ModelProto, folder: Path, **options: Any) -> bool:
    """Whether no rank of a plan holds more than predicted, or than its limit."""
    folder.mkdir()
    onnx.save(model, folder / "net.onnx")
    compiled = compiled_for(folder / "net.onnx", **options)
    return all(
        measured(compiled, folder / "out", rank) <= peak.activation_bytes
        for rank, peak in compiled.evaluation.executor_peak.items()
    )


@pytest.mark.parametrize("activation", ["silu", "Relu", "HardSwish"])
@pytest.mark.parametrize("width", [4, 16])
def test_a_detector_holds_no_more_than_predicted(
    activation: str, width: int, tmp_path: Path
) -> None:
    """Sums and products of tensors that later nodes read are not written into them."""
    assert fits(detectors.detector(32, width, activation), tmp_path / "net")


def test_a_pool_in_a_session_without_convolutions_is_blocked(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[3, 3], pads=[1] * 4),
        helper.make_node("Tanh", ["b"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, 1, (1, 32, 24, 24))] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "pool", *ends)
    imports = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    assert fits(model, tmp_path / "net")


#: Operators whose kernels write into their operand, and some that do not.
WRITTEN_INTO = ("Celu", "Elu", "LogSoftmax", "Relu", "Selu", "Sigmoid", "Softmax", "Softsign")
WRITTEN_ANEW = ("Abs", "Exp", "Neg", "Sqrt", "Reciprocal", "Floor", "Mish", "HardSwish")


@pytest.mark.parametrize("op", [*WRITTEN_INTO, *WRITTEN_ANEW, "Add", "Mul", "Sub", "Max"])
def test_what_kernels_write_into_their_operands_is_counted_so(op: str, tmp_path: Path) -> None:
    reads = ["a", "a"] if op in ("Add", "Mul", "Sub", "Max") else ["a"]
    nodes = [
        helper.make_node("Sin", ["x"], ["a"]),
        helper.make_node(op, reads, ["b"]),
        helper.make_node("MatMul", ["b", "w"], ["y"]),
    ]
    weight = numpy_helper.from_array(np.ones((64, 2), np.float32), "w")
    shapes = {"x": (64, 64), "y": (64, 2)}
    ends = [[helper.make_tensor_value_info(*of)] for of in ((n, 1, s) for n, s in shapes.items())]
    graph = helper.make_graph(nodes, "pair", *ends, [weight])
    imports = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    onnx.save(model, tmp_path / "net.onnx")
    compiled = compiled_for(tmp_path / "net.onnx")
    predicted = compiled.evaluation.executor_peak[0].activation_bytes
    assert measured(compiled, tmp_path / "out") == predicted


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 20, 40])
def test_drawn_nets_hold_no_more_than_predicted(first: int, tmp_path: Path) -> None:
    two: dict[str, Any] = {"devices": 2, "cluster": "ideal", "time_limit_s": 5}
    ways: list[dict[str, Any]] = [{}, {**two, "strategy": "intra"}, {**two, "strategy": "inter"}]
    for seed in range(first, first + 20):
        folder = tmp_path / str(seed)
        assert fits(detectors.drawn_net(seed), folder, **ways[seed % 3]), seed


def test_channels_that_blocks_fill_up_count_in_whole_blocks(tmp_path: Path) -> None:
    compiled = compiled_for(image_net(3, tmp_path / "net.onnx"))
    (sessions,) = sessions_of(compiled.graph, compiled.schedule).values()
    assert sessions.held(()).max() > 1.5 * sessions.held((None,)).max()


def test_convolutions_are_plain_where_blocked_ones_do_not_fit(tmp_path: Path) -> None:
    """No blocked kernel computes an Elu: what it reads and writes is reordered."""
    model = image_net(16, tmp_path / "net.onnx", "Elu")
    free = compiled_for(model)
    (sessions,) = sessions_of(free.graph, free.schedule).values()
    blocked, plain = (int(sessions.held(parts).max()) for parts in ((), (None,)))
    limits = {0: free.evaluation.executor_peak[0].resident_bytes + (blocked + plain) // 2}
    assert plain < blocked
    assert not free.programs.plain
    held = Held.of(free.graph, free.schedule, limits)
    assert held is not None
    assert held.plain == {None}
    assert held.peaks[0].activation_bytes == plain


@pytest.mark.parametrize("strategy", ["intra", "inter"])
def test_two_ranks(strategy: str, tmp_path: Path) -> None:
    """What enters a session and leaves it is held from its start to its end."""
    model = image_net(16, tmp_path / "net.onnx")
    compiled = compiled_for(model, devices=2, cluster="ideal", strategy=strategy, time_limit_s=5)
    for rank in range(2):
        held = measured(compiled, tmp_path / "out", rank)
        predicted = compiled.evaluation.executor_peak[rank].activation_bytes
        assert held <= predicted
        if has_wide_vectors():
            assert predicted <= 1.05 * held


def test_a_plan_whose_session_holds_more_than_the_device_has_is_refused(tmp_path: Path) -> None:
    """Inputs and outputs lie beside what a session makes; head-room does not cover those here."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.standard_normal((64, 64)).astype(np.float32), "w")
    names = ["x", "a", "b", "y"]
    nodes = [
        helper.make_node("MatMul", [before, "w"], [after], name=after)
        for before, after in pairwise(names)
    ]
    ends = [[helper.make_tensor_value_info(name, 1, (512, 64))] for name in ("x", "y")]
    graph = helper.make_graph(nodes, "thin", *ends, [weights])
    imports = [helper.make_opsetid("", 17)]
    path = tmp_path / "thin.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    compiled = compiled_for(path)
    figures = compiled.evaluation
    assert measured(compiled, tmp_path / "out") == figures.executor_peak[0].activation_bytes
    assert figures.peak[0].bytes < figures.executor_peak[0].bytes == figures.needed_bytes[0]
    between = (figures.peak[0].bytes + figures.executor_peak[0].bytes) // 2
    with pytest.raises(Infeasible, match=r"bytes are short on device 0 at 'b' in ONNX Runtime's"):
        partitioner.compile(path, devices=1, memory=between, strategy="inter")


def test_the_operand_of_an_all_reduce_becomes_its_result() -> None:
    """Of the sum there is one tensor, beside what arrives; what enters and leaves lies outside."""
    part, whole = 4 * 64 * 64, 4 * 64 * 256
    types = {"z": TensorType.of("float32", (64, 256))}
    product = cost_cases.matmul_graph()
    owner = cost_cases.graph(
        [*product.nodes, Node("relu", "Relu", ("y",), ("z",))],
        {**product.types, **types},
        ("x",),
        ("z",),
        ("w",),
    )
    pair = DeviceMesh.line(2, "tp")
    placed = [
        cost_cases.placed(owner, "mm", pair, {"k": ("tp",)}),
        cost_cases.placed(owner, "relu", pair),
    ]
    tasks = schedule(owner, placed, cost_cases.flat(2))
    for sessions in sessions_of(owner, tasks).values():
        assert list(sessions.between) == [part + whole, whole, whole + whole]

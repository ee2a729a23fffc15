"""A residual block at the begin of a segment is computed in as many kernels as within one."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.measuring.timing import kernel_runs
from partitioner.backends.onnx.running.executor import Executor
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions.joined import with_blocked_inputs
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.program import Compute, Programs
from partitioner.ir.types import TensorType

SHAPE = (1, 16, 8, 8)
IMAGE = TensorType.of("float32", SHAPE)


def residual_blocks(joining: str = "Add") -> onnx.ModelProto:
    """Two convolutions, each with a residual and an activation."""
    make = helper.make_node
    nodes = [
        make("Relu", ["x"], ["x0"], name="first"),
        make("Conv", ["x0", "w1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        make(joining, ["x0", "c1"], ["s1"], name="join1"),
        make("Relu", ["s1"], ["x1"], name="relu1"),
        make("Conv", ["x1", "w2"], ["c2"], name="conv2", pads=[1, 1, 1, 1]),
        make(joining, ["c2", "x1"], ["s2"], name="join2"),
        make("Relu", ["s2"], ["y"], name="relu2"),
    ]
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.standard_normal((16, 16, 3, 3), np.float32), name)
        for name in ("w1", "w2")
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    graph = helper.make_graph(nodes, "blocks", values[:1], values[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def in_two_phases(programs: Programs) -> Programs:
    """The program of one rank with a segment of the first node and one of all others."""
    (program,) = programs.ranks
    steps = tuple(
        replace(step, phase=min(1, index))
        for index, step in enumerate(program.steps)
        if isinstance(step, Compute)
    )
    return replace(programs, ranks=(replace(program, steps=steps),))


@pytest.mark.parametrize("joining", ["Add", "Sum"])
def test_a_residual_block_at_the_begin_of_a_segment_is_fused(tmp_path: Path, joining: str) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("ONNX Runtime may have no blocked layouts here")
    graph = load_onnx(residual_blocks(joining)).graph
    models = emit_models(in_two_phases(uncut_programs(graph)), graph)
    config = SessionConfig(profile=tmp_path)
    simulator = Simulator(models, configs={0: config})
    fed = {"x": np.random.default_rng(1).standard_normal(SHAPE, np.float32)}
    (fused,) = simulator.run([fed])
    (executor,) = simulator.executors
    assert isinstance(executor, Executor)
    _, last = executor.sessions.resident.values()
    (kernels,) = kernel_runs(Path(last.end_profiling()))
    ops = [kernel.op for kernel in kernels]
    assert ops == ["ReorderInput", "AveragePool", "Conv", "Conv", "ReorderOutput"]
    (exact,) = Simulator(models, optimization="basic").run([fed])
    np.testing.assert_allclose(fused.outputs["y"], exact.outputs["y"], rtol=1e-4, atol=1e-4)


def changed(nodes: list[NodeProto], **types: TensorType) -> list[list[str]]:
    """The operator, the operands and the results of each node, with blocked inputs."""
    return [
        [node.op_type, *node.input, "->", *node.output]
        for node in with_blocked_inputs(nodes, types, types)
    ]


def conv(source: str, result: str) -> NodeProto:
    return helper.make_node("Conv", [source, "w"], [result])


def test_a_copy_is_read_by_what_can_be_blocked_only() -> None:
    nodes = [
        conv("x", "c"),
        helper.make_node("Add", ["c", "x"], ["y"]),
        helper.make_node("Shape", ["x"], ["shape"]),
    ]
    assert changed(nodes, x=IMAGE) == [
        ["AveragePool", "x", "->", "partitioner.blocked.x"],
        ["Conv", "partitioner.blocked.x", "w", "->", "c"],
        ["Add", "c", "partitioner.blocked.x", "->", "y"],
        ["Shape", "x", "->", "shape"],
    ]
    assert nodes[0].input[0] == "x", "the nodes given are not changed"


@pytest.mark.parametrize(
    ("nodes", "types"),
    [
        ([conv("x", "c")], {"x": IMAGE}),
        ([helper.make_node("Add", ["x", "x"], ["y"])], {"x": IMAGE}),
        ([conv("x", "c"), helper.make_node("Add", ["x", "b"], ["y"])], {"x": IMAGE}),
        (
            [conv("x", "c"), helper.make_node("Add", ["c", "x"], ["y"])],
            {"x": TensorType.of("float64", SHAPE)},
        ),
        (
            [conv("x", "c"), helper.make_node("Add", ["c", "x"], ["y"])],
            {"x": TensorType.of("float32", (1, 3, 8, 8))},
        ),
    ],
    ids=["no sum", "no convolution", "a constant", "double", "three channels"],
)
def test_other_inputs_are_left_alone(nodes: list[NodeProto], types: dict[str, TensorType]) -> None:
    assert list(with_blocked_inputs(nodes, types, types)) == nodes

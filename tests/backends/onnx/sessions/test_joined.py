"""Segments of a rank that hand images to each other keep them in ONNX Runtime's blocked layout."""

from __future__ import annotations

import platform
import resource
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, helper

from helpers.onnx_files.onnx_models import model
from helpers.plans import rank_programs as hand
from partitioner.api.profiling.sessions import in_phases
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.onnx.files.emit import emit, emit_models
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.files.steps import RankModel, Segment
from partitioner.backends.onnx.measuring.timing import kernel_runs, nodes_of_kernels
from partitioner.backends.onnx.running.executor import Executor
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions import joined, segments
from partitioner.backends.onnx.sessions.joined import Group, Optimized, groups_of
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.program import Comm, CommKind, Compute, Output, Part, Programs

RNG = np.random.default_rng(0)


def weights(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


class Net:
    """A model under construction: each method adds a node and returns its value's name."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, **attrs))
        return name

    def constant(self, array: np.ndarray) -> str:
        self.weights[f"k{len(self.weights)}"] = array
        return f"k{len(self.weights) - 1}"

    def conv(self, value: str, before: int, after: int, kernel: int = 3, stride: int = 1) -> str:
        filters, bias = (
            self.constant(weights(after, before, kernel, kernel)),
            weights(after, 1)[:, 0],
        )
        attrs = {"pads": [kernel // 2] * 4, "strides": [stride] * 2}
        return self.add("Conv", value, filters, self.constant(bias), **attrs)

    def norm(self, value: str, channels: int) -> str:
        moments = [self.constant(np.linspace(0.5, 2, channels, dtype=np.float32)) for _ in range(4)]
        return self.add("BatchNormalization", value, *moments)

    def graph(self, shape: Sequence[int], result: str, out: Sequence[int]) -> Graph:
        ends = {"x": ("float32", shape)}, {result: ("float32", out)}
        return load_onnx(model(self.nodes, *ends, self.weights, opset=18)).graph


def image_net() -> Graph:
    """Residual blocks, a projection, channels that fill no block, a concatenation; odd sizes."""
    net = Net()
    first = net.add("Relu", net.conv("x", 3, 16))
    first = net.add("MaxPool", first, kernel_shape=[2, 2], strides=[2, 2])
    inner = net.add("Relu", net.norm(net.conv(first, 16, 16), 16))
    block = net.add("Relu", net.add("Add", net.conv(inner, 16, 16), first))
    shortcut = net.conv(block, 16, 32, kernel=1, stride=2)
    low = net.add("Relu", net.add("Add", shortcut, net.conv(block, 16, 32, stride=2)))
    odd = net.add("Relu", net.conv(low, 32, 12))
    even = net.add("Sigmoid", net.conv(odd, 12, 24, kernel=1))
    more = net.add("Concat", even, net.conv(low, 32, 8), low, axis=1)
    pooled = net.add("Flatten", net.add("GlobalAveragePool", net.conv(more, 64, 20)))
    result = net.add("MatMul", pooled, net.constant(weights(20, 5)))
    return net.graph((1, 3, 18, 22), result, (1, 5))


def residual_blocks(count: int) -> Graph:
    """Blocks of two convolutions each, all of 16 channels, from image to image."""
    net = Net()
    value = net.add("Relu", net.conv("x", 16, 16))
    for _ in range(count):
        inner = net.add("Relu", net.conv(value, 16, 16))
        value = net.add("Relu", net.add("Add", net.conv(inner, 16, 16), value))
    return net.graph((1, 16, 7, 9), value, (1, 16, 7, 9))


def feeds(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {n: rng.standard_normal(graph.types[n].shape).astype(np.float32) for n in graph.inputs}


def segments_of(rank: RankModel) -> list[int]:
    return [index for index, step in enumerate(rank.steps) if isinstance(step, Segment)]


def kernels(graph: Graph, starts: Iterable[int], folder: Path) -> list[list[str]]:
    """The operators that each segment runs; every node belongs to a kernel of its own segment."""
    models = emit_models(in_phases(uncut_programs(graph), list(starts)), graph)
    config = SessionConfig(profile=folder, optimized=folder)
    simulator = Simulator(models, configs={0: config})
    simulator.run([feeds(graph)])
    (executor,) = simulator.executors
    assert isinstance(executor, Executor)
    ops = []
    for index, files in sorted(executor.sessions.end_profiling().items()):
        (run,) = kernel_runs(files[0])
        nodes = executor.model.segment(index).nodes
        owners = nodes_of_kernels(nodes, executor.sessions.graph_of(index))
        assert sum(map(len, owners.values())) == len(nodes)
        assert owners.keys() <= {kernel.name for kernel in run}
        ops.append([kernel.op for kernel in run])
    return ops


needs_blocked_layouts = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="ONNX Runtime may have no blocked layouts here",
)


@needs_blocked_layouts
def test_images_cross_borders_blocked(tmp_path: Path) -> None:
    """As many kernels as in one session, and none between segments changes a layout."""
    graph = residual_blocks(3)
    per_segment = kernels(graph, [2, 7, 12], tmp_path)
    assert per_segment == [
        ["ReorderInput", "Conv"],
        ["Conv", "Conv"],
        ["Conv", "Conv"],
        ["Conv", "Conv", "ReorderOutput"],
    ]


@needs_blocked_layouts
def test_every_cut_computes_the_same() -> None:
    """Of each kind of value: sums over borders, images with odd channels, values read twice."""
    graph = image_net()
    fed = feeds(graph)
    (exact,) = Simulator(emit_models(uncut_programs(graph), graph)).run([fed])
    count = len(graph.nodes)
    for starts in [*([at] for at in range(1, count)), range(count), range(0, count, 3)]:
        models = emit_models(in_phases(uncut_programs(graph), list(starts)), graph)
        (cut,) = Simulator(models, optimization="all").run([fed])
        for name, expected in exact.outputs.items():
            np.testing.assert_allclose(cut.outputs[name], expected, rtol=1e-5, atol=1e-5)


def test_segments_of_blocks_plain_ones_and_those_with_bodies_stay_apart() -> None:
    body = helper.make_graph([helper.make_node("Neg", ["image"], ["y"])], "body", [], [])
    node = helper.make_node("Relu", ["image"], ["y"])
    branches = helper.make_node("If", ["flag"], ["y"], then_branch=body, else_branch=body)
    assert joined._may_join(Segment(0, (node,)))
    assert not joined._may_join(Segment(0, (node,), block=0))
    assert not joined._may_join(Segment(0, (node,), plain=True))
    assert not joined._may_join(Segment(0, (node, branches)))


@needs_blocked_layouts
def test_a_segment_leaves_an_image_that_later_micro_batches_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What all micro-batches have in common is not freed, and no segment writes to it."""
    graph = residual_blocks(3)
    border = graph.nodes[6].outputs[0]
    simulator = Simulator(
        emit_models(in_phases(uncut_programs(graph), [2, 7, 12]), graph), optimization="all"
    )
    (executor,) = simulator.executors
    monkeypatch.setattr(executor, "_once", frozenset({border}))
    seen: list[np.ndarray] = []
    monkeypatch.setattr(
        executor,
        "observe",
        lambda _, values: seen.append(values[border].numpy().copy()) if border in values else None,
    )
    simulator.run([feeds(graph)])
    assert len(seen) == 3
    np.testing.assert_array_equal(seen[0], seen[-1])


def groups(graph: Graph, starts: Iterable[int], keep: Sequence[str] = ()) -> list[Group]:
    (message,) = emit_models(in_phases(uncut_programs(graph), list(starts)), graph)
    rank = load_rank(message, keep)
    return list(groups_of(rank, segments_of(rank)))


def test_values_that_are_kept_are_plain() -> None:
    graph = residual_blocks(2)
    (group,) = groups(graph, [2, 7])
    kept = graph.nodes[1].outputs[0]
    assert kept in group.images
    (other,) = groups(graph, [2, 7], [kept])
    assert other.images == group.images - {kept}
    models = emit_models(in_phases(uncut_programs(graph), [2, 7]), graph)
    values = [
        Simulator(models, keep={0: [kept]}, optimization=level).run([feeds(graph)])[0].values[0]
        for level in ("basic", "all")
    ]
    np.testing.assert_allclose(values[0][kept], values[1][kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [12, 24])
def test_channels_that_do_not_fill_blocks_of_either_size_cross_plain(channels: int) -> None:
    net = Net()
    value = net.add("Relu", net.conv("x", 16, channels, kernel=1))
    graph = net.graph((1, 16, 5, 5), net.conv(value, channels, 16, kernel=1), (1, 16, 5, 5))
    assert groups(graph, [2]) == []


def test_a_model_without_convolutions_has_no_groups() -> None:
    net = Net()
    value = net.add("Relu", "x")
    for _ in range(3):
        value = net.add("Add", net.add("Relu", value), value)
    graph = net.graph((1, 16, 5, 5), value, (1, 16, 5, 5))
    assert groups(graph, [1, 3, 5]) == []


def test_weights_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimized weights lie in a temporary file, of which nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    graph = residual_blocks(2)
    emit(in_phases(uncut_programs(graph), [2, 7]), graph, tmp_path)
    assert (tmp_path / "rank0.weights").exists()
    simulator = Simulator(tmp_path, optimization="all")
    assert list((tmp_path / "temporary").iterdir()) == []
    (exact,) = Simulator(tmp_path).run([feeds(graph)])
    for _ in range(2):
        (joined,) = simulator.run([feeds(graph)])
        for name, expected in exact.outputs.items():
            np.testing.assert_allclose(joined.outputs[name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_full", [False, True])
def test_without_a_temporary_folder_segments_are_not_joined(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none, or it has no room for the weights, as in many containers."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if is_full else tmp_path / "none"))
    graph = residual_blocks(2)
    models = emit_models(in_phases(uncut_programs(graph), [2, 7]), graph)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.warns(UserWarning, match="rank 0: 3 segments open one by one and run slower"):
            simulator = Simulator(models, optimization="all")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (exact,), (alone,) = (s.run([feeds(graph)]) for s in (Simulator(models), simulator))
    for name, expected in exact.outputs.items():
        np.testing.assert_allclose(alone.outputs[name], expected, rtol=1e-5, atol=1e-5)


def test_a_joined_graph_that_onnx_runtime_refuses_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Group, "joined", lambda _: onnx.ModelProto())
    graph = residual_blocks(2)
    models = emit_models(in_phases(uncut_programs(graph), [2, 7]), graph)
    with pytest.warns(UserWarning, match=r"could not optimize them .*: rank 0: ONNX Runtime: ."):
        simulator = Simulator(models, optimization="all")
    (exact,), (alone,) = (s.run([feeds(graph)]) for s in (Simulator(models), simulator))
    for name, expected in exact.outputs.items():
        np.testing.assert_allclose(alone.outputs[name], expected, rtol=1e-5, atol=1e-5)


SHAPE = (1, 16, 5, 7)


def there_and_back() -> hand.Case:
    """Rank 0 convolves, sends the image away and adds what comes back to a later convolution.

    What it sends is read again by two of its later segments, and what comes back by both.
    """
    image = hand.f32(*SHAPE)
    filters = {name: weights(16, 16, 3, 3) for name in ("w1", "w2", "w3", "w4")}
    types: Mapping[str, Any] = dict.fromkeys("xabcdefghy", image)

    def send(seq: int, source: int, target: int, *names: str, phase: int) -> Comm:
        moved = (hand.whole_to(source, target, SHAPE),)
        ends = phase, phase + 1
        return Comm(seq, CommKind.SEND, (0, 1), *names, "float32", moved, "", *ends)

    there = send(0, 0, 1, "b", "b1", phase=0)
    back = send(1, 1, 0, "r", "c", phase=1)

    def conv(before: str, weight: str, after: str, phase: int) -> Compute:
        return hand.op("Conv", f"{before} {weight}", after, phase, pads=(1, 1, 1, 1))

    first = [
        conv("x", "w1", "a", 0),
        hand.op("Relu", "a", "b", 0),
        there,
        back,
        conv("b", "w2", "d", 2),
        hand.op("Add", "d c", "e", 2),
        conv("e", "w3", "f", 3),
        hand.op("Add", "f b", "g", 3),
        hand.op("Add", "g c", "h", 3),
        conv("h", "w4", "y", 4),
    ]
    constants = {name: Part(name, None) for name in filters}
    ranks = (
        hand.rank(
            0,
            first,
            {**types, **{name: hand.f32(16, 16, 3, 3) for name in filters}},
            {"x": Part("x", None)},
            constants,
            outputs=[Output("y", "y", None)],
        ),
        hand.rank(
            1,
            [there, hand.op("Neg", "b1", "r", 1), back],
            dict.fromkeys(("b1", "r"), image),
        ),
    )
    x = hand.random(*SHAPE)
    return hand.Case(Programs(ranks, {"x": image}, {"y": image}), hand.graph(filters), {"x": x}, {})


@needs_blocked_layouts
@pytest.mark.parametrize("requests", [1, 3])
def test_what_is_sent_and_received_is_plain(requests: int) -> None:
    case = there_and_back()
    models = emit_models(case.programs, case.graph)
    rank = load_rank(models[0])
    (group,) = groups_of(rank, segments_of(rank))
    assert group.images == {"e", "h"}
    exact = Simulator(models).run([case.inputs] * requests)
    joined = Simulator(models, optimization="all").run([case.inputs] * requests)
    for one, other in zip(exact, joined, strict=True):
        np.testing.assert_allclose(other.outputs["y"], one.outputs["y"], rtol=1e-5, atol=1e-4)


def test_a_graph_that_computes_across_a_border_is_not_cut() -> None:
    """An optimization may let a later segment read what the plan does not hand to it."""
    graph = residual_blocks(1)
    (group,) = groups(graph, [2])
    (border,) = group.images
    make, domain = helper.make_node, "com.microsoft.nchwc"
    (result,) = group.segments[max(group.segments)].writes
    own = group.own_inputs(min(group.segments))["x"]
    kernels = [
        make("ReorderInput", [own], ["t0"], domain=domain),
        make("Conv", ["t0", "w"], ["t1"], domain=domain),
        make("ReorderOutput", ["t1"], [border], domain=domain),
    ]

    def plain(*last: NodeProto) -> frozenset[str]:
        tensors = [helper.make_tensor("w", 1, [1], [1.0])]
        proto = helper.make_graph([*kernels, *last], "g", [], [], tensors)
        return Optimized(group, onnx.helper.make_model(proto)).plain

    blocked = make("Conv", ["t1", "w"], ["t2"], domain=domain)
    done = make("ReorderOutput", ["t2"], [result], domain=domain)
    assert plain(blocked, done) == frozenset()
    assert plain(make("Neg", [border], [result])) == {border}
    across = make("Conv", ["t0", "w"], ["t2"], domain=domain)
    assert plain(across, done) == {border}


@needs_blocked_layouts
def test_images_that_are_made_plain_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no convolution has made is plain: the segments are opened by themselves."""
    net = Net()
    value = net.add("Relu", "x")
    graph = net.graph((1, 16, 5, 5), net.conv(value, 16, 16), (1, 16, 5, 5))
    seen: list[Optimized] = []
    monkeypatch.setattr(segments, "Optimized", lambda *of: seen.append(Optimized(*of)) or seen[-1])
    models = emit_models(in_phases(uncut_programs(graph), [1]), graph)
    Simulator(models, optimization="all").run([feeds(graph)])
    (one,) = seen
    assert one.plain == one.group.images == {value}

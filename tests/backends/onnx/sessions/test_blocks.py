"""Sessions of blocks: open while they run, the next one is opened meanwhile."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from helpers.onnx_files.onnx_models import model
from partitioner.api.verify.first_difference import uncut_programs
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.backends.onnx.files.steps import RankModel, Segment
from partitioner.backends.onnx.running.simulator import Simulator
from partitioner.backends.onnx.sessions import segments as block_sessions
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.evaluate import one_device
from partitioner.cost_model.schedule.task_list import LOAD_BYTES_PER_S
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.pieces.blocks import Blocks, Stretch
from partitioner.rewrites.block_graph import block_graph

WIDE = 128


def chain(*in_blocks: str) -> Graph:
    """Four products; those that are named are a block each."""
    names = ["a", "b", "c", "y"]
    nodes = [
        helper.make_node("MatMul", [before, f"{name}.w"], [name], name=name)
        for before, name in zip(["x", *names], names, strict=False)
    ]
    rng = np.random.default_rng(0)
    weights = {f"{n}.w": rng.standard_normal((WIDE, WIDE)).astype(np.float32) for n in names}
    tensor = ("float32", [2, WIDE])
    graph = load_onnx(model(nodes, {"x": tensor}, {"y": tensor}, weights)).graph
    return block_graph(graph, Blocks(tuple(Stretch(name, name, ()) for name in in_blocks)))


def simulator(graph: Graph) -> Simulator:
    return Simulator(emit_models(uncut_programs(graph), graph))


def test_a_block_opens_when_the_one_before_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def spy(rank: RankModel, segment: Segment, config: SessionConfig) -> ort.InferenceSession:
        opened.append(segment.nodes[0].name)
        return whole_open(rank, segment, config)

    whole_open = block_sessions.open_session
    monkeypatch.setattr(block_sessions, "open_session", spy)
    runs = simulator(chain("b", "c", "y"))
    assert opened == ["a"]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, WIDE)).astype(np.float32)}
    (first, second) = (runs.run([feeds])[0].outputs["y"] for _ in range(2))
    assert opened == ["a", *"bcy", *"bcy"]
    (executor,) = runs.executors
    sessions = executor.sessions
    assert sorted(sessions.resident) == [0]
    assert not sessions._opening
    expected = simulator(chain()).run([feeds])[0].outputs["y"]
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, expected)
    blocks = [step.block for step in executor.model.steps if isinstance(step, Segment)]
    assert blocks == [None, 0, 1, 2]


def test_an_error_of_a_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = simulator(chain("b", "c"))

    def fail(*_: object) -> None:
        raise BackendError("rank 0: no room")

    feeds = {"x": np.ones((2, WIDE), np.float32)}
    with monkeypatch.context() as patch:
        patch.setattr(block_sessions, "open_session", fail)
        with pytest.raises(BackendError, match="rank 0: no room"):
            runs.run([feeds])
    assert np.isfinite(runs.run([feeds])[0].outputs["y"]).all()


def test_memory_of_blocks() -> None:
    """Beside a block's own constants, those of the next are counted, and no others."""
    cluster, layer = resolve_cluster(None, 1), 4 * WIDE * WIDE
    for in_blocks, held in (("", 4), ("y", 4), ("by", 4), ("abcy", 2)):
        peak = one_device(chain(*in_blocks), cluster).exact_peak[0]
        assert peak.resident_bytes == held * layer
    whole, parts = (one_device(chain(*names), cluster).step_s for names in ("", "abcy"))
    assert parts - whole == pytest.approx(4 * layer / LOAD_BYTES_PER_S)


def test_a_malformed_block_is_refused() -> None:
    graph = chain("b")
    (proto,) = emit_models(uncut_programs(graph), graph)
    for entry in proto.graph.node[1].metadata_props:
        entry.value = "-1"
    with pytest.raises(BackendError, match="rank 0: node 'b' has block '-1'"):
        Simulator([proto])


def test_files_name_the_blocks() -> None:
    graph = chain("b", "c")
    (proto,) = emit_models(uncut_programs(graph), graph)
    keys = [[(e.key, e.value) for e in node.metadata_props] for node in proto.graph.node]
    assert keys == [[], [("partitioner.block", "0")], [("partitioner.block", "1")], []]

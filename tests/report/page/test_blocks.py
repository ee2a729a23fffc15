"""Folding: the repeats that people mean, proper nesting, and levels that stay small."""

import numpy as np
import pytest

from partitioner import examples
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.types import TensorType
from partitioner.report.page.blocks import MAX_ENTRIES, MAX_INSIDE, Block, Repeat, blocks, repeats


def _row(text: str) -> list[Repeat]:
    row = np.array([ord(c) for c in text])
    return repeats(row, np.ones(len(row), np.int64))


def test_repeats_of_a_row() -> None:
    assert _row("xabcdefabcdefabcdefy") == [Repeat(1, 6, 3)]
    assert _row("abcdefgh") == []
    assert _row("ababab") == []  # too short to be worth folding
    assert _row("") == []
    two = _row("abcdabcdabcd" + "-" + "efghijefghij")
    assert [(r.start, r.period, r.count) for r in two] == [(0, 4, 3)]  # 6 hidden are too few
    two = _row("abcdabcdabcd" + "-" + "efghijklmefghijklm")
    assert [(r.start, r.period, r.count) for r in two] == [(0, 4, 3), (13, 9, 2)]


def test_a_repeat_begins_where_little_is_carried_over() -> None:
    row = np.array([ord(c) for c in "zabcdabcdabcdabcdab"])
    width = np.array([2, 2, 2, 1, 2] + [2, 2, 1, 2] * 3 + [2, 2])
    (found,) = repeats(row, width)
    assert (found.start, found.period, found.count) == (3, 4, 4)


def test_resnet_blocks() -> None:
    graph = load_onnx(examples.build("resnet50")).graph
    found = blocks(graph, [0] * len(graph.nodes))
    _check_level(found, 0, len(graph.nodes) - 1)
    repeated = [block for block in _all(found) if block.count > 1]
    assert sorted({block.count for block in repeated}) == [2, 3, 5]  # less each stage's first
    assert all(graph.nodes[block.first].op == "Conv" for block in repeated)
    assert len({block.kind for block in repeated}) == 4


def _all(found: list[Block]) -> list[Block]:
    return [block for outer in found for block in (outer, *_all(outer.inner))]


def test_layers_of_a_transformer() -> None:
    graph = load_onnx(examples.build("llama", layers=3)).graph
    found = blocks(graph, [0] * len(graph.nodes))
    assert [(block.index, block.count) for block in found] == [(0, 3), (1, 3), (2, 3)]
    inside = {node.name.split(".")[2] for node in graph.nodes[found[1].first : found[1].last + 1]}
    assert "1" in inside


@pytest.mark.parametrize("count", [100, 1_000, 5_000])
def test_a_graph_without_repeats_stays_small_on_every_level(count: int) -> None:
    graph = _chain(count)
    groups = [position * 4 // count for position in range(count)]
    found = blocks(graph, groups)
    _check_level(found, 0, count - 1)


def _check_level(found: list[Block], first: int, last: int, most: int = MAX_ENTRIES) -> None:
    shown = last - first + 1 - sum(len(block) - 1 for block in found)
    assert shown <= most
    at = first
    for block in found:
        assert at <= block.first <= block.last <= last
        at = block.last + 1
        if len(block) < last - first + 1:
            _check_level(block.inner, block.first, block.last, MAX_INSIDE)


def test_chunks_end_where_the_group_changes() -> None:
    groups = [0] * 95 + [1] * 105
    found = blocks(_chain(200), groups)
    assert all(len({groups[i] for i in range(b.first, b.last + 1)}) == 1 for b in found)


def _chain(count: int) -> Graph:
    """Every node of another size, so that nothing repeats."""
    names = [f"v{i}" for i in range(count + 1)]
    types = {name: TensorType.of("float32", (i + 1,)) for i, name in enumerate(names)}
    nodes = tuple(Node(f"n{i}", "custom::Op", (names[i],), (names[i + 1],)) for i in range(count))
    return Graph("chain", (names[0],), (names[-1],), nodes, types, {}, {"": 17, "custom": 1})

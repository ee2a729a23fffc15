"""Folding of a graph: its repeats, blocks that nest, and levels that stay small."""

from collections.abc import Sequence

import numpy as np
import pytest

from partitioner import examples
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.pieces.folding import (
    MAX_ENTRIES,
    MAX_INSIDE,
    Block,
    blocks,
    module_path,
    repeats,
)
from partitioner.ir.pieces.repeats import Floats
from partitioner.ir.types import TensorType


def _repeats(text: str, crossing: Floats | None = None) -> list[tuple[int, int, int]]:
    """(start, period, count) of each repeat in a row of letters."""
    kinds = np.array([ord(c) for c in text], np.int64)
    stretches = repeats(kinds, np.ones(len(kinds)) if crossing is None else crossing)
    return [(stretch.start, stretch.period, stretch.count) for stretch in stretches]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("xabcdefabcdefabcdefy", [(1, 6, 3)]),
        ("abcdefgh", []),
        ("ababab", []),  # too short to be worth folding
        ("", []),
        ("abcdabcdabcd" + "-" + "efghijefghij", [(0, 4, 3)]),  # 6 hidden are too few
        ("abcdabcdabcd" + "-" + "efghijklmefghijklm", [(0, 4, 3), (13, 9, 2)]),
    ],
)
def test_repeats_of_a_row(text: str, expected: list[tuple[int, int, int]]) -> None:
    assert _repeats(text) == expected


def test_a_repeat_begins_where_few_values_cross() -> None:
    crossing = np.array([2.0, 2, 2, 1, 2] + [2, 2, 1, 2] * 3 + [2, 2])
    assert _repeats("zabcdabcdabcdabcdab", crossing) == [(3, 4, 4)]


def test_a_repeat_gives_way_to_a_better_one_where_they_overlap() -> None:
    crossing = np.array([1.0] + [2] * 10 + [1] + [2] * 12)
    assert _repeats("abcdabcdabcd" + "efgdefgdefgd", crossing) == [(0, 4, 3), (12, 4, 3)]


def test_resnet_blocks() -> None:
    graph = load_onnx(examples.build("resnet50")).graph
    outer = blocks(graph, [0] * len(graph.nodes))
    _check_level(outer, 0, len(graph.nodes) - 1)
    repeated = [block for block in _all(outer) if block.count > 1]
    assert sorted({block.count for block in repeated}) == [2, 3, 5]  # less each stage's first
    assert all(graph.nodes[block.first].op == "Conv" for block in repeated)
    assert len({block.kind for block in repeated}) == 4


def _all(level: Sequence[Block]) -> list[Block]:
    return [block for outer in level for block in (outer, *_all(outer.inner))]


def test_layers_of_a_transformer() -> None:
    graph = load_onnx(examples.build("llama", layers=3)).graph
    outer = blocks(graph, [0] * len(graph.nodes))
    assert [(block.index, block.count) for block in outer] == [(0, 3), (1, 3), (2, 3)]
    inside = {node.name.split(".")[2] for node in graph.nodes[outer[1].first : outer[1].last + 1]}
    assert "1" in inside


@pytest.mark.parametrize("count", [100, 1_000, 5_000])
def test_a_graph_without_repeats_stays_small_on_every_level(count: int) -> None:
    graph = _chain(count)
    groups = [position * 4 // count for position in range(count)]
    _check_level(blocks(graph, groups), 0, count - 1)


def _check_level(level: Sequence[Block], first: int, last: int, most: int = MAX_ENTRIES) -> None:
    shown = last - first + 1 - sum(len(block) - 1 for block in level)
    assert shown <= most
    at = first
    for block in level:
        assert at <= block.first <= block.last <= last
        at = block.last + 1
        if len(block) < last - first + 1:
            _check_level(block.inner, block.first, block.last, MAX_INSIDE)


def test_chunks_end_where_the_group_changes() -> None:
    groups = [0] * 95 + [1] * 105
    chunks = blocks(_chain(200), groups)
    assert chunks
    assert all(len({groups[i] for i in range(b.first, b.last + 1)}) == 1 for b in chunks)


def _chain(count: int) -> Graph:
    """Every node of another size, so that nothing repeats."""
    names = [f"v{i}" for i in range(count + 1)]
    types = {name: TensorType.of("float32", (i + 1,)) for i, name in enumerate(names)}
    nodes = tuple(Node(f"n{i}", "custom::Op", (names[i],), (names[i + 1],)) for i in range(count))
    return Graph("chain", (names[0],), (names[-1],), nodes, types, {}, {"": 17, "custom": 1})


def test_the_module_path_joins_numbers_to_what_they_count() -> None:
    assert module_path("/blocks/0/q/addmm") == ("blocks.0", "q")
    assert module_path("model.layers.12.mlp.up.MatMul") == ("model", "layers.12", "mlp", "up")
    assert module_path("n3") == ()

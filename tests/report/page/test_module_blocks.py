"""The blocks of a training graph: modules of a pass on a set of devices."""

import pytest

import partitioner
from helpers.modules import small_gpt
from partitioner.api.compiled.base import Compiled
from partitioner.ir.pieces.folding import paths
from partitioner.report.page.module_blocks import ModuleBlocks
from partitioner.report.schema import BlockRow

PARTS = ("forward", "backward")


@pytest.fixture(scope="module")
def program() -> Compiled:
    model, arguments = small_gpt.small_gpt(layers=2)
    return partitioner.compile(
        model, arguments, 2, training=True, parallel="dp", plan_only=True, time_limit_s=2
    )


def numbers(block: BlockRow) -> set[int]:
    runs = zip(block["nodes"][::2], block["nodes"][1::2], strict=True)
    return {number for first, last in runs for number in range(first, last + 1)}


def rows_of(program: Compiled) -> list[BlockRow]:
    groups = [program.plan.nodes[node.name].group for node in program.graph.nodes]
    return ModuleBlocks(program.graph, groups, paths(program.graph, groups)).rows()


def test_layers_of_both_passes_are_blocks_by_name(program: Compiled) -> None:
    outer = [row for row in rows_of(program) if row["parent"] < 0]
    labels = {part: [row["label"] for row in outer if row["part"] == part] for part in PARTS}
    for part in PARTS:
        assert {"blocks.0", "blocks.1"} <= set(labels[part])
    assert labels["forward"].index("blocks.0") < labels["forward"].index("blocks.1")
    assert labels["backward"].index("blocks.0") > labels["backward"].index("blocks.1")
    held = set().union(*map(numbers, outer))
    assert len(held) > 0.9 * len(program.graph.nodes)
    assert sum(len(numbers(row)) for row in outer) == len(held)
    first, second = (
        row for row in outer if row["label"].startswith("blocks.") and row["part"] == "forward"
    )
    assert first["kind"] == second["kind"]
    assert (first["index"], second["index"], second["count"]) == (0, 1, 2)


def test_gradients_go_from_layer_to_layer(program: Compiled) -> None:
    outer = [row for row in rows_of(program) if row["parent"] < 0 and row["part"] == "backward"]
    of = {node: row["label"] for row in outer for node in numbers(row)}
    graph = program.graph
    made = {(of.get(graph.order[graph.producers[value].name]), of.get(at))
            for at, node in enumerate(graph.nodes) for value in node.reads
            if value in graph.producers}  # fmt: skip
    assert {("norm", "blocks.1"), ("blocks.1", "blocks.0")} <= made
    assert ("norm", "blocks.0") not in made


def test_blocks_are_of_one_pass_and_inside_what_holds_them(program: Compiled) -> None:
    rows, nodes = rows_of(program), program.graph.nodes
    for row in rows:
        backward = {nodes[node].name in program.graph.backward for node in numbers(row)}
        assert backward == {row["part"] == "backward"}
        assert (row["first"], row["last"]) == (min(numbers(row)), max(numbers(row)))
        if row["parent"] >= 0:
            assert numbers(row) < numbers(rows[row["parent"]])
            assert row["label"].startswith(rows[row["parent"]]["label"])

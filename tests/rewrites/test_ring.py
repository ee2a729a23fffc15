"""Rings of steps compute what attention computes, and their layouts are those of one part each."""

import pytest
import torch
from torch import Tensor

from helpers.op_rows.aten_calls import run_node
from helpers.op_rows.rings import RESULTS, attention
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, LayoutError, folded_cut
from partitioner.ir.loops.windows import Parts
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.rule import Rule
from partitioner.rewrites.ring import STEP, ring, ring_of


def computed(graph: Graph) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(graph.types[n].shape, generator=generator) for n in graph.inputs}
    if "m" in values:
        values["m"] = values["m"] > 0
    for node in graph.nodes:
        made = run_node(node, values, torch.device("cpu"))
        values |= {n: x for n, x in zip(node.outputs, made, strict=True) if n and x is not None}
    return {name: values[name] for name in RESULTS}


@pytest.mark.parametrize("form", ["causal", "plain", "mask"])
@pytest.mark.parametrize(("parts", "rows"), [(2, 8), (2, 5), (3, 13), (4, 21), (5, 11)])
def test_steps_give_what_attention_gives(parts: int, rows: int, form: str) -> None:
    graph = attention(rows, causal=form == "causal", mask=form == "mask")
    rounds = ring(graph, parts)
    assert sum(node.op == STEP for node in rounds.nodes) == parts
    whole, steps = computed(graph), computed(rounds)
    for name in RESULTS:
        torch.testing.assert_close(steps[name], whole[name], atol=5e-6, rtol=1e-5)


def test_the_graph_of_a_plan_is_found_by_the_names_of_its_steps() -> None:
    graph = attention(12, causal=True)
    rounds = ring(graph, 3)
    assert ring_of(graph, rounds.by_name).digest == rounds.digest
    assert ring_of(graph, graph.by_name) is graph
    assert {rounds.twins[n.name] for n in rounds.nodes if n.name in rounds.backward} == {
        "a/ring3/step0"
    }


def test_short_sequences_have_no_ring() -> None:
    short = attention(5, causal=True)
    assert ring(short, 3) is short


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("parts", "rows"), [(2, 8), (3, 13), (4, 21)])
def test_each_device_has_one_part(parts: int, rows: int, causal: bool) -> None:
    """Over all steps, the keys that a device reads are those of each part once."""
    rounds = ring(attention(rows, causal=causal), parts)
    mesh = DeviceMesh.line(parts, "x")
    single = {"w": DimLayout.even(parts, ("x",), mesh)}
    held = [0] * parts
    for node in rounds.nodes:
        rule = rule_of(rounds, node)
        if node.op == STEP and isinstance(rule, Rule):
            (_, keys, *_), _ = rule.shardings(single, mesh)
            held = [a + b for a, b in zip(held, keys.dims[2].sizes(), strict=True)]
    assert held == [rows] * parts


def test_parts_are_cut_in_one_way_only() -> None:
    parts, mesh = Parts(((2, 0), (0, 3))), DeviceMesh.line(2, "x")
    single = DimLayout.even(2, ("x",), mesh)
    assert parts.layout(single) == DimLayout.cut(("x",), [(2, 3)])
    assert parts.positions(DimLayout.cut(("x",), [(2, 3)]), 2) == single
    assert parts.positions(DimLayout.cut(("x",), [(3, 2)]), 2) is None
    assert parts.elements(DimLayout.whole(2)) is None
    with pytest.raises(LayoutError, match=r"a loop over parts is cut into single ones, not x:2,0"):
        parts.layout(DimLayout.cut(("x",), [(2, 0)]))


def test_parts_from_either_end() -> None:
    assert folded_cut(13, 3) == (
        *((3, 0, 0), (0, 2, 0), (0, 0, 2)),
        *((0, 0, 2), (0, 2, 0), (2, 0, 0)),
    )

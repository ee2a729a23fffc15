"""Loads of experts in rules, strategies and prices, on a layer that is written by hand."""

from functools import cache
from typing import Any

import pytest

from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, stand_in
from partitioner.cost_model.prices.collectives import dispatch_comms
from partitioner.cost_model.prices.compute import node_seconds
from partitioner.ir.exchange import sent_numel
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout
from partitioner.ir.loops.factors import Dispatch
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.nodes.loads import LoadsError, with_loads
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import PlacedNode, Plan, PlanError, place, resolve
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType
from partitioner.strategies.derive import Rules, strategies

EXPERTS, WIDTH, INNER, TOKENS = 8, 64, 32, 64
MESH = DeviceMesh.of({"ep": 4})
NODE = "/moe/experts"
#: Half of the tokens choose the first expert.
LOADS = (7.0, *[1.0] * 7)


def layer(chosen: int = 1) -> Graph:
    """A layer of experts whose first products are kept."""
    floats = {
        "x": (TOKENS, WIDTH),
        "weights": (TOKENS, chosen),
        "moe.up": (EXPERTS, 2 * INNER, WIDTH),
        "moe.down": (EXPERTS, WIDTH, INNER),
        "y": (TOKENS, WIDTH),
        "kept": (TOKENS, chosen, 2 * INNER),
    }
    types = {name: TensorType.of("float32", shape) for name, shape in floats.items()}
    types["ids"] = TensorType.of("int64", (TOKENS, chosen))
    inputs = ("x", "ids", "weights", "moe.up", "moe.down")
    attrs: dict[str, Any] = {"activation": "silu", "gated": True, "keep": True, "size": EXPERTS}
    attrs |= {"starts": (0,), "lengths": (EXPERTS,)}
    node = Node(NODE, "partitioner::experts", inputs, ("y", "kept"), attrs)
    return Graph("layer", inputs, ("y",), (node,), types, {}, {"aten": 1})


@cache
def loaded() -> Graph:
    return with_loads(layer(), (("moe", LOADS),))


@cache
def cluster() -> Cluster:
    return resolve_cluster("ideal", 4)


def evenly(graph: Graph, mesh: DeviceMesh = MESH) -> PlacedNode:
    """Tokens and experts cut evenly."""
    rule = rule_of(graph, graph.nodes[0])
    assert isinstance(rule, Rule)
    sizes = {"t": TOKENS, "e": EXPERTS}
    cut = {name: DimLayout.even(size, ("ep",), mesh) for name, size in sizes.items()}
    return place(graph, graph.nodes[0], mesh, cut, rule)


def test_seconds_are_those_of_the_experts_of_a_device() -> None:
    """The first device has 8 of 14 parts of the work, and the others 2."""
    seconds = node_seconds(loaded(), evenly(loaded()), cluster())
    without = node_seconds(layer(), evenly(layer()), cluster())
    for device, part in enumerate((8, 2, 2, 2)):
        assert seconds[device] == pytest.approx(without[device] * 4 * part / 14)


def test_on_large_meshes_the_busiest_device_counts() -> None:
    even = EvenMesh(MESH, stand_in(MESH), cluster())
    for graph in (layer(), loaded()):
        stood_in = even.node_seconds(graph, evenly(graph, even.model))
        assert stood_in == pytest.approx(
            max(node_seconds(graph, evenly(graph), cluster()).values())
        )


def test_devices_are_sent_the_tokens_of_their_experts() -> None:
    """Each device has 16 tokens; the first one's two experts get 8 of 14."""
    _, there, back = (sent_numel(comm.transfers) for comm in dispatch_comms(evenly(loaded())))
    bytes_there, bytes_back = 4 * (WIDTH + 1) + 4 * 2, 4 * WIDTH
    for device, part in enumerate((8, 2, 2, 2)):
        assert there[device] == pytest.approx(16 * (1 - part / 14) * bytes_there, abs=3)
        assert back[device] == pytest.approx(3 * 16 * part / 14 * bytes_back, abs=3)


@pytest.mark.parametrize(("chosen", "owned"), [(1, [0, 3]), (2, [1, 2]), (3, [0])])
def test_the_expected_share_of_rows(chosen: int, owned: list[int]) -> None:
    """One choice is as its load says; the most loaded expert's tokens all come."""
    loads = (0.3, 0.1, 0.2, 0.15, 0.25)
    dispatch = Dispatch("t", "e", chosen, 0, 0, loads=loads)
    share, load = dispatch.share([(i, 1) for i in owned], 5), sum(loads[i] for i in owned)
    if chosen == 1:
        assert share == pytest.approx(load)
    assert chosen * max(loads[i] for i in owned) <= share + 1e-12
    assert share <= min(1.0, chosen * load) + 1e-12
    assert dispatch.share([(0, 5)], 5) == pytest.approx(1.0)
    equal = Dispatch("t", "e", chosen, 0, 0, loads=(0.2,) * 5).share([(0, 2)], 5)
    assert equal == pytest.approx(Dispatch("t", "e", chosen, 0, 0).share([(0, 2)], 5))


def test_the_most_loaded_expert_may_have_a_device_of_its_own() -> None:
    """Without loads there is no such cut."""
    for graph, balanced in ((layer(), False), (loaded(), True)):
        offered = strategies(graph, Rules.of(graph), MESH)[NODE]
        cuts = [placed.layouts["e"].sizes() for placed in offered if "e" in placed.layouts]
        assert ((1, 3, 2, 2) in cuts) is balanced
        assert cuts.count((2, 2, 2, 2)) == 2  # with tokens gathered, and sent
        loads = [max(placed.loads) for placed in offered if placed.loads]
        assert loads == pytest.approx([8 / 14, 0.5] * 2 if balanced else [])


def test_loads_are_no_part_of_the_digest_and_equal_ones_change_nothing() -> None:
    graph = layer(2)
    equal = with_loads(graph, ((NODE, (3.0,) * EXPERTS),))
    assert graph.digest == equal.digest == with_loads(graph, ()).digest
    ways = [strategies(one, Rules.of(one), MESH)[NODE] for one in (graph, equal)]
    assert [way.cut_text for way in ways[0]] == [way.cut_text for way in ways[1]]
    for way, other in zip(*ways, strict=True):
        seconds, others = (
            node_seconds(one, placed, cluster()) for one, placed in ((graph, way), (equal, other))
        )
        assert seconds == pytest.approx(others)


@pytest.mark.parametrize("pattern", ["moe.up", "*.down", "moe", "m?e", "/moe/*", "*"])
def test_layers_are_named_by_weights_modules_and_nodes(pattern: str) -> None:
    (node,) = with_loads(layer(), ((pattern, LOADS),)).nodes
    assert node.attrs["loads"] == pytest.approx([load / 14 for load in LOADS])


def test_of_several_patterns_the_last_counts() -> None:
    (node,) = with_loads(layer(), (("*", LOADS), ("moe", (1.0,) * 8))).nodes
    assert node.attrs["loads"] == pytest.approx([1 / 8] * 8)


def test_loads_whose_sum_is_no_number() -> None:
    (node,) = with_loads(layer(), (("moe", (1e308,) * EXPERTS),)).nodes
    assert node.attrs["loads"] == pytest.approx([1 / EXPERTS] * EXPERTS)


WRONG = {
    "name": (1, "moe.ip", LOADS, "no layer of experts has a weight, .*; did you mean 'moe.up'"),
    "count": (1, "*", (1.0, 2.0), r"2 numbers for a layer of 8 experts \('/moe/experts'\)"),
    "share": (3, "moe", LOADS, r"expert 0 of .* has 0.5 of the choices; .* at most 1/3 of them"),
}


@pytest.mark.parametrize("case", WRONG)
def test_loads_that_no_layer_can_have_are_refused(case: str) -> None:
    chosen, pattern, loads, refusal = WRONG[case]
    with pytest.raises(LoadsError, match=refusal):
        with_loads(layer(chosen), ((pattern, loads),))


@pytest.mark.parametrize(
    ("cut", "refusal"),
    [
        ("ep:1,1,1,1|1,1,1", "does not fit size 8 over 4 parts"),
        ("ep:1,1,1,1|1,1,1,0", "does not fit size 8 over 4 parts"),
        ("ep:4,4,0,0", "cut into parts of 4,4,0,0 over ep; every part must have at least 1"),
        ("ep:1,-1,4,4", "is not like 'tp'"),
    ],
)
def test_an_edited_plan_must_place_each_expert_once(cut: str, refusal: str) -> None:
    graph = loaded()

    def plan(cut: str) -> Plan:
        text = Plan(graph.digest, {}, (MESH,), {}).to_json()
        entry = f'"{NODE}": {{"group": 0, "cuts": {{"e": "{cut}", "t": "ep"}}}}'
        return Plan.from_json(text.replace('"nodes": {\n', '"nodes": {\n' + entry))

    (placed,) = resolve(graph, plan("ep:0,1,1,1|1,1,1,2"))
    assert placed.loads == pytest.approx([1 / 14, 8 / 14, 2 / 14, 3 / 14])
    with pytest.raises(PlanError, match=refusal):
        resolve(graph, plan(cut))

"""Strategies: cuts of classes, layouts that travel through data movement, no empty parts."""

import itertools
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from helpers.plans.whole_plans import build, weight
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.cost_model.evaluate import evaluate
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.loops.factors import FactorKind
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import PlacedNode
from partitioner.ir.rule import Rule
from partitioner.search.spaces import explicit
from partitioner.strategies.derive import (
    ClassCuts,
    Rules,
    _Propagation,
    axis_sets,
    strategies,
)

PAIR = DeviceMesh.line(2, "tp")
TRIO = DeviceMesh.line(3, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})
TP = ("tp",)
Strategies = Mapping[str, tuple[PlacedNode, ...]]


Speeds = Mapping[int, float]


def derived(graph: Graph, mesh: DeviceMesh, speeds: Speeds | None = None) -> Strategies:
    return strategies(graph, Rules.of(graph), mesh, () if speeds is None else (speeds,))


def test_strategies_are_derived_once_for_each_mesh_and_share() -> None:
    """Kinds, spaces and limits of memory share them; a search that the clock ends keeps none."""
    graph = load_onnx(examples.build("mlp", layers=2, hidden=16, batch=4)).graph

    def late() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        strategies(graph, Rules.of(graph), PAIR, check=late)
    first = derived(graph, PAIR)
    assert derived(graph, DeviceMesh.line(2, "tp")) is first
    assert derived(graph, PAIR, {0: 1.0, 1: 3.0}) is not first
    assert derived(graph, TRIO) is not first


def test_cuts_travel_once_however_many_halos_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, runs = load_onnx(examples.build("tiny")).graph, list[object]()
    run = _Propagation.run

    def counted(self: _Propagation) -> Any:
        runs.append(self)
        return run(self)

    monkeypatch.setattr(_Propagation, "run", counted)
    plain, *fused = (strategies(graph, Rules.of(graph), PAIR, fused=most) for most in (0, 1, 2))
    assert len(runs) == 1
    assert all(any(len(of[n]) > len(plain[n]) for n in plain) for of in fused)
    assert derived(graph, PAIR) == plain  # none has changed the cuts of the others


def _reach(options: Strategies, steps: tuple[tuple[str, str], ...]) -> set[Placement]:
    """Placements of the last value that cut strategies of all nodes hand on without reshards.

    Steps are (node, value that it makes), each read by the next one's node.
    """
    reached: set[Placement] | None = None
    before = ""
    for name, value in steps:
        fits = [
            placed
            for placed in options[name]
            if placed.layouts and (reached is None or dict(placed.operands())[before] in reached)
        ]
        reached = {dict(placed.results())[value] for placed in fits}
        before = value
    return reached or set()


def qkv(
    heads: int = 4, size: int = 3, axis_mesh: DeviceMesh = PAIR, speeds: Speeds | None = None
) -> Strategies:
    """x @ W_qkv -> Split -> Reshape to heads -> q @ k^T."""
    width, rows = heads * size, 5
    nodes = [
        Node("fused", "MatMul", ("x", "w"), ("f",)),
        Node("split", "Split", ("f", "sizes"), ("q", "k", "v"), {"axis": -1}),
        *(Node(f"heads_{n}", "Reshape", (n, "shape"), (f"{n}h",)) for n in ("q", "k", "v")),
        Node("qt", "Transpose", ("qh",), ("qt",), {"perm": (1, 0, 2)}),
        Node("kt", "Transpose", ("kh",), ("kt",), {"perm": (1, 2, 0)}),
        Node("scores", "MatMul", ("qt", "kt"), ("s",)),
        Node("flat", "Reshape", ("vh", "back"), ("y",)),
    ]
    shapes = {
        "x": (rows, 6),
        "f": (rows, 3 * width),
        **dict.fromkeys(("q", "k", "v", "y"), (rows, width)),
        **dict.fromkeys(("qh", "kh", "vh"), (rows, heads, size)),
        "qt": (heads, rows, size),
        "kt": (heads, size, rows),
        "s": (heads, rows, rows),
    }
    constants = {
        "w": weight(6, 3 * width),
        "sizes": np.array([width] * 3),
        "shape": np.array([rows, heads, size]),
        "back": np.array([rows, width]),
    }
    return derived(build(nodes, shapes, ["x"], ["s", "y"], constants), axis_mesh, speeds)


def test_fused_projection_splits_into_heads() -> None:
    options = qkv()
    for value in "qk":
        heads = _reach(
            options,
            (("fused", "f"), ("split", value), (f"heads_{value}", f"{value}h"), (f"{value}t",) * 2),
        )
        assert any(
            at.sharding.dims[0].sizes() == (2, 2) for at in heads if at.sharding.dims[0].axes
        )
    cut = next(p for p in options["scores"] if any(a.sharding.dims[0].axes for _, a in p.results()))
    assert all(at.sharding.dims[0].axes for _, at in cut.operands())
    fused = {dict(p.results())["f"].sharding.dims[1] for p in options["fused"]}
    assert any(len(layout.segments) == 3 for layout in fused), "q, k and v are cut each"


@pytest.mark.parametrize(("mesh", "sizes"), [(PAIR, (48, 32)), (TRIO, (32, 32, 16))], ids=str)
def test_five_heads_of_sixteen(mesh: DeviceMesh, sizes: tuple[int, ...]) -> None:
    """Cut between heads, q, k and v alike: 48 and 32, not 40 and 40."""
    options = qkv(5, 16, mesh)
    fused = {dict(p.results())["f"].sharding.dims[1].segments for p in options["fused"]}
    assert (sizes,) * 3 in fused
    for value in "qk":
        steps = (("fused", "f"), ("split", value), (f"heads_{value}", f"{value}h"))
        heads = _reach(options, (*steps, (f"{value}t", f"{value}t")))
        assert any(at.sharding.dims[0].sizes() == tuple(s // 16 for s in sizes) for at in heads)


def _fused_cuts(options: Strategies, axis: str) -> set[tuple[tuple[int, ...], ...]]:
    """Segments of the cuts of a fused projection's columns."""
    return {
        placed.layouts["n"].segments
        for placed in options["fused"]
        if "n" in placed.layouts and placed.layouts["n"].axes == (axis,)
    }


@pytest.mark.parametrize(("mesh", "axis"), [(PAIR, "tp"), (GRID, "dp")], ids=str)
def test_every_balanced_cut_stays_and_has_one_by_speed(mesh: DeviceMesh, axis: str) -> None:
    """Also where few cuts are kept: the finest of each kind."""
    half = mesh.size() // 2
    speeds = {device: 3.0 if device < half else 1.0 for device in mesh.devices}
    balanced = _fused_cuts(qkv(8, 16, mesh), axis)
    by_speed = {tuple((a + b // 2, b - b // 2) for a, b in cuts) for cuts in balanced}
    assert len(balanced) >= 2
    assert balanced | by_speed <= _fused_cuts(qkv(8, 16, mesh, speeds), axis)


def test_heads_by_speed() -> None:
    """Eight heads at speeds 3:1 are six and two, in q, k and v alike; four and four stay."""
    options = qkv(8, 16, PAIR, {0: 3.0, 1: 1.0})
    assert {((96, 32),) * 3, ((64, 64),) * 3} <= _fused_cuts(options, "tp")
    for value in "qk":
        steps = (("fused", "f"), ("split", value), (f"heads_{value}", f"{value}h"))
        heads = _reach(options, (*steps, (f"{value}t", f"{value}t")))
        assert {(6, 2), (4, 4)} <= {at.sharding.dims[0].sizes() for at in heads}


def test_equal_speeds_offer_what_no_speeds_do() -> None:
    assert qkv(5, 16, GRID, dict.fromkeys(range(4), 7e8)) == qkv(5, 16, GRID)


def test_concat_of_shards_reaches_the_next_op() -> None:
    nodes = [
        Node("a", "MatMul", ("x", "wa"), ("ha",)),
        Node("b", "MatMul", ("x", "wb"), ("hb",)),
        Node("join", "Concat", ("ha", "hb"), ("h",), {"axis": -1}),
        Node("act", "Relu", ("h",), ("r",)),
        Node("out", "MatMul", ("r", "wo"), ("y",)),
    ]
    shapes = {"x": (2, 3), "ha": (2, 4), "hb": (2, 6), "h": (2, 10), "r": (2, 10), "y": (2, 4)}
    weights = {"wa": weight(3, 4), "wb": weight(3, 6), "wo": weight(10, 4)}
    options = derived(build(nodes, shapes, ["x"], ["y"], weights), PAIR)
    for start in ("a", "b"):
        steps = ((start, f"h{start}"), ("join", "h"), ("act", "r"), ("out", "y"))
        ends = _reach(options, steps)
        assert any(at.sharding.partial for at in ends), "the last product reduces over the segments"


def test_pointwise_ops_follow() -> None:
    """Relu has the layouts that its neighbours give it, and no other."""
    nodes = [Node("mm", "MatMul", ("x", "w"), ("h",)), Node("act", "Relu", ("h",), ("y",))]
    wide = {"x": (1, 4), "h": (1, 6), "y": (1, 6)}
    options = derived(build(nodes, wide, ["x"], ["y"], {"w": weight(4, 6)}), PAIR)
    made = {dict(p.results())["h"].without_partial().sharding for p in options["mm"]}
    taken = {dict(p.operands())["h"].sharding for p in options["act"]}
    assert taken == made
    assert len(taken) == 2


def test_pointwise_ops_alone_cut_themselves() -> None:
    nodes = [Node("a", "Relu", ("x",), ("h",)), Node("b", "Neg", ("h",), ("y",))]
    options = derived(build(nodes, dict.fromkeys("xhy", (4, 6)), ["x"], ["y"]), PAIR)
    for name in "ab":
        assert [str(p.outs[0].sharding) for p in options[name] if p.outs[0]] == [
            "[-, -]",
            "[tp, -]",
            "[-, tp]",
        ]


def test_ops_without_a_rule_have_single_devices_only() -> None:
    graph = build([Node("odd", "custom::Op", ("x",), ("y",))], {"x": (4,), "y": (4,)}, ["x"], ["y"])
    assert derived(graph, PAIR)["odd"] == ()
    (alone,) = derived(graph, DeviceMesh.single(3))["odd"]
    assert alone.mesh.devices == (3,)
    assert list(Rules.of(graph).opaque) == ["odd"]
    assert Rules.of(graph).rule(graph.nodes[0]) is None


def test_a_single_device_has_one_strategy() -> None:
    graph = load_onnx(examples.build("tiny", size=4)).graph
    options = derived(graph, DeviceMesh.single(1))
    assert {len(placed) for placed in options.values()} == {1}
    assert not any(placed.layouts for (placed,) in options.values())


@pytest.mark.parametrize("mesh", [PAIR, TRIO, DeviceMesh.line(4, "tp"), GRID], ids=str)
@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_distinct_uncut_first_and_nothing_empty(name: str, mesh: DeviceMesh) -> None:
    sizes = {"tiny": {"size": 5, "channels": 3}, "llama": {"layers": 1, "hidden": 24, "seq": 3}}
    heads = {"heads": 6, "kv_heads": 3} if name == "llama" else {}
    graph = load_onnx(examples.build(name, **sizes[name], **heads)).graph
    for options in derived(graph, mesh).values():
        assert not options[0].layouts
        assert len({(placed.ins, placed.outs) for placed in options}) == len(options)
        for placed, (_, point) in itertools.product(options, mesh.coords()):
            for layout in placed.layouts.values():
                assert layout.local_size(mesh, point) > 0


def test_axis_sets() -> None:
    assert axis_sets(GRID) == (("dp",), ("tp",), ("dp", "tp"))
    assert axis_sets(DeviceMesh.single(0)) == ()


def test_two_axes_cut_two_factors_or_one() -> None:
    node = Node("mm", "MatMul", ("x", "w"), ("y",))
    graph = build([node], {"x": (8, 8), "y": (8, 8)}, ["x"], ["y"], {"w": weight(8, 8)})
    cuts = {
        tuple(sorted((name, "*".join(layout.axes)) for name, layout in placed.layouts.items()))
        for placed in derived(graph, GRID)["mm"]
    }
    assert len(cuts) == 1 + 3 * 3 + 3 * 2  # none; one factor over dp, tp or both; two factors
    assert (("k", "tp"), ("m", "dp")) in cuts
    assert (("n", "dp*tp"),) in cuts


def joined(*sizes: int) -> Rule:
    """A Concat: one class of as many factors."""
    names = [f"f{index}" for index in range(len(sizes))]
    return Rule.of(
        [[name] for name in names], [[" + ".join(names)]], [[n] for n in sizes], [[sum(sizes)]]
    )


def class_cuts(
    rule: Rule, mesh: DeviceMesh, share: tuple[float, ...], axes: tuple[str, ...] = TP
) -> list[dict[str, tuple[int, ...]]]:
    (link,) = rule.links
    cuts = ClassCuts(mesh, (share,)).of_class(rule, link, axes)
    return [{name: layout.sizes() for name, layout in cut.items()} for cut in cuts]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.integers(3, 60),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_linked_factors_are_cut_in_proportion_to_each_other(
    speeds: list[int], units: int, minors: list[int]
) -> None:
    """Heads of several sizes, say: as many of each on a device."""
    rule = joined(*(units * minor for minor in minors))
    even, *rest = class_cuts(rule, TRIO, tuple(map(float, speeds)))
    assert all(max(sizes) - min(sizes) <= 1 for sizes in even.values())
    assert len(rest) <= 1
    assert even not in rest
    for cut in rest:
        shares = {tuple(Fraction(size, sum(sizes)) for size in sizes) for sizes in cut.values()}
        assert len(shares) == 1
        assert min(map(min, cut.values())) >= 1
    if len(set(speeds)) == 1:
        assert not rest


def test_each_factor_by_itself_without_a_common_unit() -> None:
    even, shared = class_cuts(joined(17, 8), PAIR, (3.0, 1.0))
    assert even == {"f0": (9, 8), "f1": (4, 4)}
    assert shared == {"f0": (13, 4), "f1": (6, 2)}


def test_too_few_elements_have_the_balanced_cut_only() -> None:
    assert len(class_cuts(joined(2), TRIO, (3.0, 2.0, 1.0))) == 1
    assert len(class_cuts(joined(3), TRIO, (3.0, 2.0, 1.0))) == 1
    assert class_cuts(joined(8, 0), PAIR, (3.0, 1.0))[0] == {"f0": (4, 4), "f1": (0, 0)}


@pytest.mark.parametrize(
    ("axes", "sizes"),
    [(("dp",), (45, 15)), (("tp",), None), (("dp", "tp"), (24, 24, 6, 6))],
    ids=str,
)
def test_a_coordinate_is_as_fast_as_its_slowest_device(
    axes: tuple[str, ...], sizes: tuple[int, ...] | None
) -> None:
    """Two fast devices and two slow ones: over tp the slow ones bind, so all parts are equal."""
    speeds = (3.0, 4.0, 1.0, 1.0) if sizes is None or len(sizes) == 2 else (4.0, 4.0, 1.0, 1.0)
    cuts = class_cuts(joined(60), GRID, speeds, axes)
    assert cuts[1:] == ([{"f0": sizes}] if sizes else [])


@pytest.mark.parametrize(
    ("cut", "linked"), [((13, 4), (6, 2)), ((9, 8), (4, 4)), ((10, 7), (4, 4)), ((12, 5), (6, 2))]
)
def test_a_linked_factor_is_cut_as_the_first_one(
    cut: tuple[int, ...], linked: tuple[int, ...]
) -> None:
    share = (3.0, 1.0)
    choice = ClassCuts(PAIR, (share,))
    layouts = {"f0": DimLayout.cut(TP, [cut])}
    complete = choice.complete(joined(17, 8), TP, layouts)
    assert {name: layout.sizes() for name, layout in complete.items()} == {"f0": cut, "f1": linked}
    assert choice.nearest(layouts.values()) == (share if linked == (6, 2) else ())
    assert ClassCuts(PAIR, ()).nearest(layouts.values()) == ()


class _NoIteration(dict[str, Rule | str]):
    def items(self) -> Any:
        raise AssertionError("asked for all nodes")


def test_why_a_node_is_opaque_is_one_look() -> None:
    """A report asks it of every node: of 20,000 in a chain too."""
    node = Node("n", "Relu", ("x",), ("y",))
    assert Rules(_NoIteration(n="because")).why_opaque(node) == "because"
    assert not Rules(_NoIteration(n=Rule({}, (), (), (), ()))).why_opaque(node)


# Halos fused over chains of convolutions: taken where they pay, and nowhere else.

HEIGHT, LAYERS = 24, 4


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Four convolutions of 3 x 3, each after a ReLU: "a0", "c0", "a1" and so on."""
    nodes, value = [], "x"
    for layer in range(LAYERS):
        result = f"c{layer}" if layer + 1 < LAYERS else "y"
        nodes += [
            helper.make_node("Relu", [value], [f"a{layer}"], name=f"a{layer}"),
            helper.make_node("Conv", [f"a{layer}", "w"], [result], name=result, pads=[1] * 4),
        ]
        value = result
    weights = {"w": np.random.default_rng(0).normal(size=(4, 4, 3, 3)).astype(np.float32)}
    tensor = ("float32", [1, 4, HEIGHT, 10])
    model = onnx_models.model(nodes, {"x": tensor}, {"y": tensor}, weights)
    path = tmp_path / "chain.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def cluster(devices: int, latency_s: float, flops_per_s: float) -> Cluster:
    spec = DeviceSpec("made", {"float32": flops_per_s}, 1e12, 1 << 30, launch_s=0.0)
    return Cluster("made", (spec,) * devices, (LinkLevel("link", devices, 1e9, latency_s),))


def compiled(path: Path, devices: int, latency_s: float, flops_per_s: float) -> Compiled:
    made = cluster(devices, latency_s, flops_per_s)
    return partitioner.compile(
        path, cluster=made, parallel="spatial", mesh={"h": devices}, gap=0.0, time_limit_s=20
    )


def repeated_rows(result: Compiled) -> dict[str, int]:
    """Rows of each node that devices compute more than once."""
    layouts: dict[str, Any] = {
        name: cut.layout(HEIGHT, result.plan.groups[decision.group])
        for name, decision in result.plan.nodes.items()
        for cut in decision.cuts.values()
    }
    return {name: sum(layout.sizes()) - layout.size for name, layout in layouts.items()}


@pytest.mark.parametrize("devices", [2, 3])
def test_rows_are_computed_twice_where_messages_are_slow(chain: Path, devices: int) -> None:
    slow = compiled(chain, devices, latency_s=1e-2, flops_per_s=1e12)
    rows = repeated_rows(slow)
    assert [rows[f"c{layer}"] for layer in (0, 1, 2)] == [r * (devices - 1) for r in (6, 4, 2)]
    assert rows["y"] == 0
    assert slow.plan.certificate is not None
    assert slow.plan.certificate.cost == pytest.approx(slow.evaluation.step_s)
    assert slow.verify(seed=0).equal


@pytest.mark.parametrize("devices", [2, 3])
def test_no_row_is_computed_twice_where_messages_are_quick(chain: Path, devices: int) -> None:
    quick = compiled(chain, devices, latency_s=0.0, flops_per_s=1e6)
    assert not any(repeated_rows(quick).values())
    assert quick.verify(seed=0).equal


def test_the_choice_is_the_cheapest(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each latency, no dearer than the plans with and without rows computed twice."""
    for latency_s in (0.0, 1e-6, 1e-5, 1e-4):
        both = compiled(chain, 2, latency_s, flops_per_s=1e9).evaluation.step_s
        with monkeypatch.context() as patch:
            patch.setattr(explicit, "FUSED", ())
            plain = compiled(chain, 2, latency_s, flops_per_s=1e9)
        fused = compiled(chain, 2, latency_s=1.0, flops_per_s=1e9)
        made = cluster(2, latency_s, 1e9)
        fused_s = evaluate(fused.graph, fused.plan, made).step_s
        assert both <= min(plain.evaluation.step_s, fused_s) * (1 + 1e-9)


def test_rows_computed_twice_cost_their_flops(chain: Path) -> None:
    """The busiest device computes the rows of its windows, no more and no fewer."""
    result = compiled(chain, 2, latency_s=10.0, flops_per_s=1e6)
    flops = sum(2 * 4 * 4 * 9 * 10 * rows for rows in (12 + 3, 12 + 2, 12 + 1, 12))
    relus = 4 * 10 * (16 + 15 + 14 + 13)
    assert repeated_rows(result)["c0"] == 6
    assert result.evaluation.step_s == pytest.approx((flops + relus) / 1e6, rel=1e-3)


def test_only_loops_that_pass_have_parts_that_overlap(chain: Path) -> None:
    graph = partitioner.compile(chain, devices=1).graph
    rules, mesh = Rules.of(graph), DeviceMesh.of({"h": 2})
    offered = strategies(graph, rules, mesh, fused=4)
    plain = strategies(graph, rules, mesh)
    overlapping = 0
    for node in graph.nodes:
        assert offered[node.name][: len(plain[node.name])] == plain[node.name]
        for placed in offered[node.name]:
            assert placed.rule is not None
            names = [name for name, layout in placed.layouts.items() if layout.windows]
            assert all(placed.rule.factors[name].kind is FactorKind.PASS for name in names)
            overlapping += bool(names)
    assert overlapping
    assert not any(
        at.layouts and any(x.windows for x in at.layouts.values()) for at in offered["y"]
    )


def test_large_problems_are_offered_none(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explicit, "MOST_WITH_FUSED", 10)
    assert not any(repeated_rows(compiled(chain, 2, 1e-2, 1e12)).values())

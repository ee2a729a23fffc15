"""Prices by formula on a stand-in against prices of every device on the real mesh."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import pytest

from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.equal_devices.even_mesh import EvenMesh, EvenResharder, stand_in
from partitioner.cost_model.prices.compute import node_seconds
from partitioner.cost_model.prices.reshard import Hop, Resharder
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Placement, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import place
from partitioner.ir.program import CommKind
from partitioner.search.levels.stages import away
from partitioner.strategies.derive import Rules, strategies

_GPUS = resolve_cluster("4x4xh100")
#: Each communication takes a border beside its links.
CLUSTER = replace(_GPUS, devices=tuple(replace(one, border_s=7e-6) for one in _GPUS.devices))
SHAPES = [
    {"tp": 16},
    {"dp": 4, "tp": 4},
    pytest.param({"dp": 2, "tp": 8}, marks=pytest.mark.slow),
    pytest.param({"dp": 8, "tp": 2}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load_onnx(examples.build("llama", layers=1, hidden=256)).graph


def test_a_stand_in_has_the_axes_and_their_least_primes() -> None:
    assert stand_in(DeviceMesh.of({"dp": 128, "tp": 9})).axes == (("dp", 2), ("tp", 3))
    assert stand_in(DeviceMesh.of({"tp": 7})).axes == (("tp", 7),)
    assert stand_in(DeviceMesh.single(5)) == DeviceMesh.single(0)


class Case:
    """A mesh with the strategies of a graph on its stand-in that it admits."""

    def __init__(self, graph: Graph, shape: dict[str, int]) -> None:
        self.graph = graph
        self.mesh = DeviceMesh.of(shape)
        self.even = EvenMesh(self.mesh, stand_in(self.mesh), CLUSTER)
        rules = Rules.of(graph)
        offered = strategies(graph, rules, self.even.model)
        self.placed = [p for own in offered.values() for p in own if self.even.admits(p)]

    def layout(self, layout: DimLayout) -> DimLayout:
        """A layout of the stand-in on the mesh."""
        if not layout.axes:
            return layout
        parts = self.mesh.size(layout.axes)
        return DimLayout.cut(layout.axes, [(sum(c) // parts,) * parts for c in layout.segments])

    def real(self, at: Placement) -> Placement:
        dims = tuple(map(self.layout, at.sharding.dims))
        return Placement(self.mesh, Sharding(dims, at.sharding.partial))

    def pairs(self) -> Iterable[tuple[str, Placement, Placement]]:
        """Of every value: how it may be made, how it may be wanted."""
        made: dict[str, set[Placement]] = defaultdict(set)
        wanted: dict[str, set[Placement]] = defaultdict(set)
        for placed in self.placed:
            for value, at in placed.results():
                made[value].add(at)
            for value, at in placed.operands():
                wanted[value].add(at)
        for value, homes in made.items():
            for home, want in itertools.product(homes, wanted[value]):
                yield value, home, want


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_take_what_they_take_on_the_real_mesh(graph: Graph, shape: dict[str, int]) -> None:
    case = Case(graph, shape)
    assert len(case.placed) > len(graph.nodes)
    for placed in case.placed:
        layouts = {name: case.layout(layout) for name, layout in placed.layouts.items()}
        real = place(graph, placed.node, case.mesh, layouts, placed.rule)
        assert real.outs == tuple(at and case.real(at) for at in placed.outs)
        seconds = node_seconds(graph, real, CLUSTER)
        assert set(seconds.values()) == {case.even.node_seconds(graph, placed)}
        for (_, at), (value, there) in zip(placed.results(), real.results(), strict=True):
            dtype = graph.types[value].dtype
            assert set(there.local_bytes(dtype).values()) == {case.even.local_bytes(at, dtype)}


def busiest_s(hops: Iterable[Hop], *, beside: bool) -> float:
    load: Counter[int] = Counter()
    for hop in hops:
        for priced in hop.comms:
            load.update(priced.busy_seconds(beside=beside))
    return max(load.values(), default=0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reshards_take_what_they_take_on_the_real_mesh(graph: Graph, shape: dict[str, int]) -> None:
    case = Case(graph, shape)
    formula, exact = EvenResharder(CLUSTER, even=case.even, most_unlisted=0), Resharder(CLUSTER)
    kinds: Counter[str] = Counter()
    seen: set[tuple[str, Placement, Placement]] = set()
    for value, home, want in case.pairs():
        dtype = graph.types[value].dtype
        if (dtype, home, want) in seen or not formula.allows(home, want):
            continue
        seen.add((dtype, home, want))
        hops = formula.hops(dtype, home, want)
        kinds.update(str(priced.comm.kind) for hop in hops for priced in hop.comms)
        real = exact.hops(dtype, case.real(home), case.real(want))
        for beside in (False, True):
            real_s = busiest_s(real, beside=beside)
            assert busiest_s(hops, beside=beside) == pytest.approx(real_s, rel=1e-9), (value, want)
    expected = {"all_gather", "all_reduce", "reduce_scatter", "slice"}
    assert expected <= set(kinds), kinds


@pytest.mark.parametrize(
    ("shape", "axes", "kept", "other"),
    [
        ({"dp": 4, "tp": 4}, ("dp", "tp"), ("tp",), ()),
        ({"dp": 8, "tp": 2}, ("dp", "tp"), ("tp",), ()),
        ({"pod": 2, "dp": 4, "tp": 2}, ("dp", "tp"), ("tp",), ()),
        ({"pod": 2, "dp": 4, "tp": 2}, ("dp", "tp"), ("tp",), ("pod",)),
        ({"pod": 2, "dp": 4, "tp": 2}, ("pod", "dp", "tp"), ("pod", "tp"), ()),
    ],
    ids=str,
)
def test_a_dim_over_an_outer_axis_too_is_priced_as_on_the_real_mesh(
    graph: Graph,
    shape: dict[str, int],
    axes: tuple[str, ...],
    kept: tuple[str, ...],
    other: tuple[str, ...],
) -> None:
    """Devices do unlike work; the busiest counts."""
    case = Case(graph, shape)
    formula, exact = EvenResharder(CLUSTER, even=case.even, most_unlisted=0), Resharder(CLUSTER)
    more, less = (
        Placement(
            case.even.model,
            Sharding(
                (
                    DimLayout.even(96 * 1024, over, case.even.model),
                    DimLayout.even(64, other, case.even.model),
                )
            ),
        )
        for over in (axes, kept)
    )
    for home, want in ((more, less), (less, more)):
        assert formula.allows(home, want)
        hops = formula.hops("float16", home, want)
        real = exact.hops("float16", case.real(home), case.real(want))
        for beside in (False, True):
            real_s = busiest_s(real, beside=beside)
            assert busiest_s(hops, beside=beside) == pytest.approx(real_s, rel=1e-9)


def test_a_dim_that_changes_its_axis_is_not_priced(graph: Graph) -> None:
    case = Case(graph, {"dp": 4, "tp": 4})
    formula = EvenResharder(CLUSTER, even=case.even, most_unlisted=0)
    by_dp, by_tp = (DimLayout.even(64, (axis,), case.even.model) for axis in ("dp", "tp"))
    home, want = (Placement(case.even.model, Sharding((dim,))) for dim in (by_dp, by_tp))
    assert not formula.allows(home, want)
    with pytest.raises(ValueError, match="not priced on a large mesh"):
        formula.hops("float32", home, want)


def test_what_the_real_axes_do_not_divide_is_not_admitted() -> None:
    even = EvenMesh(DeviceMesh.line(8, "tp"), stand_in(DeviceMesh.line(8, "tp")), CLUSTER)
    assert even.fits(DimLayout.even(64, ("tp",), even.model))
    assert not even.fits(DimLayout.even(12, ("tp",), even.model))
    assert not even.fits(DimLayout.cut(("tp",), [(3, 2)]))


def placements(mesh: DeviceMesh, sizes: DeviceMesh) -> Iterator[tuple[Placement, Placement]]:
    """A tensor on a stand-in, and the same on the mesh: each dim whole, or cut over some axes.

    Its first dim is one segment or three, of which each is cut by itself: evenly.
    """
    several = [
        axes for count in range(len(mesh.axes) + 1) for axes in combinations(mesh.names, count)
    ]
    for segments, rows, columns in itertools.product(((144,), (48, 48, 48)), several, several):
        if set(rows) & set(columns) or any(n % mesh.size(rows) for n in segments):
            continue
        pair = []
        for one in (sizes, mesh):
            dims = []
            for lengths, axes in ((segments, rows), ((144,), columns)):
                parts = one.size(axes)
                cuts = [(length // parts,) * parts for length in lengths]
                dims.append(DimLayout.cut(axes, cuts) if axes else DimLayout.whole(144))
            pair.append(Placement(one, Sharding(tuple(dims))))
        yield pair[0], pair[1]


@pytest.mark.parametrize(
    ("name", "shape", "other"),
    [
        ("8x4xh100", {"tp": 2}, {"tp": 8}),
        ("8x4xh100", {"tp": 8}, {"tp": 2}),
        ("8x4xh100", {"dp": 2, "tp": 4}, {"tp": 16}),
        ("8x4xh100", {"tp": 16}, {"dp": 4, "tp": 2}),
        ("8x4xh100", {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}),
        ("8x4xh100", {}, {"tp": 16}),
        ("8x4xh100", {"tp": 16}, {}),
        ("32xh100", {"tp": 6}, {"tp": 9}),
    ],
    ids=str,
)
def test_values_between_unequal_stages_take_what_the_busiest_devices_take(
    name: str, shape: dict[str, int], other: dict[str, int]
) -> None:
    """Holders of a part serve many devices, or a device takes its part from many.

    Where segments differ, and shares of parts with them, holders are priced by the largest.
    """
    cluster = resolve_cluster(name)
    cluster = replace(cluster, devices=(CLUSTER.devices[0],) * 32)
    here, there = (DeviceMesh.of(axes) for axes in (shape, other))
    there = replace(there, devices=tuple(16 + device for device in there.devices))
    even = EvenMesh(here, stand_in(here), cluster)
    far = away(EvenMesh(there, stand_in(there), cluster), beyond=even.model)
    formula, exact = EvenResharder(cluster, even=even, other=far), Resharder(cluster)
    kinds: set[CommKind] = set()
    pairs = itertools.product(placements(here, even.model), placements(there, far.model))
    for (home, real_home), (want, real_want) in pairs:
        hops, real = (
            formula.hops("float32", home, want),
            exact.hops("float32", real_home, real_want),
        )
        assert len(hops) == len(real)
        busy: Counter[int] = Counter()
        ours: Counter[int] = Counter()
        for priced in itertools.chain.from_iterable(hop.comms for hop in real):
            busy.update(priced.seconds)
            kinds.add(priced.comm.kind)
        for priced in itertools.chain.from_iterable(hop.comms for hop in hops):
            ours.update(priced.seconds)
        segments = {len(at.sharding.dims[0].segments) for at in (home, want)}
        for mesh in (here, there):
            busiest_s = max(busy[device] for device in mesh.devices)
            ours_s = ours[mesh.devices[0]]
            assert ours_s >= busiest_s * (1 - 1e-9)
            assert ours_s <= busiest_s * (1 + 1e-9 if len(segments) == 1 else 1.02)
    assert len(kinds) > 1

"""Reshards: hops run with NumPy give the target; the textbook cases are the textbook kinds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.op_rows.placements import MESHES, apply, cut, placement, random_placement
from helpers.plans.cost_cases import far_apart
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.prices import reshard
from partitioner.cost_model.prices.collectives import comm_cost
from partitioner.cost_model.prices.reshard import Hop, Real, Resharder
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import CommKind

REAL = Resharder(resolve_cluster("6xh100"))
IDEAL = Resharder(resolve_cluster("6xideal"))
LINE = DeviceMesh.line(4, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})
SHAPES = ((7,), (6, 5), (4, 1, 9))

budget = settings(max_examples=150, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**32 - 1)
meshes = st.sampled_from(MESHES)


def hops(source: Placement, target: Placement, resharder: Resharder = REAL) -> tuple[Hop, ...]:
    return resharder.hops("float32", source, target)


def kinds(source: Placement, target: Placement) -> list[list[str]]:
    """Kinds of the communications of every hop."""
    return [[str(priced.comm.kind) for priced in hop.comms] for hop in hops(source, target)]


def shard(dim: int, mesh: DeviceMesh = LINE) -> Placement:
    sizes = [DimLayout.whole(8), DimLayout.whole(8)]
    sizes[dim] = DimLayout.even(8, mesh.names, mesh)
    return placement(mesh, *sizes)


def whole(mesh: DeviceMesh = LINE) -> Placement:
    return placement(mesh, DimLayout.whole(8), DimLayout.whole(8))


def pending(mesh: DeviceMesh = LINE, axes: tuple[str, ...] = ("tp",)) -> Placement:
    dims = (DimLayout.whole(8), DimLayout.whole(8))
    return placement(mesh, *dims, partial=tuple((axis, "sum") for axis in axes))


def one(device: int) -> Placement:
    return whole(DeviceMesh.single(device))


def check(
    rng: np.random.Generator, source: Placement, target: Placement, resharder: Resharder = REAL
) -> None:
    """Run the hops; a pending target must add up, and every device must hold its share."""
    total = rng.integers(-99, 99, source.sharding.shape).astype(float)
    parts = cut(total, source, rng)
    steps = hops(source, target, resharder)
    for hop in steps:
        parts = apply(hop, parts)
    assert (steps[-1].after if steps else source) == target
    assert parts.keys() == set(target.mesh.devices)
    plain = target.without_partial()
    if not target.sharding.partial:
        for device, part in cut(total, plain).items():
            np.testing.assert_array_equal(parts[device], part)
        return
    axes = [axis for axis, _ in target.sharding.partial]
    first = cut(total, plain)
    for device, point in target.mesh.coords():
        counts = not any(point[axis] for axis in axes)
        np.testing.assert_array_equal(parts[device], first[device] if counts else 0)


@budget
@given(meshes, meshes, st.sampled_from(SHAPES), st.sampled_from(["", "sum", "max", "min"]), seeds)
def test_any_reshard_gives_the_target(
    source: DeviceMesh, target: DeviceMesh, shape: tuple[int, ...], reduce: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    check(
        rng,
        random_placement(rng, shape, source, partial=reduce),
        random_placement(rng, shape, target),
    )


@budget
@given(meshes, st.sampled_from(["", "sum"]), st.booleans(), st.sampled_from(SHAPES), seeds)
def test_within_one_mesh_and_to_a_pending_sum(
    mesh: DeviceMesh, reduce: str, to_pending: bool, shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    source = random_placement(rng, shape, mesh, partial=reduce)
    target = random_placement(rng, shape, mesh, partial="sum" if to_pending else "")
    assume(source != target)
    check(rng, source, target)


#: Two nodes of four devices, with nothing but the link between them to pay for.
APART = Resharder(far_apart(nodes=2, devices=4))
FAR = tuple(replace(mesh, devices=(4, 5, 6, 7)) for mesh in (LINE, GRID))


@budget
@given(
    st.sampled_from((LINE, GRID)),
    st.sampled_from(FAR),
    st.sampled_from(((8, 5), (7, 4), (6, 4, 3))),
    st.sampled_from(["", "sum"]),
    seeds,
)
def test_a_reshard_to_a_far_node_gives_the_target(
    source: DeviceMesh, target: DeviceMesh, shape: tuple[int, ...], reduce: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    held = random_placement(rng, shape, source, partial=reduce)
    check(rng, held, random_placement(rng, shape, target), APART)


@pytest.mark.parametrize(
    ("shape", "source", "target", "sent", "expected"),
    [
        ((8, 8), ((), ()), ((), ()), 16, ["send", "all_gather"]),
        ((7, 8), ((), ()), ((), ()), 14, ["send", "all_gather"]),  # the dim that divides
        ((1, 7), ((), ()), ((), ()), 7, ["send"]),
        ((8, 8), (("dp",), ()), (("dp",), ()), 16, ["send", "all_gather"]),
        ((2, 8), (("dp",), ()), (("dp",), ()), 4, ["send", "all_gather"]),
        ((2, 7), (("dp",), ()), (("dp",), ()), 7, ["send"]),
        ((8, 8), ((), ("dp", "tp")), ((), ()), 16, ["send", "all_gather"]),  # sent as it lies
        ((8, 8), (("dp",), ("tp",)), (("dp",), ("tp",)), 16, ["send"]),
    ],
)
def test_devices_of_a_far_node_that_hold_the_same_get_a_share_each(
    shape: tuple[int, ...],
    source: tuple[tuple[str, ...], ...],
    target: tuple[tuple[str, ...], ...],
    sent: int,
    expected: list[str],
) -> None:
    """Only if the whole costs more, and if a dim divides: see Megatron's scatter and gather."""
    held, wanted = (
        placement(mesh, *(DimLayout.even(n, of, mesh) for n, of in zip(shape, axes, strict=True)))
        for mesh, axes in ((GRID, source), (FAR[1], target))
    )
    steps = hops(held, wanted, APART)
    assert [hop.comms[0].comm.kind.value for hop in steps] == expected
    numbers = {t.numel for priced in steps[0].comms for t in priced.comm.transfers}
    assert numbers == {sent}
    assert len(hops(held, wanted, Resharder(resolve_cluster("8xideal")))) == 1


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (shard(0), whole(), [["all_gather"]]),
        (pending(), whole(), [["all_reduce"]]),
        (pending(), shard(0), [["reduce_scatter"]]),
        (whole(), shard(1), [["slice"] * 4]),
        (shard(0), shard(1), [["all_to_all"]]),
        (one(0), whole(), [["broadcast"]]),
        (one(0), shard(0), [["scatter"]]),
        (shard(0), one(0), [["gather"]]),
        (one(0), one(3), [["send"]]),
        (whole(), one(2), [[]]),
        (whole(), one(5), [["send"]]),
        (whole(), pending(), [[]]),
        (shard(1), pending(), [["all_gather"], []]),
        (pending(), one(0), [["all_reduce"], []]),
        (pending(GRID, ("dp",)), shard(0, GRID), [["reduce_scatter"] * 2]),
        (pending(GRID, ("dp", "tp")), whole(GRID), [["all_reduce"]]),
        (whole(), whole(), []),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_textbook_kinds(source: Placement, target: Placement, expected: list[list[str]]) -> None:
    assert kinds(source, target) == expected


def test_each_row_of_a_grid_gathers_alone() -> None:
    (hop,) = hops(
        placement(GRID, DimLayout.even(8, ("dp",), GRID), DimLayout.even(8, ("tp",), GRID)),
        placement(GRID, DimLayout.even(8, ("dp",), GRID), DimLayout.whole(8)),
    )
    assert [priced.comm.ranks for priced in hop.comms] == [(0, 1), (2, 3)]
    assert {priced.comm.kind for priced in hop.comms} == {CommKind.ALL_GATHER}


def test_a_pending_sum_counts_on_the_first_device() -> None:
    (hop,) = hops(whole(), pending())
    assert hop.aliases == {0}
    assert hop.zeros == {1, 2, 3}


def test_a_device_that_keeps_its_part_is_not_disturbed() -> None:
    """0 and 1 keep what they hold; only 2 is served."""
    wider = DeviceMesh.line(3, "tp")
    (hop,) = hops(whole(DeviceMesh.line(2, "tp")), whole(wider))
    assert hop.aliases == {1}
    assert [priced.comm.ranks for priced in hop.comms] == [(0, 2)]


@budget
@given(meshes, meshes, st.sampled_from(SHAPES), seeds)
def test_seconds_iff_something_is_done(
    source: DeviceMesh, target: DeviceMesh, shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = random_placement(rng, shape, source, partial="sum")
    after = random_placement(rng, shape, target)
    for hop in hops(before, after):
        for priced in hop.comms:
            comm = priced.comm
            assert priced.seconds.keys() == set(comm.ranks)
            assert all(seconds > 0 for seconds in priced.seconds.values())
            crosses = any(t.source != t.target for t in comm.transfers)
            assert crosses == (comm.kind not in (CommKind.SLICE, CommKind.ALL_REDUCE))
    free = hops(before, after, IDEAL)
    assert not any(s for hop in free for p in hop.comms for s in p.seconds.values())


def test_a_reshard_is_priced_once() -> None:
    resharder = Resharder(resolve_cluster("6xh100"))
    first = hops(shard(0), whole(), resharder)
    assert hops(shard(0), whole(), resharder) is first


class Unshifted(Resharder):
    """Plans each reshard on the devices that it is of."""

    def _real_of(self, *_: object) -> Real:
        return Real(len(self.cluster), (0,))


@pytest.mark.parametrize("unlike", [False, True])
@pytest.mark.parametrize("name", ["4x3xh100", "12xh100"])
@budget
@given(st.sampled_from(SHAPES), st.sampled_from(["", "sum"]), st.booleans(), seeds)
def test_a_reshard_moved_to_other_devices_is_that_of_those(
    name: str, unlike: bool, shape: tuple[int, ...], partial: str, one_mesh: bool, seed: int
) -> None:
    """Steps, prices and places equal those that are planned on the devices themselves."""
    cluster, rng = resolve_cluster(name), np.random.default_rng(seed)
    if unlike:  # every third device starts kernels later
        slow = replace(cluster.devices[0], launch_s=1e-3)
        specs = [slow if i % 3 == 0 else spec for i, spec in enumerate(cluster.devices)]
        cluster = replace(cluster, devices=tuple(specs))
    if len(cluster.levels) > 1 and seed % 2:  # racks of two machines
        inner, outer = cluster.levels
        racks = replace(outer, name="racks", size=2 * inner.size)
        cluster = replace(cluster, levels=(inner, racks, outer))
    meshes = []
    for _ in range(2):
        count = int(rng.integers(1, 1 + min(6, len(cluster))))
        devices = tuple(map(int, rng.permutation(len(cluster))[:count]))
        if rng.integers(2):
            first = int(rng.integers(0, len(cluster) - count + 1))
            devices = tuple(range(first, first + count))
        axes = {"dp": 2, "tp": count // 2} if count % 2 == 0 and count > 2 else {"tp": count}
        meshes.append(DeviceMesh.of(axes, devices))
    before = random_placement(rng, shape, meshes[0], partial=partial)
    after = random_placement(rng, shape, meshes[0] if one_mesh else meshes[1])
    shifting, planned = Resharder(cluster), hops(before, after, Unshifted(cluster))
    assert hops(before, after, shifting) == planned
    assert hops(before, after, shifting) == planned
    if before == after:
        return
    low, real = shifting.lowest("float32", before, after)
    for device in {*before.mesh.devices, *after.mesh.devices}:
        for hop, whole in zip(low, planned, strict=True):
            seen, own = hop.on(real, frozenset({device})), frozenset({device})
            some = [priced for priced in whole.comms if device in priced.comm.ranks]
            assert [priced.comm for priced in seen.comms] == [priced.comm for priced in some]
            assert [p.seconds for p in seen.comms] == [{device: p.seconds[device]} for p in some]
            assert (seen.aliases, seen.zeros) == (whole.aliases & own, whole.zeros & own)
            assert (seen.after, seen.has_more) == (whole.after, len(some) < len(whole.comms))


@pytest.mark.parametrize(
    "target",
    [shard(0), placement(LINE, DimLayout.even(8, ("tp",), LINE), DimLayout.whole(8))],
    ids=str,
)
def test_reduce_scatter_beats_all_reduce_and_slice(target: Placement) -> None:
    scattered = hops(pending(), target)
    reduced = hops(pending(), whole())
    assert len(scattered) == 1
    # Of so few bytes, both take the start-up; the all-reduce has the slice to come.
    assert max(scattered[0].comms[0].seconds.values()) <= max(reduced[0].comms[0].seconds.values())


@pytest.mark.parametrize("partial", [(), (("tp", "sum"),)], ids=str)
def test_a_part_of_no_elements_is_there_unsent(partial: tuple[tuple[str, str], ...]) -> None:
    """3 rows over 4 devices: the last one gets none."""
    source = placement(LINE, DimLayout.whole(3), partial=partial)
    target = placement(LINE, DimLayout.even(3, ("tp",), LINE))
    check(np.random.default_rng(0), source, target)
    assert hops(source, target)[-1].zeros == {3}


def test_a_tensor_of_no_elements_is_never_sent() -> None:
    empty = (DimLayout.whole(0), DimLayout.whole(4))
    source, target = (placement(DeviceMesh.single(d), *empty) for d in (0, 1))
    assert hops(source, target) == (Hop(target, zeros=frozenset({1})),)


@pytest.mark.parametrize(
    ("mesh", "size", "joins"),
    [
        (DeviceMesh.line(6, "tp"), 12, True),
        (DeviceMesh.of({"dp": 2, "tp": 3}), 12, True),
        (DeviceMesh.line(6, "tp"), 13, False),  # parts of unequal sizes: the ranks' steps differ
        (DeviceMesh.line(3, "tp"), 12, False),  # a group of several: the other ranks' steps differ
    ],
)
def test_only_what_all_ranks_do_alike_shares_buckets(
    mesh: DeviceMesh, size: int, joins: bool
) -> None:
    axis = mesh.names[-1]
    held = placement(mesh, DimLayout.even(size, (axis,), mesh))
    (gather,) = REAL.hops("float32", held, placement(mesh, DimLayout.whole(size)))
    reduced = placement(mesh, DimLayout.whole(size))
    (reduce,) = REAL.hops(
        "float32", placement(mesh, DimLayout.whole(size), partial=((axis, "sum"),)), reduced
    )
    for hop in (gather, reduce) if size == 12 else (gather,):
        for priced in hop.comms:
            at_once, later = (priced.whole_seconds(beside=beside) for beside in (False, True))
            assert at_once == priced.seconds
            assert (sum(later.values()) < sum(at_once.values())) == joins


@settings(budget, max_examples=60)
@given(
    st.sampled_from(["2xh100", "6xa100", "3x4xl4", "4x4xh100"]),
    st.sampled_from([CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER]),
    seeds,
)
def test_collectives_without_a_list_of_transfers_cost_the_same(
    spec: str, kind: CommKind, seed: int
) -> None:
    """On meshes of more devices than programs are made for, as on the others."""
    rng = np.random.default_rng(seed)
    cluster = resolve_cluster(spec)
    axes = _random_axes(len(cluster), rng)
    mesh = DeviceMesh.of(axes)
    names = [*axes]
    rng.shuffle(names)
    gathered, kept = names[: len(names) // 2 + 1], names[len(names) // 2 + 1 :]
    more = gathered[int(rng.integers(len(gathered))) :]  # of the second dim, beside the first's
    first = tuple(name for name in gathered if name not in more)
    size = 3 * len(cluster)
    cut_dims = [
        DimLayout.even(size, (*kept, *more), mesh),
        DimLayout.even(2 * size, first, mesh),
        DimLayout.whole(int(rng.integers(1, 2**16))),
    ]
    whole_dims = [DimLayout.even(size, tuple(kept), mesh), DimLayout.whole(2 * size), cut_dims[2]]
    source, target = placement(mesh, *cut_dims), placement(mesh, *whole_dims)
    if kind is CommKind.REDUCE_SCATTER:
        sums = tuple((name, "sum") for name in gathered)
        source, target = placement(mesh, *whole_dims, partial=sums), source
    listed = Resharder(cluster).hops("float32", source, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reshard, "LISTED", 1)
        short = Resharder(cluster).hops("float32", source, target)
    assert len(listed) == len(short)
    assert any(priced.comm.part for hop in short for priced in hop.comms)
    for one, other in zip(listed, short, strict=True):
        assert (one.after, one.aliases, one.zeros) == (other.after, other.aliases, other.zeros)
        assert one.roles == other.roles
        for a, b in zip(one.comms, other.comms, strict=True):
            assert (a.seconds, a.joined, a.overlap) == (b.seconds, b.joined, b.overlap)
            assert (a.comm.kind, a.comm.ranks, a.comm.reduce) == (
                b.comm.kind,
                b.comm.ranks,
                b.comm.reduce,
            )
            assert a.comm.sources() == b.comm.sources()
            assert a.comm.targets() == b.comm.targets()
            assert a.comm.is_even == b.comm.is_even
            assert a.comm.largest_numel == b.comm.largest_numel
            assert a.comm.sent_numel() == b.comm.sent_numel()


def _random_axes(devices: int, rng: np.random.Generator) -> dict[str, int]:
    """Axes of a mesh of so many devices, each of a random divisor of what is left."""
    axes: dict[str, int] = {}
    while devices > 1:
        divisors = [size for size in range(2, devices + 1) if devices % size == 0]
        axes[f"a{len(axes)}"] = size = int(rng.choice(divisors))
        devices //= size
    return axes


def test_a_collective_is_priced_once_for_all_groups_of_equal_prices() -> None:
    """And as if each were priced alone."""
    cluster = resolve_cluster("8x8xh100")
    mesh = DeviceMesh.of({"dp": 8, "tp": 8})
    source = placement(mesh, DimLayout.even(64, ("tp",), mesh))
    target = placement(mesh, DimLayout.whole(64))
    resharder = Resharder(cluster)
    (hop,) = resharder.hops("float32", source, target)
    assert len(hop.comms) == 8
    assert len(resharder._collectives) == 1
    for priced in hop.comms:
        assert priced.seconds == comm_cost(priced.comm, 0, cluster).seconds

"""Exchange: NumPy arrays cut by any placement, moved by the transfers, are the target's parts."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.op_rows.placements import MESHES, cut, placement, random_placement, receive
from partitioner.ir.errors import IRError
from partitioner.ir.exchange import (
    Region,
    Transfer,
    components,
    exchange,
    intersect,
    localize,
    nested,
    region_numel,
)
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh

budget = settings(max_examples=100, deadline=None, derandomize=True, database=None)
PAIR = DeviceMesh.line(2, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})
SHAPES = ((), (7,), (6, 5), (4, 1, 9))
seeds = st.integers(0, 2**32 - 1)


def elements(region: Region) -> set[tuple[int, ...]]:
    """Global indices of a part."""
    dims = ([i for s, n in intervals for i in range(s, s + n)] for intervals in region)
    return set(itertools.product(*dims))


def check(source: Placement, target: Placement) -> None:
    whole = np.arange(1.0, 1 + np.prod(target.sharding.shape, dtype=int))
    whole = whole.reshape(target.sharding.shape)
    transfers = exchange(source, target)
    received = receive(transfers, cut(whole, source), target)
    for device, part in cut(whole, target).items():
        np.testing.assert_array_equal(received[device], part)
    arrived = Counter(t.target for t in transfers for _ in elements(t.write))
    assert arrived == Counter({d: p.size for d, p in received.items() if p.size})
    held = dict(source.parts())
    for device, wanted in target.parts():
        fetched = sum(t.numel for t in transfers if t.target == device != t.source)
        missing = elements(wanted) - elements(held[device]) if device in held else elements(wanted)
        assert fetched == len(missing), f"device {device} fetches what it holds"


@pytest.mark.parametrize("source", MESHES, ids=str)
def test_to_any_mesh(source: DeviceMesh) -> None:
    rng = np.random.default_rng(0)
    for target, shape in itertools.product(MESHES, SHAPES):
        check(random_placement(rng, shape, source), random_placement(rng, shape, target))


@budget
@given(st.sampled_from(MESHES), st.sampled_from(MESHES), st.sampled_from(SHAPES), seeds)
def test_any_placements(
    source: DeviceMesh, target: DeviceMesh, shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    check(random_placement(rng, shape, source), random_placement(rng, shape, target))


def test_two_axes_of_one_dim_nest() -> None:
    nested = placement(GRID, DimLayout.cut(("dp", "tp"), [(1, 2, 3, 4), (4, 3, 2, 1)]))
    minor = placement(GRID, DimLayout.even(20, ("tp",), GRID))
    check(nested, minor)
    check(minor, nested)


def test_a_device_without_elements_sends_and_gets_nothing() -> None:
    lopsided = placement(PAIR, DimLayout.cut(("tp",), [(3, 0)]))
    check(lopsided, placement(PAIR, DimLayout.whole(3)))
    check(placement(PAIR, DimLayout.whole(3)), lopsided)
    assert {t.source for t in exchange(lopsided, placement(PAIR, DimLayout.whole(3)))} == {0}


def test_the_nearest_replica_serves() -> None:
    """Of two holders on the grid, the one that shares a coordinate is asked."""
    rows = placement(GRID, DimLayout.even(4, ("dp",), GRID))
    transfers = exchange(rows, placement(GRID, DimLayout.whole(4)))
    remote = {(t.source, t.target) for t in transfers if t.source != t.target}
    assert remote == {(2, 0), (3, 1), (0, 2), (1, 3)}


def test_replicas_take_turns_across_meshes() -> None:
    away = DeviceMesh.of({"tp": 2}, (4, 5))
    transfers = exchange(placement(PAIR, DimLayout.whole(4)), placement(away, DimLayout.whole(4)))
    assert [(t.source, t.target) for t in transfers] == [(0, 4), (1, 5)]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_devices_at_equal_coordinates_of_two_meshes_exchange(axis: str) -> None:
    """None sends to two devices while another one that holds the same part is idle."""
    away = DeviceMesh.of({"dp": 2, "tp": 3}, tuple(range(6, 12)))
    here = DeviceMesh(away.axes, tuple(range(6)))
    one, other = (placement(mesh, DimLayout.even(6, (axis,), mesh)) for mesh in (here, away))
    assert [(t.source, t.target) for t in exchange(one, other)] == [(d, 6 + d) for d in range(6)]


def test_equal_placements_stay_local() -> None:
    rows = placement(GRID, DimLayout.even(4, ("dp",), GRID))
    assert all(t.source == t.target for t in exchange(rows, rows))


def test_partial_tensors_are_refused() -> None:
    pending = placement(PAIR, DimLayout.whole(4), partial=(("tp", "sum"),))
    whole = placement(PAIR, DimLayout.whole(4))
    for pair in ((pending, whole), (whole, pending)):
        with pytest.raises(IRError, match=r"exchange of partial tensors: .*partial\(sum:tp\)"):
            exchange(*pair)


def test_intervals() -> None:
    assert intersect(((0, 4), (8, 4)), ((2, 7),)) == ((2, 2), (8, 1))
    assert intersect(((0, 4),), ((4, 4),)) == ()
    assert localize(((0, 4), (8, 4)), ((2, 2), (8, 1))) == ((2, 3),)
    assert localize(((0, 4), (8, 4)), ((0, 1), (9, 1))) == ((0, 1), (5, 1))
    assert region_numel((((0, 2), (5, 1)), ((0, 4),))) == 12
    assert region_numel(()) == 1


def test_components_are_the_groups_that_exchange() -> None:
    none = ((0, 1),)
    pairs = ((0, 2), (2, 4), (3, 3), (5, 1))
    groups = components(tuple(Transfer(a, b, (none,), (none,)) for a, b in pairs))
    assert groups == ((0, 2, 4), (1, 5), (3,))


@pytest.mark.parametrize("inner", [((1, 2),), ((0, 1), (3, 3)), ((2, 4),), ((5, 1), (0, 2)), ()])
def test_a_region_of_a_region(inner: tuple[tuple[int, int], ...]) -> None:
    outer = ((4, 2), (8, 3), (20, 1))  # 6 elements of 24, packed
    numbers = np.concatenate([np.arange(s, s + n) for s, n in outer])
    wanted = [numbers[s : s + n] for s, n in inner]
    (found,) = nested((outer,), (inner,))
    got = [np.arange(s, s + n) for s, n in found]
    np.testing.assert_array_equal(np.concatenate([*got, []]), np.concatenate([*wanted, []]))


@budget
@given(st.sampled_from(MESHES), st.sampled_from(SHAPES[1:]), seeds)
def test_the_holder_that_shares_most_coordinates_serves(
    mesh: DeviceMesh, shape: tuple[int, ...], seed: int
) -> None:
    """Of several, the first; whether all holders of a part lie on a grid or not."""
    rng = np.random.default_rng(seed)
    source, target = (random_placement(rng, shape, mesh) for _ in range(2))
    points, held = dict(mesh.coords()), dict(source.parts())
    for transfer in exchange(source, target):
        alike = [device for device in mesh.devices if held[device] == held[transfer.source]]
        if transfer.target in alike:
            assert transfer.source == transfer.target
            continue
        own = points[transfer.target]
        shared = {d: sum(own[axis] == at for axis, at in points[d].items()) for d in alike}
        assert transfer.source == max(alike, key=lambda device: (shared[device], -device))


@pytest.mark.parametrize("seed", range(20))
def test_whole_copies_exchange_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inner = DeviceMesh.line(2, "tp")
    source, target = (random_placement(rng, (6, 5), inner) for _ in range(2))
    for devices in (
        (0, 1, 4, 5),
        (1, 0, 5, 4),
        (0, 2, 4, 6),
        (2, 3, 6, 7),
    ):
        first, second = (
            Placement(DeviceMesh.of({"copies": 2, "tp": 2}, on), at.sharding)
            for on, at in (((0, 1, 4, 5), source), (devices, target))
        )
        transfers = exchange(first, second)
        assert all(one.source // 4 == one.target // 4 for one in transfers)
        check(first, second)

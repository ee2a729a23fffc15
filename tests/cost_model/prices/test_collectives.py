import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans.cost_cases import SLOW, TWO_LEVELS, flat
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, LinkLevel
from partitioner.cost_model.prices.collectives import (
    TREE_SHARE,
    Algorithm,
    bucket_seconds,
    collective,
    comm_cost,
    joined_seconds,
)
from partitioner.cost_model.profiles.database import Profile
from partitioner.cost_model.profiles.entries import LinkEntry
from partitioner.ir.exchange import Transfer
from partitioner.ir.program import BUCKET_BYTES, SMALL_BYTES, Comm, CommKind

RINGS = (CommKind.ALL_REDUCE, CommKind.ALL_GATHER, CommKind.REDUCE_SCATTER, CommKind.BROADCAST)


def transfer(source: int, target: int, numel: int) -> Transfer:
    part = ((0, numel),)
    return Transfer(source, target, (part,), (part,))


def comm_seconds(comm: Comm, numel: int, cluster: Cluster) -> Mapping[int, float]:
    return comm_cost(comm, numel, cluster).seconds


def comm(kind: CommKind, ranks: tuple[int, ...], *parts: Transfer, dtype: str = "float32") -> Comm:
    return Comm(0, kind, ranks, "a", "b", dtype, parts)


@pytest.mark.parametrize(
    ("kind", "nbytes", "algorithm", "seconds"),
    [
        # p = 4, alpha 1 us, 1 GB/s. Large: ring; small: tree.
        (CommKind.ALL_REDUCE, 4e6, "ring", 2 * 3 * (1e-6 + 1e-3)),
        (CommKind.ALL_REDUCE, 400, "tree", 4e-6 + 2 * 400e-9 / TREE_SHARE),
        (CommKind.ALL_GATHER, 4e6, "ring", 3 * (1e-6 + 1e-3)),
        (CommKind.ALL_GATHER, 400, "tree", 2e-6 + 300e-9 / TREE_SHARE),
        (CommKind.REDUCE_SCATTER, 4e6, "ring", 3 * (1e-6 + 1e-3)),
        (CommKind.REDUCE_SCATTER, 400, "tree", 2e-6 + 300e-9 / TREE_SHARE),
        (CommKind.BROADCAST, 4e6, "ring", 3e-6 + 4e-3),
        (CommKind.BROADCAST, 400, "tree", 2 * (1e-6 + 400e-9)),
    ],
)
def test_flat_formulas(kind: CommKind, nbytes: float, algorithm: str, seconds: float) -> None:
    best = collective(kind, (0, 1, 2, 3), nbytes, flat(4))
    assert best == Algorithm(algorithm, pytest.approx(seconds))


def test_all_reduce_takes_the_local_tensor_and_starts_once() -> None:
    cost = comm_cost(comm(CommKind.ALL_REDUCE, (0, 1), dtype="float16"), 10**6, flat(2))
    assert cost.algorithm == "ring"
    assert cost.seconds == dict.fromkeys((0, 1), pytest.approx(1e-6 + 2 * (1e-6 + 1e-3)))


def test_gather_counts_the_largest_part() -> None:
    parts = [
        transfer(s, t, 1000 if s == 0 else 500) for s, t in itertools.product(range(2), repeat=2)
    ]
    seconds = comm_seconds(comm(CommKind.ALL_GATHER, (0, 1), *parts), 0, flat(2))
    assert seconds == dict.fromkeys((0, 1), pytest.approx(1e-6 + 1e-6 + 4e-6))


def test_reduce_scatter_counts_parts_once() -> None:
    parts = [transfer(s, t, 500_000) for s, t in itertools.product(range(2), repeat=2)]
    seconds = comm_seconds(comm(CommKind.REDUCE_SCATTER, (0, 1), *parts), 7, flat(2))
    assert seconds[1] == pytest.approx(1e-6 + 1e-6 + 2e-3)


def test_broadcast_counts_the_whole_once() -> None:
    parts = [transfer(0, target, 10**6) for target in range(3)]
    seconds = comm_seconds(comm(CommKind.BROADCAST, (0, 1, 2), *parts), 0, flat(3))
    assert seconds[2] == pytest.approx(1e-6 + 2e-6 + 4e-3)


def test_send_at_both_ends() -> None:
    cost = comm_cost(comm(CommKind.SEND, (0, 3), transfer(0, 3, 1000)), 0, TWO_LEVELS)
    assert cost.algorithm == "pairwise"
    assert cost.seconds == dict.fromkeys((0, 3), pytest.approx(1e-6 + 1e-5 + 4e-5))


def test_scatter_and_gather_load_the_root() -> None:
    parts = [transfer(0, target, 250) for target in range(4)]
    seconds = comm_seconds(comm(CommKind.SCATTER, (0, 1, 2, 3), *parts), 0, flat(4))
    assert seconds[0] == pytest.approx(1e-6 + 3 * 1e-6 + 3e-6)
    assert seconds[3] == pytest.approx(1e-6 + 1e-6 + 1e-6)
    back = [transfer(source, 0, 250) for source in range(4)]
    assert comm_seconds(comm(CommKind.GATHER, (0, 1, 2, 3), *back), 0, flat(4)) == seconds


def test_all_to_all_takes_the_busier_direction_of_the_busiest_level() -> None:
    parts = [
        transfer(0, 1, 1000),  # inner
        transfer(0, 2, 100),  # outer
        transfer(3, 0, 500),  # outer
    ]
    seconds = comm_seconds(comm(CommKind.ALL_TO_ALL, (0, 1, 2, 3), *parts), 0, TWO_LEVELS)
    # Rank 0: out 4000 B inner (4 us), in 2000 B outer (20 us), three peers.
    assert seconds[0] == pytest.approx(1e-6 + (1e-6 + 2e-5) + 2e-5)
    assert seconds[1] == pytest.approx(1e-6 + 1e-6 + 4e-6)
    assert seconds[2] == pytest.approx(1e-6 + 1e-5 + 4e-6)


def test_slice_copies_at_memory_bandwidth() -> None:
    cost = comm_cost(comm(CommKind.SLICE, (1,), transfer(1, 1, 1000)), 0, flat(2))
    assert cost.algorithm == "copy"
    assert cost.seconds == {1: pytest.approx(8e-6)}
    tiny = comm_seconds(comm(CommKind.SLICE, (1,), transfer(1, 1, 1)), 0, flat(2))
    assert tiny == {1: SLOW.launch_s}


def test_two_levels_reduce_inside_first() -> None:
    best = collective(CommKind.ALL_REDUCE, (0, 1, 2, 3), 4e6, TWO_LEVELS)
    assert best.name == "two-level(ring + ring + ring)"
    inside = 1e-6 + 2e-3  # 2 MB to the one neighbour, and back
    across = 2 * (1e-5 + 1e-2)  # a ring of two over 2 MB
    assert best.seconds == pytest.approx(2 * inside + across)
    ring = 2 * 3 * (1e-5 + 1e-2)
    assert best.seconds < ring


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        (CommKind.ALL_GATHER, (1e-5 + 1e-2) + (1e-6 + 2e-3)),
        (CommKind.REDUCE_SCATTER, (1e-5 + 1e-2) + (1e-6 + 2e-3)),
        (CommKind.BROADCAST, (1e-5 + 4e-2) + (1e-6 + 4e-3)),
    ],
)
def test_two_level_options(kind: CommKind, seconds: float) -> None:
    best = collective(kind, (0, 1, 2, 3), 4e6, TWO_LEVELS)
    flat_ring = 3 * (1e-5 + 1e-2) if kind is not CommKind.BROADCAST else 3e-5 + 4e-2
    assert best.seconds == pytest.approx(min(seconds, flat_ring))


def test_uneven_groups_stay_flat() -> None:
    best = collective(CommKind.ALL_REDUCE, (0, 1, 2), 3e6, TWO_LEVELS)
    assert best == Algorithm("ring", pytest.approx(2 * 2 * (1e-5 + 1e-2)))


def test_inner_ranks_use_inner_links() -> None:
    inside = collective(CommKind.ALL_REDUCE, (2, 3), 4e6, TWO_LEVELS)
    assert inside.seconds == pytest.approx(2 * (1e-6 + 2e-3))
    across = collective(CommKind.ALL_REDUCE, (1, 2), 4e6, TWO_LEVELS)
    assert across.seconds == pytest.approx(2 * (1e-5 + 2e-2))


def test_reducing_bandwidth_of_gloo() -> None:
    level = LinkLevel("gloo", 2, 1e9, 0.0, reduce_bytes_per_s=1e8)
    cluster = Cluster("host", (SLOW,) * 2, (level,))
    assert collective(CommKind.ALL_REDUCE, (0, 1), 1e6, cluster).seconds == pytest.approx(1e-2)
    assert collective(CommKind.ALL_GATHER, (0, 1), 1e6, cluster).seconds == pytest.approx(5e-4)
    slow = replace(cluster, levels=(replace(level, scatter_bytes_per_s=5e7),))
    assert collective(CommKind.REDUCE_SCATTER, (0, 1), 1e6, slow).seconds == pytest.approx(1e-2)
    assert collective(CommKind.ALL_REDUCE, (0, 1), 1e6, slow).seconds == pytest.approx(1e-2)
    # The measurements that the preset rests on: 8.2 ms and 0.40 ms (lessons.md).
    cpu = resolve_cluster("2xcpu")
    assert collective(CommKind.ALL_REDUCE, (0, 1), 16e6, cpu).seconds == pytest.approx(
        8.2e-3, rel=0.02
    )
    sent = comm_seconds(comm(CommKind.SEND, (0, 1), transfer(0, 1, 10**6)), 0, cpu)
    assert sent[0] == pytest.approx(0.40e-3, rel=0.02)


@pytest.mark.parametrize("kind", list(CommKind))
def test_every_kind_is_priced_and_free_on_ideal(kind: CommKind) -> None:
    pairs = itertools.product(range(2), repeat=2)
    parts = [transfer(source, target, 10**6) for source, target in pairs]
    real = comm_seconds(comm(kind, (0, 1), *parts), 10**6, resolve_cluster("2xh100"))
    assert set(real) == {0, 1}
    assert min(real.values()) > 4e-6
    free = comm_seconds(comm(kind, (0, 1), *parts), 10**6, resolve_cluster("2xideal"))
    assert set(free.values()) == {0.0}


@given(
    kind=st.sampled_from(RINGS),
    nbytes=st.integers(1, 10**9),
    ranks=st.sets(st.integers(0, 7), min_size=2).map(sorted).map(tuple),
)
def test_more_bytes_and_slower_links_take_longer(
    kind: CommKind, nbytes: int, ranks: tuple[int, ...]
) -> None:
    near = resolve_cluster("8xh100")
    far = resolve_cluster("2x4xh100")
    seconds = collective(kind, ranks, nbytes, near).seconds
    assert seconds <= collective(kind, ranks, nbytes * 2, near).seconds
    assert seconds <= collective(kind, ranks, nbytes, far).seconds * (1 + 1e-9)
    # No algorithm beats the bytes that must reach a rank at the bandwidth of its links.
    least = nbytes * (len(ranks) - 1) / len(ranks) / near.levels[0].bandwidth_bytes_per_s
    assert seconds >= least


def test_one_rank_or_no_bytes_is_nothing() -> None:
    assert collective(CommKind.ALL_REDUCE, (1,), 100, flat(2)) == Algorithm("none", 0.0)
    assert collective(CommKind.ALL_GATHER, (0, 1), 0, flat(2)) == Algorithm("none", 0.0)


@pytest.mark.parametrize("kind", RINGS)
def test_small_ones_pay_their_share_of_a_bucket(kind: CommKind) -> None:
    """Their start-up is that of the bucket; a broadcast, and what is large, travels alone."""
    cluster, ranks = flat(4, latency_s=1e-3), (0, 1, 2, 3)
    parts = 4 if kind is CommKind.ALL_GATHER else 1

    def alone(nbytes: int) -> float:
        return SLOW.launch_s + collective(kind, ranks, nbytes, cluster).seconds

    def joined(nbytes: int) -> float:
        alone_s = {0: alone(nbytes)}
        return (joined_seconds(kind, ranks, nbytes, alone_s, cluster) or alone_s)[0]

    full, small = BUCKET_BYTES * parts, 64 * 1024 * parts
    joins = kind is not CommKind.BROADCAST
    copied = small / parts + (small if kind is CommKind.ALL_GATHER else 0)  # in, and out of it
    copies_s = 2 * copied / SLOW.memory_bytes_per_s
    expected_s = alone(full) / (full / small) + copies_s if joins else alone(small)
    assert joined(small) == pytest.approx(expected_s)
    assert (joined(small) < alone(small)) == joins
    large = SMALL_BYTES * parts
    assert joined(large) == alone(large)
    below = large - 4 * parts
    assert joined(below) <= alone(below)


@pytest.mark.parametrize("kind", RINGS[:3])
@given(
    small=st.integers(1, SMALL_BYTES - 1),
    share=st.floats(0.01, 0.5),
    most=st.integers(1, BUCKET_BYTES),
)
def test_no_bucket_costs_less_than_a_search_thinks(
    kind: CommKind, small: int, share: float, most: int
) -> None:
    """A bucket that is not full costs more, by its start-up; the price of a search is the least."""
    cluster, ranks = flat(4, latency_s=1e-3), (0, 1, 2, 3)
    parts = 4 if kind is CommKind.ALL_GATHER else 1
    nbytes, bucket = small * parts, small * parts / share
    alone_s = {0: SLOW.launch_s + collective(kind, ranks, nbytes, cluster).seconds}
    really_s = bucket_seconds(kind, ranks, nbytes, bucket, 0, cluster)
    bound = max(most, bucket / parts)
    least = joined_seconds(kind, ranks, nbytes, alone_s, cluster, int(bound) + 1)
    assert least is not None
    least_s = least[0]
    assert least_s <= min(really_s, alone_s[0]) * (1 + 1e-9)
    fuller_s = bucket_seconds(kind, ranks, nbytes, 2 * bucket, 0, cluster)
    assert fuller_s < really_s


def test_a_bucket_is_cheapest_at_a_size_that_is_measured() -> None:
    """Seconds that jump behind a size: the least is at the size before the jump."""
    rows = ((4096, 1e-4), (65_536, 1e-4), (80_000, 1e-3), (1 << 22, 1e-2))
    entries = tuple(
        LinkEntry("all_reduce", 2, nbytes, seconds, 0.01, 7, "gloo", "2026-01-01")
        for nbytes, seconds in rows
    )
    profile = Profile(Path(), "a", 1, 1, {}, links={("all_reduce", 2): entries})
    level = LinkLevel("link", 2, 1e9, 1e-6, profile=profile)
    cluster, kind = Cluster("jumps", (SLOW,) * 2, (level,)), CommKind.ALL_REDUCE
    least_s = joined_seconds(kind, (0, 1), 5000, {0: 1.0}, cluster)
    assert least_s is not None
    assert least_s[0] == bucket_seconds(kind, (0, 1), 5000, 65_536, 0, cluster)


def test_a_bucket_is_never_dearer_than_what_is_in_it() -> None:
    """Where links start at once and slow down with size, nothing is gained by joining."""
    alone_s = {0: 1e-9}
    assert joined_seconds(CommKind.ALL_REDUCE, (0, 1), 1024, alone_s, flat(2)) == alone_s


@pytest.mark.parametrize(
    ("kind", "parts", "borders"),
    [
        (CommKind.ALL_REDUCE, (), 1),
        (CommKind.ALL_GATHER, (transfer(0, 1, 1000), transfer(1, 0, 1000)), 1),
        (CommKind.ALL_TO_ALL, (transfer(0, 1, 1000), transfer(1, 0, 1000)), 1),
        (CommKind.SEND, (transfer(0, 1, 1000),), 1),
        (CommKind.SLICE, (transfer(0, 0, 1000),), 0),
    ],
)
def test_a_communication_ends_a_session_and_a_slice_does_not(
    kind: CommKind, parts: tuple[Transfer, ...], borders: int
) -> None:
    """Whether the links are measured or priced by their rates."""
    entries = tuple(
        LinkEntry(kind.value, 2, nbytes, nbytes * 1e-8, 0.01, 7, "gloo", "2026-01-01")
        for nbytes in (1024, 65_536)
    )
    profile = Profile(Path(), "a", 1, 2, {}, links={(kind.value, 2): entries})
    ranks = (0,) if kind is CommKind.SLICE else (0, 1)
    for known in (None, profile):
        level = LinkLevel("link", 2, 1e9, 1e-6, profile=known)
        plain = Cluster("plain", (SLOW,) * 2, (level,))
        in_sessions = replace(plain, devices=(replace(SLOW, border_s=1e-3),) * 2)
        without, with_borders = (
            comm_seconds(comm(kind, ranks, *parts), 1000, cluster)
            for cluster in (plain, in_sessions)
        )
        for rank, seconds in without.items():
            assert with_borders[rank] == pytest.approx(seconds + 1e-3 * borders)


def test_an_exchange_waits_for_both_even_if_its_parts_are_uneven() -> None:
    """A message alone is cheap, as its sender does not wait; an exchange stops both ranks."""

    def rows(kind: str, start_s: float) -> tuple[LinkEntry, ...]:
        return tuple(
            LinkEntry(kind, 2, nbytes, start_s + nbytes * 1e-9, 0.01, 7, "gloo", "2026-01-01")
            for nbytes in (1024, 100_000, 200_000, 400_000, 2**20)
        )

    links = {("send", 2): rows("send", 1e-4), ("all_to_all", 2): rows("all_to_all", 9e-4)}
    level = LinkLevel("link", 4, 1e9, 1e-6, profile=Profile(Path(), "a", 1, 2, {}, links=links))
    cluster = Cluster("measured", (SLOW,) * 4, (level,))
    even, uneven, one_way, of_four = (
        comm_seconds(comm(CommKind.ALL_TO_ALL, ranks, *parts), 0, cluster)
        for ranks, parts in (
            ((0, 1), (transfer(0, 1, 50_000), transfer(1, 0, 50_000))),
            ((0, 1), (transfer(0, 1, 50_000), transfer(1, 0, 40_000))),
            ((0, 1), (transfer(0, 1, 50_000),)),
            ((0, 1, 2, 3), [transfer(i, (i + 1) % 4, 50_000 + i) for i in range(4)]),
        )
    )
    assert even[0] == pytest.approx(9e-4 + 4e-4)
    assert uneven == pytest.approx(even), "the larger part counts"
    assert one_way[0] == pytest.approx(1e-4 + 2e-4)
    assert of_four[0] < 2e-4 + 2.1e-4, "two messages, none of them back"

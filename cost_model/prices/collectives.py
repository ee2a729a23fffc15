"""Seconds of communications: alpha-beta formulas, the cheapest algorithm of each kind.

Alpha is the latency of a hop, beta the inverse of a device's bandwidth at the level of the
cluster that the ranks span; a start-up (`launch_s`) is added once. For p ranks and n bytes (the
whole tensor of a gather, the local partial tensor of a reduction):

| kind           | ring                          | tree                              |
|----------------|-------------------------------|-----------------------------------|
| all-reduce     | 2 (p-1) (alpha + n/p beta)    | 2 ceil(log2 p) alpha + 2 n beta'  |
| all-gather     | (p-1) (alpha + n/p beta)      | ceil(log2 p) alpha + (p-1)/p n beta' |
| reduce-scatter | (p-1) (alpha + n/p beta)      | ceil(log2 p) alpha + (p-1)/p n beta' |
| broadcast      | (p-1) alpha + n beta          | ceil(log2 p) (alpha + n beta)     |

Ring, and recursive doubling or halving (under "tree"): Thakur, Rabenseifner, Gropp, "Optimization
of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005. The tree all-reduce is
NCCL's double binary tree, the ring broadcast its pipelined chain; beta' is beta / TREE_SHARE.

Across levels, a two-level algorithm competes with the flat one: reduce-scatter inside the groups of
the level below, the collective among the devices of equal rank in each group, then all-gather
inside. Reduction arithmetic is bound by links and not priced. Point-to-point kinds and
all-to-all are pairwise: alpha for each peer, and the busiest direction of the busiest level, since
levels have separate wires and overlap. Where an exchange of two ranks is measured or published, it
gives what ranks that send to each other wait for each other, and the seconds of the contents.

Where the level knows measured seconds of so many ranks, or published ones, these go before all
formulas, start-up included. Both tell ranks of one group of the level below each from several.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster, DeviceSpec, LinkLevel
from partitioner.ir.exchange import Transfer
from partitioner.ir.plan import PlacedNode
from partitioner.ir.program import BUCKET_BYTES, JOINING, REDUCING, SMALL_BYTES, Comm, CommKind
from partitioner.ir.types import item_bytes

#: Share of a ring's bandwidth that trees reach:
#: https://github.com/NVIDIA/nccl/blob/01afd20a77b5/src/graph/tuning.cc (NCCL_ALGO_TREE)
TREE_SHARE = 0.9

_Formula = Callable[[int, float, float, float], float]  #: (p, n bytes, alpha s, beta s/byte) -> s


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The algorithm of a collective, and its seconds without start-up."""

    name: str
    seconds: float

    def start_s(self, device: DeviceSpec) -> float:
        """Seconds of the start-up on a device; see `DeviceSpec.start_s`.

        Published seconds are of a loop that submits nothing else: they take a launch at least.
        """
        left_s = device.launch_s - self.seconds if self.name == "published" else 0.0
        is_known = self.name in ("measured", "published")
        return device.start_s(is_known=is_known) + max(0.0, left_s)


@dataclass(frozen=True)
class CommCost:
    """A communication's algorithm ("pairwise" and "copy" included) and seconds by rank."""

    algorithm: str
    seconds: Mapping[int, float]


def comm_cost(comm: Comm, numel: int, cluster: Cluster) -> CommCost:
    """Algorithm, and seconds of each rank; an ALL_REDUCE has `numel` elements on a rank at most."""
    if comm.kind is CommKind.SLICE:
        return CommCost("copy", _copy_seconds(comm, cluster))
    if comm.kind not in _FLAT:
        exchange = _even_exchange(comm, cluster)
        if exchange is not None:
            return _on_devices(exchange, comm.ranks, cluster)
        return CommCost("pairwise", _pairwise_seconds(comm, cluster))
    best = collective(comm.kind, comm.ranks, whole_bytes(comm, numel), cluster)
    return _on_devices(best, comm.ranks, cluster)


def _on_devices(best: Algorithm, ranks: tuple[int, ...], cluster: Cluster) -> CommCost:
    starts = {rank: best.start_s(cluster.devices[rank]) for rank in ranks}
    return CommCost(best.name, {rank: start_s + best.seconds for rank, start_s in starts.items()})


def joined_seconds(
    kind: CommKind,
    ranks: tuple[int, ...],
    nbytes: float,
    alone_s: Mapping[int, float],
    cluster: Cluster,
    bucket_bytes: int = BUCKET_BYTES,
) -> Mapping[int, float] | None:
    """The least seconds of a collective that may share a bucket, for plans that are not known yet.

    They are those of its share in the bucket that is cheapest for it, or `alone_s`; None if it is
    too large, or not of `JOINING`. What its bucket really takes is `bucket_seconds`, never less.
    `bucket_bytes` are the most of a bucket's operands on one rank, `nbytes` as of `collective`.
    """
    parts = _parts_in_result(kind, ranks)
    if kind not in JOINING or not 0 < nbytes / parts < SMALL_BYTES:
        return None
    most = max(nbytes, bucket_bytes * parts)
    doublings = range(math.ceil(math.log2(most / nbytes)))
    known = [size for size in _known_sizes(ranks, cluster) if nbytes < size < most]
    sizes = [*(nbytes * 2**power for power in doublings), *known, most]
    first = {cluster.devices[rank]: rank for rank in reversed([*alone_s])}  # of equal devices
    in_bucket_s = {
        spec: min(bucket_seconds(kind, ranks, nbytes, size, rank, cluster) for size in sizes)
        for spec, rank in first.items()
    }
    return {
        rank: min(seconds, in_bucket_s[cluster.devices[rank]]) for rank, seconds in alone_s.items()
    }


def _known_sizes(ranks: tuple[int, ...], cluster: Cluster) -> set[float]:
    """Sizes for which a level has seconds: between two of them, the least is at one of both."""
    level, groups = cluster.level(ranks), _inner_groups(ranks, cluster)
    inner = groups[0] if groups else ()
    sizes = {float(size) for each in {1, len(inner)} - {0} for size in level.known_sizes(each)}
    if inner:  # steps of two levels pass the whole tensor, and a part of it
        below = _known_sizes(inner, cluster)
        sizes |= below | {size * len(inner) for size in sizes}
    return sizes


def bucket_seconds(
    kind: CommKind,
    ranks: tuple[int, ...],
    nbytes: float,
    bucket_bytes: float,
    rank: int,
    cluster: Cluster,
    paid_bytes: float = 0.0,
    paid_s: float = 0.0,
) -> float:
    """Seconds of a collective in a bucket on a rank: its share of the bucket's, and its copies.

    Its operand is copied into the bucket, and a gather's parts out of it, at memory bandwidth;
    parts of other results are read where they lie. `bucket_bytes` of members (as of `collective`)
    share what the bucket takes, beside `paid_bytes` of others, which pay `paid_s` for themselves.
    """
    best = collective(kind, ranks, bucket_bytes + paid_bytes, cluster)
    device = cluster.devices[rank]
    copied = nbytes / _parts_in_result(kind, ranks)
    copied += nbytes if kind is CommKind.ALL_GATHER else 0.0
    copies_s = 2 * copied / device.memory_bytes_per_s  # read and written
    left_s = max(0.0, best.start_s(device) + best.seconds - paid_s)
    return left_s * nbytes / bucket_bytes + copies_s


def _parts_in_result(kind: CommKind, ranks: tuple[int, ...]) -> int:
    """The number of operands in what `collective` takes as the bytes of a kind."""
    return len(ranks) if kind is CommKind.ALL_GATHER else 1


def collective(
    kind: CommKind, ranks: tuple[int, ...], nbytes: float, cluster: Cluster
) -> Algorithm:
    """The cheapest algorithm of a ring-or-tree kind for `nbytes` (n above) over these ranks."""
    if len(ranks) < 2 or not nbytes:
        return Algorithm("none", 0.0)
    level, groups = cluster.level(ranks), _inner_groups(ranks, cluster)
    in_groups = _tabled(kind, ranks, nbytes, level, groups)
    if in_groups is not None:
        return in_groups
    # One rank in every inner group: the ranks of a flat algorithm.
    one_each = _tabled(kind, ranks, nbytes, level, [])
    options = [one_each] if one_each is not None else []
    if one_each is None:
        rate = level.bandwidth_bytes_per_s
        if kind in REDUCING:
            rate = level.reduce_bytes_per_s or rate
        if kind is CommKind.REDUCE_SCATTER:
            rate = level.scatter_bytes_per_s or rate
        for name, formula in _FLAT[kind].items():
            seconds = formula(len(ranks), nbytes, level.latency_s, 1 / rate)
            options.append(Algorithm(name, seconds))
    if groups:
        options.append(_two_level(kind, groups, nbytes, cluster))
    return min(options, key=lambda option: option.seconds)


def tabled(
    kind: CommKind, ranks: tuple[int, ...], nbytes: float, cluster: Cluster
) -> Algorithm | None:
    """Measured or published seconds of a collective, start-up included; None if there are none."""
    return _tabled(kind, ranks, nbytes, cluster.level(ranks), _inner_groups(ranks, cluster))


def _tabled(
    kind: CommKind,
    ranks: tuple[int, ...],
    nbytes: float,
    level: LinkLevel,
    groups: Sequence[tuple[int, ...]],
) -> Algorithm | None:
    """`tabled` of ranks on a level in these inner groups; of none, each rank is in its own."""
    each = len(groups[0]) if groups else 1
    if level.profile is not None:
        measured_s = level.profile.link_seconds(kind.value, len(ranks), nbytes, each)
        if measured_s is not None:
            return Algorithm("measured", measured_s)
    table = level.tables(each)
    seconds = None if table is None else table.seconds(kind.value, len(ranks), nbytes)
    return None if seconds is None else Algorithm("published", seconds)


def _inner_groups(ranks: tuple[int, ...], cluster: Cluster) -> list[tuple[int, ...]]:
    """The ranks by group of the level below; [] unless all groups have the same number above 1."""
    index = cluster.levels.index(cluster.level(ranks))
    if index == 0:
        return []
    size = cluster.levels[index - 1].size
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        groups[rank // size].append(rank)
    counts = {len(group) for group in groups.values()}
    return [*map(tuple, groups.values())] if counts != {1} and len(counts) == 1 else []


def _two_level(
    kind: CommKind, groups: list[tuple[int, ...]], nbytes: float, cluster: Cluster
) -> Algorithm:
    inner, across = groups[0], tuple(group[0] for group in groups)
    part = nbytes / len(inner)
    reduce_scatter, all_gather = CommKind.REDUCE_SCATTER, CommKind.ALL_GATHER
    steps: Mapping[CommKind, list[tuple[CommKind, tuple[int, ...], float]]] = {
        CommKind.ALL_REDUCE: [
            (reduce_scatter, inner, nbytes),
            (kind, across, part),
            (all_gather, inner, nbytes),
        ],
        reduce_scatter: [(kind, inner, nbytes), (kind, across, part)],
        all_gather: [(kind, across, part), (kind, inner, nbytes)],
        CommKind.BROADCAST: [(kind, across, nbytes), (kind, inner, nbytes)],
    }
    parts = [collective(step, ranks, size, cluster) for step, ranks, size in steps[kind]]
    name = " + ".join(part.name for part in parts)
    return Algorithm(f"two-level({name})", sum(part.seconds for part in parts))


def whole_bytes(comm: Comm, numel: int) -> float:
    """Bytes that the formulas call n; uneven parts count as the largest."""
    item = item_bytes(comm.dtype)
    if comm.kind is CommKind.ALL_REDUCE:
        return numel * item
    return comm.largest_numel * item * (1 if comm.kind is CommKind.BROADCAST else len(comm.ranks))


def _copy_seconds(comm: Comm, cluster: Cluster) -> dict[int, float]:
    """Read and write once, at memory bandwidth, in one kernel."""
    moved: dict[int, float] = dict.fromkeys(comm.ranks, 0.0)
    for transfer in comm.transfers:
        moved[transfer.target] += 2 * transfer.numel * item_bytes(comm.dtype)
    devices = cluster.devices
    return {
        rank: max(devices[rank].launch_s, nbytes / devices[rank].memory_bytes_per_s)
        for rank, nbytes in moved.items()
    }


def _even_exchange(comm: Comm, cluster: Cluster) -> Algorithm | None:
    """`tabled` seconds of an all-to-all whose ranks all send each other equal parts."""
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in comm.transfers:
        if transfer.source != transfer.target:
            sizes[transfer.source, transfer.target] += transfer.numel
    count = len(comm.ranks)
    is_even = len(sizes) == count * (count - 1) and len(set(sizes.values())) == 1
    if comm.kind is not CommKind.ALL_TO_ALL or not is_even:
        return None
    nbytes = count * next(iter(sizes.values())) * item_bytes(comm.dtype)
    return tabled(comm.kind, comm.ranks, nbytes, cluster)


@dataclass(frozen=True)
class Wires:
    """Messages of a rank to its peers and from them."""

    waits_s: float  #: Seconds of their latencies, one after the other.
    numel: tuple[tuple[LinkLevel, int], ...]  #: Elements over each level in one direction.
    both_ways: frozenset[LinkLevel]  #: Levels over which it sends to a peer that sends to it.

    def seconds(self, item: float) -> float:
        """Seconds without start-up, of so many bytes an element."""
        seconds = (
            level.exchanged_contents_s(n * item)
            if level in self.both_ways
            else level.transfer_s(n * item)
            for level, n in self.numel
        )
        waiting_s = max((level.waiting_s for level in self.both_ways), default=0.0)
        return self.waits_s + (waiting_s + max(seconds, default=0.0))


def pairwise(comm: Comm, cluster: Cluster) -> dict[int, Wires]:
    """Messages of each rank; ranks that send to each other also wait for each other once."""
    sent: dict[tuple[int, int], int] = defaultdict(int)
    for transfer in comm.transfers:
        if transfer.source != transfer.target:
            sent[transfer.source, transfer.target] += transfer.numel
    wires: dict[int, dict[tuple[LinkLevel, str], int]] = defaultdict(lambda: defaultdict(int))
    peers: dict[int, dict[int, float]] = defaultdict(dict)
    exchanging: dict[int, set[LinkLevel]] = defaultdict(set)
    for (source, target), numel in sent.items():
        level = cluster.level((source, target))
        wires[source][level, "out"] += numel
        wires[target][level, "in"] += numel
        peers[source][target] = peers[target][source] = level.message_s
        if (target, source) in sent:
            exchanging[source].add(level)
    return {
        rank: Wires(
            sum(peers[rank].values()),
            tuple((level, numel) for (level, _), numel in wires[rank].items()),
            frozenset(exchanging[rank]),
        )
        for rank in comm.ranks
    }


def _pairwise_seconds(comm: Comm, cluster: Cluster) -> dict[int, float]:
    is_measured, item = cluster.level(comm.ranks).is_measured, item_bytes(comm.dtype)
    return {
        rank: cluster.devices[rank].start_s(is_known=is_measured) + wires.seconds(item)
        for rank, wires in pairwise(comm, cluster).items()
    }


def _log2(p: int) -> int:
    return math.ceil(math.log2(p))


_PARTS: Mapping[str, _Formula] = {
    "ring": lambda p, n, alpha, beta: (p - 1) * (alpha + n / p * beta),
    "tree": lambda p, n, alpha, beta: _log2(p) * alpha + (p - 1) / p * n * beta / TREE_SHARE,
}
_FLAT: Mapping[CommKind, Mapping[str, _Formula]] = {
    CommKind.ALL_REDUCE: {
        "ring": lambda p, n, alpha, beta: 2 * ((p - 1) * (alpha + n / p * beta)),
        "tree": lambda p, n, alpha, beta: 2 * _log2(p) * alpha + 2 * n * beta / TREE_SHARE,
    },
    CommKind.ALL_GATHER: _PARTS,
    CommKind.REDUCE_SCATTER: _PARTS,
    CommKind.BROADCAST: {
        "ring": lambda p, n, alpha, beta: (p - 1) * alpha + n * beta,
        "tree": lambda p, n, alpha, beta: _log2(p) * (alpha + n * beta),
    },
}


#: Bytes of the number of rows that a device tells another one to await.
COUNT_BYTES = 8


def dispatch_comms(placed: PlacedNode) -> Iterator[Comm]:
    """The communications of a node whose devices send each other iterations; of most nodes none.

    How many go to a device is known at run time: counted are the bytes of those that are expected
    by the loads of what rows choose or, if they are not known, if all choices are equally likely.
    Three all-to-alls: counts, rows, and results.
    """
    sent = placed.sent
    if not sent or placed.rule is None or placed.rule.dispatch is None:
        return
    dispatch, mesh = placed.rule.dispatch, placed.mesh
    rows, owners = placed.layouts[dispatch.rows], placed.layouts[dispatch.owners]
    for group in dict.fromkeys(placed.group(point) for _, point in mesh.coords()):
        points = {device: mesh.coord(device) for device in group}
        has = {device: rows.local_size(mesh, point) for device, point in points.items()}
        shares = {
            device: dispatch.share(owners.pieces(mesh, point), owners.size)
            for device, point in points.items()
        }
        pairs = [(source, target) for source in group for target in group if source != target]
        moved = {(source, target): has[source] * shares[target] for source, target in pairs}
        back = {(target, source): moved[source, target] for source, target in pairs}
        yield _comm(group, dict.fromkeys(pairs, COUNT_BYTES))
        yield _comm(group, {pair: n * dispatch.there_bytes for pair, n in moved.items()})
        yield _comm(group, {pair: n * dispatch.back_bytes for pair, n in back.items()})


def dispatch_seconds(placed: PlacedNode, cluster: Cluster) -> Mapping[int, float]:
    """Seconds that each device of a node spends on `dispatch_comms`; none of most nodes."""
    seconds: dict[int, float] = {}
    for comm in dispatch_comms(placed):
        for device, one in comm_cost(comm, 0, cluster).seconds.items():
            seconds[device] = seconds.get(device, 0.0) + one
    return seconds


def dispatch_s(group: tuple[int, ...], nbytes: float, cluster: Cluster) -> Mapping[int, float]:
    """Seconds of an all-to-all of as many bytes between any two devices of a group."""
    pairs = [(source, target) for source in group for target in group if source != target]
    return comm_cost(_comm(group, dict.fromkeys(pairs, nbytes)), 0, cluster).seconds


def _comm(group: tuple[int, ...], nbytes: Mapping[tuple[int, int], float]) -> Comm:
    transfers = []
    for (source, target), count in nbytes.items():
        flat = (((0, math.ceil(count)),),)
        transfers.append(Transfer(source, target, flat, flat))
    return Comm(-1, CommKind.ALL_TO_ALL, group, "", "", "uint8", tuple(transfers))

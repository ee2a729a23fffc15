"""Published measurements: how fast kernels and collectives of some accelerators are.

The figures stand in `data/published.toml`, each with the address of the measurement; they are read,
and a table made of them, when it is first needed. Seconds of a communication are start-up + bytes /
bandwidth in each regime (a protocol or algorithm of the library), of which the library takes the
fastest. Bandwidths are whole bytes / seconds ("algbw" of nccl-tests).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from partitioner.cost_model.profiles.entries import LinkTable

_MICRO_S = 1e-6
_GIGA = 1e9


@cache
def data_file(name: str) -> Mapping[str, Any]:
    """Read a file of `data/` (TOML, with a source for each figure), once a process."""
    folder = resources.files("partitioner.cost_model.cluster").joinpath("data")
    return tomllib.loads(folder.joinpath(name).read_text("utf-8"))


@dataclass(frozen=True)
class Kernels:
    """Kernels of an accelerator.

    A matrix product takes ``fixed_s + (arithmetic_s^sharpness + memory_s^sharpness)^(1/sharpness)``
    with the seconds of its FLOPs and bytes at `compute_shares` and `memory_share` of the peaks: a
    skinny product, which has many bytes for its FLOPs, is slower than a square one. Seconds grow
    with FLOPs and with bytes.
    """

    #: Share of peak FLOP/s that large matrix products reach, by element type.
    compute_shares: Mapping[str, float]
    memory_share: float  #: Share of the peak bandwidth that a copy reaches.
    fixed_s: float  #: Seconds to fill and drain the device, beside FLOPs and bytes.
    sharpness: float  #: 1 adds the seconds of FLOPs and bytes up, infinity takes the longer.
    #: Share of the peak 16-bit FLOP/s that fused attention reaches; None if it is not published.
    attention_16_bit: float | None

    def attention_share(self, dtype: str) -> float | None:
        """Share of the rate of large products that fused attention reaches; None if not known."""
        if self.attention_16_bit is None or dtype not in ("float16", "bfloat16"):
            return None
        return self.attention_16_bit / self.compute_shares[dtype]

    def product_s(self, arithmetic_s: float, memory_s: float) -> float:
        """Seconds of a matrix product by those of its FLOPs and of its bytes."""
        power = self.sharpness
        sum_s: float = (arithmetic_s**power + memory_s**power) ** (1 / power)
        return self.fixed_s + sum_s


#: Element types of 16 bits and of 8 bits, which share their rates.
_WIDE, _NARROW = ("float16", "bfloat16"), ("float8e4m3fn", "float8e5m2", "int8", "uint8")
#: (start-up in us, 1e9 bytes/s) of a regime.
_Regime = Sequence[float]


def _figures() -> Mapping[str, Any]:
    return data_file("published.toml")


def kernel_names() -> tuple[str, ...]:
    """Names of the tables of kernels, which presets and cluster files give."""
    return tuple(_figures()["kernels"])


def link_names() -> tuple[str, ...]:
    """Names of the tables of communications, which presets and cluster files give."""
    return tuple(table for name in _figures()["links"] for table in (name, f"{name}-network"))


@cache
def kernels(name: str) -> Kernels:
    """Get the kernels of a table."""
    row = _figures()["kernels"][name]
    attention = row.get("attention_16_bit")
    return Kernels(
        {
            **dict.fromkeys(_WIDE, _share_of(row["share_16_bit"])),
            **dict.fromkeys(_NARROW, _share_of(row["share_8_bit"])),
        },
        _share_of(row["memory_share"]),
        row["fixed_us"] * _MICRO_S,
        row["sharpness"],
        None if attention is None else _share_of(attention),
    )


def _share_of(figure: float | Sequence[float]) -> float:
    return figure[0] / figure[1] if isinstance(figure, Sequence) else figure


@cache
def links(name: str) -> Mapping[int, LinkTable]:
    """Get the communications of a table by the number of ranks in each group of the level below."""
    inner = name.removesuffix("-network")
    row = _figures()["links"][inner]
    if name == inner:
        return {1: _inside(inner, _figures()["regimes"][row["inside"]])}
    inside, port, switched = links(inner)[1], row["port_gb_per_s"], row["switched"]
    return {each: _between_nodes(inside, each, port, switched) for each in (1, 2, 4, 8)}


@cache
def _regimes(algorithm: str) -> Mapping[tuple[int, int], Sequence[_Regime]]:
    """Regimes by which NCCL reckons with an algorithm between nodes, by (nodes, ranks a node)."""
    rows = _figures()["network"][algorithm]["rows"]
    return {(row["nodes"], row["each"]): row["regimes"] for row in rows}


_SIZES = tuple(2.0**power for power in range(6, 36))
_NODES = (2, 4, 8, 16, 32, 64, 128, 256)


def _share(ramp: Mapping[int, float], nbytes: float) -> float:
    """The ramp at a size, interpolated by its logarithm, constant beyond its ends."""
    at = math.log2(max(nbytes, 1))
    powers = [*ramp]
    if at <= powers[0] or at >= powers[-1]:
        return ramp[powers[0] if at <= powers[0] else powers[-1]]
    high = next(power for power in powers if power >= at)
    low = max(power for power in powers if power < at)
    return ramp[low] + (ramp[high] - ramp[low]) * (at - low) / (high - low)


def _fastest(rows: Iterable[_Regime], nbytes: float, share: float = 1.0) -> float:
    """Seconds of the fastest of some (start-up in us, 1e9 bytes/s), at a share of the rates."""
    return min(start * _MICRO_S + nbytes / (rate * share * _GIGA) for start, rate in rows)


def _ring(nodes: int, each: int) -> Sequence[_Regime]:
    """The ring's rows; beyond 32 nodes by NCCL's rule: hops grow with the ranks, not the rate."""
    known = _regimes("ring")
    if (nodes, each) in known:
        return known[nodes, each]
    last, before = known[32, each], known[16, each]
    more = math.log2(nodes / 32)
    rows = zip(last, before, strict=True)
    return tuple(
        (end + (end - start) * (2 ** (more + 1) - 2), rate) for (end, rate), (start, _) in rows
    )


def _tree(nodes: int, each: int) -> Sequence[_Regime]:
    known = _regimes("tree")
    if (nodes, each) in known:
        return known[nodes, each]
    steps = math.log2(nodes / 4)
    rows = zip(known[4, each], _figures()["network"]["tree"]["doubling_us"], strict=True)
    return tuple((start + steps * step, rate) for (start, rate), step in rows)


def _between_nodes(inside: LinkTable, each: int, port: float, switched: bool) -> LinkTable:
    """Communications of `each` ranks (1, 2, 4 or 8) on every node, by number of ranks.

    They are never faster than those of as many ranks (or all 8) of one node, which are measured:
    these start-ups are the library's. A device's `port` has 1e9 bytes/s; `switched` nodes reduce in
    switches.
    """
    network = _figures()["network"]
    ring_of, switch_of = network["ring"], network["switch_tree"]
    scale = port / network["port_gb_per_s"]
    all_to_all_us = dict(network["all_to_all_us"])
    points: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {}
    for nodes in _NODES:
        ranks, ring = nodes * each, _ring(nodes, each)
        gather, reduce = [], []
        for n in _SIZES:
            share = scale * (_share(dict(ring_of["ramp"]), n / ranks) if each == 8 else 1.0)
            hops = zip(ring, ring_of["base_us"], strict=True)
            gather.append(_fastest(ring, n, share))
            options = [
                (2 * start - base) * _MICRO_S + 2 * n / (rate * share * _GIGA)
                for (start, rate), base in hops
            ]
            options.append(_fastest(_tree(nodes, each), n, scale))
            if switched and each >= 4:
                ((start, rate),) = _regimes("switch_tree")[min(nodes, 4), each]
                start += switch_of["doubling_us"][0] * math.log2(max(nodes, 4) / 4)
                rate *= _share(dict(switch_of["ramp"]), n / ranks) * scale
                options.append(start * _MICRO_S + n / (rate * _GIGA))
            reduce.append(min(options))
        start = all_to_all_us.get(nodes, all_to_all_us[32] * nodes / 32)
        far = (nodes - 1) * each / ranks  # share of a rank's bytes that leave its node
        port_rows = [(start, port * (1 - network["port_loss"] / nodes) / far)]
        for kind, seconds in (
            ("all_gather", gather),
            ("reduce_scatter", gather),
            ("all_reduce", reduce),
            ("all_to_all", [_fastest(port_rows, n) for n in _SIZES]),
        ):
            points[kind, ranks] = tuple(
                (n, max(one, inside.seconds(kind, min(ranks, 8), n) or 0.0))
                for n, one in zip(_SIZES, seconds, strict=True)
            )
    halves = [(start, rate / 2 * scale) for start, rate in _regimes("ring")[2, 1]]
    points["send", 2] = tuple((n, _fastest(halves, n)) for n in _SIZES)
    return LinkTable(points)


def _inside(name: str, rows: Mapping[str, Any]) -> LinkTable:
    """Communications inside a node; a gather never takes longer than an all-reduce."""
    points = {
        (kind, int(ranks)): tuple((n, _fastest([row], n)) for n in _SIZES)
        for kind, by_ranks in rows.items()
        if kind != "source"
        for ranks, row in by_ranks.items()
    }
    table = _figures()["all_reduce"][name]
    bus = table["bus_gb_per_s"]
    sizes = (2.0 ** (table["first_power"] + step) for step in range(len(bus)))
    points["all_reduce", 8] = tuple(
        (n, n * 7 / 4 / (rate * _GIGA)) for n, rate in zip(sizes, bus, strict=True)
    )
    reduces = LinkTable(points)
    for ranks in (2, 4, 8):
        parts = tuple(
            (n, min(seconds, reduces.seconds("all_reduce", ranks, n) or seconds))
            for n, seconds in points["all_gather", ranks]
        )
        points["all_gather", ranks] = points["reduce_scatter", ranks] = parts
    return LinkTable(points)

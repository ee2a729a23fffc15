"""Published measurements: how fast kernels and collectives of some accelerators are.

Every figure is somebody's measurement, with its address; those that only checked the ones here are
in `tests/benchmarks/published.py`. Seconds of a communication are start-up + bytes / bandwidth in
each regime (a protocol or algorithm of the library), of which the library takes the fastest.
Bandwidths are whole bytes / seconds ("algbw" of nccl-tests).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from partitioner.cost_model.profiles.link_table import LinkTable

_MICRO_S = 1e-6
_GIGA = 1e9


@dataclass(frozen=True)
class Kernels:
    """Kernels of an accelerator.

    A matrix product takes ``fixed_s + (arithmetic_s^sharpness + memory_s^sharpness)^(1/sharpness)``
    with the seconds of its FLOPs and bytes at `compute_shares` and `memory_share` of the peaks: a
    skinny product, which has many bytes for its FLOPs, is slower than a square one. Seconds grow
    with FLOPs and with bytes.

    Attributes:
        compute_shares: Share of peak FLOP/s that large matrix products reach, by element type.
        memory_share: Share of the peak bandwidth that a copy reaches.
        fixed_s: Seconds to fill and drain the device, beside FLOPs and bytes.
        sharpness: 1 adds the seconds of FLOPs and bytes up, infinity takes the longer.
        attention_16_bit: Share of the peak 16-bit FLOP/s that fused attention reaches; None if it
            is not published.
    """

    compute_shares: Mapping[str, float]
    memory_share: float
    fixed_s: float
    sharpness: float
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


def _halves(share: float, byte: float) -> Mapping[str, float]:
    """Shares of 16-bit and 8-bit types."""
    wide, narrow = ("float16", "bfloat16"), ("float8e4m3fn", "float8e5m2", "int8", "uint8")
    return {**dict.fromkeys(wide, share), **dict.fromkeys(narrow, byte)}


#: By name of a table, which presets and cluster files give. Fitted to cuBLASLt and hipBLASLt by
#: shape, to a copy (BabelStream) and to FlashAttention 2, forward, of 8,192 tokens:
#:
#: - A100, H100, H200: https://github.com/Azure/AI-benchmarking-guide/tree/8fd0c6e/Azure_Results
#:   (float16 on A100, float8 on the others; the H200 products are not fitted)
#: - H100 in bfloat16: `matmul_interpolator_data.h`, key sm_90, of
#:   https://github.com/tensorflow/tensorflow/tree/372d578/third_party/xla/xla/service/gpu/model
#: - B200: https://pyptx.dev/performance/ (bfloat16; its memory share is not published there)
#: - MI300X (float8, without the sizes below 4,096, which the host's launches bound: 40 us each):
#:   https://github.com/samuel-bohman/AI-benchmarking-guide/tree/3de0c29/Azure_Results
KERNELS: Mapping[str, Kernels] = {
    "a100": Kernels(_halves(257 / 312, 257 / 312), 1.61 / 2.039, 7.9 * _MICRO_S, 1.5, 179.5 / 312),
    "h100": Kernels(_halves(800 / 989.4, 1355 / 1978.9), 2.90 / 3.35, 5.6 * _MICRO_S, 3.0, 0.331),
    "h200": Kernels(_halves(800 / 989.4, 1355 / 1978.9), 4.01 / 4.8, 5.6 * _MICRO_S, 3.0, 0.333),
    "b200": Kernels(_halves(1728 / 2250, 1728 / 2250), 0.9, 5.6 * _MICRO_S, 1.5, None),
    "mi300x": Kernels(_halves(0.458, 0.458), 4.11 / 5.3, 5.6 * _MICRO_S, 1.5, 0.251),
}  # fmt: skip


# --- communications inside a node -------------------------------------------------------------

#: All-reduce on the 8 devices of a node: 1e9 bytes/s, whole bytes / seconds x 7 / 4 ("busbw"), by
#: powers of two of bytes from the first.
#:
#: - A100: nccl-tests from 32 KiB, and B200, H200 from 32 KiB (NCCL 2.27.7):
#:   https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md
#: - H100 from 1 KiB, NCCL 2.18.5: Azure/AI-benchmarking-guide, as above
#: - MI300X from 1 KiB, rccl-tests a7809b3, 8 processes, out of place:
#:   https://github.com/hisohara/ai-scripts/tree/0780bb3/training/01_rccl-smoketest
_ALL_REDUCE_BUS: Mapping[str, tuple[int, tuple[float, ...]]] = {
    "a100": (
        15,
        (1.31, 2.45, 4.43, 7.47, 11.41, 18.00, 36.18, 72.33, 109.93, 106.16, 138.49, 171.54,
         176.92, 194.07, 222.72, 229.04, 231.41, 233.88, 234.61, 234.89),
    ),
    "h100": (
        10,
        (0.07, 0.14, 0.27, 0.53, 0.95, 1.71, 2.72, 5.40, 10.86, 21.35, 43.70, 81.93, 128.73,
         172.13, 234.45, 295.53, 361.78, 400.61, 423.38, 438.46, 466.35, 472.36, 475.54, 478.87),
    ),
    "h200": (
        15,
        (1.44, 2.93, 5.73, 11.74, 23.94, 39.93, 64.53, 107.16, 155.53, 219.89, 275.84, 346.51,
         401.93, 436.15, 450.29, 463.58, 469.17, 473.10, 477.45, 482.26),
    ),
    "b200": (
        15,
        (1.20, 2.17, 4.86, 9.54, 18.71, 36.06, 63.09, 76.48, 126.49, 254.96, 325.97, 400.60,
         568.38, 646.11, 688.99, 723.34, 734.97, 740.64, 839.07, 845.67),
    ),
    "mi300x": (
        10,
        (0.13, 0.26, 0.52, 1.04, 1.85, 4.11, 8.05, 15.71, 26.28, 33.60, 64.64, 100.05, 138.60,
         173.16, 195.85, 238.45, 271.51, 293.50, 304.96, 310.37, 313.66, 314.75, 315.26, 315.69),
    ),
}  # fmt: skip

#: (kind, ranks): (start-up in us, 1e9 bytes/s) of one regime on NVLink 4 with NVSwitch, fitted to
#: nccl-tests on 8 H100 by `autoparallel/cost_models/nccl_cost_model.py` in
#: https://github.com/meta-pytorch/autoparallel/tree/a54c252 ; all-to-all of 2 and 4, and a message
#: (half of a 2-rank all-to-all), at 2 GiB in `collective_interpolator_data.h`, sm_90:
#: https://github.com/tensorflow/tensorflow/tree/18c005b/third_party/xla/xla/service/gpu/model
_NVLINK4: Mapping[tuple[str, int], tuple[float, float]] = {
    ("all_gather", 2): (8, 537), ("all_gather", 4): (17, 434), ("all_gather", 8): (30, 394),
    ("all_reduce", 2): (10, 324), ("all_reduce", 4): (15, 236),
    ("all_to_all", 2): (50, 643), ("all_to_all", 4): (50, 469), ("all_to_all", 8): (50, 380),
    ("send", 2): (8, 321),
}  # fmt: skip
#: The same on NVLink 5: rings of 4 and 8 B200 reach 673.2 and 682.2 GB/s a device
#: (stas00/ml-engineering, as above: NVLS off), 1.86 and 1.98 times the 363 and 345 of NVLink 4.
#: Groups of 2, all-to-all and messages are not published there: NVLink 4's with twice the rate.
_NVLINK5: Mapping[tuple[str, int], tuple[float, float]] = {
    ("all_gather", 2): (8, 1074), ("all_gather", 4): (17, 898), ("all_gather", 8): (30, 780),
    ("all_reduce", 2): (10, 648), ("all_reduce", 4): (15, 449),
    ("all_to_all", 2): (50, 1286), ("all_to_all", 4): (50, 938), ("all_to_all", 8): (50, 760),
    ("send", 2): (8, 642),
}  # fmt: skip
#: NVLink 3: rings of any length reach the 234.9 GB/s a device of the table above; a message 195.1:
#: https://github.com/li-plus/playground/blob/main/cuda/nccl.md (sendrecv_perf, 8 A100). An
#: all-to-all's peers share that rate. Start-ups are NVLink 4's.
_NVLINK3: Mapping[tuple[str, int], tuple[float, float]] = {
    ("all_gather", 2): (8, 470), ("all_gather", 4): (17, 313), ("all_gather", 8): (30, 268),
    ("all_reduce", 2): (10, 235), ("all_reduce", 4): (15, 157),
    ("all_to_all", 2): (50, 390), ("all_to_all", 4): (50, 260), ("all_to_all", 8): (50, 223),
    ("send", 2): (8, 195),
}  # fmt: skip
#: Infinity Fabric: one link to each peer. An all-reduce of 2 reaches 47.7 GB/s and of 8 the table
#: above (stas00/ml-engineering, as above); groups of p use p - 1 of the seven links, at 48 GB/s:
#: https://rocm.blogs.amd.com/software-tools-optimization/mi300x-rccl-xgmi/README.html
#: Gathers of 8 run the ring of the all-reduce at the table's 315.7 GB/s a device. Start-ups are
#: those of small all-reduces in the table above.
_XGMI: Mapping[tuple[str, int], tuple[float, float]] = {
    ("all_gather", 2): (13.7, 95), ("all_gather", 4): (13.7, 191), ("all_gather", 8): (13.7, 360),
    ("all_reduce", 2): (13.7, 47.7), ("all_reduce", 4): (13.7, 95),
    ("all_to_all", 2): (13.7, 95), ("all_to_all", 4): (13.7, 191), ("all_to_all", 8): (13.7, 384),
    ("send", 2): (13.7, 47.7),
}  # fmt: skip


# --- communications between nodes ---------------------------------------------------------------

#: NCCL 2.27.5's own tuning values between nodes of 8 H100 with one 400 Gb/s port a GPU, from the
#: same autoparallel file: by (nodes, ranks a node), (start-up in us, 1e9 bytes/s) of the protocols
#: LL, LL128 and SIMPLE, for the ring of an all-gather or reduce-scatter. Its all-reduce runs the
#: ring twice: double hops, half the rate.
_RING: Mapping[tuple[int, int], tuple[tuple[float, float], ...]] = {
    (2, 1): ((11.6, 48.0), (22.5, 88.3), (22.4, 96.0)),
    (4, 1): ((21.6, 27.2), (39.5, 58.9), (50.4, 64.0)),
    (8, 1): ((41.6, 23.3), (73.5, 50.5), (106.4, 54.9)),
    (16, 1): ((81.6, 21.8), (141.5, 47.1), (218.4, 51.2)),
    (32, 1): ((161.6, 21.1), (277.5, 45.6), (442.4, 49.5)),
    (2, 2): ((11.3, 52.0), (21.8, 117.8), (29.2, 128.0)),
    (4, 2): ((18.7, 23.3), (33.6, 100.9), (64.0, 109.7)),
    (8, 2): ((33.5, 21.8), (57.2, 94.2), (133.6, 102.4)),
    (16, 2): ((63.1, 21.1), (104.4, 91.2), (272.8, 99.1)),
    (32, 2): ((122.3, 20.7), (198.8, 89.7), (551.2, 97.5)),
    (2, 4): ((15.3, 44.6), (29.4, 201.9), (42.8, 219.4)),
    (4, 4): ((26.7, 21.8), (48.8, 188.4), (91.2, 204.8)),
    (8, 4): ((49.5, 21.1), (87.6, 182.3), (188.0, 198.2)),
    (16, 4): ((95.1, 20.7), (165.2, 179.4), (381.6, 195.0)),
    (32, 4): ((186.3, 20.6), (320.4, 178.0), (768.8, 193.5)),
    (2, 8): ((23.3, 41.6), (44.6, 313.2), (70.0, 409.6)),
    (4, 8): ((42.7, 21.1), (79.2, 303.1), (145.6, 396.4)),
    (8, 8): ((81.5, 20.7), (148.4, 298.3), (296.8, 390.1)),
    (16, 8): ((159.1, 20.6), (286.8, 295.9), (599.2, 387.0)),
    (32, 8): ((314.3, 20.5), (563.6, 294.8), (1204.0, 385.5)),
}
_RING_BASE = (6.6, 14.0, 8.4)  #: The part of the start-ups that is no hop, us.
#: The tree of an all-reduce, LL, LL128, SIMPLE; each doubling of the nodes adds `_TREE_STEP` us
#: (the file's rates of 4 nodes hold for more).
_TREE: Mapping[tuple[int, int], tuple[tuple[float, float], ...]] = {
    (2, 1): ((16.8, 9.3), (31.0, 31.2), (36.4, 35.2)),
    (4, 1): ((26.8, 4.9), (48.0, 17.6), (64.4, 18.8)),
    (2, 2): ((18.0, 16.6), (33.5, 62.4), (44.4, 70.4)),
    (4, 2): ((28.0, 8.7), (50.5, 35.2), (72.4, 37.5)),
    (2, 4): ((20.4, 16.6), (38.5, 124.8), (60.4, 140.8)),
    (4, 4): ((30.4, 8.7), (55.5, 70.4), (88.4, 75.1)),
    (2, 8): ((25.2, 16.6), (48.5, 124.8), (92.4, 140.8)),
    (4, 8): ((35.2, 8.7), (65.5, 98.6), (120.4, 122.4)),
}
_TREE_STEP = (10.0, 17.0, 28.0)
#: NVLS tree, on NVSwitch, by (nodes, ranks a node); 28 us for each doubling beyond 4 nodes.
_SWITCH_TREE: Mapping[tuple[int, int], tuple[float, float]] = {
    (2, 4): (53.0, 160.0), (4, 4): (81.0, 80.0), (2, 8): (53.0, 266.7), (4, 8): (81.0, 160.0),
}  # fmt: skip
#: Share of those rates that is reached, by log2 of the bytes of each rank, of rings over whole
#: nodes and of NVLS trees (same file).
_RING_RAMP = {
    6: 0.01, 8: 0.03, 10: 0.1, 12: 0.25, 13: 0.36, 14: 0.68, 23: 0.68, 24: 0.79, 25: 0.87
}  # fmt: skip
_SWITCH_RAMP = {14: 0.1, 16: 0.15, 17: 0.28, 18: 0.41, 19: 0.55, 20: 0.72, 21: 0.88, 22: 1.0}
#: All-to-all over whole nodes: start-up in us by nodes; ports reach 1 - 0.44 / nodes of their rate.
_ALL_TO_ALL_S = {2: 37.0, 4: 42.0, 8: 60.0, 16: 98.0, 32: 290.0}
_PORT_LOSS = 0.44
_PORT = 50.0  #: 1e9 bytes/s, of the nodes that these figures are of.

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


def _fastest(rows: Iterable[tuple[float, float]], nbytes: float, share: float = 1.0) -> float:
    """Seconds of the fastest of some (start-up in us, 1e9 bytes/s), at a share of the rates."""
    return min(start * _MICRO_S + nbytes / (rate * share * _GIGA) for start, rate in rows)


def _regimes(rows: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds) by regimes."""
    return tuple((n, _fastest(rows, n)) for n in _SIZES)


def _ring(nodes: int, each: int) -> tuple[tuple[float, float], ...]:
    """The ring's rows; beyond 32 nodes by NCCL's rule: hops grow with the ranks, not the rate."""
    if (nodes, each) in _RING:
        return _RING[nodes, each]
    last, before = _RING[32, each], _RING[16, each]
    more = math.log2(nodes / 32)
    rows = zip(last, before, strict=True)
    return tuple(
        (end + (end - start) * (2 ** (more + 1) - 2), rate) for (end, rate), (start, _) in rows
    )


def _tree(nodes: int, each: int) -> tuple[tuple[float, float], ...]:
    if (nodes, each) in _TREE:
        return _TREE[nodes, each]
    steps = math.log2(nodes / 4)
    rows = zip(_TREE[4, each], _TREE_STEP, strict=True)
    return tuple((start + steps * step, rate) for (start, rate), step in rows)


def _between_nodes(inside: LinkTable, each: int, port: float, switched: bool) -> LinkTable:
    """Communications of `each` ranks on every node, by number of ranks.

    They are never faster than those of as many ranks (or all 8) of one node, which are measured:
    start-ups here are those that the library reckons with.

    Args:
        inside: Communications in one node.
        each: 1, 2, 4 or 8.
        port: 1e9 bytes/s of a device's port.
        switched: Whether switches inside the nodes reduce.
    """
    scale = port / _PORT
    points: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {}
    for nodes in _NODES:
        ranks, ring = nodes * each, _ring(nodes, each)
        gather, reduce = [], []
        for n in _SIZES:
            share = scale * (_share(_RING_RAMP, n / ranks) if each == 8 else 1.0)
            hops = zip(ring, _RING_BASE, strict=True)
            gather.append(
                min(start * _MICRO_S + n / (rate * share * _GIGA) for start, rate in ring)
            )
            options = [
                (2 * start - base) * _MICRO_S + 2 * n / (rate * share * _GIGA)
                for (start, rate), base in hops
            ]
            options += [
                start * _MICRO_S + n / (rate * scale * _GIGA) for start, rate in _tree(nodes, each)
            ]
            if switched and each >= 4:
                start, rate = _SWITCH_TREE[min(nodes, 4), each]
                start += 28 * math.log2(max(nodes, 4) / 4)
                rate *= _share(_SWITCH_RAMP, n / ranks) * scale
                options.append(start * _MICRO_S + n / (rate * _GIGA))
            reduce.append(min(options))
        start = _ALL_TO_ALL_S.get(nodes, 290.0 * nodes / 32)
        far = (nodes - 1) * each / ranks  # share of a rank's bytes that leave its node
        port_rows = [(start, port * (1 - _PORT_LOSS / nodes) / far)]
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
    points["send", 2] = _regimes([(row[0], row[1] / 2 * scale) for row in _RING[2, 1]])
    return LinkTable(points)


def _inside(name: str, rows: Mapping[tuple[str, int], tuple[float, float]]) -> LinkTable:
    """Communications inside a node.

    A gather or reduce-scatter never takes longer than an all-reduce, which does both.
    """
    points = {key: _regimes([row]) for key, row in rows.items()}
    first, bus = _ALL_REDUCE_BUS[name]
    sizes = (2.0 ** (first + step) for step in range(len(bus)))
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


def _tables(
    name: str, rows: Mapping[tuple[str, int], tuple[float, float]], port: float, switched: bool
) -> Iterable[tuple[str, Mapping[int, LinkTable]]]:
    inside = _inside(name, rows)
    yield name, {1: inside}
    network = {each: _between_nodes(inside, each, port, switched) for each in (1, 2, 4, 8)}
    yield f"{name}-network", network


#: By name of a table, which presets and cluster files give: tables by the number of ranks in each
#: group of the level below (1 on the innermost level).
LINKS: Mapping[str, Mapping[int, LinkTable]] = dict(
    table
    for arguments in (
        ("a100", _NVLINK3, 25.0, False),
        ("h100", _NVLINK4, 50.0, True),
        ("h200", _NVLINK4, 50.0, True),
        ("b200", _NVLINK5, 50.0, True),
        ("mi300x", _XGMI, 50.0, False),
    )
    for table in _tables(*arguments)
)

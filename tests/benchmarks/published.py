"""Prices of the presets beside measurements that others published, and what they were fitted to.

    python tests/benchmarks/published.py collectives|products [--all]
    python tests/benchmarks/published.py vtrain --measured FILE [--sample N] [--csv FILE]
    python tests/benchmarks/published.py megatron

"fit" tables are those that `cost_model/cluster/data/published.toml` rests on: their error is that
of the fit. "check" tables were not fitted to: theirs is an error of prediction. Collectives
print every fourth size of long tables; `--all` prints every one. The last lines have the median and
the largest error of each table. `vtrain` prices measured training iterations (see `iterations`), of
N whole groups of plans or of all, and `megatron` those of its paper; nothing was fitted to them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from distribution import WITHIN, within

from partitioner.cost_model.cluster import presets
from partitioner.cost_model.cluster.published import data_file
from partitioner.cost_model.cluster.resolve import preset_cluster
from partitioner.cost_model.prices.collectives import collective, tabled
from partitioner.cost_model.prices.compute import node_estimates
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import place
from partitioner.ir.program import CommKind
from partitioner.ir.rule import Rule
from partitioner.ir.types import TensorType

GUIDE = "https://github.com/Azure/AI-benchmarking-guide/tree/8fd0c6e/Azure_Results"
MI300X_GUIDE = "https://github.com/samuel-bohman/AI-benchmarking-guide/tree/3de0c29/Azure_Results"
ENGINEERING = "https://github.com/stas00/ml-engineering/blob/744d01e/network/README.md"
CLUSTERS = "https://github.com/stas00/ml-engineering/blob/744d01e/network/benchmarks/README.md"
RCCL = "https://github.com/hisohara/ai-scripts/tree/0780bb3/training/01_rccl-smoketest"
XLA = "https://github.com/tensorflow/tensorflow (collective_interpolator_data.h at 18c005b)"
XLA_PRODUCTS = "https://github.com/tensorflow/tensorflow (matmul_interpolator_data.h at 372d578)"
MAMF = "https://github.com/stas00/ml-engineering/blob/744d01e/compute/accelerator/README.md"
DEEPGEMM = "https://github.com/deepseek-ai/DeepGEMM/blob/a6d97a1/README.md"
PYPTX = "https://pyptx.dev/performance/"


@dataclass(frozen=True)
class Collective:
    """Published rates of a collective.

    Attributes:
        preset: Device.
        nodes: Number of nodes.
        ranks: Number of ranks in each.
        kind: Collective.
        points: (log2 of the bytes, 1e9 bytes/s).
        bus: Whether the rates are "busbw" of nccl-tests; else "algbw", whole bytes / seconds.
        source: Address.
        use: "fit" or "check".
    """

    preset: str
    nodes: int
    ranks: int
    kind: str
    points: tuple[tuple[int, float], ...]
    bus: bool
    source: str
    use: str

    def seconds(self, power: int, rate: float) -> float:
        """Published seconds."""
        n = self.nodes * self.ranks
        factor = {"all_reduce": 2 * (n - 1) / n}.get(self.kind, (n - 1) / n) if self.bus else 1
        return 2.0**power * factor / (rate * 1e9)

    def predicted_s(self, power: int) -> float:
        """Seconds that the cost model reckons with."""
        cluster = preset_cluster(self.preset, self.nodes, 8)
        ranks = tuple(
            node * 8 + device for node in range(self.nodes) for device in range(self.ranks)
        )
        kind, nbytes = CommKind(self.kind), 2.0**power
        best = tabled(kind, ranks, nbytes, cluster) or collective(kind, ranks, nbytes, cluster)
        return best.start_s(cluster.devices[0]) + best.seconds


def _series(first: int, rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((first + step, rate) for step, rate in enumerate(rates))


def _fitted() -> Iterator[Collective]:
    sources = {
        "a100": ENGINEERING, "h100": GUIDE, "h200": ENGINEERING, "b200": ENGINEERING,
        "mi300x": RCCL,
    }  # fmt: skip
    for name, row in data_file("published.toml")["all_reduce"].items():
        first, rates = row["first_power"], row["bus_gb_per_s"]
        preset = presets.full_name(name)
        points = _series(first, rates)
        yield Collective(preset, 1, 8, "all_reduce", points, True, sources[name], "fit")


#: From 1 KiB by doubling, all-reduce on 8 devices, busbw.
_A100_GUIDE = (
    0.04, 0.08, 0.17, 0.33, 0.67, 1.37, 2.70, 5.15, 10.11, 19.24, 36.22, 53.54, 71.43, 89.99,
    109.22, 132.77, 166.63, 174.18, 213.87, 221.58, 228.10, 230.22, 230.48, 231.58,
)  # fmt: skip
_H200_GUIDE = (
    0.06, 0.12, 0.23, 0.47, 0.93, 1.84, 3.72, 7.39, 14.75, 29.38, 52.96, 88.78, 138.44, 181.94,
    240.41, 300.91, 368.11, 412.45, 432.24, 442.72, 467.58, 472.57, 477.41, 479.98,
)  # fmt: skip
_MI300X_GUIDE = (
    0.04, 0.07, 0.15, 0.29, 0.59, 1.13, 2.22, 4.18, 7.50, 13.01, 22.41, 43.41, 82.53, 131.57,
    171.46, 230.35, 266.34, 290.81, 302.80, 308.89, 313.92, 315.06, 314.85, 316.82,
)  # fmt: skip
#: From 32 KiB, all-reduce of 4 nodes of 8 B200, and of 4 nodes of another cluster, busbw.
_B200_NODES = (
    0.01, 0.04, 0.45, 1.33, 2.84, 5.37, 10.38, 18.90, 35.12, 64.43, 91.19, 156.74, 197.94, 229.09,
    326.90, 361.99, 372.42, 377.34, 380.39, 381.80,
)  # fmt: skip
#: From 1 KiB, all-reduce of 2 nodes of 8 MI300X, busbw.
_MI300X_NODES = (
    0.01, 0.02, 0.03, 0.06, 0.13, 0.26, 0.51, 1.01, 1.98, 3.22, 4.74, 12.34, 23.27, 39.10, 63.26,
    106.58, 153.10, 173.70, 293.75, 325.10, 340.75, 347.90, 353.40, 356.14, 357.46,
)  # fmt: skip

COLLECTIVES: tuple[Collective, ...] = (
    *_fitted(),
    Collective("a100-80g", 1, 8, "all_reduce", _series(10, _A100_GUIDE), True, GUIDE, "check"),
    Collective("h200", 1, 8, "all_reduce", _series(10, _H200_GUIDE), True, GUIDE, "check"),
    Collective(
        "mi300x", 1, 8, "all_reduce", _series(10, _MI300X_GUIDE), True, MI300X_GUIDE, "check"
    ),
    *(
        Collective("h100", 1, ranks, kind, points, False, XLA, "check")
        for kind, ranks, points in (
            ("all_reduce", 8, ((27, 200.3), (28, 212.7), (31, 230.0))),
            ("all_reduce", 4, ((27, 181.8), (28, 189.1), (31, 201.6))),
            ("all_reduce", 2, ((27, 216.2), (28, 227.2), (31, 250.3))),
            ("all_gather", 8, ((27, 343.9), (28, 368.1), (31, 401.9))),
            ("all_gather", 4, ((27, 383.3), (28, 402.9), (31, 443.1))),
            ("all_gather", 2, ((27, 454.4), (28, 488.7), (31, 550.0))),
            ("reduce_scatter", 8, ((27, 326.2), (28, 348.1), (31, 376.1))),
            ("reduce_scatter", 4, ((27, 331.9), (31, 383.2))),
            ("reduce_scatter", 2, ((27, 330.3), (31, 410.4))),
            ("all_to_all", 8, ((26, 306.8), (27, 325.3), (30, 384.0), (31, 388.1))),
        )
    ),
    Collective(
        "h100", 1, 4, "all_to_all", ((26, 288.5), (27, 374.9), (30, 450.5)), False, XLA, "fit"
    ),
    Collective(
        "h100", 1, 2, "all_to_all", ((26, 395.8), (27, 435.8), (30, 623.8)), False, XLA, "fit"
    ),
    *(
        Collective("h200", 1, ranks, kind, ((power, rate),), True, ENGINEERING, "check")
        for kind, ranks, power, rate in (
            ("all_reduce", 4, 33, 363.3), ("all_reduce", 5, 33, 414.2),
            ("all_reduce", 6, 33, 435.6), ("all_reduce", 7, 33, 460.0),
            ("all_gather", 8, 34, 361.4), ("reduce_scatter", 8, 34, 362.9),
        )
    ),
    *(
        Collective("b200", 1, ranks, "all_reduce", ((33, rate),), True, ENGINEERING, "check")
        for ranks, rate in ((5, 677.8), (6, 778.2), (7, 811.2), (8, 838.0))
    ),
    Collective("mi300x", 1, 2, "all_reduce", ((32, 47.671),), True, ENGINEERING, "fit"),
    Collective("mi300x", 1, 8, "all_reduce", ((32, 312.912),), True, ENGINEERING, "check"),
    Collective("b200", 4, 8, "all_reduce", _series(15, _B200_NODES), True, ENGINEERING, "check"),
    Collective("mi300x", 2, 8, "all_reduce", _series(10, _MI300X_NODES), True, RCCL, "check"),
)  # fmt: skip


@dataclass(frozen=True)
class Products:
    """Published rates of matrix products.

    Attributes:
        preset: Device.
        dtype: Element type of the operands.
        rows: (batch, m, n, k, 1e12 FLOP/s).
        source: Address.
        use: "fit" or "check".
    """

    preset: str
    dtype: str
    rows: tuple[tuple[int, int, int, int, float], ...]
    source: str
    use: str

    def predicted_s(self, batch: int, m: int, n: int, k: int) -> float:
        """Seconds that the cost model reckons with."""
        out = "bfloat16" if self.dtype.startswith("float8") else self.dtype
        types = {
            "a": TensorType.of(self.dtype, (batch, m, k)),
            "b": TensorType.of(self.dtype, (batch, k, n)),
            "c": TensorType.of(out, (batch, m, n)),
        }
        node = Node("product", "aten::bmm", ("a", "b"), ("c",))
        graph = Graph("product", ("a", "b"), ("c",), (node,), types, {}, {})
        rule = rule_of(graph, node)
        assert isinstance(rule, Rule)
        placed = place(graph, node, DeviceMesh.single(0), {}, rule)
        cluster = preset_cluster(self.preset, 1, 1)
        return node_estimates(graph, placed, cluster)[0].seconds


def _guide(*rates: float) -> tuple[tuple[int, int, int, int, float], ...]:
    shapes = (
        *((size, size, size) for size in (1024, 2048, 4096, 8192, 16384)),
        (1024, 2145, 1024),
        (6144, 12288, 12288),
        (802816, 192, 768),
    )
    return tuple((1, *shape, rate) for shape, rate in zip(shapes, rates, strict=True))


F8 = "float8e4m3fn"
PRODUCTS: tuple[Products, ...] = (
    Products(
        "a100-80g", "float16",
        _guide(119.4, 221.8, 228.0, 253.7, 256.5, 132.8, 250.8, 157.8), GUIDE, "fit",
    ),
    Products(
        "h100", F8,
        _guide(274.1, 1011.3, 1216.9, 1290.1, 1377.3, 410.7, 1351.4, 663.8), GUIDE, "fit",
    ),
    Products(
        "h100", "bfloat16",
        (
            (1, 512, 512, 512, 40.7), (1, 256, 512, 2048, 62.4), (1, 1024, 512, 256, 42.9),
            (1, 4096, 256, 256, 82.2), (1, 512, 4096, 256, 134.2), (1, 256, 1024, 2048, 119.0),
            (2, 256, 512, 4096, 175.2), (4, 1024, 1024, 256, 214.7), (2, 2048, 256, 2048, 310.0),
            (1, 4096, 256, 4096, 376.2), (1, 2048, 512, 4096, 451.2), (1, 1024, 4096, 2048, 634.2),
            (1, 512, 4096, 4096, 644.1), (1, 2048, 1024, 4096, 653.1), (1, 4096, 4096, 1024, 677.4),
            (1, 2048, 4096, 2048, 715.4), (2, 1024, 4096, 4096, 747.7),
            (2, 2048, 4096, 4096, 779.3),
        ),
        XLA_PRODUCTS, "fit",
    ),
    Products(
        "b200", "bfloat16",
        (
            (1, 2048, 2048, 2048, 1006), (1, 4096, 4096, 4096, 1532), (1, 4096, 8192, 8192, 1652),
            (1, 8192, 4096, 8192, 1648), (1, 8192, 8192, 8192, 1610),
        ),
        PYPTX, "fit",
    ),
    Products(
        "mi300x", F8,
        _guide(53.13, 427.74, 955.17, 1159.23, 1015.1, 110.96, 1159.54, 605.34),
        MI300X_GUIDE, "fit",
    ),
    Products(
        "h200", F8,
        _guide(290.8, 1013.4, 1249.1, 1300.6, 1366.3, 407.9, 1318.0, 717.5), GUIDE, "check",
    ),
    Products("a100-80g", "bfloat16", ((1, 1024, 10240, 5120, 271.2),), MAMF, "check"),
    Products("h100", "bfloat16", ((1, 2048, 2048, 13312, 794.5),), MAMF, "check"),
    Products("h100", F8, ((1, 1024, 9216, 14336, 1402.6),), MAMF, "check"),
    Products("b200", "bfloat16", ((1, 1792, 16128, 3072, 1745.0),), MAMF, "check"),
    Products("mi300x", "bfloat16", ((1, 10240, 15360, 8192, 668.4),), MAMF, "check"),
    Products(
        "h100", F8,
        tuple(
            (1, *row)
            for row in (
                (64, 2112, 7168, 206), (64, 24576, 1536, 289), (64, 32768, 512, 219),
                (64, 7168, 16384, 336), (64, 4096, 7168, 287), (64, 7168, 2048, 295),
                (128, 2112, 7168, 352), (128, 24576, 1536, 535), (128, 32768, 512, 358),
                (128, 7168, 16384, 645), (128, 4096, 7168, 533), (128, 7168, 2048, 510),
                (4096, 2112, 7168, 1058), (4096, 24576, 1536, 990), (4096, 32768, 512, 590),
                (4096, 7168, 16384, 1358), (4096, 4096, 7168, 1304), (4096, 7168, 2048, 1025),
            )
        ),
        DEEPGEMM, "check",
    ),
)  # fmt: skip


def _size(power: int) -> str:
    return f"{2 ** (power % 10)} {('B', 'KiB', 'MiB', 'GiB')[power // 10]}"


def _summary(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.0%}, largest {max(sizes):.0%}"


def collectives(every: bool) -> Iterator[str]:
    """The table of collectives."""
    yield "| device | ranks | collective | bytes | published us | predicted us | error | use |"
    yield "|---|---|---|---|---|---|---|---|"
    summaries, checked = [], dict[str, list[float]]()
    for table in COLLECTIVES:
        errors = []
        for index, (power, rate) in enumerate(table.points):
            seconds, predicted_s = table.seconds(power, rate), table.predicted_s(power)
            errors.append((power, predicted_s / seconds - 1))
            if every or len(table.points) < 6 or index % 4 == 3:
                yield (
                    f"| {table.preset} | {table.nodes} x {table.ranks} | {table.kind} "
                    f"| {_size(power)} | {seconds * 1e6:,.1f} | {predicted_s * 1e6:,.1f} "
                    f"| {errors[-1][1]:+.0%} | {table.use} |"
                )
        for title, part in (
            ("up to 1 MiB", [error for power, error in errors if power <= 20]),
            ("above", [error for power, error in errors if power > 20]),
        ):
            if part:
                if table.use == "check":
                    nodes = "inside a node" if table.nodes == 1 else "between nodes"
                    checked.setdefault(f"collectives {nodes}, {title}", []).extend(part)
                summaries.append(
                    f"{table.use:5} {table.preset} {table.nodes} x {table.ranks} {table.kind} "
                    f"{title}: {_summary(part)}  ({table.source})"
                )
    yield ""
    yield from summaries
    yield from ("", WITHIN)
    yield from (within(title, found) for title, found in checked.items())


def products() -> Iterator[str]:
    """The table of matrix products."""
    yield "| device | type | batch x m x n x k | published TFLOP/s | predicted | error in s | use |"
    yield "|---|---|---|---|---|---|---|"
    summaries, checked = [], list[float]()
    for table in PRODUCTS:
        errors = []
        for batch, m, n, k, rate in table.rows:
            flops = 2 * batch * m * n * k
            seconds, predicted_s = flops / (rate * 1e12), table.predicted_s(batch, m, n, k)
            errors.append(predicted_s / seconds - 1)
            yield (
                f"| {table.preset} | {table.dtype} | {batch} x {m} x {n} x {k} | {rate:,.1f} "
                f"| {flops / predicted_s / 1e12:,.1f} | {errors[-1]:+.0%} | {table.use} |"
            )
        if table.use == "check":
            checked += errors
        summaries.append(
            f"{table.use:5} {table.preset} {table.dtype}: {_summary(errors)}  ({table.source})"
        )
    yield ""
    yield from summaries
    yield from ("", WITHIN, within("matrix products", checked))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("collectives", "products", "vtrain", "megatron"))
    parser.add_argument("--all", action="store_true", help="every size of the collectives")
    parser.add_argument("--measured", type=Path, help="the file of measured iterations")
    parser.add_argument("--sample", type=int, help="number of groups of iterations")
    parser.add_argument("--csv", type=Path, help="file for the predicted iterations")
    options = parser.parse_args()
    if options.what == "vtrain" and options.measured is None:
        parser.error("vtrain needs --measured FILE")
    if options.what in ("vtrain", "megatron"):
        import iterations  # loads PyTorch

        lines = chain(iterations.megatron(), [""], iterations.megatron_bytes())
        if options.what == "vtrain":
            lines = iterations.iterations(options.measured, options.sample, options.csv)
    else:
        lines = products() if options.what == "products" else collectives(options.all)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()

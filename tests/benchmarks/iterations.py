"""Training iterations that others measured, beside the price of the same forced plan.

The file of measurements has a header and the columns gpus, global_batch, micro_batch, hidden,
heads, layers, length, tp, dp, pp, ms. A group is one model on one number of GPUs with one global
batch: its rows are the plans for it.
"""

from __future__ import annotations

import csv
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from distribution import WITHIN, within
from megatron import STATE_BYTES, Sizes, Split, evaluated, step_s

PRESET = "a100-80g"
#: Iterations of Megatron-LM that compute each layer again: sizes, sequences of a micro-batch, plan,
#: seconds. Table 5 of https://arxiv.org/abs/2205.05198.
MEGATRON = {
    "22B": (Sizes(6144, 64, 48, 2048), 4, Split(8, 1, 1, 1), 1.42),
    "175B": (Sizes(12288, 96, 96, 2048), 1, Split(8, 1, 8, 64, stages=3), 18.13),
}
#: GiB of the first GPU's layers: weights and optimizer, with float32 gradients; activations, all of
#: them kept. Figure 1 of the same paper, as https://github.com/calculon-ai/calculon has it.
MEGATRON_GIB = {"22B": (45.56, 59.25), "175B": (45.56, 66.84)}


@dataclass(frozen=True, order=True)
class Row:
    """A plan of a training iteration; columns as of the file."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    length: int
    tp: int
    dp: int
    pp: int

    @property
    def group(self) -> tuple[int, ...]:
        """The model, the number of GPUs and the global batch."""
        sizes = self.hidden, self.heads, self.layers, self.length
        return (self.gpus, self.global_batch, *sizes)

    def predicted_ms(self) -> float:
        """Milliseconds that the cost model reckons with."""
        sizes = Sizes(self.hidden, self.heads, self.layers, self.length)
        micro_batches = self.global_batch // self.dp // self.micro_batch
        split = Split(self.tp, self.dp, self.pp, micro_batches)
        return 1e3 * step_s(sizes, self.micro_batch, split, PRESET)


def megatron() -> Iterator[str]:
    """The table of Megatron-LM's iterations."""
    yield "| model | GPUs | published s | predicted s | error |"
    yield "|---|---|---|---|---|"
    for name, (sizes, sequences, split, seconds) in MEGATRON.items():
        predicted_s = step_s(sizes, sequences, split, PRESET)
        gpus, error = split.tp * split.dp * split.pp, predicted_s / seconds - 1
        yield f"| {name} | {gpus} | {seconds:.2f} | {predicted_s:.2f} | {error:+.0%} |"


def megatron_bytes() -> Iterator[str]:
    """The table of the bytes of their first GPU: of layers, by plans of one and two each stage.

    Our plan keeps float16 gradients, which are left out, and float32 ones of theirs are added.
    """
    yield "| model | bytes of layers | published GiB | predicted GiB | error |"
    yield "|---|---|---|---|---|"
    for name, (sizes, sequences, split, _) in MEGATRON.items():
        depth = split.pp * split.stages
        one, two = (
            evaluated(replace(sizes, layers=n * depth), sequences, split, PRESET, keeps=True)
            .exact_peak[0]
            for n in (1, 2)
        )  # fmt: skip
        weights = two.resident_bytes - one.resident_bytes
        parameters = weights / (2 + STATE_BYTES)
        activations = two.activation_bytes - one.activation_bytes - 2 * parameters
        parts = ("weights and optimizer", weights + 4 * parameters), ("activations", activations)
        for (part, nbytes), gib in zip(parts, MEGATRON_GIB[name], strict=True):
            predicted = nbytes * sizes.layers / depth / 2**30
            yield f"| {name} | {part} | {gib:.2f} | {predicted:.2f} | {predicted / gib - 1:+.1%} |"


def read(path: Path) -> dict[Row, float]:
    """Measured milliseconds by row."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = [row for row in csv.reader(file) if row][1:]
    return {Row(*(int(float(cell)) for cell in row[:10])): float(row[10]) for row in rows}


def grouped(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each group, in order."""
    of: dict[tuple[int, ...], list[Row]] = {}
    for row in sorted(rows):
        of.setdefault(row.group, []).append(row)
    return list(of.values())


def sampled(rows: Iterable[Row], count: int) -> list[Row]:
    """The rows of so many whole groups of more than two plans, spread over all."""
    whole = [group for group in grouped(rows) if len(group) > 2]
    step = max(len(whole) // count, 1)
    return [row for group in whole[step // 2 :: step][:count] for row in group]


def iterations(measured: Path, sample: int | None, written: Path | None) -> Iterator[str]:
    """The table, and its errors; `written` gets the predictions as rows of such a file."""
    known = read(measured)
    rows = sorted(known) if sample is None else sampled(known, sample)
    # rows of one trace and of one sharding follow each other
    rows.sort(key=lambda row: (row.layers, row.micro_batch * row.dp, row.tp, row.dp, row))
    predicted: dict[Row, float] = {}
    begin = time.perf_counter()
    names = [field.name for field in fields(Row)]
    yield f"| {' | '.join(names)} | measured ms | predicted ms | error |"
    yield "|---" * (len(names) + 3) + "|"
    if written is not None:
        written.write_text(",".join([*names, "ms"]) + "\n", encoding="utf-8")
    for row in rows:
        predicted[row] = row.predicted_ms()
        if written is not None:
            with written.open("a", encoding="utf-8") as file:
                file.write(",".join(map(str, astuple(row))) + f",{predicted[row]:.6f}\n")
        yield (
            f"| {' | '.join(map(str, astuple(row)))} | {known[row]:,.1f} | {predicted[row]:,.1f} "
            f"| {predicted[row] / known[row] - 1:+.0%} |"
        )
    yield ""
    yield from errors(known, predicted)
    yield f"{(time.perf_counter() - begin) / len(rows):.1f} s a plan, traces included"


def errors(known: Mapping[Row, float], predicted: Mapping[Row, float]) -> Iterator[str]:
    """The distribution of the errors, by what the plan is, and how well plans are ordered."""
    yield from _distribution("all", [predicted[row] / known[row] - 1 for row in predicted])
    for name in ("micro_batch", "tp", "dp", "pp", "layers"):
        for size in sorted({getattr(row, name) for row in predicted}):
            of_size = [row for row in predicted if getattr(row, name) == size]
            found = [predicted[row] / known[row] - 1 for row in of_size]
            yield from _distribution(f"{name} {size}", found)
    yield WITHIN
    yield within("training iterations", [predicted[row] / known[row] - 1 for row in predicted])
    right = pairs = 0
    ratios = []
    for group in grouped(predicted):
        for one, other in itertools.combinations(group, 2):
            if abs(known[one] - known[other]) > 0.1 * min(known[one], known[other]):
                pairs += 1
                right += (known[one] < known[other]) == (predicted[one] < predicted[other])
        best = min(known[row] for row in group)
        ratios.append(known[min(group, key=predicted.__getitem__)] / best)
    yield f"{pairs} pairs more than 10 % apart: {right / max(pairs, 1):.1%} ordered right"
    yield (
        f"{len(ratios)} groups: the chosen plan takes {statistics.mean(ratios):.3f} of the best in "
        f"the mean, {max(ratios):.3f} at worst"
    )


def _distribution(title: str, found: Sequence[float]) -> Iterator[str]:
    sizes, bias = sorted(map(abs, found)), statistics.mean(found)
    yield (
        f"{title}: {len(found)} plans, mean error {statistics.mean(sizes):.1%}, median "
        f"{statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}, bias {bias:+.1%}"
    )

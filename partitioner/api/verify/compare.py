"""The result of a verification: tensors compared within the tolerance of their element type."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partitioner.backends.optimization import level_line
from partitioner.foundations import units
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import numbers

#: Largest difference allowed, relative to the largest magnitude of the tensor, by element type.
#: Shards are summed in another order, so each bound is about 100 units in the last place. That of
#: float8 (by ml_dtypes' names) is one: results are stored in float8 and not computed in it.
TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
}
#: The tolerances where the module's own rounding is measured and may raise them: gradients of small
#: transformers in bfloat16 differ by up to 0.025, twice the rounding error of the module's own.
MEASURED: Mapping[str, float] = {**TOLERANCE, "bfloat16": 3e-2}


#: Bytes of outputs that are compared at a time.
_PIECE_BYTES = 2**24


class VerificationError(PartitionerError, ValueError):
    """A verification that cannot be run."""


@dataclass(frozen=True)
class Difference:
    """A compared tensor."""

    name: str  #: Its name in the model.
    #: Largest absolute difference, relative to the largest finite magnitude; inf where only one
    #: side is finite, nan where types or sizes differ. Of integers and booleans the number of
    #: elements that differ.
    error: float
    tolerance: float  #: Largest error that is allowed (0: exact).
    identical: bool  #: Whether every bit is the same.
    counts: bool = False  #: Whether the error is a number of elements.
    step: float = 0.0  #: Then the largest difference of an element.
    mean: float = 0.0  #: Mean difference of floats, relative as `error` is.
    #: Error of the whole model's own rounding, which the tolerance is taken from; 0 where it is
    #: that of the element type.
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        """Tell whether the outputs are equal within the tolerance."""
        return self.identical or self.error <= self.tolerance

    @property
    def words(self) -> str:
        """The error in words."""
        if self.counts:
            return f"{self.error:.0f} element{'s differ' if self.error != 1 else ' differs'}"
        return f"relative error {self.error:.2g}"

    @property
    def allowed(self) -> str:
        """The tolerance in words."""
        if not self.rounding:
            return f"allowed {self.tolerance:g}"
        own = f"{self.rounding:.0f} elements" if self.counts else f"{self.rounding:.2g}"
        return f"allowed {self.tolerance:.4g}, for the model's own rounding of {own}"


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor of a graph that differs from that of the same graph on one device."""

    tensor: Difference  #: The worst of its wrong parts, compared.
    node: str  #: Name and op of the node that computes it.
    #: Ranks whose part is wrong; all of a pending sum, which is compared as a whole.
    ranks: tuple[int, ...]
    placement: str  #: Its placement, like ``"[x, -] on x=2 on 0,1"``.

    def __str__(self) -> str:
        plural = "s" if len(self.ranks) > 1 else ""
        return (
            f"{self.tensor.name!r} of {self.node}, {self.placement}, wrong on rank{plural} "
            f"{numbers(self.ranks)}, {self.tensor.words}"
        )


@dataclass(frozen=True)
class Verification:
    """The result of a verification; true if every output is equal (``assert result.verify()``).

    Attributes:
        ranks: Number of ranks run.
        seed: Seed of the random inputs; None if the inputs were given.
        outputs: Every output, compared.
        first: The first tensor in graph order that differs, if an output does. None although an
            output differs: the ranks compute what the graph does, but the graph is not the model.
        against: The reference that the ranks were compared with, in words.
        optimization: Level of ONNX Runtime's optimizations on both sides; "" of a module.
        whole_batch: Of a program in micro-batches: every output of the ranks beside that of a call
            with the whole batch. Empty if there is none to compare with.
        no_whole_batch: Why there is none, if a call with the whole batch fails.
        copies: Number of whole copies, each of which is compared; 0 of a partition.
    """

    ranks: int
    seed: int | None
    outputs: tuple[Difference, ...]
    first: FirstDifference | None = None
    against: str = "the whole model"
    optimization: str = ""
    whole_batch: tuple[Difference, ...] = ()
    no_whole_batch: str = ""
    copies: int = 0

    @property
    def equal(self) -> bool:
        """Tell whether every output is equal within its tolerance."""
        return all(output.equal for output in self.outputs)

    def __bool__(self) -> bool:
        return self.equal

    @property
    def verdict(self) -> str:
        """The result in a word or two."""
        if not self.equal:
            return "DIFFERENT"
        rounding = max((output.rounding for output in self.outputs if not output.counts), default=0)
        if rounding:
            return f"equal within the model's own rounding ({rounding:.2g})"
        is_rounded = any(output.rounding for output in self.outputs)
        return "equal within the model's own rounding" if is_rounded else "equal"

    def __str__(self) -> str:
        inputs = "given inputs" if self.seed is None else f"seed {self.seed}"
        ranks = units.count(self.ranks, "rank")
        ranks = f"{self.copies} whole copies on {ranks}" if self.copies else ranks
        lines = [f"{self.verdict}: {ranks} against {self.against}, {inputs}"]
        for output in self.outputs:
            how = "bit-identical" if output.identical else output.words
            mark = "" if output.equal else " DIFFERS"
            lines.append(f"  {output.name}: {how} ({output.allowed}){mark}")
        if self.whole_batch:
            lines.append(f"  against the whole batch: {self._of_whole_batch}")
        elif self.no_whole_batch:
            lines.append(f"  not compared with the whole batch: {self.no_whole_batch}")
        if self.first is not None:
            lines.append(f"  first tensor that differs: {self.first}")
        elif not self.equal:
            lines.append(
                "  no tensor inside differs from the same graph on one device: that graph is not "
                "what the model computes"
            )
        if self.optimization:
            lines.append(level_line(self.optimization))
        return "\n".join(lines)

    @property
    def _of_whole_batch(self) -> str:
        other = [output for output in self.whole_batch if not output.equal]
        if not other:
            return "equal"
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        return f"differs because of micro-batches: {other[0].name} ({other[0].words}){more}"


def compare(
    name: str,
    ours: np.ndarray,
    whole: np.ndarray,
    floor: float = 0.0,
    least: float = 0.0,
    table: Mapping[str, float] = TOLERANCE,
) -> Difference:
    """Compare a tensor of the ranks with that of the whole model, by a table of tolerances.

    Errors are relative to a magnitude of at least `floor`; a float's tolerance is at least `least`.
    """
    dtype = whole.dtype.name
    allowed = table.get(dtype)
    tolerance = 0.0 if allowed is None else max(allowed, least)
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return Difference(name, float("nan"), 0.0, identical=False)
    if _is_identical(ours, whole):
        return Difference(name, 0.0, tolerance, identical=True)
    if allowed is None:  # exact, also where float64 cannot tell integers apart
        gap = float(np.count_nonzero(ours != whole))
        step = float(np.abs(ours.astype(np.float64) - whole.astype(np.float64)).max(initial=0))
        return Difference(name, gap, 0.0, identical=False, counts=True, step=step)
    a, b = ours.astype(np.float64), whole.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gaps = np.where(same, 0.0, np.abs(a - b))
    scale = max(floor, largest(b)) or 1.0
    error, mean = float(gaps.max(initial=0.0) / scale), float(gaps.sum() / scale / max(b.size, 1))
    return Difference(name, error, tolerance, identical=False, mean=mean)


def worst(differences: Iterable[Difference]) -> Difference:
    """The worst of several comparisons of an output."""
    return max(differences, key=lambda one: (not one.equal, not one.identical, one.error))


def _is_identical(ours: np.ndarray, whole: np.ndarray) -> bool:
    """Compare bit by bit, in pieces: large outputs are not copied."""
    a, b = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (ours, whole))
    starts = range(0, a.size, _PIECE_BYTES)
    return all(np.array_equal(a[i : i + _PIECE_BYTES], b[i : i + _PIECE_BYTES]) for i in starts)


def largest(array: np.ndarray) -> float:
    """The largest finite magnitude of a tensor; 0 without any."""
    wide = array.astype(np.float64)
    return float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))


def check_memory(graph: Graph) -> None:
    """Refuse, as a VerificationError, what would not fit this machine's free memory.

    It counts the weights of the whole model and of all ranks, and a copy of both (ONNX Runtime's
    pre-packed weights, a module's gradients), and the inputs, drawn in 8 bytes an element.
    """
    weights = sum(constant.type.nbytes for constant in graph.constants.values())
    widest = max((graph.types[v].nbytes for node in graph.nodes for v in node.writes), default=0)
    drawn = 8 * sum(math.prod(graph.types[name].shape) for name in graph.inputs)
    wanted = 4 * weights + 8 * widest + 4 * drawn
    free = free_bytes()
    if free is not None and wanted > free:
        raise VerificationError(
            f"verifying needs about {units.size(wanted)} (the whole model and all ranks), "
            f"{units.size(free)} are free; verify a smaller configuration of the model"
        )


def free_bytes() -> int | None:
    """Memory that a new process can take on this machine; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None

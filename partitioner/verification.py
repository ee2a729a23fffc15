"""Proof that a partitioned model computes what the whole model does.

All ranks run in this process over simulated communications and are compared with ONNX Runtime on
the user's own model. If an output differs, both sides run again with growing sets of
intermediate values until the first tensor that differs has a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from partitioner import units
from partitioner.cost_model.cluster import resolve_cluster
from partitioner.cost_model.schedule import schedule
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx import Traced
from partitioner.ir.errors import PartitionerError
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan, resolve
from partitioner.ir.program import Programs
from partitioner.lowering import lower

#: Largest difference allowed, relative to the largest magnitude of the tensor, by element type.
#: Sums over shards are taken in another order; each bound is some 100 units in the last place,
#: of float8 (by ml_dtypes' names) one: it is what a result is stored in, not computed in.
TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 2e-2,
    "bfloat16": 1e-1,
    "float8_e4m3fn": 2**-3,
    "float8_e5m2": 2**-2,
}

#: Level of ONNX Runtime's graph optimizations: none, on both sides. Fusions (BatchNormalization
#: into Conv) that a cut between two nodes breaks would change the last bits.
_EXACT = "disable"


class VerificationError(PartitionerError, ValueError):
    """A verification that cannot be run on this machine."""


@dataclass(frozen=True)
class Difference:
    """One compared tensor.

    Attributes:
        name: Its name in the model.
        error: Largest absolute difference, relative to the largest magnitude; nan where only
            one side is finite.
        tolerance: Largest that is allowed (0: exact).
        identical: Whether every bit is the same.
    """

    name: str
    error: float
    tolerance: float
    identical: bool

    @property
    def equal(self) -> bool:
        """Within the tolerance."""
        return self.identical or self.error <= self.tolerance


@dataclass(frozen=True)
class Verification:
    """What a verification found; true if every output is equal (``assert result.verify()``).

    Attributes:
        ranks: Number of ranks run.
        seed: Of the random inputs.
        outputs: Every output, compared.
        first: The first tensor in graph order that differs, if an output does.
        node: Name and op of the node that makes it.
    """

    ranks: int
    seed: int
    outputs: tuple[Difference, ...]
    first: Difference | None = None
    node: str = ""

    @property
    def equal(self) -> bool:
        """Whether every output is equal within its tolerance."""
        return all(output.equal for output in self.outputs)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        verdict = "equal" if self.equal else "DIFFERENT"
        lines = [f"{verdict}: {self.ranks} ranks against the whole model, seed {self.seed}"]
        for output in self.outputs:
            how = "bit-identical" if output.identical else f"relative error {output.error:.2g}"
            mark = "" if output.equal else " DIFFERS"
            lines.append(f"  {output.name}: {how} (allowed {output.tolerance:g}){mark}")
        if self.first is not None:
            lines.append(
                f"  first tensor that differs: {self.first.name!r} of {self.node}, "
                f"relative error {self.first.error:.2g}"
            )
        return "\n".join(lines)


def verify_directory(directory: Path, seed: int = 0) -> Verification:
    """Verify the rank files of a saved compilation (see `verify`).

    Raises:
        ResultError: See `partitioner.load`.
        DirectoryError: There are no rank files, they are of another plan, or they hold other
            weights than the model.
    """
    from partitioner.rank_files import check_rank_files
    from partitioner.result import load

    result = load(directory)
    check_rank_files(directory, result.plan, result.graph)
    return verify(result.traced, result.programs, directory, seed)


def verify(traced: Traced, programs: Programs, directory: Path, seed: int = 0) -> Verification:
    """Compare all ranks with the whole model.

    Args:
        traced: The whole model.
        programs: What the ranks run (for the names of their values).
        directory: The rank files.
        seed: Of the random inputs, which are valid ones (indices within their tables).

    Raises:
        VerificationError: Both sides together would not fit this machine's free memory.
        BackendError: A rank fails.
    """
    from partitioner.backends.onnx.whole import run_whole
    from partitioner.backends.simulator import run_lockstep

    _check_memory(traced.graph)
    inputs = random_inputs(traced.graph, seed)
    whole = run_whole(traced.whole, traced.folder, inputs, optimization=_EXACT)
    ranks = run_lockstep(directory, inputs, optimization=_EXACT)
    outputs = tuple(
        compare(name, ranks[ours], whole[name])
        for name, ours in zip(whole, traced.graph.outputs, strict=True)
    )
    if all(output.equal for output in outputs):
        return Verification(len(programs.ranks), seed, outputs)
    first, node = _first_difference(traced.graph, programs, directory, inputs)
    return Verification(len(programs.ranks), seed, outputs, first, node)


def compare(name: str, ours: np.ndarray, whole: np.ndarray) -> Difference:
    """Compare one tensor."""
    dtype = whole.dtype.name
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return Difference(name, float("nan"), 0.0, identical=False)
    if ours.tobytes() == whole.tobytes():
        return Difference(name, 0.0, TOLERANCE.get(dtype, 0.0), identical=True)
    if TOLERANCE.get(dtype) is None:  # exact, also where float64 cannot tell integers apart
        gap = float(np.count_nonzero(ours != whole))
        return Difference(name, gap, 0.0, identical=False)
    a, b = ours.astype(np.float64), whole.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    gap = np.where(same, 0.0, np.abs(a - b)).max(initial=0.0)
    scale = np.abs(b[np.isfinite(b)]).max(initial=0.0)
    error = float(gap / scale) if scale > 0 else float(gap)
    return Difference(name, error, TOLERANCE.get(dtype, 0.0), identical=False)


def _check_memory(graph: Graph) -> None:
    """Whole model and ranks: weights twice, and ONNX Runtime's pre-packed copies of both."""
    weights = sum(constant.type.nbytes for constant in graph.constants.values())
    widest = max((graph.types[v].nbytes for node in graph.nodes for v in node.writes), default=0)
    wanted = 4 * weights + 8 * widest
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


def _first_difference(
    graph: Graph, programs: Programs, directory: Path, inputs: Mapping[str, np.ndarray]
) -> tuple[Difference | None, str]:
    """The first tensor, in graph order, that differs from the same graph on one device."""
    from partitioner.backends.onnx.emit import emit_models
    from partitioner.backends.simulator import Simulator

    alone = emit_models(uncut_programs(graph), graph)
    values = [value for node in graph.nodes for value in node.writes if value in programs.homes]
    for batch in _growing(values):
        keep = {
            rank: [
                programs.homes[v].name
                for v in batch
                if rank in programs.homes[v].placement.mesh.devices
            ]
            for rank in range(len(programs.ranks))
        }
        got = Simulator(directory, keep=keep, optimization=_EXACT).run([inputs])[0].values
        want = Simulator(alone, keep={0: batch}, optimization=_EXACT).run([inputs])[0].values[0]
        for value in batch:
            home = programs.homes[value]
            parts = {d: got[d][home.name] for d in home.placement.mesh.devices}
            found = compare(value, join(parts, home.placement), want[value])
            if not found.equal:
                node = graph.producers[value]
                return found, f"{node.name!r} ({node.op})"
    return None, ""


def _growing(values: list[str]) -> Iterator[list[str]]:
    start, size = 0, 16
    while start < len(values):
        yield values[start : start + size]
        start, size = start + size, size * 2


def uncut_programs(graph: Graph) -> Programs:
    """The graph on one rank: every value under its own name, nothing cut or sent."""
    cluster = resolve_cluster(None, 1)
    nodes = {node.name: NodePlan(0) for node in graph.nodes}
    plan = Plan(graph.digest, cluster.to_data(), (DeviceMesh.single(0),), nodes)
    return lower(graph, schedule(graph, resolve(graph, plan), cluster), 1)


def join(parts: Mapping[int, np.ndarray], placement: Placement) -> np.ndarray:
    """The whole tensor from the parts of all devices of its placement."""
    whole: dict[Region, np.ndarray] = {}
    points = dict(placement.mesh.coords())
    axes = [axis for axis, _ in placement.sharding.partial]
    how = placement.sharding.partial[0][1] if axes else ""
    merge = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    seen: set[tuple[Region, tuple[int, ...]]] = set()
    for device, region in placement.parts():
        term = (region, tuple(points[device][axis] for axis in axes))
        if term in seen:
            continue
        seen.add(term)
        whole[region] = (
            merge[how](whole[region], parts[device]) if region in whole else parts[device]
        )
    first = next(iter(parts.values()))
    out = np.empty(placement.sharding.shape, first.dtype)
    for region, part in whole.items():
        index = [np.concatenate([np.arange(s, s + n) for s, n in cut]) for cut in region]
        out[np.ix_(*index)] = part
    return out

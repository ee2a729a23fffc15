"""A model's optimisation problem as a file for other solvers; nothing is planned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from partitioner.solver import Problem
from partitioner.solver.formats.json_files import write_json


@dataclass(frozen=True)
class Dump:
    """What was written.

    Attributes:
        path: The file.
        format: "iopddl" (google/iopddl) or "dnnp" (msr-fiddle/dnn-partitioning).
        notes: What it holds, and what the format cannot say of it; one line each.
    """

    path: Path
    format: Literal["iopddl", "dnnp"]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.notes)


def write_problem(problem: Problem, path: Path, space: str, *, placement: bool) -> Dump:
    """Write a problem for other solvers.

    Args:
        problem: Of one search space.
        path: File to write; gzipped if its name ends in `.gz`. One that is there is replaced.
        space: Its space, in words.
        placement: Whether it is one of placement; else one of sharding.

    Raises:
        PartitionerError: The file cannot be written.
    """
    return (_write_dnnp if placement else _write_iopddl)(problem, path, space)


def _write_iopddl(problem: Problem, path: Path, space: str) -> Dump:
    from partitioner.solver.formats.iopddl import write
    from partitioner.solver.pairwise.convert import convert

    found = convert(problem)
    write(found.pairwise, path)
    auxiliary = found.pairwise.nodes - len(problem.nodes)
    what = (
        f"{path}: the problem of {space} in the format of google/iopddl: {len(problem.nodes)} "
        f"nodes, {auxiliary} auxiliary ones, {len(found.pairwise.edges)} edges; costs in "
        "picoseconds, usages in bytes"
    )
    return Dump(path, "iopddl", (what, *_estimate(found.uneven, found.figures)))


def _write_dnnp(problem: Problem, path: Path, space: str) -> Dump:
    from partitioner.solver.formats.dnnp_problem import to_file

    found = to_file(problem)
    write_json(found.data, path)
    what = (
        f"{path}: the problem of {space} in the format of msr-fiddle/dnn-partitioning: "
        f"{len(found.data['nodes'])} nodes, {len(found.data['edges'])} edges; costs in seconds, "
        "sizes in bytes"
    )
    lost = (
        "not in the format: a sender pays for a value once, not once a receiver; a node's size is "
        "all that it holds by itself, as if nothing were freed"
    )
    pins = (
        f"pinned nodes: {found.pinned}; those of one device share a colour class, but not which "
        "device it is"
    )
    notes = (what, lost, *_estimate(found.uneven, found.figures))
    return Dump(path, "dnnp", (*notes, pins) if found.pinned else notes)


def _estimate(uneven: int, figures: int) -> Iterable[str]:
    if uneven:
        yield (
            f"an upper estimate: {uneven} of {figures} costs and sizes differ by device, the "
            "largest counts"
        )

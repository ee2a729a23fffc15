"""A model's optimisation problem, written to a file for other solvers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from partitioner.solver.milp.formulation import MOST_ENTRIES, formulate
from partitioner.solver.milp.pulp_program import program_format, write_program
from partitioner.solver.problem import Problem, SolverError


@dataclass(frozen=True)
class Dump:
    """A written problem file."""

    path: Path  #: The file.
    #: "iopddl" (google/iopddl), or that of an integer program, "lp" or "mps".
    format: Literal["iopddl", "lp", "mps"]
    #: Lines on what it holds, and on what the format cannot express of the problem.
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.notes)


def write_problem(problem: Problem, path: Path, space: str) -> Dump:
    """Write a problem for other solvers.

    Args:
        path: File to write; gzipped if its name ends in `.gz`. An existing one is replaced. A name
            in `.lp` or `.mps` asks for the integer program.

    Raises:
        PartitionerError: The file cannot be written, or the integer program is too large.
    """
    if (program := program_format(path)) is not None:
        return _write_program(problem, path, space, program)
    return _write_iopddl(problem, path, space)


def _write_program(problem: Problem, path: Path, space: str, program: Literal["lp", "mps"]) -> Dump:
    form = formulate(problem, "throughput")
    if form is None:
        raise SolverError(
            f"{path}: the integer program of {space} has more than {MOST_ENTRIES:,} entries; give "
            "a file name that ends in .json for the problem as such"
        )
    write_program(form.milp, path)
    milp = form.milp
    size = f"{len(milp.cost)} variables ({sum(milp.integer)} binary), {len(milp.rows)} constraints"
    contents = f"{path}: the integer program of {space} in {_PROGRAMS[program]}: {size}"
    reading = (
        f"1 of the objective is {form.unit:.9g} s of the busiest device; s_v_p is 1 where "
        "the model's node number v, from 0, takes its strategy p"
    )
    return Dump(path, program, (contents, reading))


#: Formats of integer programs, in words.
_PROGRAMS = {"lp": "CPLEX's LP format", "mps": "MPS"}


def _write_iopddl(problem: Problem, path: Path, space: str) -> Dump:
    from partitioner.solver.formats.iopddl import write
    from partitioner.solver.pairwise.convert import convert

    converted = convert(problem)
    pairwise = converted.pairwise
    write(pairwise, path)
    auxiliary = pairwise.nodes - len(problem.nodes)
    contents = (
        f"{path}: the problem of {space} in the format of google/iopddl: {len(problem.nodes)} "
        f"nodes, {auxiliary} auxiliary ones, {len(pairwise.edges)} edges; costs in "
        "picoseconds, usages in bytes"
    )
    if not converted.uneven:
        return Dump(path, "iopddl", (contents,))
    estimate = (
        f"an upper estimate: {converted.uneven} of {converted.figures} costs and sizes differ by "
        "device, the largest counts"
    )
    return Dump(path, "iopddl", (contents, estimate))

"""A model's optimisation problem as a file for other solvers; nothing is planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from partitioner.compiler import constraints_of, target_cluster
from partitioner.cost_model.cluster import Cluster
from partitioner.files import check_file, refuse_to_replace
from partitioner.frontends.model import given_model
from partitioner.ir.plan import Plan
from partitioner.search.explicit import Request, first_problem
from partitioner.solver import Problem
from partitioner.solver.formats.json_files import write_json
from partitioner.strategies.constraints import Constraints
from partitioner.strategies.spaces import Family, SearchError, families

if TYPE_CHECKING:
    import onnx
    from torch import nn


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


def dump_problem(
    model: str | Path | onnx.ModelProto | nn.Module,
    path: str | Path,
    devices: int | None = None,
    *,
    strategy: str,
    example_inputs: Any = None,
    training: bool = False,
    optimizer: str = "adamw",
    parallel: str | None = None,
    cluster: str | Path | Cluster | None = None,
    memory: int | str | None = None,
    mesh: Mapping[str, int] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    constraints: Constraints | Plan | str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Dump:
    """Write the problem that `compile` would solve, for other solvers.

    Args:
        model: As of `compile`.
        path: File to write; gzipped if its name ends in `.gz`. One that is there is replaced.
        devices: Number of devices (default: the cluster's, or 1).
        strategy: "intra" writes the sharding problem in the format of google/iopddl, "inter" the
            placement problem in that of msr-fiddle/dnn-partitioning.
        example_inputs: As of `compile`, like the other arguments.
        training: Of a module: its backward pass too.
        optimizer: Of training.
        parallel: Of training; its constraints join those given.
        cluster: The devices.
        memory: Memory limit of each device.
        mesh: Axis sizes for "intra"; None is the mesh of one axis.
        dims: Sizes of symbolic dims by symbol.
        shapes: Shapes of inputs by name.
        constraints: Pins.
        progress: Called with a line of text at each stage.

    Raises:
        PartitionerError: The model or the constraints are wrong, the file cannot be written, or
            the strategy is neither of the two.
    """
    if strategy == "auto":
        raise SearchError("a problem file holds one problem: give strategy intra or inter")
    say = progress or (lambda _text: None)
    target = Path(path)
    check_file(target)
    where = target_cluster(cluster, devices, memory)
    request = Request(strategy=strategy, mesh=mesh, constraints=constraints_of(constraints))
    families(strategy, len(where), mesh)  # refuses before anything is read
    given = given_model(
        model,
        example_inputs,
        training=training,
        optimizer=optimizer,
        parallel=parallel,
        dims=dims,
        shapes=shapes,
    )
    if given.path is not None:
        refuse_to_replace(given.path, target)
    request = given.applied(request, len(where))
    say("reading the model")
    graph = given.graph
    say("building the problem")
    family, built = first_problem(graph, where, given.bound(request))
    say(f"writing {target}")
    if strategy == "inter":
        return _write_dnnp(built.problem, target, family)
    dumped = _write_iopddl(built.problem, target, family)
    if request.mesh is not None or len(where) == 1:
        return dumped
    one = "no mesh was given: this is the one of a single axis"
    return replace(dumped, notes=(dumped.notes[0], one, *dumped.notes[1:]))


def _write_iopddl(problem: Problem, path: Path, family: Family) -> Dump:
    from partitioner.solver.formats.iopddl import write
    from partitioner.solver.pairwise.convert import convert

    found = convert(problem)
    write(found.pairwise, path)
    auxiliary = found.pairwise.nodes - len(problem.nodes)
    what = (
        f"{path}: the problem of {family} in the format of google/iopddl: {len(problem.nodes)} "
        f"nodes, {auxiliary} auxiliary ones, {len(found.pairwise.edges)} edges; costs in "
        "picoseconds, usages in bytes"
    )
    return Dump(path, "iopddl", (what, *_estimate(found.uneven, found.figures)))


def _write_dnnp(problem: Problem, path: Path, family: Family) -> Dump:
    from partitioner.solver.formats.dnnp_problem import to_file

    found = to_file(problem)
    write_json(found.data, path)
    what = (
        f"{path}: the problem of {family} in the format of msr-fiddle/dnn-partitioning: "
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

"""Notes on a plan: what moves each step, what figures leave out, what is not measured.

Stored values are DTensors, which are cut like `torch.chunk`: 7 samples over 3 devices as 3, 3 and
1. Operators are cut in balanced parts, as 3, 2 and 2. Where a size is no multiple of the number of
devices, a cache or a parameter is stored in another way than it is used, and moved each step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.cluster.resolve import (
    cpu_fingerprint,
    device_type,
    is_of_gpu,
    one_process,
)
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import one_device
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.profiles.database import (
    Profile,
    default_profile,
    read_contents,
    shares,
    whole_key,
)
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.layout import DimLayout, Sharding
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import is_stored, row_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, resolve
from partitioner.problem.build import planned_on
from partitioner.report.verdict import Rival

#: Largest share of the seconds that may come from a datasheet for a verdict.
MOST_UNKNOWN = 0.05
#: Median error of predicted seconds (docs/performance.md, "Predictions beside runs"): a plan that
#: gains less may lose.
ERROR = 0.10
#: Measurements with a larger error than this say nothing on whether splitting pays.
MOST_ERROR = 0.5
#: Most parts of a profile that a note lists.
_LISTED = 2


def moved_notes(graph: Graph, plan: Plan) -> tuple[str, ...]:
    """A line on the first stored value that is moved each step for its uneven parts, if any is."""
    if not any(is_stored(node) for node in graph.nodes):
        return ()
    moved = _moved(resolve(graph, plan))
    if not moved:
        return ()
    (value, (dim, used)), *others = moved.items()
    more = f" (and {len(others)} more)" if others else ""
    own, chunks = (", ".join(map(str, sizes)) for sizes in (used.sizes(), _chunks(used)))
    note = (
        f"{value!r}{more} is moved each step: dim {dim}, of {used.size}, is cut as {own} where it "
        f"is used, and stored values only like torch.chunk, as {chunks}; a size that "
        f"{len(used.sizes())} divides stays in place"
    )
    return (note,)


def _chunks(layout: DimLayout) -> tuple[int, ...]:
    parts = len(layout.sizes())
    chunk = -(-layout.size // parts)
    return tuple(max(0, min(chunk, layout.size - part * chunk)) for part in range(parts))


def _moved(nodes: Iterable[PlacedNode]) -> dict[str, tuple[int, DimLayout]]:
    """The first dim that is cut unevenly for a use, with its layout, by stored value."""
    homes: dict[str, Sharding] = {}  # the layout of each stored value
    names: dict[str, str] = {}  # the stored value that a name stands for
    made: dict[str, Sharding] = {}  # the layouts of what nodes make
    moved: dict[str, tuple[int, DimLayout]] = {}
    for placed in nodes:
        row, operands, results = row_of(placed.node), placed.operands(), placed.results()
        made.update((value, at.sharding) for value, at in results)
        uses = [(value, at.sharding) for value, at in operands]
        if row.stored:
            homes.update((value, at.sharding) for value, at in results)
            names.update((value, value) for value, _ in results)
            uses = []
        elif row.again and operands[0][0] in names:
            names[results[0][0]] = names[operands[0][0]]
            uses = []
        elif row.in_place is not None:
            new, over = placed.node.inputs[0], placed.node.inputs[row.in_place]
            uses = [(over, made[new])] if new in made else []
        for value, used in uses:
            stored = names.get(value)
            if stored is None or stored in moved:
                continue
            for dim, (home, cut) in enumerate(zip(homes[stored].dims, used.dims, strict=True)):
                is_balanced = bool(cut.axes) and not cut.is_chunked and not cut.windows
                if is_balanced and cut != home and tuple(cut.sizes()) != _chunks(cut):
                    moved.setdefault(stored, (dim, cut))
    return moved


def graph_notes(graph: Graph, cluster: Cluster) -> tuple[str, ...]:
    """A line on what records graphs of kernels, if they are priced: no executor does by itself."""
    by = executor_of(graph).graphs_by
    return tuple(
        f"{launches()[name].title} are priced, and recorded by {by}"
        for name in cluster.launches
        if launches()[name].in_graphs
    )


#: In the place of the rival that `whole_machine` does not know.
UNKNOWN_PROCESS = Rival(
    "one process with all cores",
    0.0,
    1,
    is_known=False,
    why_unknown="was not measured well enough",
)


def whole_machine(
    graph: Graph, cluster: Cluster, priced_by: Sources, objective: str
) -> Rival | str | None:
    """A process that has the whole machine, for a plan on several of its processes.

    A sentence where its seconds are not known; None for another plan, for the objective "memory",
    and where it does not hold the model. Where the executor computes several operators in one
    kernel, the model must have been measured as a whole; else the seconds of its operators are
    added up.
    """
    whole = one_process(cluster)
    if whole is None or objective == "memory":
        return None
    if _is_unknown(priced_by):
        return _unknown(f"measures what this plan's {len(cluster)} processes take", len(cluster))
    error = max(ERROR, priced_by.error)
    if error > MOST_ERROR:
        return (
            "whether splitting pays on this machine is not known: its measurements have an error "
            f"of ± {units.share(error)}; measure again while it does nothing else"
        )
    profile = whole.devices[0].profile
    threads = profile.threads if profile else 1
    measures = f"measures one process with {threads} threads"
    if executor_of(graph).fuses:
        entry = profile.wholes.get(whole_key(graph.digest)) if profile else None
        if entry is None:
            return _unknown(measures, len(cluster))
        return _one_process(threads, entry.seconds, error)
    alone, plan = planned_on(
        graph, whole, (DeviceMesh.single(0),), {node.name: NodePlan(0) for node in graph.nodes}
    )
    if _is_unknown(Sources.of(alone, resolve(alone, plan), whole)):
        return _unknown(measures, 1)
    evaluation = one_device(alone, whole, 0)
    cost = evaluation.cost(objective)
    return _one_process(threads, cost, error) if evaluation.fits_exactly else None


def _is_unknown(sources: Sources) -> bool:
    return sources.shares().get("datasheet", 0.0) > MOST_UNKNOWN


def _unknown(measures: str, devices: int) -> str:
    return (
        "whether splitting pays on this machine is not known: "
        f"`partition profile MODEL --devices {devices}` {measures}"
    )


def _one_process(threads: int, seconds: float, error: float) -> Rival:
    name = f"one process with {threads} threads"
    return Rival(name, seconds, 1, least_gain=1 / (1 - error))


def profile_notes(
    cluster: Cluster,
    backend: Callable[[], str],
    *,
    training: bool = False,
    measures_gpus: bool = True,
) -> tuple[str, ...]:
    """A sentence for each profile of a cluster's devices that the plan's costs do not come from.

    Each says what the profile holds instead, and the command that measures. The backend is named
    only if there are measurements; GPUs whose operators it does not measure have no notes.
    """
    profiles = dict.fromkeys(spec.profile for spec in cluster.devices)
    notes = [
        _notes(cluster, one, backend, training)
        for one in profiles
        if one is not None and (measures_gpus or not is_of_gpu(one.device))
    ]
    levels = (
        f"profile {level.profile.file} has no communications over level {level.name!r}: "
        "they cost the level's rates; measure with `partition profile` under torchrun"
        for level in cluster.levels[1:]
        if level.profile is not None and not level.profile.links
    )
    return (*itertools.chain.from_iterable(notes), *levels)


def border_notes(cluster: Cluster) -> tuple[str, ...]:
    """A sentence for each profile that knows communications, but no borders of ONNX Runtime."""
    profiles = dict.fromkeys(spec.profile for spec in cluster.devices if spec.border_s is None)
    return tuple(
        f"profile {one.file} does not say what the end of a session of ONNX Runtime adds to a "
        "communication, which counts as nothing: measure with "
        f"{_command(cluster, one, training=False)}"
        for one in profiles
        if one is not None and one.links and one.border is None and not is_of_gpu(one.device)
    )


def _notes(
    cluster: Cluster, profile: Profile, backend: Callable[[], str], training: bool
) -> Iterator[str]:
    device = f"{profile.device}, {shares(profile.processes, profile.threads)}"
    here = cpu_fingerprint()
    is_here = device_type(profile.device) is not None
    measure = _command(cluster, profile, training)
    if not is_here:
        yield f"profile {profile.file} is of {profile.device}; this machine is {here}"
    backends = sorted({entry.backend for entry in profile.entries.values()})
    if backends and (name := backend()) not in backends:
        yield (
            f"profile {profile.file} has measurements of {device} by {', '.join(backends)}, none "
            f"by {name}, which runs this model: measure with {measure}"
        )
    if backends:
        return
    held = read_contents(profile.file)
    if not held:
        yield (
            f"no operator is measured in profile {profile.file}: operators cost the cluster's "
            f"rates; measure with {measure}"
        )
        return
    listed = "; ".join(map(str, held[:_LISTED]))
    more = f" and {len(held) - _LISTED} more" if len(held) > _LISTED else ""
    yield (
        f"profile {profile.file} has {listed}{more}, nothing of {device}: operators cost the "
        f"cluster's rates; measure with {measure}"
    )


def _command(cluster: Cluster, profile: Profile, training: bool) -> str:
    is_local = cluster.name == "local"
    target = f" --devices {len(cluster)}" if is_local else " --cluster FILE"
    file = "" if profile.file == default_profile() or not is_local else f" --profile {profile.file}"
    return f"partition profile MODEL{target}{' --training' if training else ''}{file}"

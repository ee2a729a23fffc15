"""`sweep` plans a model for several device counts, clusters and memory limits."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from partitioner.api.compiler import graphs_of
from partitioner.api.option_table import SweepOptions
from partitioner.api.options import open_with, request_of, takes, with_launches
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster, parse_bytes
from partitioner.foundations import units
from partitioner.foundations.files import write_file
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError
from partitioner.report.findings.bottleneck import turn_of
from partitioner.report.planned import Planned
from partitioner.report.schema import VERSION, Point, Sweep
from partitioner.report.summarise import summarise
from partitioner.report.text.tables import table
from partitioner.search.request import Request, StageClock, silent
from partitioner.search.ways.table import Table
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.spaces import check_mesh, check_space

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from partitioner.api.compiled.module_graphs import ModuleGraphs
    from partitioner.api.compiled.onnx_model import OnnxGraphs


_PARETO = "* Pareto: no other point is as good in devices, latency, throughput and memory"
_HEAD = (
    *("devices", "cluster", "limit", "plan", "latency", "throughput"),
    *("speed-up", "per device", "fullest device", "gap", ""),
)


@dataclass(frozen=True)
class Swept:
    """The points of a sweep; printed, a table of them and the answer.

    Attributes:
        data: All figures, as `partition sweep --json` prints them.
    """

    data: Sweep

    def __str__(self) -> str:
        """A table, the infeasible points with their reasons, and the answer."""
        points = self.data["points"]
        lines = table([_HEAD, *map(_row, points)])
        lines += ["", _PARETO]
        lines += [f"{_title(point)}: {point['why']}" for point in points if point["why"]]
        return "\n".join([*lines, "", self.data["answer"]])

    def report(self, path: str | Path) -> None:
        """Write the table and plots as one HTML file.

        Raises:
            FileError: The file cannot be written.
        """
        from partitioner.report.page.page import render

        write_file(Path(path), render(self.data).encode())


@takes(SweepOptions, clusters=(None,), memory=(None,), meshes=())
def sweep(
    model: str | Path | onnx.ModelProto | nn.Module,
    example_inputs: Any = None,
    devices: Iterable[int] = (),
    **options: Unpack[SweepOptions],
) -> Swept:
    """Plan a model for several numbers of devices, clusters and memory limits.

    Args:
        model: As of `compile`.
        example_inputs: As of `compile`.
        devices: Numbers of devices; empty: each cluster's own.
        **options: As the fields of `SweepOptions` are described.

    Raises:
        PartitionerError: The model is wrong, a cluster cannot have that many devices, or no point
            has as many devices as a mesh. A point without a plan is no error.
    """
    memory = options.get("memory", (None,))
    lists = {"devices": devices, "memory": memory, "meshes": options.get("meshes", ())}
    for name, values in {**lists, "clusters": options.get("clusters", (None,))}.items():
        if is_a(values, str, bytes, Mapping) or not is_a(values, Iterable):
            raise OptionError(f"{name} is {values!r}; give a list, as [{values!r}]")
    counts = tuple(dict.fromkeys(devices))
    clusters = tuple(dict.fromkeys(options.get("clusters", (None,))))
    limits = dict.fromkeys(None if limit is None else parse_bytes(limit) for limit in memory)
    if not counts and None in clusters:
        raise OptionError("give devices, or clusters with counts in their names, like 4xh100")
    request = request_of(options)
    opened = open_with(model, example_inputs, options)
    say = options.get("progress") or silent
    grid = itertools.product(clusters, limits, counts or (None,))

    def made(name: str | None, count: int | None) -> Cluster:
        cluster = with_launches(resolve_cluster(name, count), options)
        return cluster.run_by(opened.executor, training=opened.training)

    targets = _targets(grid, tuple(options.get("meshes", ())), request, made)
    say("reading the model")
    first = targets[0]
    graphs = graphs_of(opened, first.cluster, first.request, StageClock(silent))
    points = []
    for index, target in enumerate(targets, 1):
        words = _in_words(len(target.cluster), target.name, target.limit)
        say(f"point {index} of {len(targets)}: {words}")
        points.append(_point(graphs, target))
    points = _with_pareto(points)
    data = Sweep(
        version=VERSION,
        kind="sweep",
        title=opened.name,
        objective=request.objective,
        answer=answer(points, request.objective, turn_of(opened.graph)),
        points=points,
    )
    return Swept(data)


@dataclass(frozen=True)
class _Target:
    cluster: Cluster
    limit: int | None  #: Memory limit in bytes; None is the cluster's own.
    request: Request

    @property
    def name(self) -> str:
        """The cluster's name without its count: ``"4xh100" -> "h100"``; ``"2x4xh100"`` stays."""
        return re.sub(r"^\d+x(?=[a-z])", "", self.cluster.name)


def _targets(
    grid: Iterable[tuple[str | None, int | None, int | None]],
    meshes: Sequence[Mapping[str, int]],
    request: Request,
    made: Callable[[str | None, int | None], Cluster],
) -> list[_Target]:
    """All points of the grid of clusters, limits and numbers of devices, in the order of planning.

    `made` makes a cluster of its name and number of devices.

    A mesh is for the points of as many devices; an OptionError if it has none, or two have as many.
    """
    clusters = []
    for name, limit, number in grid:
        cluster = made(name, number)
        clusters.append((limit, cluster if limit is None else cluster.with_memory(limit)))
    counts = dict.fromkeys(len(cluster) for _, cluster in clusters)
    by_size: dict[int, Mapping[str, int]] = {}
    for mesh in meshes:
        check_mesh(mesh)
        size, text = math.prod(mesh.values()), _mesh_text(mesh)
        if size not in counts:
            points = ", ".join(map(str, counts))
            raise OptionError(f"mesh {text} has {size} devices; the points have {points}")
        if size in by_size:
            raise OptionError(
                f"meshes {_mesh_text(by_size[size])} and {text} both have {size} devices: give "
                "one for each number of devices"
            )
        by_size[size] = mesh
    targets = []
    for limit, cluster in clusters:
        count = len(cluster)
        check_space(request.strategy, count, by_size.get(count))
        with_mesh = replace(request, mesh=by_size.get(count))
        targets.append(_Target(cluster, limit, with_mesh.over(count)))
    return targets


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _row(point: Point) -> tuple[str, ...]:
    limit = point["memory_bytes"]
    where = (str(point["devices"]), point["cluster"], units.size(limit) if limit else "own")
    if point["latency_s"] is None or point["peak_bytes"] is None:
        return (*where, "none", "", "", "", "", "", "", "")
    rate = point["throughput_per_s"]
    return (
        *where,
        point["strategy"],
        units.seconds(point["latency_s"]),
        units.per_second(rate),
        units.times(point["speedup"]) if point["speedup"] else "",
        units.share(point["efficiency"]) if point["efficiency"] else "",
        units.size(point["peak_bytes"]),
        units.share(point["gap"]) if point["gap"] is not None else "",
        "*" if point["pareto"] else "",
    )


def _point(known: OnnxGraphs | ModuleGraphs, target: _Target) -> Point:
    cluster, request, clock = target.cluster, target.request, StageClock(silent)
    graphs = replace(known, cluster=cluster, request=request, clock=clock)
    outcome, why = None, ""
    try:
        table = Table(graphs, cluster, request, clock)
        outcome = table.beside_others(table.best())
    except (Infeasible, ConstraintError) as error:  # ConstraintError: of a kind of parallelism
        why = str(error)
    figures = outcome.evaluation if outcome else None
    cert = outcome.plan.certificate if outcome else None
    count, rate = len(cluster), figures.throughput_per_s if figures else None
    speedup, verdict = None, ""
    if outcome is not None:
        planned = Planned(
            name=outcome.graph.name,
            graph=outcome.graph,
            cluster=cluster,
            plan=outcome.plan,
            evaluation=outcome.evaluation,
            summary=summarise(outcome, cluster, request, ()),
        )
        speedup, verdict = planned.speedup, planned.verdict().line
    return Point(
        devices=count,
        cluster=target.name,
        memory_bytes=target.limit,
        strategy=cert.strategy if cert else "",
        latency_s=figures.latency_s if figures else None,
        throughput_per_s=None if rate is None else units.finite(rate),
        step_s=figures.step_s if figures else None,
        peak_bytes=max(figures.needed_bytes.values()) if figures else None,
        devices_used=figures.devices_used if figures else None,
        gap=cert.gap if cert else None,
        speedup=speedup,
        efficiency=speedup / count if speedup is not None and cluster.has_equal_devices else None,
        verdict=verdict,
        pareto=False,
        why=why,
    )


def _with_pareto(points: Sequence[Point]) -> list[Point]:
    """The points with `pareto`: no other is as good in devices, latency, step and peak at once."""
    goals: dict[int, tuple[float, ...]] = {}
    for index, point in enumerate(points):
        latency, step, peak = point["latency_s"], point["step_s"], point["peak_bytes"]
        if latency is not None and step is not None and peak is not None:
            goals[index] = (point["devices"], latency, step, peak)

    def is_best(own: tuple[float, ...]) -> bool:
        others = (other for other in goals.values() if other != own)
        return not any(all(a <= b for a, b in zip(one, own, strict=True)) for one in others)

    return [
        {**point, "pareto": index in goals and is_best(goals[index])}
        for index, point in enumerate(points)
    ]


def answer(points: Sequence[Point], objective: str, turn: str) -> str:
    """The best point by the objective, and the verdict on it, in two sentences.

    A point is compared with what its own cluster does otherwise. A plan is run for a `turn`:
    "request" or "step".
    """
    planned = [point for point in points if point["latency_s"] is not None]
    if not planned:
        return "No point of the sweep has a plan: give more devices or more memory."
    best = min(planned, key=lambda point: (_value(point, objective), point["devices"]))
    if (best["devices_used"] or 1) > 1:
        verdict = f"{best['verdict']}."
    elif any(point["devices"] > 1 for point in points):
        verdict = "Splitting is not worth it: that plan uses one device."
    else:
        verdict = "No split was tried: the sweep has one device only."
    return f"Best is {_title(best)}: {_figure(best, objective, turn)}. {verdict}"


def _value(point: Point, objective: str) -> float:
    keys = {"latency": point["latency_s"], "memory": point["peak_bytes"]}
    value = keys.get(objective, point["step_s"])
    return math.inf if value is None else value


def _figure(point: Point, objective: str, turn: str) -> str:
    value = _value(point, objective)
    if objective == "memory":
        return f"peak of {units.size(value)} on its fullest device"
    figure = "latency" if objective == "latency" else f"time between {turn}s"
    return f"{figure} of {units.seconds(value)}"


def _title(point: Point) -> str:
    return _in_words(point["devices"], point["cluster"], point["memory_bytes"])


def _in_words(devices: int, cluster: str, limit: int | None) -> str:
    memory = f" with {units.size(limit)} each" if limit else ""
    plural = "s" if devices > 1 else ""
    return f"{devices} device{plural} ({cluster}){memory}"

"""One model over device counts, clusters and memory limits."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Unpack

from partitioner import units
from partitioner.cost_model.cluster import Cluster, parse_bytes
from partitioner.cost_model.evaluate import Evaluation, best_single
from partitioner.cost_model.resolve import resolve_cluster
from partitioner.files import write_file
from partitioner.frontends.model import ModuleInput, OnnxInput, open_model
from partitioner.ir.errors import OptionError
from partitioner.ir.graph import Graph
from partitioner.options import SweepOptions, opening, request_of, takes
from partitioner.report.bottleneck import WORTH, turn_of
from partitioner.report.page.schema import VERSION, Point, Sweep
from partitioner.report.text.show import table
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import Outcome
from partitioner.search.request import Budget, Request, Say
from partitioner.solver import Infeasible
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import check_mesh, check_space

if TYPE_CHECKING:
    import onnx
    from torch import nn


Item = TypeVar("Item")


@dataclass(frozen=True)
class Axis:
    """What is varied.

    Attributes:
        devices: Device counts; empty: each cluster's own.
        clusters: Presets or files; None is the reference accelerator.
        memory: Limits in bytes; None is the cluster's own.
        meshes: Axis sizes of intra plans, of the points with as many devices; others are searched.
    """

    devices: Sequence[int]
    clusters: Sequence[str | None] = (None,)
    memory: Sequence[int | None] = (None,)
    meshes: Sequence[Mapping[str, int]] = ()


@dataclass(frozen=True)
class Swept:
    """What a sweep found; print it for the table.

    Attributes:
        data: All figures, as `partition sweep --json` prints them.
    """

    data: Sweep

    def __str__(self) -> str:
        return sweep_text(self.data)

    def report(self, path: str | Path) -> None:
        """Write a page with the table and plots: one HTML file.

        Raises:
            FileError: The file cannot be written.
        """
        from partitioner.report.page.page import render

        write_file(Path(path), render(self.data).encode())


@takes(SweepOptions)
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
        **options: As of `compile`, but:

            clusters: Preset names or TOML files; None is the reference accelerator.

            memory: Limits of each device, in bytes or as text; None is the cluster's own.

            meshes: Meshes for intra plans, as {"dp": 2, "tp": 2}, each for the points with as many
            devices as it has; points without one search theirs. Two kinds of `parallel` joined by
            "+" want a mesh for each number of devices above 1.

            time_limit_s: Of each point, in seconds.

    Raises:
        PartitionerError: The model is wrong, a cluster cannot be had with that many devices, or a
            mesh is of no point. A point without a plan is no error.
    """
    memory = options.get("memory", (None,))
    axes = Axis(
        unique(devices),
        unique(options.get("clusters", (None,))),
        unique(None if limit is None else parse_bytes(limit) for limit in memory),
        tuple(options.get("meshes", ())),
    )
    if not axes.devices and None in axes.clusters:
        raise OptionError("give devices, or clusters with counts in their names, like 4xh100")
    request = request_of(options)
    opened = open_model(model, example_inputs, **opening(options))
    progress = options.get("progress") or (lambda _text: None)
    return Swept(sweep_opened(opened, axes, request, progress))


def unique(items: Iterable[Item]) -> tuple[Item, ...]:
    """Without repetitions, in their order."""
    return tuple(dict.fromkeys(items))


def sweep_opened(
    opened: OnnxInput | ModuleInput, axes: Axis, request: Request, progress: Say
) -> Sweep:
    """Plan a model at every point of a grid (see `sweep`)."""
    targets = [
        (limit, _cluster(name, count, limit))
        for name in axes.clusters
        for limit in axes.memory
        for count in axes.devices or (None,)
    ]
    meshes = _meshes(axes.meshes, [len(cluster) for _, cluster in targets])
    requests = []
    for _, cluster in targets:
        count = len(cluster)
        check_space(request.strategy, count, meshes.get(count))
        point = replace(request, mesh=meshes.get(count))
        requests.append(point.over(count))
    progress("reading the model")
    graph = opened.graph
    rules = Rules.of(graph)
    points = []
    for index, ((limit, cluster), asked) in enumerate(zip(targets, requests, strict=True), 1):
        what = _title(len(cluster), _kind(cluster), limit)
        progress(f"point {index} of {len(targets)}: {what}")
        points.append(_point(graph, rules, cluster, limit, asked.on(graph)))
    _mark(points)
    return Sweep(
        version=VERSION,
        kind="sweep",
        title=opened.name,
        objective=request.objective,
        answer=_answer(points, request.objective, turn_of(graph)),
        points=points,
    )


def _meshes(
    given: Sequence[Mapping[str, int]], counts: Sequence[int]
) -> Mapping[int, Mapping[str, int]]:
    """The mesh of the points of each number of devices.

    Raises:
        OptionError: No point has as many devices as a mesh, or two meshes have as many.
        SearchError: One is no mesh.
    """
    found: dict[int, Mapping[str, int]] = {}
    for mesh in given:
        check_mesh(mesh)
        size, text = math.prod(mesh.values()), _mesh_text(mesh)
        if size not in counts:
            points = ", ".join(map(str, unique(counts)))
            raise OptionError(f"mesh {text} has {size} devices; the points have {points}")
        if size in found:
            raise OptionError(
                f"meshes {_mesh_text(found[size])} and {text} both have {size} devices: give one "
                "for each number of devices"
            )
        found[size] = mesh
    return found


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def sweep_text(found: Sweep) -> str:
    """A table, the infeasible points with their reasons, and the answer."""
    head = (
        "devices",
        "cluster",
        "limit",
        "plan",
        "latency",
        "throughput",
        "speed-up",
        "per device",
    )
    rows: list[tuple[str, ...]] = [(*head, "fullest device", "gap", "")]
    rows += [_row(point) for point in found["points"]]
    lines = table(rows)
    lines += ["", "* Pareto: no other point is as good in devices, latency, throughput and memory"]
    for point in found["points"]:
        if point["why"]:
            title = _title(point["devices"], point["cluster"], point["memory_bytes"])
            lines.append(f"{title}: {point['why']}")
    return "\n".join([*lines, "", found["answer"]])


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
        f"{point['speedup']:.3g}x" if point["speedup"] else "",
        units.share(point["efficiency"]) if point["efficiency"] else "",
        units.size(point["peak_bytes"]),
        units.share(point["gap"]) if point["gap"] is not None else "",
        "*" if point["pareto"] else "",
    )


def _cluster(name: str | None, count: int | None, limit: int | None) -> Cluster:
    cluster = resolve_cluster(name, count)
    return cluster if limit is None else cluster.with_memory(limit)


def _point(
    graph: Graph, rules: Rules, cluster: Cluster, limit: int | None, request: Request
) -> Point:
    _, single = best_single(graph, cluster, request.objective, rules.by_node)
    try:
        budget = Budget.of(request, lambda _text: None)
        outcome = find_plan(graph, cluster, request, budget, rules)
    except (Infeasible, ConstraintError) as error:  # of a kind of parallelism
        return _entry(cluster, limit, None, single, request.objective, str(error))
    return _entry(cluster, limit, outcome, single, request.objective, "")


def _entry(
    cluster: Cluster,
    limit: int | None,
    outcome: Outcome | None,
    single: Evaluation,
    objective: str,
    why: str,
) -> Point:
    got = outcome.evaluation if outcome else None
    cert = outcome.plan.certificate if outcome else None
    count = len(cluster)
    speedup = gain = None
    if got is not None and got.step_s and single.fits_exactly:
        speedup = single.step_s / got.step_s
        gain = single.cost(objective) / got.cost(objective)
    rate = got.throughput_per_s if got else None
    return Point(
        devices=count,
        cluster=_kind(cluster),
        memory_bytes=limit,
        strategy=cert.strategy if cert else "",
        latency_s=got.latency_s if got else None,
        throughput_per_s=None if rate is None else units.finite(rate),
        step_s=got.step_s if got else None,
        peak_bytes=max(got.held_bytes.values()) if got else None,
        devices_used=got.devices_used if got else None,
        gap=cert.gap if cert else None,
        speedup=speedup,
        efficiency=speedup / count if speedup is not None and _alike(cluster) else None,
        gain=gain,
        pareto=False,
        why=why,
    )


def _mark(points: Sequence[Point]) -> None:
    """Set `pareto`: no other point is at least as good in all four and better in one."""
    for point in points:
        own = _goals(point)
        if own is None:
            continue
        others = [goals for other in points if (goals := _goals(other)) is not None]
        point["pareto"] = not any(_dominates(other, own) for other in others)


def _goals(point: Point) -> tuple[float, ...] | None:
    """What is to be small: devices, latency, step (throughput's inverse), peak."""
    latency, step, peak = point["latency_s"], point["step_s"], point["peak_bytes"]
    if latency is None or step is None or peak is None:
        return None
    return (point["devices"], latency, step, peak)


def _dominates(one: tuple[float, ...], two: tuple[float, ...]) -> bool:
    return one != two and all(a <= b for a, b in zip(one, two, strict=True))


def _answer(points: Sequence[Point], objective: str, turn: str = "request") -> str:
    """Is splitting worth it at all? Each point beside one device of its own cluster."""
    planned = [point for point in points if point["latency_s"] is not None]
    if not planned:
        return "No point of the sweep has a plan: give more devices or more memory."
    split = [point for point in planned if (point["devices_used"] or 1) > 1]
    if not split:
        tried = any(point["devices"] > 1 for point in points)
        return (
            "Splitting is not worth it: no plan of the sweep uses more than one device."
            if tried
            else "No split was tried: the sweep has one device only."
        )
    gains = [point for point in split if point["gain"] is not None]
    if not gains:
        least = min(split, key=lambda point: point["devices"])
        best = min(split, key=lambda point: _value(point, objective))
        return (
            f"Splitting is needed: one device does not hold the model; {_place(least)} do. "
            f"Best {_figure(best, objective, turn)}: {_place(best)}."
        )
    best = max(gains, key=lambda point: (point["gain"] or 0.0, -point["devices"]))
    gain = best["gain"] or 0.0
    one = f"{gain:.3g} times as good as one device of that cluster"
    if gain < WORTH:
        return (
            f"Splitting is not worth it: the best split, {_place(best)}, has a "
            f"{_figure(best, objective, turn)}, {one}."
        )
    ideal = ""
    if objective == "throughput" and best["efficiency"] is not None:
        ideal = f", {units.share(best['efficiency'])} of the ideal {best['devices']} times"
    elif objective == "memory" and best["speedup"] is not None:
        ideal = f", at {best['speedup']:.3g} times its throughput"
    return f"Splitting pays: {_place(best)} has a {_figure(best, objective, turn)}, {one}{ideal}."


def _value(point: Point, objective: str) -> float:
    """The objective's value, infinite without a plan."""
    keys = {"latency": point["latency_s"], "memory": point["peak_bytes"]}
    value = keys.get(objective, point["step_s"])
    return math.inf if value is None else value


def _figure(point: Point, objective: str, turn: str) -> str:
    value = _value(point, objective)
    if objective == "memory":
        return f"peak of {units.size(value)} on its fullest device"
    what = "latency" if objective == "latency" else f"time between {turn}s"
    return f"{what} of {units.seconds(value)}"


def _place(point: Point) -> str:
    return _title(point["devices"], point["cluster"], point["memory_bytes"])


def _alike(cluster: Cluster) -> bool:
    return len(set(cluster.devices)) == 1


def _kind(cluster: Cluster) -> str:
    """A cluster's name without its count: ``"4xh100" -> "h100"``; ``"2x4xh100"`` stays."""
    return re.sub(r"^\d+x(?=[a-z])", "", cluster.name)


def _title(devices: int, cluster: str, limit: int | None) -> str:
    memory = f" with {units.size(limit)} each" if limit else ""
    plural = "s" if devices > 1 else ""
    return f"{devices} device{plural} ({cluster}){memory}"

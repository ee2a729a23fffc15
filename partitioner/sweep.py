"""`partition sweep`: one model over device counts, clusters and memory limits."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partitioner import units
from partitioner.cost_model.cluster import Cluster, resolve_cluster
from partitioner.cost_model.evaluate import Evaluation, one_device
from partitioner.ir.graph import Graph
from partitioner.report.schema import VERSION, Point, Sweep
from partitioner.search import Outcome, Request, search
from partitioner.show import table
from partitioner.solver import Infeasible
from partitioner.strategies import Rules

if TYPE_CHECKING:
    from partitioner.frontends.onnx import Traced

#: Gains over one device up to this ratio are not called worth the devices.
WORTH = 1.05


@dataclass(frozen=True)
class Axis:
    """What is varied.

    Attributes:
        devices: Device counts; empty: each cluster's own.
        clusters: Presets or files; None is the reference accelerator.
        memory: Limits in bytes; None is the cluster's own.
    """

    devices: Sequence[int]
    clusters: Sequence[str | None] = (None,)
    memory: Sequence[int | None] = (None,)


def sweep(
    traced: Traced,
    axes: Axis,
    request: Request,
    title: str,
    progress: Callable[[str], None] = lambda _text: None,
) -> Sweep:
    """Plan a model at every point of a grid.

    Args:
        traced: The model.
        axes: The grid.
        request: What is asked at every point; the time limit is each point's own.
        title: What to call the model.
        progress: Called with a line of text before each point.

    Raises:
        OptionError: A cluster cannot be had with that many devices.
    """
    rules = Rules.of(traced.graph)
    targets = [
        (limit, _cluster(name, count, limit))
        for name in axes.clusters
        for limit in axes.memory
        for count in axes.devices or (None,)
    ]
    points = []
    for index, (limit, cluster) in enumerate(targets, 1):
        what = _title(len(cluster), _kind(cluster), limit)
        progress(f"point {index} of {len(targets)}: {what}")
        points.append(_point(traced.graph, rules, cluster, limit, request))
    _mark(points)
    return Sweep(
        version=VERSION,
        kind="sweep",
        title=title,
        objective=request.objective,
        answer=_answer(points, request.objective),
        points=points,
    )


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
        units.per_second(float("inf") if rate is None else rate),
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
    single = one_device(graph, cluster)
    try:
        outcome = search(graph, cluster, request, rules)
    except Infeasible as error:
        return _entry(cluster, limit, None, single, str(error))
    return _entry(cluster, limit, outcome, single, "")


def _entry(
    cluster: Cluster, limit: int | None, outcome: Outcome | None, single: Evaluation, why: str
) -> Point:
    got = outcome.evaluation if outcome else None
    cert = outcome.plan.certificate if outcome else None
    count = len(cluster)
    speedup = None
    if got is not None and got.step_s and single.fits_exactly:
        speedup = single.step_s / got.step_s
    rate = got.throughput_per_s if got else None
    return Point(
        devices=count,
        cluster=_kind(cluster),
        memory_bytes=limit,
        strategy=cert.strategy if cert else "",
        latency_s=got.latency_s if got else None,
        throughput_per_s=rate if rate is not None and rate < float("inf") else None,
        step_s=got.step_s if got else None,
        peak_bytes=max(got.held_bytes.values()) if got else None,
        devices_used=got.devices_used if got else None,
        gap=cert.gap if cert else None,
        speedup=speedup,
        efficiency=speedup / count if speedup is not None else None,
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


def _answer(points: Sequence[Point], objective: str) -> str:
    """Is splitting worth it at all?"""
    planned = [point for point in points if point["latency_s"] is not None]
    if not planned:
        return "No point of the sweep has a plan: give more devices or more memory."
    key = "latency_s" if objective == "latency" else "step_s"
    what = "latency" if objective == "latency" else "time between requests"
    if objective == "memory":
        key, what = "peak_bytes", "fullest device"
    best = min(planned, key=lambda point: (point[key], point["devices"]))  # type: ignore[literal-required]
    show = units.size if objective == "memory" else units.seconds
    value = show(best[key])  # type: ignore[literal-required]
    title = _title(best["devices"], best["cluster"], best["memory_bytes"])
    alone = [point for point in planned if point["devices"] == 1]
    if not alone:
        least = min(point["devices"] for point in planned)
        asked = any(point["devices"] == 1 for point in points)
        why = "one device does not hold the model" if asked else "one device was not in the sweep"
        return f"Best {what}: {value} on {title}; {why}, the fewest that do here are {least}."
    one = min(alone, key=lambda point: point[key])  # type: ignore[literal-required]
    before: float = one[key]  # type: ignore[literal-required]
    after: float = best[key]  # type: ignore[literal-required]
    if not after or before / after < WORTH:
        return (
            f"Splitting is not worth it: one device ({one['cluster']}) has a {what} of "
            f"{show(before)}, the best of all points {value} ({title})."
        )
    gain = before / after
    return (
        f"Splitting pays: {title} has a {what} of {value}, {gain:.3g} times better than one "
        f"device ({one['cluster']}, {show(before)}), {units.share(gain / best['devices'])} of "
        f"the ideal {best['devices']} times."
    )


def _kind(cluster: Cluster) -> str:
    """A cluster's name without its count: ``"4xh100" -> "h100"``; ``"2x4xh100"`` stays."""
    return re.sub(r"^\d+x(?=[a-z])", "", cluster.name)


def _title(devices: int, cluster: str, limit: int | None) -> str:
    memory = f" with {units.size(limit)} each" if limit else ""
    plural = "s" if devices > 1 else ""
    return f"{devices} device{plural} ({cluster}){memory}"

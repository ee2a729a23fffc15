"""The cost of a plan: the referee, which knows nothing of how the plan was found."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.classes import representatives
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.executors import MOST_RANKS, executor_of
from partitioner.cost_model.memory.lifetimes import with_headroom
from partitioner.cost_model.memory.lives import MemoryPeak, Peaks, peaks
from partitioner.cost_model.memory.processors import held_curves
from partitioner.cost_model.memory.sessions import Held
from partitioner.cost_model.prices.compute import sharded_flops_share
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.cost_model.schedule.simulate import step_seconds
from partitioner.cost_model.schedule.task_list import Schedule, UnequalWorkError, schedule
from partitioner.cost_model.schedule.traffic import sent_bytes
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.graph import Graph, once_a_graph
from partitioner.ir.mesh import Copies, DeviceMesh, copies_on
from partitioner.ir.ops import rule_of
from partitioner.ir.plan import OBJECTIVES, Pipeline, PlacedNode, Plan, devices_of, place, resolve
from partitioner.ir.rule import Rule


@dataclass(frozen=True)
class Evaluation:
    """A plan's cost on a cluster; mappings have every device."""

    compute_s: Mapping[int, float]  #: Seconds of each device's nodes, one request.
    #: Seconds of its communications, without waiting and the share that compute hides.
    comm_s: Mapping[int, float]
    latency_s: float  #: One request from its inputs to its outputs, with waiting.
    peak: Mapping[int, MemoryPeak]  #: Safe memory peaks, as the search counts them.
    exact_peak: Mapping[int, MemoryPeak]  #: Peaks by liveness, for the order of the plan.
    #: Peaks of what holds the tensors: ONNX Runtime's sessions (see `sessions`), or
    #: PyTorch with what its kernels take for themselves (see `torch_kernels`) and with the results
    #: that every rank gets whole. Empty for an ONNX model in stages.
    executor_peak: Mapping[int, MemoryPeak]
    limit_bytes: Mapping[int, int]  #: Memory of each device.
    sent_bytes: Mapping[int, int]  #: Bytes that leave each device, one request.
    devices_used: int  #: Devices that run at least one node.
    sharded_flops_share: float  #: See `compute.sharded_flops_share`.
    #: Whether a request begins only when the one before it has ended, as training steps do: the
    #: forward pass of a step waits for the update of the step before. Where one group of devices
    #: runs all nodes, nobody waits, and its load is the time of a step as well.
    sequential: bool = False
    #: The devices of each whole copy, of which each serves requests of its own; () for a partition.
    #: Seconds and bytes of a device are those of a request of its copy.
    copies_on: tuple[tuple[int, ...], ...] = ()
    #: The same with the seconds and the bytes sent of what brings results to every device; None
    #: where nothing does, or where it was not asked for.
    delivered: Evaluation | None = None

    @cached_property
    def copies(self) -> Copies | None:
        """The whole copies, with the load of the busiest device of each; None for a partition."""
        seconds = (max(self.load_s[device] for device in copy) for copy in self.copies_on)
        return Copies(self.copies_on, tuple(seconds)) if self.copies_on else None

    @cached_property
    def serving(self) -> Mapping[int, float]:
        """The share of a stream's requests that each device works on: 1 but in whole copies."""
        if self.copies is None:
            return dict.fromkeys(self.compute_s, 1.0)
        of_copies = zip(self.copies.devices, self.copies.seconds, strict=True)
        return {device: self.step_s / (s or 1) for copy, s in of_copies for device in copy}

    @cached_property
    def load_s(self) -> Mapping[int, float]:
        """Seconds that each device is busy, one request."""
        return {device: seconds + self.comm_s[device] for device, seconds in self.compute_s.items()}

    @property
    def step_s(self) -> float:
        """Seconds between requests: the busiest device's load, or the latency if in sequence.

        Those of whole copies are as if each gave its results at equal distances.
        """
        if self.copies is not None:
            return self.copies.step_s
        return self.latency_s if self.sequential else max(self.load_s.values())

    @property
    def throughput_per_s(self) -> float:
        """Requests a second of a full stream; inf if a request takes no time."""
        return 1 / self.step_s if self.step_s else math.inf

    @cached_property
    def over_bytes(self) -> Mapping[int, int]:
        """Excess of the safe peak over the limit, of the devices that are above it."""
        over = {d: peak.bytes - self.limit_bytes[d] for d, peak in self.peak.items()}
        return {device: excess for device, excess in over.items() if excess > 0}

    @property
    def fits(self) -> bool:
        """Tell whether every device is within its limit by the safe peak."""
        return not self.over_bytes

    @cached_property
    def held_bytes(self) -> Mapping[int, int]:
        """Bytes to reserve on each device: the safe peak or, where that is over, the exact one."""
        reserved = {device: peak.bytes for device, peak in self.peak.items()}
        return reserved | {device: self.exact_bytes[device] for device in self.over_bytes}

    @cached_property
    def exact_bytes(self) -> Mapping[int, int]:
        """The exact peak of each device, with head-room."""
        return {
            device: peak.resident_bytes + with_headroom(peak.activation_bytes)
            for device, peak in self.exact_peak.items()
        }

    @cached_property
    def needed_bytes(self) -> Mapping[int, int]:
        """Bytes that each device must have: `held_bytes`, or more where the executor holds more."""
        nothing = MemoryPeak(0, 0, 0, "")
        return {
            device: max(nbytes, self.executor_peak.get(device, nothing).bytes)
            for device, nbytes in self.held_bytes.items()
        }

    @cached_property
    def short_bytes(self) -> Mapping[int, int]:
        """Excess of `needed_bytes` over the limit, of the devices that are above it."""
        short = {d: nbytes - self.limit_bytes[d] for d, nbytes in self.needed_bytes.items()}
        return {device: excess for device, excess in short.items() if excess > 0}

    def needed_peak(self, device: int) -> MemoryPeak:
        """The peak that `needed_bytes` counts."""
        if self.needed_bytes[device] > self.held_bytes[device]:
            return self.executor_peak[device]
        return (self.exact_peak if device in self.over_bytes else self.peak)[device]

    @property
    def fits_exactly(self) -> bool:
        """Tell whether every device is within its limit by `needed_bytes`."""
        return not self.short_bytes

    def cost(self, objective: str) -> float:
        """Value of an objective: seconds of "throughput" and "latency", bytes of "memory".

        Raises:
            CostError: There is no such objective.
        """
        if objective == "throughput":
            return self.step_s
        if objective == "latency":
            return self.latency_s
        if objective == "memory":
            return max(self.needed_bytes.values())
        raise CostError(f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}")


def evaluate(
    graph: Graph,
    plan: Plan,
    cluster: Cluster,
    everywhere: frozenset[str] = frozenset(),
    resharder: Resharder | None = None,
    *,
    delivers: bool = True,
) -> Evaluation:
    """Cost of a plan, without that of bringing outputs but those in `everywhere` to all devices.

    Where it `delivers`, see `evaluate_placed`.

    A `resharder` of the cluster, if given, remembers reshards for the next plan.

    Raises:
        PlanError: The plan does not fit the graph.
        CostError: The plan uses a device that the cluster does not have.
    """
    with no_collection():
        placed = resolve(graph, plan)
        return evaluate_placed(
            graph, placed, cluster, plan.pipeline, everywhere, resharder, delivers=delivers
        )


@once_a_graph
def one_device(
    graph: Graph, cluster: Cluster, device: int = 0, micro_batches: int | None = None
) -> Evaluation:
    """Cost of the whole graph on one device, whether or not it fits; micro-batches in turn."""
    mesh = DeviceMesh.single(device)
    placed, pipeline = [], None
    for node in graph.nodes:
        rule = rule_of(graph, node)
        placed.append(place(graph, node, mesh, {}, rule if isinstance(rule, Rule) else None))
    if micro_batches is not None:
        pipeline = Pipeline("1f1b" if graph.backward else "forward", micro_batches)
    return evaluate_placed(graph, placed, cluster, pipeline, delivers=False)


def best_single(
    graph: Graph, cluster: Cluster, objective: str, micro_batches: int | None = None
) -> tuple[int, Evaluation]:
    """The best device for the whole graph, if possible one that holds it, and its cost there."""
    first = cluster.first_of_spec.values()
    alone = {d: one_device(graph, cluster, d, micro_batches) for d in first}
    best = min(alone, key=lambda d: (not alone[d].fits_exactly, alone[d].cost(objective)))
    return best, alone[best]


def observed_schedule(
    graph: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    pipeline: Pipeline | None = None,
    everywhere: frozenset[str] = frozenset(),
    resharder: Resharder | None = None,
    units: Mapping[str, int] | None = None,
    first: Mapping[int, int] | None = None,
) -> tuple[Schedule, Mapping[int, int]]:
    """The tasks of one device of each class of equal work, and the one that each device equals.

    `units` are as of `step_order`, `first` the `representatives` if they are known.
    """
    resharder = resharder or Resharder(cluster)
    first = first or representatives(graph, placed, cluster, resharder, everywhere)
    try:
        observed = frozenset(first.values())
        tasks = schedule(graph, placed, cluster, resharder, everywhere, observed, pipeline, units)
    except UnequalWorkError:
        first = {device: device for device in range(len(cluster))}
        tasks = schedule(
            graph, placed, cluster, resharder, everywhere, pipeline=pipeline, units=units
        )
    return tasks, first


def evaluate_placed(
    graph: Graph,
    placed: Sequence[PlacedNode],
    cluster: Cluster,
    pipeline: Pipeline | None = None,
    everywhere: frozenset[str] = frozenset(),
    resharder: Resharder | None = None,
    *,
    delivers: bool = True,
) -> Evaluation:
    """Cost of a resolved plan; in a plan with stages a request is a step of all micro-batches.

    Where the plan `delivers`, the bytes of the executor are with all that ranks bring to every
    device, and `Evaluation.delivered` has the seconds of that; above `MOST_RANKS` devices there are
    no ranks.
    """
    devices, busy = range(len(cluster)), devices_of(placed)
    absent = sorted(busy.difference(devices))
    if absent:
        raise CostError(
            f"plan uses device {absent[0]}; cluster {cluster.name!r} has {len(cluster)}"
        )
    resharder = resharder or Resharder(cluster)
    tasks, first = observed_schedule(graph, placed, cluster, pipeline, everywhere, resharder)
    run, class_of = tasks, first
    brought = graph.delivered if delivers and len(cluster) <= MOST_RANKS else everywhere
    if brought != everywhere:
        run, class_of = observed_schedule(graph, placed, cluster, pipeline, brought, resharder)
    most, held = Peaks.of(tasks), _held_by_executor(graph, run, cluster)

    def of_all(
        figures: Mapping[int, MemoryPeak], of: Mapping[int, int]
    ) -> Mapping[int, MemoryPeak]:
        nothing = MemoryPeak(0, 0, 0, "")
        return {device: figures.get(of[device], nothing) for device in devices}

    evaluation = Evaluation(
        **_sums(tasks, first),
        peak=of_all(most.safe, first),
        exact_peak=of_all(most.exact, first),
        executor_peak=of_all(held, class_of) if held else {},
        limit_bytes={device: cluster.devices[device].memory_bytes for device in devices},
        devices_used=len(busy),
        sharded_flops_share=sharded_flops_share(graph, placed),
        sequential=not tasks.order.is_whole
        or (bool(graph.backward) and len({node.mesh.devices for node in placed}) > 1),
        copies_on=copies_on(node.mesh for node in placed),
    )
    if run is tasks:
        return evaluation
    return replace(evaluation, delivered=replace(evaluation, **_sums(run, class_of)))


class _Sums(TypedDict):
    """The fields of an `Evaluation` that add up tasks."""

    compute_s: Mapping[int, float]
    comm_s: Mapping[int, float]
    latency_s: float
    sent_bytes: Mapping[int, int]


def _sums(tasks: Schedule, class_of: Mapping[int, int]) -> _Sums:
    """Add up the tasks of a schedule, where each device does what the one of its class does."""
    compute_s: dict[int, float] = defaultdict(float)
    comm_s: dict[int, float] = defaultdict(float)
    for task in tasks.tasks:
        total = compute_s if task.kind == "compute" else comm_s
        for device, seconds in task.devices.items():
            total[device] += seconds * tasks.times(task)
    sent = sent_bytes(tasks)
    return _Sums(
        compute_s={device: compute_s.get(of, 0.0) for device, of in class_of.items()},
        comm_s={device: comm_s.get(of, 0.0) for device, of in class_of.items()},
        latency_s=step_seconds(tasks),
        sent_bytes={device: round(sent.get(of, 0.0)) for device, of in class_of.items()},
    )


def _held_by_executor(graph: Graph, run: Schedule, cluster: Cluster) -> Mapping[int, MemoryPeak]:
    """Count what the executor of a schedule holds; nothing if it is not known."""
    if executor_of(graph).in_sessions:
        limits = {device: spec.memory_bytes for device, spec in enumerate(cluster.devices)}
        held = Held.of(graph, run, limits)
        return {} if held is None else held.peaks
    gpus = {device for device, spec in enumerate(cluster.devices) if spec.is_gpu}
    return peaks(run, held_curves(graph, run, gpus), int, headroom=False)

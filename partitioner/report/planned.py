"""A plan with its graph, cluster and figures: the value that reports, pictures and texts read.

Its devices are shown each in a lane or, of a large cluster, equal ones in one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from partitioner.cost_model.cluster.launches import launches
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.prices.compute import Sources
from partitioner.cost_model.schedule.task_list import Schedule, schedule
from partitioner.cost_model.schedule.tasks import Task
from partitioner.foundations.files import ResultError
from partitioner.foundations.no_gc import no_collection
from partitioner.ir.checks import is_a
from partitioner.ir.errors import PartitionerError, did_you_mean, hints_keywords
from partitioner.ir.graph import Graph
from partitioner.ir.plan import PlacedNode, Plan, resolve
from partitioner.report.delivery import Delivery
from partitioner.report.one_device import OneDevice
from partitioner.report.summary import certificate_line, lines
from partitioner.report.verdict import Rival, Verdict, rivals_of
from partitioner.search.request import MOST_EXPLICIT

#: Significant digits to which the seconds of devices in one lane agree.
DIGITS = 3


class UnknownNodeError(PartitionerError, ValueError):
    """A name of no node, and of no tensor that a node makes."""


@hints_keywords
@dataclass(frozen=True, repr=False, kw_only=True)
class Planned:
    """A graph with its plan and the plan's figures."""

    name: str  #: Of the model, for people and file names.
    graph: Graph
    cluster: Cluster
    plan: Plan
    evaluation: Evaluation
    summary: Mapping[str, Any]  #: The facts that ``--json`` prints.
    #: Seconds that each stage of the compilation took.
    seconds: Mapping[str, float] = field(default_factory=dict)
    #: Faults of a saved compilation that can still be used, one line each.
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        certificate = self.plan.certificate
        how = certificate_line(certificate) if certificate else "plan without a certificate"
        return f"<{type(self).__name__} {self.graph.name!r} on {self.cluster.name}: {how}>"

    def __str__(self) -> str:
        """The summary in lines, as the command prints it."""
        if not self.summary:  # a plan written by hand
            return repr(self)
        head = f"{self.graph.name} on {self.cluster.name}: {self.verdict().line}"
        return "\n".join([head, *lines(self.summary, self.verdict(), self.search_s)])

    @property
    def objective(self) -> str:
        """The objective of the search; "throughput" for a plan written by hand.

        It is that of the alternatives in the summary, too, of a plan that lost its certificate.
        """
        certificate = self.plan.certificate
        known = self.summary.get("objective", "throughput")
        return certificate.objective if certificate else str(known)

    @property
    def search_s(self) -> float | None:
        """Seconds that the search took; None if unknown."""
        return self.seconds.get("searching")

    @property
    def cost(self) -> float:
        """The plan's cost by its objective: seconds, or bytes for "memory"."""
        return self.evaluation.cost(self.objective)

    @cached_property
    def one_device(self) -> OneDevice:
        """The whole model on one device, with which the plan is compared."""
        if self.summary:
            return OneDevice(**self.summary["one_device"])
        with no_collection():
            run = (self.graph, self.plan.micro_batches)
            return OneDevice.best(self.cluster, self.objective, self.plan.kind, run)

    @cached_property
    def delivery(self) -> Delivery | None:
        """Price what brings results to every rank, which no other figure has; None if nothing."""
        return Delivery.of(self.graph, self.plan, self.cluster, self.evaluation)

    @property
    def speedup(self) -> float | None:
        """The speed-up over one device; None where one device does not hold the model.

        By the predicted seconds between requests, or of a training step.
        """
        return self.one_device.gain(self.evaluation, "throughput")

    @cached_property
    def rivals(self) -> tuple[Rival, ...]:
        """Alternatives to the plan, as its summary has them."""
        if "alternatives" in self.summary:
            return tuple(Rival(**rival) for rival in self.summary["alternatives"])
        name = self.cluster.devices[self.one_device.device].name
        return rivals_of(self.objective, self.one_device, name)

    @cached_property
    def _sources(self) -> Mapping[str, float]:
        if self.summary:
            return self.summary["cost_sources"]  # type: ignore[no-any-return]
        return Sources.of(self.graph, self.placed, self.cluster).shares()

    def verdict(self, measured_s: float | None = None) -> Verdict:
        """The plan beside what one would do instead, by its seconds in a run if there was one.

        A plan that was chosen by runs has those of its own.
        """
        certificate = self.plan.certificate
        if measured_s is None and certificate is not None:
            kept = (trial.measured_s for trial in certificate.trials if trial.kept)
            measured_s = next(kept, None)
        return Verdict(
            self.objective,
            bool(self.graph.backward),
            self.evaluation,
            self.one_device,
            self.rivals,
            self.delivery,
            self._sources,
            measured_s,
            self._launches,
        )

    @property
    def _launches(self) -> str:
        """Title of the way to submit kernels, where the executor does not take it by itself."""
        own = executor_of(self.graph).submits(training=bool(self.graph.backward))
        return " and ".join(launches()[by].title for by in self.cluster.launches if by != own)

    def node(self, name: str) -> PlacedNode:
        """A node, or the node that makes a tensor, with its placements."""
        graph = self.graph
        if not is_a(name, str):
            raise UnknownNodeError(f"{name!r} is not the name of a node or tensor")
        node = graph.by_name.get(name) or graph.producers.get(name)
        if node is not None:
            return self.placed[graph.order[node.name]]
        if name in graph.inputs or name in graph.constants:
            which = "an input" if name in graph.inputs else "a constant"
            readers = [repr(reader.name) for reader in graph.consumers.get(name, ())]
            more = f" and {len(readers) - 3} more" if len(readers) > 3 else ""
            read = f"; {', '.join(readers[:3])}{more} read it" if readers else ""
            raise UnknownNodeError(f"{name!r} is {which} of the model: no node makes it{read}")
        hint = did_you_mean(name, (*graph.by_name, *graph.producers))
        hint = hint or "; `partition show DIR --all` lists all names"
        raise UnknownNodeError(f"the model has no node or tensor {name!r}{hint}")

    @cached_property
    def placed(self) -> tuple[PlacedNode, ...]:
        """The plan's decisions on the nodes, in graph order."""
        with no_collection():
            return resolve(self.graph, self.plan)

    @cached_property
    def node_tasks(self) -> Mapping[str, Task]:
        """The task of `schedule` that computes each node, by name."""
        tasks = self.schedule.tasks
        return {task.placed.node.name: task for task in tasks if task.placed is not None}

    @property
    def run_schedule(self) -> Schedule:
        """The tasks that the ranks run: those of `schedule`, and what the cost leaves out."""
        return self.schedule

    @cached_property
    def schedule(self) -> Schedule:
        """The tasks whose seconds the plan's cost counts, in the global order."""
        with no_collection():
            pipeline = self.plan.pipeline
            return schedule(self.graph, self.placed, self.cluster, pipeline=pipeline)


def check_explicit(cluster: Cluster) -> None:
    """Refuse, as a ResultError, more than `MOST_EXPLICIT` devices, too many for programs."""
    if len(cluster) > MOST_EXPLICIT:
        raise ResultError(
            f"the plan is for {len(cluster)} devices: programs are made for up to {MOST_EXPLICIT} "
            "devices; `partition show` and the report say which device does what"
        )


@dataclass(frozen=True)
class Lanes:
    """Sets of devices that reports show as one."""

    members: tuple[tuple[int, ...], ...]  #: Devices of each lane, ascending.
    busiest: tuple[int, ...]  #: Of each lane the device whose tasks stand for all.
    fullest: tuple[int, ...]  #: Of each lane the device whose bytes stand for all.

    @cached_property
    def of(self) -> dict[int, int]:
        """The lane of each device."""
        return {device: lane for lane, members in enumerate(self.members) for device in members}

    def among(self, devices: Iterable[int]) -> list[int]:
        """The lanes of some devices, each once."""
        return list(dict.fromkeys(self.of[device] for device in devices))


def lanes(result: Planned) -> Lanes:
    """The lanes of a plan's devices.

    Up to `MOST_EXPLICIT` devices each has a lane. Above, devices share one that are equal in the
    cluster, run the same groups' nodes and have equal figures, to `DIGITS` digits; if that leaves
    more lanes than `MOST_EXPLICIT`, their figures need not be equal.
    """
    devices = range(len(result.cluster))
    if len(devices) <= MOST_EXPLICIT:
        alone = tuple(devices)
        return Lanes(tuple((device,) for device in devices), alone, alone)
    figures = result.evaluation
    groups: dict[int, list[int]] = {device: [] for device in devices}
    for group, mesh in enumerate(result.plan.groups):
        for device in mesh.devices:
            groups[device].append(group)

    def kind(device: int) -> tuple[object, ...]:
        return (result.cluster.devices[device], *groups[device])

    def equal(device: int) -> tuple[object, ...]:
        seconds = figures.compute_s[device], figures.comm_s[device], figures.load_s[device]
        peak = figures.peak[device]
        return (
            *kind(device),
            *(f"{value:.{DIGITS}g}" for value in seconds),
            peak.bytes,
            peak.resident_bytes,
        )

    for key in (equal, kind):
        sets: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for device in devices:
            sets[key(device)].append(device)
        if len(sets) <= MOST_EXPLICIT:
            break
    return joined(result, sets.values())


def joined(result: Planned, members: Iterable[Sequence[int]]) -> Lanes:
    """Lanes of these sets of devices, with the members that stand for them."""
    figures, sets = result.evaluation, [tuple(devices) for devices in members]
    return Lanes(
        tuple(sets),
        tuple(max(lane, key=lambda device: figures.load_s.get(device, 0.0)) for lane in sets),
        tuple(max(lane, key=lambda device: figures.needed_bytes.get(device, 0)) for lane in sets),
    )

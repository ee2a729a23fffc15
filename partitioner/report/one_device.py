"""The whole model on one device: the figures that a plan is compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, best_single, one_device
from partitioner.ir.graph import Graph
from partitioner.rewrites.graph_writer import chosen


@dataclass(frozen=True)
class OneDevice:
    """The whole model on the best device alone, as predicted."""

    device: int
    step_s: float  #: Seconds between requests, or of a training step.
    latency_s: float  #: Seconds of one request.
    held_bytes: int  #: Bytes to reserve, as `Evaluation.needed_bytes`.
    limit_bytes: int  #: Memory of the device.
    #: Devices of the cluster that hold the whole model each; 0 where copies are no rival: of
    #: training, of whole copies themselves, and with one device.
    copies: int
    #: Requests a second that a copy of the model on each of them serves, all of them busy; None if
    #: they take no time.
    copies_per_s: float | None
    #: Micro-batches that it runs one after the other; None for the whole batch at once.
    micro_batches: int | None = None

    @classmethod
    def best(
        cls, cluster: Cluster, objective: str, kind: str, *runs: tuple[Graph, int | None]
    ) -> OneDevice:
        """The best device by an objective, and the best way to run the model there.

        A run is a graph, of which nothing that is offered is taken, and the micro-batches that run
        it one after the other; None for the whole batch at once. A plan of some `kind` is compared.
        """
        runs = tuple(
            (chosen(graph, frozenset()) if graph.optional else graph, count)
            for graph, count in runs
        )
        alone = [(*best_single(graph, cluster, objective, n), n) for graph, n in runs]
        device, figures, count = min(
            alone, key=lambda run: (not run[1].fits_exactly, run[1].cost(objective), run[2] or 1)
        )
        copies = (0, None) if kind == "copies" else _copies(cluster, runs, known=figures)
        return cls(
            device,
            figures.step_s,
            figures.latency_s,
            figures.needed_bytes[device],
            figures.limit_bytes[device],
            copies[0],
            copies[1],
            count,
        )

    @property
    def throughput_per_s(self) -> float | None:
        """Requests a second of a full stream; None, as in JSON, if they take no time."""
        return 1 / self.step_s if self.step_s else None

    @property
    def fits(self) -> bool:
        """Tell whether the device holds the model."""
        return self.held_bytes <= self.limit_bytes

    def cost(self, objective: str) -> float:
        """Value of an objective, as `Evaluation.cost`."""
        costs = {"latency": self.latency_s, "memory": self.held_bytes}
        return costs.get(objective, self.step_s)

    def gain(self, plan: Evaluation, objective: str) -> float | None:
        """Divide this device's cost by that of a plan; by "throughput" that is the speed-up.

        None where the device does not hold the model, or the plan costs nothing.
        """
        cost = plan.cost(objective)
        return self.cost(objective) / cost if self.fits and cost else None


def _copies(
    cluster: Cluster, runs: Sequence[tuple[Graph, int | None]], known: Evaluation
) -> tuple[int, float | None]:
    """Devices that hold the model, and their requests a second; one's best run is `known`."""
    if len(cluster) == 1 or any(graph.backward for graph, _ in runs):
        return 0, None
    crowded = cluster.crowded
    count, rate_per_s = 0, 0.0
    for spec, devices in Counter(crowded.devices).items():
        first = crowded.first_of_spec[spec]
        alone = [known]
        if crowded is not cluster or not cluster.has_equal_devices:
            alone = [one_device(graph, crowded, first, number) for graph, number in runs]
        steps_s = [figures.step_s for figures in alone if figures.fits_exactly]
        if not steps_s:
            continue
        count += devices
        if not min(steps_s):
            return count, None
        rate_per_s += devices / min(steps_s)
    return count, rate_per_s or None

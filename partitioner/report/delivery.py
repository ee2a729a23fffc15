"""Bringing a module's results to every rank, which ranks run beside what a plan's cost counts.

A module returns its results whole on every rank. Where a plan makes them on some devices or in
parts, ranks send them behind the forward pass, to idle ranks as well. Plans are compared without
the seconds of that, so that a plan on fewer devices costs no more for the others' sake; its bytes
are among those that a plan needs (`Evaluation.needed_bytes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.cost_model.executors import MOST_RANKS
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan


@dataclass(frozen=True)
class Delivery:
    """The figures of a plan whose results come to every rank, and what that adds to its own."""

    step_s: float  #: Seconds between requests, or of a training step, with the delivery.
    latency_s: float  #: Seconds of one request with the delivery.
    more_step_s: float  #: The delivery's seconds of `step_s`.
    more_latency_s: float  #: The delivery's seconds of `latency_s`.
    sent_bytes: int  #: Bytes that all devices together send for it.

    @classmethod
    def of(cls, graph: Graph, plan: Plan, cluster: Cluster, evaluation: Evaluation) -> Self | None:
        """Price what brings a graph's results to every rank; None if they are there already.

        None above `MOST_RANKS` devices, too, for which no programs of ranks are made.
        """
        if not graph.delivered or len(cluster) > MOST_RANKS:
            return None
        # the figures of one device are those of no plan, and without
        whole = evaluation.delivered or evaluate(graph, plan, cluster, graph.delivered)
        sent = sum(whole.sent_bytes.values()) - sum(evaluation.sent_bytes.values())
        if not sent:
            return None
        return cls(
            whole.step_s,
            whole.latency_s,
            whole.step_s - evaluation.step_s,
            whole.latency_s - evaluation.latency_s,
            sent,
        )

    def cost(self, objective: str) -> float:
        """Seconds by an objective that counts seconds, with the delivery."""
        return self.latency_s if objective == "latency" else self.step_s

    def clause(self, objective: str) -> str:
        """Say what the results on every rank take more: "21.8 µs"."""
        return units.seconds(self.more_latency_s if objective == "latency" else self.more_step_s)

    def sentence(self, objective: str) -> str:
        """Say what the delivery takes beside the figures of a plan without it."""
        return (
            f"the results on every rank take {self.clause(objective)} more than these figures: "
            f"{units.seconds(self.cost(objective))} in all ({units.size(self.sent_bytes)} sent)"
        )


def cost_with(delivery: Delivery | None, evaluation: Evaluation, objective: str) -> float:
    """A plan's predicted cost: seconds with its results on every rank, bytes without."""
    if delivery is None or objective == "memory":
        return evaluation.cost(objective)
    return delivery.cost(objective)

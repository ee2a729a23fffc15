"""Bringing a module's results to every rank, which ranks run beside what a plan's cost counts.

A module returns its results whole on every rank. Where a plan makes them on some devices or in
parts, ranks send them behind the forward pass, to idle ranks as well. Plans are compared without
that, so that a plan on fewer devices costs no more for the others' sake.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Self

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.evaluate import Evaluation, evaluate
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.search.request import MOST_EXPLICIT

#: Fewer bytes of memory are not spoken of.
LEAST_BYTES = 1 << 10


@dataclass(frozen=True)
class Delivery:
    """The figures of a plan whose results come to every rank, and what that adds to its own."""

    step_s: float  #: Seconds between requests, or of a training step, with the delivery.
    latency_s: float  #: Seconds of one request with the delivery.
    more_step_s: float  #: The delivery's seconds of `step_s`.
    more_latency_s: float  #: The delivery's seconds of `latency_s`.
    sent_bytes: int  #: Bytes that all devices together send for it.
    held_bytes: int  #: Bytes that the fullest device holds more.
    over_bytes: int  #: Bytes by which a device is above its memory with the results; 0 if none is.

    @classmethod
    def of(
        cls,
        graph: Graph,
        plan: Plan,
        cluster: Cluster,
        evaluation: Evaluation,
        results: AbstractSet[str],
    ) -> Self | None:
        """Price what brings `results` to every rank; None if they are there already.

        None above `MOST_EXPLICIT` devices, too, for which no programs of ranks are made.
        """
        if not results or len(cluster) > MOST_EXPLICIT:
            return None
        whole = evaluate(graph, plan, cluster, frozenset(results))
        sent = sum(whole.sent_bytes.values()) - sum(evaluation.sent_bytes.values())
        if not sent:
            return None
        fullest, fullest_whole = (max(of.needed_bytes.values()) for of in (evaluation, whole))
        return cls(
            whole.step_s,
            whole.latency_s,
            whole.step_s - evaluation.step_s,
            whole.latency_s - evaluation.latency_s,
            sent,
            fullest_whole - fullest,
            max(whole.short_bytes.values(), default=0) if evaluation.fits_exactly else 0,
        )

    def cost(self, objective: str) -> float:
        """Seconds by an objective that counts seconds, with the delivery."""
        return self.latency_s if objective == "latency" else self.step_s

    def clause(self, objective: str) -> str:
        """Say what the results on every rank take more: "21.8 µs and 2 MiB of memory"."""
        seconds = self.more_latency_s if objective == "latency" else self.more_step_s
        is_much = self.held_bytes >= LEAST_BYTES
        held = f" and {units.size(self.held_bytes)} of memory" if is_much else ""
        return f"{units.seconds(seconds)}{held}"

    def sentence(self, objective: str) -> str:
        """Say what the delivery takes beside the figures of a plan without it."""
        over, whole_s = "", self.cost(objective)
        if self.over_bytes:
            over = f"; a device is then {units.size(self.over_bytes)} above its memory"
        return (
            f"the results on every rank take {self.clause(objective)} more than these figures: "
            f"{units.seconds(whole_s)} in all ({units.size(self.sent_bytes)} sent){over}"
        )


def cost_with(delivery: Delivery | None, evaluation: Evaluation, objective: str) -> float:
    """A plan's predicted cost: seconds with its results on every rank, bytes without."""
    if delivery is None or objective == "memory":
        return evaluation.cost(objective)
    return delivery.cost(objective)

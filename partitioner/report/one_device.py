"""The whole model on one device: the figures that a plan is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from partitioner.cost_model.cluster import Cluster
from partitioner.cost_model.evaluate import Evaluation, best_single
from partitioner.ir.graph import Graph


@dataclass(frozen=True)
class OneDevice:
    """The whole model on the best device alone, as predicted.

    Attributes:
        device: The device.
        step_s: Seconds between requests, or of a training step.
        latency_s: Seconds of one request.
        held_bytes: Bytes to reserve, as `Evaluation.needed_bytes`.
        limit_bytes: Memory of the device.
    """

    device: int
    step_s: float
    latency_s: float
    held_bytes: int
    limit_bytes: int

    @classmethod
    def best(cls, cluster: Cluster, objective: str, *runs: tuple[Graph, int | None]) -> OneDevice:
        """The best device, and the best way to run the model there.

        Args:
            cluster: The devices.
            objective: What counts where several hold the model.
            *runs: Ways to run the model: its graph, and how many micro-batches run it one after
                the other, None for the whole batch at once.
        """
        alone = [best_single(graph, cluster, objective, count) for graph, count in runs]
        device, figures = min(
            alone, key=lambda run: (not run[1].fits_exactly, run[1].cost(objective))
        )
        return cls(
            device,
            figures.step_s,
            figures.latency_s,
            figures.needed_bytes[device],
            figures.limit_bytes[device],
        )

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> OneDevice:
        """The value that `to_data` wrote."""
        return cls(**data)

    def to_data(self) -> dict[str, Any]:
        """The figures by name, for JSON."""
        return asdict(self)

    @property
    def throughput_per_s(self) -> float | None:
        """Requests a second of a full stream; None, as in JSON, if they take no time."""
        return 1 / self.step_s if self.step_s else None

    @property
    def fits(self) -> bool:
        """Whether the device holds the model."""
        return self.held_bytes <= self.limit_bytes

    def cost(self, objective: str) -> float:
        """Value of an objective, as `Evaluation.cost`."""
        costs = {"latency": self.latency_s, "memory": self.held_bytes}
        return costs.get(objective, self.step_s)

    def speedup(self, plan: Evaluation) -> float | None:
        """The speed-up of a plan over this device, by the seconds between requests.

        None where the device does not hold the model, or a request of the plan takes no time.
        """
        return self.gain(plan, "throughput")

    def gain(self, plan: Evaluation, objective: str) -> float | None:
        """This device's cost over that of a plan; None as of `speedup`."""
        cost = plan.cost(objective)
        return self.cost(objective) / cost if self.fits and cost else None

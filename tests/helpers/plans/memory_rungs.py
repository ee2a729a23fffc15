"""Models planned at limits of memory between what fits nothing and what fits whole.

A rung is a model, training or inference, a number of devices and one of 20 limits: steps of equal
size from what the devices of any plan hold when a step ends (`LeastBytes`), below which nothing can
fit, to what one device needs for the whole model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.sized_models import Gpt, Loss, convolutions, ids, perceptron, t5
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.memory.least import LeastBytes
from partitioner.ir.errors import PartitionerError
from partitioner.solver.work import now_s

STEPS = 20
#: Of a measured peak, the share by which that of a prediction may differ.
OFF = 0.05
Made = tuple[Callable[[int], nn.Module], Callable[[], tuple[Tensor, ...]]]
MODELS: Mapping[str, Made] = {
    "mlp": (lambda layers: perceptron(layers, 1024), lambda: (torch.zeros(256, 1024),)),
    "convnet": (convolutions, lambda: (torch.zeros(32, 3, 64, 64),)),
    "gpt": (lambda layers: Gpt(layers, 256, 4096), lambda: (ids(16, 128),)),
    "t5": (t5, lambda: (ids(16, 64), ids(16, 64))),
}


@dataclass(frozen=True)
class Rung:
    """A model at one of the limits; step 20 is what one device needs for all of it."""

    model: str
    layers: int
    training: bool
    devices: int
    step: int

    def __str__(self) -> str:
        how = "trains" if self.training else "infers"
        return f"{self.model} {self.layers} {how} on {self.devices} at {self.step}/{STEPS}"

    @property
    def limit_bytes(self) -> int:
        """Bytes of each device."""
        result = _whole(self.model, self.layers, training=self.training)
        cluster = resolve_cluster(f"{self.devices}xh100", None)
        whole = max(result.evaluation.needed_bytes.values())
        least = LeastBytes.of(result.graph, cluster).bytes / self.devices
        return math.ceil(least + (whole - least) * self.step / STEPS)

    def planned(self, time_limit_s: float, **options: Any) -> Any:
        """The compilation at the limit.

        Raises:
            PartitionerError: There is no plan.
        """
        more = {"memory": self.limit_bytes, "time_limit_s": time_limit_s, **options}
        more = {"cluster": f"{self.devices}xh100", **more}
        return _planned(self.model, self.layers, training=self.training, **more)

    def forced(self) -> Iterator[Mapping[str, Any]]:
        """Options that force plans of one kind, the usual ways to save memory first."""
        counts = (4, 2, 8, 16) if self.training else (4, 16)
        yield from ({"micro_batches": count} for count in counts)
        if self.devices > 1:
            yield from ({"parallel": kind} for kind in ("tp", "pp"))
            kinds = ("zero3", "zero2", "dp") if self.training else ("dp",)
            yield from ({"parallel": kind} for kind in kinds)
            if self.training:
                yield {"parallel": "zero3", "micro_batches": 4}
                yield from ({"schedule": name} for name in ("1f1b", "zb1"))
            yield {"strategy": "inter"}
            if self.model == "convnet":
                yield {"parallel": "spatial"}
        if self.devices == 4:
            for kind in ("dp", "tp"):
                yield {"parallel": f"pp+{kind}", "mesh": {"pp": 2, kind: 2}}
            yield {"parallel": "dp+tp", "mesh": {"dp": 2, "tp": 2}}
        if self.training:
            yield {"recompute": True}


@dataclass(frozen=True)
class Climbed:
    """What came of a rung.

    Attributes:
        outcome: "plan", "refused", or the name of an internal error.
        text: The refusal or the error.
        cost: Of the plan, in seconds.
        cpu_s: Seconds of processor time.
        over: Seconds of the clock that stops searches, over the time limit.
        plan: Of what kind it is, with its micro-batches.
        forced: The options of the best forced plan that was tried; None if none fits.
        forced_cost: Its cost in seconds.
    """

    outcome: str
    text: str
    cost: float
    cpu_s: float
    over: float
    plan: str
    forced: Mapping[str, Any] | None = None
    forced_cost: float = math.inf

    @property
    def broken(self) -> str:
        """The promise that it breaks; "" if it keeps all."""
        if self.outcome not in ("plan", "refused"):
            return "internal error"
        if self.outcome == "refused" and self.forced is not None:
            return "refused what fits"
        if self.cost > 1.02 * self.forced_cost:
            return "dearer than forced"
        return "late" if self.over > 1.15 else ""


def climbed(rung: Rung, time_limit_s: float, *, beside_forced: bool = False) -> Climbed:
    """Plan a rung, and look for a forced plan where it is refused.

    Args:
        rung: The rung.
        time_limit_s: Of each search.
        beside_forced: Whether all forced plans are made, whatever comes of it.
    """
    limit = rung.limit_bytes  # the model is made and traced before the clock runs
    assert limit > 0
    start, cpu = now_s(), time.process_time()
    outcome, text, cost, plan = "plan", "", math.inf, ""
    try:
        result = rung.planned(time_limit_s)
    except PartitionerError as error:
        outcome, text = "refused", str(error)
    except Exception as error:  # noqa: BLE001 - an internal error is what is looked for
        outcome, text = type(error).__name__, str(error)
    else:
        cost = result.evaluation.cost("throughput")
        count = result.plan.micro_batches
        plan = result.plan.kind + (f" in {count}" if count else "")
    over = (now_s() - start) / time_limit_s
    cpu_s = time.process_time() - cpu
    forced, least = None, math.inf
    for options in rung.forced() if beside_forced or outcome != "plan" else ():
        try:
            other = rung.planned(time_limit_s, **options)
        except PartitionerError:
            continue
        if any("not proven" in note for note in other.summary["notes"]):
            continue
        if (one := other.evaluation.cost("throughput")) < least:
            forced, least = options, one
        if not beside_forced:
            break
    return Climbed(outcome, text, cost, round(cpu_s, 1), round(over, 2), plan, forced, least)


@dataclass(frozen=True)
class MeasuredRung:
    """The peak bytes of each rank of a plan: foretold, and as PyTorch allocated them."""

    limit_bytes: int
    predicted: tuple[int, ...]
    measured: tuple[int, ...]

    @property
    def off(self) -> float:
        """By how much the fullest rank's bytes differ from those foretold for it."""
        rank = max(range(len(self.measured)), key=self.measured.__getitem__)
        return self.predicted[rank] / self.measured[rank] - 1

    @property
    def broken(self) -> str:
        """The promise that it breaks; "" if it keeps all."""
        if max(self.measured) > self.limit_bytes:
            return "over the limit"
        return "" if abs(self.off) <= OFF else "off the prediction"

    def __str__(self) -> str:
        ranks = zip(self.measured, self.predicted, strict=True)
        shown = ", ".join(f"{mine / 1e6:.2f} ({told / 1e6:.2f})" for mine, told in ranks)
        return f"{shown} of {self.limit_bytes / 1e6:.2f} MB, foretold {self.off:+.1%}"


def measured(rung: Rung, time_limit_s: float, **options: Any) -> MeasuredRung:
    """Run the plan of a rung for one step on gloo ranks of this machine, after one to warm up.

    Raises:
        PartitionerError: There is no plan.
    """
    result = rung.planned(time_limit_s, cluster=f"{rung.devices}xcpu", has_weights=True, **options)
    _, inputs = _made(rung.model, rung.layers, training=rung.training, has_weights=True)
    ranks = result.profile(*inputs, steps=1).measured.ranks
    predicted = (result.evaluation.executor_peak[rank].bytes for rank in range(rung.devices))
    return MeasuredRung(
        rung.limit_bytes, tuple(predicted), tuple(rank.peak_bytes or 0 for rank in ranks)
    )


@cache
def _made(
    name: str, layers: int, *, training: bool, has_weights: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    make, inputs = MODELS[name]
    with torch.device("cpu" if has_weights else "meta"):
        module = make(layers)
    module.train(training)
    return (Loss(module) if training else module), inputs()


def _planned(
    name: str, layers: int, *, training: bool, has_weights: bool = False, **options: Any
) -> Any:
    module, inputs = _made(name, layers, training=training, has_weights=has_weights)
    return partitioner.compile(module, inputs, training=training, **options)


@cache
def _whole(name: str, layers: int, *, training: bool) -> Any:
    """The plan of one device that has the memory for the whole model."""
    return _planned(name, layers, training=training, cluster="1xh200", recompute=False)

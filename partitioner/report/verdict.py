"""The verdict on a plan: what it gains over what one would do instead, and what that rests on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from partitioner.cost_model.evaluate import Evaluation
from partitioner.foundations import units
from partitioner.report.delivery import Delivery, cost_with
from partitioner.report.one_device import OneDevice
from partitioner.strategies.kinds.parallel import DATA

WORTH = 1.05  #: Splitting is worth it if it gains more than this over what one would do instead.
#: Sources of seconds that rest on a run of operators of this model or of their like.
_MEASURED = {"measured", "fitted"}


@dataclass(frozen=True)
class Rival:
    """An alternative to a plan, as predicted."""

    name: str  #: "one h100", "4 whole copies", "data parallelism", "one process with 2 threads".
    #: Seconds or, for the objective "memory", bytes; of data parallelism and of splits over fewer
    #: devices with the results on every rank, as of the plan.
    cost: float
    devices: int  #: Devices that it takes.
    fits: bool = True  #: Its devices hold it.
    held_bytes: int = 0  #: Of the fullest of them; 0 if that is not known.
    ask: str = ""  #: Options of the command that plan it; "" if none do.
    least_gain: float = WORTH  #: A plan that gains less over it, or loses less, is no better.
    is_split: bool = False  #: It is another split that was searched, which the plan beats.
    is_known: bool = True  #: Its cost is known. Else that is 0, and it may still not fit.
    why_unknown: str = "was not planned in time"  #: Says so, of one whose cost is not known.

    @property
    def is_open(self) -> bool:
        """Tell whether one could do it, and for what."""
        return self.fits and self.is_known


def usual(
    cost: float, devices: int, fits: bool, *, count: int | None = None, is_known: bool = True
) -> Rival:
    """Make the alternative that one trains with where no planner is at hand.

    It is in `count` micro-batches, whose gradients are added up; None for the whole batch at once.
    """
    name, ask = "data parallelism", f"--parallel {DATA}"
    if count is not None:
        name, ask = f"{name} in {count} micro-batches", f"{ask} --micro-batches {count}"
    return Rival(name, cost, devices, fits, ask=ask, is_known=is_known)


def rivals_of(
    objective: str,
    single: OneDevice,
    device_name: str,
    spaces: Sequence[Mapping[str, Any]] = (),
    whole_machine: Rival | None = None,
    unplanned: Rival | None = None,
) -> tuple[Rival, ...]:
    """List the alternatives to a plan: one device, first, then the like, and other splits.

    Of the other splits that is the best of each way, by the first word of a space's name.

    Args:
        objective: Of the plan.
        single: The whole model on one device.
        device_name: That device.
        spaces: The best plans of the other searched spaces, as `schema.Space`.
        whole_machine: One process that has all of this machine, if the plan is for its processes.
        unplanned: An alternative that has no plan.
    """

    def made() -> Iterator[Rival]:
        cost = single.cost(objective)
        held = single.held_bytes
        count = single.micro_batches or 1
        in_parts = f" in {count} micro-batches" if count > 1 else ""
        ask = f"--devices 1 --micro-batches {count}" if in_parts else "--devices 1"
        yield Rival(f"one {device_name}{in_parts}", cost, 1, single.fits, held, ask)
        if whole_machine is not None:
            yield whole_machine
        if objective == "throughput" and single.copies > 1 and single.copies_per_s is not None:
            name, step_s = f"{single.copies:,} whole copies{in_parts}", 1 / single.copies_per_s
            ask = "" if in_parts else "--strategy copies"  # which are of the whole batch
            yield Rival(name, step_s, single.copies, True, held, ask)
        seen: set[str] = set()
        for space in sorted(spaces, key=lambda space: (not space["fits"], space["cost"])):
            way, cost, devices = space["space"].split()[0], space["cost"], space["devices_used"]
            if way in seen:
                continue
            seen.add(way)
            if way == DATA:
                yield usual(cost, devices, space["fits"], count=space.get("micro_batches"))
            else:
                yield Rival(space["space"], cost, devices, space["fits"], is_split=True)
        if unplanned is not None:
            yield unplanned

    return tuple(made())


@dataclass(frozen=True)
class Verdict:
    """A plan beside what one would do instead, in sentences."""

    objective: str
    is_training: bool
    evaluation: Evaluation
    single: OneDevice  #: The whole model on one device.
    rivals: tuple[Rival, ...]  #: See `rivals_of`.
    delivery: Delivery | None  #: What brings results to every rank.
    sources: Mapping[str, float]  #: Shares of the operators' seconds by what they come from.
    measured_s: float | None = None  #: The plan's cost in a run; None if it was not run.
    #: What submits kernels, where the executor does not do so by itself ("CUDA graphs"); "" for the
    #: executor.
    launches: str = ""

    @property
    def cost(self) -> float:
        """The plan's cost by its objective: measured, or with the results on every rank."""
        if self.measured_s is not None:
            return self.measured_s
        return cost_with(self.delivery, self.evaluation, self.objective)

    @property
    def best(self) -> Rival | None:
        """The best of what one would do in place of a split; None if none of that fits."""
        others = (rival for rival in self.rivals if rival.is_open and not rival.is_split)
        return min(others, key=lambda rival: rival.cost, default=None)

    def bound_note(self, bound: float) -> str:
        """Say that a bound of the cost is above what one would do instead; "" if it is not."""
        is_above = self.best is not None and self.best.cost < bound
        return " (the bound is of what was searched alone)" if is_above else ""

    @property
    def gain(self) -> float | None:
        """The cost of `best` over the plan's; None without `best`, and of a plan without cost."""
        if self.best is None or not self.cost or self.evaluation.short_bytes:
            return None
        return self.best.cost / self.cost

    @property
    def gain_of(self) -> str:
        """Say what `gain` rests on and is over, or why there is none."""
        if self.evaluation.short_bytes:
            return "the plan does not fit"
        if self.best is None:
            return f"{self.rivals[0].name} does not hold the model"
        if not self.cost:
            return "nothing takes time"
        return f"{'predicted' if self.measured_s is None else 'measured'}; over {self.best.name}"

    @property
    def line(self) -> str:
        """The verdict and where its figures come from, as the first line of a summary."""
        delivered = self.delivery is not None and self.objective != "memory"
        results = ", with the results on every rank" if delivered else ""
        return f"{self._source}{results}: {self.sentence[:1].lower()}{self.sentence[1:]}"

    @property
    def sentence(self) -> str:
        """The verdict alone: "3.6 times as fast as one h100: 406/s against 113/s"."""
        unknown = (rival for rival in self.rivals if rival.fits and not rival.is_known)
        beside = (f"; not compared with {one.name}, which {one.why_unknown}" for one in unknown)
        return f"{self._said}{''.join(beside)}"

    @property
    def _said(self) -> str:
        short, used = self.evaluation.short_bytes, self.evaluation.devices_used
        one, best = self.rivals[0].name, self.best
        if short:
            device = max(short, key=short.__getitem__)
            return f"Does not fit: device {device} is {units.size(short[device])} over its memory"
        if used <= 1:
            if self._is_alone:
                return f"Runs on {one}: nothing is split{self._beaten}"
            return f"Runs in blocks on {one}, which does not hold the whole model"
        if best is None:
            return self._needed(one)
        return self._compared(best)

    @property
    def _beaten(self) -> str:
        """Say, of a plan on one device, what would be better, as a clause; "" for nothing."""
        best = self.best
        if best is None or best.cost * best.least_gain >= self.cost:
            return ""
        return f"; {self._would(best)}, this plan {self._figure(self.cost)}"

    @property
    def _is_rate(self) -> bool:
        return self.objective == "throughput" and not self.is_training

    def _would(self, rival: Rival) -> str:
        """Say what an alternative would do: "4 copies (--strategy copies) would serve 90/s"."""
        verb = "serve" if self._is_rate else "need" if self.objective == "memory" else "take"
        ask = f" ({rival.ask})" if rival.ask else ""
        return f"{rival.name}{ask} would {verb} {self._predicted(rival)}"

    def _predicted(self, rival: Rival) -> str:
        figure = self._figure(rival.cost)
        return figure if self.measured_s is None else f"{figure} as predicted"

    def _compared(self, best: Rival) -> str:
        if not self.cost:
            return "Nothing takes time on this cluster: splitting gains nothing"
        if not best.cost:
            here = units.cost(self.objective, self.cost)
            return f"Do not split: {best.name} takes no time, this plan {here}"
        gain, here, there = best.cost / self.cost, self._figure(self.cost), self._predicted(best)
        if gain < 1 / best.least_gain:
            aim = "rate" if self._is_rate else self.objective.replace("throughput", "speed")
            way = " this way" if self.is_training and best.devices > 1 else ""
            return (
                f"Do not split{way} for {aim}: {self._would(best)}, this plan "
                f"{here}{self._room(best)}"
            )
        if gain < best.least_gain:
            return f"No better than {best.name}: {here} against {there}{self._room(best)}"
        times = self._times(gain)
        if self.objective == "latency" and not self.is_training:
            times = f"Answers a request {times}"
        return f"{times} {best.name}: {here} against {there}"

    def _times(self, gain: float) -> str:
        if self.objective == "memory":
            return f"{units.times(gain)} less memory a device than"
        return f"{units.digits(gain)} times as fast as"

    def _needed(self, one: str) -> str:
        """Say that one device does not hold the model, and what is gained over fewer devices."""
        used, copies = self.evaluation.devices_used, self.evaluation.copies_on
        if copies:
            each = f"{len(copies)} whole copies, each on {len(copies[0])} devices"
            return f"{each} ({one} holds none): {self._figure(self.cost)}"
        held, limit = units.size(self.single.held_bytes), units.size(self.single.limit_bytes)
        needed = (
            f"{used:,} devices hold what {one} does not ({held} of {limit}): "
            f"{self._figure(self.cost)}"
        )
        fewer = [rival for rival in self.rivals if rival.is_open and rival.devices < used]
        if not fewer or not self.cost or self.measured_s is not None:
            return needed
        least = min(fewer, key=lambda rival: (rival.devices, rival.cost))
        times = self._times(least.cost / self.cost)
        return f"{needed}, {times} {least.name} on {least.devices} of them"

    @property
    def instead(self) -> str:
        """Name the alternatives that are no splits of the search, each with its figure.

        "" if there are none: one device is none to a plan that runs the whole model on it.
        """
        held, limit = units.size(self.single.held_bytes), units.size(self.single.limit_bytes)
        figures = [
            self._figure(rival.cost)
            if rival.is_open
            else rival.why_unknown
            if rival.fits
            else f"does not hold the model ({held} of {limit})"
            if rival is self.rivals[0]
            else "does not fit"
            for rival in self.rivals
        ]
        return "; ".join(
            f"{rival.name} {figure}"
            for rival, figure in zip(self.rivals, figures, strict=True)
            if not rival.is_split and not (rival is self.rivals[0] and self._is_alone)
        )

    @property
    def _is_alone(self) -> bool:
        return self.evaluation.devices_used <= 1 and self.single.fits

    def _room(self, rival: Rival) -> str:
        """Say what the plan saves of the fullest device's memory, as a clause; "" for nothing."""
        here, there = max(self.evaluation.needed_bytes.values()), rival.held_bytes
        if here >= there or self.objective == "memory":
            return ""
        return f", with {units.size(here)} on the fullest device in place of {units.size(there)}"

    @property
    def _source(self) -> str:
        if self.measured_s is not None:
            return "Measured"
        measured = sum(share for name, share in self.sources.items() if name in _MEASURED)
        launches = f" with {self.launches}" if self.launches else ""
        if not measured:
            return f"Predicted from published rates{launches}, nothing was run"
        share = "" if measured > 1 - 1e-9 else f"{units.share(measured)} of "
        return f"Predicted from measurements of {share}its operators{launches}"

    def _figure(self, cost: float) -> str:
        if self.objective == "throughput" and not self.is_training:
            return units.per_second(1 / cost if cost else None)
        turn = " a step" if self.is_training else " a request"
        return units.cost(self.objective, cost) + ("" if self.objective == "memory" else turn)

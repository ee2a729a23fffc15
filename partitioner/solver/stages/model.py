"""Contiguous stages of an order of positions: the problem, its answer, and the referee.

    min  max_k load_s[way_k, start_k, stop_k]
    s.t. start_0 = 0,  stop_k = start_{k+1},  stop_last = positions
         resident_bytes + flying_bytes * in_flight_k  <=  limit_bytes of the stage's pool
         sum of devices over the stages of a pool     <=  devices of the pool
         sum of degrees over all stages               <=  most_degrees

Stage k holds `in_flight_k = ceil(sum of the degrees of stages k.. last / degree_k)` micro-batches:
the rule of one-forward-one-backward schedules where a stage of degree d works on d micro-batches
at once (Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021). With all degrees 1 it is the number of stages from here on.

A position need not be a node. Any set of states in a topological order will do, such as the
downsets of a graph, where intervals that are no stage are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from partitioner.solver.outcome import Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Pool:
    """Equal devices, and the memory of each; infinite if there is no limit."""

    devices: int
    limit_bytes: float = math.inf


@dataclass(frozen=True, eq=False)
class StageOption:
    """Devices that a stage may run on, with its load and memory there.

    The arrays are `[way, i, j]`, (ways, n + 1, n + 1): the stage of positions i to j - 1. Ways
    differ in load and memory only, for instance in how much is computed again. Entries with i >= j
    are not read.
    """

    devices: int  #: Number of devices that one stage takes.
    load_s: Floats  #: Seconds of a device; infinite where the stage cannot be.
    resident_bytes: Floats  #: Bytes of a device whatever is in flight.
    flying_bytes: Floats  #: Bytes of a device for each micro-batch in flight.
    degree: int = 1  #: Micro-batches that the stage works on at once.
    pool: int = 0  #: Index of the pool of the devices.

    def held_bytes(self, way: int, start: int, stop: int, in_flight: int = 1) -> float:
        """Bytes of a device that runs positions `start` to `stop - 1`."""
        at = way, start, stop
        return float(self.resident_bytes[at] + self.flying_bytes[at] * in_flight)


@dataclass(frozen=True, eq=False)
class StageProblem:
    """Positions to cut, by what their stages may run on."""

    options: tuple[StageOption, ...]  #: All of one number of positions.
    pools: tuple[Pool, ...]
    #: Largest sum of degrees over all stages; None if there is no limit.
    most_degrees: int | None = None
    #: Whether a stage holds micro-batches for the stages after it (training); otherwise each holds
    #: one.
    in_flight: bool = True

    @property
    def positions(self) -> int:
        """Number of positions to cut."""
        return int(self.options[0].load_s.shape[1]) - 1


@dataclass(frozen=True)
class Stage:
    """A stage of a cut: positions `start` to `stop - 1` on option `option`, in way `way`."""

    start: int
    stop: int
    option: int
    way: int


@dataclass(frozen=True)
class Cut:
    """Stages and their certificate."""

    stages: tuple[Stage, ...]
    load_s: float  #: Largest load of a stage.
    bound_s: float  #: No cut has a lower one.
    status: Status  #: `optimal` within the gap.


@dataclass(frozen=True)
class CutOutcome:
    """Load and memory of a cut, by stage."""

    load_s: tuple[float, ...]
    held_bytes: tuple[float, ...]  #: On a device of each stage.
    in_flight: tuple[int, ...]  #: Micro-batches that each stage holds.
    devices: tuple[int, ...]  #: Taken of each pool.
    faults: tuple[str, ...]  #: Rules that are broken, in words; empty if the cut is allowed.


def flights(degrees: Sequence[int], *, in_flight: bool = True) -> tuple[int, ...]:
    """Micro-batches that each stage holds, from the degrees of all stages in order."""
    if not in_flight:
        return (1,) * len(degrees)
    return tuple(-(-sum(degrees[k:]) // degree) for k, degree in enumerate(degrees))


def evaluate_cut(problem: StageProblem, stages: Sequence[Stage]) -> CutOutcome:
    """Price a cut from the problem's arrays alone, and name every rule that it breaks."""
    options = [problem.options[stage.option] for stage in stages]
    flying = flights([option.degree for option in options], in_flight=problem.in_flight)
    at = [(stage.way, stage.start, stage.stop) for stage in stages]
    loads = [float(o.load_s[key]) for o, key in zip(options, at, strict=True)]
    held = [o.held_bytes(*key, many) for o, key, many in zip(options, at, flying, strict=True)]
    used = [sum(o.devices for o in options if o.pool == p) for p in range(len(problem.pools))]
    faults = [
        f"stage {k} holds {size:.0f} bytes of {problem.pools[option.pool].limit_bytes:.0f}"
        for k, (option, size) in enumerate(zip(options, held, strict=True))
        if not size <= problem.pools[option.pool].limit_bytes
    ]
    faults += [f"stage {k} cannot be" for k, load in enumerate(loads) if math.isinf(load)]
    faults += [
        f"pool {p} has {pool.devices} devices, {count} are taken"
        for p, (pool, count) in enumerate(zip(problem.pools, used, strict=True))
        if count > pool.devices
    ]
    ends = [0, *(stage.stop for stage in stages)]
    if [stage.start for stage in stages] != ends[:-1] or ends[-1] != problem.positions:
        faults.append(f"stages do not follow each other from 0 to {problem.positions}")
    total = sum(option.degree for option in options)
    if problem.most_degrees is not None and total > problem.most_degrees:
        faults.append(f"degrees sum to {total}, over {problem.most_degrees}")
    return CutOutcome(tuple(loads), tuple(held), flying, tuple(used), tuple(faults))

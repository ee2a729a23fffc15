"""Timing of programs: interleaved runs, as many as their spread asks for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Fewest and most timed runs of a program.
_LEAST_REPEATS, _MOST_REPEATS = 5, 50
#: Runs go on until half the distance of the quartiles is this share of the median.
_SPREAD = 0.03
#: Seconds of a program's runs, of what comes before each and of its share of what comes before the
#: turns, after which it has had enough: a form that is not measured for lack of time is priced by a
#: fit, whose error is far larger than what more runs of others would tell.
_ENOUGH_S = 0.1


class Timing(NamedTuple):
    """Timed runs of a program."""

    seconds: float  #: Median.
    spread: float  #: Half the distance of the quartiles, as a share of the median.
    repeats: int  #: Number of runs.

    @classmethod
    def of(cls, runs: Sequence[float]) -> Timing:
        """The figures of runs, of which there are at least two."""
        median = statistics.median(runs)
        low, _, high = statistics.quantiles(runs, n=4)
        return cls(median, (high - low) / 2 / median if median else 0.0, len(runs))


#: Which of some wishes any of the processes has that measure the same programs at once.
Anyone = Callable[[Sequence[bool]], Sequence[bool]]


def nothing() -> None:
    """Do nothing."""


def timed_runs(
    programs: Sequence[Callable[[], object]],
    clock: Callable[[], float] = time.perf_counter,
    end_s: float = float("inf"),
    anyone: Anyone = list,
    before_turn: Callable[[], object] = nothing,
    before_runs: Sequence[Callable[[], object]] = (),
    stopwatch: Callable[[Callable[[], object]], float] | None = None,
) -> list[list[float]]:
    """Seconds of each run of programs that were run once before, one run of each in turn.

    Taking turns spreads what else the machine does over all programs.

    Args:
        programs: Functions that run one each.
        end_s: Time of `clock` at which all end, after the fewest runs. Programs whose fewest runs
            do not fit are left out, the last ones first, and have no runs; the first one is run.
        anyone: Called equally often on each process.
        before_turn: Called before each turn, untimed.
        before_runs: Of each program, called before each of its runs, untimed; none if empty.
        stopwatch: Runs a function and gives its seconds; default: those of `clock`.
    """

    def by_clock(program: Callable[[], object]) -> float:
        begin_s = clock()
        program()
        return clock() - begin_s

    seconds_of = stopwatch or by_clock
    before = before_runs or [nothing] * len(programs)
    runs: list[list[float]] = [[] for _ in programs]
    spent_s = [0.0] * len(programs)

    def take_turn(index: int, share_s: float) -> None:
        begin_s = clock()
        before[index]()
        runs[index].append(seconds_of(programs[index]))
        spent_s[index] += share_s + clock() - begin_s

    before_turn()
    ended_s = [clock()]
    for index in range(len(programs)):
        if index and ended_s[-1] >= end_s:
            break
        take_turn(index, 0.0)
        ended_s.append(clock())
    # by their first turn, some programs do not come to the fewest runs before the end
    others = _LEAST_REPEATS - 1
    fits = [ended_s[-1] + others * (one_s - ended_s[0]) <= end_s for one_s in ended_s[1:]]
    fits += [False] * (len(programs) - len(fits))
    left_out = anyone([index > 0 and not fit for index, fit in enumerate(fits)])
    for index, is_left_out in enumerate(left_out):
        if is_left_out:
            runs[index].clear()
    open_ones = [index for index, is_left_out in enumerate(left_out) if not is_left_out]
    while open_ones:
        begin_s = clock()
        before_turn()
        share_s = (clock() - begin_s) / len(open_ones)
        for index in open_ones:
            take_turn(index, share_s)
        is_late = clock() >= end_s
        enough = [_is_enough(runs[index], spent_s[index], is_late) for index in open_ones]
        goes_on = anyone([not is_enough for is_enough in enough])
        open_ones = [index for index, wish in zip(open_ones, goes_on, strict=True) if wish]
    return runs


def _is_enough(runs: Sequence[float], spent_s: float, is_late: bool) -> bool:
    if len(runs) < _LEAST_REPEATS:
        return False
    if is_late or len(runs) >= _MOST_REPEATS or spent_s >= _ENOUGH_S:
        return True
    return Timing.of(runs).spread <= _SPREAD and len(runs) >= 2 * _LEAST_REPEATS

"""Ways to run a model, and the one loop that weighs them within one budget.

A way is searched if no known plan is within the gap of its bound. What saves nothing but bytes is
searched where memory refuses the others, and blocks, which cost most, where nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.executors import executor_of
from partitioner.cost_model.memory.lifetimes import kept_bytes
from partitioner.foundations import units
from partitioner.ir.graph import Graph
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.search.find_plan import find_plan
from partitioner.search.outcome import NoCheaper, Outcome
from partitioner.search.request import Budget, Request
from partitioner.solver.outcome import Infeasible
from partitioner.solver.work import Work, now_s
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import SearchError

#: Why a way has no plans, whatever the memory is.
Impossible = ConstraintError | PipelineScheduleError
#: Seconds to look for changes that make a refused request feasible, and the share of the time
#: limit that they may take where the search has used it up.
CHANGES_S, LATE_SHARE = 14.0, 0.1
#: The share of the seconds of a way's search that it takes, at least, to look for a change.
CHANGE_SHARE = 0.3
#: Share of the clock for the whole batch, where memory may refuse it; the least, where it most
#: likely does.
FIRST_SHARE, LEAST_SHARE = 0.6, 0.2
#: So many searches on end of what a way left are given up: the first is with a share of the clock.
IDLE = 2
#: The gap from which on a way has all steps once more.
WIDE = 0.1


def nothing(_budget: Budget, _refusal: Infeasible) -> tuple[Change, ...]:
    """Know no change of the request."""
    return ()


class Nearly(Infeasible):
    """No plan of a way fits the request as it is, but one is known under a change of it.

    Attributes:
        changes: The changes.
    """

    def __init__(self, changes: tuple[Change, ...]) -> None:
        super().__init__("", proven=False)
        self.changes = changes


@dataclass(frozen=True)
class Way:
    """A way to run a model: what it does to the graph, as a search of the plans of that."""

    name: str  #: In words, for certificates and notes.
    #: Finds the best plan. It raises `Infeasible` where none fits, `NoCheaper` where none is better
    #: than the known one of the budget, `ConstraintError` where the constraints leave none, and
    #: `PipelineScheduleError` where no schedule serves the stages.
    search: Callable[[Budget], Outcome]
    bound: float = 0.0  #: No plan of the way costs less.
    #: 0 of a way that is weighed at once; 1 of one whose plans cost no less where memory forbids
    #: nothing: it is searched where memory refuses one of those before; 2 of one that is searched
    #: where nothing else fits.
    rung: int = 0
    #: After a refusal, gives the changes of the request under which it is known to fit.
    would_fit: Callable[[Budget, Infeasible], tuple[Change, ...]] = nothing
    begin_s: float = 0.0  #: Seconds of what comes before its search, as a trace.
    closed: str = ""  #: Why it is not searched, as a clause; "" if it is.
    #: Whether users are told why it was not taken, if they ask for whatever is fastest.
    is_rival: bool = False


@dataclass
class Weighing:
    """The search over ways."""

    ways: Sequence[Way]  #: The ways; of those with equal bounds the first goes first.
    request: Request
    budget: Budget  #: The budget of all ways: one clock.
    #: The best plan of each way that has one, by the way's number.
    found: dict[int, Outcome] = field(default_factory=dict)
    #: The refusals of ways that memory rules out, or the clock.
    refused: dict[int, Infeasible] = field(default_factory=dict)
    #: The refusals of ways that constraints or schedules rule out.
    impossible: dict[int, Impossible] = field(default_factory=dict)
    #: Of each way without a plan, and of those that were not searched, a bound.
    bounds: dict[int, float] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)  #: The ways that the time limit did not reach.
    #: Whether memory may refuse some: then the clock is shared with those that save it.
    is_short: bool = True
    first_share: float = FIRST_SHARE  #: The share of the clock, then, of the first way.
    memory_bytes: float = math.inf  #: Of the device that has the most.
    #: Gives a bound on the cost of all plans, for ways that were refused without a proof.
    least: Callable[[], float] = lambda: math.inf
    #: Makes the best plan cheaper by small changes, if there are any.
    improved: Callable[[Outcome], Outcome] = lambda outcome: outcome
    #: Tells whether the micro-batches of a plan, by their number, are those of the model.
    confirms: Callable[[int], bool] = lambda _count: True
    _took_s: dict[int, float] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)
    _stopped: set[int] = field(default_factory=set)
    _went_on: set[int] = field(default_factory=set)

    def best(self) -> Outcome:
        """The best plan of all ways, with one certificate.

        Raises:
            Infeasible: No way has a plan that fits.
            ConstraintError: The constraints leave no plan to the first way.
            PipelineScheduleError: No schedule serves the stages of the first way.
        """
        order = sorted(range(len(self.ways)), key=self._rank)
        for place, number in enumerate(order):
            way = self.ways[number]
            if way.rung and self.found:  # else a plan of any way is looked for first
                self._begin_anew(2)
            # some would only save bytes that nobody is short of
            is_needless = not self.refused or (way.rung > 1 and bool(self.found))
            if way.closed or (way.rung > 0 and is_needless):
                continue
            if way.bound >= self._enough:
                self.bounds[number] = way.bound
            elif (self.found or self.refused) and self.budget.work.left_s <= way.begin_s:
                self.budget.work.stop()
                self.late.append(number)
                self.bounds[number] = way.bound
            else:
                self._search(number, order[place + 1 :])
        self._go_on()
        if not self.found:
            raise self._refusal()
        return self._certified()

    def _rank(self, number: int) -> tuple[int, float, int]:
        way = self.ways[number]
        return way.rung, way.bound, number

    def _cost(self, number: int) -> float:
        return self.found[number].evaluation.cost(self.request.objective)

    @property
    def _known(self) -> float:
        return min(map(self._cost, self.found), default=math.inf)

    @property
    def _enough(self) -> float:
        """The bound from which on a way is not worth a search."""
        return (1 - self.budget.gap) * self._known

    def _search(self, number: int, after: Sequence[int]) -> None:
        """Search a way with its share of the clock; the steps of each way are its own."""
        way = self.ways[number]
        behind = [self.ways[n] for n in after if not self.ways[n].closed]
        rivals = [other for other in behind if other.rung == 0 or way.rung]
        parts = 1 + sum(other.bound < self._enough for other in rivals) / 2
        if self.is_short and not way.rung and any(other.rung for other in behind):
            parts /= FIRST_SHARE if self.found or self.refused else self.first_share
        self._tried(number, way.search, parts)

    def _tried(self, number: int, search: Callable[[Budget], Outcome], parts: float) -> None:
        """Search a way with one of so many equal shares of what is left of the clock."""
        known = math.inf if self.request.tune is not None else self._known
        share = replace(self.budget.of_clock(parts), best_s=known)
        left_s = self.budget.work.left_s
        self._seconds[number] = share.work.left_s
        self.refused.pop(number, None)
        self.bounds.pop(number, None)
        try:
            self.found[number] = search(share)
        except NoCheaper as error:
            self.bounds[number] = error.bound
        except Infeasible as error:
            self.refused[number] = error
        except (ConstraintError, PipelineScheduleError) as error:
            self.impossible[number] = error
        finally:
            self._took_s[number] = left_s - self.budget.work.left_s
        if share.work.stopped:
            self._stopped.add(number)
        best = self.found.get(number)
        if best is None or self._cost(number) > known or best.plan.micro_batches is None:
            return
        if not self.confirms(best.plan.micro_batches):
            del self.found[number]
            self._tried(number, self.ways[number].search, 1)

    def _go_on(self) -> None:
        """Give what is left of the clock to the ways that their shares of it ended.

        Those with plans go on where they were, the best plan first; those that found none cheaper
        begin anew, if there are more seconds for it than before. So do others where nothing fits.
        """
        idle = dict.fromkeys([*self.found, *self.bounds], 0)  # searches that gained nothing
        while self.budget.work.left_s > 0:
            stopped = [n for n in idle if idle[n] < IDLE and self._is_open(n)]
            if not stopped:
                break
            number = min(
                stopped, key=lambda n: (idle[n], self._cost(n) if n in self.found else math.inf)
            )
            before = self.found.get(number)
            if before is None:
                idle[number] += 1
                self._tried(number, self.ways[number].search, 1)
                continue
            assert before.more is not None
            self.found[number] = replace(before, more=None)
            self._went_on.add(number)
            self._tried(number, before.more, 1 if idle[number] else (1 + len(stopped)) / 2)
            after = self.found.get(number)  # none if its graph was a wrong guess
            same = after is None or after.plan.certificate == before.plan.certificate
            idle[number] = idle[number] + 1 if same else 0
        if not self.found:
            self._begin_anew(1)

    def _begin_anew(self, parts: float) -> None:
        """Search those that the clock refused anew, if there are more seconds for it than before.

        Each has one of so many equal shares of what is left of the clock, until one has a plan.
        Where another way has one, those are left that were short of all that a device has.
        """
        found, most = len(self.found), self.memory_bytes if self.found else math.inf
        for number in sorted(self._stopped & self.refused.keys(), key=self._rank):
            is_near = self.refused[number].bytes_short <= most
            if len(self.found) == found and is_near and self._gains_s(number, parts) > 0:
                self._tried(number, self.ways[number].search, parts)

    def _gains_s(self, number: int, parts: float = 1) -> float:
        """Seconds that a part of what is left of the clock has more than the last search had."""
        return self.budget.work.left_s / parts - self._seconds[number]

    def _is_open(self, number: int) -> bool:
        """Tell whether the search of a way goes on, whose bound leaves something to gain.

        It does where the clock ended it and, once more, where its steps did with much to gain.
        """
        if number not in self.found:
            is_left = number in self._stopped and self.bounds.get(number, math.inf) < self._enough
            return is_left and self._gains_s(number) > 0
        outcome, bound = self.found[number], self._bound(number)
        stopped = outcome.certificate.status == "time_limit"
        is_wide = bound < (1 - WIDE) * self._known and number not in self._went_on
        return outcome.more is not None and bound < self._enough and (stopped or is_wide)

    def _bound(self, number: int) -> float:
        return max(self.found[number].certificate.bound, self.ways[number].bound)

    def _certified(self) -> Outcome:
        """The best plan, with a certificate over all ways that were weighed."""
        number = min(self.found, key=self._cost)
        self.found[number] = self.improved(self.found[number])
        best = self.found[number].noted(*self._others(number))
        best = replace(best, notes=(*best.notes, *self._unproven()), more=None)
        best = self._above_nothing(best)
        unproven = (number for number, why in self.refused.items() if not why.proven)
        refused = [f"{self.ways[number].name} (no plan was found to fit)" for number in unproven]
        if len(self.found) == 1 and not self.bounds and not refused:
            return best
        cost, spaces, bounds = best.certificate.cost, list[str](), [*self.bounds.values()]
        for other, outcome in self.found.items():
            spaces.append(outcome.certificate.space)
            bounds.append(self._bound(other))
        if refused:
            bounds.append(self.least())
        for other, least in self.bounds.items():  # of ways without a plan, which the bound covers
            shown = units.cost(self.request.objective, least)
            why = "not reached" if other in self.late else f"no plan below {shown}"
            spaces.append(f"{self.ways[other].name} ({why})")
        bound, spaces = min(cost, *bounds), [*spaces, *refused]
        status, is_open = best.certificate.status, cost - bound > self.request.gap * cost
        if status == "optimal" and (is_open or refused):
            status = "feasible"
        statuses = {one.certificate.status for one in self.found.values()}
        is_cut_off = bool(self.late) or not self._stopped.isdisjoint(self.bounds)
        if is_open and (is_cut_off or "time_limit" in statuses):
            status = "time_limit"
        space = ", ".join(dict.fromkeys(spaces))
        outcome = self._above_nothing(best.certified(bound=bound, status=status, space=space))
        others = [plan for one in self.found.values() for plan in one.candidates]
        failed = dict.fromkeys(one for each in self.found.values() for one in each.failed)
        ruled_out = [one for each in self.found.values() for one in each.ruled_out]
        ruled_out += [
            (self.ways[other].name, least)
            for other, least in self.bounds.items()
            if other not in self.late
        ]
        return replace(
            outcome,
            candidates=tuple(others),
            failed=tuple(failed),
            ruled_out=tuple(dict(ruled_out).items()),
        )

    def _above_nothing(self, outcome: Outcome) -> Outcome:
        """The outcome with the bound of all plans where spaces that were not reached have none."""
        least = 0.0 if outcome.certificate.bound else self.least()
        if not 0 < least < math.inf:
            return outcome
        return outcome.certified(bound=min(outcome.certificate.cost, least))

    def _unproven(self) -> list[str]:
        """Say of ways without a plan, for which another stands in, that none is not proven."""
        plain = [n for n, way in enumerate(self.ways) if not (way.rung or way.is_rival)]
        if not self.found.keys().isdisjoint(plain):
            return []
        left = {n for n, why in self.refused.items() if not why.proven} | self.bounds.keys()
        names = (self.ways[number].name for number in plain if number in left)
        return [f"it is not proven that no plan of {name} fits" for name in names]

    def _others(self, best: int) -> list[str]:
        """Why the batch is not run in other ways, for who asks for whatever is fastest."""
        if self.request.micro_batches != "auto":
            return []
        why: dict[int, object] = {**self.refused, **self.impossible}
        for number, outcome in self.found.items():
            step = units.seconds(outcome.evaluation.step_s)
            count = outcome.plan.micro_batches
            parts = f" in {count} micro-batches" if count else ""
            why[number] = f"the best plan found takes {step}{parts}"
        for number, bound in self.bounds.items():
            shown = units.cost(self.request.objective, bound)
            why[number] = f"none of these plans is below {shown}"
            if number in self.late:
                why[number] = "not searched within the time limit"
        return [
            f"not in {way.name}: {why[number]}"
            for number, way in enumerate(self.ways)
            if number in why and number != best and way.is_rival
        ]

    def _refusal(self) -> Infeasible | Impossible:
        """The refusal of all ways, with the changes under which one of them fits."""
        if not self.refused or 0 in self.impossible:
            return self.impossible[min(self.impossible)]
        self.budget.say("looking for what would fit")
        late_s = LATE_SHARE * self.request.time_limit_s
        left_s = Work(self.budget.work.deadline + late_s).left_s
        budget = self.budget.anew(min(CHANGES_S, left_s))
        changes: list[Change] = []
        for number, refusal in self.refused.items():
            if budget.work.left_s < CHANGE_SHARE * self._took_s[number]:
                budget = self.budget.anew(0.0)
            changes += refusal.changes if isinstance(refusal, Nearly) else ()
            changes += self.ways[number].would_fit(budget, refusal)
        left = [way.closed for way in self.ways if way.closed]
        if self.late:
            names = " and ".join(self.ways[number].name for number in self.late)
            left.append(f"not searched within the time limit: {names}")
        return joined(tuple(self.refused.values()), changes, left)


def joined(
    refusals: Sequence[Infeasible], changes: Sequence[Change], left: Sequence[str]
) -> Infeasible:
    """The refusal of all ways: no plan fits if that is proven of each of them.

    Args:
        refusals: Those of the ways that were searched; at least one.
        changes: Under which plans are known. Of several limits of memory the least is said.
        left: Why other ways were not searched, a clause each.
    """
    short = [refusal for refusal in refusals if refusal.device is not None]
    nearest = min(short, key=lambda refusal: refusal.bytes_short, default=refusals[0])
    clauses = [str(one) for one in refusals if one is not nearest and one.device is None]
    clauses = [*(text for text in clauses if text), *left]
    least = min((c.memory_bytes for c in changes if c.memory_bytes is not None), default=None)
    kept = (c.text for c in changes if c.memory_bytes in (None, least))
    ways = tuple(dict.fromkeys(kept))
    fits = f"; it fits {' or '.join(ways)}" if ways else ""
    said = nearest if all(one.proven for one in refusals) and not left else nearest.unproven
    text = "; ".join([f"{said}{fits}", *dict.fromkeys(clauses)])
    return said.saying(text, ways)


#: Seconds to look for enough devices, in all and for one count; never more than the request's.
BUDGET_S = 6.0
ONE_COUNT_S = 2.0
#: Most devices that are tried, as a multiple of those of the request.
MOST_TIMES = 16
#: Multiples of the missing bytes that are tried in turn where no plan is known to fit.
TIMES_SHORT = (1, 2, 4)
#: Gap of these searches: any plan that fits will do.
ANY_GAP = 0.99


@dataclass(frozen=True)
class Change:
    """A change of a request under which a plan is known."""

    text: str  #: In words, as of the command line.
    #: The limit of memory that it gives each device; None for another change.
    memory_bytes: int | None = None


def what_would_fit(
    refusal: Infeasible, graph: Graph, cluster: Cluster, request: Request, limit_s: float
) -> tuple[Change, ...]:
    """The changes of a refused request that make it feasible; a plan is known for each.

    Memory: a limit that the plan nearest to fitting meets; the least one if the refusal is
    proven to be short of the fewest bytes. Devices: the least count found within `BUDGET_S`
    at the same limit, where all devices and links are equal. `limit_s` is for all of it.
    """
    rules, deadline, longest_s = Rules.of(graph), now_s() + limit_s, 0.0

    def fits(target: Cluster) -> bool:
        nonlocal longest_s
        begin_s = now_s()
        left_s = min(ONE_COUNT_S, request.time_limit_s, deadline - begin_s)
        if left_s <= max(0.0, longest_s - ONE_COUNT_S):  # what a search takes behind its limit
            return False
        if left_s < ONE_COUNT_S and len(target) > len(cluster):
            return False  # on many devices a first plan is found, however long that takes
        quick = replace(request, time_limit_s=left_s, gap=ANY_GAP)
        try:
            find_plan(graph, target, quick, Budget.of(quick), rules)
        except (Infeasible, SearchError, ConstraintError):  # no plan, too many devices, no mesh
            return False
        finally:
            longest_s = max(longest_s, now_s() - begin_s)
        return True

    changes = []
    if refusal.device is not None and refusal.bytes_short > 0:
        memory = cluster.devices[refusal.device].memory_bytes
        limits = [memory + math.ceil(times * refusal.bytes_short) for times in TIMES_SHORT]
        # Of sessions, more bytes count than those of tensors.
        known = refusal.closest is not None and not executor_of(graph).in_sessions
        for limit in limits[:1] if known else limits:
            if known or fits(cluster.with_memory(limit)):
                text = f"with --memory {limit} ({units.size(limit)})"
                changes.append(Change(text, memory_bytes=limit))
                break
    if cluster.is_uniform and not request.constraints.bound and request.mesh is None:
        (level,), device = cluster.levels, cluster.devices[0]
        count = _least_count(
            len(cluster),
            lambda count: fits(
                replace(cluster, devices=(device,) * count, levels=(replace(level, size=count),))
            ),
            min(BUDGET_S, deadline - now_s()),
            math.ceil(kept_bytes(graph) / device.memory_bytes),
        )
        if count is not None:
            changes.append(Change(f"on {count} devices"))
    return tuple(changes)


def _least_count(
    devices: int, fits: Callable[[int], bool], limit_s: float, least: int
) -> int | None:
    """The least count above `devices` found to fit, by bisection; None if none was in time.

    None below `least` fits.
    """
    deadline = now_s() + limit_s
    low, high = devices, 2 * devices
    if least > MOST_TIMES * devices:
        return None
    while high < least or not fits(high):
        low, high = high, 2 * high
        if high > MOST_TIMES * devices or now_s() > deadline:
            return None
    while high - low > 1 and now_s() < deadline:
        middle = (low + high) // 2
        if middle >= least and fits(middle):
            high = middle
        else:
            low = middle
    return high

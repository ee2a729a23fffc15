"""One loop over ways: its order, its clock, its certificate, and its refusal."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from helpers.plans.cost_cases import flat
from partitioner.cost_model.evaluate import one_device
from partitioner.examples import build
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.pipeline.actions import PipelineScheduleError
from partitioner.ir.plan import Certificate, NodePlan, Pipeline, Plan
from partitioner.search.outcome import NoCheaper, Outcome
from partitioner.search.request import Budget, Request
from partitioner.search.ways.way import Change, Nearly, Way, Weighing
from partitioner.solver import work
from partitioner.solver.outcome import Infeasible
from partitioner.strategies.constraints import ConstraintError

GRAPH = load_onnx(build("tiny")).graph
CLUSTER = flat(1)
EVALUATION = one_device(GRAPH, CLUSTER)
REQUEST = Request(gap=0.1)

Search = Callable[[Budget], Outcome]


def outcome(cost_s: float, bound_s: float | None = None, space: str = "") -> Outcome:
    bound_s = cost_s if bound_s is None else bound_s
    certificate = Certificate(
        objective="throughput",
        cost=cost_s,
        bound=bound_s,
        status="optimal" if cost_s - bound_s <= REQUEST.gap * cost_s else "feasible",
        strategy="single",
        solver="fake",
        space=space or f"plans of {cost_s}",
        seed=0,
        folded="",
    )
    nodes = {node.name: NodePlan(0) for node in GRAPH.nodes}
    plan = Plan(GRAPH.digest, CLUSTER.to_data(), (DeviceMesh.single(0),), nodes)
    figures = replace(EVALUATION, compute_s={0: cost_s}, comm_s={0: 0.0})
    return Outcome(GRAPH, replace(plan, certificate=certificate), figures, (), ())


class Searches:
    """Searches with a given end, which note their names and budgets."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.budgets: list[Budget] = []

    def way(self, name: str, end: Outcome | Exception, **options: object) -> Way:
        def search(budget: Budget) -> Outcome:
            self.names.append(name)
            self.budgets.append(budget)
            if isinstance(end, Exception):
                raise end
            return end

        return Way(name, search, **options)  # type: ignore[arg-type]


def weighed(*ways: Way, request: Request = REQUEST, is_short: bool = True) -> Outcome:
    return Weighing(ways, request, Budget.of(request), is_short=is_short).best()


def at_a_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(work, "now_s", lambda: now[0])
    return now


def short(nbytes: float, **options: object) -> Infeasible:
    return Infeasible(f"{nbytes:g} short", device=0, bytes_short=nbytes, **options)  # type: ignore[arg-type]


def in_parts(cost_s: float, count: int, bound_s: float | None = None) -> Outcome:
    found = outcome(cost_s, bound_s)
    return replace(found, plan=replace(found.plan, pipeline=Pipeline("forward", count)))


def in_turn(ends: list[Outcome | Exception]) -> Search:
    """A search that ends otherwise each time; `ends` keeps those that are left."""

    def search(_: Budget) -> Outcome:
        end = ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    return search


def test_a_plan_of_a_guessed_graph_is_searched_anew_where_the_guess_was_wrong() -> None:
    """The first guess is of 4 micro-batches; plans that others beat are not confirmed."""
    ends, asked = [in_parts(1.0, 4), in_parts(2.0, 2)], list[int]()

    def confirms(count: int) -> bool:
        asked.append(count)
        return count != 4

    ways = (
        Way("whole", lambda _: outcome(3.0)),
        Way("stages", lambda _: ends.pop(0)),
        Way("slow", lambda _: in_parts(9.0, 8)),
    )
    best = Weighing(ways, REQUEST, Budget.of(REQUEST), confirms=confirms).best()
    assert (best.evaluation.step_s, asked, ends) == (2.0, [4, 2], [])


def test_a_wrong_guess_leaves_the_plans_of_other_ways() -> None:
    ends: list[Outcome | Exception] = [in_parts(1.0, 4), short(5)]

    ways = (Way("whole", lambda _: outcome(3.0)), Way("stages", in_turn(ends)))
    budget = Budget.of(REQUEST)
    best = Weighing(ways, REQUEST, budget, confirms=lambda _: False, least=lambda: 0.5).best()
    assert (best.evaluation.step_s, ends) == (3.0, [])


def test_a_wrong_guess_that_going_on_found_leaves_the_plans_of_other_ways() -> None:
    ends: list[Outcome | Exception] = [
        replace(in_parts(4.0, 4, 0.5).stopped(), more=lambda _: in_parts(1.0, 4)),
        NoCheaper("none", 2.0),
    ]

    ways = (Way("whole", lambda _: outcome(3.0)), Way("stages", in_turn(ends)))
    budget = Budget.of(REQUEST)
    best = Weighing(ways, REQUEST, budget, confirms=lambda _: False).best()
    assert (best.evaluation.step_s, ends) == (3.0, [])


def test_ways_are_searched_in_the_order_of_their_bounds() -> None:
    searches = Searches()
    best = weighed(
        searches.way("late", outcome(3.0), bound=1.0),
        searches.way("first", outcome(9.0)),
        searches.way("second", outcome(5.0)),
    )
    assert searches.names == ["first", "second", "late"]
    assert best.evaluation.step_s == 3.0
    assert [budget.best_s for budget in searches.budgets[1:]] == [9.0, 5.0]


def test_the_search_ends_with_a_plan_within_the_gap_of_every_bound_that_is_left() -> None:
    searches = Searches()
    best = weighed(
        searches.way("whole", outcome(2.0)),
        searches.way("near", outcome(1.0), bound=1.81),
    )
    assert searches.names == ["whole"]
    certificate = best.plan.certificate
    assert certificate is not None
    assert (certificate.bound, certificate.status) == (1.81, "optimal")
    assert certificate.space == "plans of 2.0, near (no plan below 1.81 s)"


def test_a_certificate_has_the_least_bound_of_all_ways() -> None:
    searches = Searches()
    best = weighed(
        searches.way("whole", outcome(2.0)),
        searches.way("stages", NoCheaper("none", 0.5), bound=0.1),
        searches.way("form", outcome(4.0, 0.75, space="plans of 2.0")),
    )
    certificate = best.plan.certificate
    assert certificate is not None
    assert (certificate.cost, certificate.bound, certificate.status) == (2.0, 0.5, "feasible")
    assert certificate.space == "plans of 2.0, stages (no plan below 500 ms)"


def test_what_saves_bytes_is_searched_where_memory_refuses_the_others() -> None:
    searches = Searches()
    weighed(searches.way("whole", outcome(2.0)), searches.way("blocks", outcome(1.0), rung=2))
    assert searches.names == ["whole"]
    searches = Searches()
    best = weighed(
        searches.way("blocks", outcome(7.0), rung=2),
        searches.way("whole", short(10)),
    )
    assert searches.names == ["whole", "blocks"]
    assert best.evaluation.step_s == 7.0


def test_what_costs_no_less_is_weighed_where_memory_refuses_the_whole_batch() -> None:
    searches = Searches()
    best = weighed(
        searches.way("whole", short(10)),
        searches.way("stages", outcome(3.0), bound=0.5),
        searches.way("parts", outcome(2.0), rung=1),
        searches.way("blocks", outcome(1.0), rung=2),
    )
    assert searches.names == ["whole", "stages", "parts"]
    assert best.evaluation.step_s == 2.0
    searches = Searches()
    weighed(searches.way("whole", outcome(3.0)), searches.way("parts", outcome(2.0), rung=1))
    assert searches.names == ["whole"]


def test_each_way_has_its_share_of_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = at_a_clock(monkeypatch), list[float]()

    def search(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        now[0] += 12.0
        raise short(1)

    ways = [Way("whole", search), *(Way(name, search, rung=2) for name in "ab")]
    ways.append(Way("late", search, rung=2))
    request = Request(time_limit_s=30.0)
    with pytest.raises(Infeasible, match="not searched within the time limit: late"):
        weighed(*ways, request=request)
    assert left == pytest.approx([18.0, 9.0, 4.0], rel=1e-6)


def test_the_first_way_has_less_of_the_clock_the_less_memory_there_is() -> None:
    searches = Searches()
    ways = [searches.way(name, short(1)) for name in ("whole", "stages")]
    ways.append(searches.way("blocks", short(1), rung=2))
    budget = Budget.of(REQUEST)
    with pytest.raises(Infeasible):
        Weighing(ways, REQUEST, budget, first_share=0.3).best()
    shares = [each.work.left_s / budget.work.left_s for each in searches.budgets]
    assert shares == pytest.approx([0.3 / 1.5, 0.6, 1.0], abs=0.05)


def test_ways_that_are_not_searched_take_no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_clock(monkeypatch)
    for closed, seconds in (("", 20.0), ("it is not searched with pins", 30.0)):
        searches = Searches()
        first, second = (searches.way(name, outcome(1.0)) for name in ("whole", "form"))
        request = Request(gap=0.1, time_limit_s=30.0)
        weighed(first, replace(second, closed=closed), request=request)
        assert searches.budgets[0].work.left_s == pytest.approx(seconds)


def test_the_whole_batch_has_all_the_clock_where_nothing_is_short() -> None:
    searches = Searches()
    saver = searches.way("blocks", outcome(1.0), rung=2)
    weighed(searches.way("whole", outcome(2.0)), saver, is_short=False)
    assert searches.budgets[0].work.left_s > 0.9 * REQUEST.time_limit_s


def test_the_clock_leaves_ways_unsearched_and_the_certificate_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = at_a_clock(monkeypatch)

    def slow(_budget: Budget) -> Outcome:
        now[0] += 31.0
        return outcome(2.0)

    best = weighed(Way("whole", slow), Way("stages", slow, bound=0.5))
    certificate = best.plan.certificate
    assert certificate is not None
    assert (certificate.bound, certificate.status) == (0.5, "time_limit")
    assert certificate.space.endswith("stages (not reached)")


def test_a_way_without_a_cheaper_plan_that_the_clock_ended_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With more seconds than before; what was not stopped, or has a bound, has nothing to gain."""
    now, left = at_a_clock(monkeypatch), list[float]()

    def stages(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        if len(left) > 1:
            return outcome(1.0, 1.0)
        now[0] += budget.work.left_s
        assert budget.work.late
        raise NoCheaper("none was found in time", 0.1)

    def form(_: Budget) -> Outcome:
        raise NoCheaper("none", 0.5)

    forms = [Way(name, form) for name in "abcd"]
    whole, in_stages = Way("whole", lambda _: outcome(4.0)), Way("stages", stages)
    request = Request(time_limit_s=30.0, gap=0.1)
    best = weighed(whole, in_stages, *forms, request=request)
    assert left == pytest.approx([10.0, 20.0])
    assert best.evaluation.step_s == 1.0
    left.clear()
    late = weighed(whole, in_stages, request=request)  # it had all
    assert left == pytest.approx([30.0])
    certificate = late.plan.certificate
    assert certificate is not None
    assert (certificate.bound, certificate.status) == (0.1, "time_limit")


def test_what_others_leave_of_the_clock_goes_to_the_way_that_its_share_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, left = at_a_clock(monkeypatch), list[float]()

    def go_on(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        now[0] += 2.0
        return outcome(3.0)

    def slow(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        now[0] += budget.work.left_s
        assert budget.work.late
        return replace(outcome(4.0, 1.0).stopped(), more=go_on)

    searches = Searches()
    form, blocks = searches.way("form", outcome(5.0, 4.9)), Way("blocks", slow, rung=2)
    best = weighed(
        Way("whole", slow),
        form,
        blocks,
        request=Request(time_limit_s=30.0, gap=0.1),
        is_short=False,
    )
    assert left == pytest.approx([20.0, 10.0])
    certificate = best.plan.certificate
    assert certificate is not None
    assert (certificate.cost, certificate.bound, certificate.status) == (3.0, 3.0, "optimal")
    assert best.more is None


@pytest.mark.parametrize(("bound_s", "rounds"), [(3.7, 0), (1.0, 1)])
def test_a_way_has_all_steps_once_more_where_its_steps_left_a_wide_gap(
    bound_s: float, rounds: int
) -> None:
    """Within a small gap, and behind the second search, what is left of the limit is left."""
    again: list[Budget] = []

    def go_on(budget: Budget) -> Outcome:
        again.append(budget)
        return replace(outcome(3.8, bound_s), more=go_on)

    searches = Searches()
    way = searches.way("whole", replace(outcome(4.0, bound_s), more=go_on))
    best = weighed(way, request=replace(REQUEST, gap=0.01) if not rounds else REQUEST)
    assert len(again) == rounds
    assert all(budget.work.left == budget.work.steps > 0 for budget in again)
    assert best.evaluation.step_s == (3.8 if rounds else 4.0)


def test_searches_that_gain_nothing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way goes on with a share of the clock, two thirds beside one other, then with all."""
    at_a_clock(monkeypatch)
    shares: list[tuple[float, float]] = []

    def way(cost_s: float) -> Way:
        def go_on(budget: Budget) -> Outcome:
            shares.append((cost_s, budget.work.left_s))
            assert len(shares) < 10
            return replace(outcome(cost_s, 1.0).stopped(), more=go_on)

        return Way(f"{cost_s}", lambda _budget: replace(outcome(cost_s, 1.0).stopped(), more=go_on))

    weighed(way(4.0), way(3.0))
    assert shares == [(3.0, 20.0), (4.0, 20.0), (3.0, 30.0), (4.0, 30.0)]


def test_a_way_that_the_clock_refused_begins_anew_with_more_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, left = at_a_clock(monkeypatch), list[float]()

    def slow(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        if len(left) > 1:
            return outcome(1.0)
        now[0] += budget.work.left_s
        assert budget.work.late
        raise short(1, proven=False)

    searches = Searches()
    ways = [Way("whole", slow), *(searches.way(name, short(2)) for name in "abcd")]
    best = weighed(*ways, request=Request(time_limit_s=30.0, gap=0.1))
    assert best.evaluation.step_s == 1.0
    assert left == pytest.approx([10.0, 20.0])


@pytest.mark.parametrize(("short_bytes", "searches"), [(10, 2), (11, 1)])
def test_what_is_short_of_all_that_a_device_has_does_not_begin_anew_beside_a_plan(
    short_bytes: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = at_a_clock(monkeypatch), list[float]()

    def slow(budget: Budget) -> Outcome:
        left.append(budget.work.left_s)
        if len(left) == 1:
            now[0] += budget.work.left_s
            assert budget.work.late
        raise short(short_bytes, proven=False)

    others = Searches()
    ways = [Way("whole", slow), *(others.way(name, outcome(4.0)) for name in "abcd")]
    ways.append(others.way("saving", outcome(5.0), rung=1))
    request = Request(time_limit_s=30.0, gap=0.1)
    weighing = Weighing(ways, request, Budget.of(request), memory_bytes=10)
    assert weighing.best().evaluation.step_s == 4.0
    assert len(left) == searches


def test_a_refusal_names_the_nearest_way_and_the_least_changes_of_all() -> None:
    searches = Searches()
    whole = searches.way(
        "whole",
        short(100),
        would_fit=lambda *_: (Change("with --memory 91", 91), Change("on 4 devices")),
    )
    parts = searches.way("parts", Nearly((Change("with --micro-batches 8"),)), rung=2)
    stages = searches.way("stages", short(7, proven=False), rung=2)
    blocks = searches.way(
        "blocks",
        Infeasible("none in blocks was found"),
        rung=2,
        would_fit=lambda *_: (Change("in blocks with --memory 56", 56),),
    )
    closed = Way("copies", whole.search, closed="copies are not searched with pins")
    with pytest.raises(Infeasible) as refused:
        weighed(whole, parts, stages, blocks, closed)
    assert str(refused.value) == (
        "7 short; it fits on 4 devices or with --micro-batches 8 or in blocks with --memory 56; "
        "none in blocks was found; copies are not searched with pins"
    )
    assert refused.value.bytes_short == 7
    assert not refused.value.proven
    assert refused.value.relaxations[0] == "on 4 devices"


def test_no_plan_fits_only_if_that_is_proven_of_each_way() -> None:
    searches, text = Searches(), "no plan fits: 7 bytes are short"
    whole = Infeasible(text, device=0, bytes_short=7)
    parts = Infeasible("no micro-batch fits", device=0, bytes_short=9)
    blocks = Infeasible("none in blocks was found", proven=False)

    def refused(*refusals: Infeasible, closed: str = "") -> Infeasible:
        ways = [searches.way(str(number), one) for number, one in enumerate(refusals)]
        with pytest.raises(Infeasible) as refusal:
            weighed(*ways, *([Way("copies", ways[0].search, closed=closed)] if closed else []))
        return refusal.value

    assert (str(refused(whole, parts)), refused(whole, parts).proven) == (text, True)
    for found in (refused(whole, parts, blocks), refused(whole, closed="copies are not searched")):
        assert str(found).startswith("no plan was found that fits: 7 bytes are short; ")
        assert not found.proven


@pytest.mark.parametrize(("took_s", "left_s"), [(1.0, 14.0), (29.0, 0.0), (31.0, 0.0), (34.0, 0.0)])
def test_changes_are_looked_for_as_long_as_the_limit_lasts(
    took_s: float, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of the limit is added; a search that took most of it has no quick changes."""
    now = [100.0]
    monkeypatch.setattr(work, "now_s", lambda: now[0])
    left: list[float] = []

    def search(_budget: Budget) -> Outcome:
        now[0] += took_s
        raise short(1)

    def would_fit(budget: Budget, _refusal: Infeasible) -> tuple[Change, ...]:
        left.append(budget.work.left_s)
        return (Change("with --memory 91", 91),)

    with pytest.raises(Infeasible, match="1 short; it fits with --memory 91"):
        weighed(Way("whole", search, would_fit=would_fit))
    assert left == [left_s]


def test_constraints_that_leave_the_first_way_no_plan_are_named() -> None:
    searches = Searches()
    whole = searches.way("whole", ConstraintError("pins leave nothing"))
    blocks = searches.way("blocks", outcome(1.0), rung=2)
    with pytest.raises(ConstraintError, match="pins leave nothing"):
        weighed(whole, searches.way("form", ConstraintError("unknown node")), blocks)
    assert searches.names == ["whole", "form"]


def test_stages_that_no_schedule_serves_leave_the_other_ways() -> None:
    searches = Searches()
    unserved = PipelineScheduleError("5 stages were asked for, and the model has 2 at most")
    ways = [searches.way("whole", outcome(2.0, 1.0)), searches.way("stages", unserved)]
    assert weighed(*ways).plan.certificate == outcome(2.0, 1.0).plan.certificate
    with pytest.raises(PipelineScheduleError, match="the model has 2 at most"):
        weighed(searches.way("stages", unserved))


def test_who_asks_for_whatever_is_fastest_is_told_why_others_are_not() -> None:
    searches = Searches()
    ways = [
        searches.way("whole", outcome(2.0)),
        searches.way("stages", outcome(3.0), is_rival=True),
        searches.way("none", NoCheaper("none", 2.5), is_rival=True),
        searches.way("tight", short(5), is_rival=True),
    ]
    assert weighed(*ways).notes == ()
    notes = weighed(*ways, request=Request(gap=0.1, micro_batches="auto")).notes
    assert notes == (
        "not in stages: the best plan found takes 3 s",
        "not in none: none of these plans is below 2.5 s",
        "not in tight: 5 short",
    )


def test_plans_that_are_to_be_run_need_not_beat_each_other() -> None:
    searches = Searches()
    request = Request(gap=0.1, tune=2)
    weighed(
        searches.way("whole", outcome(2.0)), searches.way("form", outcome(3.0)), request=request
    )
    assert searches.budgets[1].best_s == float("inf")


def test_a_way_that_was_refused_without_a_proof_is_named_and_no_plan_is_optimal() -> None:
    searches = Searches()
    for proven, status in ((True, "optimal"), (False, "feasible")):
        whole = searches.way("whole", short(7, proven=proven))
        best = weighed(whole, searches.way("parts", outcome(1.0, 1.0), rung=1))
        certificate = best.plan.certificate
        assert certificate is not None
        assert certificate.status == status
        assert ("whole (no plan was found to fit)" in certificate.space) is not proven
        said = "it is not proven that no plan of whole fits"
        assert best.notes == (() if proven else (said,))
        form = searches.way("form", outcome(2.0))  # the whole batch has a plan: nothing stands in
        assert weighed(whole, form).notes == ()


def test_the_bound_covers_ways_that_were_refused_without_a_proof() -> None:
    searches = Searches()
    for proven, bound in ((True, 1.0), (False, 0.25)):
        whole = searches.way("whole", short(7, proven=proven))
        ways = (whole, searches.way("parts", outcome(1.0, 1.0), rung=1))
        best = Weighing(ways, REQUEST, Budget.of(REQUEST), least=lambda: 0.25).best()
        certificate = best.plan.certificate
        assert certificate is not None
        assert certificate.bound == bound

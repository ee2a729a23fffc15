"""Each method of the solver by itself."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from solver_instances import knapsack, placement, spmd

from partitioner.solver import Choice, Edge, Hold, Item, Problem, brute_force, evaluate_choices
from partitioner.solver.joint.elimination import Eliminator
from partitioner.solver.joint.incumbents import alone
from partitioner.solver.joint.latency import critical_path_s, list_schedule
from partitioner.solver.joint.local_search import local_search
from partitioner.solver.joint.state import State, tables
from partitioner.solver.merge_equal import merge_equal
from partitioner.solver.milp.engines import solve_milp
from partitioner.solver.milp.formulation import formulate
from partitioner.solver.milp.program import MilpBuilder
from partitioner.solver.placement.contiguous import contiguous_plans
from partitioner.solver.presolve import presolve
from partitioner.solver.sites import clique_positions
from partitioner.solver.symmetry import canonical, symmetric_groups


def test_milp_finds_the_optimum_and_its_bound() -> None:
    build = MilpBuilder()
    a, b = (build.column(cost=-1.0, upper=1.0, integer=True) for _ in range(2))
    build.row([(a, 2.0), (b, 2.0)], -1, 3.0)
    result = solve_milp(build.build(), 10, 0.0)
    assert (result.status, result.cost, result.bound) == ("optimal", -1.0, -1.0)
    relaxed = solve_milp(build.build().relaxed(), 10, 0.0)
    assert (relaxed.status, relaxed.bound) == ("optimal", -1.5)


def test_milp_says_infeasible() -> None:
    build = MilpBuilder()
    a = build.column(upper=1.0, integer=True)
    build.row([(a, 2.0)], 0, 1.0)
    assert solve_milp(build.build(), 10, 0.0).status == "infeasible"


def test_milp_takes_a_start_and_reports_the_time_limit() -> None:
    milp = knapsack(40)
    start = dict.fromkeys(range(40), 0.0)
    result = solve_milp(milp, 0.0, 0.0, start)
    assert result.status == "time_limit"
    assert result.values
    assert result.bound <= result.cost <= 0.0


def test_a_row_without_columns_is_kept_only_if_it_is_false() -> None:
    build = MilpBuilder()
    build.column(upper=1.0)
    build.row([], -1, 0.0)
    assert build.build().rows == ()
    build.row([], 1, 1.0)
    assert solve_milp(build.build(), 10, 0.0).status == "infeasible"


def test_a_branch_limit_gives_the_best_so_far_with_its_bound() -> None:
    start = dict.fromkeys(range(40), 0.0)
    result = solve_milp(knapsack(40), 60, 0.0, start, branches=1)
    assert result.status == "feasible"
    assert result.values
    assert result.bound < result.cost


def test_milp_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solve_milp(knapsack(5), 10, 0.0)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", range(10))
def test_elimination_is_exact(seed: int) -> None:
    problem = spmd(seed, 6, 3, forbid=0.1)
    best = brute_force(problem, "throughput")
    answer = Eliminator(problem).min_sum([1.0, 0.0])
    assert answer is not None
    if best is None:
        assert math.isinf(answer[1])
        return
    assert answer[1] == pytest.approx(best[1])
    assert evaluate_choices(problem, answer[0]).step_s == pytest.approx(best[1])


def test_elimination_prefers_fewer_bytes_at_a_price() -> None:
    problem = spmd(3, 8, 4)
    dear, cheap = (Eliminator(problem).min_sum([1.0, 0.0], price) for price in (100.0, 0.0))
    assert dear is not None
    assert cheap is not None
    peaks = [sum(evaluate_choices(problem, answer[0]).peak_bytes) for answer in (dear, cheap)]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize("seed", range(6))
def test_elimination_is_exact_for_a_value_with_many_readers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = spmd(seed, 7, 3, forbid=0.0)
    first = problem.edges[0]
    fan = tuple(
        replace(first, v=v, in_class=tuple((v + p) % 3 for p in range(3))) for v in range(1, 7)
    )
    problem = replace(problem, edges=(*fan, *(e for e in problem.edges if e.u)))
    best = brute_force(problem, "throughput")
    assert best is not None
    for most in (10**9, 1):  # one table; a switch for each item
        monkeypatch.setattr("partitioner.solver.joint.elimination.MAX_SHARED", most)
        answer = Eliminator(problem).min_sum([1.0, 0.0])
        assert answer is not None
        assert answer[1] == pytest.approx(best[1])
        assert evaluate_choices(problem, answer[0]).step_s == pytest.approx(best[1])


@pytest.mark.parametrize("seed", range(4))
def test_elimination_bounds_the_peak(seed: int) -> None:
    problem = spmd(seed, 6, 3, forbid=0.0)
    best = brute_force(problem, "memory")
    assert best is not None
    eliminator = Eliminator(problem)
    bounds = [answer[1] for t in range(6) if (answer := eliminator.min_bytes(t)) is not None]
    assert 0.7 * best[1] <= max(bounds) <= best[1]


def test_elimination_gives_up_on_wide_graphs() -> None:
    problem = spmd(0, 30, 8, classes=8)
    edge = problem.edges[0]
    edges = tuple(
        replace(edge, u=u, v=v, items={(0, 1): (0,)})
        for u, v in itertools.combinations(range(30), 2)
    )
    wide = replace(problem, edges=edges, holds=())
    assert Eliminator(wide).min_sum([1.0, 0.0]) is None


@pytest.mark.parametrize("limit", [math.inf, 22])
@pytest.mark.parametrize("seed", range(10))
def test_presolve_keeps_the_optimum(seed: int, limit: float) -> None:
    problem = spmd(seed, 5, 4, classes=2, limit=limit, forbid=0.2)
    reduced = presolve(problem)
    best = brute_force(problem, "throughput")
    if not all(reduced.kept):
        assert best is None
        return
    smaller = brute_force(reduced.problem, "throughput")
    assert (best is None) == (smaller is None)
    if best is not None and smaller is not None:
        assert smaller[1] == best[1]
        assert evaluate_choices(problem, reduced.restore(smaller[0])).step_s == best[1]


@pytest.mark.parametrize("seed", range(20))
def test_nodes_that_edges_make_equal_become_one(seed: int) -> None:
    draw = random.Random(seed)
    problem = spmd(seed, 5, 3, classes=2, limit=[math.inf, 60][seed % 2], forbid=0.1)
    ties = []
    for u, v in draw.sample(list(itertools.combinations(range(5), 2)), 2):
        order = draw.sample(range(3), 3)
        apart = frozenset((p, q) for p in range(3) for q in range(3) if p != q or p == seed % 6)
        ties.append(Edge(u, v, (0, 1, 2), tuple(order), {}, apart))
    problem = replace(problem, edges=(*problem.edges, *ties))
    merged = merge_equal(problem)
    assert len(set(merged.leader)) < 5
    best = brute_force(problem, "throughput")
    if not all(merged.problem.nodes):
        assert best is None
        return
    smaller = brute_force(merged.problem, "throughput")
    assert (best is None) == (smaller is None)
    if best is not None and smaller is not None:
        assert smaller[1] == pytest.approx(best[1])
        whole = merged.restore(smaller[0])
        outcome, less = (
            evaluate_choices(problem, whole),
            evaluate_choices(merged.problem, smaller[0]),
        )
        assert outcome.step_s == pytest.approx(less.step_s)
        assert outcome.peak_bytes == pytest.approx(less.peak_bytes)
        assert merged.restore(merged.lower(whole)) == whole


def test_presolve_drops_a_dominated_choice_and_merges_parallel_edges() -> None:
    problem = spmd(1, 4, 3, forbid=0.0)
    edge = problem.edges[0]
    slower = replace(problem.nodes[1][0], load_s=(99.0, 99.0))
    double = replace(
        problem,
        nodes=(problem.nodes[0], (*problem.nodes[1], slower), *problem.nodes[2:]),
        edges=tuple(
            replace(
                e,
                out_class=(*e.out_class, e.out_class[0]) if e.u == 1 else e.out_class,
                in_class=(*e.in_class, e.in_class[0]) if e.v == 1 else e.in_class,
            )
            for e in (*problem.edges, edge)
        ),
        holds=tuple(
            replace(h, items=(*h.items, h.items[0])) if h.node == 1 else h for h in problem.holds
        ),
    )
    reduced = presolve(double)
    assert 3 not in reduced.kept[1]
    ends = [(e.u, e.v) for e in reduced.problem.edges]
    assert len(ends) == len(set(ends))


def splits(problem: Problem, devices: int) -> float:
    """The least largest load over all contiguous splits, the order of devices being free."""
    count = len(problem.nodes)
    best = math.inf
    for parts in range(1, devices + 1):
        for cuts in itertools.combinations(range(1, count), parts - 1):
            bounds = (0, *cuts, count)
            chosen = [d for d in range(parts) for _ in range(bounds[d], bounds[d + 1])]
            best = min(best, evaluate_choices(problem, chosen).step_s)
    return best


def chain(problem: Problem) -> Problem:
    """Only the edges between neighbours."""
    return replace(problem, edges=tuple(e for e in problem.edges if e.v == e.u + 1))


@pytest.mark.parametrize("seed", range(8))
def test_contiguous_plans_are_exact_on_chains(seed: int) -> None:
    problem = chain(placement(seed, 9, 3))
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    best = min(plans, key=lambda split: split.value)
    assert best.value == pytest.approx(splits(problem, 3))
    assert evaluate_choices(problem, best.chosen).step_s == pytest.approx(best.value)


@pytest.mark.parametrize("seed", range(8))
def test_contiguous_plans_bound_splits_from_below(seed: int) -> None:
    problem = placement(seed, 9, 3)
    value = min(
        split.value for split in contiguous_plans(problem, alone(problem, Eliminator(problem)))
    )
    assert value <= splits(problem, 3) * (1 + 1e-9)


def test_contiguous_plans_fit_weights_into_the_limit() -> None:
    """Five weights of 6 bytes on three devices of 12: two, two and one."""
    problem = chain(placement(2, 5, 3))
    weights = [Item((0.0,) * 3, tuple(6.0 * (d == e) for e in range(3)), 0, 4) for d in range(3)]
    holds = tuple(Hold(v, tuple((3 * v + d,) for d in range(3))) for v in range(5))
    problem = replace(
        problem,
        limit_bytes=(12.0,) * 3,
        items=tuple(weights * 5),
        holds=holds,
        edges=tuple(replace(edge, items={}) for edge in problem.edges),
    )
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    assert [len(set(split.chosen)) for split in plans] == [3]
    assert evaluate_choices(problem, plans[0].chosen).excess_bytes == 0


def test_contiguous_plans_use_each_unlike_device_once() -> None:
    problem = chain(placement(2, 8, 3))
    nodes = tuple(
        tuple(
            replace(c, load_s=tuple(s * (1 + d) for d, s in enumerate(c.load_s))) for c in choices
        )
        for choices in problem.nodes
    )
    problem = replace(problem, nodes=nodes, interchangeable=())
    plans = contiguous_plans(problem, alone(problem, Eliminator(problem)))
    assert [len(set(split.chosen)) for split in plans] == [1, 2, 3]
    value = min(split.value for split in plans)
    best = math.inf
    for order in itertools.permutations(range(3)):
        for i, j in itertools.combinations_with_replacement(range(9), 2):
            chosen = [order[0]] * i + [order[1]] * (j - i) + [order[2]] * (8 - j)
            best = min(best, evaluate_choices(problem, chosen).step_s)
    assert value == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
def test_moves_keep_the_sums(seed: int) -> None:
    problem = placement(seed, 8, 3, limit=20, per_group=2)
    rng = random.Random(seed)
    state = State(tables(problem), [0] * 8, bytes_matter=True)
    for _ in range(200):
        state.move(rng.randrange(8), rng.randrange(6))
    outcome = evaluate_choices(problem, state.chosen)
    assert state.load == pytest.approx(outcome.load_s)
    assert state.peaks() == pytest.approx(outcome.peak_bytes)
    assert state.excess_bytes() == pytest.approx(outcome.excess_bytes)


def test_local_search_improves_and_repeats_itself() -> None:
    problem = placement(4, 20, 3)
    worse = evaluate_choices(problem, [0] * 20).step_s
    first, second = (local_search(problem, [0] * 20, effort=3000, seed=7) for _ in range(2))
    assert first == second
    assert evaluate_choices(problem, first).step_s < 0.6 * worse


def test_local_search_takes_no_forbidden_pair() -> None:
    problem = placement(4, 12, 2)
    edges = tuple(replace(edge, forbidden=frozenset({(0, 1)})) for edge in problem.edges)
    problem = replace(problem, edges=edges)
    plan = local_search(problem, [1] * 12, effort=3000)
    assert evaluate_choices(problem, plan).step_s < evaluate_choices(problem, [1] * 12).step_s


def test_cliques_of_intervals() -> None:
    assert clique_positions([(0, 2), (1, 1), (2, 3)]) == [1, 2]
    assert clique_positions([(0, 9), (3, 9), (4, 4)]) == [4]
    assert clique_positions([]) == []


def test_memory_rows_are_only_those_that_can_bind() -> None:
    loose, tight = (formulate(spmd(2, 6, 3, limit=limit), "throughput") for limit in (1e9, 15))
    free = formulate(spmd(2, 6, 3), "throughput")
    assert len(loose.milp.rows) == len(free.milp.rows) < len(tight.milp.rows)


def test_one_distinct_device_needs_no_maximum() -> None:
    assert not formulate(spmd(0, 4, 2), "throughput").min_max
    assert formulate(placement(0, 4, 2), "throughput").min_max


def test_canonical_plans_cost_the_same_and_open_groups_in_order() -> None:
    problem = placement(6, 8, 3)
    rng = random.Random(0)
    for _ in range(20):
        chosen = [rng.randrange(3) for _ in range(8)]
        renamed = canonical(problem, chosen)
        before, after = (evaluate_choices(problem, plan) for plan in (chosen, renamed))
        assert sorted(before.load_s) == pytest.approx(sorted(after.load_s))
        assert canonical(problem, renamed) == renamed


def test_groups_that_differ_are_not_interchangeable() -> None:
    problem = placement(0, 4, 3)
    assert symmetric_groups(problem) == ((0, 1, 2),)
    slow = replace(problem.nodes[0][1], load_s=(0.0, 99.0, 0.0))
    nodes = ((problem.nodes[0][0], slow, problem.nodes[0][2]), *problem.nodes[1:])
    assert symmetric_groups(replace(problem, nodes=nodes)) == ((0, 2),)
    assert symmetric_groups(replace(problem, limit_bytes=(1.0, 2.0, 1.0))) == ((0, 2),)


@pytest.mark.parametrize("seed", range(5))
def test_latency_bounds_and_proposals(seed: int) -> None:
    problem = placement(seed, 6, 2)
    best = brute_force(problem, "latency")
    assert best is not None
    assert critical_path_s(problem) <= best[1] * (1 + 1e-9)
    proposed = evaluate_choices(problem, list_schedule(tables(problem))).latency_s
    assert best[1] * (1 - 1e-9) <= proposed <= 1.6 * best[1]


def test_an_item_of_more_nodes_without_a_choice_than_an_array_has_axes() -> None:
    """One value read by many nodes that can run in one way only (numpy stops at 64 axes)."""
    count = 100
    item = Item(load_s=(5.0,), bytes=(1.0,), first=0, last=count)
    fixed = (Choice(load_s=(1.0,), group=0, label=""),)
    free = (*fixed, Choice(load_s=(2.0,), group=0, label=""))
    edges = tuple(Edge(0, v, (0, 1), (0,), {(0, 0): (0,)}) for v in range(1, count + 1))
    nodes = (free, *(fixed for _ in range(count)))
    names = tuple(f"n{i}" for i in range(count + 1))
    problem = Problem(1, (math.inf,), nodes, names, edges, (), (item,))
    answer = Eliminator(problem).min_sum([1.0])
    assert answer is not None
    assert answer[1] == pytest.approx(102.0)  # the dearer choice of n0 saves the item
    assert answer[0][0] == 1

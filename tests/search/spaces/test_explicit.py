"""The search: families, the certificate, requests that name nothing."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import partitioner
from helpers.plans.cost_cases import flat, graph
from helpers.plans.searching import search
from helpers.plans.whole_plans import build
from partitioner import examples
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster
from partitioner.cost_model.equal_devices.columns import DeviceColumns
from partitioner.cost_model.errors import CostError
from partitioner.cost_model.evaluate import evaluate, one_device
from partitioner.cost_model.prices.compute import shape_at
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.cost_model.profiles.database import Profile, write_entries
from partitioner.cost_model.profiles.entries import Entry
from partitioner.cost_model.profiles.forms import form_of
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Graph, Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import Plan, place, resolve
from partitioner.ir.types import TensorType
from partitioner.problem.build import Built
from partitioner.search import find_plan
from partitioner.search.outcome import Candidate, Outcome, SpaceResult
from partitioner.search.request import Budget, Request
from partitioner.search.spaces import explicit
from partitioner.search.spaces.explicit import (
    JointSearch,
    JointSpace,
    KindSpace,
    cover,
    side_by_side,
)
from partitioner.solver import work as work_module
from partitioner.solver.joint.solve import solve
from partitioner.solver.outcome import Infeasible, Solution
from partitioner.solver.problem import Choice, Edge, Hold, Item, Problem
from partitioner.solver.referee import Objective
from partitioner.solver.work import Work
from partitioner.strategies.constraints import ConstraintError, Constraints, Pin
from partitioner.strategies.derive import Rules
from partitioner.strategies.spaces import SearchError, families

MLP = load_onnx(examples.build("mlp", layers=2, hidden=16, batch=4)).graph


def found(graph: Graph = MLP, cluster: Cluster | None = None, **options: object) -> Outcome:
    request = Request(time_limit_s=5, **options)  # type: ignore[arg-type]
    return search(graph, cluster or flat(4), request)


@pytest.mark.parametrize("objective", ["throughput", "latency", "memory"])
def test_the_certificate_is_what_the_referee_says(objective: Objective) -> None:
    outcome = found(objective=objective)
    certificate = outcome.plan.certificate
    assert certificate is not None
    again = evaluate(MLP, outcome.plan, flat(4))
    assert certificate.cost == again.cost(objective) == outcome.evaluation.cost(objective)
    assert certificate.bound <= certificate.cost
    assert certificate.objective == objective
    rivals = [
        entry.cost(objective)
        for entry in outcome.candidates
        if objective != "throughput" or entry.evaluation.devices_used == 4
    ]
    assert certificate.cost == min(rivals)


def test_every_family_is_searched_and_named() -> None:
    outcome = found()
    spaces = [str(family) for family in families("auto", 4)]
    assert sorted(spaces) == [
        "hybrid (2 groups of x=2)",
        "inter (4 x one device)",
        "intra (x=2 y=2)",
        "intra (x=4)",
    ]
    assert {str(entry.space) for entry in outcome.candidates} == {*spaces}
    assert outcome.plan.certificate is not None
    assert all(space in outcome.plan.certificate.space for space in spaces)


def test_throughput_gives_every_device_work() -> None:
    assert found(cluster=resolve_cluster(None, 3)).evaluation.devices_used == 3


def test_a_mesh_of_the_users_choice() -> None:
    outcome = found(mesh={"rows": 2, "tp": 2}, strategy="intra", cluster=resolve_cluster("4xideal"))
    assert {placed.mesh.names for placed in resolve(MLP, outcome.plan)} == {("rows", "tp")}


def test_one_device_is_a_plan_too() -> None:
    outcome = found(cluster=flat(1))
    assert [entry.space.name for entry in outcome.candidates] == ["single"]
    assert {placed.mesh.devices for placed in resolve(MLP, outcome.plan)} == {(0,)}


def test_groups_that_run_nothing_are_left_out() -> None:
    plan = found(strategy="inter", objective="latency").plan
    assert {node.group for node in plan.nodes.values()} == set(range(len(plan.groups)))


def test_the_same_search_gives_the_same_bytes() -> None:
    plan = found().plan
    assert plan.to_json() == found().plan.to_json()
    assert Plan.from_json(plan.to_json()) == plan


def test_ops_without_a_rule_do_not_keep_the_rest_from_being_cut() -> None:
    nodes = [
        Node("a", "Relu", ("x",), ("h",)),
        Node("odd", "custom::Op", ("h",), ("i",)),
        Node("b", "Relu", ("i",), ("y",)),
    ]
    graph = build(nodes, dict.fromkeys("xhiy", (4096, 4096)), ["x"], ["y"])
    outcome = found(graph, resolve_cluster("2xideal"), strategy="intra")
    by_name = {placed.node.name: placed for placed in resolve(graph, outcome.plan)}
    assert by_name["odd"].mesh.devices == (0,)
    assert {by_name[name].mesh.size() for name in "ab"} == {2}
    assert outcome.evaluation.devices_used == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "all"}, "strategy 'all' is not auto, intra, inter or copies"),
        ({"mesh": {"dp": 2, "tp": 3}}, r"mesh dp\(2\) \* tp\(3\) = 6 != 4 devices"),
        ({"mesh": {"tp": 4}, "strategy": "inter"}, "leave it out with strategy 'inter'"),
    ],
)
def test_a_request_that_names_no_space(options: dict[str, object], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        found(**options)


def test_what_does_not_fit_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="short on device"):
        found(cluster=flat(2).with_memory(64))


def test_a_cluster_of_another_size_and_too_many_devices_are_refused() -> None:
    model = examples.build("mlp", hidden=8)
    with pytest.raises(CostError, match="has 2 devices, not 3"):
        partitioner.compile(model, devices=3, cluster=resolve_cluster("2xh100"))
    with pytest.raises(CostError, match="at most 16384"):
        partitioner.compile(model, devices=10**8)


def test_past_the_time_limit_what_is_left_is_named_and_not_searched() -> None:
    outcome = search(MLP, flat(4), Request(time_limit_s=1e-9))
    assert [str(entry.space) for entry in outcome.candidates] == ["inter (4 x one device)"]
    left = {str(family): str(error) for family, error in outcome.failed}
    assert set(left) == {"intra (x=4)", "intra (x=2 y=2)", "hybrid (2 groups of x=2)"}
    assert set(left.values()) == {"not searched within 1e-09 s"}
    assert outcome.plan.certificate is not None
    assert outcome.plan.certificate.space == "inter (4 x one device)"


def test_a_space_whose_steps_take_long_leaves_time_for_those_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock stands still but for the search of the first space, which takes all that it may."""
    now = [100.0]
    searched: list[float] = []

    def slow(problem: object, goal: object, work: Work, **options: object) -> Solution:
        before = work.left_s
        searched.append(before)
        if len(searched) == 1:
            now[0] += before
            assert work.late
        return solve(problem, goal, work, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(work_module, "now_s", lambda: now[0])
    monkeypatch.setattr(explicit, "solve", slow)
    outcome = search(MLP, flat(4), Request(time_limit_s=40))
    assert {str(entry.space) for entry in outcome.candidates} >= set(map(str, families("auto", 4)))
    assert searched[0] == 8  # there are four spaces, and the kinds of parallelism
    assert not outcome.failed


def test_of_contradictory_pins_the_family_that_got_furthest_speaks() -> None:
    first, last = MLP.nodes[0], MLP.nodes[-1]
    pins = (
        Pin("first", nodes=(first.name,), devices=(0,)),  # leaves intra plans nothing
        Pin("this", nodes=(last.name,), devices=(0,)),
        Pin("that", nodes=(last.name,), devices=(1,)),
    )
    with pytest.raises(ConstraintError, match=f"that leaves no strategy for '{last.name}'"):
        found(constraints=Constraints(pins))


def slower_together(folder: Path) -> Cluster:
    """Two devices on which each operator of MLP takes 1000 times longer while both are busy."""
    file, spec = folder / "profile", flat(2).devices[0]
    whole = [place(MLP, node, DeviceMesh.single(0), {}, None) for node in MLP.nodes]
    forms = {form_of(MLP, node, partial(shape_at, {})).key: node.node.op for node in whole}
    entries = [
        Entry(form, op, "float32", 1.0, 1, seconds, 0.0, 9, "backend", "2026", processes)
        for form, op in forms.items()
        for processes, seconds in ((1, 1e-6), (2, 1e-3))
    ]
    write_entries(file, "device", 1, entries)
    busy = replace(spec, profile=Profile.read(file, "device", 1, 2))
    return replace(flat(2), devices=(busy,) * 2)


def test_a_device_that_is_busy_alone_competes_at_its_own_price(tmp_path: Path) -> None:
    """Two busy processes are much slower here, so the plan on one device is the best."""
    cluster = slower_together(tmp_path)
    outcome = found(cluster=cluster, objective="latency")
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert outcome.evaluation.devices_used == 1
    assert certificate.cost == certificate.bound == one_device(MLP, cluster).latency_s < 1e-4
    assert "single (one device)" in certificate.space
    assert evaluate(MLP, outcome.plan, cluster).latency_s == certificate.cost
    pinned = found(cluster=cluster, objective="latency", strategy="intra")
    assert pinned.evaluation.latency_s > 1e-4


def test_a_bound_covers_plans_on_one_device_at_their_own_price(tmp_path: Path) -> None:
    """Cost alone decides: a device that is left idle is no loss."""
    cluster = slower_together(tmp_path)
    outcome = found(cluster=cluster, objective="throughput")
    certificate = outcome.plan.certificate
    assert certificate is not None
    assert outcome.evaluation.devices_used == 1
    assert certificate.bound <= certificate.cost == one_device(MLP, cluster).step_s < 1e-4
    assert any(plan.cost("throughput") > 1e-4 for plan in outcome.candidates)


@pytest.mark.parametrize("objective", ["throughput", "memory"])
@pytest.mark.parametrize("fits", [True, False])
def test_small_spaces_go_next_where_the_first_space_has_no_plan_or_bytes_are_wanted(
    objective: Objective, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    plan = search(MLP, flat(2), Request()).candidates[0]

    class Other:
        def search(self, _budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
            order.append("other")
            return SpaceResult((plan,) if fits else ())

    def kind(self: KindSpace, _budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        order.append(self.kind)
        return SpaceResult()

    def joint(self: JointSpace, _budget: Budget, _others: tuple[SpaceResult, ...]) -> SpaceResult:
        order.append(self.family.name)
        return SpaceResult()

    monkeypatch.setattr(KindSpace, "search", kind)
    monkeypatch.setattr(JointSpace, "search", joint)
    request, shared = Request(objective=objective), cast("JointSearch", None)
    kinds = KindSpace(shared, "dp"), KindSpace(shared, "dp+tp", {"dp": 2, "tp": 2})
    inter = JointSpace(shared, families("inter", 2, None)[0])
    spaces = [Other(), Other(), inter, *kinds]
    find_plan._Search(request, flat(2), Budget.of(request)).searched(spaces)
    plain = ["other", "other", "inter", "dp", "dp+tp"]
    early = ["other", "inter", "dp", "other", "dp+tp"]
    assert order == (plain if fits and objective == "throughput" else early)


# A plan that does not fit by the referee is none.


def short(plan: Candidate) -> Candidate:
    """A plan that costs nothing, of which every device is short of a byte."""
    limits = {device: n - 1 for device, n in plan.evaluation.needed_bytes.items()}
    return costing(0.0, replace(plan, evaluation=replace(plan.evaluation, limit_bytes=limits)))


def costing(step_s: float, plan: Candidate) -> Candidate:
    """A plan of which every device computes so long."""
    devices = plan.evaluation.compute_s
    computing, idle = dict.fromkeys(devices, step_s), dict.fromkeys(devices, 0.0)
    return replace(plan, evaluation=replace(plan.evaluation, compute_s=computing, comm_s=idle))


def test_one_device_is_weighed_beside_the_plans_that_fit() -> None:
    request, cluster = Request(), flat(2)
    plan = short(search(MLP, cluster, request).candidates[0])
    so_far = find_plan._Search(request, cluster, Budget.of(request), [SpaceResult((plan,))])
    outcome = so_far.with_one_device(MLP).winner
    assert outcome.evaluation.fits_exactly
    assert outcome.evaluation.devices_used == 1


def test_a_search_goes_on_where_no_plan_of_it_fits() -> None:
    request, cluster = Request(), flat(2)
    plan = search(MLP, cluster, request).candidates[0]

    def more(_: Budget) -> SpaceResult:
        raise AssertionError

    def unfinished(*plans: Candidate) -> set[int]:
        results = [SpaceResult(plans, more=more)]
        return {*find_plan._Search(request, cluster, Budget.of(request), results).unfinished}

    proven = replace(plan, solution=replace(plan.solution, bound=plan.cost("throughput")))
    assert unfinished(short(plan)) == {0}
    assert unfinished(proven) == set()


@pytest.mark.parametrize(("times", "binds"), [(1.0, False), (2.0, True)])
def test_memory_binds_where_the_plan_that_fits_costs_more_than_the_first(
    times: float, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, cluster = Request(), flat(2)
    shared = JointSearch(
        MLP, cluster, request, Rules.of(MLP), DeviceColumns(MLP, Resharder(cluster))
    )
    one_device = (0,) * len(MLP.nodes)
    covered: list[object] = []

    def that_fits(self: JointSpace, built: Built, plan: Candidate, _: Budget) -> Candidate:
        solution = replace(plan.solution, chosen=one_device)
        step_s = times * plan.evaluation.step_s
        return costing(step_s, self.shared.candidate(self.family, built, solution))

    monkeypatch.setattr(JointSpace, "_that_fits", that_fits)
    monkeypatch.setattr(explicit, "cover", lambda _, chosen: covered.append(chosen))
    space = JointSpace(shared, families("inter", 2, None)[0])
    assert space.search(Budget.of(request), ()).memory_binds == binds
    assert covered == [one_device]


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_a_problem_that_is_solved_to_its_bound_is_not_searched_on(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Though the referee may count more than the solver, so that its plan is above the bound."""
    request, cluster = Request(), flat(2)
    shared = JointSearch(
        MLP, cluster, request, Rules.of(MLP), DeviceColumns(MLP, Resharder(cluster))
    )
    solution = JointSpace._solution

    def bounded(self: JointSpace, *args: Any) -> Solution:
        found = solution(self, *args)
        return replace(found, bound=share * found.cost)

    monkeypatch.setattr(JointSpace, "_solution", bounded)
    found = JointSpace(shared, families("intra", 2, None)[0]).search(Budget.of(request), ())
    assert (found.more is None) == (share == 1.0)


def test_devices_of_as_much_memory_have_as_little_of_it_as_the_one_that_is_shortest() -> None:
    """What the referee counts more on one is counted on all; other devices keep their limit."""
    held = Item((0.0,) * 4, (90.0, 80.0, 10.0, 70.0), 0, 0)
    choices = (Choice((1.0,) * 4, 0),)
    problem = Problem(
        4, (100.0, 100.0, 100.0, 75.0), (choices,), ("n",), (), (Hold(0, ((0,),)),), (held,)
    )
    evaluation = SimpleNamespace(short_bytes={4: 5, 5: 20})
    plan = SimpleNamespace(solution=SimpleNamespace(chosen=(0,)), evaluation=evaluation)
    narrowed = explicit._narrowed(problem, cast("Candidate", plan), (4, 5, 6, 7))
    assert narrowed.limit_bytes == (60, 60, 60, 75)


# Parts of a mesh that have nodes of their own take turns.


def joined(*nodes: tuple[str, str]) -> Graph:
    """Nodes by name and what they read; each makes the value of its name."""
    made = [
        Node(name, "Relu" if len(reads.split()) == 1 else "Add", tuple(reads.split()), (name,))
        for name, reads in nodes
    ]
    types = {value: TensorType.of("float32", (4,)) for value in ("x", *(name for name, _ in nodes))}
    return graph(made, types, ("x",), (nodes[-1][0],))


def test_places_take_turns_between_what_they_wait_for_and_what_waits_for_them() -> None:
    model = joined(
        *(("pre", "x"), ("a0", "pre"), ("behind", "a0"), ("a1", "a0"), ("a2", "a1")),
        *(("b0", "pre"), ("b1", "b0"), ("early", "pre")),
        *(("join", "a2 b1"), ("free", "x"), ("all", "join early")),
    )
    places = {name: ("experts", int(name[0] == "b")) for name in ("a0", "a1", "a2", "b0", "b1")}
    assert list(side_by_side(model, places)) == [
        *("pre", "early", "free", "a0", "b0", "a1", "b1", "a2", "behind", "join", "all")
    ]


def test_without_places_nothing_moves() -> None:
    model = joined(("a", "x"), ("b", "x"), ("c", "a b"))
    assert list(side_by_side(model, {})) == ["a", "b", "c"]


# Each idle device gets the node whose move costs least, if memory and the others allow it.


def problem(
    *nodes: Sequence[tuple[float, ...]],
    limits: Sequence[float] = (math.inf, math.inf, math.inf),
    edges: tuple[Edge, ...] = (),
    held: Sequence[float] = (),
) -> Problem:
    """Nodes by the seconds of their choices on three devices; `held` has the bytes of each node."""
    choices = tuple(tuple(Choice(load, at) for at, load in enumerate(loads)) for loads in nodes)
    items = tuple(
        Item((0.0,) * 3, tuple(nbytes * (load > 0) for load in loads), 0, len(nodes) - 1)
        for nbytes, of in zip(held, nodes, strict=False)
        for loads in of
    )
    counts = [len(of) for of in nodes]
    holds = tuple(
        Hold(node, tuple((sum(counts[:node]) + at,) for at in range(counts[node])))
        for node in range(len(held))
    )
    names = tuple(f"n{node}" for node in range(len(nodes)))
    return Problem(3, tuple(limits), choices, names, edges, holds, items)


def anywhere(seconds: float) -> list[tuple[float, ...]]:
    """A node that takes so long on each of the devices."""
    return [tuple(seconds * (device == at) for device in range(3)) for at in range(3)]


def test_each_idle_device_gets_the_node_whose_move_costs_least() -> None:
    """Device 1 relieves device 0 of most, device 2 gets the least of what is left there."""
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (0, 0, 0)) == (1, 0, 2)


def test_devices_with_work_before_an_idle_one_keep_it() -> None:
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (0, 1, 0)) == (0, 1, 2)


def test_a_plan_without_idle_devices_stays() -> None:
    assert cover(problem(*map(anywhere, (3.0, 2.0, 1.0))), (2, 0, 1)) == (2, 0, 1)


def test_no_plan_if_a_later_device_gets_nothing() -> None:
    """Two nodes are no work for three devices: a move would leave another one idle."""
    assert cover(problem(anywhere(3.0), anywhere(2.0)), (0, 0)) is None


def test_a_choice_on_two_devices_is_work_for_both() -> None:
    both = [(4.0, 0.0, 0.0), (0.0, 2.0, 2.0)]
    assert cover(problem(both, anywhere(1.0)), (0, 0)) == (1, 0)


def test_a_move_that_leaves_as_many_idle_is_none() -> None:
    """Device 2 would get the node that alone is the work of devices 0 and 1."""
    assert cover(problem([(2.0, 2.0, 0.0), (0.0, 0.0, 3.0)]), (0,)) is None


def test_of_equal_longest_loads_the_least_sum_decides() -> None:
    """Both small nodes can go to device 2 beside a longer one: the second is faster there."""
    slow, fast = [(1.0, 0.0, 0.0), (0.0, 0.0, 2.0)], [(1.0, 0.0, 0.0), (0.0, 0.0, 1.5)]
    assert cover(problem(anywhere(9.0), slow, fast), (1, 0, 0)) == (1, 0, 1)


def test_costs_that_differ_by_rounding_are_equal() -> None:
    """A longest load that is lower by rounding does not outweigh a longer sum."""
    slow, fast = [(1.0, 0.0, 0.0), (0.0, 0.0, 8.0)], [(1.0, 0.0, 0.0), (0.0, 0.0, 2.0)]
    longest = [(0.0, 9.0, 0.0)], [(0.0, 1e-15, 0.0)]
    assert cover(problem(*longest, slow, fast), (0, 0, 0, 0)) == (0, 0, 0, 1)


@pytest.mark.parametrize(("limit", "expected"), [(5.0, (1, 0, 2)), (4.0, (0, 1, 2)), (2.0, None)])
def test_a_device_gets_no_node_that_its_memory_does_not_hold(
    limit: float, expected: tuple[int, ...] | None
) -> None:
    nodes = [anywhere(seconds) for seconds in (3.0, 2.0, 1.0)]
    limits = math.inf, limit, math.inf
    assert cover(problem(*nodes, limits=limits, held=(5.0, 4.0, 3.0)), (0, 0, 0)) == expected


def test_a_forbidden_pair_is_no_move() -> None:
    """The longest node cannot leave the device of its neighbour."""
    others = frozenset((u, v) for u in range(3) for v in range(3) if u != v)
    edge = Edge(0, 1, (0, 1, 2), (0, 1, 2), {}, others)
    nodes = [anywhere(seconds) for seconds in (3.0, 2.0, 1.0, 0.5)]
    assert cover(problem(*nodes, edges=(edge,)), (0, 0, 0, 0)) == (0, 0, 1, 2)

"""Users' own MILP solvers: named, trusted only as far as their results prove, exact in the end."""

import json
import math
import time
from pathlib import Path
from typing import Any

import onnx
import pulp
import pytest

import partitioner
from helpers.problems.enumeration import brute_force
from helpers.problems.pairwise_cases import instance, optimum
from helpers.problems.solver_instances import dnnp, knapsack, placement, spmd
from partitioner import examples
from partitioner.cli.main import main
from partitioner.solver.formats.dnnp import parse
from partitioner.solver.formats.files import to_problem
from partitioner.solver.joint.solve import solve
from partitioner.solver.milp.engines import (
    HIGHS,
    Engine,
    EngineError,
    available,
    find,
    solve_milp,
)
from partitioner.solver.milp.program import MilpBuilder
from partitioner.solver.milp.pulp_program import load_pulp
from partitioner.solver.outcome import Infeasible
from partitioner.solver.pairwise.model import build
from partitioner.solver.pairwise.problem import evaluate
from partitioner.solver.pairwise.relax import prune
from partitioner.solver.pairwise.solve import solve_exactly
from partitioner.solver.problem import SolverError
from partitioner.solver.work import Work

CBC = Engine("CBC", "PULP_CBC_CMD")


def test_names_in_any_case_and_pulps_own() -> None:
    assert find("cbc") == find("CBC") == CBC
    assert find("highs") is find("HiGHS") is HIGHS
    assert find("pulp_cbc_cmd") == Engine("PULP_CBC_CMD", "PULP_CBC_CMD")
    assert available()[:2] == ("highs", "cbc")


def test_every_solver_that_pulp_knows_has_a_name() -> None:
    for listed in set(pulp.listSolvers()) - {"HiGHS", "HiGHS_CMD"}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pulp, "listSolvers", _only(listed))
            (name,) = available()[1:]
            assert find(name).pulp == listed


def _only(name: str) -> Any:
    return lambda onlyAvailable=False: [name] if onlyAvailable else ["HiGHS", name]  # noqa: N803


def test_errors_list_the_solvers_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineError, match="'nix' is not known; there are highs, cbc") as caught:
        find("nix")
    assert caught.value.exit_code == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulp, "listSolvers", _only("GUROBI"))
        with pytest.raises(EngineError, match=r"'cbc' was not found on .*; there are highs, gur"):
            find("cbc")
        patch.setattr(pulp, "listSolvers", lambda onlyAvailable=False: ["GUROBI"][onlyAvailable:])  # noqa: N803
        with pytest.raises(
            EngineError, match=r"'gurobi' was not found on this machine; there are highs$"
        ):
            find("gurobi")
    with pytest.raises(EngineError, match="solver is 3; give a name"):
        find(3)  # type: ignore[arg-type]
    for command in (["solve", "none.json"], [str(Path(__file__).parents[3] / "pyproject.toml")]):
        assert main([*command, "--solver", "nix"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith("there are highs, cbc")


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_a_program_has_the_same_optimum(gap: float) -> None:
    milp = knapsack(12)
    best = solve_milp(milp, Work.within(60), 0.0)
    result = solve_milp(milp, Work.within(60), gap, engine=CBC)
    assert result.status == "optimal"
    assert best.cost * (1 - gap) + 1e-9 >= result.cost >= best.cost - 1e-6
    assert best.cost - 2 * (gap + 1e-6) * abs(best.cost) <= result.bound <= best.cost
    relaxed = solve_milp(milp.relaxed(), Work.within(60), 0.0, engine=CBC)
    assert relaxed.cost == pytest.approx(solve_milp(milp.relaxed(), Work.within(60), 0.0).cost)
    assert relaxed.bound <= relaxed.cost


def test_an_infeasible_program_is_reported() -> None:
    program = MilpBuilder()
    column = program.column(upper=1.0, integer=True)
    program.row([(column, 2.0)], 0, 1.0)
    assert solve_milp(program.build(), Work.within(10), 0.0, engine=CBC).status == "infeasible"


def test_a_stopped_run_proves_nothing_whatever_pulp_says() -> None:
    stopped = solve_milp(knapsack(60), Work.within(0.01), 0.0, engine=CBC)
    assert stopped.status in ("time_limit", "feasible")
    assert stopped.bound == -math.inf


class Liar(pulp.LpSolver):  # type: ignore[misc]
    """Says `Optimal` of anything, late; takes neither a gap nor a number of threads."""

    def __init__(self, mip: bool = True, msg: bool = True, timeLimit: float = 0.0) -> None:  # noqa: N803
        super().__init__(mip, msg, timeLimit=timeLimit)

    def actualSolve(self, lp: Any, **_: object) -> int:  # noqa: N802
        time.sleep(0.02)
        for variable in lp.variables():
            variable.varValue = 0.0
        lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionOptimal)
        return int(pulp.LpStatusOptimal)


def test_optimal_after_the_time_limit_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp, "getSolver", lambda *_, **__: Liar())
    late = solve_milp(knapsack(5), Work.within(0.01), 0.0, engine=CBC)
    assert (late.status, late.bound) == ("time_limit", -math.inf)
    early = solve_milp(knapsack(5), Work.within(60), 0.0, engine=CBC)
    assert (early.status, early.cost) == ("optimal", 0.0)


def test_a_solver_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise pulp.PulpSolverError("no\nlicence")

    monkeypatch.setattr(Liar, "actualSolve", fail)
    monkeypatch.setattr(pulp, "getSolver", lambda *_, **__: Liar())
    with pytest.raises(SolverError, match=r"^solver cbc failed: no licence$"):
        solve_milp(knapsack(5), Work.within(60), 0.0, engine=CBC)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("objective", ["throughput", "memory"])
@pytest.mark.parametrize("seed", range(4))
def test_cbc_finds_the_optimum_of_random_problems(objective: Any, seed: int) -> None:
    for problem in (
        spmd(seed, 5, 3, limit=20 + seed % 5),
        placement(seed, 5, 3, limit=12 + seed % 9),
        to_problem(parse(dnnp(seed, 5))),
    ):
        best = brute_force(problem, objective)
        try:
            result = solve(problem, objective, gap=0.0, effort=2, engine=CBC)
        except Infeasible:
            assert best is None
            continue
        assert best is not None
        slack = 1.1e-3 if objective == "memory" else 1e-4
        assert result.cost <= best[1] * (1 + slack) + 1e-9
        assert result.bound <= best[1] * (1 + 1e-9)
        if objective == "throughput":
            assert result.status == "optimal"
        assert "HiGHS" not in result.solver


@pytest.mark.parametrize("seed", [4, 6, 12, 13, 15, 16, 18, 20, 21, 22])
def test_cbc_finds_the_optimum_of_pairwise_problems(seed: int) -> None:
    problem = instance(seed, nodes=5)
    best = optimum(problem)
    model = prune(build(problem))
    assert best is not None
    assert model is not None
    chosen, bound = solve_exactly(model, 60, 0.0, CBC)
    assert chosen is not None
    assert evaluate(problem, model.original(chosen)).cost == best
    assert bound == pytest.approx(best, rel=1e-5)


def test_a_model_is_planned_by_cbc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=64, batch=4), tmp_path / "m.onnx")
    plans = {
        name: partitioner.compile(
            tmp_path / "m.onnx", devices=2, strategy="inter", gap=1e-3, solver=name
        )
        for name in ("highs", "CBC")
    }
    assert plans["CBC"].cost == pytest.approx(plans["highs"].cost, rel=1e-4)
    for name, label in (("highs", "HiGHS"), ("CBC", "CBC")):
        certificate = plans[name].plan.certificate
        assert certificate is not None
        assert label in certificate.solver
        assert certificate.bound == pytest.approx(plans["highs"].plan.certificate.bound, rel=2e-3)
    options = ["--devices", "2", "--strategy", "inter", "--solver", "cbc", "--gap", "0.1%"]
    assert main([str(tmp_path / "m.onnx"), *options, "-o", str(tmp_path / "d"), "-q"]) == 0
    assert main(["show", str(tmp_path / "d")]) == 0
    assert "CBC" in capsys.readouterr().out


def test_cbc_solves_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(dnnp(4, 7)))
    costs = []
    for name in ("cbc", "highs"):
        assert main(["solve", str(tmp_path / "p.json"), "--solver", name, "--json"]) == 0
        costs.append(json.loads(capsys.readouterr().out)["cost"])
    assert costs[0] == pytest.approx(costs[1], rel=1e-4)


def test_pulp_keeps_no_frames_of_its_first_import() -> None:
    """They lead to the frames of all callers, and to what those hold."""
    load_pulp.cache_clear()
    missing = [member.err for member in vars(load_pulp()).values() if hasattr(member, "err")]
    errors = [error for error in missing if isinstance(error, BaseException)]
    assert errors
    assert all(error.__traceback__ is None for error in errors)

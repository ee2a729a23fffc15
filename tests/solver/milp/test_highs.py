"""HiGHS prints nothing, wherever it is used, and gets one program through PuLP and as arrays."""

import json
import os
from pathlib import Path

import highspy
import numpy as np
import onnx
import pytest

from helpers.problems.pairwise_cases import instance
from helpers.problems.solver_instances import hops, knapsack, placement, spmd
from partitioner import examples
from partitioner.cli.main import main
from partitioner.solver.milp import highs
from partitioner.solver.milp.formulation import Goal, formulate
from partitioner.solver.milp.highs import new_highs, solve_with_highs
from partitioner.solver.milp.program import Milp, MilpResult
from partitioner.solver.pairwise.model import build
from partitioner.solver.pairwise.relax import prune
from partitioner.solver.pairwise.solve import solve_exactly
from partitioner.solver.placement.configuration import Covering

BANNER = b"Running HiGHS\n"
SOURCES = Path(__file__).parents[3] / "partitioner"


@pytest.fixture
def loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS prints a banner while it is made, as 1.16 does, unless its output is off by then."""
    enable = highspy.Highs.enableCallbacks

    def greet(solver: highspy.Highs) -> None:
        if solver.getOptionValue("output_flag")[1]:
            os.write(1, BANNER)
        enable(solver)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", greet)


@pytest.mark.usefixtures("loud")
def test_the_banner_is_there_without_us(capfd: pytest.CaptureFixture[str]) -> None:
    highspy.Highs()
    assert BANNER.decode() in capfd.readouterr().out


@pytest.mark.usefixtures("loud")
def test_no_program_is_solved_loudly(capfd: pytest.CaptureFixture[str]) -> None:
    new_highs()
    model = prune(build(instance(4, nodes=5)))
    assert model is not None
    assert solve_exactly(model, 60, 0.0)[0] is not None
    covering = Covering([2], np.ones(3))
    covering.add(0, frozenset({0, 1}), 1.0)
    covering.solve(np.inf)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("loud")
def test_json_is_all_that_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=64, batch=4), tmp_path / "m.onnx")
    for solver in ("highs", "cbc"):
        folder = str(tmp_path / f"{solver}.partition")
        options = ["--devices", "2", "--strategy", "inter", "--solver", solver, "-o", folder]
        assert main([str(tmp_path / "m.onnx"), *options, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["devices"] == 2


def test_all_of_them_are_made_in_one_place() -> None:
    made = [
        path.name
        for path in sorted(SOURCES.rglob("*.py"))
        if "highspy.Highs(" in path.read_text(encoding="utf-8")
    ]
    assert made == []


def _both(milp: Milp, monkeypatch: pytest.MonkeyPatch, **options: object) -> list[MilpResult]:
    """Solve through PuLP, then as arrays."""
    made = []

    def to_pulp(milp: Milp) -> object:
        made.append(highs.load_pulp())
        return convert(milp)

    convert = highs.to_pulp
    results = []
    with monkeypatch.context() as patch:
        patch.setattr(highs, "to_pulp", to_pulp)
        for most in (len(milp.cost), len(milp.cost) - 1):
            patch.setattr(highs, "MOST_PULP_COLUMNS", most)
            results.append(solve_with_highs(milp, 60.0, 0.0, **options))  # type: ignore[arg-type]
    assert len(made) == 1
    return results


@pytest.mark.parametrize("goal", ["throughput", "memory", "excess"])
@pytest.mark.parametrize("seed", range(4))
def test_through_pulp_and_as_arrays_a_program_has_one_result(
    seed: int, goal: Goal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only one optimum: the values, the bound and the nodes of branch and bound are equal."""
    for problem in (spmd(seed, 5, 3, limit=20), placement(seed, 4, 2), hops(seed, 4)):
        form = formulate(problem, goal)
        assert form is not None
        for milp in (form.milp, form.milp.relaxed()):
            through_pulp, as_arrays = _both(milp, monkeypatch)
            assert through_pulp == as_arrays
            assert through_pulp.status in ("optimal", "infeasible")


def test_pulp_passes_a_start_and_a_limit_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    start = dict.fromkeys(range(40), 0.0)
    through_pulp, as_arrays = _both(knapsack(40), monkeypatch, start=start, branches=1)
    assert through_pulp == as_arrays
    assert through_pulp.status == "feasible"
    assert through_pulp.bound < through_pulp.cost

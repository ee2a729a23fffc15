"""HiGHS prints nothing, not even while it is made, wherever it is used."""

import json
import os
from pathlib import Path

import highspy
import numpy as np
import onnx
import pytest

from helpers.problems.pairwise_cases import instance
from partitioner import examples
from partitioner.cli.main import main
from partitioner.solver.milp.highs import new_highs
from partitioner.solver.pairwise.exact import solve_exactly
from partitioner.solver.pairwise.model import build
from partitioner.solver.pairwise.reducing.reduce import prune
from partitioner.solver.placement.covering import Covering

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

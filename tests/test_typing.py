"""Types of the public functions, as a checker sees them in an editable install."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from partitioner.api.option_table import GoalOptions
from partitioner.frontends.torch.options import OPTIMIZERS, Optimizer
from partitioner.ir.pipeline.generate import SCHEDULES, ScheduleName, pipeline_schedule
from partitioner.ir.plan import OBJECTIVES
from partitioner.solver.milp.engines import _PULP, HIGHS, SolverName
from partitioner.solver.referee import Objective
from partitioner.strategies.spaces import Strategy

ROOT = Path(__file__).parents[1]

TYPED = """
from pathlib import Path
from typing import assert_type

import onnx
import partitioner
from partitioner.report.steps import Step
import torch

model = torch.nn.Linear(8, 8)
program = partitioner.compile(model, torch.zeros(4, 8), devices=2, strategy="intra", solver="cbc")
assert_type(program, partitioner.ModuleProgram)
assert_type(program.speedup, float | None)
assert_type(program.device_of("linear"), tuple[int, ...])
assert_type(partitioner.compile("m.onnx", devices=2, objective="latency"), partitioner.Compiled)
result = partitioner.compile(onnx.ModelProto(), schedule=Path("own.csv"), micro_batches=4)
assert_type(result, partitioner.Compiled)
assert_type(result.table(), list[Step])
assert_type(partitioner.load("m.partition"), partitioner.Compiled)
assert_type(partitioner.load("m.partition", model, torch.zeros(4, 8)), partitioner.ModuleProgram)
result.show(everything=True)
result.explain("fc")
"""
WRONG = """
import partitioner

partitioner.compile("m.onnx", strategy="intre")
partitioner.compile("m.onnx", objective="speed")
partitioner.compile("m.onnx", solver="high")
partitioner.compile("m.onnx", optimizer="adamv")
partitioner.compile("m.onnx", schedule="1fb1")
partitioner.compile("m.onnx", device=4)
"""


def test_literals_are_the_names_that_are_taken() -> None:
    assert set(get_args(Optimizer)) == OPTIMIZERS.keys()
    assert set(get_args(Objective)) == set(OBJECTIVES)
    assert set(get_args(SolverName)) == {HIGHS.name, *(label.lower() for label in _PULP)}
    assert get_args(ScheduleName) == SCHEDULES
    assert pipeline_schedule("gpipe", [0, 1], 2)
    goal = get_type_hints(GoalOptions)
    assert get_args(goal["strategy"]) == get_args(Strategy)
    assert get_args(goal["objective"]) == OBJECTIVES


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the package as an editable install alone.

    All other packages are those of the environment that runs the tests.
    """
    folder = tmp_path_factory.mktemp("editable")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    install = [*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run(install, env=_plain(), check=True, capture_output=True, text=True)
    return python


def _plain() -> dict[str, str]:
    """The environment without paths to the working copy."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}


@pytest.mark.slow
def test_strict_types_from_an_editable_install(editable: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")  # of the dev extra, not of test
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(snippets) >= 2
    for index, snippet in enumerate(snippets):
        (tmp_path / f"readme{index}.py").write_text(snippet, encoding="utf-8")
    (tmp_path / "typed.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(editable)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), *sorted(tmp_path.glob("*.py"))],
        cwd=tmp_path,
        env=_plain(),
        check=False,
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    wrong = [line for line in errors if line.startswith("wrong.py:")]
    assert errors == wrong, done.stdout + done.stderr
    refused = {int(line.split(":")[1]) for line in wrong}
    calls = [n for n, line in enumerate(WRONG.splitlines(), 1) if line.startswith("partitioner.")]
    assert refused == set(calls), done.stdout


@pytest.mark.slow
def test_an_editable_install_finds_the_package_alone(editable: Path, tmp_path: Path) -> None:
    code = (
        "import importlib.util as u, partitioner.cost_model;"
        "print([n for n in ('ir', 'cost_model', 'backends', 'tests') if u.find_spec(n)])"
    )
    done = subprocess.run(
        [editable, "-c", code],
        cwd=tmp_path,
        env=_plain(),
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"

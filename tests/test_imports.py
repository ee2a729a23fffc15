"""Imports of each entry point: help loads nothing heavy, and a rank no solver."""

import subprocess
import sys
from pathlib import Path

import onnx
import pytest

import partitioner
from partitioner import examples

HEAVY = (
    "torch",
    "matplotlib",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "pulp",
    "highspy",
    "scipy",
    "numpy",
    "networkx",
)


def loaded(code: str) -> set[str]:
    """Names of all modules after the code has run in a fresh process."""
    tail = "\nimport sys\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code + tail], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["--devices", "0"]], ids=" ".join
)
def test_help_and_usage_errors_load_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
from partitioner.cli.main import main
try:
    main({arguments!r})
except SystemExit:
    pass
"""
    assert not loaded(code) & {*HEAVY}


def test_a_missing_model_is_found_out_before_anything_heavy_is_loaded() -> None:
    names = loaded("from partitioner.cli.main import main\nassert main(['none.onnx']) == 1")
    assert not names & {*HEAVY}


def test_pipeline_schedules_load_nothing_heavy() -> None:
    names = loaded("""
from partitioner.cli.main import main
assert main(["schedule", "1f1b", "--stages", "2", "--micro-batches", "2"]) == 0
""")
    assert not names & {*HEAVY}


def test_planning_an_onnx_model_loads_no_pytorch(tmp_path: Path) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), tmp_path / "m.onnx")
    options = ["--cluster", "2xideal", "-q", "-o", str(tmp_path / "m.partition")]
    names = loaded(f"""
from partitioner.cli.main import main
assert main({[str(tmp_path / "m.onnx"), *options]!r}) == 0
""")
    assert (tmp_path / "m.partition" / "rank1.onnx").exists()
    assert not names & {"torch", "numba", "scipy", "matplotlib"}


def test_a_plan_without_constant_nodes_or_rank_files_loads_no_onnx_runtime(tmp_path: Path) -> None:
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), tmp_path / "m.onnx")
    options = ["--cluster", "4xh100", "--plan-only", "-o", str(tmp_path / "m.partition")]
    names = loaded(f"""
from partitioner.cli.main import main
assert main({[str(tmp_path / "m.onnx"), *options]!r}) == 0
assert main({["show", str(tmp_path / "m.partition")]!r}) == 0
""")
    assert not names & {"torch", "numba", "onnxruntime"}


@pytest.mark.slow
def test_a_rank_loads_no_solver_and_no_front_end(tmp_path: Path) -> None:
    model = examples.build("mlp", layers=2, hidden=8, batch=4)
    result = partitioner.compile(model, devices=1, time_limit_s=5)
    folder = result.save(tmp_path / "one")
    code = f"""
import pathlib
import numpy as np
import partitioner.backends.onnx.rank
import partitioner.backends.worker
from partitioner.backends.onnx.running.simulator import run_lockstep
run_lockstep(pathlib.Path({str(folder)!r}), {{"x": np.ones((4, 8), np.float32)}})
"""
    names = loaded(code)
    assert "partitioner.backends.onnx.running.executor" in names
    forbidden = ("partitioner.solver", "partitioner.frontends", "partitioner.cost_model")
    assert not [name for name in names if name.startswith(forbidden)]
    assert not names & {"pulp", "highspy", "onnx_ir", "onnxscript"}


def test_communication_loads_pytorch_and_nothing_to_plan_with() -> None:
    names = loaded("import partitioner.functional, partitioner; partitioner.Chain")
    forbidden = ("partitioner.solver", "partitioner.frontends", "partitioner.cost_model")
    assert "torch" in names
    assert not [name for name in names if name.startswith(forbidden)]
    assert not names & {"matplotlib", "onnx", "onnx_ir", "onnxruntime", "pulp", "highspy", "scipy"}

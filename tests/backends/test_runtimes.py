"""Runtimes that are missing or were not tried: a note where they work, else one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch

import partitioner
from helpers.drawn import drawn_plans
from partitioner.backends.runtimes import TRIED, UntriedError, naming_runtimes, untried
from partitioner.cli.main import main
from partitioner.ir.errors import OptionError

LINE = (
    r"PyTorch 2\.99\.1\+cu140 was not tried, only 2\.13 and 2\.14 were: its private interfaces may "
    r"differ; pip install 'torch>=2\.13,<2\.15' takes a tried one"
)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")


def test_the_installed_release_was_tried() -> None:
    assert untried() == ""


@pytest.mark.parametrize("release", TRIED)
def test_a_tried_release_with_any_ending(
    release: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", f"{release[0]}.{release[1]}.7+cpu")
    assert untried() == ""


@pytest.mark.parametrize("version", ["2.12.1", "2.15.0a0+git123", "3.13.0", "12.14"])
def test_another_release_says_what_was_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert untried().startswith(f"PyTorch {version} was not tried, only 2.13 and 2.14 were: ")


@pytest.mark.usefixtures("unknown")
def test_a_plan_has_a_note() -> None:
    program = partitioner.compile(torch.nn.Linear(4, 4), torch.randn(2, 4), devices=2)
    (note,) = (one for one in program.summary["notes"] if "was not tried" in one)
    assert re.fullmatch(LINE, note)
    assert program.verify()


@pytest.mark.usefixtures("unknown")
def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise AttributeError("module 'torch._C'\nhas no attribute '_gone'")

    monkeypatch.setattr("partitioner.api.compiler.open_with", missing)
    line = LINE + r" \(AttributeError: module 'torch\._C' has no attribute '_gone'\)"
    with pytest.raises(UntriedError, match=f"^{line}$"):
        partitioner.compile(torch.nn.Linear(4, 4), torch.randn(2, 4), devices=2)
    target = str(tmp_path / "m.partition")
    assert main(["helpers.factories:build", "--devices", "2", "-q", "-o", target]) == 1
    assert re.fullmatch(f"partition: {line}\n", capsys.readouterr().err)


@pytest.mark.usefixtures("unknown")
def test_errors_of_users_are_left_alone() -> None:
    with pytest.raises(OptionError, match=r"^size$"), naming_runtimes():
        raise OptionError("size")
    with pytest.raises(KeyError, match="foreseen"), naming_runtimes(KeyError):
        raise KeyError("foreseen")


def test_errors_under_a_tried_release_are_left_alone() -> None:
    with pytest.raises(AttributeError, match=r"^ours$"), naming_runtimes():
        raise AttributeError("ours")


def without(package: str, commands: Sequence[str], folder: Path) -> list[tuple[int, str]]:
    """Run commands in one process in which a package is not installed; exit codes and stderr."""
    script = (
        "import contextlib, io, json, sys\n"
        f"sys.modules[{package!r}] = None\n"
        "from partitioner.cli.main import main\n"
        "found = []\n"
        "for line in sys.argv[1:]:\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err, \\\n"
        "            contextlib.redirect_stdout(io.StringIO()):\n"
        "        code = main(line.split())\n"
        "    found.append((code, err.getvalue()))\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *commands],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return [(code, err) for code, err in json.loads(done.stdout)]


@pytest.fixture
def mlp(tmp_path: Path) -> Path:
    onnx.save(drawn_plans.mlp(), tmp_path / "m.onnx")
    return tmp_path


def test_onnx_models_are_planned_and_proven_without_pytorch(mlp: Path) -> None:
    fine = (
        "m.onnx --devices 2 -q",
        "show m.partition",
        "explain m.partition",
        "verify m.partition --symbolic",
        "sweep m.onnx --devices 1,2 -q",
        "m.onnx --cluster 2xlocal -q --force",
    )
    assert without("torch", fine, mlp) == [(0, "")] * len(fine)


def test_what_needs_pytorch_says_so(mlp: Path) -> None:
    line = (
        "partition: PyTorch is not installed, and its modules, and ranks that send each other "
        "tensors, need it: `pip install 'torch>=2.13,<2.15'`\n"
    )
    (planned, *refused) = without(
        "torch",
        (
            "m.onnx --devices 2 -q",
            "verify m.partition",
            "run m.partition",
            "profile m.onnx --devices 1 -q",
            "helpers.factories:build --devices 2 -q",
        ),
        mlp,
    )
    assert planned == (0, "")
    assert refused == [(1, line)] * 4


def test_what_needs_onnx_runtime_says_so(mlp: Path) -> None:
    """A PyTorch module is planned and verified without it."""
    (refused, *fine) = without(
        "onnxruntime",
        (
            "m.onnx --devices 2 -q",
            "helpers.factories:build --devices 2 -q -o b.partition",
            "verify b.partition --module helpers.factories:build",
        ),
        mlp,
    )
    line = (
        "partition: ONNX Runtime is not installed, and ONNX models are read and run by it: `pip "
        "install onnxruntime`, or `pip install onnxruntime-gpu` for GPUs of NVIDIA (never both)\n"
    )
    assert refused == (1, line)
    assert fine == [(0, "")] * 2

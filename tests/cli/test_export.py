"""`partition join` and `partition export`: what they write, and their one-line errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import partitioner
from helpers.pages.command_line import one_line
from helpers.problems.torch_tables import printed, torch_runtime
from partitioner import examples
from partitioner.cli.main import main
from partitioner.ir.pipeline.text import from_csv

MLP = ["mlp.onnx", "--devices", "2", "-q"]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with plans of whole operators, of cut ones and of stages in micro-batches."""
    folder = tmp_path_factory.mktemp("plans")
    onnx.save(examples.build("mlp", hidden=64), folder / "mlp.onnx")
    model = [str(folder / "mlp.onnx"), *MLP[1:], "-o"]
    whole = [*model, str(folder / "whole"), "--strategy", "inter", "--memory", "50KiB"]
    assert main(whole) == 0
    assert main([*model, str(folder / "cut"), "--strategy", "intra", "--cluster", "2xideal"]) == 0
    pipeline = ["--strategy", "inter", "--micro-batches", "2", "--memory", "50KiB"]
    assert main([*model, str(folder / "pipeline"), *pipeline]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(plans, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def names(folder: str = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def test_a_model_is_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["join", "whole"]) == 0
    said = one_line(capsys.readouterr().out)
    assert said == (
        "7 nodes of 2 ranks are in whole.joined.onnx, with its weights in whole.joined.weights\n"
    )
    nodes = onnx.load("mlp.onnx").graph.node
    assert {node.name for node in onnx.load("whole.joined.onnx").graph.node} == {
        node.name for node in nodes
    }
    assert main(["join", "cut", "-o", "one.onnx"]) == 0
    assert len(onnx.load("one.onnx").graph.node) > len(nodes)


@pytest.mark.parametrize("folder", [".", "../whole.partition", "inside/.."])
def test_a_joined_model_lies_beside_the_folder(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path.cwd()
    Path("whole").rename("whole.partition")
    monkeypatch.chdir("whole.partition")
    Path("inside").mkdir()
    assert main(["join", folder]) == 0
    assert {"whole.joined.onnx", "whole.joined.weights"} <= {*names(str(root))}


def test_parts_are_written_and_joined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "whole", "--to", "parts"]) == 0
    assert capsys.readouterr().out == "written to whole.parts\n"
    for part in ("rank0", "rank1"):
        assert {f"{part}.onnx", f"{part}.weights"} <= {*names("whole.parts")}
    assert main(["join", "whole", "--parts", "whole.parts", "-o", "a.onnx"]) == 0
    assert main(["join", "whole", "-o", "b.onnx"]) == 0
    a, b = (
        Path(name).read_bytes().replace(b"a.weights", b"b.weights") for name in ("a.onnx", "b.onnx")
    )
    assert a == b


def test_a_repository_is_written() -> None:
    assert main(["export", "whole", "--to", "triton", "-o", "models"]) == 0
    assert names("models") == ["ensemble", "rank0_phase0", "rank1_phase1"]


def test_pytorch_reads_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"training": True, "parallel": "pp", "micro_batches": 4}
    plan = partitioner.compile(Loss(), (torch.randn(8, 32),), 2, **options)
    plan.save("training", plan_only=True)
    assert main(["export", "training", "--to", "schedule"]) == 0
    assert capsys.readouterr().out == (
        "written to training.csv, with a row for each of\nlane 0: devices 0\nlane 1: devices 1\n"
    )
    text = Path("training.csv").read_text()
    runtime = torch_runtime(from_csv(text).lane_of, 4)
    runtime._load_csv("training.csv")
    assert printed([*runtime.pipeline_order.values()]) == text


@pytest.mark.parametrize(
    ("argv", "code", "why"),
    [
        (["join", "nowhere"], 1, "nowhere is not a folder that `partition MODEL` wrote"),
        (["join", "whole", "-o", "mlp.onnx"], 1, "it is the model itself; name another file"),
        (["join", "whole", "-o", "one.txt"], 2, "'one.txt' does not end in .onnx"),
        (["join", "whole", "-o", "no/one.onnx"], 1, "there is no folder no"),
        (["join", "whole", "--parts", "whole"], 1, "so it is a rank file"),
        (["join", "whole", "--parts", "nowhere"], 1, "nowhere/rank0.onnx: No such file"),
        (["join", "pipeline"], 2, "its plan runs in 2 micro-batches, and its rank files compute"),
        (["export", "whole"], 2, "Missing option '--to'"),
        (["export", "whole", "--to", "other"], 2, "'other' is not one of 'parts', 'triton'"),
        (["export", "whole", "--to", "parts", "-o", "cut"], 2, "cut is there already"),
        (["export", "whole", "--to", "parts", "-o", "no/x"], 1, "there is no folder no"),
        (["export", "cut", "--to", "triton"], 2, "the plan cuts operators: "),
        (["export", "pipeline", "--to", "triton"], 2, "its plan runs in 2 micro-batches"),
        (["export", "pipeline", "--to", "schedule"], 2, "its plan does not train, and PyTorch"),
        (["export", "whole", "--to", "schedule"], 2, "its plan runs in no micro-batches"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    argv: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names()
    assert main(argv) == code
    assert why in one_line(capsys.readouterr().err)
    assert names() == before


def test_files_of_an_edited_plan_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("whole/plan.json").read_text()
    Path("whole/plan.json").write_text(text.replace('"2xh100"', '"other"'))
    assert main(["join", "whole"]) == 1
    assert "is not of its plan.json, which was edited" in one_line(capsys.readouterr().err)


def test_modules_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    request = Path("whole/request.json")
    request.write_text(
        '{"version": 1, "kind": "module", "file": "", "factory": "", "graph_digest": "", '
        '"call": "", "optimizer": "", "training": false}'
    )
    assert main(["join", "whole"]) == 2
    assert capsys.readouterr().err == (
        "partition: join is of ONNX models, and whole is of a PyTorch module\n"
    )
    assert main(["export", "whole", "--to", "triton"]) == 2
    assert "--to triton is of ONNX models" in one_line(capsys.readouterr().err)

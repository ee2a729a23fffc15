"""The command line on PyTorch modules: exported programs and factories."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import partitioner
from helpers import factories
from helpers.pages.command_line import one_line
from helpers.processes.torch_jobs import free_port, rank_environment
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cli.main import main
from partitioner.ir.errors import OptionError, PartitionerError

QUIET = ["--cluster", "2xideal", "-q"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.pt2 and its partition, and t.partition of a factory for training."""
    folder = tmp_path_factory.mktemp("cli")
    module, example = factories.build()
    torch.export.save(torch.export.export(module, example, strict=False), folder / "m.pt2")
    target = str(folder / "m.partition")
    assert main([str(folder / "m.pt2"), *QUIET, "-o", target]) == 0
    target = str(folder / "t.partition")
    options = ["--training", "--optimizer", "momentum", "-o", target]
    assert main(["helpers.factories:build_training", *QUIET, *options]) == 0
    return folder


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.mark.slow
def test_an_exported_program_is_verified_from_its_files(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (here / "m.partition/rank1.pt2").is_file()
    assert main(["verify", "m.partition", "--seed", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("equal: 2 ranks against the whole module, seed 3\n")
    assert "output['logits']" in out


def test_a_factory_for_training(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = json.loads((here / "t.partition/request.json").read_text())
    assert (request["factory"], request["optimizer"]) == (
        "helpers.factories:build_training",
        "momentum",
    )
    named = ["--module", "helpers.factories:build_training"]
    assert main(["verify", "t.partition", *named]) == 0
    assert "grad:table.weight: " in capsys.readouterr().out
    assert main(["run", "t.partition", "--requests", "2", *named]) == 0
    assert "measured on this machine: 2 steps in " in capsys.readouterr().out


@pytest.mark.usefixtures("here")
@pytest.mark.slow
def test_steps_in_stages_run_and_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ["--parallel", "pp", "--schedule", "1f1b", "--micro-batches", "2", "--devices", "2"]
    source = ["helpers.factories:build_training", "--training", *stages, "-o", "s.partition", "-q"]
    assert main(source) == 0
    capsys.readouterr()
    written = tmp_path / "out.npz"
    run = ["run", "s.partition", "--requests", "2", "--profile", "--steps", "1"]
    run += ["--module", "helpers.factories:build_training"]
    assert main([*run, "--outputs", str(written)]) == 0
    out = capsys.readouterr().out
    assert "measured on this machine: 2 steps in " in out
    assert "written to s.partition/measured.json and report.html" in out
    with np.load(written) as outputs:
        assert all(np.isfinite(outputs[name]).all() for name in outputs.files)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_processes_run_an_exported_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module itself is not asked for: the folder lies elsewhere than beside it."""
    module, (ids,) = factories.build()
    np.savez(tmp_path / "in.npz", ids=ids.numpy())
    written = tmp_path / "out.npz"
    moved = str(tmp_path / "p")
    shutil.copytree("m.partition", moved)
    fed = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(written), "--requests", "2"]
    assert main(["run", moved, *fed]) == 0
    assert "measured on this machine: 2 requests in " in capsys.readouterr().out
    with np.load(written) as outputs:
        (logits,) = (outputs[name] for name in outputs.files)
    whole = module(ids)["logits"].detach().numpy()
    np.testing.assert_allclose(logits, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("here")
def test_commands_that_look_at_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, dot, timeline = (str(tmp_path / name) for name in ("p.html", "g.dot", "t.json"))
    for command, said in (
        (["show", "m.partition"], "/up/addmm (aten::addmm)"),
        (["explain", "t.partition"], " a step\n"),
        (["explain", "t.partition"], " optimizer's state"),
        (["report", "m.partition", "-o", page], "written to"),
        (["diff", "m.partition", "m.partition"], ""),
        (["draw", "m.partition", "--dot", dot, "--timeline", timeline], ""),
    ):
        assert main(command) == 0, command
        assert said in capsys.readouterr().out
    assert "addmm" in Path(page).read_text()
    assert Path(dot).read_text().startswith("digraph")
    assert json.loads(Path(timeline).read_text())
    assert main(["draw", "m.partition", "--annotate", str(tmp_path / "a.onnx")]) == 1
    message = "partition: --annotate writes an ONNX model, and the plan is of a module\n"
    assert one_line(capsys.readouterr().err) == message


@pytest.mark.usefixtures("here")
def test_the_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "p")
    assert main(["helpers.factories:build", *QUIET, "--plan-only", "--json", "-o", target]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["directory"] == target
    assert facts["devices_used"] == 2
    assert not (tmp_path / "p/rank0.pt2").exists()
    assert main(["verify", target]) == 1
    assert "holds a plan only" in one_line(capsys.readouterr().err)


def test_names_and_folders_by_default(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current folder is searched first, as by `python -m`; a saved plan imports nothing."""
    text = Path(factories.__file__).read_text()
    (tmp_path / "own_models.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["own_models:build", *QUIET, "--plan-only"]) == 0
    assert (tmp_path / "build.partition/plan.json").is_file()
    sys.modules.pop("own_models")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    with pytest.raises(PartitionerError, match=r"its module came from own_models:build, which is"):
        partitioner.load(tmp_path / "build.partition")
    assert "own_models" not in sys.modules
    monkeypatch.chdir(tmp_path)
    again = partitioner.load(tmp_path / "build.partition", "own_models:build")
    assert isinstance(again, ModuleProgram)
    assert again.name == "build"
    assert again.verify()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m.pt2", "--dim", "n=3"], "--dim is for ONNX models"),
        (["m.pt2", "--shape", "ids=3"], "--shape is for ONNX models"),
        (["m.pt2", "--annotate", "a.onnx"], "--annotate is for ONNX models"),
        (["m.onnx", "--training"], "--training is for PyTorch modules (.pt2, config.json, "),
        (["m.onnx", "--optimizer", "sgd"], "--optimizer is for PyTorch modules"),
        (["m.pt2", "--optimizer", "sgd"], "--optimizer is of --training"),
        (["m.pt2", "--recompute", "yes"], "--recompute is of --training"),
        (["sweep", "m.pt2", "--devices", "2", "--dim", "n=3"], "--dim is for ONNX models"),
        (["sweep", "m.onnx", "--devices", "2", "--training"], "--training is for PyTorch modules"),
    ],
)
def test_options_of_the_other_kind_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.pt2"], "none.pt2: no such file"),
        (["junk.pt2"], "junk.pt2: not an archive of torch.export.save"),
        (["bare.pt2"], "bare.pt2: it holds no example inputs"),
        (["nothing.at_all:make"], "nothing.at_all:make: there is no module 'nothing'"),
        (["helpers.deep:make"], "helpers.deep:make: there is no module 'helpers.deep'"),
        (
            ["helpers.factories:make"],
            "helpers.factories:make: helpers.factories has no function 'make'",
        ),
        (["helpers.factories:torch"], "helpers.factories:torch is a module, not a function"),
        (
            ["helpers.factories:three"],
            "helpers.factories:three returned int; it must return (module, example_inputs)",
        ),
        (["helpers.factories:batch"], "helpers.factories:batch returned (Tensor); it must return"),
        (["helpers.factories:broken"], "helpers.factories:broken: ValueError: no weights"),
        (["m.pt2", "--training"], "training needs a module that returns its loss first"),
        (
            ["helpers.factories:build_training", "--training", "--optimizer", "lion"],
            "optimizer 'lion' is not one of adamw, ",
        ),
        (["m.pt2", "-o", "m.partition"], "m.partition is there already; pass --force"),
    ],
)
def test_a_module_that_cannot_be_had(
    here: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (here / "junk.pt2").write_bytes(b"junk")
    if arguments[0] == "bare.pt2":
        program = torch.export.export(*factories.build(), strict=False)
        program.example_inputs = None
        torch.export.save(program, here / "bare.pt2")
    code = main([*QUIET, "-o", str(tmp_path / "x"), *arguments])
    assert code in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert message in one_line(err)
    assert not (tmp_path / "x").exists()


def test_a_model_that_is_gone_or_has_changed(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = str(tmp_path / "p")
    shutil.copytree(here / "m.partition", moved)
    for command in ("show", "explain", "report"):
        assert main([command, moved]) == 0, command
    capsys.readouterr()
    assert main(["verify", moved]) == 1
    assert "m.pt2; put it there, name it" in one_line(capsys.readouterr().err)
    assert main(["verify", moved, "--model", "other.pt2"]) == 1
    assert one_line(capsys.readouterr().err) == "partition: other.pt2: no such file\n"
    assert main(["verify", moved, "--model", str(here / "m.pt2")]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 ranks against the whole module")
    other = torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),), strict=False)
    torch.export.save(other, tmp_path / "m.pt2")
    assert main(["verify", moved]) == 1
    assert "m.pt2 is traced to another graph than before" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "jax"}, "request.json has kind = 'jax'"),
        ({"training": 1}, "request.json has training = 1"),
        ({"file": "a\0b"}, "request.json names 'a\\x00b'"),
        ({"graph_digest": None}, "request.json has graph_digest = None"),
    ],
)
def test_a_request_that_was_spoilt(
    here: Path,
    tmp_path: Path,
    change: dict[str, object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(here / "m.partition", tmp_path / "p")
    path = tmp_path / "p/request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert main(["show", str(tmp_path / "p")]) == 1
    assert message in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("here")
def test_the_problem_of_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cost is at most that of the plan of `partition`; `solve` and `evaluate` agree on it.

    A plan's buckets have their own price; the problem has the least that a full one costs.
    """
    problem, solution = str(tmp_path / "p.json"), str(tmp_path / "s.json")
    arguments = [
        "helpers.factories:build_training",
        "--training",
        "--parallel",
        "zero3",
        "--devices",
        "2",
        "-q",
    ]
    target = ["--strategy", "intra", "--dump-problem", problem]
    assert main([*arguments, *target]) == 0
    assert main(["solve", problem, "-o", solution, "--json"]) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert main(["evaluate", problem, solution]) == 0
    assert re.search(rf"cost +{cost}\n(.*\n)*feasible", capsys.readouterr().out)
    planned = ["--gap", "0", "--plan-only", "--json", "-o", str(tmp_path / "x")]
    assert main([*arguments, *planned]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["bound"] * 1e12 == pytest.approx(cost, rel=1e-6)
    assert cost < plan["cost"] * 1e12 < 1.05 * cost


@pytest.mark.usefixtures("here")
def test_a_sweep_of_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kind of parallelism that a number of devices cannot have is a point without a plan."""
    arguments = [
        "helpers.factories:build_training",
        "--training",
        "--parallel",
        "dp",
        "--memory",
        "1GB",
    ]
    page = str(tmp_path / "p.html")
    assert main(["sweep", *arguments, "--devices", "1,2,9", "-q", "--json", "-o", page]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["title"] == "build_training"
    assert [point["strategy"] for point in data["points"]] == ["single", "intra", ""]
    assert "parallel dp: the batch (dim 0 of 'ids'" in data["points"][2]["why"]
    assert "build_training" in Path(page).read_text()


@pytest.mark.parametrize(("kind", "at_rest"), [("dp", ""), ("zero3", "zero3")])
def test_kinds_of_parallelism_in_inference(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, at_rest: str
) -> None:
    folder = str(tmp_path / "p")
    arguments = [str(here / "m.pt2"), "--devices", "2", "--parallel", kind, "-q", "-o", folder]
    assert main(arguments) == 0
    assert main(["verify", folder]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 ranks against the whole module")
    assert json.loads((tmp_path / "p/request.json").read_text())["at_rest"] == at_rest
    assert main([*arguments[:3], "--parallel", "zero2", "-q", "-o", f"{folder}2"]) == 2
    assert "parallel 'zero2' in inference: it cuts" in one_line(capsys.readouterr().err)


@pytest.mark.usefixtures("here")
def test_meshes_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sweep",
        "helpers.factories:build_training",
        "--training",
        "--parallel",
        "dp+tp",
        "-q",
        "--json",
    ]
    assert main([*arguments, "--devices", "1,4", "--mesh", "dp=2,tp=2"]) == 0
    one, four = json.loads(capsys.readouterr().out)["points"]
    assert (one["strategy"], four["strategy"], four["devices_used"]) == ("single", "intra", 4)
    for meshes, message in (
        (["--mesh", "dp=2,tp=1"], "mesh dp=2,tp=1 has 2 devices; the points have 1, 4"),
        (["--mesh", "dp=4", "--mesh", "tp=4"], "meshes dp=4 and tp=4 both have 4 devices"),
        (["--mesh", "dp=4"], "parallel 'dp+tp' wants a mesh of axes dp and tp"),
    ):
        assert main([*arguments, "--devices", "1,4", *meshes]) == 2
        assert message in capsys.readouterr().err
    assert main([*arguments, "--devices", "3"]) == 2
    assert "of at least two devices each: 3 devices have none" in capsys.readouterr().err


def test_a_sweep_from_python() -> None:
    swept = partitioner.sweep(*factories.build(), [1], clusters=["cpu"], memory=["1kB", None])
    short, planned = swept.data["points"]
    assert "bytes are short on device 0" in short["why"]
    assert planned["strategy"] == "single"
    assert str(swept).startswith("devices")
    with pytest.raises(OptionError, match="give devices, or clusters with counts"):
        partitioner.sweep(*factories.build())


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_torchrun_says_what_to_use_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "partitioner.run", "m.partition"],
        env=rank_environment(0, 1, free_port()),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert re.search(r"m.partition is of a PyTorch module: use `partition run`", done.stderr)

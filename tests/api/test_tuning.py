"""`tune`: the best plans of a search are run on this machine, and the measured best is kept."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch

import partitioner
from helpers.modules.small_gpt import small_gpt
from helpers.modules.staged_models import Plain, seeded
from partitioner import examples
from partitioner.api import tuning
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.folder import load_summary
from partitioner.api.compiled.module import ModuleProgram
from partitioner.api.compiled.module_ranks import ModuleRanks
from partitioner.api.compiled.onnx_model import OnnxRanks
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.backends.torch.measuring import timing
from partitioner.cli.main import main
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.errors import CostError
from partitioner.foundations.files import ResultError
from partitioner.frontends.torch.options import OPTIMIZERS
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import Certificate, Plan, PlanError
from partitioner.report.text.explain import explain
from partitioner.report.text.show import show

CHOSEN = "chosen by measurement on this machine (cost, bound and gap are the cost model's):"


@pytest.fixture(scope="module")
def mlp() -> onnx.ModelProto:
    return examples.build("mlp", layers=2, hidden=16, batch=8)


@pytest.fixture
def local(tmp_path: Path) -> Mapping[str, Any]:
    """Options of two processes of this machine, of which nothing is measured."""
    file = tmp_path / "profile.sqlite"
    try:
        resolve_cluster("2xlocal", profile=file)
    except CostError as error:
        pytest.skip(str(error))
    return {"devices": 2, "cluster": "local", "profile": file}


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    monkeypatch.setattr(tuning, "_ENOUGH_S", 0.0)


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Plan], float]], None]:
    """Replaces the runs of plans: gives the seconds of a request or step by the plan."""

    def replace(seconds: Callable[[Plan], float]) -> None:
        def run_written(ranks: Any, folder: Path, job: LocalJob) -> LocalRun:
            assert job.inputs is None
            assert any(folder.iterdir()), "the ranks are written before they run"
            return LocalRun({}, seconds(ranks.plan) * job.requests)

        for kind in (OnnxRanks, ModuleRanks):
            monkeypatch.setattr(kind, "run_written", run_written)

    return replace


def certificate_of(program: Compiled | ModuleProgram) -> Certificate:
    certificate = program.plan.certificate
    assert certificate is not None
    return certificate


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.slow
def test_the_measured_best_is_kept(
    mlp: onnx.ModelProto, local: Mapping[str, Any], tmp_path: Path
) -> None:
    program = partitioner.compile(mlp, tune=2, **local)
    certificate = certificate_of(program)
    first, second = certificate.trials
    assert first.plan != second.plan
    assert [trial.kept for trial in (first, second)].count(True) == 1
    (best,) = (trial for trial in (first, second) if trial.kept)
    assert best.measured_s == min(first.measured_s, second.measured_s) > 0
    assert best.predicted_s == certificate.cost == program.cost
    assert program.verify()
    assert program.summary["trials"] == [vars(first), vars(second)]
    folder = program.save(tmp_path / "saved")
    loaded = partitioner.load(folder)
    assert loaded.plan == program.plan
    for text in (str(program), show(loaded), explain(loaded)):
        assert CHOSEN in text
        assert f"{best.plan}: measured" in text
    assert "chosen by measurement" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.slow
def test_steps_of_training_are_run(local: Mapping[str, Any]) -> None:
    model, batch = small_gpt()
    program = partitioner.compile(model, batch, training=True, tune=2, **local)
    trials = certificate_of(program).trials
    assert len(trials) == 2
    assert all(trial.measured_s > 0 for trial in trials)
    assert program.verify()


def test_every_optimizer_is_run_without_changing_the_weights() -> None:
    assert timing.OPTIMIZERS.keys() == OPTIMIZERS.keys()
    for make in timing.OPTIMIZERS.values():
        weight = torch.ones(3, 2)
        optimizer = make([weight])
        for _ in range(2):
            weight.grad = torch.ones(3, 2)
            optimizer.step()
        assert torch.equal(weight, torch.ones(3, 2))


def test_the_certificate_proves_no_more_of_a_plan_that_was_kept(
    mlp: onnx.ModelProto,
    local: Mapping[str, Any],
    takes: Callable[[Callable[[Plan], float]], None],
) -> None:
    untuned = certificate_of(partitioner.compile(mlp, **local))
    assert untuned.status == "optimal"
    takes(lambda plan: 1.0 if plan.kind == "inter" else 2.0)
    program = partitioner.compile(mlp, tune=8, **local)
    certificate = certificate_of(program)
    assert program.plan.kind == certificate.strategy == "inter"
    assert certificate.cost == program.evaluation.cost("throughput") > untuned.cost
    assert certificate.bound <= untuned.cost
    assert certificate.gap > 0.01
    assert certificate.status == "feasible"
    assert [trial.measured_s for trial in certificate.trials if trial.kept] == [1.0]
    assert certificate.trials[0].predicted_s == untuned.cost, "the model's choice comes first"
    assert any("fewer than the 8 to run" in note for note in program.summary["notes"])
    assert program.verify()


def test_the_models_choice_keeps_its_certificate(
    mlp: onnx.ModelProto,
    local: Mapping[str, Any],
    takes: Callable[[Callable[[Plan], float]], None],
) -> None:
    untuned = partitioner.compile(mlp, **local)
    before = certificate_of(untuned)
    takes(lambda plan: 1.0 if plan.digest == untuned.plan.digest else 2.0)
    tuned = partitioner.compile(mlp, tune=3, **local)
    space = f"{before.space}, single (one device)"
    assert dataclasses.replace(certificate_of(tuned), trials=(), space=before.space) == before
    assert certificate_of(tuned).space == space
    assert tuned.plan.digest == untuned.plan.digest


@pytest.mark.slow
def test_kinds_of_parallelism_are_tried_in_training(
    local: Mapping[str, Any], takes: Callable[[Callable[[Plan], float]], None]
) -> None:
    model, batch = small_gpt()
    untuned = certificate_of(partitioner.compile(model, batch, training=True, **local))
    takes(lambda plan: 1.0 if any("dp" in dict(mesh.axes) for mesh in plan.groups) else 2.0)
    program = partitioner.compile(model, batch, training=True, tune=6, **local)
    certificate = certificate_of(program)
    plans = [trial.plan for trial in certificate.trials]
    assert len(set(plans)) == len(plans) >= 4
    assert {"intra plan of dp (dp=2)", "intra plan of zero3 (dp=2)"} <= set(plans)
    (kept,) = (trial for trial in certificate.trials if trial.kept)
    assert "dp=2" in kept.plan
    assert kept.predicted_s == certificate.cost >= untuned.cost
    assert certificate.bound <= untuned.cost
    assert certificate.space.startswith("intra (x=2), inter (2 x one device)")
    assert program.verify()


@pytest.mark.usefixtures("few_rounds")
@pytest.mark.slow
def test_plans_in_stages_are_run(local: Mapping[str, Any]) -> None:
    """Steps of the plans of the best schedules are run and one of them is kept."""
    options = {"parallel": "pp", "micro_batches": 2, "gap": 0.5}
    program = partitioner.compile(
        seeded(Plain), Plain.batch(0), training=True, tune=2, **options, **local
    )
    certificate = certificate_of(program)
    plans = [trial.plan for trial in certificate.trials]
    assert len(set(plans)) == 2
    assert all("of 2 micro-batches" in plan for plan in plans)
    (best,) = (trial for trial in certificate.trials if trial.kept)
    assert best.measured_s == min(trial.measured_s for trial in certificate.trials) > 0
    assert program.plan.pipeline is not None
    assert f"pipeline {program.plan.pipeline.schedule} of 2" in best.plan
    assert program.verify()


@pytest.mark.slow
def test_the_second_choice_in_stages_is_kept(
    local: Mapping[str, Any], takes: Callable[[Callable[[Plan], float]], None]
) -> None:
    options = {"parallel": "pp", "micro_batches": 2, "gap": 0.5, **local}
    untuned = partitioner.compile(seeded(Plain), Plain.batch(0), training=True, **options)
    takes(lambda plan: 2.0 if plan.digest == untuned.plan.digest else 1.0)
    program = partitioner.compile(seeded(Plain), Plain.batch(0), training=True, tune=3, **options)
    certificate = certificate_of(program)
    assert [trial.measured_s for trial in certificate.trials] == [2.0, 1.0, 1.0]
    assert program.plan.digest != untuned.plan.digest
    assert certificate.cost == program.evaluation.step_s >= untuned.evaluation.step_s
    assert certificate.bound <= certificate.cost


def test_onnx_micro_batches_are_run(
    local: Mapping[str, Any], takes: Callable[[Callable[[Plan], float]], None]
) -> None:
    model = examples.build("mlp", layers=2, hidden=16, batch=8)
    takes(lambda plan: 1.0 if plan.micro_batches == 4 else 2.0)
    program = partitioner.compile(model, tune=4, mesh={"pp": 2}, objective="latency", **local)
    assert len(certificate_of(program).trials) > 1
    assert program.plan.micro_batches == 4
    assert program.verify()


def test_rounds_end_once_one_plan_is_always_faster() -> None:
    said: list[str] = []
    runs = [lambda count: LocalRun({}, 1.0 * count), lambda count: LocalRun({}, 2.0 * count)]
    clear = tuning._rounds(runs, 4, said.append)
    assert [len(seconds) for seconds in clear] == [tuning.LEAST_ROUNDS] * 2
    ticks = iter(range(1, 1000))
    tick = lambda _: LocalRun({}, next(ticks) % 5 + 1.0)  # noqa: E731
    alternating = tuning._rounds([tick] * 2, 1, said.append)
    assert [len(seconds) for seconds in alternating] == [tuning.ROUNDS] * 2


def test_long_requests_are_run_less_often() -> None:
    counts: list[int] = []

    def run(count: int) -> LocalRun:
        counts.append(count)
        return LocalRun({}, 0.1 * count)

    tuning._rounds([run], 4, lambda _: None)
    assert counts == [4, *([10] * tuning.LEAST_ROUNDS)]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cluster": "4xh100"}, "cluster '4xh100' is not known to be it: give cluster local"),
        ({"cluster": "2xcpu"}, "cluster '2xcpu' is not known to be it: give cluster local"),
        ({"devices": 2}, "is not known to be it: give cluster local"),
        ({"cluster": "2xlocal", "objective": "memory"}, "tune measures seconds"),
        ({"cluster": "2xlocal", "tune": 0}, "tune is 0, not a number of plans of at least 1"),
        ({"cluster": "2xlocal", "plan_only": True}, "leave plan_only out"),
    ],
)
def test_what_cannot_be_run_here_is_refused(
    mlp: onnx.ModelProto, options: Mapping[str, Any], why: str
) -> None:
    with pytest.raises(OptionError, match=why):
        partitioner.compile(mlp, **{"tune": 2, **options})


def test_modules_are_not_run_on_gpus() -> None:
    cluster = dataclasses.replace(resolve_cluster("2xh100"), name="local")
    with pytest.raises(OptionError, match="tune runs PyTorch modules on processors only"):
        tuning.check_tunable(cluster, is_module=True)


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_onnx_models_are_run_on_gpus_that_its_runtime_runs_on(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    cluster = dataclasses.replace(resolve_cluster("2xh100"), name="local")
    built = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for providers in (built, built[1:]):
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda of=providers: of)
        if gpus == 2 and providers == built:
            tuning.check_tunable(cluster, is_module=False)
        else:
            with pytest.raises(OptionError, match="its ONNX Runtime does not run on GPUs"):
                tuning.check_tunable(cluster, is_module=False)


def test_one_of_several_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch, mlp: onnx.ModelProto, local: Mapping[str, Any]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="tune starts processes of its own"):
        partitioner.compile(mlp, tune=2, **local)


def test_the_command(
    mlp: onnx.ModelProto,
    local: Mapping[str, Any],
    takes: Callable[[Callable[[Plan], float]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    takes(lambda plan: 1.0 if plan.kind == "inter" else 2.0)
    model, folder = tmp_path / "mlp.onnx", tmp_path / "mlp.partition"
    onnx.save(mlp, model)
    target = ["--cluster", "2xlocal", "--profile", str(local["profile"])]
    assert main([str(model), *target, "--tune", "2", "-o", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert CHOSEN in out
    assert "running 2 plans, round 1 of" in err
    assert len(load_summary(folder)["trials"]) == 2
    assert main(["show", str(folder)]) == 0
    assert CHOSEN in capsys.readouterr().out
    elsewhere = ["--cluster", "2xh100", "--tune", "2", "--force", "-o", str(folder), "-q"]
    assert main([str(model), *elsewhere]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "give cluster local" in err


def test_trials_that_are_malformed_are_refused(
    mlp: onnx.ModelProto,
    local: Mapping[str, Any],
    takes: Callable[[Callable[[Plan], float]], None],
    tmp_path: Path,
) -> None:
    takes(lambda _: 1.0)
    folder = partitioner.compile(mlp, tune=2, **local).save(tmp_path / "saved")
    text = (folder / "plan.json").read_text()
    assert Plan.from_json(text).to_json() == text
    with pytest.raises(PlanError, match="measured_s"):
        Plan.from_json(text.replace('"measured_s": 1.0', '"measured_s": -1.0'))
    summary = json.loads((folder / "summary.json").read_text())
    for wrong in ({"plan": "intra"}, [{"plan": "intra"}]):
        (folder / "summary.json").write_text(json.dumps({**summary, "trials": wrong}))
        with pytest.raises(ResultError, match=r"summary\.json has trials"):
            load_summary(folder)
    del summary["trials"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "trials" not in load_summary(folder)

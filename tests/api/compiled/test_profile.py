"""Plans of two ranks run with a record, which stands beside the prediction and becomes entries."""

import json
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

import partitioner
from helpers import factories
from helpers.drawn import drawn_plans
from helpers.modules.small_gpt import small_gpt
from helpers.pages import schema_check
from helpers.plans.profiled import write_profile
from partitioner import examples
from partitioner.api.compiled import base, reload
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.folder import rank_files
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.observed import MeasuredRank, MeasuredTask
from partitioner.backends.torch import local as torch_local
from partitioner.backends.torch.local import StepFiles, StepRun
from partitioner.cli.main import main
from partitioner.cost_model.profiles.database import Profile
from partitioner.foundations import units
from partitioner.foundations.files import ResultError
from partitioner.report.measured import FILE, Measured
from partitioner.report.page.data import report_data
from partitioner.report.schema import Report
from partitioner.run import local


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved plan of two ranks with communications, and the record of a run."""
    folder = tmp_path_factory.mktemp("mlp")
    model = folder / "mlp.onnx"
    model.write_bytes(examples.build("mlp", layers=2).SerializeToString())
    saved = folder / "mlp.partition"
    partitioner.compile(model, cluster="2xideal", strategy="intra").save(saved)
    assert main(["run", str(saved), "--profile", "--steps", "3", "--requests", "2"]) == 0
    return saved


def test_every_node_and_communication_of_every_rank_is_recorded(mlp: Path) -> None:
    program = partitioner.load(mlp)
    comparison = program.comparison
    assert comparison is not None
    for rank, measured in enumerate(comparison.measured.ranks):
        tasks = [task for task in program.schedule.tasks if rank in task.devices]
        assert {task.name for task in tasks if task.placed is not None} == {
            name for task in measured.tasks for name in task.nodes
        }
        comms = {task.comm.seq for task in tasks if task.comm is not None}
        assert comms == {seq for task in measured.tasks for seq in task.comms}
        assert comms
        assert measured.peak_bytes is not None
        assert measured.peak_bytes > program.evaluation.exact_peak[rank].resident_bytes
    assert comparison.measured.steps == 3
    assert comparison.measured.stream_s is not None
    for totals in comparison.totals:
        assert totals["compute_s"] > 0
        assert totals["predicted_compute_s"] > 0
    errors_s = [abs(row.measured.seconds - row.predicted_s) for row in comparison.worst]
    assert len(errors_s) == len(comparison.rows)
    assert errors_s == sorted(errors_s, reverse=True)


def test_a_row_has_the_seconds_of_all_nodes_that_a_kernel_computes(mlp: Path) -> None:
    comparison = partitioner.load(mlp).comparison
    assert comparison is not None
    row = next(row for row in comparison.rows if len(row.nodes) > 1)
    seconds = {
        task.placed.node.name: task.devices.get(row.rank, 0.0)
        for task in comparison.result.run_schedule.tasks
        if task.placed is not None
    }
    assert row.predicted_s == pytest.approx(sum(seconds[name] for name in row.nodes))
    assert row.name == " + ".join(row.nodes)
    assert row.ratio == pytest.approx(row.measured.seconds / row.predicted_s)


def test_show_and_the_report_have_the_measured_run(
    mlp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(mlp)]) == 0
    shown = capsys.readouterr().out
    assert "measured by onnxruntime" in shown
    assert "worst errors" in shown
    program = partitioner.load(mlp)
    data = report_data(program, program.comparison)
    schema_check.check(data, Report)
    run = data["measured"]
    assert run is not None
    assert set(run["measured"]["rank"]) == {0, 1}
    assert all(ref is not None for ref in run["predicted"]["ref"])
    assert json.dumps(run, allow_nan=False) in json.dumps(data, allow_nan=False)
    assert '"measured":{"backend":"onnxruntime' in (mlp / "report.html").read_text()
    assert main(["explain", str(mlp)]) == 0
    assert data["head"]["verdict"] in capsys.readouterr().out


def test_a_record_is_read_as_it_was_written(mlp: Path) -> None:
    text = (mlp / FILE).read_text()
    assert Measured.from_json(text).to_json() == text
    assert max(map(len, text.splitlines())) < 300  # a task a line


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99, not 1"),
        ({"plan": "0" * 64}, "another plan"),
        ({"steps": -1}, "no record of a run"),
        ({"step_s": "soon"}, "no record of a run"),
        ({"ranks": [{"tasks": 3}]}, "no record of a run"),
    ],
)
def test_a_wrong_record_is_left_out_with_a_warning(
    mlp: Path, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    program = partitioner.load(mlp)
    folder = program.save(tmp_path / "mlp.partition", plan_only=True)
    record = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps(record | change))
    loaded = partitioner.load(folder)
    assert loaded.measured is None
    assert loaded.comparison is None
    assert reason in loaded.warnings[-1]
    with pytest.raises(ResultError, match="partition run DIR --profile"):
        partitioner.calibrate(folder)


def test_a_plan_that_is_searched_anew_has_no_record(mlp: Path, tmp_path: Path) -> None:
    program = partitioner.load(mlp)
    folder = program.save(tmp_path / "mlp.partition", plan_only=True)
    assert (folder / FILE).is_file()
    replace(program, measured=None).save(folder, force=True, plan_only=True)
    assert not (folder / FILE).exists()


def measured_alone(program: Compiled) -> Compiled:
    """The program with a record in which each node has a kernel of its own, of 1 ms."""
    names = [node.name for node in program.graph.nodes]
    tasks = [MeasuredTask((name,), (), "fake", 0.0, 1e-3, 0.0, 0.1) for name in names]
    fused = MeasuredTask((names[0], names[1]), (), "fake", 0.0, 1e-3)
    ranks = (MeasuredRank(1, tuple(tasks)), MeasuredRank(1, (fused, *tasks[2:])))
    assert program.measured is not None
    return replace(program, measured=replace(program.measured, ranks=ranks))


def test_calibrate_writes_kernels_of_single_nodes(mlp: Path, tmp_path: Path) -> None:
    program = measured_alone(partitioner.load(mlp))
    file = tmp_path / "profile.sqlite"
    calibrated = partitioner.calibrate(program, profile=file)
    assert (calibrated.fused, calibrated.short, calibrated.processes) == (1, 0, 2)
    assert f"calibrated {units.count(calibrated.entries, 'form')} of op" in str(calibrated)
    known = Profile.read(file, calibrated.device, calibrated.threads, processes=2)
    assert len(known.entries) == calibrated.entries > 0
    entry = next(iter(known.entries.values()))
    assert (entry.seconds, entry.spread, entry.processes) == (1e-3, 0.1, 2)
    assert entry.repeats >= 3
    assert entry.backend.startswith("onnxruntime")


def test_calibrate_knows_that_one_process_was_busy(mlp: Path, tmp_path: Path) -> None:
    program = drawn_plans.compiled(examples.build("mlp", layers=2), 2, _=0)
    assert program.evaluation.devices_used == 1
    (device,) = {device for one in program.placed for device in one.mesh.devices}
    alone = measured_alone(replace(program, measured=partitioner.load(mlp).measured))
    assert alone.measured is not None
    ranks = [MeasuredRank(1, ()), MeasuredRank(1, ())]
    ranks[device] = alone.measured.ranks[0]
    alone = replace(alone, measured=replace(alone.measured, ranks=tuple(ranks)))
    calibrated = partitioner.calibrate(alone, profile=tmp_path / "profile.sqlite")
    known = Profile.read(calibrated.file, calibrated.device, calibrated.threads)
    assert (calibrated.processes, set(known.known)) == (1, {1})
    families = {json.loads(form)[0]: one.op for form, one in known.entries.items()}
    assert families["Relu"] == "Relu behind Gemm"


def test_a_plan_whose_profile_changed_is_not_called_edited_alone(tmp_path: Path) -> None:
    file, model = tmp_path / "profile.sqlite", tmp_path / "mlp.onnx"
    model.write_bytes(examples.build("mlp", layers=2).SerializeToString())
    folder = tmp_path / "plan"
    result = partitioner.compile(model, cluster="local", devices=1, profile=file)
    result.save(folder, plan_only=True)
    assert not partitioner.load(folder).warnings
    known = result.cluster.devices[0].profile
    if known is None:
        pytest.skip("this machine has GPUs")
    where = {"device": known.device, "threads": known.threads, "processes": 1}
    write_profile(file, result.graph, 1.0, **where)  # type: ignore[arg-type]
    loaded = partitioner.load(folder)
    (warning,) = loaded.warnings
    assert "the certificate in plan.json is left out" in warning
    assert "proof" in result.summary
    assert "proof" not in loaded.summary
    assert warning.endswith(f"by another version, or {file} has other measurements now")


def test_calibrate_leaves_kernels_out_that_the_clock_cannot_tell(mlp: Path, tmp_path: Path) -> None:
    program = measured_alone(partitioner.load(mlp))
    assert program.measured is not None
    ranks = tuple(
        replace(rank, tasks=tuple(replace(task, seconds=2e-6) for task in rank.tasks))
        for rank in program.measured.ranks
    )
    short = replace(program, measured=replace(program.measured, ranks=ranks))
    calibrated = partitioner.calibrate(short, profile=tmp_path / "profile.sqlite")
    assert calibrated.entries == 0
    assert calibrated.short > 0


def test_the_command_calibrates_from_a_folder(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "profile.sqlite"
    assert main(["calibrate", str(mlp), "--profile", str(file), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (count,) = sqlite3.connect(file).execute("SELECT count(*) FROM entries").fetchone()
    assert data["entries"] == count


def test_a_file_that_takes_no_measurements_is_refused(
    mlp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but a longer text")
    for wrong, why in (
        (file, "is not a database"),
        (tmp_path / "missing" / "x.sqlite", "there is no folder"),
    ):
        assert main(["calibrate", str(mlp), "--profile", str(wrong)]) == 1
        assert why in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


def test_options_of_a_record_need_it(mlp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--steps", "3"], ["--calibrate"]):
        assert main(["run", str(mlp), *option]) == 2
        assert "is of --profile" in capsys.readouterr().err


@pytest.fixture(scope="module")
def gpt() -> ModuleProgram:
    model, batch = small_gpt()
    program = partitioner.compile(
        model, batch, cluster="2xideal", strategy="intra", mesh={"dp": 2}, training=True
    )
    assert isinstance(program, ModuleProgram)
    return program


@pytest.mark.slow
def test_a_training_step_is_recorded_with_its_optimizer(gpt: ModuleProgram, tmp_path: Path) -> None:
    _, batch = small_gpt()
    before = {name: value.clone() for name, value in gpt.whole.state_dict().items()}
    profiled = gpt.profile(*batch, steps=2)
    assert all((before[name] == value).all() for name, value in gpt.whole.state_dict().items())
    program, measured = profiled.result, profiled.measured
    for number, rank in enumerate(measured.ranks):
        comms = {comm.seq for comm in program.programs.ranks[number].comms}
        assert comms
        nodes = {name for task in rank.tasks for name in task.nodes}
        assert {node.name for node in gpt.graph.nodes if "mm" in node.op} <= nodes
        (update,) = [task for task in rank.tasks if task.label == "optimizer"]
        assert len(update.nodes) == len(gpt.traced.gradients)
        assert update.seconds > 0
        assert comms == {seq for task in rank.tasks for seq in task.comms}
        assert rank.peak_bytes is not None
    for totals, peak in zip(profiled.totals, program.evaluation.peak.values(), strict=True):
        assert totals["peak_bytes"] is not None
        assert totals["peak_bytes"] > peak.resident_bytes  # weights and the optimizer's state
    assert "measured by torch" in str(profiled)
    page = program.report(tmp_path / "gpt.html")
    assert '"measured":{"backend":"torch' in page.read_text()


@pytest.mark.slow
def test_a_module_for_inference_is_recorded(tmp_path: Path) -> None:
    model, batch = small_gpt()
    program = partitioner.compile(model.eval(), batch, cluster="2xideal", strategy="intra")
    assert isinstance(program, ModuleProgram)
    profiled = program.profile(steps=2)
    assert len(profiled.measured.ranks) == 2
    assert profiled.rows
    folder = program.save(tmp_path / "gpt.partition")
    names = [name for name in program.signature.inputs if name]
    inputs = {name: value.numpy() for name, value in zip(names, batch, strict=True)}
    run = rank_files(folder).run(inputs, requests=1, steps=2)
    compared = program.compared(run.logs)
    assert [row.name for row in compared.rows if row.rank == 0]
    assert {row.nodes for row in compared.rows} == {row.nodes for row in profiled.rows}


@pytest.mark.slow
def test_steps_are_at_least_one(gpt: ModuleProgram) -> None:
    _, batch = small_gpt()
    with pytest.raises(BackendError, match="steps is 0"):
        gpt.profile(*batch, steps=0)


@pytest.mark.parametrize("here", ["cuda", None])
def test_ranks_of_modules_are_recorded_on_the_devices_of_the_plan(
    in_training: tuple[ModuleProgram, Path], monkeypatch: pytest.MonkeyPatch, here: str | None
) -> None:
    """A record of processors would stand beside a prediction for GPUs."""
    program, folder = in_training
    asked: list[str] = []

    def run_steps(files: StepFiles, *_: object, **__: object) -> StepRun:
        asked.append(files.device)
        raise BackendError("not run")

    monkeypatch.setattr(base, "device_type", lambda _: here)
    monkeypatch.setattr(torch_local, "run_steps", run_steps)
    for loader in ("look", "load_named"):
        monkeypatch.setattr(reload, loader, lambda *_: program)
    for steps in (2, 0):
        with pytest.raises(BackendError, match="not run"):
            local.run_directory(folder, None, None, steps=steps)
    assert asked == [here or "cpu", "cpu"], "a run without a record is one of processors"
    with pytest.raises(BackendError, match="not run" if here is None else "one GPU each"):
        program.profile(steps=1)


@pytest.fixture(scope="module")
def in_training(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleProgram, Path]:
    """A small module in training, whose devices have a profile, and its folder."""
    folder = tmp_path_factory.mktemp("classifier")
    program = partitioner.compile(
        *(factories.classifier(training=True), factories.batch(labels=True)),
        cluster="2xideal",
        training=True,
    )
    profile = Profile(folder / "profile.sqlite", "core", 1, 2, {})
    devices = tuple(replace(one, profile=profile) for one in program.cluster.devices)
    program = replace(program, cluster=replace(program.cluster, devices=devices))
    assert isinstance(program, ModuleProgram)
    return program, program.save(folder / "classifier.partition")

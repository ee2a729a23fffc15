"""Compiled models: saved and loaded again; moved or changed models; failures leave nothing."""

import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import partitioner
from helpers.onnx_files.rank_files import save_edited
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.folder import is_written
from partitioner.backends.onnx.sessions.segments import open_session
from partitioner.cli.main import main
from partitioner.cost_model.errors import CostError
from partitioner.foundations import units
from partitioner.foundations.files import DirectoryError, ResultError, replace_directory
from partitioner.ir.plan import PlanError
from partitioner.report.text.show import show
from partitioner.run.local import run_directory


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return examples.build("mlp", layers=2, hidden=8, batch=4)


@pytest.fixture(scope="module")
def compiled(model: onnx.ModelProto) -> Compiled:
    return partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")


@pytest.fixture
def saved(compiled: Compiled, tmp_path: Path) -> Path:
    return compiled.save(tmp_path / "m.partition")


def feeds() -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(0).standard_normal((4, 8), np.float32)}


def test_load_gives_what_was_saved(compiled: Compiled, saved: Path) -> None:
    again = partitioner.load(saved)
    assert again.plan == compiled.plan
    assert again.cost == compiled.cost
    assert again.cluster == compiled.cluster
    assert again.evaluation == compiled.evaluation
    assert again.summary == {
        **{key: value for key, value in compiled.summary.items() if key != "proof"},
        "seconds": again.summary["seconds"],
    }  # files may have been edited since they were proven
    assert again.graph.digest == compiled.graph.digest
    np.testing.assert_array_equal(again.run(feeds())["y"], compiled.run(feeds())["y"])
    assert again.verify().equal


def test_the_files(saved: Path) -> None:
    names = {path.name for path in saved.iterdir() if path.suffix != ".weights"}
    assert names == {
        "graph.json",
        "model.onnx",
        "plan.json",
        "rank0.onnx",
        "rank1.onnx",
        "report.html",
        "request.json",
        "summary.json",
        "timeline.json",
    }
    for path in saved.glob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)


def test_the_seed_and_the_seconds_are_kept_and_shown(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    result = partitioner.compile(model, devices=2, seed=7)
    certificate = result.plan.certificate
    assert certificate is not None
    assert (certificate.seed, certificate.folded, result.summary["seed"]) == (7, "", 7)
    again = partitioner.load(result.save(tmp_path / "m"))
    assert again.plan.certificate == certificate
    assert again.seconds == result.seconds
    assert again.search_s is not None
    line = f", seed 7, {units.seconds(again.search_s)}"
    assert show(again).splitlines()[1].endswith(line)
    assert any(text.endswith(line) for text in str(again).splitlines())
    assert repr(result).endswith(", seed 7>")
    plan = replace(result.plan, certificate=replace(certificate, folded="2 layers as one"))
    assert repr(replace(result, plan=plan)).endswith(", seed 7, folded: 2 layers as one>")


def test_a_plan_alone(compiled: Compiled, tmp_path: Path) -> None:
    folder = compiled.save(tmp_path / "p", plan_only=True)
    assert not list(folder.glob("rank*"))
    assert partitioner.load(folder).plan == compiled.plan


def test_a_saved_plan_is_saved_again_alike(saved: Path, tmp_path: Path) -> None:
    """The copy refers to the model in the first folder."""
    copy = partitioner.load(saved).save(tmp_path / "copy")
    for name in ("plan.json", "rank0.onnx", "timeline.json"):
        assert (copy / name).read_bytes() == (saved / name).read_bytes()
    assert partitioner.load(copy).verify().equal


def test_two_compilations_are_byte_equal(model: onnx.ModelProto, tmp_path: Path) -> None:
    folder, other = (
        partitioner.compile(model, devices=3, time_limit_s=20).save(tmp_path / name)
        for name in "ab"
    )
    for path in folder.iterdir():
        if path.name != "summary.json":  # has the seconds
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def test_a_model_beside_the_folder_may_move_with_it(model: onnx.ModelProto, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    onnx.save(model, here / "m.onnx")
    partitioner.compile(here / "m.onnx", devices=1).save(here / "m.partition")
    here.rename(there)
    assert partitioner.load(there / "m.partition").verify().equal
    (there / "m.onnx").unlink()
    with pytest.raises(ResultError, match=r"its model is not at .*m\.onnx; put it there, name"):
        partitioner.load(there / "m.partition")
    onnx.save(examples.build("mlp", layers=3, hidden=8, batch=4), there / "m.onnx")
    with pytest.raises(ResultError, match=r"its model .*m\.onnx has changed since"):
        partitioner.load(there / "m.partition")


Break = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: (d / "request.json").unlink(), ResultError, "not a folder that `partition"),
        (lambda d: (d / "plan.json").unlink(), ResultError, "no readable plan.json"),
        (lambda d: (d / "summary.json").unlink(), ResultError, "no readable summary.json"),
        (lambda d: (d / "plan.json").write_bytes(b"\xff"), ResultError, "no readable plan.json"),
        (lambda d: (d / "request.json").write_text("3"), ResultError, "request.json is not a JSON"),
        (lambda d: (d / "request.json").write_text("{"), ResultError, "request.json is not a JSON"),
        (lambda d: (d / "request.json").write_text("{}"), ResultError, "version None, not 1"),
        (
            lambda d: (d / "request.json").write_text('{"version": 1}'),
            ResultError,
            "request.json has no model",
        ),
        (lambda d: (d / "plan.json").write_text("{}"), PlanError, "plan version is None"),
    ],
)
def test_a_spoilt_folder(saved: Path, spoil: Break, error: type[Exception], message: str) -> None:
    spoil(saved)
    with pytest.raises(error, match=message):
        partitioner.load(saved)


def test_an_edited_plan_is_used(saved: Path) -> None:
    text = (saved / "plan.json").read_text()
    assert '"cuts": {"' in text
    data = json.loads(text)
    for node in data["nodes"].values():
        node.pop("cuts", None)
    (saved / "plan.json").write_text(json.dumps(data))
    again = partitioner.load(saved)
    assert again.evaluation.sharded_flops_share == 0
    assert again.verify().equal


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((folder / "plan.json").read_text())
    change(data)
    (folder / "plan.json").write_text(json.dumps(data))


def uncut(data: dict[str, Any]) -> None:
    for node in data["nodes"].values():
        node.pop("cuts", None)


def test_rank_files_of_another_plan_are_refused(saved: Path) -> None:
    assert partitioner.load(saved).verify_written(saved).equal
    edit(saved, uncut)
    message = rf"rank0.onnx is not of its plan.json, which was edited; .*--constraints {saved}/plan"
    for use in (
        lambda: partitioner.load(saved).verify_written(saved),
        lambda: run_directory(saved, None, None),
    ):
        with pytest.raises(DirectoryError, match=message):
            use()
    options = ["--cluster", "2xideal", "--constraints", str(saved / "plan.json"), "-q"]
    anew = [str(saved.parent / "m.onnx"), *options, "-o", str(saved), "--force"]
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), saved.parent / "m.onnx")
    assert main(anew) == 0
    assert partitioner.load(saved).verify_written(saved).equal


def test_a_certificate_is_not_of_the_decisions(saved: Path) -> None:
    """Rank files stay up to date if only the certificate of their plan changes."""
    edit(saved, lambda data: data.update(certificate=None))
    assert partitioner.load(saved).verify_written(saved).equal


def test_rank_files_of_other_weights_are_refused(tmp_path: Path) -> None:
    model = examples.build("mlp", layers=2, hidden=16, batch=4)
    onnx.save(model, tmp_path / "m.onnx")
    folder = partitioner.compile(tmp_path / "m.onnx", devices=1).save(tmp_path / "m.partition")
    assert partitioner.load(folder).verify_written(folder).equal
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    weight.raw_data = weight.raw_data[:-1] + bytes([weight.raw_data[-1] ^ 1])
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(
        DirectoryError, match=r"rank0\.onnx holds other weights than the model; give the"
    ):
        partitioner.load(folder).verify_written(folder)
    assert partitioner.load(folder).verify().equal  # makes its own files


def test_a_plan_alone_is_not_run(compiled: Compiled, tmp_path: Path) -> None:
    folder = compiled.save(tmp_path / "p", plan_only=True)
    for use in (
        lambda: partitioner.load(folder).verify_written(folder),
        lambda: run_directory(folder, None, None),
    ):
        with pytest.raises(DirectoryError, match="holds a plan only; partition again without"):
            use()


def test_a_certificate_of_another_plan_is_left_out(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not partitioner.load(saved).warnings
    edit(saved, lambda data: data["certificate"].update(cost=1e-9, bound=1e-9, gap=0.0))
    again = partitioner.load(saved)
    assert again.plan.certificate is None
    (warning,) = again.warnings
    assert "it says throughput cost 1e-09, but the plan costs" in warning
    assert main(["show", str(saved)]) == 0
    out, err = capsys.readouterr()
    assert "bound" not in out
    assert err == f"partition: warning: {warning}\n"


def test_a_plan_edited_onto_a_device_that_is_not_there(saved: Path) -> None:
    data = json.loads((saved / "plan.json").read_text())
    data["groups"] = [{"axes": {"x": 2}, "devices": [0, 7]}] * len(data["groups"])
    (saved / "plan.json").write_text(json.dumps(data))
    with pytest.raises(CostError, match="plan uses device 7; cluster '2xideal' has 2"):
        partitioner.load(saved)


def test_a_folder_is_replaced_with_force_only(compiled: Compiled, saved: Path) -> None:
    with pytest.raises(DirectoryError, match="is there already; pass --force"):
        compiled.save(saved)
    (saved / "rank9.onnx").touch()
    compiled.save(saved, force=True)
    assert not (saved / "rank9.onnx").exists()


def test_what_is_not_ours_is_never_replaced(compiled: Compiled, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="is there and is not a folder"):
        compiled.save(tmp_path / "file", force=True)
    (tmp_path / "photos").mkdir()
    compiled.save(tmp_path / "photos", force=True)  # an empty folder is nobody's loss
    (tmp_path / "photos" / "plan.json").unlink()
    with pytest.raises(DirectoryError, match="holds something else than a plan"):
        compiled.save(tmp_path / "photos", force=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(DirectoryError, match="is there and is not a folder"):
        compiled.save(tmp_path / "link", force=True)
    with pytest.raises(DirectoryError, match="there is no folder"):
        compiled.save(tmp_path / "none" / "deep")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_write_leaves_all_as_it_was(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "t"
    target.mkdir()
    (target / "plan.json").write_text("old")

    def write(folder: Path) -> None:
        (folder / "plan.json").write_text("new")
        raise error

    kind = DirectoryError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind, match="No space left" if kind is DirectoryError else None):
        replace_directory(target, write, force=True)
    with pytest.raises(kind):
        replace_directory(tmp_path / "new", write, force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (target / "plan.json").read_text() == "old"


def test_a_failing_swap_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    target.mkdir()
    (target / "plan.json").write_text("old")
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if to == target and self.name != "was":
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DirectoryError, match=r"cannot write .*: Input/output"):
        replace_directory(target, lambda folder: (folder / "plan.json").touch(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
    assert (target / "plan.json").read_text() == "old"


def test_a_replaced_folder_keeps_what_no_compilation_writes(tmp_path: Path) -> None:
    target = tmp_path / "t"
    (target / "data").mkdir(parents=True)
    for name in ("plan.json", "rank7.onnx", "rank7.weights", "notes.txt", "data/x.npz"):
        (target / name).write_text("old")
    replace_directory(
        target, lambda folder: (folder / "plan.json").touch(), force=True, ours=is_written
    )
    assert sorted(path.name for path in target.iterdir()) == ["data", "notes.txt", "plan.json"]
    assert (target / "data" / "x.npz").read_text() == "old"
    assert (target / "plan.json").read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_kept_files_that_cannot_be_moved_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "t"
    target.mkdir()
    for name in ("plan.json", "notes.txt"):
        (target / name).write_text("old")
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self.name == "notes.txt":
            raise OSError(5, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DirectoryError, match=r"is written, but files .* they are in .*/was$"):
        replace_directory(
            target, lambda folder: (folder / "plan.json").touch(), force=True, ours=is_written
        )
    kept = next(path for path in tmp_path.iterdir() if path != target)
    assert (kept / "was" / "notes.txt").read_text() == "old"


def test_ranks_that_were_emitted_before_are_written_the_same(
    model: onnx.ModelProto, saved: Path, tmp_path: Path
) -> None:
    result = partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")
    result.run(feeds())  # emits the ranks
    again = result.save(tmp_path / "again")
    names = sorted(path.name for path in again.glob("rank*"))
    assert names == sorted(path.name for path in saved.glob("rank*"))
    for name in names:
        assert (again / name).read_bytes() == (saved / name).read_bytes(), name
    assert result.verify_written(again).equal


def test_a_model_in_memory_is_saved_with_its_plan(compiled: Compiled, saved: Path) -> None:
    assert compiled.model.path is None
    request = json.loads((saved / "request.json").read_text())
    assert request == {
        "version": 1,
        "model": "model.onnx",
        "graph_digest": compiled.graph.digest,
        "dims": {},
        "shapes": {},
        "feed": {},
    }
    assert onnx.load(saved / "model.onnx").graph.name == "mlp"
    assert partitioner.load(saved).model.path == (saved / "model.onnx").resolve()


def counted_sessions(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Sessions that are opened from now on."""
    opened: list[weakref.ref[Any]] = []

    def note(*args: Any) -> Any:
        session = open_session(*args)
        opened.append(weakref.ref(session))
        return session

    monkeypatch.setattr("partitioner.backends.onnx.sessions.segments.open_session", note)
    return opened


def test_sessions_are_opened_once_and_freed_with_the_object(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = counted_sessions(monkeypatch)
    result = partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")
    first = result.run(feeds())["y"]
    count = len(opened)
    assert count >= 2
    again = result.run(feeds())["y"]
    np.testing.assert_array_equal(again, first)
    again += 1  # results are the caller's own
    np.testing.assert_array_equal(result.run(feeds())["y"], first)
    other = result.run({"x": -feeds()["x"]})["y"]
    assert not np.array_equal(other, first)
    assert len(opened) == count
    folder = result.ranks.folder  # type: ignore[attr-defined]
    del result
    gc.collect()
    assert [session for session in opened if session() is not None] == []
    assert not folder.exists()


def test_a_closed_compilation_leaves_nothing_and_opens_again(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = counted_sessions(monkeypatch)
    with partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal") as result:
        result.close()  # nothing is open yet
        first = result.run(feeds())["y"]
        folder = result.ranks.folder  # type: ignore[attr-defined]
    assert [session for session in opened if session() is not None] == []
    assert not folder.exists()
    np.testing.assert_array_equal(result.run(feeds())["y"], first)
    result.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_compilation_that_was_run_can_be_copied(
    model: onnx.ModelProto, copied: Callable[[Compiled], Compiled]
) -> None:
    result = partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")
    first = result.run(feeds())["y"]
    other = copied(result)
    result.close()
    np.testing.assert_array_equal(other.run(feeds())["y"], first)


def test_sessions_are_opened_anew_where_a_rank_file_changed(
    compiled: Compiled, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = counted_sessions(monkeypatch)
    ranks = compiled.model.ranks(compiled.programs, compiled.plan, saved)
    first = ranks.run(feeds())["y"]
    count = len(opened)
    ranks.run(feeds())
    assert len(opened) == count
    proto = onnx.load(saved / "rank0.onnx")
    weight = next(t for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    weight.CopyFrom(
        onnx.numpy_helper.from_array(2 * onnx.numpy_helper.to_array(weight), weight.name)
    )
    save_edited(proto, saved / "rank0.onnx")
    assert not np.array_equal(ranks.run(feeds())["y"], first)
    assert len(opened) == 2 * count
    assert [session for session in opened[:count] if session() is not None] == []


def test_calls_of_several_threads_do_not_mix(compiled: Compiled) -> None:
    inputs = [{"x": np.full((4, 8), float(n), np.float32)} for n in range(8)]
    expected = [compiled.run(one)["y"] for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiled.run, inputs * 4))
    for result, whole in zip(results, expected * 4, strict=True):
        np.testing.assert_array_equal(result["y"], whole)

"""Rank files of ONNX whose ranks disagree, or would wait for each other, are not proven."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import helper

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.ir.pipeline.generate import pipeline_schedule
from partitioner.ir.pipeline.text import to_csv

Change = Callable[[onnx.ModelProto], None]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    """Three stages on two ranks, in micro-batches."""
    folder = tmp_path_factory.mktemp("staged")
    table = folder / "table.csv"
    table.write_text(to_csv(pipeline_schedule("forward", (0, 1, 0), 3)))
    model = examples.build("mlp", layers=6, hidden=16, batch=6)
    plan = partitioner.compile(model, devices=2, micro_batches=3, schedule=str(table))
    return plan, plan.save(folder / "plan")


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Compiled, Path]:
    """Tensor parallelism on two ranks."""
    model = examples.build("mlp", layers=4, hidden=16, batch=6)
    plan = partitioner.compile(model, devices=2, parallel="tp")
    return plan, plan.save(tmp_path_factory.mktemp("cut") / "plan")


def copied(folder: Path, to: Path, changes: dict[int, Change]) -> Path:
    """Copy rank files, some of them changed."""
    to.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (to / path.name).write_bytes(path.read_bytes())
    for rank, change in changes.items():
        path = to / f"rank{rank}.onnx"
        model = onnx.load(path, load_external_data=False)
        change(model)
        path.write_bytes(model.SerializeToString())
    return to


def attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    """An attribute of the first communication."""
    node = next(n for n in model.graph.node if n.domain == "partitioner")
    return next(a for a in node.attribute if a.name == name)


def fewer_rows(model: onnx.ModelProto) -> None:
    rows = attribute(model, "transfers")
    moved = json.loads(rows.s)
    moved[0][2][0][0][1] -= 1
    rows.s = json.dumps(moved).encode()


def other_reduction(model: onnx.ModelProto) -> None:
    found = [a for node in model.graph.node for a in node.attribute if a.name == "reduce"]
    next(a for a in found if a.s == b"sum").s = b"max"


def other_type(model: onnx.ModelProto) -> None:
    attribute(model, "dtype").i = onnx.TensorProto.FLOAT16


def of_header(change: Callable[[dict[str, Any]], None]) -> Change:
    def changed(model: onnx.ModelProto) -> None:
        entry = next(e for e in model.metadata_props if e.key == "partitioner.program")
        data = json.loads(entry.value)
        change(data)
        entry.value = json.dumps(data)

    return changed


ENDLESS = of_header(
    lambda data: data["batch"].update(schedule=["2F0,2F1,2F2,0F0,0F1,0F2", "1F0,1F1,1F2"])
)
ON_OTHERS = of_header(lambda data: data["batch"].update(lanes=[[1], [0]]))


def no_number(model: onnx.ModelProto) -> None:
    entries = (e for node in model.graph.node for e in node.metadata_props)
    next(e for e in entries if e.key == "partitioner.phase").value = "x"


def later(model: onnx.ModelProto) -> None:
    """The first node in the last phase of its rank."""
    entries = [e for node in model.graph.node for e in node.metadata_props]
    phases = [e for e in entries if e.key == "partitioner.phase"]
    phases[0].value = phases[-1].value


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        ((0,), fewer_rows, "rank0.onnx and rank1.onnx differ in communication .*: what goes from"),
        ((0,), other_type, "rank1.onnx and rank0.onnx differ in communication"),
        ((0, 1), ENDLESS, "the schedule of micro-batches cannot run: "),
        ((0, 1), ON_OTHERS, "which its schedule does not run there"),
        ((0,), no_number, "rank 0: node .* has phase 'x'"),
        ((0,), later, r"rank 0: '.*' is made in phase 3, but read in phase 1"),
    ],
)
def test_files_that_disagree_are_refused(
    staged: tuple[Compiled, Path],
    ranks: tuple[int, ...],
    change: Change,
    message: str,
    tmp_path: Path,
) -> None:
    plan, folder = staged
    to = copied(folder, tmp_path / "plan", dict.fromkeys(ranks, change))
    with pytest.raises(BackendError, match=message):
        plan.prove_written(to)


def test_a_reduction_of_one_rank_alone_is_refused(
    cut: tuple[Compiled, Path], tmp_path: Path
) -> None:
    plan, folder = cut
    to = copied(folder, tmp_path / "plan", {1: other_reduction})
    with pytest.raises(BackendError, match=r"rank1.onnx and rank0.onnx differ in communication"):
        plan.prove_written(to)


@pytest.mark.parametrize("op", ["Concat", "Slice"])
def test_a_move_along_a_dim_that_there_is_not_is_not_proven(op: str) -> None:
    model = examples.build("mlp", layers=2, hidden=16, batch=6)
    plan = partitioner.compile(model, devices=2, parallel="dp")
    files = emit_models(plan.programs, plan.graph)
    body = files[0].graph
    first = body.node[0]
    given = [name for name in first.input if name in {one.name for one in body.input}][:1]
    number = helper.make_tensor("number", onnx.TensorProto.INT64, [1], [7])
    inputs = {"Concat": given, "Slice": [*given, "number", "number", "number"]}[op]
    settings = {"Concat": {"axis": 7}, "Slice": {}}[op]
    body.initializer.append(number)
    body.node.insert(0, helper.make_node(op, inputs, ["moved"], **settings))
    first = body.node[1]
    first.input[:] = ["moved" if name in given else name for name in first.input]
    assert not prove(plan.graph, read_programs(files))

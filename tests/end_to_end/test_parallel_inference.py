"""Forced kinds of parallelism in inference, of ONNX models and modules: equal, and cut as said."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

import partitioner
from helpers.modules.batch_models import made
from helpers.modules.small_gpt import small_gpt
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.errors import OptionError
from partitioner.ir.plan import PlacedNode, resolve
from partitioner.strategies.constraints import ConstraintError

MODELS = {
    "llama": {"batch": 3, "seq": 7, "layers": 1, "hidden": 48, "heads": 6, "kv_heads": 3}
    | {"intermediate": 66, "vocab": 51},
    "mlp": {"layers": 2, "hidden": 18, "batch": 7},
    "tiny": {"batch": 5, "channels": 6},
}
MESHES: Mapping[tuple[str, int], Mapping[str, int] | None] = {
    ("dp", 2): None,
    ("dp", 3): None,
    ("tp", 2): None,
    ("tp", 3): None,
    ("dp+tp", 4): {"dp": 2, "tp": 2},
    ("tp+dp", 6): {"dp": 2, "tp": 3},
}


def placed(program: Compiled | ModuleProgram) -> list[PlacedNode]:
    return [*resolve(program.graph, program.plan)]


def is_cut(node: PlacedNode, axis: str) -> bool:
    return any(axis in layout.axes for layout in node.layouts.values())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("kind", "devices"), MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_onnx_models_are_cut_as_said(name: str, kind: str, devices: int) -> None:
    result = partitioner.compile(
        examples.build(name, **MODELS[name]),
        devices=devices,
        parallel=kind,
        mesh=MESHES[kind, devices],
        time_limit_s=5,
    )
    assert isinstance(result, Compiled)
    assert result.verify()
    products = [p for p in placed(result) if p.rule is not None and p.rule.is_product]
    assert "dp" not in kind or all(is_cut(node, "dp") for node in products)
    for node in products:
        matrix, at = list(node.operands())[1]
        if matrix in result.graph.constants:
            assert at.sharding.axes == {"tp"}.intersection(kind.split("+"))


@pytest.mark.parametrize("kind", ["dp+tp", "tp+dp"])
def test_kinds_without_a_mesh_have_the_best_of_all_meshes(kind: str) -> None:
    model = examples.build("mlp", layers=2, hidden=24, batch=12)
    options = {"parallel": kind, "devices": 6, "cluster": "ideal"}
    result = partitioner.compile(model, **options)
    first, second = kind.split("+")
    forced = [{first: 2, second: 3}, {first: 3, second: 2}]
    named = [partitioner.compile(model, **options, mesh=mesh) for mesh in forced]
    assert result.cost == pytest.approx(min(other.cost for other in named))
    searched = result.plan.certificate.space
    assert all(f"({first}={m[first]} {second}={m[second]})" in searched for m in forced)
    assert result.verify()


@pytest.mark.slow
def test_rings_without_a_mesh_are_of_the_size_of_their_axis() -> None:
    model, batch = small_gpt()
    program = partitioner.compile(model, batch, devices=4, parallel="dp+ring", time_limit_s=5)
    assert {tuple(group.axes) for group in program.plan.groups} == {(("dp", 2), ("cp", 2))}
    assert program.verify()


@pytest.mark.parametrize("name", ["time first", "messages", "bags"])
@pytest.mark.parametrize(("kind", "devices"), [("dp", 2), ("dp", 3), ("zero3", 3)])
def test_modules_are_cut_along_their_batch(name: str, kind: str, devices: int) -> None:
    model, batch = made(name)
    program = partitioner.compile(model, batch, devices=devices, parallel=kind, time_limit_s=5)
    assert isinstance(program, ModuleProgram)
    assert program.verify()
    products = [p for p in placed(program) if p.rule is not None and p.rule.is_product]
    assert products
    assert all(is_cut(node, "dp") for node in products)


def test_notes_say_where_the_batch_is_and_what_is_whole() -> None:
    program = partitioner.compile(*made("bags"), devices=2, parallel="dp")
    notes = program.summary["notes"]
    where = "the batch is dim 0 of 'dense', dim 0 of 'y'; 'words', 'offsets' without it"
    assert f"parallel dp: {where}" in notes
    program = partitioner.compile(*made("time first"), devices=2, parallel="dp")
    assert "parallel dp: the batch is dim 1 of 'x', dim 0 of 'y'" in program.summary["notes"]

    class Sorted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sort(0)[0]

    program = partitioner.compile(Sorted(3, 1), torch.randn(7, 3), devices=2, parallel="dp")
    assert program.verify()
    note = "parallel dp: /sort (sort) cannot be cut with the batch, and each device of an axis dp"
    assert any(line.startswith(note) for line in program.summary["notes"])


def test_zero3_stores_weights_in_parts_until_their_use() -> None:
    model, batch = small_gpt()
    program = partitioner.compile(model, batch, devices=2, parallel="zero3", time_limit_s=10)
    assert isinstance(program, ModuleProgram)
    assert program.verify()
    homes = program.programs.homes
    stored = {value: homes[value].placement.sharding for value in program.traced.stored.values()}
    assert len(stored) == len(dict(model.named_parameters()))
    assert all(at.axes == {"dp"} for at in stored.values())
    kinds = {str(comm.kind) for comm in program.programs.ranks[0].comms}
    assert "all_gather" in kinds


def test_stages_of_an_onnx_model_run_in_micro_batches() -> None:
    mlp = examples.build("mlp", layers=4, hidden=16, batch=6)
    program = partitioner.compile(mlp, devices=2, parallel="pp", micro_batches=3)
    assert program.plan.micro_batches == 3
    assert len(program.plan.groups) == 2
    assert program.verify()


def test_kinds_that_inference_lacks_are_refused_by_name() -> None:
    mlp = examples.build("mlp", **MODELS["mlp"])
    with pytest.raises(OptionError, match="'zero2' of an ONNX model: it cuts what training keeps"):
        partitioner.compile(mlp, devices=2, parallel="zero2")
    with pytest.raises(OptionError, match="'zero3' of an ONNX model: a rank's file holds weights"):
        partitioner.compile(mlp, devices=2, parallel="zero3")
    with pytest.raises(ConstraintError, match=r"the batch \(dim 0 of 'x'\) has 7 elements, fewer"):
        partitioner.compile(mlp, devices=8, parallel="dp")
    with pytest.raises(ConstraintError, match=r"no input has a batch that can be cut: x float32"):
        partitioner.compile(
            examples.build("mlp", layers=2, hidden=8, batch=1), devices=2, parallel="dp"
        )

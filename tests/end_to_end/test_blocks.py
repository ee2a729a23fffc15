"""Models that do not fit one device run in blocks: equal, and measured within the limit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

import partitioner
from helpers.modules.unets import exported, unet
from helpers.plans.measured import measured_bytes
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxRanks
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.cli.main import main
from partitioner.cost_model.schedule.task_list import LOAD_BYTES_PER_S
from partitioner.foundations.files import ResultError
from partitioner.frontends.inputs import random_inputs
from partitioner.problem.memory_kinds import Holdings
from partitioner.report.page.memory import memory
from partitioner.report.planned import lanes
from partitioner.solver.outcome import Infeasible

MIB = 2**20


def measured(compiled: Compiled, folder: Path) -> int:
    """Most bytes that the one rank held, by ONNX Runtime's profile."""
    compiled.save(folder)
    return measured_bytes(folder, 0, random_inputs(compiled.graph, 0)).total


def check(model: Path, share: float, folder: Path) -> Compiled:
    """Compile for a share of what the whole model needs, compare and measure."""
    needs = partitioner.compile(model, devices=1).summary["peak_bytes"][0]
    limit = int(needs * share)
    compiled = partitioner.compile(model, devices=1, memory=limit)
    assert compiled.plan.blocks
    assert compiled.summary["peak_bytes"][0] <= limit
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    assert max(output.error for output in found.outputs) <= 1e-5
    assert 0 < measured(compiled, folder) <= limit
    return compiled


def test_a_unet_in_a_quarter_of_its_memory(tmp_path: Path) -> None:
    model = exported(unet(), (1, 3, 264, 200), tmp_path / "unet.onnx")
    compiled = check(model, 0.25, tmp_path / "out")
    (stretch,) = [s for s in compiled.plan.blocks.stretches if s.chunks]
    assert stretch.blocks > 1
    text = str(compiled)
    assert "blocks of dim" in text
    assert "the model as a whole does not fit" in text
    again = partitioner.load(tmp_path / "out")
    assert isinstance(again, Compiled)
    assert again.plan == compiled.plan
    assert not again.warnings
    limit = compiled.cluster.devices[0].memory_bytes
    options: dict[str, Any] = {"devices": 1, "memory": limit}
    kept = partitioner.compile(model, constraints=tmp_path / "out" / "plan.json", **options)
    assert kept.plan.digest == compiled.plan.digest
    assert kept.evaluation == compiled.evaluation
    parts = Holdings.of(compiled.graph, compiled.plan, compiled.cluster).at_peak(0)
    assert sum(parts.values()) == pytest.approx(compiled.evaluation.peak[0].bytes, rel=1e-3)
    (shown,) = memory(compiled, lanes(compiled))
    assert shown["peak_bytes"] == pytest.approx(compiled.evaluation.peak[0].bytes, rel=1e-3)


def products(path: Path, layers: int, wide: int) -> Path:
    """Matrix products, nearly all of whose bytes are weights."""
    onnx.save(examples.build("mlp", layers=layers, hidden=wide), path)
    return path


def test_weights_are_loaded_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No layer fits beside all others; the certificate's cost has the seconds of loading."""
    model = products(tmp_path / "mlp.onnx", layers=8, wide=512)
    compiled = check(model, 0.5, tmp_path / "out")
    assert all(not stretch.chunks for stretch in compiled.plan.blocks.stretches)
    loads = compiled.schedule.loads
    nbytes = sum(compiled.schedule.residents[key] * len(of) for key, of in loads.items())
    whole = partitioner.compile(model, devices=1)
    seconds = compiled.evaluation.step_s - whole.evaluation.step_s
    assert seconds == pytest.approx(nbytes / LOAD_BYTES_PER_S, rel=0.05)
    assert main(["show", str(tmp_path / "out")]) == 0
    assert "load their constants in turn" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "out"), "--requests", "2"]) == 0


def wide(path: Path) -> Path:
    """Two products, the first of which has nearly all weights."""
    return two_products(path, helper.make_node("Relu", ["a"], ["b"], name="relu"), 2, 64, 16)


def two_products(path: Path, between: onnx.NodeProto, rows: int, before: int, after: int) -> Path:
    """A product into 4,096 columns `a`, a node from it to `b`, and a product of that."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        between,
        helper.make_node("MatMul", ["b", "v"], ["y"], name="second"),
    ]
    rng = np.random.default_rng(0)
    weights = {"w": (before, 4096), "v": (4096, after)}
    graph = helper.make_graph(
        nodes,
        between.name,
        [helper.make_tensor_value_info("x", 1, (rows, before))],
        [helper.make_tensor_value_info("y", 1, (rows, after))],
        [
            numpy_helper.from_array(rng.standard_normal(sizes).astype(np.float32), name)
            for name, sizes in weights.items()
        ],
    )
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path


def test_one_layer_larger_than_the_memory_is_cut(tmp_path: Path) -> None:
    """Its weights are loaded part by part."""
    compiled = check(wide(tmp_path / "wide.onnx"), 0.4, tmp_path / "out")
    assert any(stretch.chunks for stretch in compiled.plan.blocks.stretches)


def test_a_module_in_blocks(tmp_path: Path) -> None:
    example = (torch.randn(1, 3, 137, 104),)
    module = nn.Sequential(*unet().down[:1], nn.MaxPool2d(2, ceil_mode=True))
    needs = partitioner.compile(module, example, devices=1).summary["peak_bytes"][0]
    compiled = partitioner.compile(module, example, devices=1, memory=int(0.5 * needs))
    assert compiled.plan.blocks
    assert compiled.plan.pipeline is None
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    torch.testing.assert_close(compiled(*example), module(*example), rtol=1e-5, atol=1e-5)
    compiled.save(tmp_path / "out")
    assert partitioner.load(tmp_path / "out", module, example).plan == compiled.plan


@pytest.mark.slow
def test_a_unet_of_few_channels_in_a_third_of_its_memory(tmp_path: Path) -> None:
    """Blocked layouts of 16 channels would hold more than its limit."""
    model = exported(unet(12), (1, 3, 136, 136), tmp_path / "unet.onnx")
    compiled = check(model, 0.34, tmp_path / "out")
    parts = set(compiled.graph.blocks.values())
    assert len(parts) > 1
    assert compiled.programs.plain >= parts - {None}


def soft(path: Path) -> Path:
    """A product, a softmax over its rows, and a product: columns of the softmax can be cut."""
    between = helper.make_node("Softmax", ["a"], ["b"], name="soft", axis=0)
    return two_products(path, between, 96, 8, 8)


def test_blocks_that_are_edited_to_what_cannot_run_name_node_and_dim(tmp_path: Path) -> None:
    compiled = partitioner.compile(soft(tmp_path / "soft.onnx"), devices=1, memory="1500KiB")
    (stretch,) = (one for one in compiled.plan.blocks.stretches if one.chunks)
    assert {(chunk.value, chunk.dim) for chunk in stretch.chunks} <= {("a", 1), ("b", 1)}
    compiled.save(tmp_path / "out")
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    for edit, message in (
        ({"value": "a", "dim": 0}, r"'soft' \(Softmax\) needs dim 0 of 'a' as a whole"),
        ({"value": "z"}, "of 'z' is none of the stretch's"),
    ):
        blocks = [
            {**one, "chunks": [{**chunk, **edit} for chunk in one["chunks"]]}
            for one in plan["blocks"]
        ]
        (tmp_path / "out/plan.json").write_text(json.dumps({**plan, "blocks": blocks}))
        expected = rf"the blocks of its plan have changed since; partition it again \(.*{message}"
        with pytest.raises(ResultError, match=expected):
            partitioner.load(tmp_path / "out")


def test_more_blocks_are_priced_also_where_some_more_held_no_less() -> None:
    """The cheapest numbers of blocks may lie behind those that hold as much as fewer."""
    model = examples.build("tiny", size=33, channels=12, batch=8)
    compiled = partitioner.compile(model, devices=3, memory="400kB", strategy="inter")
    assert compiled.plan.blocks
    assert compiled.evaluation.step_s < 0.2e-3  # a search that left them out found 0.306 ms
    assert compiled.verify()


@pytest.mark.parametrize(
    ("options", "value", "cut"),
    [
        ({"mesh": {"tp": 2}}, "w", ()),
        ({"parallel": "tp"}, "w", (0, 1)),
        ({"parallel": "dp"}, "x", (0,)),
        ({"strategy": "intra"}, "w", ()),
        ({"constraints": {"pin": [{"tensor": "w", "dim": 1}]}}, "w", (1,)),
        ({"constraints": {"dims": {"rows": "x.0"}, "layout": {"rows": "tp"}}}, "x", (0,)),
    ],
)
def test_what_devices_share_is_in_blocks(
    options: dict[str, Any], value: str, cut: tuple[int, ...], tmp_path: Path
) -> None:
    """A kind, a mesh, a pin of a tensor, a named dim: all blocks are cut over the devices so."""
    model = wide(tmp_path / "wide.onnx")
    compiled = partitioner.compile(
        model, devices=2, memory="400KiB", time_limit_s=5, cluster="cpu", **options
    )
    plan = compiled.plan
    assert plan.blocks
    assert plan.kind == "intra"
    assert compiled.evaluation.devices_used == 2
    placed = (placed for placed in compiled.placed if placed.node.name[:5] == "first")
    found = {
        dim
        for one in placed
        for name, at in one.operands()
        if name.startswith(value)
        for dim, layout in enumerate(at.sharding.dims)
        if layout.axes
    }
    assert found <= set(cut) if cut else found
    assert found
    assert compiled.verify(seed=1).equal


def test_tune_runs_the_best_plans_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are in blocks; the slower one by the model is the faster one here."""
    runs: list[Path] = []

    def run_written(_ranks: object, folder: Path, job: LocalJob) -> LocalRun:
        runs.append(folder)
        return LocalRun({}, job.requests * (2.0 if folder.name == "0" else 1.0))

    monkeypatch.setattr(OnnxRanks, "run_written", run_written)
    model = wide(tmp_path / "wide.onnx")
    compiled = partitioner.compile(
        model,
        devices=2,
        memory="400KiB",
        time_limit_s=5,
        cluster="local",
        profile=tmp_path / "none" / "profile.sqlite",
        tune=2,
    )
    certificate = compiled.plan.certificate
    assert certificate is not None
    assert compiled.plan.blocks
    assert [trial.kept for trial in certificate.trials] == [False, True]
    assert {folder.name for folder in runs} == {"0", "1"}
    assert any("in blocks, one after the other" in note for note in compiled.summary["notes"])
    assert compiled.verify(seed=1).equal


@pytest.mark.parametrize("pinned", ["first", "second"])
def test_pins_to_devices_hold_in_blocks(pinned: str, tmp_path: Path) -> None:
    """A node in blocks runs all of them there."""
    model, device = wide(tmp_path / "wide.onnx"), 1
    pins = {"pin": [{"nodes": [pinned], "device": device}]}
    compiled = partitioner.compile(
        model, devices=2, memory="600KiB", time_limit_s=5, constraints=pins
    )
    plan = compiled.plan
    assert plan.blocks
    homes = {
        plan.groups[node.group].devices
        for name, node in plan.nodes.items()
        if name.partition(".block")[0] == pinned
    }
    assert homes == {(device,)}
    assert compiled.verify(seed=1).equal


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"tp": 1}},
        {"parallel": "tp"},
        {"strategy": "inter"},
        {"constraints": {"pin": [{"nodes": ["first"], "device": 0}]}},
    ],
)
def test_kinds_of_parallelism_leave_blocks_on_one_device(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = wide(tmp_path / "wide.onnx")
    compiled = partitioner.compile(model, devices=1, memory="600KiB", time_limit_s=5, **options)
    assert (
        compiled.plan.blocks == partitioner.compile(model, devices=1, memory="600KiB").plan.blocks
    )
    assert compiled.verify(seed=1).equal


def test_a_refusal_says_what_would_fit_in_blocks(tmp_path: Path) -> None:
    model = wide(tmp_path / "wide.onnx")
    needs = partitioner.compile(model, devices=1).summary["peak_bytes"][0]
    with pytest.raises(Infeasible, match=r"in blocks with --memory \d+") as refusal:
        partitioner.compile(model, devices=1, memory=int(needs * 0.02), time_limit_s=3)
    way = next(way for way in refusal.value.relaxations if "blocks" in way)
    enough = int(re.fullmatch(r"in blocks with --memory (\d+) .*", way)[1])  # type: ignore[index]
    assert partitioner.compile(model, devices=1, memory=enough).plan.blocks


@pytest.mark.slow
def test_vgg19_in_a_quarter_of_its_memory(tmp_path: Path) -> None:
    """392 of its 548 MiB of weights are in one layer."""
    path = tmp_path / "vgg19.onnx"
    path.write_bytes(examples.build("vgg19").SerializeToString())
    compiled = check(path, 0.25, tmp_path / "out")
    assert max(stretch.blocks for stretch in compiled.plan.blocks.stretches) >= 4


def test_blocks_that_need_more_than_the_whole_model_are_not_named() -> None:
    model = examples.build("mlp", layers=4, hidden=16, batch=4096)
    with pytest.raises(Infeasible, match=r"--memory 790880 ") as refusal:
        partitioner.compile(model, devices=1, memory="512KiB")
    assert not any("in blocks" in way for way in refusal.value.relaxations)
    assert partitioner.compile(model, devices=1, memory=790880).summary["peak_bytes"] == [790880]

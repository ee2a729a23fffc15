"""`partition show`: its lines for nodes and communications, and all names that a pin may use."""

import itertools
from pathlib import Path

import onnx
import pytest

import partitioner
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.onnx_model import OnnxModel
from partitioner.ir.loops.factors import dim_text, parse_dim
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan
from partitioner.ir.program import CommKind
from partitioner.ir.rule import Rule
from partitioner.report.text.show import show


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return examples.build("mlp", layers=6, hidden=8, batch=4)


@pytest.fixture(scope="module")
def pipeline(model: onnx.ModelProto, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The first layer on device 1, the others on device 0."""
    pins = tmp_path_factory.mktemp("show") / "pins.toml"
    rest = ", ".join(f'"layer{index}*"' for index in range(1, 6))
    pins.write_text(
        f'[[pin]]\nnodes = ["layer0*"]\ndevice = 1\n[[pin]]\nnodes = [{rest}, "y"]\ndevice = 0\n'
    )
    return partitioner.compile(model, devices=2, constraints=pins)


@pytest.fixture(scope="module")
def sharded(model: onnx.ModelProto) -> Compiled:
    return partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")


@pytest.fixture(scope="module")
def llama() -> Compiled:
    model = examples.build("llama", layers=1, hidden=64)
    return partitioner.compile(model, devices=2, strategy="intra", cluster="2xideal")


def test_a_send_has_a_direction(pipeline: Compiled) -> None:
    (line,) = (line for line in show(pipeline).splitlines() if "  send  " in line)
    assert line.startswith("1 -> 0   ")
    assert line.split()[-2:] == ["128", "B"]


def test_runs_are_joined_and_all_takes_them_apart(pipeline: Compiled) -> None:
    assert "layer1.out ... y (9 nodes)" in show(pipeline)
    full = show(pipeline, everything=True)
    assert "(9 nodes)" not in full
    for node in pipeline.graph.nodes:
        assert f"{node.name} ({node.op})" in full
    assert "layer1.relu" not in show(pipeline)


def test_all_lists_every_tensor_in_full_and_the_factors(model: onnx.ModelProto) -> None:
    long = onnx.ModelProto()
    long.CopyFrom(model)
    name = "weight." + "w" * 80
    old = long.graph.initializer[0].name
    long.graph.initializer[0].name = name
    for node in long.graph.node:
        node.input[:] = [name if value == old else value for value in node.input]
    result = partitioner.compile(long, devices=2)
    full = show(result, everything=True)
    for value in result.graph.types:
        assert f"\n{value}  " in full
    (line,) = (line.split() for line in full.splitlines() if line.startswith(name))
    assert line == [name, "constant", "float32[8,8]"]
    assert "m=4 k=8 (reduction) n=8: (m, k), (k, n), (n) -> (m, n)" in full
    assert name not in show(result)


def test_uncut_operators_of_a_mesh_are_called_replicated(sharded: Compiled) -> None:
    nodes = {node.name: NodePlan(0) for node in sharded.graph.nodes}
    plan = Plan(sharded.graph.digest, {}, (DeviceMesh.line(2, "tp"),), nodes)
    assert isinstance(sharded.model, OnnxModel)
    result = partitioner.compile(sharded.model.source, devices=2, constraints=plan)
    (line,) = (line for line in show(result).splitlines() if "(11 nodes)" in line)
    assert line.startswith("tp=2 on 0,1  ")
    assert "  replicated  " in line


def test_slices_of_one_tensor_are_one_line(llama: Compiled) -> None:
    slices = [
        task.comm
        for task in llama.schedule.tasks
        if task.comm is not None and task.comm.kind is CommKind.SLICE
    ]
    assert len(slices) >= 2
    lines = [line.split() for line in show(llama).splitlines() if "  slice  " in line]
    assert lines
    assert {line[0] for line in lines} == {"0,1"}
    assert not any(a == b for a, b in itertools.pairwise(lines))


def test_kinds_are_spelt_as_in_the_docs(llama: Compiled) -> None:
    comms = {task.comm.kind for task in llama.schedule.tasks if task.comm is not None}
    assert any("_" in kind for kind in comms)
    shown = show(llama)
    for kind in comms:
        assert kind.replace("_", "-") in shown
        assert "_" not in kind or kind not in shown


def test_the_legend_stands_at_the_end(sharded: Compiled, tmp_path: Path) -> None:
    saved = partitioner.load(sharded.save(tmp_path / "p"))
    words = ("load ", "devices ", "what ", "seconds ", "sent ")
    tail = show(saved).rsplit("\n\n", 1)[1].splitlines()
    starts = [line for line in tail if not line.startswith(" ")]
    assert [line.startswith(word) for line, word in zip(starts, words, strict=True)] == [True] * 5


@pytest.mark.parametrize("text", ["m", "(h d)", "a + (b c)", "1"])
def test_dims_of_rules_are_written_as_they_are_read(text: str) -> None:
    assert dim_text(parse_dim(text)) == text


def test_a_rule_as_text() -> None:
    rule = Rule.of("m k, k n, _", "m n", [(2, 3), (3, 4), (7,)], [(2, 4)], reduce={"k": "sum"})
    assert str(rule) == "m=2 k=3 (reduction) n=4: (m, k), (k, n), _ -> (m, n)"

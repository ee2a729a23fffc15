"""Plans of ONNX models are proven from their rank files, and spoilt files are refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import partitioner
from helpers.drawn.drawn_graphs import drawn_graph
from helpers.plans.mutated_programs import mutants
from helpers.plans.whole_plans import build, candidates, hand_plan, lowered, random_plan
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.lowering import lower
from partitioner.api.verify.compare import VerificationError
from partitioner.api.verify.symbolic.onnx_files import read_programs
from partitioner.api.verify.symbolic.proof import Proof, Refusal
from partitioner.api.verify.symbolic.prove import prove
from partitioner.backends.onnx.files.emit import emit_models
from partitioner.cli.main import main
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.schedule.task_list import schedule
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.graph import Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import resolve

#: A model that runs in blocks in 400 kB.
BLOCKS = {"size": 33, "channels": 12, "batch": 8}


def planned(name: str, devices: int, sizes: dict[str, Any], **options: Any) -> Compiled:
    model = examples.build(name, **sizes)
    return partitioner.compile(model, devices=devices, time_limit_s=5, **options)


@pytest.mark.parametrize(
    ("name", "devices", "sizes", "options"),
    [
        ("mlp", 4, {}, {"parallel": "dp+tp", "cluster": "4xideal"}),
        ("mlp", 4, {}, {"strategy": "copies"}),
        ("mlp", 2, {}, {"parallel": "pp", "micro_batches": 4}),
        ("mlp", 4, {}, {"parallel": "pp+tp", "micro_batches": 2}),
        ("tiny", 3, {}, {"parallel": "spatial", "cluster": "3xideal"}),
        ("tiny", 4, {"batch": 4, "size": 32}, {"parallel": "dp+spatial", "cluster": "4xideal"}),
        ("tiny", 2, {}, {"strategy": "inter"}),
        ("tiny", 3, BLOCKS, {"memory": "400kB", "strategy": "inter"}),
        ("llama", 2, {}, {"strategy": "intra", "cluster": "2xideal"}),
        ("llama", 4, {}, {"parallel": "tp", "cluster": "4xideal"}),
        ("llama", 4, {}, {"parallel": "cp", "cluster": "4xideal"}),
        ("llama", 4, {}, {}),
    ],
)  # fmt: skip
def test_plans_of_all_kinds_are_proven(
    name: str, devices: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    proof = planned(name, devices, sizes, **options).verify(symbolic=True)
    assert proof, str(proof)
    assert str(proof) == f"proven: {devices} ranks compute the whole model"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["intra", "inter"])
@pytest.mark.parametrize(
    "name", ["alexnet", "densenet121", "inception_v1", "resnet50", "shufflenet", "squeezenet"]
)
def test_plans_of_the_zoo_are_proven(name: str, strategy: str, devices: int) -> None:
    cluster = f"{devices}xideal" if strategy == "intra" else None
    compiled = planned(name, devices, {}, strategy=strategy, cluster=cluster)
    proof = compiled.verify(symbolic=True)
    assert proof, str(proof)


@pytest.mark.parametrize("seed", [*range(12), 542])
def test_random_cuts_of_random_graphs_are_proven(seed: int) -> None:
    model, _ = drawn_graph(seed)
    graph, draws = load_onnx(model).graph, np.random.default_rng(seed)
    mesh = DeviceMesh.of([{"a": 2}, {"a": 3}, {"a": 2, "b": 2}][seed % 3])
    plan, _ = random_plan(graph, candidates(graph, [mesh]), draws)
    tasks = schedule(graph, resolve(graph, plan), resolve_cluster(None, mesh.size()))
    proof = prove(graph, read_programs(emit_models(lower(graph, tasks, mesh.size()), graph)))
    assert proof, str(proof)


def test_what_has_no_elements_is_complete_where_it_is_zeros() -> None:
    """Nothing is sent of it: another rank has zeros of no elements in its place."""
    nodes = [
        Node("cut", "Slice", ("x", "zero", "zero"), ("h",)),
        Node("act", "Relu", ("h",), ("e",)),
        Node("join", "Concat", ("e", "x"), ("j",), {"axis": 0}),
        Node("last", "Relu", ("j",), ("y",)),
    ]
    shapes = {"x": (3, 4), "h": (0, 4), "e": (0, 4), "j": (3, 4), "y": (3, 4)}
    graph = build(nodes, shapes, ["x"], ["y"], {"zero": np.zeros(1, np.int64)})
    programs = lowered(graph, hand_plan(graph, cut=0, act=1, join=0, last=0), 2)
    assert any(part.zero for part in programs.ranks[0].constants.values())
    proof = prove(graph, read_programs(emit_models(programs, graph)))
    assert proof, str(proof)


def test_the_place_in_a_row_tells_where_equal_rows_of_unlike_elements_are_one_dim() -> None:
    """A rank has rows 0 and 1 of three equal ones, and sends the last element, not the third."""
    nodes = [
        Node("rows", "Expand", ("w", "three"), ("e",)),
        Node("flat", "Reshape", ("e", "six"), ("y",)),
        Node("mul", "Mul", ("x", "y"), ("z",)),
    ]
    shapes = {"w": (1, 2), "e": (3, 2), "y": (6,), "x": (6,), "z": (6,)}
    sizes = {"three": np.array([3, 2]), "six": np.array([6])}
    graph = build(nodes, shapes, ["x", "w"], ["z"], sizes)
    pair = DeviceMesh.of({"tp": 2})
    cuts = {"rows": {"b0": "tp:2,1"}, "flat": {"f0": "tp:2,1"}, "mul": {"b0": "tp"}}
    plan = hand_plan(graph, **{name: (pair, cut) for name, cut in cuts.items()})
    programs = lowered(graph, plan, 2)
    assert prove(graph, read_programs(emit_models(programs, graph)))
    others = [mutant for mutant in mutants(programs) if mutant.kind == "region"]
    assert others
    for mutant in others:
        proof = prove(graph, read_programs(emit_models(mutant.programs, graph)))
        assert not proof, mutant.what


def test_written_files_are_proven_without_their_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = planned("mlp", 2, {"hidden": 64}, parallel="tp", cluster="2xideal")
    compiled.save(tmp_path / "out")
    assert main(["verify", str(tmp_path / "out"), "--symbolic"]) == 0
    assert capsys.readouterr().out == "proven: 2 ranks compute the whole model\n"
    for path in (tmp_path / "out").glob("*.weights"):
        path.unlink()
    proof = compiled.prove_written(tmp_path / "out")
    assert proof.proven
    assert "the values of 8 constants were not compared" in str(proof)


def spoil(path: Path, change: str) -> None:
    model = onnx.load(path)
    if change == "weight":
        (tensor,) = (t for t in model.graph.initializer if t.name == "head.weight")
        array = numpy_helper.to_array(tensor).copy()
        array[0, 0] += 1
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    elif change == "attribute":
        node = next(node for node in model.graph.node if node.op_type == "Conv")
        (pads,) = (a for a in node.attribute if a.name == "pads")
        pads.ints[0] += 1
    else:
        entry = next(e for e in model.metadata_props if e.key == "partitioner.program")
        header = json.loads(entry.value)
        del header["constants"]
        entry.value = json.dumps(header)
    onnx.save(model, path)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("weight", 1, "WRONG: rank 0, constant 'head.weight': it is not 'head.weight'"),
        (
            "attribute",
            4,
            "not proven: rank 0, node 'stem.conv' (Conv): it is not what the op table",
        ),
        ("header", 4, "not proven: rank 0: the file does not say what its constants are"),
    ],
)
def test_a_spoilt_file_is_refused_with_the_first_wrong_step(
    change: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = planned("tiny", 2, {}, strategy="intra", cluster="2xideal")
    compiled.save(tmp_path / "out")
    spoil(tmp_path / "out/rank0.onnx", change)
    assert main(["verify", str(tmp_path / "out"), "--symbolic"]) == code
    assert capsys.readouterr().out.startswith(message)


def test_verdicts() -> None:
    wrong = Proof(2, Refusal(1, "node 'a' (Relu)", "it reads a sum", is_wrong=True))
    assert (wrong.verdict, wrong.exit_code, bool(wrong)) == ("WRONG", 1, False)
    assert str(wrong) == "WRONG: rank 1, node 'a' (Relu): it reads a sum"
    unknown = Proof(2, Refusal(0, "", "it is unknown", is_wrong=False))
    assert (unknown.verdict, unknown.exit_code) == ("not proven", 4)
    assert (Proof(1).proven, Proof(1).exit_code) == (True, 0)
    assert str(Proof(1)) == "proven: 1 rank computes the whole model"


def test_what_it_cannot_follow_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = planned("mlp", 1, {"layers": 1, "hidden": 8})
    with pytest.raises(VerificationError, match="leave seed, inputs and optimization out"):
        compiled.verify(1, symbolic=True)  # type: ignore[call-overload]
    assert main(["verify", "out", "--symbolic", "--seed", "1"]) == 2
    assert "--symbolic runs nothing: leave --seed out" in capsys.readouterr().err

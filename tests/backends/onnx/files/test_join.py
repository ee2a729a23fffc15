"""Joined rank files: the model again, or what all ranks compute; parts that others changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

from helpers.onnx_files import onnx_models as om
from helpers.onnx_files.placed import emit_placed
from helpers.plans import rank_programs as hand
from helpers.plans.rank_cases import CASES, check
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit
from partitioner.backends.onnx.files.join import join
from partitioner.backends.onnx.files.parts import part_of, read_part, read_ranks, write_parts
from partitioner.backends.onnx.sessions.whole import run_whole
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx

SIZE = 48
RNG = np.random.default_rng(0)
WEIGHTS = {
    name: RNG.standard_normal((SIZE, SIZE)).astype(np.float32) / 8 for name in ("a", "b", "c")
}


def joined(folder: Path, parts: Path | None = None) -> onnx.ModelProto:
    """The joined model, which was written and read again."""
    models = read_ranks(folder)
    own = [
        part_of(model) if parts is None else read_part(model, parts / f"rank{model.rank}.onnx")
        for model in models
    ]
    join(own).write(folder / "joined.onnx")
    return onnx.load(folder / "joined.onnx")


def branches() -> onnx.ModelProto:
    """Values go from device 0 to 1, 2 and back; a body reads one of another device."""
    x = ("float32", (4, SIZE))
    then = helper.make_graph(
        [helper.make_node("Neg", ["left"], ["then"], name="Neg_0")],
        "then",
        [],
        om.infos({"then": x}),
    )
    added = helper.make_node("Add", ["left", "right"], ["other"], name="Add_0")
    other = helper.make_graph([added], "other", [], om.infos({"other": x}))
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["stem"], name="stem"),
        helper.make_node("MatMul", ["stem", "b"], ["left"], name="left"),
        helper.make_node("MatMul", ["stem", "c"], ["right"], name="right"),
        helper.make_node(
            "If", ["flag"], ["chosen"], name="choose", then_branch=then, else_branch=other
        ),
        helper.make_node("MatMul", ["chosen", "a"], ["again"], name="again"),
        helper.make_node("Add", ["again", "one"], ["y"], name="sum"),
    ]
    weights = {**WEIGHTS, "one": np.ones(1, np.float32)}
    model = om.model(nodes, {"x": x, "flag": ("bool", ())}, {"y": x, "chosen": x}, weights)
    model.metadata_props.add(key="author", value="somebody")
    return model


PLACES = {"stem": 0, "left": 1, "right": 2, "choose": 1, "again": 0, "sum": 2}


def facts(model: onnx.ModelProto) -> object:
    nodes = {node.name: node.SerializeToString(deterministic=True) for node in model.graph.node}
    weights = {t.name: numpy_helper.to_array(t).tobytes() for t in model.graph.initializer}
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    ends = [*model.graph.input], [*model.graph.output]
    return nodes, weights, metadata, opsets, ends, model.graph.name


def test_whole_operators_are_the_model_again(tmp_path: Path) -> None:
    model = branches()
    emit_placed(model, PLACES, tmp_path)
    assert facts(joined(tmp_path)) == facts(model)


@pytest.mark.parametrize("name", CASES)
def test_communications_become_local_nodes(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    emit(case.programs, case.graph, tmp_path)
    check(case, run_whole(joined(tmp_path), None, case.inputs))


@pytest.mark.parametrize("opset", [7, 9, 11])
def test_parts_are_cut_and_joined_in_old_operator_sets(opset: int, tmp_path: Path) -> None:
    case = hand.all_to_all()
    emit(case.programs, replace(case.graph, opsets={"": opset}), tmp_path)
    check(case, run_whole(joined(tmp_path), None, case.inputs))


def written_parts(tmp_path: Path) -> Path:
    emit_placed(branches(), PLACES, tmp_path)
    parts = tmp_path / "parts"
    parts.mkdir()
    write_parts(read_ranks(tmp_path), parts)
    return parts


def outputs(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return run_whole(model, None, random_inputs(load_onnx(branches()).graph, 0))


def test_parts_that_onnx_runtime_optimized_are_joined(tmp_path: Path) -> None:
    parts = written_parts(tmp_path)
    for path in sorted(parts.glob("*.onnx")):
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(path)
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    model = joined(tmp_path, parts)
    assert facts(model) != facts(branches())
    for name, array in outputs(branches()).items():
        np.testing.assert_allclose(outputs(model)[name], array, rtol=1e-5, atol=1e-6)


def test_parts_that_were_quantized_are_joined(tmp_path: Path) -> None:
    parts = written_parts(tmp_path)
    for path in sorted(parts.glob("*.onnx")):
        quantize_dynamic(path, path)
    model = joined(tmp_path, parts)
    assert sum(node.op_type == "MatMulInteger" for node in model.graph.node) == 4
    for name, array in outputs(branches()).items():
        assert 0 < np.abs(outputs(model)[name] - array).max() < 0.05 * np.abs(array).max()


def new_input(model: onnx.ModelProto) -> None:
    model.graph.input.extend(om.infos({"more": ("float32", (4, SIZE))}))


def no_output(model: onnx.ModelProto) -> None:
    del model.graph.output[0]


def other_type(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.DOUBLE


def other_size(model: onnx.ModelProto) -> None:
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 5


def other_opset(model: onnx.ModelProto) -> None:
    model.opset_import[0].version = 18


def two_functions(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Neg", ["x"], ["y"])]
    for name in ("y", "x"):
        imports = [helper.make_opsetid("", 17)]
        model.functions.append(helper.make_function("own", "f", ["x"], [name], body, imports))


def unknown_value(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nothing"


def made_inside(model: onnx.ModelProto) -> None:
    del model.graph.input[:1]
    model.graph.node.insert(0, helper.make_node("Neg", ["a"], ["x"]))


def made_twice(model: onnx.ModelProto) -> None:
    model.graph.node.append(model.graph.node[0])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (new_input, "rank0.onnx: input 'more' is new: rank 0 keeps its inputs and outputs"),
        (no_output, "rank0.onnx: output 'stem' is missing: rank 0 keeps"),
        (other_type, "rank0.onnx: 'stem' has another type than float32"),
        (other_size, "rank0.onnx: 'stem' has another type than float32"),
        (other_opset, "rank 1 has another version of operator set '' than a rank before it"),
        (two_functions, "rank 0 has another function 'own::f' than a rank before it"),
        (unknown_value, "rank 0: node 'stem' .MatMul. reads what no rank makes"),
        (made_inside, "rank0.onnx: input 'x' is made inside: rank 0 keeps"),
        (made_twice, "rank0.onnx: value 'stem' is made twice: rank 0 keeps"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: Callable[[onnx.ModelProto], None], why: str, tmp_path: Path
) -> None:
    parts = written_parts(tmp_path)
    model = onnx.load(parts / "rank0.onnx", load_external_data=False)
    change(model)
    (parts / "rank0.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BackendError, match=why) as error:
        joined(tmp_path, parts)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "joined.onnx").exists()


@pytest.mark.parametrize("name", ["rank0.onnx", "rank0.weights"])
def test_parts_that_cannot_be_read_are_refused(name: str, tmp_path: Path) -> None:
    parts = written_parts(tmp_path)
    (parts / name).write_text("nothing")
    with pytest.raises(BackendError, match=r"parts(/rank0\.onnx)?: ") as error:
        joined(tmp_path, parts)
    assert "\n" not in str(error.value)


def test_a_rank_file_is_no_part(tmp_path: Path) -> None:
    emit_placed(branches(), PLACES, tmp_path)
    with pytest.raises(BackendError, match="has communications, so it is a rank file"):
        joined(tmp_path, tmp_path)


def test_what_the_checker_refuses_is_not_written(tmp_path: Path) -> None:
    parts = written_parts(tmp_path)
    model = onnx.load(parts / "rank0.onnx", load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    (parts / "rank0.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(BackendError, match=r"the joined model: .*NoSuchOperator"):
        joined(tmp_path, parts)
    assert not (tmp_path / "joined.onnx").exists()

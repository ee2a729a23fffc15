"""Rank files: what is in them, how they are cut, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from helpers.plans import rank_programs as hand
from helpers.plans.rank_cases import check
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import emit, emit_models
from partitioner.backends.onnx.files.load import load_rank, read_directory
from partitioner.backends.onnx.files.steps import Cut, Segment
from partitioner.backends.onnx.running.simulator import Simulator, run_lockstep
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Opaque
from partitioner.ir.program import (
    Comm,
    CommKind,
    Output,
    Part,
    ProgramError,
    Programs,
    RankProgram,
)
from partitioner.ir.types import TensorType


def one_rank(program: RankProgram, *outputs: tuple[str, TensorType]) -> Programs:
    whole = {part.whole: program.types[name] for name, part in program.inputs.items()}
    return Programs((program,), whole, dict(outputs))


def test_segments_lie_between_communications() -> None:
    case = hand.tensor_parallel()
    first, cut, second = load_rank(emit_models(case.programs, case.graph)[0]).steps
    assert isinstance(first, Segment)
    assert isinstance(cut, Cut)
    assert isinstance(second, Segment)
    assert [node.op_type for node in first.nodes] == ["MatMul", "Relu", "MatMul"]
    assert (first.reads, first.writes, first.constants) == (("x",), ("part",), ("a", "b"))
    assert (cut.comm.source, cut.comm.target, str(cut)) == ("part", "y", "all_reduce 0 for mm")
    assert [node.op_type for node in second.nodes] == ["Slice"]
    assert (second.reads, second.writes) == (("y",), ("own",))


def test_phases_cut_segments_too() -> None:
    type_ = hand.f32(2)
    steps = [hand.op("Neg", "x", "a"), hand.op("Abs", "a", "b"), hand.op("Exp", "b", "c", phase=1)]
    program = hand.rank(
        0,
        steps,
        dict.fromkeys("xabc", type_),
        {"x": Part("x", None)},
        outputs=[Output("c", "c", None)],
    )
    model = load_rank(emit_models(one_rank(program, ("c", type_)), hand.graph())[0])
    segments = [
        (step.phase, step.reads, step.writes) for step in model.steps if isinstance(step, Segment)
    ]
    assert segments == [(0, ("x",), ("b",)), (1, ("b",), ("c",))]
    origins = {
        node.name: {e.key: e.value for e in node.metadata_props} for node in model.proto.graph.node
    }
    assert origins["Exp_c"] == {"partitioner.phase": "1", "partitioner.origin": "whole_Exp"}


def test_a_rank_file_holds_its_parts_only(tmp_path: Path) -> None:
    weight = hand.random(64, 64, seed=3)
    whole = {"W": weight, "small": hand.random(4)}
    types = {"x": hand.f32(1, 32), "rows": hand.f32(16, 64), "columns": hand.f32(32, 32)}
    types |= {"zeros": hand.f32(32, 32), "small": hand.f32(4), "h": hand.f32(1, 32)}
    types |= {"y": hand.f32(1, 32), "rows1": hand.f32(16, 64)}
    program = hand.rank(
        0,
        [hand.op("MatMul", "x columns", "h"), hand.op("MatMul", "h zeros", "y")],
        types,
        {"x": Part("x", None)},
        {
            "rows": Part("W", hand.rows(16, 16, 64)),
            "columns": Part("W", hand.region((32, 32), [(0, 8), (40, 24)])),
            "zeros": Part("W", None, zero=True),
            "small": Part("small", None),
        },
        outputs=[Output("y", "y", None), Output("rows", "r", None), Output("small", "s", None)],
    )
    outputs = (("y", types["y"]), ("r", types["rows"]), ("s", types["small"]))
    emit(one_rank(program, *outputs), hand.graph(whole), tmp_path)
    tensors = {
        t.name: t
        for t in onnx.load(tmp_path / "rank0.onnx", load_external_data=False).graph.initializer
    }
    spans = {
        name: {e.key: e.value for e in tensor.external_data} for name, tensor in tensors.items()
    }
    assert spans["small"] == {}
    assert spans["rows"] == {"location": "rank0.weights", "offset": "0", "length": "4096"}
    assert spans["columns"]["offset"] == "4096"
    assert (tmp_path / "rank0.weights").stat().st_size == 4096 * 3
    stored = np.fromfile(tmp_path / "rank0.weights", np.float32).reshape(3, -1)
    np.testing.assert_array_equal(stored[0], weight[16:32].ravel())
    np.testing.assert_array_equal(stored[1], weight[32:][:, [*range(8), *range(40, 64)]].ravel())
    assert not stored[2].any()
    outputs = run_lockstep(tmp_path, {"x": hand.random(1, 32)})
    np.testing.assert_array_equal(outputs["r"], weight[16:32])
    np.testing.assert_array_equal(outputs["s"], whole["small"])
    np.testing.assert_array_equal(outputs["y"], np.zeros((1, 32), np.float32))


def test_inputs_pass_through_and_literals_are_kept() -> None:
    type_ = hand.f32(2, 3)
    program = hand.rank(
        0,
        [hand.op("Reshape", "x shape", "y")],
        {"x": type_, "shape": TensorType.of("int64", (1,)), "y": hand.f32(6)},
        {"x": Part("x", None)},
        literals={"shape": np.array([6])},
        outputs=[Output("y", "y", None), Output("x", "same", None)],
    )
    case_graph, x = hand.graph(), hand.random(2, 3)
    models = emit_models(one_rank(program, ("y", hand.f32(6)), ("same", type_)), case_graph)
    onnx.checker.check_model(models[0], full_check=True)
    outputs = run_lockstep(models, {"x": x})
    np.testing.assert_array_equal(outputs["y"], x.ravel())
    np.testing.assert_array_equal(outputs["same"], x)


def test_bodies_read_outer_values_by_their_local_names() -> None:
    body = onnx.helper.make_graph(
        [onnx.helper.make_node("Neg", ["v"], ["r"])],
        "body",
        [],
        [onnx.helper.make_tensor_value_info("r", 1, [2])],
    )
    attrs = {
        f"{which}_branch": Opaque("GraphProto", body.SerializeToString())
        for which in ("then", "else")
    }
    step = hand.op("If", "c", "y", **attrs)
    node = type(step.node)("if", "If", ("c",), ("y",), attrs, captures=("v@0",))
    types = {"c": TensorType.of("bool", ()), "x": hand.f32(2), "v@0": hand.f32(2), "y": hand.f32(2)}
    cut = hand.op("Identity", "x", "v@0")
    later = type(step)(node, "if", 1, (("v", "v@0"),))
    program = hand.rank(
        0,
        [cut, later],
        types,
        {"c": Part("c", None), "x": Part("x", None)},
        outputs=[Output("y", "y", None)],
    )
    models = emit_models(one_rank(program, ("y", hand.f32(2))), hand.graph())
    onnx.checker.check_model(models[0], full_check=True)
    second = load_rank(models[0]).steps[1]
    assert isinstance(second, Segment)
    assert second.reads == ("c", "v@0")
    x = hand.random(2)
    np.testing.assert_array_equal(run_lockstep(models, {"c": np.array(True), "x": x})["y"], -x)


def test_intermediate_values_on_request() -> None:
    case = hand.tensor_parallel()
    keep = {0: ["r", "a"], 1: ["x"]}
    (result,) = Simulator(emit_models(case.programs, case.graph), keep=keep).run([case.inputs])
    check(case, dict(result.outputs))
    assert {rank: list(values) for rank, values in result.values.items()} == keep
    a = case.graph.constants["A"].load()
    np.testing.assert_array_equal(result.values[0]["a"], a[:, :5])
    np.testing.assert_allclose(
        result.values[0]["r"], np.maximum(case.inputs["x"] @ a[:, :5], 0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(result.values[1]["x"], case.inputs["x"])


@pytest.mark.parametrize("opset", [7, 8, 9, 13, 21])
def test_stubs_and_slices_exist_in_every_operator_set(opset: int) -> None:
    case = hand.all_gather()
    graph = hand.graph(opset=opset)
    for model in emit_models(case.programs, graph):
        ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        onnx.checker.check_model(model, full_check=True)
        assert model.ir_version == 10
        assert [(o.domain, o.version) for o in model.opset_import] == [
            ("", opset),
            ("partitioner", 1),
        ]
    check(case, run_lockstep(emit_models(case.programs, graph), case.inputs))
    sliced = slicing(hand.region([(0, 1), (4, 1)], (1, 2)), (2, 2))
    outputs = run_lockstep(emit_models(sliced, graph), {"x": (x := hand.random(5, 4))})
    np.testing.assert_array_equal(outputs["y"], x[[0, 4], 1:3])


def slicing(read: object, shape: tuple[int, int], write: object = None) -> Programs:
    place = write if write is not None else hand.rows(0, *shape)
    transfer = Transfer(0, 0, read, place)  # type: ignore[arg-type]
    comm = Comm(3, CommKind.SLICE, (0,), "x", "y", "float32", (transfer,))
    program = hand.rank(
        0,
        [comm],
        {"x": hand.f32(5, 4), "y": hand.f32(*shape)},
        {"x": Part("x", None)},
        outputs=[Output("y", "y", None)],
    )
    return one_rank(program, ("y", hand.f32(*shape)))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([0, 1, 2, 3, 4], [0, 1, 2, 3]),
        ([2, 3], [0, 1, 2, 3]),
        ([1, 2], [3]),
        ([0, 2, 4], [0, 3]),
        ([4, 0], [1]),
        ([], [0]),
    ],
)
def test_local_slices(rows: list[int], columns: list[int]) -> None:
    read = tuple(tuple((index, 1) for index in dim) for dim in (rows, columns))
    models = emit_models(slicing(read, (len(rows), len(columns))), hand.graph())
    onnx.checker.check_model(models[0], full_check=True)
    x = hand.random(5, 4)
    outputs = run_lockstep(models, {"x": x})
    np.testing.assert_array_equal(outputs["y"], x[np.ix_(rows, columns)] if rows else x[:0, :1])


def test_programs_that_would_deadlock_are_not_written(tmp_path: Path) -> None:
    case = hand.pipeline()
    wrong = Programs(case.programs.ranks[:1], case.programs.inputs, case.programs.outputs)
    with pytest.raises(ProgramError, match="communication 0 wants ranks"):
        emit(wrong, case.graph, tmp_path)
    assert list(tmp_path.iterdir()) == []


def rewrite(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change a rank file."""
    model = onnx.load(path, load_external_data=False)
    change(model)
    path.write_bytes(model.SerializeToString())


def drop_comm(model: onnx.ModelProto) -> None:
    del model.graph.node[3]
    model.graph.node[2].output[:] = ["y"]


def swap(model: onnx.ModelProto) -> None:
    first = onnx.NodeProto()
    first.CopyFrom(model.graph.node[1])
    model.graph.node[1].CopyFrom(model.graph.node[2])
    model.graph.node[2].CopyFrom(first)


def lose_metadata(model: onnx.ModelProto) -> None:
    del model.metadata_props[:]


def newer(model: onnx.ModelProto) -> None:
    model.metadata_props[0].value = "99"


def repeat(model: onnx.ModelProto) -> None:
    """The communication twice in a row, and counted twice."""
    index, node = next(
        (at, n) for at, n in enumerate(model.graph.node) if n.domain == "partitioner"
    )
    model.graph.node.insert(index, node)
    program = next(e for e in model.metadata_props if e.key == "partitioner.program")
    program.value = program.value.replace('"comms":1', '"comms":2')


def garble(model: onnx.ModelProto) -> None:
    model.metadata_props[1].value = '{"rank": 0}'


def far(model: onnx.ModelProto) -> None:
    model.metadata_props[1].value = model.metadata_props[1].value.replace('"float32"', "[4]")


def other_rank(model: onnx.ModelProto) -> None:
    model.metadata_props[1].value = model.metadata_props[1].value.replace('"rank":0', '"rank":1')


def unknown_kind(model: onnx.ModelProto) -> None:
    node = next(n for n in model.graph.node if n.domain == "partitioner")
    next(a for a in node.attribute if a.name == "kind").s = b"gossip"


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (hand.tensor_parallel, drop_comm, "rank 0: the file holds 0 communications, not 1"),
        (hand.pipeline, swap, r"rank 0: communications are out of order: \[1, 0, 2, 3\]"),
        (hand.tensor_parallel, repeat, r"rank 0: communications are out of order: \[0, 0\]"),
        (hand.pipeline, lose_metadata, "rank0.onnx is not a rank file: its metadata lacks"),
        (hand.pipeline, newer, "rank0.onnx has format version 99, this is 2"),
        (hand.pipeline, garble, "rank0.onnx: metadata 'partitioner.program': 'whole_inputs'"),
        (hand.pipeline, far, r"rank0.onnx: metadata 'partitioner.program': \[4\] is not text"),
        (hand.pipeline, other_rank, "rank0.onnx says that it is of rank 1"),
        (hand.pipeline, unknown_kind, "rank 0: communication 'partitioner.comm0': 'gossip' is not"),
    ],
)
def test_changed_files_are_refused(
    make: Callable[[], hand.Case],
    change: Callable[[onnx.ModelProto], None],
    message: str,
    tmp_path: Path,
) -> None:
    case = make()
    emit(case.programs, case.graph, tmp_path)
    rewrite(tmp_path / "rank0.onnx", change)
    with pytest.raises(BackendError, match=message):
        load_rank(tmp_path / "rank0.onnx")


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    case = hand.pipeline()
    emit(case.programs, case.graph, tmp_path)
    (tmp_path / "rank1.onnx").write_bytes(b"no model")
    with pytest.raises(BackendError, match=r"rank1\.onnx: "):
        read_directory(tmp_path)
    (tmp_path / "rank1.onnx").unlink()
    with pytest.raises(BackendError, match=r"rank1\.onnx: .*No such file"):
        read_directory(tmp_path)


def test_ranks_that_wait_for_each_other_are_named() -> None:
    case = hand.pipeline()
    models = emit_models(case.programs, case.graph)
    program = next(e for e in models[0].metadata_props if e.key == "partitioner.program")
    program.value = program.value.replace('"comms":4', '"comms":3')
    models[0].graph.node.remove(models[0].graph.node[1])  # rank 0 does not send "n"
    with pytest.raises(
        BackendError,
        match=r"the ranks deadlock: rank 0 waits for send 2 \(pass 0\); rank 1 waits for send 0",
    ):
        run_lockstep(models, case.inputs)


def test_an_all_reduce_cannot_end_in_a_later_phase() -> None:
    case = hand.all_reduce("float32")
    models = emit_models(case.programs, case.graph)
    node = next(n for n in models[0].graph.node if n.domain == "partitioner")
    next(a for a in node.attribute if a.name == "target_phase").i = 1
    with pytest.raises(BackendError, match="all_reduce 7 for test cannot end in a later phase"):
        load_rank(models[0])


def attribute(model: onnx.ModelProto, seq: int, name: str) -> onnx.AttributeProto:
    """An attribute of a communication."""
    node = next(n for n in model.graph.node if n.name == f"partitioner.comm{seq}")
    return next(a for a in node.attribute if a.name == name)


def later(model: onnx.ModelProto) -> None:
    attribute(model, 2, "target_phase").i += 1


def earlier(model: onnx.ModelProto) -> None:
    attribute(model, 2, "phase").i = -1


def never(model: onnx.ModelProto) -> None:
    attribute(model, 2, "target_phase").i = 10**9


def other_ranks(model: onnx.ModelProto) -> None:
    attribute(model, 2, "ranks").ints[:] = [0, 2]


def other_type(model: onnx.ModelProto) -> None:
    attribute(model, 2, "dtype").i = onnx.TensorProto.FLOAT16


def fewer_rows(model: onnx.ModelProto) -> None:
    rows = attribute(model, 2, "transfers")
    assert b"[[0,4]]" in rows.s, rows.s
    rows.s = rows.s.replace(b"[[0,4]]", b"[[0,3]]", 1)


def outside(model: onnx.ModelProto) -> None:
    rows = attribute(model, 2, "transfers")
    rows.s = rows.s.replace(b"[[0,4]]", b"[[1,4]]")


def without_it(model: onnx.ModelProto) -> None:
    program = next(e for e in model.metadata_props if e.key == "partitioner.program")
    program.value = program.value.replace('"comms":4', '"comms":3')
    node = next(n for n in model.graph.node if n.name == "partitioner.comm2")
    node.ClearField("domain")
    node.op_type = "Identity"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (later, "rank1.onnx and rank0.onnx differ in communication 2: target phase "),
        (earlier, "rank0.onnx: phases -1 to . of send 2 .*are not in order within 0 to"),
        (never, "rank0.onnx: phases . to 1000000000 of send 2 .*are not in order within 0 to"),
        (other_ranks, r"communication 2: ranks \(0, 1\) and \(0, 2\)"),
        (other_type, "communication 2: type float32 and float16"),
        (fewer_rows, "rank1.onnx and rank0.onnx differ in communication 2: what goes from 1 to 0"),
        (outside, r"rank 0: communication 'partitioner.comm2': region .* is not within float32"),
        (without_it, r"communication 2 is of ranks \[0, 1\], but is in the files of \[1\]"),
    ],
)
def test_files_that_disagree_are_refused_before_a_process_starts(
    change: Callable[[onnx.ModelProto], None], message: str, tmp_path: Path
) -> None:
    case = hand.pipeline()
    emit(case.programs, case.graph, tmp_path)
    assert len(read_directory(tmp_path)) == 2
    rewrite(tmp_path / "rank0.onnx", change)
    with pytest.raises(BackendError, match=message):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("1", "rank 0: 'n' is made in phase 1, but read in phase 0"),
        ("-1", "rank 0: node '.*' has phase '-1'"),
        ("x", "rank 0: node '.*' has phase 'x'"),
    ],
)
def test_a_node_in_a_wrong_phase_is_refused(phase: str, message: str) -> None:
    case = hand.pipeline()
    model = emit_models(case.programs, case.graph)[0]
    node = next(n for n in model.graph.node if "n" in n.output)
    del node.metadata_props[:]
    node.metadata_props.add(key="partitioner.phase", value=phase)
    with pytest.raises(BackendError, match=message):
        load_rank(model)


def undelivered(data: dict[str, Any]) -> None:
    data["outputs"] = []


def wider(data: dict[str, Any]) -> None:
    data["whole_outputs"]["y"][1][0] += 1


def part(data: dict[str, Any]) -> None:
    data["inputs"]["x"][1] = [[[0, 1]], [[0, 1]]]


def out_of_bounds(data: dict[str, Any]) -> None:
    data["inputs"]["x"][1] = [[[1, 99]], [[0, 1]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (undelivered, r"the ranks deliver 0 elements of output 'y', which is float32"),
        (wider, r"the ranks deliver 8 elements of output 'y', which is float32\[5,2\]"),
        (part, r"rank 0: 'x' is float32\[4,6\], but its part is float32\[1,1\]"),
        (out_of_bounds, r"region \[\[\[1, 99\]\], \[\[0, 1\]\]\] is not within float32\[4,6\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    case = hand.tensor_parallel()
    emit(case.programs, case.graph, tmp_path)
    assert len(read_directory(tmp_path)) == 2

    def change_header(model: onnx.ModelProto) -> None:
        entry = next(e for e in model.metadata_props if e.key == "partitioner.program")
        data = json.loads(entry.value)
        change(data)
        entry.value = json.dumps(data)

    for path in sorted(tmp_path.glob("*.onnx")):
        rewrite(path, change_header)
    with pytest.raises(BackendError, match=message):
        read_directory(tmp_path)

"""Every refusal of the front end says where, what, and what would be right."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import partitioner
from helpers.onnx_files import onnx_models as om
from partitioner.cli.main import main
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.inferring.dims import bind_dims, evaluate
from partitioner.frontends.onnx.load import load_onnx

F32 = "float32"
NO_DIMS: dict[str, int] = {}


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def relu(dims: om.Dims, dtype: str = F32) -> onnx.ModelProto:
    return om.model([node("Relu", "x", "y")], {"x": (dtype, dims)}, {"y": (dtype, None)})


def refused(message: str) -> "pytest.RaisesExc[FrontendError]":
    return pytest.raises(FrontendError, match=re.escape(message))


@pytest.mark.parametrize(
    ("dims", "shapes", "message"),
    [
        ({}, {}, "input has dims without a size: x[b, s, 3]; pass --dim b=N --dim s=N"),
        ({"b": 2}, {}, "input has dims without a size: x[b, s, 3]; pass --dim s=N"),
        ({"q": 2}, {}, "--dim q=2: no input has that dim (dims: b, s)"),
        ({"b": 2.5}, {}, "--dim b=2.5: a size is a whole number of at least 0"),
        ({}, {"x": 3}, "shape of 'x' is 3; give its sizes, as (2, 16)"),
        ({}, {"x": (1, "2", 3)}, "--shape x=1,2,3: a size is a whole number of at least 0"),
        (5, {}, "dims is 5; give sizes by name, as a dict"),
        ({"b": -1}, {}, "--dim b=-1: a size is a whole number of at least 0"),
        ({}, {"z": (1,)}, "--shape z=1: no input has that name (inputs: x), nor has a result"),
        ({}, {"x": (1, -2, 3)}, "--shape x=1,-2,3: a size is a whole number of at least 0"),
        ({}, {"x": (1, 2)}, "--shape x=1,2: 2 dims, but the input is x[b, s, 3]"),
        ({}, {"x": (1, 2, 4)}, "--shape x=1,2,4: dim 2 is 4, but the model fixes it to 3"),
        ({"b": 4}, {"x": (1, 2, 3)}, "--shape x=1,2,3: dim 0 (b) is 1, but --dim b=4 makes it 4"),
    ],
)
def test_sizes_that_do_not_fit(
    dims: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], message: str
) -> None:
    with refused(f"model 'built': {message}"):
        load_onnx(relu(["b", "s", 3]), dims, shapes)


def test_two_inputs_that_disagree_on_a_symbol() -> None:
    declared = {"x": ("b", 2), "mask": ("b", "s")}
    with refused("--shape mask=4,2: dim 0 (b) is 4, but --shape x=3,2 makes it 3"):
        bind_dims(declared, {}, {"x": (3, 2), "mask": (4, 2)})


def test_inputs_without_any_symbol_to_name() -> None:
    declared = {"x": (None, 3), "y": None, "z": (2,)}
    message = "inputs have dims without a size: x[?, 3], y[...]; pass --shape x=N,3 --shape y=..."
    with refused(message):
        bind_dims(declared, {}, {})
    bound = bind_dims(declared, {}, {"x": (5, 3), "y": (1, 2)})
    assert bound.shapes == {"x": (5, 3), "y": (1, 2), "z": (2,)}


def test_a_shape_of_one_input_closes_the_symbols_of_others() -> None:
    declared = {"ids": ("b", "s"), "mask": ("b", "past + s"), "past": ("b", 4, "past", 8)}
    bound = bind_dims(declared, {"past": 3}, {"ids": (2, 5)})
    assert bound.shapes == {"ids": (2, 5), "mask": (2, 8), "past": (2, 4, 3, 8)}
    assert bound.symbols == {"past": 3, "b": 2, "s": 5, "past + s": 8}


def test_an_expression_of_unbound_symbols_has_no_size() -> None:
    assert evaluate("a + b", {"a": 1}) is None
    assert evaluate("a + b", {"a": 1, "b": 2}) == 3
    assert evaluate("not an expression!", {"a": 1}) is None
    assert evaluate(None, {}) is None


@pytest.mark.parametrize("opset", [0, 27])
def test_opsets_out_of_range(opset: int) -> None:
    proto = relu([2])
    proto.opset_import[0].version = opset
    with refused(f"model 'built': opset {opset} is not in 1..26; convert it with"):
        load_onnx(proto)


def test_two_opsets() -> None:
    proto = relu([2])
    proto.opset_import.append(helper.make_opsetid("ai.onnx", 18))
    with refused("imports ai.onnx in opsets [17, 18]; keep one"):
        load_onnx(proto)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"no model", "not an ONNX model"), (b"", "not an ONNX model (it holds no graph)")],
)
def test_files_that_are_no_models(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with refused(f"{path}: {message}"):
        load_onnx(path)


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with refused(f"{tmp_path}: not a regular file; pass an .onnx file"):
        load_onnx(tmp_path)
    with refused(f"{tmp_path / 'none.onnx'}: cannot be read (No such file or directory)"):
        load_onnx(str(tmp_path / "none.onnx"))


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(2**31)  # sparse: takes no space
    with refused("2147483648 bytes, but an ONNX file has at most 2147483647; larger models"):
        load_onnx(path)


def test_an_invalid_model_is_refused_on_one_line() -> None:
    proto = om.model([node("Relu", "nothing", "y")], {}, {"y": (F32, [2])})
    with pytest.raises(FrontendError, match="model 'built': not a valid ONNX model: ") as caught:
        load_onnx(proto)
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_name_the_node() -> None:
    proto = om.model(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mm")],
        {"x": (F32, [2, 3])},
        {"y": (F32, None)},
        {"w": np.zeros((4, 5), np.float32)},
    )
    with pytest.raises(FrontendError, match=r"shapes do not fit: .*mm"):
        load_onnx(proto)


def test_a_shape_that_depends_on_data() -> None:
    proto = om.model([node("NonZero", "x", "y")], {"x": (F32, [3])}, {"y": ("int64", None)})
    message = "tensor 'y' of node 'NonZero_0' (NonZero) has shape [1, ?], which is not static"
    with refused(message):
        load_onnx(proto)


def test_a_loop_whose_carried_shape_grows() -> None:
    loop = om.body(
        [node("Concat", "v one", "grown", axis=0), node("Identity", "cond", "go")],
        {"i": ("int64", []), "cond": ("bool", []), "v": (F32, None)},
        {"go": ("bool", []), "grown": (F32, None)},
    )
    proto = om.model(
        [node("Loop", "trips yes x", "y", body=loop)],
        {"x": (F32, [1])},
        {"y": (F32, None)},
        {"trips": np.array(3), "yes": np.array(True), "one": np.zeros(1, np.float32)},
    )
    with refused("node 'Loop_0' (Loop) carries 'v' of shape [1] into an iteration and [2] out"):
        load_onnx(proto)


def test_a_loop_that_stacks_as_many_results_as_it_runs() -> None:
    loop = om.body(
        [
            node("Neg", "v", "next"),
            node("ReduceMax", "v", "top", keepdims=0),
            node("Cast", "top", "go", to=9),
        ],
        {"i": ("int64", []), "cond": ("bool", []), "v": (F32, [2])},
        {"go": ("bool", []), "next": (F32, [2]), "top": (F32, [])},
    )
    proto = om.model(
        [node("Loop", "trips yes x", "y tops", body=loop)],
        {"x": (F32, [2])},
        {"y": (F32, [2]), "tops": (F32, ["n"])},
        {"trips": np.array(3), "yes": np.array(True)},
    )
    with refused(
        "node 'Loop_0' (Loop) stacks 'tops' over as many iterations as its condition allows"
    ):
        load_onnx(proto)


def test_a_custom_op_without_declared_results() -> None:
    twirl = helper.make_node("Twirl", ["x"], ["h"], domain="acme")
    proto = om.model(
        [twirl, node("Relu", "h", "y")], {"x": (F32, [2])}, {"y": (F32, None)}, domains=["acme"]
    )
    with refused("tensor 'h' of node 'Twirl_0' (Twirl) has no known element type; declare it"):
        load_onnx(proto)
    proto.graph.value_info.extend(om.infos({"h": (F32, None)}))
    with refused("tensor 'h' of node 'Twirl_0' (Twirl) has no known shape"):
        load_onnx(proto)


def test_strings_sequences_and_sparse_weights() -> None:
    proto = om.model([node("Identity", "x", "y")], {"x": ("string", [2])}, {"y": ("string", [2])})
    with refused("tensor 'x' has elements of STRING, which are not supported"):
        load_onnx(proto)
    proto = om.model(
        [node("SequenceConstruct", "x", "q"), node("SequenceLength", "q", "y")],
        {"x": (F32, [2])},
        {"y": ("int64", [])},
    )
    with refused("tensor 'q' of node 'SequenceConstruct_0' (SequenceConstruct) is a SequenceType"):
        load_onnx(proto)
    proto = relu([2])
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [2]))
    proto.graph.input.append(helper.make_value_info("q", sequence))
    with refused("input 'q' is not a tensor"):
        load_onnx(proto)
    proto = relu([2])
    values = helper.make_tensor("s", TensorProto.FLOAT, [1], [1.0])
    places = helper.make_tensor("p", TensorProto.INT64, [1], [1])
    proto.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4]))
    with refused("initializer 's' is sparse; store it as a dense tensor"):
        load_onnx(proto)


def _external(folder: Path, **entries: str) -> Path:
    proto = om.model(
        [node("Add", "x w", "y")],
        {"x": (F32, [4])},
        {"y": (F32, [4])},
        {"w": np.zeros(4, np.float32)},
    )
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in ({"location": "w.bin"} | entries).items():
        weight.external_data.add(key=key, value=value)
    (folder / "w.bin").write_bytes(bytes(16))
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "4"}, "ends at byte 20 of 'w.bin', which has 16"),
        ({"length": "12"}, "needs 16 bytes, its external data has length 12"),
        ({"offset": "-4"}, "has external data offset '-4', not a count of bytes"),
        ({"place": "1"}, "has external data keys ['place'], which ONNX does not define"),
        ({"location": "none.bin"}, "none.bin is missing (--plan-only"),
        ({"location": "../w.bin"}, "names external file '../w.bin', not one in "),
        ({"location": "/etc/passwd"}, "names external file '/etc/passwd', not one in "),
        ({"location": "w.bin\0x"}, "not one in "),
        ({"location": ""}, "names external file '', not one in "),
        ({"location": "."}, "is not a regular file"),
        ({"location": "link.bin"}, "names external file 'link.bin', which is a link"),
        ({"location": "linked/w.bin"}, "names external file 'linked/w.bin', which is a link"),
    ],
)
def test_external_data_that_may_not_be_read(
    tmp_path: Path, entries: dict[str, str], message: str
) -> None:
    path = _external(tmp_path, **entries)
    (tmp_path / "link.bin").symlink_to(tmp_path / "w.bin")
    (tmp_path / "linked").symlink_to(tmp_path)
    with pytest.raises(FrontendError, match=r"tensor 'w'.*" + re.escape(message)):
        load_onnx(path)


def test_external_data_that_may_be_read(tmp_path: Path) -> None:
    graph = load_onnx(_external(tmp_path, offset="0", length="16")).graph
    assert graph.constants["w"].load().nbytes == 16


def cached(folder: Path) -> Path:
    """The model as Hugging Face's cache holds it: links to blobs."""
    path = _external(folder)
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    for file, blob in ((path, "1f"), (folder / "w.bin", "2f")):
        file.rename(folder / "blobs" / blob)
        (folder / "snapshot" / file.name).symlink_to(f"../blobs/{blob}")
    return folder / "snapshot" / path.name


def test_links_beside_a_model_that_is_a_link(tmp_path: Path) -> None:
    path = cached(tmp_path)
    compiled = partitioner.compile(path, devices=2, cluster="2xideal")
    assert compiled.name == path.stem
    folder = compiled.save(tmp_path / "out")
    assert partitioner.load(folder).verify_written(folder).equal


def test_links_to_another_folder(tmp_path: Path) -> None:
    path = cached(tmp_path)
    (tmp_path / "other").write_bytes(bytes(16))
    (path.parent / "w.bin").unlink()
    (path.parent / "w.bin").symlink_to("../other")
    with pytest.raises(FrontendError, match=r"tensor 'w' names external file 'w.bin', .* a link"):
        load_onnx(path)


def test_a_plan_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _external(tmp_path)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(FrontendError, match=r"tensor 'w': external file .*w.bin is missing"):
        load_onnx(path)
    out = tmp_path / "out"
    assert main([str(path), "--devices", "2", "--plan-only", "-o", str(out)]) == 0
    note = f"{tmp_path / 'w.bin'} is missing: 1 weight is planned by size alone"
    assert note in capsys.readouterr().out
    assert main(["show", str(out)]) == 0
    loaded = partitioner.load(out)
    with pytest.raises(FrontendError, match=r"weight 'w' lies in .*w.bin, which is missing"):
        loaded.verify()
    with pytest.raises(FrontendError, match=r"weight 'w' lies in .*w.bin, which is missing"):
        loaded.save(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_what_missing_weights_would_tell(tmp_path: Path) -> None:
    """The shape that a Reshape takes."""
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    sizes = {"s": np.array([3, 2])}
    proto = om.model([node], {"x": ("float32", [2, 3])}, {"y": ("float32", None)}, sizes)
    path = tmp_path / "m.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    message = r"'y' of node .* is not static: .*w.bin, which is missing, may tell\)"
    with pytest.raises(FrontendError, match=message):
        load_onnx(path, plan_only=True)


def test_external_data_of_a_model_without_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX's checker reads the message, and looks for no file in the working directory."""
    path = _external(tmp_path)
    proto = onnx.load(path, load_external_data=False)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(proto, path)
    monkeypatch.chdir("/")
    load_onnx(path)


def test_external_data_of_a_model_in_memory(tmp_path: Path) -> None:
    proto = onnx.load(_external(tmp_path), load_external_data=False)
    with refused("lies in an external file, but the model was given in memory; pass the model's"):
        load_onnx(proto)


def _functions(*calls: tuple[str, str]) -> onnx.ModelProto:
    """Functions that each call another one twice, one after the other; the first is run."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    functions = []
    for name, callee in calls:
        domain = "local" if callee != "Relu" else ""
        first = helper.make_node(callee, ["a"], ["m"], domain=domain)
        second = helper.make_node(callee, ["m"], ["b"], domain=domain)
        functions.append(
            helper.make_function("local", name, ["a"], ["b"], [first, second], imports)
        )
    return om.model(
        [helper.make_node(calls[0][0], ["x"], ["y"], domain="local")],
        {"x": (F32, [2])},
        {"y": (F32, [2])},
        domains=["local"],
        functions=functions,
    )


def test_functions_that_call_themselves() -> None:
    with pytest.raises(FrontendError, match=r"functions call themselves: local::[AB] -> local::"):
        load_onnx(_functions(("A", "B"), ("B", "A")))


def test_functions_that_inline_to_a_bomb() -> None:
    calls = [(f"F{k}", f"F{k + 1}") for k in range(27)] + [("F27", "Relu")]
    with refused("inlining its functions gives 536,870,910 nodes, over 40,000"):
        load_onnx(_functions(*calls))

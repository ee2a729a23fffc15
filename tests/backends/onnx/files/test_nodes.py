"""IR pieces become ONNX messages without loss."""

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper

from partitioner.backends.onnx.files.messages import node_proto, tensor_proto, value_info
from partitioner.ir.errors import IRError
from partitioner.ir.graph import Node, Opaque
from partitioner.ir.types import DTYPE_BITS, TensorType, from_onnx_dtype, numpy_dtype, onnx_dtype


@pytest.mark.parametrize("dtype", DTYPE_BITS)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (3, 5)])
def test_tensors_of_every_type_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.asarray(np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape)
    array = array.astype(numpy_dtype(dtype))
    proto = tensor_proto("t", array, dtype)
    assert from_onnx_dtype(proto.data_type) == dtype
    read = numpy_helper.to_array(proto)
    assert (read.shape, read.dtype) == (shape, array.dtype)
    np.testing.assert_array_equal(read, array)


def test_tensors_that_are_views() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for view in (array.T, np.broadcast_to(np.float32(2), (4, 5)), array[:, 1:]):
        read = numpy_helper.to_array(tensor_proto("t", view, "float32"))
        np.testing.assert_array_equal(read, view)


def test_type_numbers_are_onnx_own() -> None:
    names = {"float32": "FLOAT", "float64": "DOUBLE"}
    for dtype in DTYPE_BITS:
        number = onnx.TensorProto.DataType.Value(names.get(dtype, dtype.upper()))
        assert onnx_dtype(dtype) == number


def test_attributes_of_every_kind() -> None:
    attrs = {
        "i": 3,
        "f": 0.5,
        "s": "text",
        "ints": (1, 2),
        "floats": (1.0, 2.0),
        "strings": ("a", "b"),
        "tensor": np.ones(2, np.float32),
        "none": (),
        "rest": Opaque("AttributeProto", helper.make_attribute("rest", [1]).SerializeToString()),
    }
    proto = node_proto(Node("n", "acme::Op", ("x", "", "w"), ("y", ""), attrs))
    assert (proto.name, proto.op_type, proto.domain) == ("n", "Op", "acme")
    assert (list(proto.input), list(proto.output)) == (["x", "", "w"], ["y", ""])
    written = {a.name: a for a in proto.attribute}
    types = {name: AttributeProto.AttributeType.Name(a.type) for name, a in written.items()}
    assert types == {
        "i": "INT",
        "f": "FLOAT",
        "s": "STRING",
        "ints": "INTS",
        "floats": "FLOATS",
        "strings": "STRINGS",
        "tensor": "TENSOR",
        "none": "INTS",
        "rest": "INTS",
    }
    assert helper.get_attribute_value(written["ints"]) == [1, 2]


def test_an_empty_list_takes_its_type_from_the_schema() -> None:
    upsample = node_proto(Node("n", "RNN", (), (), {"activation_alpha": ()}))
    assert upsample.attribute[0].type == AttributeProto.FLOATS


def test_value_info_holds_sizes() -> None:
    info = value_info("v", TensorType.of("bfloat16", (2, 0)))
    assert info.type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert [dim.dim_value for dim in info.type.tensor_type.shape.dim] == [2, 0]
    assert value_info("s", TensorType.of("float32", ())).type.tensor_type.HasField("shape")


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(IRError, match="tensor 't' holds float32 elements, not int64"):
        tensor_proto("t", np.zeros(1, np.float32), "int64")
    with pytest.raises(IRError, match="element type 'text' is not one of float32, uint8"):
        onnx_dtype("text")
    with pytest.raises(IRError, match="ONNX element type 8 is not one of"):
        from_onnx_dtype(8)
    with pytest.raises(IRError, match="attribute 'a' is opaque data of kind 'fx'"):
        node_proto(Node("n", "Op", (), (), {"a": Opaque("fx", b"")}))

"""Random inputs lie where the model can read them, by dataflow and never by name."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import load_onnx

F32 = "float32"
MANY = 4000


def node(op: str, reads: str, makes: str, **attrs: object) -> onnx.NodeProto:
    return helper.make_node(op, reads.split(), makes.split(), **attrs)


def drawn(proto: onnx.ModelProto, name: str = "a", seed: int = 0) -> om.Array:
    graph = load_onnx(proto).graph
    inputs = random_inputs(graph, seed)
    for value, array in inputs.items():
        type_ = graph.types[value]
        assert (array.shape, array.dtype.name) == (type_.shape, type_.dtype)
    om.run(om.to_proto(graph), inputs)
    return inputs[name]


def lookup(*before: onnx.NodeProto, reads: str = "a", opset: int = 17) -> onnx.ModelProto:
    """Nodes from `a` int64 (MANY) to an index of a table of 11 rows."""
    return om.model(
        [*before, node("Gather", f"table {reads}", "rows", axis=0)],
        {"a": ("int64", [MANY])},
        {"rows": (F32, None)},
        {
            "table": np.zeros((11, 3), np.float32),
            "one": np.array([1]),
            "offsets": np.array([2]),
            "shape": np.array([MANY // 2, 2]),
        },
        opset=opset,
    )


def test_indices_cover_the_table_and_no_more() -> None:
    assert set(np.unique(drawn(lookup()))) == set(range(11))


@pytest.mark.parametrize(
    "chain",
    [
        [node("Cast", "a", "m", to=6)],
        [node("Cast", "a", "l", to=6), node("Reshape", "l shape", "m")],
        [node("Unsqueeze", "a one", "m")],
        [node("Concat", "a one", "m", axis=0)],
    ],
)
def test_indices_are_followed_through_moves(chain: list[onnx.NodeProto]) -> None:
    assert set(np.unique(drawn(lookup(*chain, reads="m")))) == set(range(11))


@pytest.mark.parametrize(
    ("chain", "low", "high"),
    [
        (node("Add", "a offsets", "m"), 0, 9),
        (node("Add", "offsets a", "m"), 0, 9),
        (node("Sub", "a offsets", "m"), 2, 13),
    ],
)
def test_shifted_indices(chain: onnx.NodeProto, low: int, high: int) -> None:
    assert set(np.unique(drawn(lookup(chain, reads="m")))) == set(range(low, high))


def test_the_smallest_of_two_tables_and_an_equality_test() -> None:
    proto = om.model(
        [
            node("Gather", "wide a", "x", axis=1),
            node("Gather", "short a", "y", axis=0),
            node("Equal", "a one", "z"),
        ],
        {"a": ("int64", [MANY])},
        {"x": (F32, None), "y": (F32, None), "z": ("bool", None)},
        {
            "wide": np.zeros((2, 9), np.float32),
            "short": np.zeros(5, np.float32),
            "one": np.array(1),
        },
    )
    assert set(np.unique(drawn(proto))) == set(range(5))


def test_gather_nd_and_scatter_elements() -> None:
    proto = om.model(
        [
            node("GatherND", "table a", "x"),
            node("ScatterElements", "row b updates", "y", axis=0),
        ],
        {"a": ("int64", [MANY, 2]), "b": ("int64", [3])},
        {"x": (F32, None), "y": (F32, None)},
        {
            "table": np.zeros((7, 4, 2), np.float32),
            "row": np.zeros(6, np.float32),
            "updates": np.zeros(3, np.float32),
        },
    )
    assert set(np.unique(drawn(proto))) == set(range(4))
    assert drawn(proto, "b").max() < 6


@pytest.mark.parametrize("op", ["Mod", "Div"])
def test_what_is_compared_and_divides_is_never_zero(op: str) -> None:
    proto = om.model(
        [node("Equal", "a one", "x"), node(op, "top a", "y")],
        {"a": ("int64", [MANY])},
        {"x": ("bool", None), "y": ("int64", None)},
        {"one": np.array(1), "top": np.array(9)},
    )
    assert set(np.unique(drawn(proto))) == set(range(1, 8))


def test_a_shifted_divisor_that_is_an_index_is_never_zero() -> None:
    proto = om.model(
        [
            node("Sub", "a three", "d"),
            node("Mod", "top d", "y"),
            node("Gather", "table a", "x"),
        ],
        {"a": ("int64", [MANY])},
        {"x": (F32, None), "y": ("int64", None)},
        {"three": np.array(3), "top": np.array(9), "table": np.zeros(11, np.float32)},
    )
    assert set(np.unique(drawn(proto))) == set(range(4, 11))


def test_a_shifted_divisor_alone_is_never_zero() -> None:
    proto = om.model(
        [node("Sub", "a three", "d"), node("Mod", "top d", "y")],
        {"a": ("int64", [MANY])},
        {"y": ("int64", None)},
        {"three": np.array(3), "top": np.array(9)},
    )
    assert drawn(proto).min() == 4


@pytest.mark.parametrize("length", [1, 20])
def test_positions_that_become_angles_spread_over_the_sequence(length: int) -> None:
    """As exported for rotary embeddings: Cast, product with frequencies, cosine and sine."""
    proto = om.model(
        [
            node("Unsqueeze", "a axes", "u"),
            node("Cast", "u", "f", to=1),
            node("MatMul", "f speeds", "angles"),
            node("Concat", "angles angles", "both", axis=-1),
            node("Cos", "both", "x"),
            node("Sin", "both", "y"),
            node("LessOrEqual", "a one", "z"),
        ],
        {"a": ("int64", [300, length])},
        {"x": (F32, None), "y": (F32, None), "z": ("bool", None)},
        {
            "axes": np.array([2]),
            "speeds": np.array([[1, 0.1]], np.float32),
            "one": np.array(1),
        },
    )
    assert set(np.unique(drawn(proto))) == set(range(max(length, 8)))


def test_positions_of_the_rotary_op_spread_over_its_cache() -> None:
    proto = om.model(
        [node("RotaryEmbedding", "x cos sin a", "y"), node("Cast", "a", "z", to=1)],
        {"x": (F32, [50, 2, 6, 4]), "a": ("int64", [50, 6])},
        {"y": (F32, None), "z": (F32, None)},
        {"cos": np.ones((11, 2), np.float32), "sin": np.zeros((11, 2), np.float32)},
        opset=23,
    )
    assert set(np.unique(drawn(proto))) == set(range(11))


def test_the_first_position_of_the_rotary_op_leaves_room_for_the_rest() -> None:
    rotary = node("RotaryEmbedding", "x a cos sin", "y")
    rotary.domain = "com.microsoft"
    proto = om.model(
        [rotary],
        {"x": (F32, [1, 2, 6, 4]), "a": ("int64", [1])},
        {"y": (F32, [1, 2, 6, 4])},
        {"cos": np.ones((8, 2), np.float32), "sin": np.zeros((8, 2), np.float32)},
        domains=("com.microsoft",),
    )
    assert {int(drawn(proto, seed=seed)[0]) for seed in range(20)} == {0, 1, 2}


@pytest.mark.parametrize("to", [1, 9])
def test_integers_that_are_cast_are_masks_of_mostly_ones(to: int) -> None:
    proto = om.model(
        [node("Unsqueeze", "a axes", "u"), node("Cast", "u", "y", to=to)],
        {"a": ("int64", [50, 40])},
        {"y": (F32 if to == 1 else "bool", None)},
        {"axes": np.array([1, 2])},
    )
    mask = drawn(proto)
    assert set(np.unique(mask)) == {0, 1}
    assert 0.8 < mask.mean() < 0.97
    assert (mask[:, 0] == 1).all()


def test_booleans_floats_and_free_integers() -> None:
    proto = om.model(
        [
            node("Not", "flag", "x"),
            node("Cast", "half", "y", to=1),
            node("Div", "top a", "z"),
            node("Cast", "brain", "w", to=1),
        ],
        {
            "flag": ("bool", []),
            "half": ("float16", [MANY]),
            "a": ("int32", [MANY]),
            "brain": ("bfloat16", [3]),
        },
        {"x": ("bool", None), "y": (F32, None), "z": ("int32", None), "w": (F32, None)},
        {"top": np.array(9, np.int32)},
    )
    inputs = random_inputs(load_onnx(proto).graph, 0)
    assert inputs["flag"].dtype == bool
    assert abs(float(inputs["half"].astype(np.float32).std()) - 1) < 0.1
    assert set(np.unique(inputs["a"])) == set(range(1, 8))
    assert inputs["brain"].dtype == ml_dtypes.bfloat16


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again, other = (drawn(lookup(), seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()

"""Nodes of constants are computed by ONNX Runtime, or stay as they are."""

import time
import zlib
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models as om
from helpers.onnx_files import onnx_suites
from helpers.onnx_files.constant_models import bits, run
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError

MOST_S = 5


def of_constants(case: onnx_suites.SuiteCase) -> onnx.ModelProto:
    """The model with all inputs as weights."""
    return case.with_weights(case.inputs).model


def behind_identities(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with an Identity behind each output: results of a model are not folded."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        name = f"{value.name}/out"
        copy.graph.node.append(helper.make_node("Identity", [value.name], [name]))
        value.name = name
    return copy


def end_of(model: onnx.ModelProto) -> str:
    """How a model of constants is read: folded, kept, refused by name, or wrong.

    A model that ONNX Runtime does not run is "not run".
    """
    try:
        right = run(model)
    except PartitionerError:
        return "not run"
    try:
        graph = load_onnx(behind_identities(model)).graph
    except FrontendError as error:
        return f"refused: {error}"
    for output, whole, part in zip(graph.outputs, right, run(om.to_proto(graph)), strict=True):
        if graph.types[output].shape != whole.shape or bits(whole) != bits(part):
            return "wrong"
    last = [graph.producers[output] for output in graph.outputs]
    return "folded" if all(node.op == "Identity" for node in last) else "kept"


def ends_of(names: Container[str]) -> dict[str, str]:
    """How the cases of these names of ONNX's node suite end.

    GroupNormalization, which has no kernel, is written in parts: its last bits are others.
    """
    return {
        case.name: end_of(of_constants(case))
        for case in onnx_suites.cases("node")
        if case.name in names and case.has_tensors and "test_group_normalization" not in case.name
    }


class EveryFourth:
    """Names of cases."""

    def __init__(self, quarter: int) -> None:
        self.quarter = quarter

    def __contains__(self, name: object) -> bool:
        return zlib.crc32(str(name).encode()) % 4 == self.quarter


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quarter", range(4))
def test_all_operators_of_constants(quarter: int) -> None:
    """Element types of 2 bits and two of float8 are refused by name."""
    ends = ends_of(EveryFourth(quarter))
    kinds = Counter(end.partition(":")[0] for end in ends.values())
    print(f"\n{kinds}")
    unknown = [end for end in ends.values() if "ONNX element type" in end]
    bad = {name: end for name, end in ends.items() if end.startswith(("wrong", "refused"))}
    assert not {name: end for name, end in bad.items() if end not in unknown}
    assert kinds["folded"] > 150
    assert kinds["kept"] > 100


def one(
    op: str, operands: Sequence[om.Array], opset: int = 17, **attributes: Any
) -> onnx.ModelProto:
    """A model of one node of constants."""
    weights = {f"w{index}": array for index, array in enumerate(operands)}
    node = helper.make_node(op, list(weights), ["y"], "only", **attributes)
    return om.model([node], {}, {"y": (operands[0].dtype.name, None)}, weights, opset=opset)


def floats(*shape: int) -> om.Array:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "operands", "attributes"),
    [
        ("GlobalMaxPool", [floats(1, 2, 5)], {}),
        ("LRN", [floats(1, 5, 4, 4)], {"size": 3}),
        ("LpNormalization", [floats(3, 4)], {"p": 1}),
        ("LpPool", [floats(1, 1, 6, 6)], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ("AveragePool", [floats(1, 1, 5)], {"kernel_shape": [7], "auto_pad": "VALID"}),
        (
            "ConvTranspose",
            [floats(1, 1, 5), floats(1, 1, 3)],
            {"pads": [0, 1], "strides": [2], "dilations": [2]},
        ),
        ("Resize", [floats(1, 1, 7), floats(0), np.array([1, 1, 0.7], np.float32)], {}),
    ],
)
def test_what_the_reference_evaluator_computes_otherwise_stays(
    op: str, operands: Sequence[om.Array], attributes: Mapping[str, Any]
) -> None:
    assert end_of(one(op, operands, **attributes)) in ("kept", "not run")


@pytest.mark.parametrize(
    ("op", "operands"),
    [
        ("Range", [np.array(x, np.float32) for x in (0.1, 2.1, 0.1)]),
        ("Sub", [np.array([0.3], np.float32), np.array([0.1], np.float32)]),
        ("Pad", [floats(2, 3), np.array([0, -1, 1, 2])]),
        ("Cast", [floats(3)]),
    ],
)
def test_constants_are_folded(op: str, operands: Sequence[om.Array]) -> None:
    assert end_of(one(op, operands, **({"to": 1} if op == "Cast" else {}))) == "folded"


def test_an_index_far_away_is_refused_at_once() -> None:
    start = time.monotonic()
    model = one("GatherElements", [floats(3), np.array([2**62])])
    with pytest.raises(FrontendError, match=r"index 4611686018427387904 in 'w1' is out of range"):
        load_onnx(behind_identities(model))
    assert time.monotonic() - start < MOST_S


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("divisor", [0, -1])
def test_a_division_at_which_onnx_runtime_ends_is_left(op: str, divisor: int) -> None:
    """The least integer by -1 ends the process; its operands are computed, too."""
    least = np.array([-(2**62)])
    nodes = [
        helper.make_node("Add", ["a", "a"], ["least"]),
        helper.make_node("Sub", ["b", "zero"], ["divisor"]),
        helper.make_node(op, ["least", "divisor"], ["y"]),
        helper.make_node("Identity", ["y"], ["out"]),
    ]
    weights = {"a": least, "b": np.array([divisor]), "zero": np.array([0])}
    graph = load_onnx(om.model(nodes, {}, {"out": ("int64", None)}, weights)).graph
    assert [node.op for node in graph.nodes] == [op]


def test_many_constants_with_one_that_is_refused() -> None:
    """Others than a node that ONNX Runtime refuses, and what reads it, are folded."""
    nodes, weights = [], {"w": np.arange(4), "far": np.array([9]), "one": np.array([1])}
    for index in range(300):
        weights[f"k{index}"] = np.array([float(index % 3)], np.float32)
        nodes.append(helper.make_node("Sqrt", [f"k{index}"], [f"r{index}"]))
    nodes.insert(200, helper.make_node("GatherND", ["w", "far"], ["bad"], "bad"))
    nodes += [
        helper.make_node("Sum", [f"r{index}" for index in range(300)], ["sum"]),
        helper.make_node("Add", ["sum", "x"], ["y"]),
        helper.make_node("Add", ["bad", "one"], ["z"]),
    ]
    outputs = {"y": ("float32", None), "z": ("int64", None)}
    model = om.model(nodes, {"x": ("float32", [1])}, outputs, weights)
    graph = load_onnx(model).graph
    assert [node.op for node in graph.nodes] == ["GatherND", "Add", "Add"]
    roots = np.sqrt(np.arange(300, dtype=np.float32) % 3)
    np.testing.assert_allclose(graph.constants["sum"].load(), [roots.sum()], rtol=1e-5)

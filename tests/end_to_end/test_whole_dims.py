"""Operators of ONNX that need a dim whole: plans go round them, and what is forced is refused."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import partitioner
from helpers.onnx_files import onnx_models
from partitioner.strategies.constraints import ConstraintError

NUMBERS = {
    "most": np.array([9], np.int64),
    "some": np.array([5], np.int64),
    "along": np.array(1, np.int64),
    "ones": np.ones((9, 8), np.float32),
}
#: Operators that need dim 1 of their operand whole: further operands, attributes and the opset.
WHOLE: Mapping[str, tuple[Sequence[str], Mapping[str, Any], int]] = {
    "Softmax": ((), {"axis": 1}, 18),
    "Softmax of two dims": ((), {"axis": 1}, 11),
    "LogSoftmax": ((), {"axis": 1}, 18),
    "Hardmax": ((), {"axis": 1}, 18),
    "CumSum": (("along",), {"reverse": 1, "exclusive": 1}, 18),
    "TopK": (("most",), {"axis": 1}, 18),
    "TopK of some": (("some",), {"axis": 1}, 18),
    "LayerNormalization": (("ones",), {"axis": 1}, 18),
    "LpNormalization": ((), {"axis": 1}, 18),
}


def net(form: str) -> onnx.ModelProto:
    """Products of each element of a sequence of nine, and the operator between them."""
    op, (operands, attrs, opset) = form.partition(" ")[0], WHOLE[form]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node(
            *(op, ["r", *operands], ["b", "at"] if op == "TopK" else ["b"]), name="whole", **attrs
        ),
        helper.make_node("MatMul", ["b", "w"], ["y"], name="last"),
    ]
    weights = {"w": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    weights |= {name: NUMBERS[name] for name in operands}
    rows = 5 if "some" in operands else 9
    values = {"x": ("float32", [2, 9, 8])}, {"y": ("float32", [2, rows, 8])}
    return onnx_models.model(nodes, *values, weights, opset=opset)


@pytest.mark.parametrize("form", WHOLE)
@pytest.mark.parametrize(
    "options",
    [
        {"devices": 2},
        {"devices": 3, "parallel": "cp"},
        {"devices": 2, "constraints": {"dims": {"rows": "x.1"}, "layout": {"rows": "s"}}},
    ],
    ids=["free", "cp", "named"],
)
def test_plans_cut_another_dim(form: str, options: dict[str, Any]) -> None:
    compiled = partitioner.compile(net(form), cluster="ideal", time_limit_s=3, **options)
    found = compiled.verify(seed=1)
    assert found.equal, str(found)
    if "constraints" in options:
        assert compiled.plan.nodes["first"].cuts
        (note,) = (note for note in compiled.summary["notes"] if "layout rows" in note)
        op = form.partition(" ")[0]
        assert note.endswith(f"2 operators are cut along it; it ends at whole ({op})")


@pytest.mark.parametrize("form", WHOLE)
def test_a_pin_on_a_dim_that_is_needed_whole_names_node_and_dim(form: str) -> None:
    pins = {"pin": [{"tensor": "b", "dim": 1}]}
    with pytest.raises(ConstraintError) as caught:
        partitioner.compile(net(form), devices=2, strategy="intra", constraints=pins)
    op = form.partition(" ")[0]
    assert str(caught.value) == (
        f"constraints pin 1 leaves no strategy for 'whole' ({op}) in intra (x=2): it cannot be "
        "cut along dim 1 of 'b'"
    )

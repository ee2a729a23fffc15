"""The notation of rules: texts, absent tensors, operands outside the loops, pending sums."""

import pytest

from partitioner.ir.graph import Graph, Node
from partitioner.ir.ops.signature import OpaqueError, pattern
from partitioner.ir.ops.table import OpView
from partitioner.ir.types import TensorType

TYPES = {
    "image": TensorType.of("float32", (2, 3, 8, 8)),
    "half": TensorType.of("float16", (2, 3, 8, 8)),
    "scale": TensorType.of("float32", (3,)),
    "sizes": TensorType.of("int64", (2,)),
    "y": TensorType.of("float32", (2, 3, 8, 8)),
    "mean": TensorType.of("float32", (2,)),
}


def view(*inputs: str, outputs: tuple[str, ...] = ("y",)) -> OpView:
    node = Node("node", "Op", inputs, outputs)
    return OpView(node, Graph("case", tuple(filter(None, inputs)), (), (node,), TYPES, {}, {}))


def test_a_run_of_dims_takes_what_the_names_leave() -> None:
    rule = pattern("n c s.., c -> n c s..", whole="s..", points="n s..")(view("image", "scale"))
    text = "n=2 c=3 s0=8 (whole) s1=8 (whole): (n, c, s0, s1), (c) -> (n, c, s0, s1)"
    assert str(rule) == text
    assert rule.points == ("n", "s0", "s1")


def test_names_are_summed_unless_they_map_to_another_reduction() -> None:
    image = view("image", outputs=("mean",))
    summed = image.rule("n c s..", "n", reduce="c s..")
    largest = image.rule("n c s..", "n", reduce=dict.fromkeys(("c", "s0", "s1"), "max"))
    assert {factor.reduce for factor in summed.factors.values()} == {"", "sum"}
    assert {factor.reduce for factor in largest.factors.values()} == {"", "max"}


def test_absent_tensors_have_no_dims_and_further_operands_are_outside_the_loops() -> None:
    rule = view("image", "", "sizes", outputs=("y", "")).rule("n c s.., c", "n c s.., n")
    assert str(rule).endswith("(n, c, s0, s1), _, _ -> (n, c, s0, s1), _")


def test_a_result_without_dims_is_refused() -> None:
    with pytest.raises(AssertionError, match="a result without dims"):
        view("image", outputs=("y", "mean")).rule("n c s..", "n c s..")


@pytest.mark.parametrize(("operand", "linear"), [("image", {0}), ("half", {0}), ("sizes", set())])
def test_pending_sums_pass_unless_element_types_forbid_it(operand: str, linear: set[int]) -> None:
    assert view(operand).rule("x..", "y..", dropped="x..", sums=[0]).linear == linear


def test_an_operand_that_must_be_present() -> None:
    with pytest.raises(OpaqueError, match="operand 1 is absent"):
        view("image", "").shape(1)

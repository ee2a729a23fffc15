"""Every row of the op table has a numeric case, and the harness itself catches wrong rows."""

import runpy
from collections.abc import Mapping
from pathlib import Path

import pytest

from helpers.op_rows import rows
from helpers.op_rows.rows import Case, case, check_opaque, check_row, f32, ints
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.rules.elementwise import elementwise
from partitioner.ir.ops.signature import pattern
from partitioner.ir.ops.table import OpRow, OpView
from partitioner.ir.rule import Rule


def covered() -> set[str]:
    """Op keys of all cases of the modules below this one's folder."""
    paths = sorted(Path(__file__).parent.glob("*/test_rows_*.py"))
    return {case.op for path in paths for case in runpy.run_path(str(path))["CASES"]}


def test_every_row_has_a_numeric_case() -> None:
    computed = {op for op, row in ROWS.items() if not row.stored}
    assert sorted(computed - covered()) == []


def test_every_case_has_a_row() -> None:
    assert sorted(covered() - set(ROWS)) == []


def only(monkeypatch: pytest.MonkeyPatch, table: Mapping[str, OpRow]) -> None:
    """Let the harness see this table."""
    monkeypatch.setattr(rows, "row_of", lambda node: table.get(node.op))
    monkeypatch.setattr(
        rows, "rule_of", lambda graph, node: table[node.op].rule(OpView(node, graph))
    )


def softmax_as_elementwise(view: OpView) -> Rule:
    """Wrong: the normalised dim may not be cut."""
    return elementwise(view)


def product_without_reduction(view: OpView) -> Rule:
    """Wrong: parts of k are summed, not compared."""
    return view.rule("m k, k n", "m n", reduce={"k": "max"})


def nothing_is_cut(view: OpView) -> Rule:
    """Useless: right, but every factor is whole."""
    return view.rule("m k, k n", "m n", whole="m k n")


def linear_relu(view: OpView) -> Rule:
    """Wrong: the parts of a pending sum may differ in sign."""
    return view.rule("m k", "m k", linear=[0])


@pytest.mark.parametrize(
    ("case", "rule", "message"),
    [
        (case("Softmax", f32(4, 5)), softmax_as_elementwise, "cut b1=tp"),
        (case("MatMul", f32(4, 5), f32(5, 3)), product_without_reduction, "cut k=tp"),
        (case("MatMul", f32(4, 5), f32(5, 3)), nothing_is_cut, "only factors"),
        (case("Relu", f32(4, 5)), linear_relu, r"cut \+=tp"),
        (case("Neg", ints(4, 5, 6), min_cuts=4), elementwise, "only factors"),
    ],
    ids=["whole dim cut", "wrong reduction", "no cut", "not linear", "too few cuts"],
)
def test_a_wrong_row_fails(
    monkeypatch: pytest.MonkeyPatch, case: Case, rule: rows.RuleOf, message: str
) -> None:
    only(monkeypatch, {case.op: OpRow(rule)})
    with pytest.raises(AssertionError, match=message):
        check_row(case)


def test_a_bias_that_every_rank_adds_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, {"Gemm": OpRow(pattern("m k, k n, n -> m n", reduce="k"))})
    with pytest.raises(AssertionError, match="cut k=tp"):
        check_row(case("Gemm", f32(4, 5), f32(5, 3), f32(3)))


def test_an_opaque_form_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"Neg": "it is Tuesday"}
    monkeypatch.setattr(rows, "rule_of", lambda _, node: reasons[node.op])
    assert check_opaque(case("Neg", f32(2))) == "it is Tuesday"
    with pytest.raises(AssertionError, match="has no rule: it is Tuesday"):
        check_row(case("Neg", f32(2)))


def test_an_opaque_check_of_a_ruled_node_fails() -> None:
    with pytest.raises(AssertionError, match="has a rule"):
        check_opaque(case("Add", f32(2), f32(2)))

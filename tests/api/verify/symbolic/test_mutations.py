"""A fault of rank programs that changes a result is refused: a sample of the table of mutations."""

import pytest

from helpers.plans.mutated_cases import CASES
from helpers.plans.mutation_table import Case, Count, tried

#: Plans of the default suite.
FAST = ("onnx tp 2", "onnx searched 2x2", "onnx spatial 3", "onnx inter 2", "train pp 1f1b")
#: Most mutants of a kind of a plan.
MOST = 5


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow)
        for case in CASES
    ],
)
def test_a_mutation_that_changes_a_result_is_refused(case: Case) -> None:
    total = Count()
    for count in tried(case, MOST).values():
        total.add(count)
    assert not total.survived
    assert total.refused > total.equal
    assert total.mutants == total.refused + total.equal

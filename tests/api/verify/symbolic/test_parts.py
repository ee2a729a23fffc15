"""Parts of dims as parts of the loops that dims are made of."""

import pytest

from partitioner.api.verify.symbolic.parts import RefusedError, dim_part, factor_parts
from partitioner.ir.exchange import Intervals
from partitioner.ir.loops.factors import Factor, FactorKind

#: A dim of 6 that is 3 elements of one loop behind 3 of another, as the operand of a split.
EXPR = (("first",), ("second",))
FACTORS = {name: Factor(name, 3, FactorKind.PASS) for name in ("first", "second")}


@pytest.mark.parametrize("part", [((0, 6),), ((0, 1), (3, 1)), ((1, 3),), ((4, 2),)])
def test_a_part_in_order_is_of_both_loops(part: Intervals) -> None:
    assert dim_part(EXPR, factor_parts(EXPR, part, FACTORS), FACTORS) == part


@pytest.mark.parametrize("part", [((3, 3), (0, 3)), ((0, 1), (3, 1), (1, 1))])
def test_pieces_in_another_order_are_of_no_loops(part: Intervals) -> None:
    """A split of such a part would give the second result where the first one is."""
    with pytest.raises(RefusedError, match="its pieces are in another order"):
        factor_parts(EXPR, part, FACTORS)

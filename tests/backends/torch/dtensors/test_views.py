"""Views of DTensors."""

from torch.distributed.tensor import DTensor

from partitioner.backends.torch.dtensors.views import VIEWING

#: Views that are never of another cut, and operators that show a tensor as it is.
ALWAYS_VIEWS = {
    *("_conj", "alias", "detach", "permute", "positive", "t", "transpose", "unsqueeze", "view_of"),
    *("contiguous", "reshape", "to"),  # PyTorch computes them by other operators
}


def test_all_views_that_may_be_copies_are_looked_at() -> None:
    """PyTorch computes other views of DTensors by these, or not at all."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
        propagator.op_to_rules,
    )
    views = {op for table in tables for op in table if op._schema._is_view_op()}
    names = {op._schema.name.partition("::")[2] for op in views - set(VIEWING)}
    assert names <= ALWAYS_VIEWS

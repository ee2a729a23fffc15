"""Whole batches from the rows that each rank loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.graphs.signature import Signature


def joined_rows(
    signature: Signature, agreement: Agreement, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Join the arguments of all ranks along the first dim of each tensor, in the order of ranks.

    Numbers and tensors without dims are the same on all ranks; all of them must call it.
    """
    args, kwargs = signature.bound(args, kwargs)
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    rows = [x for x in flat if isinstance(x, Tensor) and x.ndim]
    joined = agreement.joined(f"its rows {signature.described(args, kwargs)}", rows)
    for whole, own in zip(joined, rows, strict=True):
        whole.requires_grad_(own.requires_grad)  # none would come back: the call refuses it
    wholes = iter(joined)
    flat = [next(wholes) if isinstance(x, Tensor) and x.ndim else x for x in flat]
    joined_args, joined_kwargs = pytree.tree_unflatten(flat, spec)
    return joined_args, joined_kwargs

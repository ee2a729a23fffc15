"""Derives factor rules of operators without a row from the placements that DTensor has for them.

DTensor lists, for one mesh axis, which placements of the operands give which of the results. An
entry of the list that shards dims of operands is a factor: it passes if all results are sharded,
and is summed if all are partial sums. Other entries (partial operands, results that only some
devices have) are not used, and a dim without an entry is whole.

Each factor is tried on shapes alone: of half of it, the operator must give half of the result. So
operators with sizes among their arguments are cut in other dims only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.ir.ops.aten.branches import PASSES, SUMMED, WHOLE

#: Operators whose placements nothing shows to be right: PyTorch has no samples of them that run
#: on a CPU, or a capture takes them apart.
REFUSED = frozenset(
    f"aten::{name}"
    for name in (
        *("_batch_norm_with_update_functional", "_fused_rms_norm_backward"),
        *("_linalg_check_errors", "_native_batch_norm_legit_functional", "_scaled_mm"),
        *("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward", "clip", "clip.Tensor"),
        *("convolution_backward", "geqrf", "native_layer_norm_backward", "ormqr"),
        # those that DTensor knows from 2.14 on
        *("_grouped_mm", "_linalg_eigh", "_linalg_svd", "_local_scalar_dense", "diag"),
        *("_scaled_dot_product_flash_attention_backward", "diag_embed", "diagonal_copy", "equal"),
        *("is_same_size", "linalg_qr", "median", "nanmedian"),
    )
)

#: Dims of a factor, by the index of the tensor in `_Call.tensors`.
Dims = Mapping[int, int]


def derived_rule(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> str | None:
    """The rule of a call, whose tensors may be fake, as text (`ir.ops.aten.branches`), or None."""
    schema = (
        op._schema
    )  # the operator is PyTorch's, draws nothing, and writes or aliases no operand
    if (
        op.namespace != "aten"
        or op.name() in REFUSED  # type: ignore[no-untyped-call]
        or torch.Tag.nondeterministic_seeded in op.tags
        or any(entry.alias_info is not None for entry in (*schema.arguments, *schema.returns))
        or any("List[Tensor]" in str(argument.type) for argument in schema.arguments)
    ):
        return None
    call = _Call(op, tuple(args), dict(kwargs), _flat(results))
    names = call.factors()
    if not names:
        return None
    for index, tensor in enumerate(call.tensors):
        for dim, size in enumerate(tensor.shape):
            names.setdefault((index, dim), "1" if size == 1 else f"{WHOLE}{len(names)}")
    texts = [
        " ".join(names[index, dim] for dim in range(tensor.dim()))
        for index, tensor in enumerate(call.tensors)
    ]
    count = len(call.results)
    return f"{', '.join(texts[count:])} -> {', '.join(texts[:count])}"


def _flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


@dataclass(frozen=True)
class _Call:
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]

    @cached_property
    def tensors(self) -> list[Tensor]:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return [*self.results, *(leaf for leaf in leaves if isinstance(leaf, Tensor))]

    def factors(self) -> dict[tuple[int, int], str]:
        if not all(isinstance(result, Tensor) for result in self.results):
            return {}
        names: dict[tuple[int, int], str] = {}
        for placements in self._placements():
            letter, dims = self._factor(placements)
            if letter and not any(dim in names for dim in dims.items()) and self._splits(dims):
                count = len(set(names.values()))
                names.update(dict.fromkeys(dims.items(), f"{letter}{count}"))
        return names

    def _placements(self) -> Iterator[Sequence[Any]]:
        """DTensor's entries for the call: a placement of each result, then of each operand."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        strategies = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
        if self.op not in strategies:
            return
        args, kwargs = self._with_operands(lambda x: TensorMeta(x.shape, x.stride(), x.dtype))
        try:
            entries = strategies[self.op](self.op, args, kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, DTensor has no answer for this call
            return
        for entry in entries:  # None, from 2.14 on, is for a result of which DTensor says nothing
            if len(entry) == len(self.tensors) and None not in entry:
                yield entry

    def _factor(self, placements: Sequence[Any]) -> tuple[str, Dims]:
        """The letter of an entry's factor ("" if it has none), and its dims."""
        count = len(self.results)
        results, operands = placements[:count], placements[count:]
        sharded = any(map(_is_shard, operands))
        if not sharded or not all(_is_shard(p) or p.is_replicate() for p in operands):
            return "", {}
        dims = {
            index: placement.dim % max(self.tensors[index].dim(), 1)
            for index, placement in enumerate(placements)
            if _is_shard(placement)
        }
        if all(map(_is_shard, results)):
            return PASSES, dims
        summed = all(not _is_shard(p) and p.is_partial("sum") for p in results)
        return (SUMMED, dims) if summed else ("", {})

    def _splits(self, dims: Dims) -> bool:
        """Test whether half of a factor gives half of the results, by their shapes."""
        sizes = {self.tensors[index].shape[dim] for index, dim in dims.items()}
        if len(sizes) != 1 or min(sizes) < 2:
            return False
        halves = []
        for index, tensor in enumerate(self.tensors):
            shape = list(tensor.shape)
            if index in dims:
                shape[dims[index]] = math.ceil(shape[dims[index]] / 2)
            halves.append(torch.empty(shape, dtype=tensor.dtype, device="meta"))
        operands = iter(halves[len(self.results) :])
        args, kwargs = self._with_operands(lambda _: next(operands))
        try:
            results = _flat(self.op(*args, **kwargs))
        except Exception:  # noqa: BLE001 - PyTorch's reasons are many; then it is not cut
            return False
        expected = halves[: len(self.results)]
        return [result.shape for result in results] == [half.shape for half in expected]

    def _with_operands(self, new: Callable[[Tensor], Any]) -> tuple[Any, dict[str, Any]]:
        args, kwargs = pytree.tree_map_only(Tensor, new, (self.args, self.kwargs))
        return args, kwargs


def _is_shard(placement: Any) -> bool:
    """Test whether a placement shards evenly, or is DTensor's placeholder for one that does."""
    return type(placement).__name__ in ("Shard", "_ShardingPlaceholder")

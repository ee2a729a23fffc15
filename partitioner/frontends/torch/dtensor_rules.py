"""Factor rules of operators without a row, from the placements that DTensor knows for them.

DTensor lists, for one mesh axis, which placements of the operands give which of the results. A line
in which dims of operands are sharded is a factor: it passes if all results are sharded, and is
summed if all are partial sums. The other lines (pending operands, results that only some devices
have) are left aside, and a dim that no line names is whole.

Each factor is tried on shapes alone: on half of it, the operator must give half the result. So
operators with sizes among their arguments are cut in other dims only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from partitioner.ir.ops.aten.derived import PASSES, SUMMED, WHOLE

#: Operators whose placements nothing shows to be right: PyTorch has no samples of them that run
#: on a CPU, or a capture takes them apart.
REFUSED = frozenset(
    f"aten::{name}"
    for name in (
        *("_batch_norm_with_update_functional", "_fused_rms_norm_backward"),
        *("_linalg_check_errors", "_native_batch_norm_legit_functional", "_scaled_mm"),
        *("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward", "clip", "clip.Tensor"),
        *("convolution_backward", "geqrf", "native_layer_norm_backward", "ormqr"),
    )
)

#: Tensor dims that are cut together: by the index of the tensor, results first.
Cut = Mapping[int, int]


def derived_rule(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any
) -> str | None:
    """The text of a rule (see `partitioner.ir.ops.aten.derived`); None if nothing may be cut.

    Args:
        op: The operator.
        args: Positional arguments; tensors may be fake.
        kwargs: Keyword arguments.
        results: What the call gives.
    """
    if not _is_usable(op):
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


def _is_usable(op: torch._ops.OpOverload) -> bool:
    """Whether it is PyTorch's own, draws nothing, and writes or lies in no operand."""
    schema = op._schema
    return not (
        op.namespace != "aten"
        or op.name() in REFUSED  # type: ignore[no-untyped-call]
        or torch.Tag.nondeterministic_seeded in op.tags
        or any(one.alias_info is not None for one in (*schema.arguments, *schema.returns))
        or any("List[Tensor]" in str(one.type) for one in schema.arguments)
    )


def _flat(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, list | tuple) else [tree]


@dataclass
class _Call:
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Any]
    operands: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        self.operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """Results and operands."""
        return [*self.results, *self.operands]

    def factors(self) -> dict[tuple[int, int], str]:
        """Names of factors that may be cut, by tensor and dim."""
        if not all(isinstance(result, Tensor) for result in self.results):
            return {}
        names: dict[tuple[int, int], str] = {}
        for line in self._lines():
            kind, cut = self._read(line)
            if kind and not any(place in names for place in cut.items()) and self._splits(cut):
                count = len(set(names.values()))
                names.update(dict.fromkeys(cut.items(), f"{kind}{count}"))
        return names

    def _lines(self) -> Iterator[Sequence[Any]]:
        """What DTensor knows: a placement for each result, then each operand."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._dtensor_spec import TensorMeta

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)

        known = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs
        if self.op not in known:
            return
        args, kwargs = pytree.tree_map(described, (self.args, self.kwargs))
        try:
            found = known[self.op](self.op, args, kwargs)
        except Exception:  # noqa: BLE001 - whatever it is, DTensor has no answer for this call
            return
        yield from (line for line in found if len(line) == len(self.tensors))

    def _read(self, line: Sequence[Any]) -> tuple[str, Cut]:
        """Kind of a line's factor ("" if it is none), and where it is."""
        cut = {
            index: place.dim % max(self.tensors[index].dim(), 1)
            for index, place in enumerate(line)
            if _is_shard(place)
        }
        count = len(self.results)
        operands = line[count:]
        if not any(map(_is_shard, operands)):
            return "", {}
        if not all(_is_shard(place) or place.is_replicate() for place in operands):
            return "", {}
        if all(map(_is_shard, line[:count])):
            return PASSES, cut
        if all(not _is_shard(p) and p.is_partial("sum") for p in line[:count]):
            return SUMMED, cut
        return "", {}

    def _splits(self, cut: Cut) -> bool:
        """Whether half of the factor gives half of the results, by their shapes."""
        sizes = {self.tensors[index].shape[dim] for index, dim in cut.items()}
        if len(sizes) != 1 or min(sizes) < 2:
            return False
        parts = [
            _part(tensor, cut[index]) if index in cut else _part(tensor)
            for index, tensor in enumerate(self.tensors)
        ]
        count = len(self.results)
        args, kwargs = self._replaced(iter(parts[count:]).__next__)
        try:
            found = _flat(self.op(*args, **kwargs))
        except Exception:  # noqa: BLE001 - PyTorch's reasons are many; then it is not cut
            return False
        return [one.shape for one in found] == [part.shape for part in parts[:count]]

    def _replaced(self, make: Callable[[], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda leaf: make() if isinstance(leaf, Tensor) else leaf, (self.args, self.kwargs)
        )
        return found


def _is_shard(place: Any) -> bool:
    """Plain sharding, given as a placement or as a dim that stands for one."""
    return type(place).__name__ in ("Shard", "_ShardingPlaceholder")


def _part(tensor: Tensor, dim: int | None = None) -> Tensor:
    """A tensor without contents, of half the size in a dim."""
    shape = list(tensor.shape)
    if dim is not None:
        shape[dim] = math.ceil(shape[dim] / 2)
    return torch.empty(shape, dtype=tensor.dtype, device="meta")

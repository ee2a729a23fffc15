"""Results that a pass adds to their sums over micro-batches where it makes them.

The pass takes the sum of each such result behind its other arguments, None before the first
micro-batch, and returns the sum in place of the result. So a gradient is added while the processor
has it in its caches, and is not held to the end of the pass. A product of matrices adds its result
to the sum by itself, and the gradient of a table of embeddings adds its rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partitioner.backends.torch.graphs.calls import add_argument
from partitioner.backends.torch.graphs.notes import OPERATOR, note_tasks, noted_tasks

aten = torch.ops.aten


def add_to_sums(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Let a pass add results to their sums, which become its last arguments.

    Args:
        graph: The pass; it is changed.
        positions: Positions of the results, in the order of the arguments.
    """
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    last = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), graph._root)
    for position in positions:
        value = results[position]
        with graph.inserting_after(last):
            total = last = add_argument(graph, f"sum_of_{value.name}")
        is_only = len(value.users) == 1 and results.count(value) == 1
        adding = _ADDING.get(value.target) if is_only else None
        if adding is not None and not value.kwargs:
            value.meta[OPERATOR] = value.target
            value.target, value.args = adding, (total, *value.args)
            continue
        behind = last if value.op == "placeholder" else value
        with graph.inserting_after(behind):
            results[position] = added = graph.call_function(add, (total, value))
        note_tasks([added], noted_tasks(value))
    output.args = (tuple(results),)


def add(total: Tensor | None, value: Tensor) -> Tensor:
    """The sum with a value, or the value if there is no sum yet."""
    return value if total is None else total.add_(value)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The sum with a product of matrices."""
    return torch.mm(a, b) if total is None else total.addmm_(a, b)


def add_products(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """The sum with a batch of products of matrices."""
    return torch.bmm(a, b) if total is None else total.baddbmm_(a, b)


def add_rows(
    total: Tensor | None,
    gradient: Tensor,
    ids: Tensor,
    rows: int,
    padding: int,
    is_scaled: bool,
) -> Tensor:
    """The sum with the gradient of a table of embeddings, by that of its rows.

    On a CPU, where no other order of additions makes it differ from step to step.
    """
    if total is None or is_scaled or total.device.type != "cpu":
        whole = aten.embedding_dense_backward.default(gradient, ids, rows, padding, is_scaled)
        return add(total, whole)
    places = ids.reshape(-1)
    parts = gradient.reshape(places.numel(), total.shape[1])
    if padding >= 0:
        parts = parts.masked_fill((places == padding).unsqueeze(1), 0)
    return total.index_add_(0, places, parts)


#: What adds the result of an operator to a sum, by the operator: it takes the sum before its
#: arguments, all of which must be by position.
_ADDING: dict[Any, Callable[..., Tensor]] = {
    aten.mm.default: add_product,
    aten.bmm.default: add_products,
    aten.embedding_dense_backward.default: add_rows,
}

"""Cases of ATen rows for `rows.check_row`: calls of PyTorch operators on drawn tensors.

``check_row(aten("mm", f32(6, 4), f32(4, 8)))`` runs every cut of the row's rule for ``aten::mm``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from helpers.op_rows.aten_calls import run_node
from helpers.op_rows.rows import Case, Draw
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.graphs.calls import overload
from partitioner.frontends.torch.building.calls import encode_call
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.table import LocalOp


def aten(
    op: str,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    absent: tuple[int, ...] = (),
    results: int | None = None,
    **kwargs: Any,
) -> Case:
    """A call of ``aten::<op>`` (or of ``space::name.overload``); `Draw`s and arrays are tensors.

    Args:
        op: "mm", "sum.dim_IntList", "partitioner::attention", ...
        args: Positional arguments.
        options: Fields of the `Case`: min_cuts, tolerance, exact, constants.
        absent: Results that nobody reads.
        results: How many there are, for operators that return a list.
        kwargs: Keyword arguments.
    """
    name = op if "::" in op else f"aten::{op}"
    tensors: list[Draw | np.ndarray] = []

    def name_of(x: Draw | np.ndarray) -> str:
        tensors.append(x)
        return f"in{len(tensors) - 1}"

    def is_tensor(x: Any) -> bool:
        return isinstance(x, Draw | np.ndarray)

    full, inputs, attrs = encode_call(overload(name), args, kwargs, is_tensor, name_of)
    left = iter(tensors)
    operands = tuple(next(left) if value else None for value in inputs)
    count = len(overload(name)._schema.returns) if results is None else results
    outputs = tuple("" if i in absent else f"out{i}" for i in range(count))
    return Case(
        full, operands, attrs, outputs=outputs, runner=run_torch, **{"opset": 1, **(options or {})}
    )


def run_torch(
    local: LocalOp,
    values: Mapping[str, np.ndarray],
    lay: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> dict[str, np.ndarray]:
    """Run local nodes one by one; every value that they make comes back.

    Args:
        lay: Gives operands other strides.
    """
    values_by_name = {
        name: lay(from_numpy(np.array(x), x.dtype.name))
        for name, x in {**values, **local.constants}.items()
    }
    written = {}
    for node in local.nodes:
        results = run_node(node, values_by_name, torch.device("cpu"))
        row = ROWS.get(node.op)
        if row is not None and row.view:
            _check_views(node.op, values_by_name[node.inputs[0]], results)
        for name, tensor in zip(node.outputs, results, strict=False):
            if name:
                assert tensor is not None, f"{node.op} gives no {name}"
                values_by_name[name] = written[name] = tensor
    return {name: to_numpy(tensor, dtype_name(tensor.dtype)) for name, tensor in written.items()}


def _check_views(op: str, viewed: torch.Tensor, results: Sequence[torch.Tensor | None]) -> None:
    """The results lie in the operand's memory."""
    memory = viewed.untyped_storage().data_ptr()
    for result in results:
        assert result is not None
        assert result.untyped_storage().data_ptr() == memory, f"{op} is no view"

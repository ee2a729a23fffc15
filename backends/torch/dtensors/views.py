"""Views of tensors in parts.

PyTorch makes a copy of a row or a slice along a cut dim. A write into it (`p[3] = 0.`,
`p[3] += 1`) would be lost, and a write to the tensor would not be seen in it: see `copies`, which
makes both as of a view.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dispatch import as_strided_handler

from partitioner.backends.torch.dtensors.copies import marked
from partitioner.backends.torch.dtensors.data import replace_data
from partitioner.backends.torch.dtensors.parts import storage_of
from partitioner.backends.torch.dtensors.wholes import Handler, by_pytorch

_aten = torch.ops.aten

#: Views that PyTorch computes of another cut of the tensor where its own allows none.
VIEWING = (
    *(_aten.diagonal.default, _aten.expand.default, _aten.select.int, _aten.slice.Tensor),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.unbind.int),
    *(_aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.view.default),
    *(_aten.view.dtype, _aten.view_as_complex.default, _aten.view_as_real.default),
)

#: By operator that makes a tensor a view of itself: the one that returns the view.
_OUT_OF_PLACE: Mapping[Any, Any] = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}


def _viewed(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """View as PyTorch does, and mark what lies in other memory than the tensor as a copy."""
    tensor: DTensor = args[0]
    view = partial(by_pytorch, operator, args, kwargs)
    if tensor.device_mesh.get_coordinate() is None:  # there is nothing of it here
        return view()

    def is_copy(result: DTensor) -> bool:
        return storage_of(result) != storage_of(tensor)

    return marked(view, operator, args, kwargs, is_copy)


def _strided(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """A view by strides: PyTorch allows that of the tensor as it is."""
    try:
        return as_strided_handler(operator, args, dict(kwargs))
    except RuntimeError:
        return _viewed(operator, args, kwargs)


def _viewed_in_place(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> DTensor:
    tensor: DTensor = args[0]
    view = _OUT_OF_PLACE[operator](*args, **kwargs)
    replace_data(tensor, view)
    return tensor


HANDLERS: Mapping[Any, Handler] = {
    **dict.fromkeys(VIEWING, _viewed),
    **dict.fromkeys(_OUT_OF_PLACE, _viewed_in_place),
    _aten.as_strided.default: _strided,
}

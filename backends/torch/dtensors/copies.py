"""Copies of a part of a tensor, where the user asked for a view: a write into one would be lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.schemas import written_tensors


class Copy(DTensor):
    """A copy that PyTorch made where a view of a tensor was asked for: it may only be read.

    What is computed of it is as of any DTensor, but for its views, which are copies too. So no
    other tensor is looked at before it is written to.
    """

    @classmethod
    def of(cls, tensor: DTensor) -> Copy:
        """The same, marked as a copy."""
        return cls(tensor._local_tensor, tensor._spec, requires_grad=False)

    def unmarked(self) -> DTensor:
        """The same, as PyTorch made it."""
        made: DTensor = DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch declares it without its class
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operator that does not write to a copy.

        Raises:
            BackendError: It does, and the write would be lost.
        """
        kwargs = kwargs or {}
        if any(isinstance(tensor, cls) for tensor in written_tensors(func, args, kwargs)):
            raise BackendError(
                "a part of a tensor that is cut over ranks cannot be written to where it is "
                "cut: change the whole one under torch.no_grad(), as by "
                "w = p.detach().full_tensor(); w[3] = 0.0; p.copy_(w)"
            )
        args, kwargs = pytree.tree_map_only(cls, cls.unmarked, (args, kwargs))
        results = func(*args, **kwargs)
        if func._schema._is_view_op():
            return pytree.tree_map_only(DTensor, cls.of, results)
        return results

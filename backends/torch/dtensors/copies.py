"""Copies of a part of a tensor, where the user asked for a view.

A write into one would be lost: it is refused. After a write to the tensor, as by an optimizer's
step, they are made anew when they are read, so that they show it as a view would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.schemas import written_tensors


def marked(
    view: Callable[[], Any], viewed: DTensor, is_copy: Callable[[DTensor], bool] = lambda _: True
) -> Any:
    """The results of a view; those that are copies can only be read.

    Args:
        view: Computes them, once more after each write to the tensor.
        viewed: The tensor.
        is_copy: Whether a result is a copy.
    """

    def again(index: int) -> DTensor:
        with torch.inference_mode(viewed.is_inference()), torch.no_grad():
            result: DTensor = pytree.tree_leaves(view())[index]
        return result

    results, tree = pytree.tree_flatten(view())
    shown = [
        Copy.of(result, viewed, partial(again, index)) if is_copy(result) else result
        for index, result in enumerate(results)
    ]
    return pytree.tree_unflatten(shown, tree)


class Copy(DTensor):
    """A copy that PyTorch made where a view of a tensor was asked for: it may only be read.

    What is computed of it is as of any DTensor, but for its views, which are copies too. So no
    other tensor is looked at before it is written to.
    """

    _part: Tensor
    _viewed: DTensor | None = None
    _viewed_at: int | None = None  # PyTorch's count of writes to the tensor
    _again: Callable[[], DTensor]

    @classmethod
    def of(cls, result: DTensor, viewed: DTensor, again: Callable[[], DTensor]) -> Copy:
        """The same, marked as a copy of a part of a tensor; `again` computes it anew."""
        made = cls(result._local_tensor, result._spec, requires_grad=False)
        made._viewed = viewed._viewed if isinstance(viewed, Copy) else viewed
        assert made._viewed is not None
        made._viewed_at, made._again = _writes_to(made._viewed), again
        return made

    @property
    def _local_tensor(self) -> Tensor:
        """This rank's part of it, as the tensor is now."""
        if self._viewed is not None:
            writes = _writes_to(self._viewed)
            if writes is None or writes != self._viewed_at:
                self._part, self._viewed_at = self._again()._local_tensor, writes
        return self._part

    @_local_tensor.setter
    def _local_tensor(self, part: Tensor) -> None:
        self._part = part

    def unmarked(self) -> DTensor:
        """The same, as PyTorch made it."""
        made: DTensor = DTensor(self._local_tensor, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A tensor of its own, which can be written to."""
        return copy.deepcopy(self.unmarked(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled, it is a tensor of its own."""
        return self.unmarked().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

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

        def compute() -> Any:
            tensors = pytree.tree_map_only(cls, cls.unmarked, (args, kwargs))
            return func(*tensors[0], **tensors[1])

        return marked(compute, args[0]) if func._schema._is_view_op() else compute()


def _writes_to(tensor: DTensor) -> int | None:
    """PyTorch's count of writes to a tensor; None of one that was made in inference mode."""
    return None if tensor.is_inference() else tensor._version

"""Copies of a part of a tensor, where the user asked for a view.

They show and take what a view would: after a write to the tensor, as by an optimizer's step, they
are made anew when they are read; a write into one is computed on the whole tensor, of which each
rank keeps its part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.parts import (
    in_parts,
    outline_of,
    part_of_whole,
    span_of,
    whole_of,
)
from partitioner.backends.torch.dtensors.plain import note_plain
from partitioner.backends.torch.dtensors.schemas import (
    calls_in_turn,
    writes_to_a_list,
    written_tensors,
)

#: Attribute of the memory of a part that several DTensors have since one's `data` was set.
SHARED = "_is_of_several_parts"


def marked(
    view: Callable[[], Any],
    operator: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    is_copy: Callable[[DTensor], bool] = lambda _: True,
) -> Any:
    """The results of a view, of which those that are copies are marked.

    Args:
        view: Computes them, once more after each write to the tensor.
        operator: The view's operator.
        args: Its arguments by position; the first is the tensor.
        kwargs: Its arguments by name.
        is_copy: Whether a result is a copy.
    """
    viewed: DTensor = args[0]

    def again(index: int) -> DTensor:
        with torch.inference_mode(viewed.is_inference()), torch.no_grad():
            result: DTensor = pytree.tree_leaves(view())[index]
        return result

    def within(index: int, whole: Tensor) -> Tensor:
        seen = viewed.within(whole) if isinstance(viewed, Copy) else whole
        result: Tensor = pytree.tree_leaves(operator(seen, *args[1:], **kwargs))[index]
        return result

    results, tree = pytree.tree_flatten(view())
    shown = [
        Copy.of(result, viewed, partial(again, index), partial(within, index))
        if is_copy(result)
        else result
        for index, result in enumerate(results)
    ]
    return pytree.tree_unflatten(shown, tree)


class Copy(DTensor):
    """A copy that PyTorch made where a view of a tensor was asked for.

    What is computed of it is as of any DTensor, but for its views, which are copies too. So no
    other tensor is looked at before it is written to.

    Attributes:
        viewed: The tensor.
        within: Returns the view of the tensor when that is given as a whole one.
    """

    viewed: DTensor
    within: Callable[[Tensor], Tensor]
    _part: Tensor
    _again: Callable[[], DTensor] | None = None
    _viewed_part: Tensor
    _viewed_at: int | None = None  # the count of writes to the tensor

    @classmethod
    def of(
        cls,
        result: DTensor,
        viewed: DTensor,
        again: Callable[[], DTensor],
        within: Callable[[Tensor], Tensor],
    ) -> Copy:
        """The same, marked as a copy of a part of a tensor; `again` computes it anew."""
        made = cls(result._local_tensor, result._spec, requires_grad=False)
        made.viewed = viewed.viewed if isinstance(viewed, Copy) else viewed
        made._viewed_part, made._viewed_at = made.viewed._local_tensor, writes_to(made.viewed)
        made._again, made.within = again, within
        return made

    @property
    def _local_tensor(self) -> Tensor:
        """Return this rank's part, as the tensor is now.

        Raises:
            BackendError: The tensor has other memory now.
        """
        if self._again is not None:
            self.check_is_of_viewed()
            writes = writes_to(self.viewed)
            if writes is None or writes != self._viewed_at:
                self._part, self._viewed_at = self._again()._local_tensor, writes
        return self._part

    @_local_tensor.setter
    def _local_tensor(self, part: Tensor) -> None:
        self._part = part

    def check_is_of_viewed(self) -> None:
        """Refuse it if the tensor has other memory now.

        Raises:
            BackendError: The tensor's `data` was set.
        """
        if self.viewed._local_tensor is not self._viewed_part:
            raise BackendError(
                "a part of a tensor that is cut over ranks was taken before the tensor's .data "
                "was set: take it again"
            )

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
        """Compute an operator; what it writes to a copy is written to the tensor.

        Raises:
            BackendError: It gives a copy other sizes in place, or writes to memory of two views, or
                to a copy of a tensor that has other memory now.
        """
        kwargs = kwargs or {}
        if writes_to_a_list(func._schema) and len(args[0]) > 1:
            # one after the other: what is read of a copy may have been written before
            for one_args, one_kwargs in calls_in_turn(args, kwargs):
                func(*one_args, **one_kwargs)
            return None
        if any(isinstance(tensor, cls) for tensor in written_tensors(func, args, kwargs)):
            if torch.Tag.inplace_view in func.tags:
                raise BackendError(
                    f"{func._schema.name.partition('::')[2]}() of a part of a tensor that is cut "
                    "over ranks, which has no memory of its own: take the view that is not in place"
                )
            copies = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
            for one in copies:
                one.check_is_of_viewed()
            note_plain(copies[0].device_mesh, func, args, kwargs)
            return parts_of_results(func, args, kwargs)

        def compute() -> Any:
            tensors = pytree.tree_map_only(cls, cls.unmarked, (args, kwargs))
            return func(*tensors[0], **tensors[1])

        return marked(compute, func, args, kwargs) if func._schema._is_view_op() else compute()


def writes_to(tensor: DTensor) -> int | None:
    """The count of writes to a tensor and to its part; None where not all are counted.

    So it is of one made in inference mode, and of those that share a part since one's `data` was
    set: writes to one are not counted on the others.
    """
    part = tensor._local_tensor
    is_shared = getattr(part.untyped_storage(), SHARED, False)
    is_counted = not (is_shared or tensor.is_inference() or part.is_inference())
    return tensor._version + part._version if is_counted else None


def parts_of_results(
    operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The operator on whole tensors; each rank has its part of what it writes and returns.

    Raises:
        BackendError: It writes to memory that it also has by another view.
    """
    tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
    first = next(tensor for tensor in tensors.values() if isinstance(tensor, DTensor))
    is_here = first.device_mesh.get_coordinate() is not None
    written = {id(tensor) for tensor in written_tensors(operator, args, kwargs)}
    bases = {
        key: tensor.viewed if isinstance(tensor, Copy) else tensor
        for key, tensor in tensors.items()
    }
    places = {key: _place_of(base) for key, base in bases.items()}
    if any(isinstance(tensors[key], Copy) for key in written):
        _check_apart(bases, places, written)
    with torch.no_grad():
        whole_bases = {
            places[key]: whole_of(base) if is_here else outline_of(base)
            for key, base in bases.items()
        }
        wholes = {
            key: one.within(whole_bases[places[key]])
            if isinstance(one, Copy)
            else whole_bases[places[key]]
            for key, one in tensors.items()
        }
        results = operator(
            *pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], args),
            **pytree.tree_map_only(Tensor, lambda one: wholes[id(one)], dict(kwargs)),
        )
    for key in written if is_here else ():
        base = bases[key]
        if isinstance(base, DTensor):
            base._local_tensor.copy_(part_of_whole(base._spec, whole_bases[places[key]]))
            if isinstance(tensors[key], Copy) and not base.is_inference():
                increment_version([base])

    def returned(result: Tensor) -> Tensor:
        same = next((key for key in written if wholes[key] is result), None)
        return in_parts(first, result) if same is None else tensors[same]

    return pytree.tree_map_only(Tensor, returned, results)


def _place_of(base: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of one memory."""
    if not isinstance(base, DTensor) or not base._local_tensor.numel():
        return (id(base),)  # of parts without elements, the place does not tell
    part = base._local_tensor
    return *span_of(base), part.shape, part.stride(), base.shape, base.placements, base.dtype


def _check_apart(
    bases: Mapping[int, Tensor], places: Mapping[int, tuple[Any, ...]], written: set[int]
) -> None:
    """Refuse a write to memory that is read or written by another view, too."""
    memories = {key: span_of(base) for key, base in bases.items()}
    filled = [(key, *memory) for key, memory in memories.items() if memory[1] < memory[2]]
    for (one, storage, begin, end), (other, *memory) in combinations(filled, 2):
        if not {one, other} & written or places[one] == places[other]:
            continue
        other_storage, other_begin, other_end = memory
        if storage == other_storage and begin < other_end and other_begin < end:
            raise BackendError(
                "an operator writes to a part of a tensor that is cut over ranks, and has the same "
                "tensor by another view: clone() what it reads"
            )

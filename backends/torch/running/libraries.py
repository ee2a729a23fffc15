"""What training libraries read of a rank's module, beside what they read of any module."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import ClassVar

from torch import nn

from partitioner.backends.torch.running.rank_module import RankModule


class LibraryModule(RankModule):
    """A rank's module with what training libraries expect of one."""

    #: Accelerate leaves a module that is prepared as it is, in no DistributedDataParallel.
    _is_accelerate_prepared: ClassVar[bool] = True
    #: Trainer passes no count of a batch's items: a call takes what the model was traced with.
    accepts_loss_kwargs: ClassVar[bool] = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Change nothing: gradients add up in any case, and each backward pass sums all ranks'."""
        return nullcontext()


def module_class(model: type[nn.Module]) -> type[RankModule]:
    """Make a class of rank modules for a model's class.

    Its `forward` has the signature of the model's, by which Trainer tells a batch's columns and
    labels.
    """
    call = RankModule.forward
    forward = FunctionType(call.__code__, call.__globals__, "forward", None, call.__closure__)
    forward.__doc__ = call.__doc__
    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    contents = {
        "__doc__": RankModule.__doc__,
        "__module__": RankModule.__module__,
        "forward": forward,
    }
    return type("RankModule", (LibraryModule,), contents)

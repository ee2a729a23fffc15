"""What training libraries read of a rank's module, beside what they read of any module."""

from __future__ import annotations

import inspect
from types import FunctionType

from torch import nn

from partitioner.backends.torch.running.rank_module import RankModule


def module_class(kind: type[nn.Module]) -> type[RankModule]:
    """Make a class of rank modules for a model's class.

    Its `forward` has the signature of the model's, by which transformers' `Trainer` tells a batch's
    columns and labels. A module that says that it is prepared is left by `accelerate` as it is, in
    no DistributedDataParallel. To a model that accepts no `loss_kwargs`, `Trainer` passes no count
    of a batch's items: a call takes what the model was traced with.
    """
    own = RankModule.forward
    forward = FunctionType(own.__code__, own.__globals__, "forward", None, own.__closure__)
    forward.__doc__ = own.__doc__
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return type(
        "RankModule",
        (RankModule,),
        {
            "__doc__": RankModule.__doc__,
            "__module__": RankModule.__module__,
            "_is_accelerate_prepared": True,
            "accepts_loss_kwargs": False,
            "forward": forward,
        },
    )

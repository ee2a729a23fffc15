"""Options of a module's trace; loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from partitioner.ir.errors import OptionError
from partitioner.ir.nodes.loads import Loads

#: Kinds of parallelism that change what a trace stores; "" for none of them.
AtRest = Literal["", "zero1", "zero2", "zero3"]

#: Names of optimizers.
Optimizer = Literal["adamw", "adam", "sgd", "momentum", "rmsprop", "adagrad", "muon"]

#: Tensors that each optimizer keeps for a parameter, of its shape and element type.
OPTIMIZERS: Mapping[str, int] = {  # a row for each name in `Optimizer`
    "adamw": 2,
    "adam": 2,
    "sgd": 0,
    "momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "muon": 2,
}
#: Those that look at whole matrices, and keep other state of them: the tensors, and the iterations
#: that make their steps orthogonal (`ns_steps`). Other parameters are AdamW's.
OF_MATRICES: Mapping[str, tuple[int, int]] = {"muon": (1, 5)}


@dataclass(frozen=True)
class ModuleOptions:
    """Options of a module's trace.

    Attributes:
        training: Whether the program has a backward pass.
        optimizer: One of `OPTIMIZERS`, whose state is counted in training.
        at_rest: "zero3" in inference: parameters are stored apart from their uses, though nothing
            writes them. "zero1" and "zero2" in training: they lie otherwise than the optimizer's
            state between steps, and with "zero1" so do gradients. "" for none of these.
        loads: Known loads of experts, see `ir.nodes.loads`.
    """

    training: bool = False
    optimizer: str = "adamw"
    at_rest: AtRest = ""
    loads: Loads = ()

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise OptionError(
                f"optimizer {self.optimizer!r} is not one of {known}: an optimizer that is not "
                "elementwise has to be known, or it would step with parts of what it looks at"
            )

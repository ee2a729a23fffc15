"""Options of a module's trace; loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.errors import OptionError

#: Bytes of state that each optimizer keeps for one element of a parameter.
OPTIMIZERS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "sgd": 0,
    "momentum": 4,
    "rmsprop": 4,
    "adagrad": 4,
}


@dataclass(frozen=True)
class ModuleOptions:
    """Options of a module's trace.

    Attributes:
        training: Whether the program has a backward pass.
        optimizer: One of `OPTIMIZERS`, whose state is counted in training.
        stores: Whether parameters are stored apart from their uses though nothing writes them.

    Raises:
        OptionError: The optimizer is none of `OPTIMIZERS`.
    """

    training: bool = False
    optimizer: str = "adamw"
    stores: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise OptionError(
                f"optimizer {self.optimizer!r} is not one of {known}: optimizers that are not "
                "elementwise cannot work on shards"
            )

"""How a module is traced; loads no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.ir.errors import OptionError

#: Bytes that each optimizer keeps of an element of a parameter, beside it and its gradient.
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
    """How a module is traced.

    Attributes:
        training: Whether its program has a backward pass.
        optimizer: One of `OPTIMIZERS`, whose memory is counted in training.

    Raises:
        OptionError: There is no such optimizer.
    """

    training: bool = False
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise OptionError(
                f"optimizer {self.optimizer!r} is not one of {known}: optimizers that are not "
                "elementwise cannot work on shards"
            )

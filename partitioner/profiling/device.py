"""The device that a process measures on: its clock, and what lies in its caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from partitioner.backends.torch.clocks import Clock, clock_of, timed_run

#: Bytes of a cache's line.
_LINE_BYTES = 64
#: Bytes, by type of device, of what drives all else out of caches of up to half as many: those of
#: two cores, and the L2 caches of GPUs (50 MB on an H100, 126 MB on a B200).
_OTHER_BYTES = {"cpu": 2**26, "cuda": 2**28}


@dataclass
class Device:
    """The current device of a process.

    Attributes:
        clock: Its clock.
        others: Tensor whose bytes drive all else out of its caches.
    """

    clock: Clock
    others: Tensor = field(repr=False)

    @classmethod
    def of(cls, type_name: str) -> Device:
        """The device of PyTorch's type, "cpu" or "cuda"."""
        device = torch.device(type_name)
        others = torch.zeros(_OTHER_BYTES[type_name], dtype=torch.uint8, device=device)
        return cls(clock_of(device), others)

    @property
    def type(self) -> str:
        """PyTorch's type of it."""
        return self.others.device.type

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Seconds of a run; see `timed_run`."""
        return timed_run(self.clock, run)

    def evict(self) -> None:
        """Drive all else out of the caches."""
        if self.type == "cpu":
            # Not by `fill_`, after which short operators take longer: all profiles are NumPy's.
            self.others.numpy().fill(1)
        else:
            self.others.fill_(1)

    def read(self, operands: Iterable[np.ndarray | Tensor]) -> None:
        """Read arrays or tensors, so that they lie in the caches as far as these hold them."""
        for one in operands:
            if not isinstance(one, Tensor):
                one.ravel(order="K").view(np.uint8)[::_LINE_BYTES].max(initial=0)
            elif one.device.type == "cpu":
                _in_memory(one).numpy()[::_LINE_BYTES].max(initial=0)
            elif one.numel():
                _in_memory(one)[::_LINE_BYTES].max()


def _in_memory(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in the order of its memory."""
    order = np.argsort([-stride for stride in tensor.stride()], kind="stable")
    return tensor.permute(order.tolist()).reshape(-1).view(torch.uint8)

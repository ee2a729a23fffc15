"""The device that a process measures on: its clock, and what lies in its caches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from partitioner.backends.torch.measuring.clocks import Clock, clock_of, timed_run

#: Bytes of a cache's line.
_LINE_BYTES = 64
#: Bytes, by type of device, of what drives all else out of caches of up to half as many: those of
#: two cores, and the L2 caches of GPUs (50 MB on an H100, 126 MB on a B200). The processes that
#: share a larger last cache of a processor write as many bytes as it has together.
_OTHER_BYTES = {"cpu": 2**26, "cuda": 2**28}
#: What Linux tells of the caches of the first processor, and units of their sizes.
_CACHES, _UNITS = Path("/sys/devices/system/cpu/cpu0/cache"), {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass
class Device:
    """The current device of a process."""

    clock: Clock  #: Its clock.
    others: Tensor = field(repr=False)  #: Tensor whose bytes drive all else out of its caches.

    @classmethod
    def of(cls, type_name: str) -> Device:
        """The device of PyTorch's type, "cpu" or "cuda"."""
        device, nbytes = torch.device(type_name), _OTHER_BYTES[type_name]
        if type_name == "cpu":  # bytes that nothing writes to take no memory
            others = torch.from_numpy(np.zeros(max(nbytes, last_cache().nbytes), np.uint8))
        else:
            others = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return cls(clock_of(device), others)

    @property
    def type(self) -> str:
        """PyTorch's type of it."""
        return self.others.device.type

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Seconds of a run; see `timed_run`."""
        return timed_run(self.clock, run)

    def evict(self, processes: int = 1) -> None:
        """Drive all else out of the caches, with so many processes of the machine that do so."""
        if self.type == "cpu":
            # Not by `fill_`, after which short operators take longer: all profiles are NumPy's.
            nbytes = max(
                _OTHER_BYTES["cpu"],
                self.others.numel() // max(1, int(processes * last_cache().share)),
            )
            self.others.numpy()[:nbytes].fill(1)
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


class LastCache(NamedTuple):
    """The last cache of a processor."""

    nbytes: int  #: Its size; 0 if the system does not tell.
    share: float  #: Share of the machine's processors that it is of.


@cache
def last_cache(caches: Path = _CACHES, processors: int | None = None) -> LastCache:
    """The last cache of the first processor, by the system's folder of them; all are alike."""
    known = {0: LastCache(0, 1.0)}
    for folder in caches.glob("index*"):
        try:
            level, size, sharing = (
                (folder / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            nbytes = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
            share = _count(sharing) / (processors or os.cpu_count() or 1)
            known[int(level)] = LastCache(nbytes, share)
        except (OSError, ValueError):
            continue
    return known[max(known)]


def _count(numbers: str) -> int:
    """Count the numbers that a list like "0-3,8" has.

    >>> _count("0-3,8")
    5
    """
    spans = [one.split("-") for one in numbers.split(",")]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)

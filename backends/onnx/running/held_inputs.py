"""The inputs of a rank that are results of the call before, which stay on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partitioner.backends.feeding import LocalFeed, local_feeds
from partitioner.backends.header import Header
from partitioner.backends.onnx.files.steps import RankModel
from partitioner.backends.onnx.running.executor import Places
from partitioner.backends.tensors import torch_dtype


class HeldInputs:
    """The held inputs of a rank by local name; zeros before the first call.

    Each has two buffers, which a call reads and writes in turn, so that sessions are bound to them
    once. One that grows has a buffer for the result, and one for its end.
    """

    def __init__(self, model: RankModel, feed: Mapping[str, str], device: torch.device) -> None:
        header, self._device = model.header, device
        self._feeds: Mapping[str, LocalFeed] = local_feeds(header, feed)
        self._in_batch, self._turn = header.batch is not None, 0
        self._values = {name: self._new(model, name, _times(header, name)) for name in self._feeds}
        #: By local result.
        self._own: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, one in self._feeds.items():
            if not self._in_batch and one.value not in self._own:
                first = () if one.dim is not None else (self._values[name],)
                self._own[one.value] = *first, self._new(model, one.value)

    def _new(self, model: RankModel, name: str, times: tuple[int, ...] = ()) -> torch.Tensor:
        type_ = model.types[name]
        shape, dtype = (*times, *type_.shape), torch_dtype(type_.dtype)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def joined(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a call: those held, but for others that are given in their place."""
        self._values |= {name: inputs[name] for name in self._feeds.keys() & inputs.keys()}
        return {**self._values, **inputs}

    @property
    def places(self) -> Places:
        """Where the results of the next call go: to buffers that it does not read."""
        read = {value.data_ptr() for value in self._values.values()}
        free = {
            value: next((one for one in own if one.data_ptr() not in read), None)
            for value, own in self._own.items()
        }
        return Places({v: one for v, one in free.items() if one is not None}, self._turn)

    def take(self, results: Mapping[str, torch.Tensor]) -> None:
        """Hold the results of a call: each as it lies, the end of one that is longer as a copy."""
        self._turn = 1 - self._turn
        for name, feed in self._feeds.items():
            value = results[feed.value]
            if feed.dim is None:
                self._values[name] = value
                continue
            dim = feed.dim + self._in_batch
            size = self._values[name].shape[dim]
            self._values[name].copy_(value.narrow(dim, value.shape[dim] - size, size))


def _times(header: Header, name: str) -> tuple[int, ...]:
    """The number of a request's parts of an input; () of a request that runs as a whole."""
    batch = header.batch
    return () if batch is None else (len(batch.regions(header.inputs[name].whole)),)

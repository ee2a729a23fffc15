"""The inputs of a rank that are results of the call before, which stay on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partitioner.backends.feeding import local_feeds
from partitioner.backends.header import Header
from partitioner.backends.onnx.files.steps import RankModel
from partitioner.backends.tensors import torch_dtype


class HeldInputs:
    """The held inputs of a rank by local name; zeros before the first call."""

    def __init__(self, model: RankModel, feed: Mapping[str, str], device: torch.device) -> None:
        self._feeds, header = local_feeds(model.header, feed), model.header
        self._in_batch = header.batch is not None
        self._values = {}
        for name in self._feeds:
            type_ = model.types[name]
            shape = (*_times(header, name), *type_.shape)
            self._values[name] = torch.zeros(shape, dtype=torch_dtype(type_.dtype), device=device)

    def joined(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs of a call: those held, but for others that are given in their place."""
        self._values |= {name: inputs[name] for name in self._feeds.keys() & inputs.keys()}
        return {**self._values, **inputs}

    def take(self, results: Mapping[str, torch.Tensor]) -> None:
        """Hold the results of a call: each as it lies, the end of one that is longer as a copy."""
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

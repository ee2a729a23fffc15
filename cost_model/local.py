"""This machine's GPUs as a cluster, read through torch.cuda (imported only here, when asked)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from partitioner.cost_model import presets
from partitioner.cost_model.devices import Cluster, DeviceSpec, LinkLevel
from partitioner.cost_model.errors import CostError


def local_cluster(count: int | None, cuda: Any = None) -> Cluster:
    """The first `count` GPUs (all by default), with a known device's figures and their own memory.

    Args:
        count: How many.
        cuda: What stands for `torch.cuda`.

    Raises:
        CostError: There are fewer, or a GPU is not one of the presets.
    """
    cuda = _torch_cuda() if cuda is None else cuda
    have = int(cuda.device_count()) if cuda.is_available() else 0
    wanted = max(1, have) if count is None else count
    if have < wanted:
        raise CostError(f"cluster 'local' needs {wanted} GPUs, this machine has {have}")
    found = [_device(cuda.get_device_properties(index)) for index in range(wanted)]
    level = _links(cuda, tuple(preset for preset, _ in found))
    return Cluster("local", tuple(spec for _, spec in found), (level,))


def _torch_cuda() -> Any:
    import torch

    return torch.cuda


def _device(properties: Any) -> tuple[str, DeviceSpec]:
    title = str(properties.name)
    for name, row in presets.PRESETS.items():
        if any(part in title for part in row.cuda_names):
            spec = replace(presets.device(name), memory_bytes=int(properties.total_memory))
            return name, spec
    raise CostError(f"no figures are known for GPU {title!r}; describe it in a TOML file")


def _links(cuda: Any, names: tuple[str, ...]) -> LinkLevel:
    """The preset's links if all devices are equal and reach each other, else PCIe."""
    pairs = itertools.permutations(range(len(names)), 2)
    if len(set(names)) == 1 and all(cuda.can_device_access_peer(a, b) for a, b in pairs):
        return presets.levels(names[0], 1, len(names))[0]
    return replace(presets.levels("l4", 1, len(names))[0], name="pcie")

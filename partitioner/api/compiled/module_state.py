"""The state of a compiled module as its ranks need it: stored values, weights, submodules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.state.initialise import Init, Initialiser, without_contents
from partitioner.backends.torch.state.whole import OwnState, Stored, Submodule
from partitioner.frontends.torch.building.calls import constant_loader
from partitioner.frontends.torch.building.graph import ModuleGraph
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph

if TYPE_CHECKING:
    from partitioner.backends.torch.running.submodules import Source

#: Types of plain values.
_PLAIN = int, float, complex, str, tuple, torch.dtype, type(None)


def stored_of(module: TracedModule) -> tuple[Stored, ...]:
    """List the parameters and buffers that the ranks hold, by the first of their names."""
    captured, traced, training = module.traced.captured, module.traced, module.options.training
    names: dict[str, list[str]] = {}
    for name, first in captured.ties.items():
        names.setdefault(first, []).append(name)
    return tuple(
        Stored(
            traced.stored.get(of, ""),
            tuple(names[of]),
            trained=of in traced.gradients,
            frozen=not captured.tensors[of].requires_grad,
            parameter=isinstance(captured.tensors[of], nn.Parameter),
            shape=tuple(captured.tensors[of].shape),
            dtype=captured.tensors[of].dtype,
            gradient=traced.gradients.get(of, ""),
            written=traced.written.get(of, ""),
            hidden=frozenset(names[of]) - captured.persistent,
            rest=traced.rests.get(of, ""),
        )
        for of in names
        if of in traced.stored or (training and of in captured.persistent)
    )


def weights_of(
    module: TracedModule, stored: Sequence[Stored], init_seed: int | None, init: Init | None
) -> Source:
    """The source of the ranks' weights; a BackendError if they are fake and nothing makes them."""
    if init_seed is not None or init is not None:
        return Initialiser(module.module, init_seed or 0, init)
    tensors = module.traced.captured.tensors
    fake = [e.names[0] for e in stored if without_contents(tensors[e.names[0]])]
    fake += [name for name in module.traced.fixed if without_contents(tensors[name])]
    if fake:
        raise BackendError(
            f"{fake[0]} and {len(fake) - 1} more have no contents, the module's weights are "
            "fake: give init_seed=, or compile the module with its weights"
        )
    return tensors.__getitem__


def with_contents(graph: Graph, traced: ModuleGraph, source: Source) -> Graph:
    """Return a graph whose fake constants have their contents from a source."""
    tensors = traced.captured.tensors
    fake = {v: name for name, v in traced.fixed.items() if without_contents(tensors[name])}
    if not fake:
        return graph

    def contents(name: str) -> np.ndarray:
        return constant_loader(source(name), name)()

    constants = {
        value: replace(constant, load=partial(contents, fake[value])) if value in fake else constant
        for value, constant in graph.constants.items()
    }
    return replace(graph, constants=constants)


def submodules_of(module: TracedModule) -> Mapping[str, Submodule]:
    """The submodules of the module by path, in its order, and the module itself."""
    snapshot = module.snapshot
    settings, modes = snapshot.settings, snapshot.modes
    constants = {path: {n for n in one if n.isidentifier()} for path, one in settings.items()}
    for name in module.traced.fixed:
        path, _, leaf = name.rpartition(".")
        constants.setdefault(path, set()).add(leaf)
    submodules: dict[str, Submodule] = {}
    first: dict[int, str] = {}
    for path, part in module.module.named_modules(remove_duplicate=False):
        if first.setdefault(id(part), path) != path:
            submodules[path] = Submodule(first=first[id(part)])
            continue
        tensors = {**vars(part)["_parameters"], **vars(part)["_buffers"]}
        absent = frozenset(name for name, tensor in tensors.items() if tensor is None)
        names, mode = frozenset(constants.get(path, ())), modes.get(path, True)
        values = _plain_values(part, settings.get(path, {}))
        if not path:  # attributes that are no tensors and no plain values, as a config
            values |= {
                name: value
                for name, value in vars(part).items()
                if not name.startswith("_") and not isinstance(value, (*_PLAIN, torch.Tensor))
            }
        state = OwnState.of(part) if module.options.training else OwnState()
        submodules[path] = Submodule(type(part), names, absent, mode, values=values, state=state)
    return submodules


def _plain_values(part: nn.Module, settings: Mapping[str, object]) -> dict[str, object]:
    """Numbers, texts and tuples of them that attributes of a submodule hold.

    Args:
        settings: Those that the trace left as they were, by attribute and place in it.
    """
    values = {name: value for name, value in settings.items() if name.isidentifier()}
    for name in {path.partition("[")[0] for path in settings} - values.keys():
        value = vars(part).get(name)
        if isinstance(value, tuple) and all(isinstance(one, int | float | str) for one in value):
            values[name] = value
    return {name: value for name, value in values.items() if isinstance(value, _PLAIN)}

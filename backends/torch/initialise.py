"""Weights from a seed, one submodule at a time: the whole model is never held.

The submodule that owns a parameter is made on the CPU alone, initialised by its own means from a
seed that follows from its name, and freed when the next one is asked for. So the weights are the
same on every rank and for every number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.backends.errors import BackendError, one_line

#: Initialises what a submodule owns itself.
Init = Callable[[nn.Module], object]


def without_contents(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


class Initialiser:
    """Gives the whole initial contents of parameters and buffers by name.

    Args:
        module: The model; its weights may be fake, or on the meta device. It is left alone.
        seed: Of all weights.
        init: Initialises a submodule's own parameters and buffers; default: its
            `reset_parameters()`, then `_init_weights` of the model that it is part of (as in
            transformers) for it and for the submodules that it is in.

    Raises:
        BackendError: Submodules have no means to be initialised; says which.
    """

    def __init__(self, module: nn.Module, seed: int, init: Init | None = None) -> None:
        self._seed = seed
        self._init = init
        held = [*module.parameters(), *module.buffers()]
        self._contents = {
            name: buffer
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not without_contents(buffer)
        }
        self._skeleton = copy.deepcopy(module, {id(one): _on_meta(one) for one in held})
        self._path: str | None = None
        self._made: dict[str, torch.Tensor] = {}
        if init is None:
            self._check()

    def __call__(self, name: str) -> torch.Tensor:
        """Contents of a parameter or buffer.

        Raises:
            BackendError: Initialising its submodule fails or leaves it unset.
        """
        path, _, leaf = name.rpartition(".")
        if path != self._path:
            self._path, self._made = None, {}
            self._made = self._materialised(path)
            self._path = path
        return self._made[leaf]

    def _check(self) -> None:
        """Every submodule that owns what is to be set must have a means to set it."""
        lost = []
        for path, module in self._skeleton.named_modules():
            names = [name for name, _ in _own(module)]
            unset = [name for name in names if _joined(path, name) not in self._contents]
            if unset and _reset(module) is None and not any(self._hooks(path)):
                lost.append(f"{path or 'the model'} ({type(module).__name__}: {', '.join(unset)})")
        if lost:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise BackendError(
                f"no means to initialise {'; '.join(lost[:5])}{more}: give them "
                "reset_parameters(), or give init=, a function of a submodule"
            )

    def _materialised(self, path: str) -> dict[str, torch.Tensor]:
        owner = self._skeleton.get_submodule(path)
        before = dict(_own(owner))
        blank = {name: self._blank(_joined(path, name), one) for name, one in before.items()}
        _replace(owner, blank)
        starts = {name: one._version for name, one in blank.items()}
        digest = hashlib.sha256(f"{self._seed}/{path}".encode()).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
                self._initialise(path, owner)
            after = dict(_own(owner))
        except Exception as error:
            raise BackendError(
                f"initialising {path or 'the model'} ({type(owner).__name__}) alone: "
                f"{one_line(error)}"
            ) from error
        finally:
            _replace(owner, before)
        for name, tensor in after.items():
            touched = tensor is not blank[name] or tensor._version != starts[name]
            if _joined(path, name) not in self._contents and not _is_set(tensor, touched=touched):
                raise BackendError(
                    f"initialising {path or 'the model'} ({type(owner).__name__}) leaves "
                    f"{name!r} unset: give init=, a function of a submodule"
                )
        return {name: tensor.detach() for name, tensor in after.items()}

    def _blank(self, name: str, meta: torch.Tensor) -> torch.Tensor:
        """A tensor to be set: buffers that have contents start with them."""
        known = self._contents.get(name)
        if known is not None:
            return known.detach().cpu().clone()
        fill = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        made = torch.full(meta.shape, fill, dtype=meta.dtype, device="cpu")
        trains = meta.requires_grad
        return nn.Parameter(made, requires_grad=trains) if isinstance(meta, nn.Parameter) else made

    def _initialise(self, path: str, owner: nn.Module) -> None:
        if self._init is not None:
            self._init(owner)
            return
        reset = _reset(owner)
        if reset is not None:
            reset()
        for hook in self._hooks(path):
            hook()

    def _hooks(self, path: str) -> Iterator[Callable[[], Any]]:
        """`_init_weights` for a submodule and for all that it is in, by the model of each."""
        names = path.split(".") if path else []
        chain = [self._skeleton.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
        for at in reversed(range(len(chain))):
            for model in reversed(chain[: at + 1]):
                hook = getattr(model, "_init_weights", None)
                if callable(hook):
                    yield partial(hook, chain[at])
                    break


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module itself."""
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _replace(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in module._parameters:
            assert isinstance(tensor, nn.Parameter)
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor


def _reset(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            reset: Callable[[], object] = found
            return reset
    return None


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    trains = tensor.requires_grad
    return nn.Parameter(made, requires_grad=trains) if isinstance(tensor, nn.Parameter) else made


def _is_set(tensor: torch.Tensor, *, touched: bool) -> bool:
    """Whether contents were written: numbers that were to be replaced are NaN."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not bool(tensor.isnan().any())
    return touched


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

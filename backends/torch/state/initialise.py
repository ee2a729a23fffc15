"""Weights from a seed, one submodule at a time: the whole model is never in memory.

The submodule that owns a parameter is made on the CPU alone, initialised by its own functions from
a seed that follows from its name, and freed when the next one is needed. So the weights are the
same on every rank and for every number of ranks.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from partitioner.backends.errors import BackendError, one_line

#: Initialises a submodule's own parameters and buffers.
Init = Callable[[nn.Module], object]


def without_contents(tensor: Tensor) -> bool:
    """Test whether a tensor is fake or on the meta device."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


class Initialiser:
    """Returns the whole initial contents of parameters and buffers by name.

    Args:
        module: The model; its weights may be fake, or on the meta device. It is not changed.
        init: Initialises a submodule's own parameters and buffers; default: its
            `reset_parameters()`, then `_init_weights` of the model that it is part of (as in
            transformers) for it and for the submodules that it is in.
    """

    def __init__(self, module: nn.Module, seed: int, init: Init | None = None) -> None:
        self.seed = seed
        self._init = init
        tensors = [*module.parameters(), *module.buffers()]
        self._contents = {
            name: buffer
            for name, buffer in module.named_buffers(remove_duplicate=False)
            if not without_contents(buffer)
        }
        self._skeleton = copy.deepcopy(module, {id(x): _on_meta(x) for x in tensors})
        self._path: str | None = None
        self._tensors: dict[str, Tensor] = {}
        if init is None:
            self._check()

    def __call__(self, name: str) -> Tensor:
        """Contents of a parameter or buffer; a BackendError if its submodule does not set it."""
        path, _, leaf = name.rpartition(".")
        if path != self._path:
            self._path, self._tensors = None, {}  # freed before the next ones are made
            self._tensors = self._materialised(path)
            self._path = path
        return self._tensors[leaf]

    def _check(self) -> None:
        """Every submodule that owns tensors to be set must have a function that sets them."""
        lost = []
        for path, module in self._skeleton.named_modules():
            names = [name for name, _ in _owned(module)]
            unset = [name for name in names if _joined(path, name) not in self._contents]
            if unset and _reset(module) is None and not any(self._hooks(path)):
                lost.append(f"{path or 'the model'} ({type(module).__name__}: {', '.join(unset)})")
        if lost:
            more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
            raise BackendError(
                f"no means to initialise {'; '.join(lost[:5])}{more}: give them "
                "reset_parameters(), or give init=, a function of a submodule"
            )

    def _materialised(self, path: str) -> dict[str, Tensor]:
        """The initialised parameters and buffers of a submodule itself, by name in it."""
        owner = self._skeleton.get_submodule(path)
        before = dict(_owned(owner))
        blank = {name: self._blank(_joined(path, name), meta) for name, meta in before.items()}
        _replace(owner, blank)
        starts = {name: tensor._version for name, tensor in blank.items()}
        digest = hashlib.sha256(f"{self.seed}/{path}".encode()).digest()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest[:8]) >> 1)
                if self._init is not None:
                    self._init(owner)
                else:
                    for call in (_reset(owner), *self._hooks(path)):
                        if call is not None:
                            call()
            after = dict(_owned(owner))
        except Exception as error:
            raise BackendError(
                f"initialising {path or 'the model'} ({type(owner).__name__}) alone: "
                f"{one_line(error)}"
            ) from error
        finally:
            _replace(owner, before)
        for name, tensor in after.items():
            if tensor.is_floating_point() or tensor.is_complex():
                is_set = not bool(tensor.isnan().any())
            else:
                is_set = tensor is not blank[name] or tensor._version != starts[name]
            if _joined(path, name) not in self._contents and not is_set:
                raise BackendError(
                    f"initialising {path or 'the model'} ({type(owner).__name__}) leaves "
                    f"{name!r} unset: give init=, a function of a submodule"
                )
        return {name: tensor.detach() for name, tensor in after.items()}

    def _blank(self, name: str, meta: Tensor) -> Tensor:
        """A tensor to be set, of NaN or 0; buffers that have contents start with them."""
        contents = self._contents.get(name)
        if contents is not None:
            return contents.detach().cpu().clone()
        fill = float("nan") if meta.is_floating_point() or meta.is_complex() else 0
        return _as_parameter(torch.full(meta.shape, fill, dtype=meta.dtype, device="cpu"), meta)

    def _hooks(self, path: str) -> Iterator[Callable[[], Any]]:
        """Calls of `_init_weights` for a submodule and those around it, each of its own model."""
        names = path.split(".") if path else []
        chain = [self._skeleton.get_submodule(".".join(names[:n])) for n in range(len(names) + 1)]
        for at in reversed(range(len(chain))):
            for model in reversed(chain[: at + 1]):
                hook = getattr(model, "_init_weights", None)
                if callable(hook):
                    yield partial(hook, chain[at])
                    break


def _owned(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in table.items() if tensor is not None)


def _replace(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name in module._parameters:
            assert isinstance(tensor, nn.Parameter)
            module._parameters[name] = tensor
        else:
            module._buffers[name] = tensor


def _reset(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        reset: Callable[[], object] | None = getattr(module, name, None)
        if callable(reset):
            return reset
    return None


def _on_meta(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _as_parameter(meta, tensor)


def _as_parameter(tensor: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=like.requires_grad)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

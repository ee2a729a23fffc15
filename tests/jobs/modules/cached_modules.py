"""Modules that keep caches as buffers, on ranks of a gloo group: their writes copy no cache."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import partitioner
from helpers.onnx_files.decoders import Keeping, Static, llama
from partitioner.api.compiled.module import ModuleProgram

WIDTH, LENGTH = 8, 4096
#: Tokens that are made, and places of the caches for them.
TOKENS = 32


class Twice(Keeping):
    """Reads a cache before it writes to it, twice, and returns it."""

    def forward(self, x: Tensor, position: Tensor) -> Any:
        before = self.keys0.clone()
        self.keys0[:, :, position] = x.view(1, 2, 1, -1)
        self.keys1[:, :, position] = x.view(1, 2, 1, -1)
        self.keys1.index_copy_(2, position + 1, x.view(1, 2, 1, -1))
        return super().forward(x, position), before.sum(2), self.keys0, self.keys1


def _compiled(module: nn.Module) -> ModuleProgram:
    torch.manual_seed(0)
    example = torch.randn(1, 1, WIDTH), torch.tensor([0])
    program = partitioner.compile(module.eval(), example, devices=2, parallel="cp", time_limit_s=3)
    assert isinstance(program, ModuleProgram)
    return program


@cache
def keeping() -> ModuleProgram:
    torch.manual_seed(0)
    return _compiled(Keeping(WIDTH, LENGTH))


@cache
def twice() -> ModuleProgram:
    torch.manual_seed(0)
    return _compiled(Twice(WIDTH, LENGTH))


@cache
def generating() -> ModuleProgram:
    torch.manual_seed(0)
    module = Static(llama(), TOKENS).eval()
    example = torch.tensor([[1]]), torch.tensor([0])
    program = partitioner.compile(module, example, devices=2, parallel="tp", time_limit_s=3)
    assert isinstance(program, ModuleProgram)
    return program


class _Sizes(TorchDispatchMode):
    """Notes the operators that make, or write, all elements of a tensor as large as a cache."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.noted = numel, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if _is_tensor(x)}
        for made in filter(_is_tensor, tree_leaves(result)):
            is_new = made.untyped_storage().data_ptr() not in given
            if made.numel() >= self.numel and (is_new or func is torch.ops.aten.copy_.default):
                self.noted.append(str(func))
        return result


def _is_tensor(x: object) -> bool:
    return isinstance(x, Tensor)


def copies_no_cache(_: int) -> None:
    """Steps beside one process's; nothing as large as half of a cache is made on a rank."""
    program = keeping()
    module, plain = program.module(), copy.deepcopy(program.whole)
    for step, position in enumerate((0, 1, LENGTH // 2, LENGTH - 1)):
        x = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(step))
        sizes = _Sizes(numel=LENGTH // 2 * WIDTH)
        with sizes:
            result = module(x, torch.tensor([position]))
        assert not sizes.noted, sizes.noted
        torch.testing.assert_close(result, plain(x, torch.tensor([position])))


def generates(_: int) -> None:
    """Greedy tokens are those of one process, and each rank keeps half of the caches."""
    program = generating()
    module, plain = program.module(), copy.deepcopy(program.whole)
    made = []
    for model in (module, plain):
        token, tokens = torch.tensor([[1]]), list[int]()
        with torch.inference_mode():
            for step in range(TOKENS):
                token = model(token, torch.tensor([step]))[:, -1:].argmax(-1)
                tokens.append(int(token))
        made.append(tokens)
    assert made[0] == made[1], made
    names = [name for name, _ in plain.named_buffers() if name.startswith("cache")]
    assert len(names) == 4
    own = dict(module.named_buffers())
    for name in names:
        part = own[name]
        local = part.to_local() if isinstance(part, DTensor) else part
        assert 2 * local.numel() == plain.get_buffer(name).numel(), name


def reads_before_it_writes(_: int) -> None:
    """A cache that is read before it is written is copied; results are no views of buffers."""
    program = twice()
    module, plain = program.module(), copy.deepcopy(program.whole)
    earlier: list[tuple[Tensor, Tensor]] = []
    for step, position in enumerate((LENGTH // 2 - 1, 0, LENGTH - 2)):
        x = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(step))
        results = module(x, torch.tensor([position]))
        wanted = tuple(one.clone() for one in plain(x, torch.tensor([position])))
        earlier += zip(results, wanted, strict=True)
    for result, wanted_one in earlier:
        torch.testing.assert_close(result, wanted_one)

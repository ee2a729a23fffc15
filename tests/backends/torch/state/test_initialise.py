"""Weights from a seed, one submodule at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from helpers.modules.trained import Gpt, Mlp
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.state.initialise import Initialiser


class Live(TorchDispatchMode):
    """Bytes of the CPU tensors made inside that are alive, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.storages = {key: one for key, one in self.storages.items() if not one[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.storages.values()))
        return result


@contextmanager
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def everything(make: Initialiser, module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: make(name).clone() for name in module.state_dict()}


def test_one_submodule_is_held_at_a_time() -> None:
    with on_meta():
        module = Gpt(blocks=4, width=64)
    largest = max(sum(p.nbytes for p in one.parameters(recurse=False)) for one in module.modules())
    total = sum(p.nbytes for p in module.parameters())
    with Live() as live:
        make = Initialiser(module, 0)
        for name, _ in module.named_parameters():
            make(name)
    assert largest <= live.most <= 2 * largest < total / 2


def test_the_same_seed_gives_the_same_weights_in_any_order() -> None:
    with on_meta():
        fake = Gpt()
    torch.manual_seed(5)
    first = everything(Initialiser(fake, 3), fake)
    after = torch.rand(1)
    torch.manual_seed(6)
    make = Initialiser(Gpt(), 3)
    for name in reversed(first):
        if name != "head.weight":
            torch.testing.assert_close(make(name), first[name], rtol=0, atol=0)
    torch.manual_seed(5)
    torch.testing.assert_close(torch.rand(1), after)  # the caller's draws are left alone
    other = everything(Initialiser(fake, 4), fake)
    assert not torch.equal(other["blocks.0.up.weight"], first["blocks.0.up.weight"])
    assert not torch.equal(first["blocks.0.up.weight"][:16], first["blocks.0.out.weight"])
    assert torch.equal(first["norm.weight"], torch.ones(16))


def test_buffers_with_contents_keep_them() -> None:
    module = Mlp()
    make = Initialiser(module, 0)
    assert make("version") == 3
    assert make("norm.running_var").eq(1).all()
    assert not torch.equal(make("first.weight"), module.first.weight)


def test_transformers_initialise_as_themselves() -> None:
    config = GPT2Config(n_layer=8, n_head=2, n_embd=64, vocab_size=512, initializer_range=0.5)
    with on_meta():
        module = GPT2LMHeadModel(config)
    make = Initialiser(module, 0)
    path = "transformer.h.3"
    torch.testing.assert_close(
        make("transformer.wte.weight").std(), torch.tensor(0.5), rtol=0.05, atol=0
    )
    torch.testing.assert_close(
        make(f"{path}.mlp.c_fc.weight").std(), torch.tensor(0.5), rtol=0.05, atol=0
    )
    # the submodule that it is in scales it: 0.5 / sqrt(2 * 8)
    torch.testing.assert_close(
        make(f"{path}.mlp.c_proj.weight").std(), torch.tensor(0.125), rtol=0.05, atol=0
    )
    assert make(f"{path}.ln_1.weight").eq(1).all()
    assert make(f"{path}.mlp.c_fc.bias").eq(0).all()


def test_rotary_tables_of_a_model_on_meta() -> None:
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    with on_meta():
        module = LlamaForCausalLM(config)
    make = Initialiser(module, 0)
    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    torch.testing.assert_close(make("model.rotary_emb.inv_freq"), expected)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3))


class Half(Scale):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.factor)


class Broken(Scale):
    def reset_parameters(self) -> None:
        raise ValueError("no luck")


def test_submodules_without_means_are_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Scale(), Scale())
    message = r"^no means to initialise 1 \(Scale: factor\); 2 \(Scale: factor\): give them"
    with pytest.raises(BackendError, match=message):
        Initialiser(module, 0)
    seen = []
    make = Initialiser(module, 0, lambda one: seen.append(one) or nn.init.zeros_(one.factor))
    assert make("1.factor").eq(0).all()
    assert [type(one) for one in seen] == [Scale]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Half, r"^initialising 0 \(Half\) leaves 'shift' unset: give init="),
        (Broken, r"^initialising 0 \(Broken\) alone: no luck$"),
    ],
)
def test_what_is_left_unset_or_fails(kind: type[nn.Module], message: str) -> None:
    make = Initialiser(nn.Sequential(kind()), 0)
    with pytest.raises(BackendError, match=message):
        make("0.factor")

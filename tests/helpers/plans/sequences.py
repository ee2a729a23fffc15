"""Attention over a cut sequence in a form that is forced, and training beside one process."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.rule import Cut
from partitioner.strategies.constraints import Constraints, Pin

ATTENTION = "partitioner::attention"
#: Of the keys that attention reads: whole, or cut along heads. The ring is a kind of its own.
PINS: dict[str, dict[str, Any]] = {"gather": {"replicate": True}, "heads": {"dim": 1}}
FORMS = (*PINS, "ring")


class Block(nn.Module):
    """Two layers of causal attention with grouped heads, over any length; the loss first."""

    def __init__(self, width: int = 16, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv = heads, kv
        self.norm = nn.LayerNorm(width)
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // heads * kv) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(2):
            h = self.norm(x)
            q = self.q(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k, v = (p(h).unflatten(-1, (self.kv, -1)).transpose(1, 2) for p in (self.k, self.v))
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.out(a.transpose(1, 2).flatten(2))
        return functional.mse_loss(x, y), x


def keys_of(module: nn.Module, inputs: Any, *, training: bool = True) -> list[str]:
    """The keys that attention of a module's graph reads."""
    whole = partitioner.compile(module, inputs, devices=1, training=training)
    assert isinstance(whole, ModuleProgram)
    keys = [node.inputs[1] for node in whole.graph.nodes if node.op == ATTENTION]
    assert keys
    return keys


def forced(
    module: nn.Module,
    inputs: Any,
    form: str,
    devices: int,
    keys: Sequence[str] = (),
    **more: Any,
) -> ModuleProgram:
    """A training program by parallel="cp" in which all attention, of these keys, has a form."""
    options = {"devices": devices, "training": True, "time_limit_s": 3, **more}
    if form == "ring":
        program = partitioner.compile(module, inputs, parallel="ring", **options)
        assert isinstance(program, ModuleProgram)
        return program
    keys = keys or keys_of(module, inputs, training=options["training"])
    pins = [Pin(form, tensor=key, axis="cp", side="read", **PINS[form]) for key in keys]
    program = partitioner.compile(
        *(module, inputs), parallel="cp", constraints=Constraints(tuple(pins)), **options
    )
    assert isinstance(program, ModuleProgram)
    return program


def is_of_form(program: ModuleProgram, form: str) -> bool:
    """Whether all attention of the forward pass has the form."""
    if form == "ring":
        steps = cuts_of(program, f"{ATTENTION}_step")
        return bool(steps) and all("w" in cuts for cuts in steps) and not cuts_of(program)
    return all(("q" in cuts) == (form == "gather") for cuts in cuts_of(program))


def cuts_of(program: ModuleProgram, op: str = ATTENTION) -> list[dict[str, Cut]]:
    nodes = (node for node in program.graph.nodes if node.op == op)
    return [dict(program.plan.nodes[node.name].cuts) for node in nodes]


def trains_alike(
    program: ModuleProgram, module: nn.Module, inputs: Any, steps: int = 10, rate: float = 0.1
) -> None:
    """So many steps of gradient descent, each like those of a copy of the module.

    Of a high rate, a step amplifies the rounding of those before.
    """
    alone = copy.deepcopy(module)

    def call(one: Any) -> Any:
        return one(**inputs) if isinstance(inputs, dict) else one(*inputs)

    for _ in range(steps):
        alone.zero_grad()
        loss = call(alone)
        (loss["loss"] if isinstance(loss, dict) else loss[0]).backward()
        _, gradients = call(program.gradients)
        for name, parameter in alone.named_parameters():
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name], parameter.grad, atol=2e-5 * scale + 1e-7, rtol=0
            )
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter -= rate * gradients[name]
            for parameter in alone.parameters():
                parameter -= rate * parameter.grad

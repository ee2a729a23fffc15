"""Options compose: each pair gives a plan that verifies, or one sentence that names both options."""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import onnx
import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner import examples, tuning
from partitioner.compiled.base import Compiled
from partitioner.ir.errors import PartitionerError
from partitioner.ir.plan import Plan
from partitioner.option_table import CompileOptions, described
from partitioner.options import _NAMED

#: What is planned: one ONNX model, one module.
SETTINGS = ("onnx", "inference", "training")
#: All refusals of a pair: what is impossible in principle, a sentence each.
SENTENCES = (
    r"recompute is for training",
)


class Pair(nn.Module):
    """Two layers, which return their loss in training."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.loss = nn.Linear(16, 32), nn.Linear(32, 16), loss

    def forward(self, x: Tensor) -> Tensor:
        """Of any batch."""
        y: Tensor = self.down(torch.relu(self.up(x)))
        return (y**2).mean() if self.loss else y


@cache
def onnx_model() -> onnx.ModelProto:
    return examples.build("mlp", layers=2, hidden=16, batch=8)


@dataclass(frozen=True)
class Value:
    """A value of an option.

    Attributes:
        name: The option.
        value: Its value, or a function that gives it for a setting.
        words: A pattern by which sentences name it.
        needs: Other options that it means nothing without.
        label: For people, where values of an option differ.
        decides: Whether the plans that are searched depend on it: such values are paired in every
            setting, the others in one.
    """

    name: str
    value: Any
    words: str = ""
    needs: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    decides: bool = True

    def options(self, setting: str) -> dict[str, Any]:
        value = self.value(setting) if callable(self.value) else self.value
        needs = {k: v(setting) if callable(v) else v for k, v in self.needs.items()}
        return {**needs, self.name: value}

    def __str__(self) -> str:
        return self.label or f"{self.name}={self.value}"


def names(setting: str) -> tuple[str, str]:
    """The names of the input and of the last weight."""
    return ("x", "layer1.weight") if setting == "onnx" else ("x", "down.weight")


def tensor_pin(setting: str) -> Mapping[str, Any]:
    return {"pin": [{"tensor": names(setting)[1], "dim": 0}]}


def device_pins(setting: str) -> Mapping[str, Any]:
    first, last = ("layer0.*", "y") if setting == "onnx" else ("/up/*", "/down/*")
    return {"pin": [{"nodes": [first], "device": 0}, {"nodes": [last], "device": 1}]}


def group_pin(setting: str) -> Mapping[str, Any]:
    last = "y" if setting == "onnx" else "/down/*"
    return {"pin": [{"nodes": [last], "devices": [0, 1]}]}


def named_dims(setting: str) -> Mapping[str, Any]:
    return {"dims": {"batch": f"{names(setting)[0]}.0"}, "layout": {"batch": "dp"}}


@cache
def plan_of(setting: str, **options: Any) -> Plan:
    return compiled(setting, **options).plan


def whole_plan(setting: str) -> Plan:
    return plan_of(setting, parallel="dp")


def staged_plan(setting: str) -> Plan:
    return plan_of(setting, parallel="pp", micro_batches=2)


#: A limit of memory that one device does not fit, and one that only blocks fit.
TIGHT = {"onnx": 2650, "inference": 5000, "training": 18_000}


def tight(setting: str) -> int:
    return TIGHT[setting]


@cache
def run_in_blocks() -> tuple[nn.Module, Tensor, int]:
    """A module whose batch fits no device but in blocks, and the limit."""
    raise NotImplementedError


def compiled(setting: str, **options: Any) -> Compiled:
    """Compile one of the models for two devices."""
    fixed: dict[str, Any] = {"cluster": "2xcpu", "time_limit_s": 5.0, **options}
    if setting == "onnx":
        return partitioner.compile(onnx_model(), None, 2, **fixed)
    training = setting == "training"
    fixed = {"training": training, **fixed}
    return partitioner.compile(Pair(loss=training), torch.ones(8, 16), 2, **fixed)


LOCAL = {"cluster": "local", "profile": Path("/nowhere/profile.sqlite")}

#: Values of the options whose types do not say which there are.
VALUES = (
    Value("dims", {}, decides=False),
    Value("shapes", {}, decides=False),
    Value("optimizer", "sgd", "optimizer", decides=False),
    Value("progress", lambda _: lambda _line: None, decides=False),
    Value("parallel", "dp", "parallel|dp"),
    Value("parallel", "pp", "parallel|pp|stages|pipeline"),
    Value("cluster", "2xl4", "cluster", decides=False),
    Value("memory", tight, "memory|fit", label="memory"),
    Value("profile", LOCAL["profile"], "profile", LOCAL, decides=False),
    Value("mesh", {"dp": 2}, "mesh"),
    Value("mesh", {"pp": 2}, "mesh|stages|pipeline"),
    Value("constraints", tensor_pin, "pin", label="tensor pin"),
    Value("constraints", device_pins, "pin", label="device pins"),
    Value("constraints", group_pin, "pin", label="group pin"),
    Value("constraints", named_dims, "layout|dim", label="named dims"),
    Value("constraints", whole_plan, "plan", label="whole plan"),
    Value("constraints", staged_plan, "plan", label="staged plan"),
    Value("time_limit_s", 3.0, decides=False),
    Value("gap", 0.1, decides=False),
    Value("solver", "cbc", "solver", decides=False),
    Value("seed", 3, decides=False),
    Value("tune", 2, "tune", LOCAL, decides=True),
    Value("schedule", lambda s: "1f1b" if s == "training" else "forward", "schedule", label="schedule"),
    Value("micro_batches", 2, "micro"),
    Value("micro_batches", "auto", "micro"),
    Value("recompute", True, "recompute"),
    Value("recompute", False, "recompute"),
)


def values() -> Iterator[Value]:
    """The values of all options of the table: a new one is in by its type, or asks for a line."""
    hints = get_type_hints(CompileOptions, localns=_NAMED)
    for name in described(CompileOptions):
        own = [value for value in VALUES if value.name == name]
        if own:
            yield from own
        elif hints[name] is bool:
            yield Value(name, True, name, decides=False)
        elif get_origin(hints[name]) is Literal:
            yield from (Value(name, one, f"{name}|{one}") for one in get_args(hints[name])[1:])
        else:
            raise AssertionError(f"give the option {name} a value in VALUES")


def pairs() -> Iterator[tuple[str, Value, Value]]:
    for one, other in itertools.combinations(values(), 2):
        if one.name == other.name:
            continue
        own = [s for s in SETTINGS if applies(one, s) and applies(other, s)]
        if not own:
            continue
        if not (one.decides and other.decides):
            own = [own[zlib.crc32(f"{one}{other}".encode()) % len(own)]]
        yield from ((setting, one, other) for setting in own)


def applies(value: Value, setting: str) -> bool:
    if value.name == "training":
        return setting == "onnx"  # it is one of the settings of modules
    return value.name not in ("dims", "shapes", "plan_only") or setting == "onnx"

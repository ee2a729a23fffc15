"""Options compose: each pair gives a plan that verifies, or one sentence that names both options.

The pairs come from the table of options: a new one is in by its type, or the test asks for a value.
"""

from __future__ import annotations

import itertools
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
from partitioner import examples
from partitioner.api.compiled.base import Compiled
from partitioner.api.compiled.module_ranks import ModuleRanks
from partitioner.api.compiled.onnx_model import OnnxRanks
from partitioner.api.option_table import CompileOptions, described
from partitioner.api.options import _NAMED
from partitioner.backends.launch import LocalJob, LocalRun
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.errors import CostError
from partitioner.ir.errors import PartitionerError
from partitioner.ir.plan import Plan

#: What is planned: an ONNX model, and a module in inference and in training.
SETTINGS = ("onnx", "inference", "training")
#: Pairs that are impossible in principle: the only refusals.
SENTENCES = (
    r"(shards? operators|are no partition); leave it out with strategy '(inter|copies)'",
    r"no two whole copies fit, each on devices of its own: .*; it fits with --memory",
    r"strategy 'intra' cuts operators over devices, and .* gives each stage one device",
    r"parallel '(dp|pp)' .*mesh",
    r"a layout over dp cuts nothing in stages of one device",
    r"pin 1: '.*' cannot be cut in stages of one device",
    r"(pin \d|parallel dp: .*) leaves no strategy .*( in (inter|intra) \(|honours constraints pin)",
    r"(micro_batches|schedule|mesh|parallel) .*: the plan in constraints runs ",
    r"recompute=True: the plan in constraints says what is recomputed",
    r"tune measures seconds: leave it out with the objective memory",
    r"tune runs the plans, which needs the weights: leave plan_only out",
    r"; blocks are not searched with the plan in constraints",
    r"tune runs plans on this machine, and cluster '.*' is not known to be it",
    r"'y/feed' (of stage 0 reads a value of 'y' of stage \d|is kept .*: leave strategy 'copies')",
    r"a profile is of cluster 'local', the cluster is '.*': leave the profile out",
)
#: One pair of so many is tried by default, and of those on many devices one of so many at all.
ONE_IN, LARGE_ONE_IN = 40, 6
#: Devices for which plans are made by levels, and not written: behind the "@" of a setting.
LARGE = (80, 256)
#: What many devices add: a kind cannot have them all with this model.
LARGE_SENTENCES = (
    r"\d+ devices cannot share a batch of \d+ equally, as devices of a large cluster must",
    r"strategy 'inter' places whole operators, and mesh .* has stages of \d+ devices",
    r"\d+ stages were asked for, and the model has \d+ at most",
)


class Pair(nn.Module):
    """Two layers, which return their loss in training."""

    def __init__(self, width: int, *, loss: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.relu(self.up(x)))
        return (y**2).mean() if self.loss else y


@cache
def onnx_model(batch: int = 8, hidden: int = 32) -> onnx.ModelProto:
    return examples.build("mlp", layers=4, hidden=hidden, batch=batch)


def count_of(setting: str) -> int:
    """Devices of a setting: 2, or those behind its "@"."""
    return int(setting.partition("@")[2] or 2)


@dataclass(frozen=True)
class Value:
    """A value of an option.

    Attributes:
        name: The option.
        value: Its value, or a function that gives it for a setting.
        words: A pattern by which sentences name it.
        label: For people, where the value itself says too little.
        needs: Other options that it means nothing without.
        decides: Whether the plans that are searched depend on it: such values are paired in every
            setting, the others in one.
    """

    name: str
    value: Any
    words: str = ""
    label: str = ""
    needs: Callable[[str], Mapping[str, Any]] = field(default=lambda _setting: {})
    decides: bool = True

    def of(self, setting: str) -> Any:
        return self.value(setting) if callable(self.value) else self.value

    def __str__(self) -> str:
        return self.label or f"{self.name}={self.value}"


def tensor_pin(setting: str) -> Mapping[str, Any]:
    weight = "layer3.weight" if setting.startswith("onnx") else "down.weight"
    return {"pin": [{"tensor": weight, "dim": 0}]}


def device_pins(setting: str) -> Mapping[str, Any]:
    first, last = ("layer0.*", "y") if setting.startswith("onnx") else ("/up/*", "/down/*")
    return {"pin": [{"nodes": [first], "device": 0}, {"nodes": [last], "device": 1}]}


def group_pin(setting: str) -> Mapping[str, Any]:
    last = "y" if setting.startswith("onnx") else "/down/*"
    return {"pin": [{"nodes": [last], "devices": [0, 1]}]}


def compiled(setting: str, options: Mapping[str, Any]) -> Compiled:
    """Compile one of the models for the devices of a setting."""
    name, devices = setting.partition("@")[0], count_of(setting)
    is_large = devices in LARGE
    cluster = f"{devices // 8}x8xcpu" if is_large else "2xcpu"
    fixed: dict[str, Any] = {"cluster": cluster, "time_limit_s": 5.0, **options}
    if is_large:
        fixed["plan_only"] = True
    if name == "onnx":
        model = onnx_model(8 * devices, devices) if is_large else onnx_model()
        onnx_program: Compiled = partitioner.compile(model, None, devices, **fixed)
        return onnx_program
    fixed["training"] = name == "training"
    rows, width = (8 * devices, devices) if is_large else (8, 16)
    module = Pair(width, loss=fixed["training"])
    program: Compiled = partitioner.compile(module, torch.ones(rows, width), devices, **fixed)
    return program


@cache
def plan_of(setting: str, kind: str) -> Plan:
    options: dict[str, Mapping[str, Any]] = {
        "dp": {"parallel": "dp"},
        "pp": {"mesh": {"pp": 2}, "micro_batches": 2},
    }
    return compiled(setting, options.get(kind, blocks_limit(setting))).plan


@cache
def tight(setting: str) -> int:
    """Bytes of a device that hold its part of the batch, and not the whole of it.

    On many devices they hold the whole model, of which one device may have all.
    """
    if count_of(setting) in LARGE:
        alone = {"constraints": {"pin": [{"nodes": ["*"], "device": 0}]}}
        return max(compiled(setting, alone).evaluation.needed_bytes.values())
    return max(compiled(setting, {"parallel": "dp"}).evaluation.needed_bytes.values())


def blocks_limit(_setting: str) -> Mapping[str, Any]:
    """Bytes of a device within which the ONNX model fits in blocks alone."""
    return {"memory": 9400}


def gpus(setting: str) -> dict[str, Any]:
    return {"cluster": f"{count_of(setting)}xl4"}


def local(_setting: str) -> Mapping[str, Any]:
    """This machine, of which nothing is measured."""
    return {"cluster": "local", "profile": Path("none", "profile.sqlite")}


ONE = torch.ones(8, 1)


def plus_mean(outputs: Tensor, target: Tensor) -> Tensor:
    """A criterion of a module that returns a scalar."""
    return outputs + target.mean()


#: Values of options whose types do not say which there are.
VALUES = (
    Value("dims", {}, decides=False),
    Value("shapes", {}, decides=False),
    Value("feed", {"y": "x"}, "feed"),
    Value("optimizer", "adamw", decides=False),
    Value("loss", lambda _: plus_mean, "loss", "loss", lambda _: {"target": ONE}, decides=False),
    Value("target", lambda _: ONE, "target", "one", lambda _: {"loss": plus_mean}, decides=False),
    Value("progress", lambda _setting: str, label="progress", decides=False),
    Value("parallel", "dp", "parallel|dp"),
    Value("parallel", "pp", "parallel|pp|stage"),
    Value("cluster", "2xl4", "cluster", decides=False),
    Value("launches", "graphs", "launches|cluster", "launches", gpus, decides=False),
    Value("memory", tight, "memory", "memory"),
    Value("memory", lambda s: blocks_limit(s)["memory"], "memory|blocks", "blocks"),
    Value("profile", Path("none", "profile.sqlite"), "profile", "profile", local, decides=False),
    Value("mesh", lambda s: {"dp": count_of(s)}, "mesh|dp", "mesh dp"),
    Value("mesh", {"pp": 2}, "mesh|stage"),
    Value("constraints", tensor_pin, "pin", "tensor pin"),
    Value("constraints", device_pins, "pin", "device pins"),
    Value("constraints", group_pin, "pin", "group pin"),
    Value(
        "constraints",
        {"dims": {"batch": "x.0"}, "layout": {"batch": "dp"}},
        "layout",
        "named dims",
    ),
    Value("constraints", lambda s: plan_of(s, "dp"), "the plan in constraints", "whole plan"),
    Value("constraints", lambda s: plan_of(s, "pp"), "the plan in constraints", "staged plan"),
    Value(
        "constraints",
        lambda s: plan_of(s, "blocks"),
        "the plan in constraints",
        "block plan",
        blocks_limit,
    ),
    Value("time_limit_s", 10.0, decides=False),
    Value("gap", 0.1, decides=False),
    Value("solver", "cbc", decides=False),
    Value("seed", 3, decides=False),
    Value("tune", 2, "tune", needs=local),
    Value(
        "schedule",
        lambda s: "gpipe" if s.startswith("training") else "forward",
        "schedule|stage",
        "schedule",
    ),
    Value("micro_batches", 2, "micro_batches|micro-batches"),
    Value("micro_batches", "auto", "micro_batches"),
    Value("recompute", True, "recompute"),
    Value("recompute", False, "recompute"),
)


def values() -> Iterator[Value]:
    """The values of all options of the table."""
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
            raise AssertionError(f"give the option {name!r} a value in VALUES")


def applies(value: Value, setting: str) -> bool:
    """Test whether a setting has an option; `training` is what the settings of modules are."""
    if value.value == "copies" and setting == "training":
        return False
    if value.name in ("training", "plan_only") or str(value) in ("block plan", "blocks"):
        return value.name != "training" and setting == "onnx"
    of = {"onnx": ("onnx",), "module": ("inference", "training"), "training": ("training",)}
    return setting in of.get(described(CompileOptions)[value.name].only, SETTINGS)


def pairs() -> Iterator[tuple[str, Value, Value]]:
    for one, other in itertools.combinations(values(), 2):
        own = [setting for setting in SETTINGS if applies(one, setting) and applies(other, setting)]
        if one.name == other.name or not own:
            continue
        if one.name in ("feed", "loss", "target") and str(other).endswith("plan"):
            continue  # a plan is of the graph that they make
        if not (one.decides and other.decides):
            own = [own[zlib.crc32(f"{one}{other}".encode()) % len(own)]]
        yield from ((setting, one, other) for setting in own)


PAIRS = {f"{setting}-{one}-{other}": (setting, one, other) for setting, one, other in pairs()}
SAMPLE = dict(itertools.islice(PAIRS.items(), 0, None, ONE_IN))


def large_pairs() -> Iterator[tuple[str, Value, Value]]:
    """The pairs on many devices: of what decides plans, and is not of this machine or of few."""
    unfit = {"tune", "block plan", "blocks", "parallel=pp"}
    for number, (setting, one, other) in enumerate(PAIRS.values()):
        names = {one.name, other.name, str(one), str(other)}
        if one.decides and other.decides and names.isdisjoint(unfit):
            yield f"{setting}@{LARGE[number % len(LARGE)]}", one, other


ALL_LARGE = {
    f"{setting}-{one}-{other}": (setting, one, other) for setting, one, other in large_pairs()
}
LARGE_PAIRS = dict(itertools.islice(ALL_LARGE.items(), 0, None, LARGE_ONE_IN))
LARGE_SAMPLE = dict(itertools.islice(ALL_LARGE.items(), 3, None, ONE_IN))
# fewest bytes are searched in several rounds: slow
LARGE_SAMPLE = {name: pair for name, pair in LARGE_SAMPLE.items() if "=memory" not in name}


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the runs of plans by `tune`, and skips where this machine has too few processors."""
    try:
        resolve_cluster("2xlocal", profile=Path("none", "profile.sqlite"))
    except CostError as error:
        pytest.skip(str(error))

    def run_written(_ranks: object, _folder: Path, job: LocalJob) -> LocalRun:
        return LocalRun({}, 1e-3 * job.requests)

    for kind in (OnnxRanks, ModuleRanks):
        monkeypatch.setattr(kind, "run_written", run_written)


def check(setting: str, one: Value, other: Value) -> None:
    """A plan of the pair is found and verifies, or is impossible, which names both."""
    options = {**one.needs(setting), **other.needs(setting)}
    options |= {one.name: one.of(setting), other.name: other.of(setting)}
    try:
        program = compiled(setting, options)
    except PartitionerError as error:
        text = str(error)
        sentences = SENTENCES + (LARGE_SENTENCES if count_of(setting) in LARGE else ())
        assert any(re.search(sentence, text) for sentence in sentences), text
        for value in (one, other):
            assert value.words, f"{value} is refused: {text}"
            assert re.search(value.words, text), f"{value} is not named: {text}"
        return
    if count_of(setting) in LARGE:  # programs are not made for so many
        assert program.evaluation.fits_exactly
        return
    found = program.verify()
    assert found, str(found)


@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize("pair", SAMPLE.values(), ids=SAMPLE)
def test_a_sample_of_pairs(pair: tuple[str, Value, Value]) -> None:
    check(*pair)


@pytest.mark.slow
@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_all_pairs(pair: tuple[str, Value, Value]) -> None:
    check(*pair)


@pytest.mark.parametrize("pair", LARGE_SAMPLE.values(), ids=LARGE_SAMPLE)
def test_a_sample_of_pairs_on_many_devices(pair: tuple[str, Value, Value]) -> None:
    check(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", LARGE_PAIRS.values(), ids=LARGE_PAIRS)
def test_pairs_on_many_devices(pair: tuple[str, Value, Value]) -> None:
    check(*pair)


def test_impossible_pairs_are_few() -> None:
    assert len(SENTENCES) + len(LARGE_SENTENCES) <= 18
    assert len(PAIRS) > 150


@pytest.mark.parametrize(
    ("setting", "options", "text"),
    [
        ("inference", {"recompute": True}, "recompute is for training: inference keeps nothing"),
        ("onnx", {"recompute": True}, "recompute is for"),
        ("onnx", {"training": True}, "training is for PyTorch modules; the model is a ModelProto"),
        ("inference", {"dims": {"n": 1}}, "dims"),
        ("inference", {"shapes": {"x": (1,)}}, "shapes"),
        ("inference", {"feed": {"y": "x"}}, "feed is for ONNX models"),
    ],
)
def test_options_of_other_models_are_refused(
    setting: str, options: Mapping[str, Any], text: str
) -> None:
    with pytest.raises(PartitionerError, match=text):
        compiled(setting, options)

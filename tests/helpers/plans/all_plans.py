"""Plans of the zoo, of transformers and of training whose proofs are listed."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from helpers.modules import torch_models
from helpers.modules.small_gpt import small_gpt
from helpers.onnx_files import models
from helpers.plans.mutated_cases import CASES, Build
from helpers.plans.mutation_table import Case
from partitioner import examples

#: Options of the plans of each module.
TARGETS: Mapping[str, Mapping[str, Any]] = {
    "2": {"devices": 2, "cluster": "ideal"},
    "4": {"devices": 4, "cluster": "ideal", "mesh": {"tp": 4}},
    "2x2": {"devices": 4, "cluster": "ideal", "mesh": {"dp": 2, "tp": 2}},
    "default": {"devices": 2},
}
#: Kinds of training plans of the small GPT, with their options.
TRAINED: Mapping[str, Mapping[str, Any]] = {
    "dp": {"devices": 3},
    "zero1": {"devices": 2},
    "zero2": {"devices": 2},
    "zero3": {"devices": 3},
    "tp": {"devices": 2},
    "cp": {"devices": 2},
    "ring": {"devices": 2},
    "dp+tp": {"devices": 4},
    "zero3+tp": {"devices": 4},
    "pp": {"devices": 2, "micro_batches": 2},
    "pp+tp": {"devices": 4, "micro_batches": 2},
    "pp+zero3": {"devices": 4, "micro_batches": 2},
    "pp+zero3+tp": {"devices": 8, "micro_batches": 2},
}


def all_plans() -> Iterator[Case]:
    """The plans, those of the table of mutations first."""
    yield from CASES
    for kind, options in TRAINED.items():
        yield Case(f"gpt trains {kind}", small_gpt, {"parallel": kind, "training": True, **options})
    for name, training in itertools.product(torch_models.BUILDERS, (False, True)):
        for target, options in TARGETS.items():
            what = f"{name} {'trains ' if training else ''}{target}"
            yield Case(what, _module(name, training), {"training": training, **options})
    files = {f"exported {name}": _exported(name) for name in models.SOURCES}
    files |= {name: _example(name) for name in examples.NAMES}
    for name, devices, strategy in itertools.product(files, (2, 3, 4), ("intra", "inter")):
        yield _onnx(name, files[name], devices, strategy)


def _onnx(name: str, build: Build, devices: int, strategy: str) -> Case:
    cluster = f"{devices}xideal" if strategy == "intra" else None
    options = {"devices": devices, "strategy": strategy, "cluster": cluster}
    return Case(f"{name} {strategy} {devices}", build, options)


def _module(name: str, training: bool) -> Build:
    def build() -> tuple[Any, Any]:
        model = torch_models.build(name, training=training)
        return model.module, dict(model.inputs)

    return build


def _example(name: str) -> Build:
    return lambda: (examples.build(name), None)


def _exported(name: str) -> Build:
    return lambda: (_exported_file(name), None)


@cache
def _exported_file(name: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="partitioner-exported-")) / f"{name}.onnx"
    models.export(name, path)
    return path

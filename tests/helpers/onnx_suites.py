"""ONNX's own backend suites: their cases, and how each ends on ranks that are cut wherever a rule
allows."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

import partitioner
from partitioner.frontends.onnx.load import load_onnx
from partitioner.ir.errors import PartitionerError
from partitioner.ir.graph import Graph
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.plan import NodePlan, Plan, place
from partitioner.ir.rule import Cut
from partitioner.strategies.derive import Rules, strategies

#: The suites by ONNX's names; "node" has a case or more of each operator, the others are of old
#: operator sets.
SUITES = ("node", "simple", "pytorch-operator", "pytorch-converted")
#: Plans of a model: each takes the next cut of every node.
MOST_PLANS = 4


@dataclass(frozen=True)
class SuiteCase:
    """A model of a suite with its inputs and the outputs that ONNX expects."""

    suite: str
    name: str
    model: ModelProto
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names that the inputs of a data set have, in order."""
        weights = {tensor.name for tensor in self.model.graph.initializer}
        names = [value.name for value in self.model.graph.input]
        free = [name for name in names if name not in weights]
        return tuple(names if len(self.data[0][0]) == len(names) else free)

    @property
    def has_strings(self) -> bool:
        """Whether an input or output is of strings."""
        values = (*self.model.graph.input, *self.model.graph.output)
        return any("elem_type: 8" in str(value.type) for value in values)

    def differs(self, outputs: Sequence[Any], expected: Sequence[Any]) -> str:
        """The first difference by ONNX's own comparison; "" for none."""
        try:
            Runner.assert_similar_outputs(expected, outputs, self.rtol, self.atol)
        except (AssertionError, TypeError) as error:
            return " ".join(str(error).split())[:300]
        return ""


def cases(suite: str) -> Iterator[SuiteCase]:
    """The cases of a suite that have a model and data, by name."""
    for test in sorted(load_model_tests(kind=suite), key=lambda test: test.name):
        if test.model is None:
            model, data = onnx.load(Path(test.model_dir) / "model.onnx"), _data_on_disk(test)
        else:
            model, data = test.model, test.data_sets
        sets = [tuple([_array(value) for value in side] for side in pair) for pair in data]
        yield SuiteCase(suite, test.name, model, sets, test.rtol, test.atol)


def _data_on_disk(test: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    model = onnx.load(Path(test.model_dir) / "model.onnx")
    for folder in sorted(Path(test.model_dir).glob("test_data_set*")):
        yield tuple(
            [
                _parsed(folder / f"{kind}_{index}.pb", value.type)
                for index, value in enumerate(values)
                if (folder / f"{kind}_{index}.pb").exists()
            ]
            for kind, values in (("input", model.graph.input), ("output", model.graph.output))
        )


def _parsed(path: Path, type_: onnx.TypeProto) -> Any:
    data = path.read_bytes()
    if type_.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if type_.HasField("optional_type"):
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    return TensorProto.FromString(data)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def runtime_passes(case: SuiteCase) -> bool:
    """Whether ONNX Runtime alone gives what ONNX expects."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(
            case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return all(
            not case.differs(
                session.run(None, dict(zip(case.inputs, inputs, strict=True))), outputs
            )
            for inputs, outputs in case.data
        )
    except Exception:  # noqa: BLE001 - its errors have no common class
        return False


def forced_plans(graph: Graph, devices: int) -> Iterator[Plan]:
    """Plans in which every node is cut that can be: each takes the next cut of every node."""
    mesh = DeviceMesh.of({"tp": devices})
    by_node = strategies(graph, Rules.of(graph), mesh)
    cuts = {name: [placed for placed in of if placed.layouts] for name, of in by_node.items()}
    for turn in range(min(MOST_PLANS, max(map(len, cuts.values()), default=1) or 1)):
        groups: dict[DeviceMesh, int] = {}
        nodes = {}
        for node in graph.nodes:
            chosen = cuts[node.name]
            home = DeviceMesh.single(turn % devices)
            placed = chosen[turn % len(chosen)] if chosen else place(graph, node, home, {}, None)
            parts = {name: Cut.of(layout, mesh) for name, layout in placed.layouts.items()}
            nodes[node.name] = NodePlan(groups.setdefault(placed.mesh, len(groups)), parts)
        yield Plan(graph.digest, {}, tuple(groups), nodes)


@dataclass(frozen=True)
class Ended:
    """How a case ended: "equal" (with `cuts` nodes cut), "refused", "wrong" or "traceback"."""

    kind: str
    text: str = ""
    cuts: int = 0


def end_of(case: SuiteCase, devices: int) -> Ended:
    """Plan a model in every forced way, run its ranks and compare them with ONNX's outputs."""
    cuts = 0
    try:
        traced = load_onnx(case.model)
        for plan in forced_plans(traced.graph, devices):
            cuts += sum(1 for node in plan.nodes.values() if node.cuts)
            compiled = partitioner.compile(
                case.model, devices=devices, cluster=f"{devices}xideal", constraints=plan
            )
            for inputs, expected in case.data:
                fed = dict(zip(case.inputs, map(np.asarray, inputs), strict=True))
                outputs = compiled.run({name: fed[name] for name in traced.graph.inputs})
                made = [outputs[name] for name in traced.graph.outputs]
                if differs := case.differs(made, expected):
                    return Ended("wrong", f"{plan.nodes}: {differs}", cuts)
    except PartitionerError as error:
        return Ended("refused", str(error), cuts)
    except Exception:  # noqa: BLE001 - a traceback is what the test looks for
        return Ended("traceback", traceback.format_exc(), cuts)
    return Ended("equal", "", cuts)

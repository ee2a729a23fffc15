"""ONNX's own backend suites: their cases, and how each ends on ranks that are cut wherever a rule
allows."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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
from partitioner.backends.onnx.sessions.whole import run_whole
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
#: Two units in the last place of float16, which ONNX's own tolerance is less than. Other sums of it
#: may differ by so much.
_HALF = 2**-9
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
    def has_tensors(self) -> bool:
        """Whether all inputs and outputs are tensors of other than strings."""
        values = (*self.model.graph.input, *self.model.graph.output)
        return not self.has_strings and all(v.type.HasField("tensor_type") for v in values)

    @property
    def has_strings(self) -> bool:
        """Whether an input or output is of strings."""
        values = (*self.model.graph.input, *self.model.graph.output)
        return any("elem_type: 8" in str(value.type) for value in values)

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators; 7 for none."""
        return max((o.version for o in self.model.opset_import if not o.domain), default=7)

    @property
    def baked(self) -> SuiteCase:
        """The case with its sizes, axes and conditions as weights, as exported models have them.

        Those are the inputs of integers and booleans with one dim at most.
        """
        types = {value.name: value.type.tensor_type for value in self.model.graph.input}
        operands = zip(self.inputs, self.data[0][0], strict=True)
        return self.with_weights(
            [n for n, x in operands if types[n].elem_type in (6, 7, 9) and np.ndim(x) <= 1]
        )

    def with_weights(self, names: Collection[str]) -> SuiteCase:
        """The case of the first data set with these inputs as weights."""
        model = ModelProto()
        model.CopyFrom(self.model)
        model.ir_version = max(model.ir_version, 4)  # in 3, a weight is an input too
        (operands, expected), free = self.data[0], []
        for name, operand in zip(self.inputs, operands, strict=True):
            if name in names:
                value = next(value for value in model.graph.input if value.name == name)
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(operand), name))
                model.graph.input.remove(value)
            else:
                free.append(operand)
        return replace(self, model=model, data=[(free, expected)])

    def differs(self, outputs: Sequence[Any], expected: Sequence[Any]) -> str:
        """The first difference by ONNX's own comparison; "" for none."""
        half = any(getattr(value, "dtype", None) == np.float16 for value in expected)
        try:
            Runner.assert_similar_outputs(
                expected, outputs, max(self.rtol, _HALF if half else 0), self.atol
            )
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
    try:
        return all(
            not case.differs(_run_whole(case, inputs), outputs) for inputs, outputs in case.data
        )
    except Exception:  # noqa: BLE001 - its errors have no common class
        return False


def _run_whole(case: SuiteCase, inputs: Sequence[Any]) -> Sequence[Any]:
    """Outputs of the whole model; sequences go in and come out as lists."""
    fed = dict(zip(case.inputs, inputs, strict=True))
    if case.has_tensors:
        made = run_whole(case.model, None, {name: np.asarray(x) for name, x in fed.items()})
        return [made[value.name] for value in case.model.graph.output]
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(
        case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    outputs: Sequence[Any] = session.run(None, fed)
    return outputs


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
    """How a case ended.

    Attributes:
        kind: "equal", "refused", "wrong" or "traceback".
        text: The message.
        cuts: Nodes that were cut, over all plans.
        baked: Whether sizes, axes and conditions were given as weights (`SuiteCase.baked`).
    """

    kind: str
    text: str = ""
    cuts: int = 0
    baked: bool = False


def end_of(case: SuiteCase, devices: int) -> Ended:
    """The end of a case; where what data decides is refused, that of its baked form."""
    end = _end_of(case, devices)
    if end.kind == "refused" and "input" not in end.text.partition("': ")[2][:6]:
        baked = _end_of(case.baked, devices)
        if baked.kind != "refused":
            return replace(baked, baked=True)
    return end


def _end_of(case: SuiteCase, devices: int) -> Ended:
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

"""Numeric proof of op rows: every cut of a node's rule is run on a simulated mesh.

A `Case` is one node with its operands. `check_row` takes the node's rule from the table, cuts
its factors over meshes in every way, runs the local node of every device, joins the pending
reductions and compares each device's result with its part of the whole op's result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper
from onnx.reference import ReferenceEvaluator

from partitioner.backends.onnx.files.messages import node_proto, tensor_proto
from partitioner.ir.exchange import Region
from partitioner.ir.graph import Attr, Constant, Graph, Node
from partitioner.ir.layout import DimLayout, LayoutError, Sharding, even_cut
from partitioner.ir.loops.factors import PENDING
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of, rule_of
from partitioner.ir.ops.table import LocalOp, LocalView, OpView
from partitioner.ir.rule import Cut, Rule
from partitioner.ir.types import TensorType, onnx_dtype

MESHES = tuple(DeviceMesh.of(axes) for axes in ({"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}))
REDUCERS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}

RuleOf = Callable[[OpView], Rule]
Point = Mapping[str, int]
Cuts = Mapping[str, Cut]  #: A cut by factor.


#: Local nodes and values by name -> every value that the nodes make.
Runner = Callable[[LocalOp, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


@dataclass(frozen=True)
class Draw:
    """Random contents of an operand: uniform in [low, high], whole numbers for integer types."""

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float

    def make(self, seed: int) -> np.ndarray:
        """The array; the same for the same seed."""
        rng = np.random.default_rng(seed)
        if self.dtype == "bool" or not self.dtype.startswith("float"):
            return rng.integers(int(self.low), int(self.high) + 1, self.shape).astype(self.dtype)
        return rng.uniform(self.low, self.high, self.shape).astype(self.dtype)


def f32(*shape: int, low: float = -2.0, high: float = 2.0) -> Draw:
    """A float32 operand."""
    return Draw(shape, "float32", low, high)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: str = "int64") -> Draw:
    """An integer operand."""
    return Draw(shape, dtype, low, high)


def flags(*shape: int) -> Draw:
    """A bool operand."""
    return Draw(shape, "bool", 0, 1)


def vec(*values: float, dtype: str = "int64") -> np.ndarray:
    """A 1-D operand of given contents: shapes, axes, scales."""
    return np.array(values, dtype)


def scalar(value: float, dtype: str = "int64") -> np.ndarray:
    """A 0-D operand of given contents."""
    return np.array(value, dtype)


@dataclass(frozen=True, eq=False)
class Case:
    """One node to check.

    Attributes:
        op: Key of the op table.
        inputs: Operands in order; None where absent.
        attrs: Attributes.
        constants: Indices of operands that are constants of the graph.
        opset: Version of the op's domain.
        outputs: Number of results, or their names with "" for one that is not wanted.
        min_cuts: At least so many factors must be cut in some run.
        exact: Results are compared bit for bit (integers always are).
        tolerance: Otherwise the largest error, relative to the largest value.
        reference: Run by onnx.reference: ONNX Runtime has no CPU kernel.
        runner: Runs local nodes; None for ONNX Runtime (or the reference).
    """

    op: str
    inputs: tuple[Draw | np.ndarray | None, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    opset: int = 21
    outputs: int | tuple[str, ...] = 1
    min_cuts: int = 1
    exact: bool = False
    tolerance: float = 2e-6
    reference: bool = False
    runner: Runner | None = None

    def __str__(self) -> str:
        shapes = ",".join(
            "-" if x is None else "x".join(map(str, x.shape)) or "0d" for x in self.inputs
        )
        attrs = ",".join(f"{key}={value!r}" for key, value in self.attrs.items())
        return f"{self.op.rpartition('::')[2]}-{self.opset}({shapes}){attrs}".replace(" ", "")


def case(op: str, *inputs: Draw | np.ndarray | None, **options: Any) -> Case:
    """`Case(op, inputs, **options)`: ``case("MatMul", f32(5, 4), f32(4, 3), min_cuts=3)``."""
    return Case(op, inputs, **options)


@dataclass(frozen=True)
class Trial:
    """A case made concrete: its graph, operands and whole results."""

    case: Case
    graph: Graph
    operands: tuple[np.ndarray | None, ...]
    results: tuple[np.ndarray | None, ...]

    @property
    def node(self) -> Node:
        """The only node."""
        return self.graph.nodes[0]


def check_row(case: Case, meshes: Sequence[DeviceMesh] = MESHES) -> None:
    """Run every cut that the row's rule gives; fail on the first difference or too few cuts."""
    trial = make_trial(case)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, Rule), f"{case} has no rule: {rule}"
    seen: set[str] = set()
    for mesh in meshes:
        for cuts in enumerate_cuts(rule, mesh):
            if _check_cut(trial, rule, mesh, cuts):
                seen.update(cuts)
    assert len(seen) >= case.min_cuts, f"only factors {sorted(seen)} were cut, not {case.min_cuts}"


def check_opaque(case: Case) -> str:
    """The reason why the node has no rule; fail if it has one."""
    trial = make_trial(case)
    rule = rule_of(trial.graph, trial.node)
    assert isinstance(rule, str), f"{case} has a rule"
    return rule


def make_trial(case: Case) -> Trial:
    """Draw the operands, run the whole node, and build its one-node graph."""
    operands = tuple(
        x.make(seed) if isinstance(x, Draw) else x for seed, x in enumerate(case.inputs)
    )
    inputs = tuple("" if x is None else f"in{i}" for i, x in enumerate(operands))
    node = Node("node", case.op, inputs, _outputs(case), case.attrs)
    values = {name: x for name, x in zip(inputs, operands, strict=True) if x is not None}
    results = _run(case, LocalOp((node,)), values)
    types = {name: _type(x) for name, x in {**values, **results}.items()}
    constants = {f"in{i}": Constant.of(values[f"in{i}"]) for i in case.constants}
    domain = case.op.rpartition("::")[0]
    graph = Graph(
        "case",
        tuple(name for name in values if name not in constants),
        node.writes,
        (node,),
        types,
        constants,
        {"": 21, domain: case.opset},
    )
    return Trial(case, graph, operands, tuple(results.get(name) for name in node.outputs))


def enumerate_cuts(rule: Rule, mesh: DeviceMesh) -> Iterator[Cuts]:
    """Every assignment of mesh axes to link classes; uneven and two-segment cuts of one class."""
    for chosen in itertools.product((None, *rule.links), repeat=len(mesh.axes)):
        axes: dict[tuple[str, ...], tuple[str, ...]] = {}
        for name, link in zip(mesh.names, chosen, strict=True):
            if link is not None:
                axes[link] = (*axes.get(link, ()), name)
        fits = all(
            rule.factors[factor].size >= mesh.size(names) or _may_be_empty(rule, factor, link)
            for link, names in axes.items()
            for factor in link
        )
        if axes and fits:
            yield {factor: Cut(names) for link, names in axes.items() for factor in link}
    if len(mesh.axes) == 1:
        yield from _odd_cuts(rule, mesh)


def _may_be_empty(rule: Rule, factor: str, link: tuple[str, ...]) -> bool:
    """Whether a device may have nothing of a factor: it is a part of a result's dim alone."""
    return len(link) > 1 and factor not in rule.read


def _odd_cuts(rule: Rule, mesh: DeviceMesh) -> Iterator[Cuts]:
    parts = mesh.size()
    for link in rule.links:
        if link == (PENDING,):
            continue
        smallest = min(rule.factors[factor].size for factor in link)
        if smallest > parts:
            yield {factor: _uneven(rule.factors[factor].size, mesh) for factor in link}
        if smallest >= 2 * parts:
            yield {factor: _two_segments(rule.factors[factor].size, mesh) for factor in link}


def _uneven(size: int, mesh: DeviceMesh) -> Cut:
    ones = (1,) * (mesh.size() - 1)
    return Cut(mesh.names, ((*ones, size - len(ones)),))


def _two_segments(size: int, mesh: DeviceMesh) -> Cut:
    halves = (size // 2, size - size // 2)
    return Cut(mesh.names, tuple(even_cut(half, mesh.size()) for half in halves))


@dataclass(frozen=True)
class _Cutting:
    """One cut of a trial on a mesh, with the shardings that it gives."""

    trial: Trial
    rule: Rule
    mesh: DeviceMesh
    layouts: Mapping[str, DimLayout]
    ins: tuple[Sharding, ...]
    outs: tuple[Sharding, ...]
    where: str

    def view(self, point: Point) -> LocalView:
        """What the row sees of one device."""
        return LocalView(
            self.rule.local_sizes(self.layouts, self.mesh, point),
            tuple(sharding.local_shape(self.mesh, point) for sharding in self.ins),
            tuple(sharding.local_shape(self.mesh, point) for sharding in self.outs),
            self._regions(self.ins, point),
            self._regions(self.outs, point),
        )

    def _regions(self, shardings: tuple[Sharding, ...], point: Point) -> tuple[Region, ...]:
        row = row_of(self.trial.node)
        if row is None or not (row.where or self.rule.slides(self.layouts)):
            return ()
        return tuple(
            tuple(dim.pieces(self.mesh, point) for dim in sharding.dims) for sharding in shardings
        )


def _check_cut(trial: Trial, rule: Rule, mesh: DeviceMesh, cuts: Cuts) -> bool:
    layouts = {name: cut.layout(rule.factors[name].size, mesh) for name, cut in cuts.items()}
    try:
        ins, outs = rule.shardings(layouts, mesh)
    except LayoutError:
        return False
    where = f"{trial.case} on {mesh}, cut {', '.join(f'{k}={v}' for k, v in cuts.items())}"
    cutting = _Cutting(trial, rule, mesh, layouts, ins, outs, where)
    _check_flops(cutting)
    parts = [_run_device(cutting, point) for _, point in mesh.coords()]
    for index, whole in enumerate(trial.results):
        if whole is not None:
            local = [part[index] for part in parts]
            _compare(trial.case, whole, local, outs[index], mesh, f"{where}, result {index}")
    return True


def _check_flops(cutting: _Cutting) -> None:
    """The devices share the op's FLOPs; axes that cut nothing repeat them."""
    rule, mesh, layouts = cutting.rule, cutting.mesh, cutting.layouts
    if any(len(link) > 1 and link[0] in layouts for link in rule.links):
        return  # sums of terms: their FLOPs are no product of factors
    loops = [layout for name, layout in layouts.items() if name != PENDING]
    used = {axis for layout in loops for axis in layout.axes}
    replicas = mesh.size(tuple(name for name in mesh.names if name not in used))
    total = sum(rule.local_flops(layouts, mesh, point) for _, point in mesh.coords())
    assert np.isclose(total, rule.flops * replicas), f"{cutting.where}: {total} FLOPs"


def _run_device(cutting: _Cutting, point: Point) -> list[np.ndarray]:
    trial, view, where = cutting.trial, cutting.view(point), cutting.where
    node, row = trial.node, row_of(trial.node)
    assert row is not None
    operands = {
        name: _operand(x, sharding, cutting.mesh, point)
        for name, x, sharding in zip(node.inputs, trial.operands, cutting.ins, strict=True)
        if x is not None
    }
    local = row.localize(OpView(node, trial.graph), view) if row.localize else LocalOp((node,))
    values = _run(trial.case, local, operands)
    for name, tensor in local.types.items():
        assert _type(values[name]) == tensor, f"{where}: type of {name}"
    for name, shape in zip(node.outputs, view.out_shapes, strict=True):
        assert not name or values[name].shape == shape, f"{where}: shape of {name} is not {shape}"
    if row.view and trial.case.runner is None:
        first, result = operands[node.inputs[0]], values[node.outputs[0]]
        assert np.array_equal(first.ravel(), result.ravel()), f"{where}: not a view"
    return [values[name] if name else np.zeros(0) for name in node.outputs]


def _type(x: np.ndarray) -> TensorType:
    return TensorType.of(x.dtype.name, x.shape)


def _operand(x: np.ndarray, sharding: Sharding, mesh: DeviceMesh, point: Point) -> np.ndarray:
    """A device's part; a pending sum comes as 2 x, -x, 0, ...: only linear ops keep the sum."""
    part = _slice(x, sharding, mesh, point)
    weight = math.prod({0: 2, 1: -1}.get(point[axis], 0) for axis, _ in sharding.partial)
    return part if weight == 1 else (part * weight).astype(part.dtype)


def _slice(x: np.ndarray, sharding: Sharding, mesh: DeviceMesh, point: Point) -> np.ndarray:
    index = [
        [i for start, length in dim.pieces(mesh, point) for i in range(start, start + length)]
        for dim in sharding.dims
    ]
    return x[np.ix_(*(np.array(rows, np.intp) for rows in index))] if index else x


def _compare(
    case: Case,
    whole: np.ndarray,
    local: list[np.ndarray],
    sharding: Sharding,
    mesh: DeviceMesh,
    where: str,
) -> None:
    points = [point for _, point in mesh.coords()]
    for axis, how in sharding.partial:
        kept = [{k: v for k, v in point.items() if k != axis} for point in points]
        local = [
            REDUCERS[how].reduce(
                [x for x, other in zip(local, kept, strict=True) if other == point]
            )
            for point in kept
        ]
    scale = np.max(np.abs(whole[np.isfinite(whole)]), initial=1e-30) if _is_float(whole) else 0
    for part, point in zip(local, points, strict=True):
        expected = _slice(whole, sharding, mesh, point)
        if case.exact or not _is_float(whole):
            np.testing.assert_array_equal(part, expected, where)
        else:
            np.testing.assert_allclose(part, expected, 0, case.tolerance * scale, err_msg=where)


def _is_float(x: np.ndarray) -> bool:
    return bool(np.issubdtype(x.dtype, np.inexact))


def _outputs(case: Case) -> tuple[str, ...]:
    if isinstance(case.outputs, tuple):
        return case.outputs
    return tuple(f"out{i}" for i in range(case.outputs))


def _run(case: Case, local: LocalOp, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run local nodes; every value that they make comes back.

    As in a rank's file, constants are initializers and the other operands are inputs.
    """
    if case.runner is not None:
        return case.runner(local, values)
    written = [name for node in local.nodes for name in node.writes]
    temporaries = set(written) - {name for name in written if name.startswith("out")}
    assert temporaries == set(local.types), f"{case}: temporaries {temporaries} need types"
    constants = {f"in{i}" for i in case.constants}
    read = [name for name in values if any(name in node.reads for node in local.nodes)]
    feeds = {name: _contiguous(values[name]) for name in read if name not in constants}
    initializers = {name: values[name] for name in read if name in constants}
    model = helper.make_model(
        helper.make_graph(
            [node_proto(node) for node in local.nodes],
            "case",
            [_input(name, x) for name, x in feeds.items()],
            [onnx.ValueInfoProto(name=name) for name in written],
            [
                tensor_proto(name, x, x.dtype.name)
                for name, x in {**initializers, **local.constants}.items()
            ],
        ),
        ir_version=10,
        opset_imports=_opsets(case, local.nodes),
    )
    runner = _session(model.SerializeToString(), case.reference)
    return dict(zip(written, runner.run(written, feeds), strict=True))


def _contiguous(x: np.ndarray) -> np.ndarray:
    """ascontiguousarray that keeps 0-D arrays 0-D."""
    return np.ascontiguousarray(x).reshape(x.shape)


def _input(name: str, x: np.ndarray) -> onnx.ValueInfoProto:
    """Rank only, so that one session serves all local shapes; lists (axes, sizes) need theirs."""
    shape = x.shape if x.ndim == 1 else [None] * x.ndim
    return helper.make_tensor_value_info(name, onnx_dtype(x.dtype.name), shape)


def _opsets(case: Case, nodes: Iterable[Node]) -> list[onnx.OperatorSetIdProto]:
    domain = case.op.rpartition("::")[0]
    domains = {node.op.rpartition("::")[0] for node in nodes} | {""}
    return [helper.make_opsetid(d, case.opset if d == domain else 21) for d in sorted(domains)]


@lru_cache(maxsize=256)
def _session(model: bytes, reference: bool) -> Any:
    if reference:
        return ReferenceEvaluator(onnx.load_from_string(model))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

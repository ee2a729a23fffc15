"""PyTorch's own samples of its operators (`op_db`), cut wherever a rule allows, against PyTorch.

``python -m pytest -m "slow or sweep" tests/backends/torch/test_samples.py -s`` prints the table:
how many modules were equal, wrong, ended in an internal error, draw numbers, or were refused, and
why.
"""

from __future__ import annotations

import itertools
import random
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from helpers.drawn.operator_samples import operator_samples
from helpers.plans.whole_plans import lowered
from partitioner.backends.torch.running.all_ranks import AllRanks
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.options import ModuleOptions
from partitioner.frontends.torch.source import Example
from partitioner.frontends.torch.trace import TracedModule, trace_module
from partitioner.ir.graph import Graph
from partitioner.ir.layout import Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops import row_of
from partitioner.ir.plan import NodePlan, PlacedNode, Plan, place
from partitioner.ir.rule import Cut
from partitioner.strategies.derive import Rules, strategies

#: Samples of an operator.
SAMPLES = 1
#: Largest number of elements of a sample's tensors: larger ones add time only.
MOST_ELEMENTS = 20_000
#: Relative to the largest element; of 16-bit types what a sum of them loses.
TOLERANCE, TOLERANCE_OF_HALVES = 1e-3, 2e-2


class Sampled(nn.Module):
    """An operator of `op_db`; the first tensor is a parameter, the other ones are inputs."""

    def __init__(
        self, run: Callable[..., Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> None:
        super().__init__()
        self.run, self.leaves, self.spec = run, list(leaves), spec
        self.first = next(i for i, leaf in enumerate(leaves) if _is_number(leaf))
        self.weight = nn.Parameter(leaves[self.first].detach().clone())
        self.places = [
            i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i != self.first
        ]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The other tensors."""
        return tuple(self.leaves[i].detach() for i in self.places)

    def forward(self, *inputs: Tensor) -> Any:
        """The operator's results; in training the mean of what they are squared, then they."""
        leaves = list(self.leaves)
        leaves[self.first] = self.weight * 1
        for index, tensor in zip(self.places, inputs, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = [
            x for x in pytree.tree_leaves(self.run(*args, **kwargs)) if isinstance(x, Tensor)
        ]
        if not self.training:
            return tuple(results)
        numbers = [x for x in results if x.is_floating_point() or x.is_complex()]
        loss = sum((x.abs() ** 2 + (x.real if x.is_complex() else x)).mean() for x in numbers)
        return (loss, *results)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@dataclass
class Table:
    """What became of the samples."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, fate: str, why: str = "") -> None:
        """Count a sample."""
        self.counts[fate] += 1
        if why:
            self.lines.append(f"{fate:8} {name}: {why}")

    def __str__(self) -> str:
        return "\n".join(
            [", ".join(f"{k} {n}" for k, n in sorted(self.counts.items())), *self.lines]
        )


def samples(part: int, parts: int) -> Iterator[tuple[str, Any, Any]]:
    """(name, operator, sample) of every parts-th operator."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in itertools.islice(op_db, part, None, parts):
        if not info.supports_dtype(torch.float32, "cpu"):
            continue
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        _seed(name)
        kept = [s for s in itertools.islice(operator_samples(info), 12) if _fits(s)]
        # the largest ones have the most dims to cut
        kept.sort(key=lambda s: -sum(x.numel() for x in _tensors(s)))
        for number, sample in enumerate(kept[:SAMPLES]):
            yield f"{name}[{number}]", info, sample


def _seed(name: str) -> None:
    torch.manual_seed(zlib.crc32(name.encode()))
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - PyTorch's samples draw from it


def _tensors(sample: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, Tensor)]


def _fits(sample: Any) -> bool:
    tensors = _tensors(sample)
    if any(x.layout is not torch.strided for x in tensors):
        return False
    return any(map(_is_number, tensors)) and sum(x.numel() for x in tensors) <= MOST_ELEMENTS


def forced_plan(graph: Graph, devices: int) -> Plan:
    """Every node cut if its rule allows, by a cut drawn from all that it has; updates as stored."""
    mesh = DeviceMesh.line(devices)
    offered = strategies(graph, Rules.of(graph), mesh)
    rng = random.Random(0)
    groups: dict[DeviceMesh, int] = {}
    nodes, homes = {}, dict[str, Placement]()
    for node in graph.nodes:
        options: Sequence[PlacedNode] = offered[node.name]
        if (slot := row_of(node).in_place) is not None:
            options = [one for one in options if one.ins[slot] == homes[node.inputs[slot]]]
        cut = [placed for placed in options if placed.layouts]
        home = DeviceMesh.single(0)
        placed = rng.choice(cut or options or (place(graph, node, home, {}, None),))
        cuts = {name: Cut.of(layout, placed.mesh) for name, layout in placed.layouts.items()}
        nodes[node.name] = NodePlan(groups.setdefault(placed.mesh, len(groups)), cuts)
        homes.update(placed.results())
    return Plan(graph.digest, {}, tuple(groups), nodes)


def check(table: Table, name: str, info: Any, sample: Any, *, training: bool) -> None:
    """Run a sample whole and on 2 and 3 ranks."""
    leaves, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    module = Sampled(info.op, leaves, spec).train(training)
    _seed(name)
    try:
        whole = expected(module)
        _seed(f"{name} again")
        again = expected(module)
    except Exception:  # noqa: BLE001 - PyTorch does not run, or not differentiate it
        return
    if not whole or any(_difference(again[k], whole[k]) > 0 for k in whole):
        return  # it draws numbers, or has none
    try:
        traced = trace_module(module, Example(module.inputs, {}), ModuleOptions(training=training))
        if traced.signature.seed:
            table.add(name, "drawn")
            return
        for devices in (2, 3):
            found = of_ranks(traced, module.inputs, devices)
            for key, tensor in whole.items():
                error = _difference(found[key], tensor)
                short = tensor.dtype.itemsize == 2 or tensor.dtype is torch.complex32
                if error > (TOLERANCE_OF_HALVES if short else TOLERANCE):
                    table.add(name, "wrong", f"{key} on {devices} ranks: {error:.2g}")
                    return
    except FrontendError as error:
        table.add(name, "refused", str(error)[:160])
    except Exception as error:  # noqa: BLE001 - all of them are counted
        table.add(name, "crash", f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")
    else:
        table.add(name, "equal")


def expected(module: Sampled) -> dict[str, Tensor]:
    """Results of PyTorch and, in training, the gradient."""
    module.zero_grad()
    results = module(*module.inputs)
    if module.training:
        results[0].backward()
    named = {f"result {i}": x.detach().clone() for i, x in enumerate(results)}
    return named | (
        {"gradient": module.weight.grad.clone()} if module.weight.grad is not None else {}
    )


def of_ranks(traced: TracedModule, inputs: Sequence[Tensor], devices: int) -> dict[str, Tensor]:
    """The same of all ranks of a plan that cuts what it can."""
    graph = traced.graph
    ranks = AllRanks(lowered(graph, forced_plan(graph, devices), devices), graph)
    step = ranks.step(traced.signature.feed(tuple(inputs), {}, 0), traced.stored_values())
    values: Mapping[str, Tensor] = {**step.results, **step.gradients}
    named = {
        f"result {i}": values[name] for i, name in enumerate(traced.traced.call.results) if name
    }
    gradients = traced.traced.gradients
    return named | ({"gradient": values[gradients["weight"]]} if "weight" in gradients else {})


def _difference(ours: Tensor, whole: Tensor) -> float:
    """Largest error relative to the largest element; infinite if NaNs lie elsewhere."""
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return float("inf")
    wide = torch.complex128 if whole.is_complex() else torch.float64
    ours, whole = ours.resolve_conj().to(wide), whole.resolve_conj().to(wide)
    same = (ours == whole) | (ours.isnan() & whole.isnan())
    error = torch.where(same, 0, ours - whole).abs()
    scale = whole[whole.isfinite()].abs().max().item() if whole.isfinite().any() else 0.0
    worst = error.max().item() if error.numel() else 0.0
    return float("inf") if worst != worst else worst / max(scale, 1e-6)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part",
    [
        pytest.param(part, marks=pytest.mark.sweep if part else pytest.mark.slow)
        for part in range(4)
    ],
)
def test_samples_of_pytorch(part: int) -> None:
    """Forward and, where PyTorch differentiates the operator, backward."""
    table = Table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, info, sample in samples(part, 8):
            check(table, name, info, sample, training=info.supports_autograd)
    print(f"\n{table}")
    assert not table.counts["wrong"]
    assert not table.counts["crash"]
    assert table.counts["equal"] > 25

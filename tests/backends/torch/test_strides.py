"""Operators compute the same of operands with any strides: a rank's part is seldom contiguous.

Kernels that read an operand as if it were contiguous give wrong numbers, or end the process.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from aten_rows import run_torch
from laid_out import LAYOUTS, expanded
from rows import Case, check_row, make_trial
from torch import Tensor, nn

import partitioner
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.calls import DENSE, run_node
from partitioner.ir.graph import Node
from partitioner.ir.mesh import DeviceMesh

ROWS = Path(__file__).parents[2] / "ir/ops/aten"
MESHES = tuple(DeviceMesh.of(axes) for axes in ({"a": 2}, {"a": 3}, {"a": 5}, {"a": 2, "b": 3}))
CPU = torch.device("cpu")


@cache
def cases(family: str) -> tuple[Case, ...]:
    """The cases of a family of rows."""
    return tuple(runpy.run_path(str(ROWS / f"test_rows_{family}.py"))["CASES"])


#: All but the stored values, which nothing computes.
FAMILIES = sorted(
    {path.stem.removeprefix("test_rows_") for path in ROWS.glob("test_rows_*.py")} - {"state"}
)


def is_suspect(case: Case) -> bool:
    """Whether an operator is our own, or known to read dense operands."""
    return case.op.startswith("partitioner::") or case.op in DENSE


def check_layouts(node: Node, dense: Mapping[str, Tensor], tolerance: float) -> None:
    """Compare the results of a node for operands in every layout with those for dense ones."""
    together = [(name,) for name in dense] + ([tuple(dense)] if len(dense) > 1 else [])
    for names in together:
        for how, odd in _laid_out(dense, names):
            plain = {name: x.contiguous() for name, x in odd.items()}
            results = run_node(node, odd, CPU)
            for index, whole in enumerate(run_node(node, plain, CPU)):
                part = results[index]
                if whole is None or part is None or not node.outputs[index]:
                    continue
                where = f"{node.op}, result {index}: {', '.join(names)} {how}"
                _compare(part, whole, tolerance, where)


def _laid_out(
    dense: Mapping[str, Tensor], names: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Operands of which the named ones are laid out otherwise, and how."""
    lays = {**LAYOUTS, **{f"expanded{dim}": partial(expanded, dim=dim) for dim in range(4)}}
    for how, lay in lays.items():
        odd = {name: lay(x) if name in names else x for name, x in dense.items()}
        if any(odd[name].stride() != dense[name].stride() for name in names):
            yield how, odd


def _compare(part: Tensor, whole: Tensor, tolerance: float, where: str) -> None:
    scale = 0.0
    if whole.is_floating_point() or whole.is_complex():
        scale = max(whole[whole.isfinite()].abs().max().item() if whole.numel() else 0.0, 1e-30)
    torch.testing.assert_close(
        *(part, whole),
        rtol=0,
        atol=tolerance * scale,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


def check_case(case: Case) -> None:
    """Check the whole node of a case."""
    trial = make_trial(case)
    operands = zip(trial.node.inputs, trial.operands, strict=True)
    dense = {name: from_numpy(np.array(x), x.dtype.name) for name, x in operands if x is not None}
    check_layouts(trial.node, dense, 10 * case.tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_operators_take_operands_with_any_strides(family: str) -> None:
    for case in filter(is_suspect, cases(family)):
        check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_rows_take_operands_with_any_strides(family: str) -> None:
    for case in cases(family):
        check_case(case)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_own_operators_take_any_strides(layout: str) -> None:
    """On 2, 3 and 5 devices and 2 x 3, every cut of the rule."""
    for case in (case for family in FAMILIES for case in cases(family) if is_suspect(case)):
        lay = LAYOUTS[layout]
        check_row(replace(case, runner=partial(run_torch, lay=lay), min_cuts=0), MESHES)


class Grouped(nn.Module):
    """Two convolutions with a group norm between them, and the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(3, 6)
        self.second = nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_group_norm_trains_on_parts(devices: int, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    module = Grouped().to(memory_format=memory_format)  # type: ignore[call-overload]
    x = torch.randn(7, 3, 9, 5).contiguous(memory_format=memory_format)
    program = partitioner.compile(module, x, devices=devices, cluster="ideal", training=True)
    loss, gradients = program.gradients(x)
    expected = module(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        limit = 1e-5 * parameter.grad.abs().max().item()
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=limit)
        assert math.isfinite(limit)

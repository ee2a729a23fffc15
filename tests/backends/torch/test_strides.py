"""Operators compute the same of operands with any strides: a rank's part is seldom contiguous.

Kernels that read an operand as if it were contiguous give wrong numbers, or end the process.
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner
from helpers.op_rows.aten_calls import run_node
from helpers.op_rows.aten_rows import run_torch
from helpers.op_rows.laid_out import LAYOUTS, expanded
from helpers.op_rows.rows import Case, check_row, make_trial
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.graphs.calls import COPIED, DENSE
from partitioner.backends.torch.graphs.comms import RankComm
from partitioner.backends.torch.state.shards import part_of
from partitioner.frontends.errors import FrontendError
from partitioner.ir.exchange import Transfer
from partitioner.ir.graph import Node
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.ops.table import LocalOp
from partitioner.ir.program import Comm, CommKind

ROWS = Path(__file__).parents[2] / "ir/ops/aten"
MESHES, MORE_MESHES = (
    tuple(map(DeviceMesh.of, axes)) for axes in (({"a": 3}, {"a": 2, "b": 3}), ({"a": 2}, {"a": 5}))
)
CPU = torch.device("cpu")
WHOLE = (Transfer(0, 1, (((0, 1),),), (((0, 1),),)),)


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
    return case.op.startswith("partitioner::") or case.op in DENSE | COPIED


@pytest.mark.parametrize("backward", [False, True])
def test_weight_norms_take_any_strides(backward: bool) -> None:
    """PyTorch's kernels read other elements of operands that are not contiguous."""
    direction, length = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 1).double() + 1
    dense = {"v": direction, "g": length}
    op = "aten::_weight_norm_interface"
    if backward:
        norm = direction.norm(dim=1, keepdim=True)
        dense = {"grad": torch.randn(4, 3, dtype=torch.float64), **dense, "norm": norm}
        op = f"{op}_backward"
    check_layouts(Node("n", op, tuple(dense), ("a", "b"), {"dim": 0}), dense, 1e-12)


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
        finite = whole[whole.isfinite()]
        scale = max(finite.abs().max().item() if finite.numel() else 0.0, 1e-30)
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


@pytest.mark.one_in(2)
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


def run_laid_out(
    local: LocalOp, values: Mapping[str, np.ndarray], *, case: Case
) -> dict[str, np.ndarray]:
    """Run local nodes on dense operands; fail if those of another layout give other results."""
    results = run_torch(local, values)
    arrays = [*values.values(), *local.constants.values()]
    dense = [from_numpy(np.array(x), x.dtype.name) for x in arrays]
    for how, lay in LAYOUTS.items():
        if all(lay(x).stride() == x.stride() for x in dense):
            continue
        for name, odd in run_torch(local, values, lay).items():
            where = f"{case}, {name}: {how}"
            if np.issubdtype(odd.dtype, np.inexact):
                most = np.abs(odd[np.isfinite(odd)]).max(initial=1e-30)
                atol = 10 * case.tolerance * most
                np.testing.assert_allclose(odd, results[name], 0, atol, err_msg=where)
            else:
                np.testing.assert_array_equal(odd, results[name], where)
    return results


def check_parts(family: str, meshes: tuple[DeviceMesh, ...]) -> None:
    """Check the parts of the nodes of a family, of every cut of the rule."""
    for case in filter(is_suspect, cases(family)):
        check_row(replace(case, runner=partial(run_laid_out, case=case), min_cuts=0), meshes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_own_operators_take_any_strides(family: str) -> None:
    check_parts(family, MESHES)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_on_more_meshes_take_any_strides(family: str) -> None:
    check_parts(family, MORE_MESHES)


class Grouped(nn.Module):
    """Two convolutions with a group norm between them, and the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(3, 6)
        self.second = nn.Conv2d(6, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))).square().mean()


@pytest.mark.one_in(2)
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


class Weighted(nn.Module):
    """The mean square of a function of a weight and the inputs, and its results."""

    def __init__(self, run: Callable[..., Tensor], size: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        results = self.run(self.weight, *inputs)
        return results.square().mean(), results


IDS = torch.tensor([[0, 3, 8, 2, 1], [7, 7, 4, 0, 5], [6, 2, 2, 1, 8]])
MATRICES = torch.randn(4, 3, 3, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(3)

#: (function, size of the weight, inputs): what it computes does not depend on strides.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[Tensor, ...]]] = {
    "bag of columns": (lambda w, i: F.embedding_bag(i, w[:, ::2]), (9, 6), (IDS,)),
    "bag of one column": (lambda w, i: F.embedding_bag(i, w[:, 1:2]), (9, 6), (IDS,)),
    "bag of a given table": (
        lambda w, t, i: F.embedding_bag(i, t) * w,
        (6,),
        (MATRICES.new_ones(9, 6), IDS),
    ),
    "bag with weights": (
        lambda w, i, s: F.embedding_bag(i, w.mT, per_sample_weights=s, mode="sum"),
        (6, 9),
        (IDS, torch.rand(3, 5)),
    ),
    "transposed group norm": (
        lambda w, x: F.group_norm(x.mT * w, 3, w[:, 0]).tanh(),
        (6, 1),
        (torch.randn(5, 7, 6),),
    ),
    "determinant": (lambda w, x: torch.linalg.det((w * x).mT), (3, 3), (MATRICES,)),
    "logarithm of it": (lambda w, x: torch.linalg.slogdet((w * x).mT)[1], (3, 3), (MATRICES,)),
    "solution": (
        lambda w, x, y: torch.linalg.solve((w * x).mT, y),
        (3, 3),
        (MATRICES, MATRICES[..., :2].clone()),
    ),
    "windows": (
        lambda w, x: torch.stft((w * x).mT, 8, window=torch.ones(8), return_complex=True).abs(),
        (3,),
        (torch.randn(40, 3),),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("traced", ["sliced", "transposed"])
def test_calls_may_have_other_strides_than_the_example(name: str, traced: str) -> None:
    torch.manual_seed(0)
    run, size, inputs = FUNCTIONS[name]
    module = Weighted(run, size)
    example = tuple(map(LAYOUTS[traced], inputs))
    program = partitioner.compile(module, example, devices=2, cluster="ideal", training=True)
    for called in ("contiguous", "every_second", "transposed"):
        arguments = tuple(map(LAYOUTS.get(called, lambda x: x), inputs))
        module.zero_grad()
        loss, results = module(*arguments)
        loss.backward()
        found, gradients = program.gradients(*arguments)
        torch.testing.assert_close(found[1], results.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients["weight"], module.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        lambda w, x: (w * x).mT.as_strided((3, 2), (2, 1), 1),
        lambda w, x: (w * x).as_strided((3, 2), (2, 1), 1),
        lambda w, x: torch.as_strided_scatter(x.mT, w[:2], (2,), (3,), 1),
    ],
    ids=["read transposed", "read", "written"],
)
def test_memory_that_goes_by_number_is_that_of_the_trace(run: Callable[..., Tensor]) -> None:
    module = Weighted(run, (4,))
    x = torch.randn(3, 4)
    program = partitioner.compile(module, x, devices=3, cluster="ideal", training=True)
    loss, results = module(x)
    loss.backward()
    found, gradients = program.gradients(x)
    torch.testing.assert_close(found[1], results.detach())
    torch.testing.assert_close(gradients["weight"], module.weight.grad)


def test_memory_around_a_part_is_refused() -> None:
    module = Weighted(lambda w, x: (w * x)[:, 1:].as_strided((3, 2), (2, 1)), (4,))
    with pytest.raises(
        FrontendError, match=r"as_strided\(\[3, 2\], \[2, 1\]\) of a part of a larger"
    ):
        partitioner.compile(module, torch.randn(3, 4), devices=2, training=True)


def test_parts_without_elements() -> None:
    program = partitioner.compile(nn.Flatten(), torch.zeros(4, 0, 3), devices=2, cluster="ideal")
    assert program(torch.zeros(4, 0, 3)).shape == (4, 0)
    assert part_of(torch.zeros(4, 3), ((), ((0, 3),))).shape == (0, 3)


def test_one_element_of_a_slice_travels_as_bytes() -> None:
    """A tensor of one element is contiguous, whatever its stride."""
    graph = fx.Graph()
    comm = Comm(0, CommKind.BROADCAST, (0, 1), "s", "t", "complex64", WHOLE)
    sent = RankComm(graph, comm, 0, graph.placeholder("s"), (1,), (1,), CPU)
    graph.output(sent._coded(sent._sent))
    one = torch.arange(7).to(torch.complex64)[3:8:5]
    assert one.is_contiguous()
    assert one.stride() == (5,)
    coded = fx.GraphModule(nn.Module(), graph)(one)
    assert torch.equal(coded.view(torch.complex64), one)

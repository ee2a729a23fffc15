"""Rules derived from DTensor's placements: their text, and values of PyTorch's own samples."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import partitioner
from helpers.drawn.operator_samples import operator_samples
from helpers.op_rows.aten_rows import run_torch
from helpers.op_rows.rows import Case, check_opaque, check_row
from partitioner.backends.tensors import to_numpy
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.calls import encode_call
from partitioner.frontends.torch.building.dtensor_rules import REFUSED, derived_rule
from partitioner.frontends.torch.element_types import DTYPES, dtype_name
from partitioner.ir.ops import ROWS
from partitioner.ir.ops.aten.branches import RULE

aten = torch.ops.aten

#: Calls of each operator that are checked, and samples of each of PyTorch's operators that are run.
CALLS, SAMPLES = 2, 24


def test_a_result_of_which_dtensor_says_nothing_has_no_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs

    def entries(*_: object) -> list[list[object]]:
        return [[Shard(0), None, Shard(0)], [Partial(), None, Shard(0)]]

    call = aten.aminmax.default  # it has two results
    monkeypatch.setitem(known, call, entries)
    x = torch.ones(4, 3)
    assert derived_rule(call, (x,), {}, (x.amin(), x.amax())) is None


@dataclass(frozen=True)
class Call:
    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any

    @property
    def rule(self) -> str | None:
        return derived_rule(self.op, self.args, self.kwargs, self.results)

    def case(self, rule: str) -> Case:
        tensors: list[Tensor] = []

        def name_of(x: Tensor) -> str:
            tensors.append(x)
            return f"in{len(tensors) - 1}"

        op, inputs, attrs = encode_call(
            self.op, self.args, self.kwargs, lambda x: isinstance(x, Tensor), name_of
        )
        arrays = (to_numpy(x.detach().contiguous(), dtype_name(x.dtype)) for x in tensors)
        return Case(
            op,
            tuple(next(arrays) if name else None for name in inputs),
            {**attrs, **({RULE: rule} if rule else {})},
            opset=1,
            outputs=1 if isinstance(self.results, Tensor) else len(self.results),
            tolerance=2e-5,
            runner=run_torch,
        )


def call(op: torch._ops.OpOverload, *args: Any) -> Call:
    return Call(op, args, {}, op(*args))


X = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) + 0.5
SQUARES = torch.stack([torch.eye(3) * (k + 1) for k in range(4)])
VOLUME = torch.rand(2, 3, 2, 2, 2)


@pytest.mark.parametrize(
    ("example", "rule"),
    [
        (call(aten.lgamma.default, X), "p0 p1 -> p0 p1"),
        (call(aten.logaddexp.default, X, X[0]), "p0 p1, p1 -> p0 p1"),
        (call(aten.logaddexp.default, X, X[:, :1]), "p0 p1, p0 1 -> p0 p1"),
        (call(aten.frexp.Tensor, X), "p0 p1 -> p0 p1, p0 p1"),
        (call(aten.linalg_cholesky_ex.default, SQUARES), "p0 w5 w6 -> p0 w3 w4, p0"),
        (call(aten._fft_r2c.default, X, [1], 0, True), "p0 w3 -> p0 w2"),
    ],
    ids=lambda x: x.op.name() if isinstance(x, Call) else "",
)
def test_a_rule_is_derived_and_holds(example: Call, rule: str) -> None:
    assert example.op.name() not in ROWS
    assert example.rule == rule
    check_row(example.case(rule))


def test_operators_with_sizes_among_their_arguments_are_not_cut_there() -> None:
    places = torch.zeros(VOLUME.shape, dtype=torch.int64)
    unpool = call(aten.max_unpool3d.default, VOLUME, places, [4] * 3, [2] * 3, [0] * 3)
    assert unpool.rule == "p0 p1 w9 w10 w11, p0 p1 w12 w13 w14 -> p0 p1 w6 w7 w8"


@pytest.mark.parametrize(
    "example",
    [
        call(aten.bernoulli.default, X / 2),  # random
        call(aten.positive.default, X),  # a view of its operand
        call(aten.cholesky_inverse.default, SQUARES[0]),  # without a factor
        call(aten.lgamma.default, torch.ones(())),
    ],
    ids=lambda example: example.op.name(),
)
def test_no_rule_is_derived(example: Call) -> None:
    assert example.rule is None
    assert "no row" in check_opaque(example.case(""))


class Odd(nn.Module):
    """Operators without rows, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(torch.logaddexp(self.inner(x), x[:, :1]) + 2).sum()


def test_a_module_with_such_operators_is_split() -> None:
    torch.manual_seed(0)
    module = Odd()
    program = partitioner.compile(module, X, devices=2, cluster="ideal", training=True)
    brought = [node.op for node in program.graph.nodes if RULE in node.attrs]
    assert {"aten::lgamma", "aten::logaddexp", "aten::digamma"} <= set(brought)
    assert not program.summary["notes"]
    assert program.summary["sharded_flops_share"] > 0.9
    loss, gradients = program.gradients(X)
    expected = module(X)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@dataclass
class Recorder(TorchDispatchMode):
    """Records the calls of functional operators without a row."""

    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        if func.name() not in ROWS and func.name().startswith("aten::"):
            self.calls.append(Call(func, tuple(args), dict(kwargs or {}), results))
        return results


def _samples() -> Iterator[Call]:
    """The calls of PyTorch's own samples, forward and backward."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if not info.supports_dtype(torch.float32, "cpu"):
            continue
        grad = info.supports_autograd
        for sample in itertools.islice(operator_samples(info, grad), SAMPLES):
            with Recorder() as recorder:
                _run(info, sample)
            yield from recorder.calls


def _plain_calls() -> Iterator[Call]:
    """Calls of operators that no sample reaches, with tensors of one shape and the number two."""
    for op in _operators_of_dtensor():
        for tensor in (X, (4 * X).long()):
            args = [
                tensor if "Tensor" in str(argument.type) else 2
                for argument in op._schema.arguments
                if not argument.has_default_value()
            ]
            try:
                yield Call(op, tuple(args), {}, op(*args))
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                continue


def _run(info: Any, sample: Any) -> None:
    """Run a sample forward and backward as far as PyTorch can: some need a GPU or are refused."""
    try:
        results = pytree.tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
        leaves = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
        if leaves:
            sum(x.abs().sum() for x in leaves).backward()
    except (RuntimeError, NotImplementedError, AssertionError):
        return


def _is_supported(example: Call) -> bool:
    leaves = pytree.tree_leaves((example.args, example.kwargs, example.results))
    return all(
        x.dtype in DTYPES and x.layout is torch.strided and x.numel() and not x.is_conj()
        for x in leaves
        if isinstance(x, Tensor)
    )


def _calls_with_rules() -> dict[str, list[tuple[Call, str]]]:
    """Calls that get a rule, of different shapes, by operator."""
    calls: dict[str, list[tuple[Call, str]]] = {op.name(): [] for op in _operators_of_dtensor()}
    seen: set[str] = set()
    for example in itertools.chain(_samples(), _plain_calls()):
        name = example.op.name()
        if name not in calls or len(calls[name]) >= CALLS or not _is_supported(example):
            continue
        rule = example.rule
        shapes = [tuple(x.shape) for x in pytree.tree_leaves(example.args) if isinstance(x, Tensor)]
        key = f"{name} {shapes} {rule}"
        if rule is not None and key not in seen:
            seen.add(key)
            calls[name].append((example, rule))
    return calls


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_every_derived_rule_holds_on_pytorchs_samples() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls_by_name = _calls_with_rules()
    wrong: dict[str, str] = {}
    for name, calls in calls_by_name.items():
        for example, rule in calls:
            try:
                case = example.case(rule)
            except FrontendError:  # no graph has such an argument
                continue
            try:
                check_row(case)
            except (AssertionError, RuntimeError, ValueError, IndexError) as error:
                wrong[name] = f"{rule}: {str(error)[:300]}"
    assert not wrong, "\n".join(f"{name} {why}" for name, why in wrong.items())
    # rules that no call shows to be right are not used
    unshown = {name for name, calls in calls_by_name.items() if not calls}
    assert unshown == REFUSED & calls_by_name.keys()  # each release of PyTorch has its own


def _operators_of_dtensor() -> Iterator[torch._ops.OpOverload]:
    """DTensor's functional operators of tensors that have no row."""
    from torch.distributed.tensor import DTensor

    for op in DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs:
        name, schema = op.name(), op._schema
        listed = any("List[Tensor]" in str(argument.type) for argument in schema.arguments)
        aliases = any(a.alias_info for a in (*schema.arguments, *schema.returns))
        random = torch.Tag.nondeterministic_seeded in op.tags
        if name.startswith("aten::") and name not in ROWS and not (listed or aliases or random):
            yield op

"""Passes as ranks run them: what they call, and where they wait for the other ranks."""

from collections.abc import Callable, Sequence
from inspect import signature
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import partitioner.backends.torch.operators  # noqa: F401 - registers operators
from partitioner.backends.torch.graphs.eager import (
    FUNCTIONS,
    ROW_BYTES,
    WRITES,
    Carrier,
    Gate,
    carrier_of,
    direct,
    eager,
    gated,
    gathered,
)
from partitioner.backends.torch.graphs.emit import IN_PLACE
from partitioner.backends.torch.graphs.notes import COMM
from partitioner.backends.torch.operators.registry import KERNELS, LIBRARY
from partitioner.ir.program import Comm, CommKind

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def test_kernels_take_the_arguments_of_their_operators() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if "partitioner::" in name}
    assert {operator.name() for operator in KERNELS} == registered, LIBRARY
    for operator, kernel in KERNELS.items():
        arguments = operator._schema.arguments
        assert not any(one.has_default_value() or one.kwarg_only for one in arguments), operator
        signature(kernel).bind(*arguments)


def test_a_pass_calls_kernels_and_communications_directly() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    sums = graph.call_function(torch.ops.partitioner.batch_norm_sums.default, (x,))
    whole = graph.call_function(c10d.all_gather_into_tensor.default, (sums, 2, "g"))
    arrived = graph.call_function(c10d.wait_tensor.default, (whole,))
    graph.output((arrived,))
    module = direct(eager(fx.GraphModule(torch.nn.Module(), graph)))
    called = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called[0] is KERNELS[torch.ops.partitioner.batch_norm_sums.default]
    assert not any(isinstance(target, torch._ops.OpOverload) for target in called)
    assert gathered not in called
    keys = torch._C._dispatch_tls_local_exclude_set()
    assert not keys.has(torch._C.DispatchKey.AutogradCPU)


@pytest.mark.parametrize(
    ("start", "end"), [(0, 2), (1, 9), (-2, 2**63 - 1), (3, 1), (None, None), (-9, -1), (2, 2)]
)
def test_rows_are_taken_by_indexing(start: int | None, end: int | None) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(aten.slice.Tensor, (x, 0, start, end))
    every, columns = (graph.call_function(aten.slice.Tensor, (x, *a)) for a in ((0, 0, 3, 2), (1,)))
    graph.output((rows, every, columns))
    module = fx.GraphModule(torch.nn.Module(), graph)
    expected = module(X.clone())
    taken = direct(eager(module))
    assert [node.target for node in taken.graph.nodes][1:4] == [getitem, *[aten.slice.Tensor] * 2]
    torch.testing.assert_close(taken(X.clone()), expected)


X, Y = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)), torch.rand(5)
ROWS = torch.tensor([[2, 0, 1], [1, 1, 2]])
#: Arguments by position and by name, as graphs call these operators.
CALLS: dict[Any, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    aten.add.Tensor: [((X, Y), {"alpha": 3}), ((X, 2), {}), ((ROWS, 0.5), {})],
    aten.addmm.default: [((X[0], X[:, :3], X), {}), ((Y, X[:, :3].T, X), {"beta": 2, "alpha": 3})],
    aten.arange.default: [((3,), {}), ((5,), {"dtype": torch.float64, "device": X.device})],
    aten.bmm.default: [((X.reshape(1, 3, 5), X.T.unsqueeze(0)), {})],
    aten.cat.default: [(([X, X[:, :2]], 1), {}), (([Y, Y],), {})],
    aten.clone.default: [((X.T,), {}), ((X.T,), {"memory_format": torch.contiguous_format})],
    aten.div.Tensor: [((X, Y), {}), ((X, 3), {}), ((ROWS, 2), {})],
    aten.embedding.default: [((X, ROWS), {}), ((X, ROWS, 1, False, False), {})],
    aten.eq.Scalar: [((X, 0.5), {}), ((ROWS, 1), {})],
    aten.expand.default: [((Y, [3, -1]), {}), ((X[:1], [4, 5]), {"implicit": True})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.masked_fill.Scalar: [((X, X > 0.5, 0), {}), ((ROWS, ROWS > 1, -1), {})],
    aten.mean.dim: [((X, [0]), {}), ((X, [0, 1], True), {"dtype": torch.float64}), ((X, None), {})],
    aten.mm.default: [((X[:, :3].T, X), {})],
    aten.mul.Tensor: [((X, Y), {}), ((ROWS, 2.5), {})],
    aten.native_layer_norm.default: [
        ((X, [5], Y, Y, 1e-5), {}),
        ((X, [3, 5], None, None, 0.1), {}),
    ],
    aten.permute.default: [((X, [1, 0]), {})],
    aten.reshape.default: [((X.T, [3, -1]), {}), ((X[0, 0], []), {})],
    aten.select.int: [((X, -1, 2), {})],
    aten.sub.Tensor: [((X, Y), {"alpha": 2}), ((X, 1), {})],
    aten.sum.dim_IntList: [
        *(((X, [0], True), {}), ((X, [-1]), {"dtype": torch.float64})),
        *(((X, None), {}), ((ROWS, []), {}), ((X > 0.5, [0]), {})),
    ],
    aten.transpose.int: [((X, 0, -1), {})],
    aten.unsqueeze.default: [((X, -1), {})],
}


@pytest.mark.parametrize("operator", FUNCTIONS, ids=str)
def test_functions_do_what_their_operators_do(operator: Any) -> None:
    for args, kwargs in CALLS.get(operator, [((X,), {})]):
        expected, result = operator(*args, **kwargs), FUNCTIONS[operator](*args, **kwargs)
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
        for one, other in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (result, expected)), strict=True
        ):
            assert (one.stride(), one.dtype) == (other.stride(), other.dtype)
            assert one._is_view() == other._is_view()


def add(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, (x, 1))


def own(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(torch.ops.partitioner.batch_norm_sums.default, (x,))


def reduce(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(c10d.all_reduce.default, (x, "sum", "g"))


def write(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.copy_.default, (x, x))


@pytest.mark.parametrize(
    ("calls", "before"),
    [((add, own), 2), ((add, reduce, add), 1), ((own, write), 1), ((write,), 0), ((), 0)],
)
def test_a_pass_waits_before_others_may_notice_it(
    calls: Sequence[Callable[[fx.Graph, fx.Node], fx.Node]], before: int
) -> None:
    graph, gate = fx.Graph(), Gate()
    x = graph.placeholder("x")
    for call in calls:
        x = call(graph, x)
    graph.output((x,))
    module = gated(eager(fx.GraphModule(torch.nn.Module(), graph)), gate)
    called: list[Any] = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert called.index(gate.enter) == before
    assert len(called) == len(calls) + 1


@pytest.mark.parametrize(
    ("numel", "dtype", "reduction", "group", "carrier"),
    [
        (2, "float32", "sum", "all", Carrier.ROW),
        (ROW_BYTES // 4 + 2, "float32", "sum", "all", Carrier.MARK),
        (2, "bfloat16", "sum", "all", Carrier.MARK),
        (2, "int32", "sum", "all", None),
        (2, "float32", "max", "all", None),
        (2, "float32", "sum", "some", None),
    ],
)
def test_an_all_reduce_of_all_ranks_carries_what_they_agree_on(
    numel: int, dtype: str, reduction: str, group: str, carrier: Carrier | None
) -> None:
    graph, gate = fx.Graph(), Gate()
    xs = [graph.placeholder("x"), graph.placeholder("y")]
    lines = [graph.call_function(aten.reshape.default, (x, [-1])) for x in xs]
    flat = graph.call_function(aten.cat.default, (lines,))
    sent = graph.call_function(c10d.all_reduce.default, (flat, reduction, group))
    sent.meta["shapes"] = (numel,), (numel,)
    sent.meta[COMM] = (Comm(0, CommKind.ALL_REDUCE, (0, 1), "x", "x", dtype),)
    graph.output((graph.call_function(c10d.wait_tensor.default, (sent,)),))
    module = gated(eager(fx.GraphModule(torch.nn.Module(), graph)), gate, "all")
    assert carrier_of(module) is carrier
    called: list[Any] = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert (gate.enter in called, gate.reduced in called) == (carrier is None, carrier is not None)
    if carrier is None:
        return
    assert called[-1] == gate.reduced  # the sum is there, and nothing is to be waited for
    given: list[Tensor] = []

    def doubled(part: Tensor) -> Tensor:
        given.append(part)
        return 2 * part

    gate.wait = doubled
    x, y = torch.ones(numel // 2), torch.full((numel // 2,), 3.0)
    assert torch.equal(module(x, y)[0], 2 * torch.cat([x, y]))
    assert torch.equal(given[0], torch.cat([x, y]))
    assert gate.wait is None


def test_a_gate_waits_once() -> None:
    entered: list[int] = []
    gate = Gate(lambda: entered.append(1))
    gate.enter()
    gate.enter()
    assert entered == [1]


def number(*sizes: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)


def places(*at: int) -> Tensor:
    return torch.tensor(at)


#: What is written to a 3 x 5 tensor, behind its name among the arguments.
ROWS: tuple[tuple[Any, tuple[Any, ...]], ...] = (
    (aten.index_copy.default, (1, places(3, 0), number(3, 2))),
    (aten.index_put.default, ([None, places(3, 3)], number(3, 2))),
    (aten._unsafe_index_put.default, ([places(0, 0)], number(5), True)),
    (aten.select_scatter.default, (number(3), 1, 4)),
    (aten.slice_scatter.default, (number(3, 2), 1, 0, 5, 3)),
    (
        torch.ops.partitioner.index_write_part.default,
        (places(-1), number(3, 1), 1, True, 9, [4], [5]),
    ),
    (
        torch.ops.partitioner.index_write_part.default,
        (places(2), number(3, 1), 1, False, 9, [4], [5]),
    ),
)


@pytest.mark.parametrize(("operator", "rows"), ROWS)
def test_rows_are_written_in_place(operator: Any, rows: tuple[Any, ...]) -> None:
    assert {one for one, _ in ROWS} == WRITES.keys()
    data, before = -number(3, 5), -number(3, 5)
    assert WRITES[operator](data, *rows) is data
    assert torch.equal(data, operator(before, *rows))


@pytest.mark.parametrize("agree", [True, False])
def test_rows_are_written_behind_the_agreement(agree: bool) -> None:
    graph, gate = fx.Graph(), Gate()
    data, index, row = (graph.placeholder(name) for name in ("data", "index", "row"))
    write = graph.call_function(aten.index_copy.default, (data, 0, index, add(graph, row)))
    write.meta[IN_PLACE] = True
    graph.output((add(graph, write),))
    module = gated(eager(fx.GraphModule(torch.nn.Module(), graph)), gate)
    kept = number(3, 2)
    call = kept, places(1), torch.zeros(1, 2)

    def wait() -> None:
        assert torch.equal(kept, number(3, 2))
        if not agree:
            raise ValueError("the ranks do not do the same")

    gate.wait = wait
    if agree:
        assert torch.equal(module(*call)[0], kept + 1)
        assert torch.equal(kept, torch.tensor([[1.0, 2], [1, 1], [5, 6]]))
    else:
        with pytest.raises(ValueError, match="do not do the same"):
            module(*call)
        assert torch.equal(kept, number(3, 2))


@pytest.mark.parametrize("error", [IndexError, KeyboardInterrupt])
def test_a_pass_that_fails_before_the_ranks_agree_meets_them(error: type[BaseException]) -> None:
    """The other ranks wait for one with an error; one that is interrupted does so later."""
    entered: list[int] = []
    gate = Gate(lambda given: entered.append(isinstance(given, error)))
    gate.leave(error())
    assert sum(entered) == (error is IndexError)
    assert gate.wait is None

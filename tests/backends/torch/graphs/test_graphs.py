"""Graphs of ranks: collectives that go together, sums in place, ranks that wait for each other."""

import weakref
from collections import Counter

import pytest
import torch
from torch import fx

import partitioner
from helpers.modules.small_gpt import small_gpt
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.graphs.buckets import bucket
from partitioner.backends.torch.graphs.calls import add_argument
from partitioner.backends.torch.graphs.eager import eager, gathered
from partitioner.backends.torch.graphs.notes import COMM
from partitioner.backends.torch.running.all_ranks import run_lockstep
from partitioner.cost_model.schedule import buckets
from partitioner.cost_model.schedule.buckets import Member, may_join, together
from partitioner.ir.program import Comm, CommKind

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def collectives(graph: fx.Graph) -> Counter[str]:
    return Counter(
        str(node.target).split(".")[1]
        for node in graph.nodes
        if "_c10d_functional" in str(node.target) and node.target is not c10d.wait_tensor.default
    )


def summing(sizes: list[int]) -> fx.GraphModule:
    """Doubles of the arguments, summed over two ranks; the first is read before the others go."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(sizes))]
    comm = Comm(0, CommKind.ALL_REDUCE, (0, 1), "", "", "float32", reduce="sum")
    small = [
        Member(index, index, len(sizes) if index else 1, 4 * size)
        for index, size in enumerate(sizes)
        if may_join(comm, 4 * size)
    ]
    numbers = {m.position: number for number, of in enumerate(together(small)) for m in of}
    waits: list[fx.Node] = []

    def send(index: int) -> fx.Node:
        twice = graph.call_function(aten.mul.Tensor, (inputs[index], 2))
        sent = graph.call_function(c10d.all_reduce.default, (twice, "sum", "ranks_0_1"))
        shape, joined = (sizes[index],), comm.renamed(bucket=numbers.get(index))
        sent.meta.update({"shapes": (shape, shape), COMM: (joined,)})
        return sent

    waits.append(graph.call_function(c10d.wait_tensor.default, (send(0),)))
    negated = graph.call_function(aten.neg.default, (waits[0],))
    sent = [send(index) for index in range(1, len(sizes))]
    waits += [graph.call_function(c10d.wait_tensor.default, (node,)) for node in sent]
    graph.output((*waits, negated))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_small_sums_go_together_and_give_the_same() -> None:
    sizes = [3, 600_000, 7, 5]  # the second is above the limit
    plain, joined = summing(sizes), summing(sizes)
    bucket(joined.graph)
    joined.graph.lint()
    joined.recompile()
    assert collectives(plain.graph)["all_reduce"] == 4
    # x0 is read before the others are made, so it goes alone; x2 and x3 go together.
    assert collectives(joined.graph)["all_reduce"] == 3
    inputs = {r: [torch.randn(size) for size in sizes] for r in range(2)}
    expected, results = (run_lockstep({0: m, 1: m}, inputs) for m in (plain, joined))
    for rank in range(2):
        for a, b in zip(expected[rank], results[rank], strict=True):
            assert torch.equal(a, b)


def test_a_bucket_leaves_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums go in the order in which they are made, as many as a bucket holds."""
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 3 * 40)
    module = summing([10] * 7)
    bucket(module.graph)
    module.graph.lint()
    words = {aten.mul.Tensor: "made", c10d.all_reduce.default: "sent"}
    order = [words[node.target] for node in module.graph.nodes if node.target in words]
    alone, full = ["made", "sent"], ["made"] * 3 + ["sent"]
    assert order == alone + full + full
    waits = [n for n in module.graph.nodes if n.target is c10d.wait_tensor.default]
    last = [n for n in module.graph.nodes if n.target in words][-1]
    nodes = list(module.graph.nodes)
    assert [nodes.index(wait) > nodes.index(last) for wait in waits] == [False, True, True]


def test_a_pass_that_runs_writes_only_over_what_nothing_else_reads() -> None:
    graph = fx.Graph()
    argument = graph.placeholder("given")
    kept = graph.call_function(aten.mul.Tensor, (argument, 2))

    def awaited(target: object, *args: object) -> fx.Node:
        sent = graph.call_function(target, args)
        return graph.call_function(c10d.wait_tensor.default, (sent,))

    operands = {
        "given": argument,
        "sent": awaited(c10d.isend.default, argument, 1, 0, "g"),
        "summed_given": awaited(c10d.all_reduce.default, argument, "sum", "g"),
        "summed_own": awaited(
            c10d.all_reduce.default, graph.call_function(aten.cos.default, (argument,)), "sum", "g"
        ),
        "gathered": awaited(c10d.all_gather_into_tensor.default, argument, 2, "g"),
        "scattered": awaited(c10d.reduce_scatter_tensor.default, argument, "sum", 2, "g"),
        "kept": kept,
        "seen": graph.call_function(aten.reshape.default, (kept, [-1])),
        "part": graph.call_function(
            aten.slice.Tensor, (graph.call_function(aten.exp.default, (argument,)),)
        ),
        "own": graph.call_function(aten.add.Tensor, (argument, 1)),
        "kept_turned": graph.call_function(aten.t.default, (kept,)),
        "turned_twice": graph.call_method(
            "contiguous",
            (
                graph.call_function(
                    aten.t.default,
                    (
                        graph.call_function(
                            aten.t.default,
                            (graph.call_function(aten.mm.default, (argument, argument)),),
                        ),
                    ),
                ),
            ),
        ),
        "shaped": graph.call_method(
            "contiguous",
            (
                graph.call_function(
                    aten.reshape.default, (graph.call_function(aten.neg.default, (argument,)), [-1])
                ),
            ),
        ),
    }
    sums = {
        name: graph.create_node(
            "call_function", c10d.all_reduce.default, (node, "sum", "g"), name=f"sum_{name}"
        )
        for name, node in operands.items()
    }
    gather = graph.call_function(c10d.all_gather_into_tensor.default, (argument, 2, "g"))
    graph.output((kept, gather, *sums.values()))
    module = fx.GraphModule(torch.nn.Module(), graph)
    before = str(graph)
    targets = {node.name: node.target for node in eager(module).graph.nodes}
    assert str(module.graph) == before
    assert targets[gather.name] is gathered
    written = {name for name in operands if targets[f"sum_{name}"] is c10d.all_reduce_.default}
    free = {"own", "shaped", "turned_twice", "summed_given", "summed_own", "gathered", "scattered"}
    assert written == free


def test_an_argument_is_not_overwritten_by_what_has_its_name() -> None:
    root, graph = torch.nn.Module(), fx.Graph()
    for name in ("add_2", "input_1"):
        root.register_buffer(name, torch.zeros(1))
        graph.get_attr(name)
    arguments = [add_argument(graph, name) for name in ("add_2", "input", "input_1")]
    graph.output(tuple(arguments))
    module = fx.GraphModule(root, graph)
    assert [value.item() for value in module(*map(torch.tensor, (1, 2, 3)))] == [1, 2, 3]


class Named(torch.nn.Module):
    """Names that Python's syntax, or a graph module, has for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.lambda_ = torch.nn.Parameter(torch.randn(4, 4))
        for name in ("code_", "_meta", "_training"):
            self.register_buffer(name, torch.randn(4, 4))

    def forward(self, self_: torch.Tensor, *, forward: torch.Tensor) -> torch.Tensor:
        return (self_ + forward) @ (self.lambda_ + self.code_ @ self._meta @ self._training)


def test_names_that_are_taken_in_a_graph() -> None:
    arguments = {"self_": torch.randn(8, 4), "forward": torch.randn(8, 4)}
    program = partitioner.compile(Named().eval(), arguments, devices=2, cluster="ideal")
    torch.testing.assert_close(program(**arguments), program.whole(**arguments))


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    def waiting(name: str) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        sent = graph.call_function(c10d.all_reduce.default, (x, "sum", name))
        graph.output((graph.call_function(c10d.wait_tensor.default, (sent,)),))
        return fx.GraphModule(torch.nn.Module(), graph)

    modules = {0: waiting("ranks_0_1"), 1: waiting("ranks_1_2"), 2: waiting("ranks_0_2")}
    inputs = {rank: [torch.ones(1)] for rank in range(3)}
    with pytest.raises(BackendError, match=r"wait for each other: rank 0 in .*all_reduce"):
        run_lockstep(modules, inputs)


def zero(devices: int = 2) -> ModuleProgram:
    model, batch = small_gpt()
    program = partitioner.compile(model, batch, devices=devices, training=True, parallel="zero3")
    assert isinstance(program, ModuleProgram)
    return program


def test_parameters_of_a_pass_are_gathered_together() -> None:
    """All parameters of this model are small: fewer gathers than parameters, in both passes."""
    program = zero()
    parameters = len(list(program.whole.parameters()))
    for which in ("forward", "backward"):
        counts = collectives(program.rank(0, which).graph)
        assert 1 <= counts["all_gather_into_tensor"] < parameters / 2, (which, counts)
    assert collectives(program.rank(0, "backward").graph)["reduce_scatter_tensor"] < parameters / 2


@pytest.mark.slow
def test_rank_graphs_are_readable_code(capsys: pytest.CaptureFixture[str]) -> None:
    program = zero()
    program.rank(1).print_readable()
    text = capsys.readouterr().out
    assert "class Rank1(torch.nn.Module)" in text
    assert "torch.ops.partitioner.attention.default" in text
    assert "'ranks_0_1'" in text


def test_no_such_rank_or_pass() -> None:
    program = zero()
    with pytest.raises(BackendError, match=r"rank 2 is not one of 0\.\.1"):
        program.rank(2)
    with pytest.raises(BackendError, match="rank 0 has no 'sideways' pass"):
        program.rank(0, "sideways")


def test_what_a_boxed_pass_is_given_is_freed_after_its_last_reader() -> None:
    graph, seen = fx.Graph(), []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append([one() is not None for one in alive])
        return x

    first, second = graph.placeholder("first"), graph.placeholder("second")
    before = graph.call_function(look, (first,))
    negated = graph.call_function(aten.neg.default, (before,))
    after = graph.call_function(look, (negated,))
    graph.output((graph.call_function(aten.add.Tensor, (after, second)),))
    arguments = [torch.ones(2), torch.full((2,), 3.0)]
    alive = [weakref.ref(one) for one in arguments]
    (result,) = eager(fx.GraphModule(torch.nn.Module(), graph), boxed=True)(arguments)
    assert result.tolist() == [2.0, 2.0]
    assert seen == [[True, True], [False, True]]
    assert not arguments

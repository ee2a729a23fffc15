"""Collectives that go together give what each gives alone, in random passes of four ranks."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from torch import fx, nn

import partitioner
from helpers.op_rows.placements import placement
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.tensors import torch_dtype
from partitioner.backends.torch.graphs.buckets import bucket
from partitioner.backends.torch.graphs.comms import COLLECTIVES, Arrival, RankComm, wait_for_unread
from partitioner.backends.torch.graphs.notes import COMM
from partitioner.backends.torch.running.all_ranks import run_lockstep
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.prices.reshard import Resharder
from partitioner.cost_model.schedule import buckets
from partitioner.cost_model.schedule.buckets import Member, may_join, together
from partitioner.ir.layout import DimLayout, Placement
from partitioner.ir.mesh import DeviceMesh
from partitioner.ir.program import SMALL_BYTES, Comm, CommKind

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

LINE = DeviceMesh.line(4, "tp")
GRID = DeviceMesh.of({"dp": 2, "tp": 2})
RESHARDER = Resharder(resolve_cluster("4xh100"))
DTYPES = (
    *("float32", "bfloat16", "float16", "float64", "int32", "int64", "bool"),
    *("int16", "complex64"),  # carried as another type
)
#: The last two, of float32, are just below the size that may share a bucket, and above it. The
#: third can only be cut unevenly.
SHAPES = ((), (4,), (7, 9), (8, 3), (4, 12), (3, 8, 5), (8, 63_000), (1024, 600))
STEPS = 32
SEEDS = range(10)
#: Passes of one type, most of whose tensors are so large that they do not all fit in one bucket.
LARGE = (8, 9)


class Drawn:
    """A pass of random steps, emitted in the same way for each rank.

    Each step either starts a communication of an argument or of a result, or computes with a
    result, which is waited for then: some results are read at once, some at the end.
    """

    def __init__(self, seed: int) -> None:
        is_large = seed in LARGE
        rng = np.random.default_rng(seed)
        self.arguments: list[tuple[str, tuple[int, ...], Placement]] = []
        self.comms: list[tuple[Comm, ...]] = []
        self.steps: list[tuple[str, int]] = []
        targets: list[Placement] = []
        dtypes = ["float32"] if is_large else rng.choice(DTYPES, 3, replace=False)
        shares = [0.07] * 6 + [0.58, 0.0] if is_large else [0.12] * 6 + [0.18, 0.1]
        for number in range(STEPS):
            if targets and rng.random() < 0.3:
                self.steps.append(("read", int(rng.integers(len(targets)))))
                continue
            dtype = str(rng.choice(dtypes))
            shape = SHAPES[int(rng.choice(len(SHAPES), p=shares))]
            source, target = _reshard(rng, dtype, shape)
            hop, *_ = RESHARDER.hops(dtype, source, target)
            self.arguments.append((dtype, shape, source))
            self.comms.append(tuple(priced.comm for priced in hop.comms))
            targets.append(hop.after)
            self.steps.append(("send", number))
        self.targets = tuple(targets)
        #: Sends of an argument itself, which is there before the pass begins.
        self.early = frozenset(np.flatnonzero(rng.random(len(targets)) < 0.4).tolist())
        self._put_in_buckets()

    def _put_in_buckets(self) -> None:
        """Give the communications of small operands the numbers of their buckets."""
        sends = [position for position, (word, _) in enumerate(self.steps) if word == "send"]
        by_kind: dict[object, list[Member]] = defaultdict(list)
        for number, position in enumerate(sends):
            dtype, _, source = self.arguments[number]
            comm, nbytes = self.comms[number][0], source.local_bytes(dtype)[0]
            due = [at for at, step in enumerate(self.steps) if step == ("read", number)]
            if may_join(comm, nbytes):
                ready = -1 if number in self.early else position
                member = Member(number, ready, min(due, default=len(self.steps)), nbytes)
                by_kind[comm.kind, comm.ranks, comm.reduce, dtype].append(member)
        drawn = [bucket for members in by_kind.values() for bucket in together(members)]
        for name, members in enumerate(drawn):
            for number in (member.position for member in members):
                comms = self.comms[number]
                self.comms[number] = tuple(comm.renamed(bucket=name) for comm in comms)

    def emit(self, rank: int) -> fx.GraphModule:
        """The pass of a rank, which returns all results and what it computed of them."""
        graph = fx.Graph()
        given = [graph.placeholder(f"x{index}") for index in range(len(self.comms))]
        arrivals: list[Arrival] = []
        known: dict[int, fx.Node] = {}
        results: list[fx.Node] = []

        def arrived(index: int) -> fx.Node:
            if index not in known:
                known[index] = arrivals[index]()
            return known[index]

        for word, index in self.steps:
            if word == "read":
                results.append(graph.call_function(aten.add.Tensor, (arrived(index),) * 2))
                continue
            number = len(arrivals)
            dtype, _, source = self.arguments[number]
            operand = given[number]
            if dtype != "bool" and number not in self.early:
                operand = graph.call_function(aten.mul.Tensor, (operand, 3))
            last = graph._root.prev
            point = dict(LINE.coords() if source.mesh == LINE else GRID.coords())[rank]
            (comm,) = (comm for comm in self.comms[number] if rank in comm.ranks)
            shapes = [
                at.sharding.local_shape(at.mesh, point) for at in (source, self.targets[number])
            ]
            own = RankComm(graph, comm, rank, operand, *shapes, torch.device("cpu"))
            arrival = own.start()
            assert arrival is not None
            arrivals.append(arrival)
            while (last := last.next) is not graph._root:
                last.meta["arranges"] = True
                if last.target in COLLECTIVES:
                    last.meta[COMM] = (comm,)
        results += [arrived(index) for index in range(len(arrivals))]
        wait_for_unread(graph)
        graph.output(tuple(results))
        return fx.GraphModule(torch.nn.Module(), graph)

    def inputs(self, rank: int) -> list[torch.Tensor]:
        """A rank's arguments: small integers, whose sums are exact in every type."""
        generator = torch.Generator().manual_seed(rank)
        found = []
        for dtype, _, source in self.arguments:
            point = dict(source.mesh.coords())[rank]
            shape = source.sharding.local_shape(source.mesh, point)
            values = torch.randint(-4, 5, shape, generator=generator).to(torch_dtype(dtype))
            found.append(values * (1 + 2j) if dtype == "complex64" else values)
        return found


def _reshard(
    rng: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> tuple[Placement, Placement]:
    """A sum, gathered parts, a sum of which each keeps, or parts of another dim than before.

    It is among all ranks, or pairs of them.
    """
    mesh = (LINE, GRID)[rng.integers(2)]
    axes = ("tp",) if mesh == LINE else (("dp",), ("tp",))[rng.integers(2)]
    parts = mesh.size(axes)
    dims = [dim for dim, size in enumerate(shape) if size % parts == 0 or shape == (7, 9)]
    whole = [DimLayout.whole(size) for size in shape]
    pending = placement(mesh, *whole, partial=tuple((axis, "sum") for axis in axes))
    kinds = [] if dtype == "bool" else ["all_reduce"]
    kinds += ["gather"] if dims else []
    kinds += ["scatter"] if dims and dtype != "bool" else []
    kinds += ["other dim"] if len(dims) > 1 else []
    if not kinds:
        return _reshard(rng, "float32", shape) if not shape else _reshard(rng, dtype, (4,))
    kind = rng.choice(kinds)
    if kind == "all_reduce":
        return pending, placement(mesh, *whole)
    dim = int(rng.choice(dims))
    cut = [*whole]
    cut[dim] = DimLayout.even(shape[dim], axes, mesh)
    if kind == "gather":
        return placement(mesh, *cut), placement(mesh, *whole)
    if kind == "other dim":
        first, then = rng.choice(dims, 2, replace=False)
        cuts = [[*whole], [*whole]]
        for one, at in zip(cuts, (first, then), strict=True):
            one[at] = DimLayout.even(shape[at], axes, mesh)
        return placement(mesh, *cuts[0]), placement(mesh, *cuts[1])
    if mesh == GRID and shape[dim] % 4 == 0 and rng.random() < 0.5:
        other = "tp" if axes == ("dp",) else "dp"  # each pair keeps a half of it
        cut[dim] = DimLayout.even(shape[dim], (*axes, other), mesh)
    return pending, placement(mesh, *cut)


def _sent(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.target in COLLECTIVES]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_passes_give_the_same_with_and_without_buckets(seed: int) -> None:
    drawn = Drawn(seed)
    plain, joined = ({rank: drawn.emit(rank) for rank in range(4)} for _ in range(2))
    for module in joined.values():
        bucket(module.graph)
        module.graph.lint()
        module.recompile()
    assert len(_sent(joined[0])) < len(_sent(plain[0]))
    assert len({tuple(_sent(module)) for module in joined.values()}) == 1
    inputs = {rank: drawn.inputs(rank) for rank in range(4)}
    expected, results = (run_lockstep(modules, inputs) for modules in (plain, joined))
    for rank in range(4):
        assert len(expected[rank]) == len(results[rank])
        for alone, shared in zip(expected[rank], results[rank], strict=True):
            assert alone.dtype == shared.dtype
            assert torch.equal(alone, shared)


def test_the_random_passes_have_all_that_buckets_tell_apart() -> None:
    drawn = [Drawn(seed) for seed in SEEDS]
    comms = [comms[0] for one in drawn for comms in one.comms]
    kinds = Counter(comm.kind.value for comm in comms)
    assert min(kinds[kind] for kind in ("all_reduce", "all_gather", "reduce_scatter")) > 5
    assert kinds["all_to_all"] > 5
    gathers = [comm.is_even for comm in comms if comm.kind is CommKind.ALL_GATHER]
    assert {True, False} == set(gathers)
    assert len({comm.ranks for comm in comms}) == 3
    assert {comm.dtype for comm in comms} == set(DTYPES)
    sizes = [
        math.prod(at.sharding.local_shape(at.mesh, at.mesh.coord(0))) * torch_dtype(dtype).itemsize
        for one in drawn
        for dtype, _, at in one.arguments
    ]
    assert any(size > SMALL_BYTES for size in sizes)
    filled = Counter(
        (number, comm.kind, comm.ranks, comm.dtype)
        for number, one in enumerate(drawn)
        for (_, shape, _), (comm, *_) in zip(one.arguments, one.comms, strict=True)
        if shape == SHAPES[-2]
    )
    assert max(filled.values()) > 2  # three of them are more than a bucket holds


def test_a_bucket_leaves_with_the_first_of_its_members() -> None:
    """Operands that are there from the begin are not gathered before the plan has memory for it."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "y")]
    before = graph.call_function(aten.cos.default, (given[0],))
    waits = []
    comm = Comm(0, CommKind.ALL_GATHER, (0, 1), "", "", "float32", bucket=0)
    for operand in given:
        sent = graph.call_function(c10d.all_gather_into_tensor.default, (operand, 2, "ranks_0_1"))
        sent.meta.update({"shapes": ((4,), (8,)), COMM: (comm,)})
        waits.append(graph.call_function(c10d.wait_tensor.default, (sent,)))
    graph.output((before, *waits))
    bucket(graph)
    graph.lint()
    nodes = list(graph.nodes)
    (sent,) = (node for node in nodes if node.target in COLLECTIVES)
    assert nodes.index(before) < nodes.index(sent)
    results = run_lockstep(
        dict.fromkeys(range(2), fx.GraphModule(torch.nn.Module(), graph)),
        {rank: [torch.full((4,), 2.0 * rank + k) for k in range(2)] for rank in range(2)},
    )
    assert results[0][1].tolist() == [0.0] * 4 + [2.0] * 4
    assert results[0][2].tolist() == [1.0] * 4 + [3.0] * 4


class Mixed(nn.Module):
    """Layers in two types."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            x = torch.tanh(wide(x)) * self.scale
            x = torch.tanh(narrow(x.bfloat16())).float()
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize("parallel", ["dp", "zero3"])
def test_gradients_of_two_batches_add_up_alike(
    parallel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, batches = Mixed(), torch.randn(2, 2, 8, 16)

    def accumulated() -> tuple[int, dict[str, torch.Tensor]]:
        program = partitioner.compile(
            model, tuple(batches[0]), devices=2, training=True, parallel=parallel, time_limit_s=10
        )
        assert isinstance(program, ModuleProgram)
        first, second = (program.gradients(*batch)[1] for batch in batches)
        count = len(_sent(program.rank(0))) + len(_sent(program.rank(0, "backward")))
        return count, {name: gradient + second[name] for name, gradient in first.items()}

    joined, together = accumulated()
    monkeypatch.setattr(buckets, "SMALL_BYTES", 0)
    alone, apart = accumulated()
    assert joined < alone
    assert {gradient.dtype for gradient in together.values()} == {torch.float32, torch.bfloat16}
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        assert torch.equal(gradient, apart[name]), name

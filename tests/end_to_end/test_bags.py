"""Embedding bags and tables of a recommendation model, cut: equal to one process."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.schedule.traffic import sent_bytes
from partitioner.ir.plan import resolve
from partitioner.strategies.constraints import Constraints, Pin

BATCH, ROWS, WIDTH, COUNT = 6, 11, 4, 17


class Recommender(nn.Module):
    """Dense features, a table for one id each, and bags in each mode; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(3, WIDTH)
        self.item = nn.Embedding(ROWS, WIDTH)
        self.sums = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.means = nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=2)
        self.maxima = nn.EmbeddingBag(ROWS, WIDTH, mode="max")
        self.top = nn.Linear(5 * WIDTH, 1)

    def forward(
        self, x: Tensor, item: Tensor, indices: Tensor, offsets: Tensor, scales: Tensor, y: Tensor
    ) -> Tensor:
        bags = (
            self.sums(indices, offsets, per_sample_weights=scales),
            self.means(indices, offsets),
            self.maxima(indices, offsets),
        )
        parts = [self.dense(x), self.item(item), *bags]
        scores = self.top(torch.cat(parts, 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, y)


def inputs(seed: int) -> tuple[Tensor, ...]:
    """A bag has no index, another has six."""
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, 3, generator=draw),
        torch.randint(ROWS, (BATCH,), generator=draw),
        torch.randint(ROWS, (COUNT,), generator=draw),
        torch.tensor([0, 3, 3, 9, 12, 13]),
        torch.rand(COUNT, generator=draw),
        torch.randint(2, (BATCH,), generator=draw).float(),
    )


TABLES = ("item", "sums", "means", "maxima")
CUTS: Mapping[str, Constraints | None] = {
    "dp": None,
    "rows": Constraints(tuple(Pin("pin", tensor=f"{name}.weight", dim=0) for name in TABLES)),
    "columns": Constraints(tuple(Pin("pin", tensor=f"{name}.weight", dim=1) for name in TABLES)),
}


@pytest.mark.parametrize(
    ("how", "devices"), [("dp", 2), ("dp", 3), ("rows", 2), ("rows", 3), ("columns", 2)]
)
def test_a_recommender_trains_as_on_one_device(how: str, devices: int) -> None:
    torch.manual_seed(0)
    module, constraints = Recommender(), CUTS[how]
    program = partitioner.compile(
        module,
        inputs(0),
        devices=devices,
        training=True,
        time_limit_s=10,
        **({"parallel": "dp"} if constraints is None else {}),  # type: ignore[arg-type]
        **({} if constraints is None else {"constraints": constraints, "strategy": "intra"}),
    )
    assert isinstance(program, ModuleProgram)
    fresh = inputs(1)
    loss, grads = program.gradients(*fresh)
    expected = module(*fresh)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)
    bags = [p for p in resolve(program.graph, program.plan) if "embedding_bag" in p.node.op]
    assert len(bags) == 7  # three, their gradients, and the places of the maxima
    if how == "dp":
        assert all("b" in placed.layouts for placed in bags)
    else:
        stored = [p for p in resolve(program.graph, program.plan) if p.node.op.endswith("::state")]
        tables = [p for p in stored if p.node.outputs[0].split(".")[0] in TABLES]
        assert len(tables) == len(TABLES)
        for placed in tables:
            at = placed.outs[0]
            assert at is not None
            assert at.sharding.dims[how == "columns"].axes
    notes = " ".join(program.summary["notes"])
    assert ("'indices', 'offsets', 'scales' without it" in notes) == (how == "dp")


def test_gradients_of_tables_are_shards() -> None:
    """No device computes the gradient of a row that it does not have."""
    torch.manual_seed(0)
    program = partitioner.compile(
        *(Recommender(), inputs(0), 2),
        training=True,
        strategy="intra",
        constraints=CUTS["rows"],
        time_limit_s=10,
    )
    for placed in resolve(program.graph, program.plan):
        if placed.node.op.endswith(("bag_backward", "bag_max_backward", "dense_backward")):
            (result,) = placed.outs
            assert result is not None
            assert result.sharding.dims[0].sizes() == (6, 5)
            assert not result.sharding.partial


class _Lookup(nn.Module):
    """Rows of a table, by ids of a batch, times 2."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows * 2


@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_sends_what_the_formula_says(dim: int) -> None:
    """Results are cut by batch."""
    devices, ids = 4, torch.randint(12, (8,))
    pins = (
        Pin("table", tensor="table.weight", dim=dim),
        Pin("ids", tensor="ids", replicate=True),
        Pin("rows", tensor="mul", dim=0),
    )
    program = partitioner.compile(
        *(_Lookup(), (ids,), devices),
        mesh={"tp": devices},
        strategy="intra",
        constraints=Constraints(pins),
        time_limit_s=10,
    )
    sent = sum(sent_bytes(program.schedule).values()) / devices
    part = 8 * WIDTH / devices  # of the results
    moved = part if dim == 0 else part / devices  # reduce-scatter, all-to-all
    assert sent == 4 * (devices - 1) * moved


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(ROWS, WIDTH)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        result: Tensor = self.bags(indices, offsets)
        return result


def test_drawn_inputs_are_indices_and_offsets() -> None:
    program = partitioner.compile(_Bags(), (inputs(0)[2], inputs(0)[3]), 2, time_limit_s=5)
    assert program.verify(seed=1)


@pytest.mark.parametrize("mode", [0, 1])
def test_a_shard_may_have_its_bags_in_any_order(mode: int) -> None:
    """Pieces of indices, rows and bags; one bag has no index, some indices are padding."""
    offsets = torch.tensor([0, 3, 3, 9, 12, 13])
    indices = torch.randint(ROWS, (COUNT,), generator=torch.Generator().manual_seed(0))
    table, weights = torch.randn(ROWS, WIDTH), torch.rand(COUNT) if mode == 0 else None
    expected = F.embedding_bag(
        *(indices, table, offsets),
        mode=("sum", "mean")[mode],
        per_sample_weights=weights,
        padding_idx=2,
    )
    parts = [
        torch.ops.partitioner.embedding_bag(
            torch.cat([table[at : at + size] for at, size in zip(*rows, strict=True)]),
            *(indices, offsets, weights, mode, BATCH, 2, ROWS, COUNT),
            *(*rows, [0], [COUNT], [4, 0, 2], [2, 2, 2]),
        )
        for rows in (([6, 0], [5, 2]), ([2], [4]))
    ]
    torch.testing.assert_close(sum(parts), expected[[4, 5, 0, 1, 2, 3]])

"""Plans taken over for calls of other sizes."""

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram, variant
from partitioner.foundations.files import ResultError
from partitioner.ir.layout import Placement


class Turned(nn.Module):
    """A layer over rows of (time, batch): the parts of a batch lie in stripes there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, x.shape[-1])
        y = self.second(self.first(rows).relu()).view(x.shape[1], x.shape[0], -1)
        return (y.transpose(0, 1) - x).square().mean()


class Encoder(nn.Module):
    """An encoder layer: of one step, PyTorch traces other views and products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) - x).square().mean()


class Recurrent(nn.Module):
    """A recurrent layer, which is traced once for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x)[0] - x).square().mean()


def homes(program: ModuleProgram) -> dict[str, Placement]:
    """Where parameters lie, in a step and at rest."""
    known, traced = program.programs.homes, program.traced
    named = {**traced.stored, **{f"{n} at rest": value for n, value in traced.rests.items()}}
    return {name: known[value].placement for name, value in named.items()}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("make", [Encoder, Recurrent, Turned])
@pytest.mark.parametrize(
    ("parallel", "devices"),
    [("dp", 2), ("zero1", 2), ("zero2", 3), ("zero3", 2), ("tp", 2), (None, 2)],
)
def test_sizes_of_another_graph_are_planned(
    make: type[nn.Module], parallel: str | None, devices: int
) -> None:
    """All that is stored stays where it lies, and a second call takes the plan of the first."""
    torch.manual_seed(0)
    program = partitioner.compile(
        make(), torch.randn(6, 4, 8), devices, cluster="ideal", training=True, parallel=parallel
    )
    assert isinstance(program, ModuleProgram)
    other = variant(program, (torch.randn(6, 1, 8),), {}, training=True, share=lambda run: run())
    assert other.graph.by_name.keys() != program.graph.by_name.keys()
    assert homes(other) == homes(program)
    assert other.verify()

    def fail(_: object) -> str:
        raise AssertionError("it was searched again")

    batch = (torch.randn(12, 1, 8),)
    again = variant(program, batch, {}, training=True, share=fail, like=[other])
    assert again.plan.nodes.keys() == other.plan.nodes.keys()


def test_another_graph_in_micro_batches_is_refused() -> None:
    program = partitioner.compile(
        Turned(), torch.randn(6, 4, 8), 2, training=True, parallel="dp", micro_batches=2
    )
    assert isinstance(program, ModuleProgram)
    match = "with a batch of these sizes, the model is another graph, without '/clone'"
    with pytest.raises(ResultError, match=match):
        variant(program, (torch.randn(6, 1, 8),), {}, training=True, share=lambda run: run())


def striped(program: ModuleProgram) -> set[str]:
    """The explicit cuts of a plan."""
    cuts = (cut for node in program.plan.nodes.values() for cut in node.cuts.values())
    return {str(cut) for cut in cuts if cut.segments is not None}


@pytest.mark.parametrize(
    ("parallel", "batch", "length", "expected"),
    [
        ("dp", 6, 5, "dp:" + "|".join(["3,3"] * 5)),
        ("dp", 6, 8, "dp:" + "|".join(["3,3"] * 8)),
        pytest.param("zero3", 10, 3, "dp:" + "|".join(["5,5"] * 3), marks=pytest.mark.slow),
    ],
)
def test_stripes_follow_their_dims(parallel: str, batch: int, length: int, expected: str) -> None:
    torch.manual_seed(0)
    program = partitioner.compile(
        Turned(), torch.randn(6, 4, 8), 2, cluster="ideal", training=True, parallel=parallel
    )
    assert isinstance(program, ModuleProgram)
    assert striped(program) == {"dp:" + "|".join(["3,3"] * 4)}
    example = (torch.randn(batch, length, 8),)
    other = variant(program, example, {}, training=True, share=lambda run: run())
    assert striped(other) == {expected}
    assert other.verify()

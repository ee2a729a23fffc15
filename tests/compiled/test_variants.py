"""Plans taken over for calls of other sizes."""

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.compiled.module import ModuleProgram
from partitioner.compiled.variants import variant


class Turned(nn.Module):
    """A layer over rows of (time, batch): the parts of a batch lie in stripes there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(-1, x.shape[-1])
        y = self.second(self.first(rows).relu()).view(x.shape[1], x.shape[0], -1)
        return (y.transpose(0, 1) - x).square().mean()


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

"""Views of which only some parts are read are planned on meshes."""

import torch
from torch import Tensor, nn

import partitioner


class LaterParts(nn.Module):
    """The mean square of two of three parts of a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        _, key, value = self.mix(x).chunk(3, -1)
        return (key * value).pow(2).mean()


def test_a_first_part_that_nothing_reads_is_no_value() -> None:
    compiled = partitioner.compile(
        LaterParts(),
        (torch.randn(4, 8),),
        devices=4,
        mesh={"a": 2, "b": 2},
        training=True,
        cluster="ideal",
        time_limit_s=1,
    )
    assert compiled.verify(symbolic=True)

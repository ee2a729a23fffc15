"""A stored value whose uneven parts are not those of torch.chunk is moved each step: it is said."""

import pytest
import torch
from torch import Tensor, nn

import partitioner


class Running(nn.Module):
    """A state of each sample, written at each step."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(batch, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The next state through a layer."""
        self.state = self.state * 0.5 + x
        return self.layer(self.state)


@pytest.mark.parametrize("batch", [7, 6])
def test_a_cache_that_is_moved_each_step_is_named(
    batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    program = partitioner.compile(Running(batch), (torch.ones(batch, 64),), 3, parallel="dp")
    found = [note for note in program.summary["notes"] if "is moved each step" in note]
    program.show()
    shown = " ".join(capsys.readouterr().out.split())
    if batch == 6:
        assert not found
        assert "moved each step" not in shown
        return
    line = (
        "'state' is moved each step: dim 0, of 7, is cut as 3, 2, 2 where it is used, and stored "
        "values only like torch.chunk, as 3, 3, 1; a size that 3 divides stays in place"
    )
    assert found == [line]
    assert line in shown

"""Methods that set the contents of submodules of ranks' modules."""

import pytest
import torch
from torch import nn

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.submodules import RankSubmodule
from partitioner.backends.torch.state.whole import Submodule


class Scaled(nn.Module):
    """Its method sets what `todo` says."""

    weight: nn.Parameter
    size: float
    todo: str

    def reset_parameters(self) -> None:
        """Fill the weight, and set what the graphs would ignore."""
        nn.init.constant_(self.weight, self.size)
        if self.todo == "size":
            self.size = 3.0
        elif self.todo == "bias":
            self.bias = nn.Parameter(torch.ones(2))
        elif self.todo == "weight":
            self.weight = nn.Parameter(torch.ones(5))
        elif self.todo:
            raise ValueError("no such thing")


def part_of_model(todo: str) -> nn.Module:
    part = RankSubmodule.of(Submodule(Scaled, values={"size": 2.0, "todo": todo}))
    part.register_parameter("weight", nn.Parameter(torch.zeros(3)))
    return part


def test_contents_are_set_with_the_values_of_the_model() -> None:
    part = part_of_model("")
    part.reset_parameters()  # type: ignore[operator]
    assert part.get_parameter("weight").tolist() == [2.0] * 3


@pytest.mark.parametrize(
    ("todo", "words"),
    [
        ("size", "sets size, which was traced as it was when the module was compiled"),
        ("bias", "changes which tensors it has"),
        ("weight", "changes the size of weight"),
        ("other", "no such thing"),
    ],
)
def test_what_graphs_would_ignore_is_refused(todo: str, words: str) -> None:
    part = part_of_model(todo)
    with pytest.raises(BackendError, match=rf"^reset_parameters\(\) of a Scaled .*{words}: reset"):
        part.reset_parameters()  # type: ignore[operator]
    assert not part.get_parameter("weight").any()

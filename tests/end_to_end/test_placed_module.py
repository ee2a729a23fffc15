"""Training of a module with layers placed on devices by hand: 0 -> 1 -> 0."""

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.graphs.comms import COLLECTIVES

WAIT = torch.ops._c10d_functional.wait_tensor.default
SPLIT = {"first": 0, "second": 1, "last": 0}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.second(self.first(x).tanh()).tanh()
        return (self.last(hidden) - y).square().mean()


@pytest.fixture(scope="module")
def program() -> ModuleProgram:
    torch.manual_seed(0)
    compiled = partitioner.compile(
        Layers(),
        (torch.randn(4, 6), torch.randn(4, 1)),
        devices=2,
        training=True,
        strategy="inter",
        constraints=partitioner.Constraints.placed(SPLIT),
    )
    assert isinstance(compiled, ModuleProgram)
    return compiled


def test_layers_lie_where_they_are_placed(program: ModuleProgram) -> None:
    for name in program.traced.stored:
        decision = program.plan.nodes["/" + name.replace(".", "/")]
        assert program.plan.groups[decision.group].devices == (SPLIT[name.split(".")[0]],)


def test_gradients_are_those_of_the_module(program: ModuleProgram) -> None:
    batch = torch.randn(4, 6), torch.randn(4, 1)
    loss, gradients = program.gradients(*batch)
    expected = program.whole(*batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in program.whole.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


#: Groups that are no neighbours, of unlike sizes, and that share a device.
GROUPS: tuple[dict[str, int | list[int]], ...] = (
    {"first": [0, 2], "second": [1, 3]},
    {"first": [3, 0], "second": [1, 2], "last": [0, 3]},
    {"first": [0, 2], "second": 1},
    {"first": [0, 3, 2], "second": [1, 2]},
)


@pytest.mark.parametrize(
    ("groups", "training"),
    [
        (GROUPS[0], True),
        (GROUPS[0], False),
        *(pytest.param(groups, True, marks=pytest.mark.slow) for groups in GROUPS[1:]),
    ],
    ids=str,
)
def test_layers_lie_on_the_groups_that_they_are_pinned_to(
    groups: dict[str, int | list[int]], training: bool
) -> None:
    program = partitioner.compile(
        Layers(),
        (torch.randn(4, 6), torch.randn(4, 1)),
        devices=4,
        training=training,
        constraints=partitioner.Constraints.placed(groups),
    )
    pinned = {name: {*at} if isinstance(at, list) else {at} for name, at in groups.items()}
    for name, node in program.plan.nodes.items():
        layer = name.split("/")[1]
        if layer in pinned:
            assert set(program.plan.groups[node.group].devices) == pinned[layer]
    assert program.verify()


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_collective_is_waited_for(program: ModuleProgram, rank: int, which: str) -> None:
    nodes = list(program.rank(rank, which).graph.nodes)
    collectives = [node for node in nodes if node.target in COLLECTIVES]
    assert collectives
    waits = [[user for user in node.users if user.target is WAIT] for node in collectives]
    assert all(len(users) == 1 for users in waits)
    assert any(not wait.users for (wait,) in waits)  # of a value that is only sent

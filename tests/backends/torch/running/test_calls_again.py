"""A rank's module remembers what its calls begin with, and sees what has changed since."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import partitioner
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.rank_module import RankModule


class Net(nn.Module):
    """Returns its loss, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.down.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.down(self.norm(self.up(x)).relu()) * scale
        return (scores - y).square().mean(), self.up.weight


X = torch.linspace(-1, 1, 24).reshape(6, 4).sin()
BATCH = {"x": X, "y": torch.ones(6, 4), "scale": torch.tensor(0.5)}


@pytest.fixture(scope="module")
def program() -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    program = partitioner.compile(Net(), BATCH, devices=1, training=True)
    assert isinstance(program, partitioner.ModuleProgram)
    return program


@pytest.fixture
def module(program: partitioner.ModuleProgram) -> Iterator[RankModule]:
    """On one rank, which has been called."""
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    module = program.module()
    module(**BATCH)
    yield module
    torch.distributed.destroy_process_group()


def evaluates_a_part(module: RankModule) -> None:
    module.norm.eval()


def hooks_a_part(module: RankModule) -> None:
    module.up.register_forward_hook(print)


def hooks_before_a_part(module: RankModule) -> None:
    module.up.register_forward_pre_hook(print)


def replaces_a_weight(module: RankModule) -> None:
    module.up.weight = nn.Parameter(module.up.weight.detach().clone())


def replaces_a_buffer(module: RankModule) -> None:
    module.norm.running_mean = torch.zeros(4)


def swaps_names(module: RankModule) -> None:
    held = module.norm._buffers
    held["running_mean"], held["running_var"] = held["running_var"], held["running_mean"]


def renames_a_weight(module: RankModule) -> None:
    weight = module.down._parameters.pop("bias")
    module.down.register_parameter("offset", weight)


def moves_a_weight(module: RankModule) -> None:
    module.down.register_parameter("offset", module.up._parameters.pop("bias"))


def replaces_a_part(module: RankModule) -> None:
    module.up = nn.Linear(4, 4)


def narrows(module: RankModule) -> None:
    module.half()


def thaws(module: RankModule) -> None:
    module.down.weight.requires_grad_()


REFUSED: dict[Callable[[RankModule], None], str] = {
    evaluates_a_part: "norm is in evaluation mode",
    hooks_a_part: "up has a hook",
    hooks_before_a_part: "up has a hook",
    replaces_a_weight: r"up\.weight was replaced",
    replaces_a_buffer: r"norm\.running_mean was replaced",
    swaps_names: r"norm\.running_(mean|var) was replaced",
    renames_a_weight: r"down\.bias was replaced",
    moves_a_weight: r"up\.bias was replaced",
    replaces_a_part: r"up\.weight was replaced",
    narrows: r"up\.weight is float16 now",
    thaws: r"down\.weight requires a gradient now",
}


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_change_after_a_call_is_refused(
    module: RankModule, change: Callable[[RankModule], None]
) -> None:
    change(module)
    with pytest.raises(BackendError, match=f"^rank 0: {REFUSED[change]}"):
        module(**BATCH)


def test_more_parts_are_no_change(module: RankModule) -> None:
    loss, _ = module(**BATCH)
    module.register_parameter("more", nn.Parameter(torch.zeros(1)))
    module.up.register_buffer("more", torch.zeros(1))
    torch.testing.assert_close(module(**BATCH)[0], loss)
    module.up.eval()
    with pytest.raises(BackendError, match=r"^rank 0: up is in evaluation mode"):
        module(**BATCH)


def plain(program: partitioner.ModuleProgram, module: RankModule) -> nn.Module:
    """The module that was compiled, with the state of a rank's module."""
    whole = copy.deepcopy(program.whole)
    whole.load_state_dict(module.full_state_dict())
    return whole.train(module.training)


def test_what_is_written_is_read(program: partitioner.ModuleProgram, module: RankModule) -> None:
    """In place, through `data`, and as another view of the same memory."""

    def writes() -> None:
        with torch.no_grad():
            module.up.weight.mul_(2)

    def writes_data() -> None:
        module.up.weight.data += 1

    def turns() -> None:
        module.up.weight.data = module.up.weight.data.t()

    for change in (writes, writes_data, turns):
        before = module(**BATCH)[0]
        change()
        expected = plain(program, module)(**BATCH)[0]
        loss = module(**BATCH)[0]
        torch.testing.assert_close(loss, expected)
        assert loss != before


def test_what_a_call_returns_is_the_callers(module: RankModule) -> None:
    """Changes of the sizes of a result do not reach the parameter that it is."""
    with torch.no_grad():
        _, weight = module(**BATCH)
        expected = weight.clone()
        weight.unsqueeze_(0)
        assert module(**BATCH)[1].equal(expected)
    assert module.up.weight.shape == (4, 4)


def test_modes_of_calls(program: partitioner.ModuleProgram, module: RankModule) -> None:
    """Modes and forms of a call change from call to call."""
    reordered = dict(reversed(BATCH.items()))
    for kwargs in (BATCH, reordered):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            whole = plain(program, module)
            with mode():
                loss = module(**kwargs)[0]
                torch.testing.assert_close(loss, whole(**kwargs)[0])
            assert loss.requires_grad == (mode is torch.enable_grad)
    module.eval()
    whole = plain(program, module)
    torch.testing.assert_close(module(**BATCH)[0], whole(**BATCH)[0])
    module.train()
    steps = module.steps
    for wrong, match in (
        ({"x": X, "y": X}, r"arguments are 0 positional values, x, y \("),
        ({**BATCH, "more": X}, r"arguments are 0 positional values, .*more"),
    ):
        with pytest.raises(BackendError, match=match):
            module(**wrong)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(BackendError, match="autocast of b"):
        module(**BATCH)
    with pytest.raises(BackendError, match="an input requires a gradient"):
        module(**{**BATCH, "x": X.clone().requires_grad_()})
    assert module.steps == steps
    loss = module(**BATCH)[0]
    whole = plain(program, module)
    loss.backward()
    whole(**BATCH)[0].backward()
    assert module.steps == steps + 1
    torch.testing.assert_close(module.up.weight.grad, whole.up.weight.grad)


def test_arguments_are_bound_as_by_the_module_itself(
    program: partitioner.ModuleProgram, module: RankModule
) -> None:
    """The trace was called by names; calls by position, and by both, are the same call."""
    x, y, scale = BATCH.values()
    calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]]
    calls = [((x, y, scale), {}), ((x,), {"scale": scale, "y": y})]
    for args, kwargs in calls:
        whole = plain(program, module)
        torch.testing.assert_close(module(*args, **kwargs)[0], whole(*args, **kwargs)[0])
    calls = [((x, y, scale, x), {}), ((x, y), {"y": y, "scale": scale})]
    for args, kwargs in calls:
        with pytest.raises(BackendError, match=r"arguments are \d positional values"):
            module(*args, **kwargs)


@pytest.mark.parametrize("example", [tuple(BATCH.values()), BATCH], ids=["by position", "by name"])
def test_a_program_takes_positions_and_names(example: Any) -> None:
    model = Net().eval()
    program = partitioner.compile(model, example, devices=2)
    values, names = tuple(BATCH.values()), tuple(BATCH)
    for given in range(4):
        kwargs = dict(zip(names[given:], values[given:], strict=True))
        torch.testing.assert_close(program(*values[:given], **kwargs), model(*values))


def test_a_copy_has_tensors_of_its_own(module: RankModule) -> None:
    before = module(**BATCH)[0]
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.up.weight.zero_()
        other.norm.weight.zero_()
    assert module(**BATCH)[0] == before
    assert other(**BATCH)[0] != before
    other.norm.eval()
    module(**BATCH)
    with pytest.raises(BackendError, match="norm is in evaluation mode"):
        other(**BATCH)

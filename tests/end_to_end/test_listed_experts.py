"""Experts that are modules of a list: each lies with its weights on devices of its own."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.expert_models import Listed, ListedNet, Loss, Mlp, NormedMlp, SwiGlu
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.schedule.simulate import simulate
from partitioner.strategies.constraints import ConstraintError
from partitioner.strategies.kinds.expert import expert_lists

#: By name, of `ListedNet`; devices; the numbers of experts that each device has.
CASES: dict[str, tuple[dict[str, Any], int, tuple[int, ...]]] = {
    "add": ({}, 2, (2, 2)),
    "uneven": ({"experts": 3, "make": SwiGlu}, 2, (2, 1)),
    "stack": ({"form": "stack", "chosen": 0, "experts": 5, "shared": True}, 3, (2, 2, 1)),
    "einsum": ({"form": "einsum", "make": NormedMlp}, 2, (2, 2)),
    "where": ({"form": "where", "chosen": 1}, 3, (2, 1, 1)),
    "choice": ({"form": "choice"}, 2, (2, 2)),
    "linear": ({"make": lambda: nn.Linear(8, 8)}, 2, (2, 2)),
    "two layers": ({"layers": 2, "make": SwiGlu, "form": "stack"}, 2, (2, 2)),
    "a layer twice": ({"layers": 2, "tied": True}, 2, (2, 2)),
    "two experts": ({"experts": 2, "chosen": 1}, 2, (1, 1)),
}


def batch(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randint(5, (rows,))


def compiled(module: nn.Module, example: object, devices: int, **options: Any) -> ModuleProgram:
    given = {"parallel": "ep", "cluster": "ideal", "time_limit_s": 10, **options}
    program = partitioner.compile(module, example, devices=devices, **given)
    assert isinstance(program, ModuleProgram)
    return program


def check_training(program: ModuleProgram, module: nn.Module, example: tuple[Tensor, ...]) -> None:
    """Compare the loss and all gradients."""
    loss, grads = program.gradients(*example)
    expected = module(*example)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        torch.testing.assert_close(grads[name], grad, msg=lambda said, name=name: f"{name}: {said}")


def places(program: ModuleProgram) -> Mapping[str, tuple[int, ...]]:
    """The devices that hold each parameter, whole."""
    homes, stored = program.programs.homes, program.traced.stored
    assert all(homes[value].placement.sharding.is_replicated for value in stored.values())
    return {name: homes[value].placement.mesh.devices for name, value in stored.items()}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [*CASES])
def test_lists_are_experts_in_training(case: str) -> None:
    options, devices, counts = CASES[case]
    torch.manual_seed(0)
    module, example = ListedNet(**options), batch()
    program = compiled(module, example, devices, training=True)
    held = places(program)
    of = {place for name, place in held.items() if ".experts." in name}
    assert of == {(device,) for device in range(devices)}
    parts = [(name.split("."), place) for name, place in held.items() if ".experts." in name]
    experts = {path[3]: place for path, place in parts}
    assert tuple([*experts.values()].count((device,)) for device in range(devices)) == counts
    everywhere = tuple(range(devices))
    assert {p for name, p in held.items() if ".experts." not in name} == {everywhere}
    check_training(program, module, batch())


@pytest.mark.parametrize("form", ["add", pytest.param("stack", marks=pytest.mark.slow)])
def test_lists_are_experts_in_inference(form: str) -> None:
    torch.manual_seed(0)
    module, x = ListedNet(layers=2, form=form, experts=5).eval(), torch.randn(4, 3, 8)
    program = compiled(module, (x,), 3)
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x))
    constants = [
        {part.whole for part in rank.constants.values() if ".experts." in part.whole}
        for rank in program.programs.ranks
    ]
    assert [len({n.split(".")[3] for n in names}) for names in constants] == [2, 2, 1]
    assert not constants[0] & constants[1]


MESHES = {
    "ep+tp": {"ep": 2, "tp": 2},
    "dp+ep": {"dp": 2, "ep": 2},
    "pp+ep": {"pp": 2, "ep": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_lists_beside_other_kinds(kind: str) -> None:
    torch.manual_seed(0)
    module, example = ListedNet(layers=2), batch(8)
    program = compiled(module, example, 4, parallel=kind, mesh=MESHES[kind], training=True)
    check_training(program, module, batch(8))
    homes, stored = program.programs.homes, program.traced.stored
    held = [homes[v].placement for n, v in stored.items() if ".experts." in n]
    assert {at.mesh.size() for at in held} == ({1} if kind == "pp+ep" else {2})
    assert any(not at.sharding.is_replicated for at in held) == (kind == "ep+tp")


def test_memory_and_time_are_divided() -> None:
    """Devices compute their experts at the same time, whatever the order of the module."""
    with torch.device("meta"):
        module = Loss(Listed(make=lambda: Mlp(256, 1024), width=256))
        example = torch.empty(2, 512, 256)
    peaks, latencies = {}, {}
    for kind in ("dp", "ep"):
        options = {"parallel": kind, "training": True, "plan_only": True}
        program = compiled(module, tuple(example), 4, **options)
        peaks[kind] = max(program.summary["peak_bytes"])
        latencies[kind] = simulate(program.schedule).latency_s
    weights = sum(p.numel() * p.itemsize for n, p in module.named_parameters() if "experts" in n)
    assert peaks["dp"] - peaks["ep"] > 0.9 * 3 / 4 * 4 * weights  # with gradients and two moments
    assert latencies["ep"] < 1.1 * latencies["dp"]


class Heads(nn.Module):
    """Modules of a list that compute the same tokens, of which no router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Mlp() for _ in range(4)])
        self.out = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.cat([head(x) for head in self.heads], -1))
        return result


class Mean(nn.Module):
    """An ensemble."""

    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([member(x) for member in self.members]).mean(0)


class Tower(nn.Module):
    """Layers one behind the other, each times what a router gives."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.layers = nn.ModuleList([Mlp() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        for index, layer in enumerate(self.layers):
            x = x + layer(x) * scores[:, index : index + 1]
        return x


@pytest.mark.parametrize("make", [Heads, Mean, Tower])
def test_other_lists_are_no_experts(make: type[nn.Module]) -> None:
    module, x = make(), torch.randn(6, 8)
    program = compiled(module, (x,), 2, parallel="dp")
    assert expert_lists(program.graph) == ()
    with pytest.raises(ConstraintError, match="parallel ep: the model has no experts: no stored"):
        compiled(module, (x,), 2)


class Convolved(nn.Module):
    """A convolution with a bias that gives as many channels as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = nn.Conv1d(4, 4, 1)
        self.mixture = Listed(form="stack")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mixture(self.channels(x))
        return result


def test_weights_of_as_many_channels_are_no_experts() -> None:
    torch.manual_seed(0)
    module, x = Convolved().eval(), torch.randn(6, 4, 8)
    program = compiled(module, (x,), 2)
    with torch.no_grad():
        torch.testing.assert_close(program(x), module(x))


def test_fewer_experts_than_devices_are_refused() -> None:
    match = r"parallel ep: 'layers.0.experts' has 2 experts, fewer than 3 devices"
    with pytest.raises(ConstraintError, match=match):
        compiled(ListedNet(experts=2), batch(), 3, training=True)


def test_tokens_are_not_sent_to_lists() -> None:
    with pytest.raises(ConstraintError, match="no layer of experts is one node that can send"):
        compiled(ListedNet(), batch(), 2, training=True, parallel="dispatch")

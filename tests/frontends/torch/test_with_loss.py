"""Losses outside of modules, and those that are named among their results."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.frontends.errors import FrontendError
from partitioner.ir.errors import OptionError

X, Y = torch.randn(8, 6), torch.randint(4, (8,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.down(self.up(x).relu()) * scale
        return logits if mask is None else logits * mask


class Size(Net):
    def forward(self, x: Tensor) -> int:  # type: ignore[override]
        return len(super().forward(x))


class Pair(Net):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return logits, nn.functional.cross_entropy(logits, y)


def trained(module: nn.Module, *inputs: Any, **options: Any) -> partitioner.ModuleProgram:
    return partitioner.compile(
        *(module, inputs, 2), training=True, parallel="dp", cluster="ideal", **options
    )


def test_a_view_is_the_module_itself_but_for_its_call() -> None:
    net = Net()
    view = partitioner.with_loss(net, nn.CrossEntropyLoss())
    assert isinstance(view, Net)
    assert list(view.state_dict()) == list(net.state_dict())
    assert all(one is net.get_parameter(name) for name, one in view.named_parameters())
    net.eval()
    assert not view.training
    assert list(inspect.signature(view.forward).parameters) == ["x", "scale", "mask", "target"]
    assert torch.equal(view(X), net(X))
    expected = nn.functional.cross_entropy(net(X), Y)
    assert torch.equal(view(X, target=Y), expected)
    copied = copy.deepcopy(view)
    assert copied.up is not net.up
    assert torch.equal(copied(X, target=Y), expected)


def test_a_criterion_is_taken_as_it_is() -> None:
    loss = nn.CrossEntropyLoss(torch.ones(4))
    net = Net()
    view = partitioner.with_loss(net, loss)
    loss.weight.mul_(torch.arange(4.0))  # type: ignore[union-attr]
    assert torch.equal(view(X, target=Y), nn.functional.cross_entropy(net(X), Y))


@pytest.mark.parametrize("module", [Net(), nn.Sequential(nn.Linear(6, 4))], ids=["own", "layers"])
def test_a_program_of_a_criterion_verifies(module: nn.Module, tmp_path: Path) -> None:
    loss = nn.CrossEntropyLoss(torch.arange(1.0, 5.0))
    program = trained(module, X, loss=loss, target=Y)
    assert program.verify()
    assert list(program.gradients(X, target=Y)[1]) == [n for n, _ in module.named_parameters()]
    torch.testing.assert_close(program(X, target=Y), loss(module(X), Y))
    program.save(tmp_path / "net.partition")
    name = next(iter(inspect.signature(module.forward).parameters))
    view = partitioner.with_loss(module, loss)
    again = partitioner.load(tmp_path / "net.partition", view, {name: X, "target": Y})
    assert again.verify()


def test_a_module_without_contents_keeps_its_criterion() -> None:
    with torch.device("meta"):
        net = Net()
    program = trained(net, X, loss=nn.CrossEntropyLoss(), target=Y)
    assert program.graph.types[program.graph.outputs[0]].shape == ()


def test_a_loss_by_its_place_comes_first() -> None:
    net = Pair()
    loss, logits = trained(net, X, Y, loss=-1)(X, Y)
    torch.testing.assert_close((logits, loss), net(X, Y))


def test_parameters_that_a_loss_reads_get_its_gradient() -> None:
    net = Net()

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, target) + net.up.weight.square().sum()

    _, gradients = trained(net, X, loss=loss, target=Y).gradients(X, target=Y)
    loss(net(X), Y).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gradients["up.weight"], net.up.weight.grad)


def test_defaults_of_the_signature_bind_calls() -> None:
    net = Net()
    left_out = trained(net, X, loss=nn.CrossEntropyLoss(), target=Y)
    given = trained(net, X, 1.0, None, loss=nn.CrossEntropyLoss(), target=Y)
    expected = nn.functional.cross_entropy(net(X), Y)
    for program in (left_out, given):
        for args, kwargs in (
            ((X,), {}),
            ((X, 1.0), {}),
            ((), {"scale": 1.0, "x": X}),
            ((X,), {"mask": None}),
        ):
            torch.testing.assert_close(program(*args, target=Y, **kwargs), expected)
        with pytest.raises(partitioner.PartitionerError, match=r"scale|traced as 1\.0"):
            program(X, scale=2.0, target=Y)


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(outputs), target)


class Targeted(Net):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * target


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


ELSEWHERE = Trained()


@pytest.mark.parametrize(
    ("module", "options", "sentence"),
    [
        (Net(), {"loss": nn.CrossEntropyLoss, "target": Y}, "loss is the class CrossEntropyLoss"),
        (Net(), {"loss": 1.5, "target": Y}, "loss is 1.5; give a function"),
        (Net(), {"loss": nn.CrossEntropyLoss()}, "give target="),
        (Net(), {"target": Y}, "target is for a loss"),
        (Net(), {"loss": "loss", "target": Y}, "which is none"),
        (Net(), {"loss": "mse"}, r"outputs of Net are a tensor of \[8, 4\]: give a key"),
        (Size(), {"loss": "mse"}, "outputs of Size are an int: give a key"),
        (Net(), {"loss": Trained(), "target": Y}, "Trained trains head.weight"),
        (Net(), {"loss": ELSEWHERE.forward, "target": Y}, "reads a parameter of"),
        (Targeted(), {"loss": nn.MSELoss(), "target": Y}, "an argument 'target' of its own"),
        (hooked(Net()), {"loss": nn.MSELoss(), "target": Y}, "has hooks of its own"),
        (Net(), {"loss": nn.MSELoss(), "training": False}, "loss is for training=True"),
    ],
)
def test_what_has_no_loss_is_refused(
    module: nn.Module, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((OptionError, FrontendError), match=sentence) as caught:
        partitioner.compile(module, X, 2, **{"training": True, **options})
    assert "\n" not in str(caught.value)


def test_models_of_files_have_their_loss_in_python() -> None:
    with pytest.raises(OptionError, match="loss is for PyTorch modules"):
        partitioner.compile("net.onnx", loss="loss")
    with pytest.raises(OptionError, match=r"partitioner\.with_loss"):
        partitioner.compile(f"{__name__}:made", training=True, loss=nn.MSELoss())


def made() -> tuple[nn.Module, Tensor]:
    return Net(), X

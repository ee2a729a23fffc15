"""Tensors of a module in one memory are refused where a step writes to one of them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import partitioner
from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch import trace
from partitioner.frontends.torch.trace import check_memory_apart

NOW = "lies in the memory of"


class Tied(nn.Module):
    """Two layers, of which `tie` makes one of the other's memory."""

    def __init__(self, tie: Callable[["Tied"], None]) -> None:
        super().__init__()
        self.back, self.forth = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.scale = torch.ones(6)
        tie(self)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.mean(0))
        return (self.forth(self.back(x)) * self.scale - self.mean).square().mean()


def data(m: Tied) -> None:
    m.forth.weight.data = m.back.weight.data.t()


def parameter(m: Tied) -> None:
    m.forth.weight = nn.Parameter(m.back.weight)


def array(m: Tied) -> None:
    m.forth.weight = nn.Parameter(torch.from_numpy(m.back.weight.detach().numpy()))


def buffer(m: Tied) -> None:
    m.forth.register_buffer("start", m.back.bias.data[2:4])


def attribute(m: Tied) -> None:
    m.scale = m.back.weight.detach()[3]


def written(m: Tied) -> None:
    m.back.register_buffer("last", m.mean.view(2, 3)[1])


@pytest.mark.parametrize(
    ("tie", "names"),
    [
        (data, "forth.weight .* back.weight"),
        (parameter, "forth.weight .* back.weight"),
        (array, "forth.weight .* back.weight"),
        (attribute, "back.weight .* scale"),
        (buffer, "forth.start .* back.bias"),
    ],
)
def test_written_memory_of_two_names_is_refused(tie: Callable[[Tied], None], names: str) -> None:
    one, other = names.split(" .* ")
    said = f"^{one} {NOW} {other} and is another tensor"
    with pytest.raises(FrontendError, match=said):
        partitioner.compile(Tied(tie), torch.randn(4, 6), devices=2, training=True)


@pytest.mark.parametrize("training", [False, True])
def test_memory_that_the_module_writes_is_refused(training: bool) -> None:
    said = f"back.last {NOW} another tensor, and the module writes to one of them"
    with pytest.raises(FrontendError, match=said):
        partitioner.compile(Tied(written), torch.randn(4, 6), devices=2, training=training)


def test_memory_that_no_step_writes_may_have_two_names() -> None:
    module, x = Tied(data), torch.randn(4, 6)
    expected = copy.deepcopy(module)(x)
    torch.testing.assert_close(partitioner.compile(module, x, devices=2)(x), expected)


def test_parts_of_one_memory_may_be_apart() -> None:
    flat = torch.zeros(4, 6)
    apart = {"left": flat[:, :3], "right": flat[:, 3:], "none": flat[:0]}
    check_memory_apart(apart, apart.keys())
    check_memory_apart(apart | {"all": flat}, ())
    over = {"left": flat[:, :3], "middle": flat[:, 2:5].expand(1, 4, 3), "right": flat[:, 5:]}
    with pytest.raises(FrontendError, match=f"middle {NOW} left .* writes to left would"):
        check_memory_apart(over, {"left", "right"})


def test_many_parts_of_one_memory_are_not_compared_in_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flat = torch.zeros(4000)
    parts = {f"part{i}": flat[i : i + 1] for i in range(4000)}
    placed: list[torch.Tensor] = []
    place_of = trace._place_of
    monkeypatch.setattr(trace, "_place_of", lambda x: placed.append(x) or place_of(x))
    check_memory_apart(parts, parts.keys())
    assert len(placed) == len(parts)


def test_memory_of_weights_on_the_meta_device_counts_too() -> None:
    module = Tied(lambda _: None).to("meta")
    module.scale = torch.ones(6)
    parameter(module)
    with pytest.raises(FrontendError, match=f"^forth.weight {NOW} back.weight and is another"):
        partitioner.compile(module, torch.randn(4, 6), devices=2, training=True)

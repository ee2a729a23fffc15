"""Graphs of modules: stored values, the reads of each pass, names, and refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch import aot_autograd

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.building.graph import ModuleGraph, module_graph
from partitioner.frontends.torch.tracing.capture import capture, export_module, materialised


def traced(module: nn.Module, *args: Any, training: bool = True, **kwargs: Any) -> ModuleGraph:
    program = export_module(module, args, kwargs)
    return module_graph(capture(module, program, {}, training=training), "M")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, ids: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
        x = self.embed(ids) * self.scale * factor
        return {"loss": self.head(x).logsumexp(-1).mean(), "x": x}


IDS = torch.arange(6).reshape(2, 3)


def test_a_tied_weight_is_stored_once_and_has_one_gradient() -> None:
    tied = traced(Tied(), IDS)
    assert tied.stored["embed.weight"] == "embed.weight"
    assert "head.weight" not in tied.stored
    assert set(tied.gradients) == {"embed.weight"}  # unused and frozen ones have none
    ops = [node.op for node in tied.graph.nodes]
    assert ops.count("partitioner::update") == 1


def test_forward_comes_first_and_each_pass_has_its_alias() -> None:
    graph = traced(Tied(), IDS).graph
    names = [node.name for node in graph.nodes]
    backward = [name in graph.backward for name in names]
    assert backward == sorted(backward)
    assert any(backward)
    forward = {v for n in graph.nodes if n.name not in graph.backward for v in n.writes}
    for node in graph.nodes:
        if node.name in graph.backward and node.op != "partitioner::alias":
            crossing = [value for value in node.inputs if value in forward]
            stored = node.op == "partitioner::update"
            assert len(crossing) <= stored, (node.name, crossing)
    readers = {n.name: n.op for n in graph.nodes if "embed.weight" in n.reads}
    assert sorted(readers.values()) == ["partitioner::alias"] * 2 + ["partitioner::update"]


def test_nodes_are_named_after_their_submodules() -> None:
    graph = traced(Tied(), IDS).graph
    assert "/embed/embedding" in graph.by_name
    assert "/head/mm" in graph.by_name
    assert "/embed/weight" in graph.by_name


def test_inference_keeps_weights_as_constants() -> None:
    module = Tied()
    inference = traced(module, IDS, training=False)
    assert inference.stored == {}
    assert set(inference.graph.constants) == {"embed.weight", "scale"}
    weight = inference.graph.constants["embed.weight"].load()
    assert torch.equal(torch.from_numpy(weight), module.embed.weight.detach())
    assert inference.call.inputs == ("ids",)


def test_numbers_are_fixed_and_are_no_inputs() -> None:
    assert traced(Tied(), IDS, 2.0).call.inputs == ("ids", "")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).sum()


def test_running_statistics_are_written_where_they_are_stored() -> None:
    normed = traced(Normed(), torch.randn(3, 4))
    assert set(normed.written) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert set(normed.written.values()) <= set(normed.graph.outputs)


class Lambda(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.call = call

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x: m.weight * x, r"a floating scalar, not float32\[3\]"),
        (lambda _, x: (x > 0).sum(), r"a floating scalar, not int64\[\]"),
        (lambda _, x: x.sum(), "no parameter that requires a gradient gets one"),
        (lambda m, _: (m.weight * torch.randperm(3)).sum(), "random operator aten::randperm"),
        (lambda m, _: torch.poisson(m.weight.abs()).sum(), "random operator aten::poisson"),
        (
            lambda m, _: (m.weight * torch.empty(3).log_normal_()).sum(),
            "random operator aten::log_normal",
        ),
        (lambda _, x: x.sum() if x.sum() > 0 else x, "torch.export cannot trace it"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(call: Callable[..., Any], message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        traced(Lambda(call), torch.randn(3))


def test_weights_on_the_meta_device_keep_their_backward_pass() -> None:
    with torch.device("meta"):
        module = Tied()
    fake = materialised(module)
    assert fake is not module
    assert fake.head.weight is fake.embed.weight
    with fake.embed.weight.fake_mode:
        ids = torch.zeros(2, 3, dtype=torch.long)
    assert set(traced(fake, ids).gradients) == {"embed.weight"}
    inference = traced(fake, ids, training=False)
    with pytest.raises(FrontendError, match=r"embed\.weight has no contents: .* are fake"):
        inference.graph.constants["embed.weight"].load()


class Writes(nn.Module):
    """Writes in place, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.how == "add_":
            x = (2 * x).add_(1)
        if self.how == "statistics":
            x = self.norm(x)
        if self.how == "region":
            with torch.no_grad():
                more = (2 * x).add_(1)
            x = x + more
        if self.how == "backward":
            x = x.cumprod(0)
        return x.square().mean()


@pytest.mark.parametrize(
    ("how", "functional"),
    [
        ("", [True]),
        ("add_", [False]),
        ("statistics", [False]),
        ("region", [False]),
        ("backward", [True, False]),
    ],
)
def test_only_what_writes_is_made_functional(
    how: str, functional: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assumed: list[bool] = []
    trace = aot_autograd.aot_export_joint_with_descriptors

    def noted(*args: Any, **kwargs: Any) -> Any:
        assumed.append(kwargs["disable_functionalization"])
        return trace(*args, **kwargs)

    monkeypatch.setattr(aot_autograd, "aot_export_joint_with_descriptors", noted)
    graph = traced(Writes(how), torch.ones(2, 4)).graph
    assert assumed == functional
    assert not any(node.op.partition(".")[0].endswith("_") for node in graph.nodes)

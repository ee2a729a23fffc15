"""`torch.autocast`, in a module and around one: casts are nodes of the graph."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner
from partitioner.api.compiled.module import ModuleProgram, variant
from partitioner.backends.errors import BackendError
from partitioner.frontends.errors import FrontendError

#: Relative to the largest value of a gradient; terms in bfloat16 are added in another order.
ALLOWED = 2e-2


def half() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


class Tied(nn.Module):
    """An embedding that is the head too and a layer that runs twice: autocast casts each once."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layer = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.inside = inside

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and scores."""
        with half() if self.inside else nullcontext():
            x = self.layer(self.layer(self.words(ids)).relu())
            scores = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten()), scores


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(32, (size, 6), generator=draw), torch.randint(
        32, (size, 6), generator=draw
    )


def compiled(*, inside: bool, **options: object) -> tuple[Tied, ModuleProgram]:
    torch.manual_seed(0)
    module = Tied(inside=inside)
    with nullcontext() if inside else half():
        program = partitioner.compile(module, batch(0), cluster="2xideal", training=True, **options)
    assert isinstance(program, ModuleProgram)
    return module, program


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
@pytest.mark.parametrize("parallel", [None, pytest.param("dp", marks=pytest.mark.slow), "tp"])
def test_outputs_and_gradients(parallel: str | None, inside: bool) -> None:
    module, program = compiled(inside=inside, parallel=parallel)
    assert program.summary["sharded_flops_share"] > 0.5
    traced = program.traced
    assert {program.graph.types[value].dtype for value in traced.stored.values()} == {"float32"}
    alone = copy.deepcopy(module)
    with nullcontext() if inside else half():
        loss, scores = alone(*batch(1))
    loss.backward()
    (sharded_loss, sharded_scores), gradients = program.gradients(*batch(1))
    assert sharded_scores.dtype == scores.dtype == torch.bfloat16
    torch.testing.assert_close(sharded_loss, loss, rtol=ALLOWED, atol=0)
    # parts of a sum in bfloat16 are rounded before they are added: an ulp of the largest score
    ulp = torch.finfo(torch.bfloat16).eps * float(scores.detach().abs().max())
    torch.testing.assert_close(sharded_scores, scores, rtol=ALLOWED, atol=ulp)
    for name, parameter in alone.named_parameters():
        expected = parameter.grad
        assert expected is not None
        assert gradients[name].dtype == torch.float32
        gap = (gradients[name] - expected).abs().max() / expected.abs().max()
        assert gap < ALLOWED, name
    verification = program.verify()
    assert verification, str(verification)


def test_a_program_keeps_the_region_that_it_was_compiled_in() -> None:
    """Its variants do too, though they are traced outside."""
    _, program = compiled(inside=False)
    loss, scores = program(*batch(1))
    with half():
        assert torch.equal(program(*batch(1))[1], scores)
    assert loss.dtype == torch.float32
    smaller = variant(program, batch(1, 2), {}, training=False, share=lambda search: search())
    assert smaller.graph.types[smaller.traced.call.results[1]].dtype == "bfloat16"


def test_a_call_in_another_region_is_refused() -> None:
    program = partitioner.compile(nn.Linear(8, 8), torch.ones(4, 8), cluster="2xideal")
    with (
        half(),
        pytest.raises(
            BackendError,
            match=r"under torch.autocast of bfloat16; .* compiled without it: compile it",
        ),
    ):
        program(torch.ones(4, 8))
    assert program.verify()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_a_region_of_another_device_is_refused(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch, which switches such a region off without a GPU, is made to believe in one."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)

    class Cuda(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.float16) if inside else nullcontext():
                return self.layer(x)

    with (
        nullcontext() if inside else torch.autocast("cuda", torch.float16),
        pytest.raises(FrontendError, match=r"'cuda'\) does nothing to a module .* on the cpu"),
    ):
        partitioner.compile(Cuda(), torch.ones(4, 8), cluster="2xideal")

"""`torch.cond`: one node with its branches, in inference, training and files."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cli.main import main
from partitioner.frontends.errors import FrontendError
from partitioner.ir.graph import Graph
from partitioner.ir.ops.aten.branches import BRANCHES, COND

# PyTorch warns so of its own trace of a `torch.cond` that is called in eager mode
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Body = Callable[["Branches", Tensor, Tensor], Tensor]


class Branches(nn.Module):
    """A layer, a body that computes with its result, and a loss."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.enter, self.one, self.two = (nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(8))
        self.body = body

    def forward(self, x: Tensor, flag: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and result."""
        result = self.body(self, self.enter(x), flag)
        return result.square().mean(), result


def layers(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
    return torch.cond(flag, lambda x: m.one(x).relu(), lambda x: 2 * m.two(x), (h,))


def two_results(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
    """Their gradients are one tensor."""
    a, b = torch.cond(flag, lambda x: (m.one(x), x + 1), lambda x: (m.two(x), x.clone()), (h,))
    return a + b


def nested(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
    """The inner predicate is computed."""

    def inner(x: Tensor) -> Tensor:
        return torch.cond(x.mean() > 0, lambda y: m.one(m.one(y)), lambda y: y * 2, (x,))

    return torch.cond(flag, inner, m.two.forward, (h,))


def kept_operators(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
    """Attention and a norm, which are nodes of their own outside too."""

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(m.one(x)[None], x[None], x[None])[0]

    return torch.cond(flag, attention, lambda x: F.layer_norm(m.two(x), (8,)), (h,))


def after_another(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
    return m.one(layers(m, layers(m, h, flag), flag.logical_not()))


SLOW = (kept_operators, after_another)
BODIES = [layers, two_results, nested, *(pytest.param(b, marks=pytest.mark.slow) for b in SLOW)]


def batch(flag: bool) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.tensor(flag)


def chosen(
    flag: Tensor, yes: Callable[..., Any], no: Callable[..., Any], operands: Sequence[Tensor]
) -> Any:
    """`torch.cond` as Python says it, of which no trace is made."""
    return (yes if flag else no)(*operands)


@cache
def compiled(body: Body, *, training: bool, **options: object) -> tuple[Branches, ModuleProgram]:
    torch.manual_seed(0)
    module = Branches(body).train(training)
    program = partitioner.compile(
        module, batch(True), cluster="2xideal", training=training, **options
    )
    assert isinstance(program, ModuleProgram)
    return module, program


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_results_and_gradients_of_both_branches(
    body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, program = compiled(body, training=True)
    assert program.summary["sharded_flops_share"] > 0.9
    for flag in (True, False, True):
        alone = copy.deepcopy(module)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cond", chosen)
            loss, result = alone(*batch(flag))
        loss.backward()
        results, gradients = program.gradients(*batch(flag))
        torch.testing.assert_close(results, (loss, result))
        for name, parameter in alone.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(gradients[name], expected, msg=name)


@pytest.mark.parametrize("parallel", [pytest.param("zero3", marks=pytest.mark.slow), "tp"])
def test_kinds_of_parallelism(parallel: str) -> None:
    """Matrices that a branch reads are whole there."""
    _, program = compiled(layers, training=True, parallel=parallel)
    assert program.plan.nodes["/enter/weight"].cuts
    assert program.verify()


@pytest.mark.slow
def test_inference_and_files(tmp_path: Path) -> None:
    module, program = compiled(layers, training=False)
    for flag in (True, False):
        torch.testing.assert_close(program(*batch(flag)), module(*batch(flag)))
    folder = program.save(tmp_path / "c.partition")
    again = partitioner.load(folder, module, batch(True))
    assert again.plan == program.plan
    assert again.verify_written(folder)


@pytest.mark.slow
def test_files_of_a_training_program(tmp_path: Path) -> None:
    module, program = compiled(nested, training=True)
    folder = program.save(tmp_path / "t.partition")
    assert partitioner.load(folder, module, batch(True)).verify_written(folder)


def test_a_node_has_the_operands_and_results_that_are_read() -> None:
    """A rank's graph is readable."""
    _, program = compiled(two_results, training=True)
    forward, backward = (node for node in program.graph.nodes if node.op == COND)
    assert forward.inputs[0] == "flag"
    assert len(forward.outputs) == 2
    assert len(backward.outputs) == 5  # one.bias, one.weight, two.bias, two.weight, the operand
    yes = forward.attrs[BRANCHES[0]]
    assert isinstance(yes, Graph)
    ops = [node.op for node in yes.nodes if node.op != "partitioner::alias"]
    assert ops == ["aten::t", "aten::addmm", "aten::add.Tensor"]
    code = program.rank(0).print_readable(print_output=False)
    assert "torch.ops.higher_order.cond(flag, true_branch, false_branch" in code
    assert "class true_branch" in code


def test_another_branch_is_another_graph() -> None:
    def again(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
        return layers(m, h, flag)

    def other(m: Branches, h: Tensor, flag: Tensor) -> Tensor:
        return torch.cond(flag, lambda x: m.one(x).sigmoid(), lambda x: 2 * m.two(x), (h,))

    digests = {compiled(body, training=False)[1].graph.digest for body in (layers, again, other)}
    assert len(digests) == 2


@pytest.mark.slow
def test_an_exported_program_with_branches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    torch.export.save(torch.export.export(Branches(nested), batch(True)), tmp_path / "m.pt2")
    folder = tmp_path / "m.partition"
    options = ["--devices", "2", "--cluster", "ideal", "-o", str(folder)]
    assert main([str(tmp_path / "m.pt2"), *options]) == 0
    capsys.readouterr()
    assert main(["verify", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 ranks")


def refused() -> Iterator[tuple[Body, str]]:
    def literal(x: Tensor) -> Tensor:
        return x * torch.tensor([2.0] * 8)

    for body, message in (
        (lambda m, x: m.dropout(x) + 1, "random operator aten.native_dropout.default in a branch"),
        (lambda _, x: x + torch.rand(4, 8), "random operator aten.rand.default in a branch"),
        (lambda m, x: x + m.count.add_(1), r"input mutation .*torch.cond"),
        (lambda _, x: x, r"aliasing .*torch.cond"),
        (lambda _, x: literal(x), "a branch of torch.cond makes a tensor from Python numbers"),
    ):

        def call(m: Branches, h: Tensor, flag: Tensor, branch: Callable = body) -> Tensor:
            return torch.cond(flag, lambda x: branch(m, x), m.two.forward, (h,))

        yield call, message


@pytest.mark.parametrize(
    ("body", "message"), list(refused()), ids=["dropout", "draws", "writes", "alias", "literal"]
)
def test_branches_that_cannot_be_compiled_are_refused(body: Body, message: str) -> None:
    with pytest.raises(FrontendError, match=message):
        compiled(body, training=True)

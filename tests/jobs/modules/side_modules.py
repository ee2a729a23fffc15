"""Modules with parameters that the loss does not use or that lie oddly, trained by a gloo group."""

import copy
import pickle
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import partitioner
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.rank_module import RankModule
from partitioner.frontends.errors import FrontendError
from partitioner.strategies.constraints import Constraints, Pin

#: A result uses the first one, nothing the second.
UNUSED = ("side.weight", "spare.weight")


class Side(nn.Module):
    """A layer that is trained, a frozen one, and two that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cold = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.side, self.spare = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, str]:
        """Loss, and what does not lead to it."""
        hidden = self.cold(self.layer(x)).relu()
        return hidden.square().mean(), self.side(hidden), "side"


@cache
def program() -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    options = {"training": True, "cluster": "ideal", "parallel": "zero3"}
    compiled = partitioner.compile(Side(), torch.randn(4, 8), devices=2, **options)
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def step(one: nn.Module, update: torch.optim.Optimizer) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    loss, _, name = one(x)
    assert name == "side"
    loss.backward()
    for unused in UNUSED:
        assert one.get_parameter(unused).grad is None
    nn.utils.clip_grad_norm_(one.parameters(), 0.01)
    update.step()
    update.zero_grad()


def norm(one: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([parameter.detach() for parameter in one.parameters()])


def has_unused_parameters(_: int) -> None:
    torch.manual_seed(0)
    module, whole = program().module(), Side()
    assert isinstance(module, RankModule)
    for foreach in (False, True):
        moments = []
        for one in (module, whole):
            for unused in UNUSED:
                one.get_parameter(unused).requires_grad_(True)
            update = torch.optim.AdamW(one.parameters(), lr=0.1, foreach=foreach)
            step(one, update)
            moments.append(get_state_dict(one, update)[1]["state"].keys())
            step(one, update)
        assert moments[0] == moments[1]
        assert {"layer.weight", "layer.bias"} == set(moments[0])
    for name, tensor in module.full_state_dict().items():
        torch.testing.assert_close(tensor, whole.state_dict()[name])
    torch.testing.assert_close(norm(module).full_tensor(), norm(whole))  # type: ignore[attr-defined]
    module.get_parameter("cold.weight").requires_grad_(True)
    with pytest.raises(BackendError, match=r"cold\.weight requires a gradient now, but was frozen"):
        module(torch.randn(4, 8))


class Turned(nn.Module):
    """A layer whose gradient comes out turned."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        loss: Tensor = (x @ self.layer.weight.t() + self.layer.bias).square().mean()
        return loss


def turned_batch() -> Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


@cache
def turned(dim: int) -> partitioner.ModuleProgram:
    """Its weight is cut along a dim."""
    torch.manual_seed(0)
    pins = (Pin("layer.weight", tensor="layer.weight", dim=dim), Pin("x", tensor="x", dim=0))
    options: Any = {"training": True, "cluster": "ideal", "constraints": Constraints(pins)}
    compiled = partitioner.compile(Turned(), turned_batch(), devices=2, **options)
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


TURNED = [partial(turned, dim) for dim in range(2)]


def trains_what_lies_oddly(_: int) -> None:
    """Fused optimizers go through a parameter's memory and its gradient's in one order."""
    x = turned_batch()
    for program in TURNED:
        module, whole = program().module(), copy.deepcopy(program().whole)
        for one in (whole, module):
            update = torch.optim.AdamW(one.parameters(), lr=0.1, fused=True)
            for _step in range(3):
                one(x).backward()
                update.step()
                update.zero_grad()
        for name, tensor in module.full_state_dict().items():
            torch.testing.assert_close(tensor, whole.state_dict()[name])


class Heads(nn.Module):
    """One head is trained, another one evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        """Loss, or classes."""
        hidden = self.layer(x).relu()
        return hidden.square().mean() if self.training else self.head(hidden) * self.scale


def heads_batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@cache
def heads(parallel: str) -> partitioner.ModuleProgram:
    """Of a kind of parallelism; "" for any plan of the mesh."""
    torch.manual_seed(0)
    options: Any = {"parallel": parallel} if parallel else {"mesh": {"dp": 2}}
    compiled = partitioner.compile(
        Heads(), heads_batch(), devices=2, training=True, cluster="ideal", **options
    )
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


HEADS = [partial(heads, parallel) for parallel in ("zero3", "")]


def evaluates_what_is_not_trained(_: int) -> None:
    """What only evaluation computes with is loaded and changed like all else."""
    x = heads_batch()
    for program in HEADS:
        module, whole = program().module(), copy.deepcopy(program().whole)
        module.eval()
        whole.eval()
        with torch.no_grad():
            torch.testing.assert_close(module(x), whole(x))
            other = Heads().eval()
            other.scale.fill_(3.0)
            module.load_state_dict(other.state_dict())
            torch.testing.assert_close(module(x), other(x))
            module.get_parameter("head.weight").mul_(2)
            other.head.weight.mul_(2)
            torch.testing.assert_close(module(x), other(x))
        module.train()
        module(x).backward()


def refuses_other_gradients(_: int) -> None:
    """Results require gradients as the module's do; only the loss leads to them."""
    module, x = program().module(), torch.randn(4, 8)
    for other in (lambda loss, side: loss + side.mean(), lambda _, side: side.mean()):
        loss, side, _ = module(x)
        assert side.requires_grad
        with pytest.raises(BackendError, match="a gradient reaches another result of the module"):
            other(loss, side).backward()
    loss, side, _ = module(x)
    with pytest.raises(BackendError, match="create_graph=True: a program has no gradients of grad"):
        loss.backward(create_graph=True)
    module.eval()
    with pytest.raises(
        BackendError, match=r"backward\(\) of a call in evaluation mode: a step has"
    ):
        (module(x)[0] + module.get_parameter("layer.weight").sum().full_tensor()).backward()
    module.train()
    module.zero_grad()
    loss, side, _ = module(x)
    (loss + side.detach().mean()).backward()
    whole = Side()
    whole.load_state_dict(module.full_state_dict())
    whole(x)[0].backward()
    grad = module.get_parameter("layer.weight").grad
    torch.testing.assert_close(grad.full_tensor(), whole.layer.weight.grad)  # type: ignore[union-attr]


class Scaled(nn.Module):
    """Computes with numbers that are attributes, and with a tensor that no state has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.BatchNorm1d(8), 2.0
        self.drop, self.last = nn.Dropout(0.0), nn.Linear(8, 8, bias=False)
        self.again = self.last
        self.listed = nn.ModuleList([nn.Identity(), self.last])
        self.keyed = nn.ModuleDict({"drop": self.drop, "chain": nn.Sequential(nn.Identity())})
        self.register_buffer("ones", torch.ones(8), persistent=False)
        self.config = {"hidden": 8}

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def parameter_count(self, *, trained: bool = False) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trained)

    def scores(self, x: Tensor) -> Tensor:
        return self.last(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        y = self.again(self.last(self.drop(self.layer(x) * self.factor * self.ones)))
        loss: Tensor = y.square().mean()
        return loss


@cache
def scaled() -> partitioner.ModuleProgram:
    options: Any = {"training": True, "cluster": "ideal", "mesh": {"dp": 2}}
    compiled = partitioner.compile(Scaled(), torch.randn(4, 8), devices=2, **options)
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def goes_by_kinds(module: nn.Module) -> None:
    """Submodules are of the classes that they have in the model; they hold tensors alone."""
    kinds = [part.__class__ for part in Scaled().modules()]
    for part, kind in zip(list(module.modules())[1:], kinds[1:], strict=True):
        assert isinstance(part, kind)
        assert isinstance(copy.deepcopy(part), kind)
        assert isinstance(pickle.loads(pickle.dumps(part)), kind)
        with pytest.raises(BackendError, match=f"a {kind.__name__} of a rank's module does not ru"):
            part(torch.randn(4, 8))
    layers: Any = dict(module.named_modules())
    assert not isinstance(layers["layer"], nn.Linear)
    assert layers["last"].bias is None
    assert module.get_submodule("again") is layers["last"]
    reads_lists_of_parts(module, layers["last"])
    assert hasattr(layers["layer"], "reset_running_stats")
    assert not hasattr(layers["last"], "reset_running_stats")
    assert layers["last"].in_features == 8
    with pytest.raises(AttributeError, match="a Linear of a rank's module has no 'others'"):
        layers["last"].others  # noqa: B018


def reads_lists_of_parts(module: Any, last: nn.Module) -> None:
    """Lists, dictionaries and sequences of submodules are read as PyTorch's; others are none."""
    listed, keyed = module.listed, module.keyed
    assert listed[1] is listed[-1] is [*listed][1] is last
    assert len(listed) == 2
    assert last in listed
    assert isinstance(listed[1:], nn.ModuleList)
    assert listed[1:][0] is last
    assert [*keyed] == [*keyed.keys()] == ["drop", "chain"]
    assert keyed["drop"] is module.drop is dict(keyed.items())["drop"]
    assert [*keyed.values()] == [module.drop, keyed["chain"]]
    assert "drop" in keyed
    assert [*keyed["chain"]] == [keyed["chain"][0]]
    assert copy.deepcopy(listed)[1].weight is not last.weight
    with pytest.raises(IndexError):
        listed[2]
    with pytest.raises(AttributeError, match="a ModuleList of a rank's module has no 'keys'"):
        listed.keys()


def leaves_parts_to_their_ranks(rank: int) -> None:
    """A submodule that other ranks hold is of no kind; one that is held all over is of its kind."""
    module = staged().module()
    assert [isinstance(part, nn.Linear) for part in module.children()] == [rank == 0, rank == 1]
    module.apply(lambda part: isinstance(part, nn.Linear) and nn.init.ones_(part.weight))
    with pytest.raises(AttributeError, match="a Linear of a rank's module has no 'weight'"):
        list(module.children())[1 - rank].weight  # noqa: B018


class Chain(nn.Sequential):
    """Two layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Loss."""
        loss: Tensor = super().forward(x).square().mean()
        return loss


@cache
def staged() -> partitioner.ModuleProgram:
    options = {"training": True, "cluster": "ideal", "parallel": "pp", "micro_batches": 2}
    chain = Chain(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled = partitioner.compile(chain, torch.randn(4, 8), devices=2, **options)
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def refuses_attributes_of_the_graphs(_: int) -> None:
    """Those of the whole module, and of a part; others may be set."""
    program, x = scaled(), torch.randn(4, 8)
    whole, module = program.whole, program.module()
    of_graphs = (module, "factor"), (module, "ones"), (module.layer, "momentum")
    for part, name in (*of_graphs, (module.drop, "p"), (module.last, "bias")):
        with pytest.raises(BackendError, match=f"{name} was traced as it was when the module was"):
            setattr(part, name, 0.5)
    goes_by_kinds(module)
    assert (module.config, module.factor, module.device.type) == ({"hidden": 8}, 2.0, "cpu")
    assert module.parameter_count(trained=True) == whole.parameter_count()
    with pytest.raises(BackendError, match="a Linear of a rank's module does not run by itself"):
        module.scores(x)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        _ = module.other
    module.note = "kept"
    module.train()
    whole.factor = 3.0
    module.eval()
    with pytest.raises(
        BackendError, match=r"factor is 3\.0 now and was 2\.0 when the module was t"
    ):
        module(x)
    with pytest.raises(FrontendError, match=r"factor is 3\.0 now and was 2\.0"):
        program.module()

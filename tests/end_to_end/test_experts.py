"""Layers of experts: found by structure, cut over devices, equal to one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

import partitioner
from helpers.modules.expert_models import BUILDERS, Experts, Loss, expert_model
from helpers.modules.torch_models import gradients
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.kinds.expert_jobs import JOBS
from partitioner.api.compiled.module import ModuleProgram
from partitioner.cost_model.schedule.traffic import sent_bytes
from partitioner.frontends.torch.patterns.experts import replace_experts
from partitioner.ir.plan import resolve
from partitioner.strategies.constraints import ConstraintError

LAYER = "partitioner::experts"


def exported(module: nn.Module, *example: Tensor) -> torch.fx.GraphModule:
    graph = torch.export.export(module.eval(), example, strict=False).module()
    assert isinstance(graph, torch.fx.GraphModule)
    return graph


FORMS: Mapping[str, Callable[[], Experts]] = {
    "gated": Experts,
    "transposed": lambda: Experts(transposed=True),
    "plain gelu": lambda: Experts(gated=False, act=F.gelu),
    "tanh gelu": lambda: Experts(act=lambda x: F.gelu(x, approximate="tanh")),
    "relu": lambda: Experts(gated=False, act=F.relu, chosen=1),
    "grouped": lambda: Experts(grouped=True),
    "grouped, transposed": lambda: Experts(grouped=True, transposed=True, chosen=3),
    "clamped": lambda: Experts(act=lambda x: F.silu(x).clamp(max=1.0)),
    "squared": lambda: Experts(gated=False, act=lambda x: F.relu(x).square() - x**3 / 4),
    "biased": lambda: Experts(biased=True),
    "biased, grouped": lambda: Experts(biased=True, grouped=True, transposed=True),
    "biased steps": lambda: Experts(
        biased=True, grouped=True, gated=False, act=lambda x: x * torch.sigmoid(1.7 * x)
    ),
    "PyTorch's grouped": lambda: Experts(inner=8, grouped=True).bfloat16(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_become_one_node(form: str) -> None:
    torch.manual_seed(0)
    module = FORMS[form]()
    x = torch.randn(7, 8, dtype=module.up.dtype)
    graph = exported(module, x)
    assert replace_experts(graph, training=False) == 1
    graph.graph.eliminate_dead_code()
    graph.recompile()
    assert not any("mm" in str(node.target) for node in graph.graph.nodes)
    with torch.no_grad():
        torch.testing.assert_close(graph(x), module(x))


class _Summed(Experts):
    """An activation that is no step on each column."""

    def __init__(self) -> None:
        super().__init__(act=lambda x: F.silu(x).cumsum(-1))


class _Detached(Experts):
    """The gate has no gradient, which that of the node would have."""

    def __init__(self) -> None:
        super().__init__(act=lambda x: F.silu(x).detach())


class _HalfBiased(Experts):
    """One of two products has a bias."""

    def __init__(self) -> None:
        super().__init__(biased=True)
        self.up_bias = None


class _Biased(Experts):
    def _product(self, rows: Tensor, weights: Tensor, which: Tensor) -> Tensor:
        return super()._product(rows, weights, which) + 0.5


class _OtherOrder(Experts):
    """Rows are put back in another order than they were sorted in."""

    def forward(self, x: Tensor) -> Tensor:
        _, ids = torch.topk(self.router(x), 1)
        sorted_ids, order = torch.sort(ids.reshape(-1))
        counts = torch.histc(sorted_ids.float(), len(self.up), min=0, max=len(self.up) - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, other = self._product(x[order // 1], self.up, ends).chunk(2, -1)
        results = self._product(F.silu(gate) * other, self.down, ends)
        results = results * ids.reshape(-1)[order].to(x.dtype).unsqueeze(-1)
        return results[torch.argsort(order.flip(0))].view(x.shape[0], 1, -1).sum(1)


@pytest.mark.parametrize(
    "make",
    [_Summed, _Detached, _Biased, _HalfBiased, lambda: _OtherOrder(grouped=True)],
    ids=["act", "detached", "bias", "one bias", "order"],
)
def test_other_forms_stay(make: Callable[[], nn.Module]) -> None:
    assert replace_experts(exported(make(), torch.randn(7, 8)), training=False) == 0


def layers(program: ModuleProgram) -> list[Any]:
    return [placed for placed in resolve(program.graph, program.plan) if LAYER in placed.node.op]


def compiled(
    module: nn.Module, example: object, devices: int, kind: str, **options: Any
) -> ModuleProgram:
    program = partitioner.compile(
        module, example, devices=devices, parallel=kind, time_limit_s=10, **options
    )
    assert isinstance(program, ModuleProgram)
    return program


@pytest.mark.parametrize(("grouped", "biased"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("devices", [2, 3])
def test_a_layer_trains_as_on_one_device(devices: int, grouped: bool, biased: bool) -> None:
    """Five experts on two and three devices."""
    torch.manual_seed(0)
    module, inputs = Loss(Experts(grouped=grouped, biased=biased)), torch.randn(2, 6, 8)
    program = compiled(module, tuple(inputs), devices, "ep", training=True, launches="native")
    for layer in layers(program):
        assert layer.layouts["e"].sizes() == ((3, 2) if devices == 2 else (2, 2, 1))
        assert set(layer.layouts) == {"e"}
    fresh = torch.randn(2, 6, 8)
    loss, grads = program.gradients(*fresh)
    expected = module(*fresh)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


def test_experts_are_cut_inside_over_another_axis() -> None:
    """Two experts on four devices, each on two."""
    torch.manual_seed(0)
    module, inputs = Loss(Experts(experts=2)), torch.randn(2, 6, 8)
    mesh = {"ep": 2, "tp": 2}
    program = compiled(module, tuple(inputs), 4, "ep+tp", training=True, mesh=mesh)
    for layer in layers(program):
        assert layer.layouts["e"].axes == ("ep",)
        assert layer.layouts["i"].axes == ("tp",)
    loss, grads = program.gradients(*inputs)
    expected = module(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


class _Deep(nn.Module):
    """Two layers, each beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Experts(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.slow
def test_stages_have_experts_on_several_devices() -> None:
    torch.manual_seed(0)
    module, inputs = Loss(_Deep()), torch.randn(2, 8, 8)
    mesh = {"pp": 2, "ep": 2}
    program = compiled(module, tuple(inputs), 4, "pp+ep", training=True, mesh=mesh)
    placed = {layer.mesh.devices for layer in layers(program)}
    assert placed
    assert placed <= {(0, 1), (2, 3)}
    loss, grads = program.gradients(*inputs)
    expected = module(*inputs)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


class _WideRouter(nn.Module):
    """Experts of one type, and weights of choices in float32, as of Mixtral in bfloat16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(8, 5, bias=False, dtype=dtype)
        self.up = nn.Parameter(torch.randn(5, 12, 8, dtype=dtype) / 3)
        self.down = nn.Parameter(torch.randn(5, 8, 6, dtype=dtype) / 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).float().softmax(-1), 2)
        flat, rows = ids.reshape(-1), x.repeat_interleave(2, dim=0)
        gate, other = torch.bmm(self.up[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        inner = nn.functional.silu(gate) * other
        results = torch.bmm(self.down[flat], inner.unsqueeze(-1)).squeeze(-1)
        scaled = results * weights.reshape(-1).unsqueeze(-1)
        out = scaled.view(len(x), 2, -1).sum(1).to(x.dtype)
        return (out - target).square().mean()


@pytest.mark.parametrize("kind", ["ep", "dispatch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_weights_of_choices_have_a_type_of_their_own(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    module, inputs = _WideRouter(dtype), torch.randn(2, 7, 8, dtype=dtype)
    program = compiled(module, tuple(inputs), 3, kind, training=True)
    assert len(layers(program)) == 2
    loss, grads = program.gradients(*inputs)
    exact = _WideRouter(torch.float64)
    exact.load_state_dict(module.state_dict())
    for one in (module, exact):
        one.zero_grad()
        expected = one(*inputs.to(one.up.dtype))
        expected.backward()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=0)
    for name, parameter in exact.named_parameters():
        assert grads[name].dtype == dtype
        largest = float(parameter.grad.abs().max())
        assert float((grads[name] - parameter.grad).abs().max()) < tolerance * largest, name


def test_one_expert_may_get_all_tokens() -> None:
    """No token is dropped."""
    torch.manual_seed(0)
    module, x = Experts(chosen=1), torch.randn(8, 8)
    with torch.no_grad():
        module.norm.bias += 1.0
        module.router.weight[3] += 5.0
        program = compiled(module, (x,), 2, "ep")
        torch.testing.assert_close(program(x), module(x))


def test_a_layer_sends_what_the_formula_says() -> None:
    """All-gather of tokens and choices, reduce-scatter of results; the loss is added up."""
    tokens, width, chosen, devices = 12, 8, 2, 3
    module = Loss(Experts(width=width, chosen=chosen))
    program = compiled(module, tuple(torch.randn(2, tokens, width)), devices, "ep")
    sent = sent_bytes(program.schedule)
    rows = tokens // devices * (devices - 1)
    gathered = rows * (4 * width + (8 + 4) * chosen)  # float32; ids are int64
    results = rows * 4 * width
    loss = 2 * (devices - 1) / devices * 4
    assert sent == pytest.approx(dict.fromkeys(range(devices), gathered + results + loss))


def test_experts_are_cut_where_it_is_cheaper() -> None:
    """Their gradients would be added up over the devices; nothing is forced."""
    with torch.device("meta"):
        module = Loss(Experts(width=1024, inner=2048, experts=16))
        example = torch.empty(2, 256, 1024)
    program = partitioner.compile(
        module, tuple(example), devices=4, training=True, strategy="intra", time_limit_s=10
    )
    assert [set(layer.layouts) for layer in layers(program)] == [{"e"}, {"e"}]


def test_a_model_without_experts_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ConstraintError, match="parallel ep: the model has no experts: no stored"):
        compiled(module, (torch.randn(4, 8),), 2, "ep")


def test_fewer_experts_than_devices_are_refused() -> None:
    with pytest.raises(ConstraintError, match=r"ep: 'up' has 2 experts, fewer than 3 devices"):
        compiled(Experts(experts=2), (torch.randn(6, 8),), 3, "ep")


#: (devices, kind, mesh, experts): three devices have unequal numbers of them.
TARGETS = {
    "2": (2, "ep", None, 4),
    "3": (3, "ep", None, 5),
    "4": (4, "ep", None, 4),
    "ep+tp": (4, "ep+tp", {"ep": 2, "tp": 2}, 4),
    "dp+ep": (4, "dp+ep", {"dp": 2, "ep": 2}, 4),
}


CASES = [
    *((name, at) for name in BUILDERS for at in ("2", "4")),
    *(("mixtral", at) for at in ("3", "ep+tp", "dp+ep")),
    ("gpt_oss", "3"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), CASES)
def test_models_with_experts(name: str, at: str) -> None:
    devices, kind, mesh, experts = TARGETS[at]
    form = "grouped_mm" if at in ("2", "3") else "batched_mm"
    training = at in ("3", "ep+tp")
    model = expert_model(name, experts, form, batch=devices, training=training)
    options = {"mesh": mesh, "training": training}
    program = compiled(model.module, dict(model.inputs), devices, kind, **options)
    notes = [note for note in program.summary["notes"] if "results whole" not in note]
    assert not [note for note in notes if "whole" in note]
    cut = layers(program)
    assert len(cut) == (2 if training else 1)
    for layer in cut:
        assert "ep" in layer.layouts["e"].axes
        assert ("tp" in kind) == any("tp" in at.axes for at in layer.layouts.values())
    fresh = model.more_inputs(1)
    if not training:
        with torch.no_grad():
            torch.testing.assert_close(program(**fresh)[0], model.module(**fresh)[0])
        return
    results, grads = program.gradients(**fresh)
    expected, whole = gradients(model.module, fresh)
    torch.testing.assert_close(results[0], expected[0].detach())
    largest = max(float(grad.abs().max()) for grad in whole.values())
    for key, grad in whole.items():
        assert float((grads[key] - grad).abs().max()) < 1e-5 * largest, key


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ten_steps_on_processes(run_job: RunJob, job: str) -> None:
    """Losses and all final weights are those of one process."""
    run_job("kinds/expert_jobs.py", job)


class Biased(nn.Module):
    """Experts with biases, whose weights are gathered by row, as those of gpt-oss."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.up, self.down = (nn.Parameter(torch.randn(experts, 8, 8) / 3) for _ in range(2))
        self.up_bias, self.down_bias = (nn.Parameter(torch.randn(experts, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        rows, flat = (
            x.repeat_interleave(2, 0).unsqueeze(-1),
            ids.reshape(-1) - self.router.out_features,
        )
        hidden = torch.bmm(self.up[flat], rows).squeeze(-1) + self.up_bias[flat]
        gated = (hidden.clamp(-2, 2) + 1) * hidden.sigmoid()
        out = torch.bmm(self.down[flat], gated.unsqueeze(-1)).squeeze(-1) + self.down_bias[flat]
        mixed = (out * weights.reshape(-1, 1)).view(len(x), 2, 8).sum(1)
        return (mixed - x).square().mean()


@pytest.mark.parametrize(("experts", "devices"), [(4, 2), (6, 3)])
def test_experts_with_biases_are_experts(experts: int, devices: int) -> None:
    torch.manual_seed(0)
    program = partitioner.compile(
        Biased(experts), torch.randn(6, 8), devices, training=True, parallel="ep"
    )
    assert isinstance(program, ModuleProgram)
    assert program.verify()
    homes, stored = program.programs.homes, program.traced.stored
    for name in ("up", "down", "up_bias", "down_bias"):
        assert homes[stored[name]].placement.sharding.dims[0].axes == ("ep",)
    assert homes[stored["router.weight"]].placement.sharding.is_replicated


def test_an_expert_that_does_not_exist_is_refused() -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 2, 3))

        def forward(self, ids: Tensor) -> Tensor:
            return self.table[ids].square().mean()

    program = partitioner.compile(Looked(), torch.tensor([3, -4]), 2, training=True)
    assert program.verify()
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        program(torch.tensor([4, 0]))

"""Ten steps of training of mixtures of experts on gloo processes: jobs of test_experts.py."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import partitioner
from helpers.modules.expert_models import Experts, Listed, Loss, SwiGlu, expert_model
from helpers.modules.torch_models import Model
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.ir.plan import resolve

STEPS, TOKENS = 10, 6


@dataclass(frozen=True)
class Training:
    """A model that ranks train as one process does.

    Attributes:
        name: An architecture of `expert_model`, or "layer" for one layer of experts, or "listed"
            for two layers of experts in lists, joined in two ways.
        devices: Number of ranks.
        experts: Number of experts.
        kind: How they are cut.
        loads: Loads of the experts, which must move some of them to other devices; () if unknown.
    """

    name: str
    devices: int
    experts: int
    kind: str = "ep"
    loads: tuple[int, ...] = ()

    def prepare(self) -> None:
        """Compile before the ranks are forked: once for all of them."""
        program(self)

    def run(self, rank: int) -> None:
        """Train and compare on a rank."""
        whole = model(self)
        module: Any = program(self).module(seed=7)
        if self.name == "listed":
            check_divided(module, rank, self)
        losses = trained(module, whole)
        one = copy.deepcopy(whole.module)
        expected = trained(one, whole)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
        assert len(set(losses)) == STEPS
        state = module.full_state_dict()
        for key, tensor in one.state_dict().items():
            where = f"rank {rank}: {key}: "
            torch.testing.assert_close(state[key], tensor, rtol=1e-4, atol=1e-5, msg=where.__add__)
        if self.name == "listed":
            check_variants(module, one, whole)


def check_divided(module: nn.Module, rank: int, training: Training) -> None:
    """Check that each expert lies whole on one rank, and that sizes of memory say so."""
    held = {name for name, _ in module.named_parameters()}
    own = [n for n in range(training.experts) if f"inner.1.experts.{n}.up.weight" in held]
    numbers: list[Any] = [None] * training.devices
    torch.distributed.all_gather_object(numbers, own)
    flat = sorted(number for of_rank in numbers for number in of_rank)
    assert flat == list(range(training.experts)), (rank, numbers)
    assert max(map(len, numbers)) == -(-training.experts // training.devices)
    assert {name for name in held if "router" in name or "shared" in name}


def check_variants(module: nn.Module, one: nn.Module, whole: Model) -> None:
    """Compare evaluation, and a batch of another size."""
    inputs = whole.more_inputs(STEPS)
    for call in (inputs, {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}):
        for training in (False, True):
            module.train(training)
            one.train(training)
            with torch.set_grad_enabled(training):
                torch.testing.assert_close(module(**call), one(**call), rtol=1e-4, atol=0)


@cache
def model(training: Training) -> Model:
    if training.name == "layer":
        torch.manual_seed(0)
        inputs = {"x": torch.randn(TOKENS, 8), "target": torch.randn(TOKENS, 8)}
        return Model(Loss(Experts(chosen=1, experts=training.experts)), inputs)
    if training.name == "listed":
        torch.manual_seed(0)
        inputs = {"x": torch.randn(TOKENS, 3, 8), "target": torch.randn(TOKENS, 3, 8)}
        of = {"experts": training.experts}
        layers = Listed(form="stack", shared=True, **of), Listed(SwiGlu, chosen=0, **of)
        return Model(Loss(nn.Sequential(*layers)), inputs)
    return expert_model(
        training.name, training.experts, "grouped_mm", batch=training.devices, training=True
    )


@cache
def program(training: Training) -> ModuleProgram:
    whole = model(training)
    options: dict[str, Any] = {}
    if training.loads:  # on links that take no time, and exactly, so that loads alone decide
        options = {"cluster": "ideal", "gap": 1e-6, "constraints": {"loads": {"*": training.loads}}}
    compiled = partitioner.compile(
        whole.module,
        dict(whole.inputs),
        devices=training.devices,
        parallel=training.kind,
        training=True,
        time_limit_s=10,
        **options,
    )
    assert isinstance(compiled, ModuleProgram)
    if training.loads:
        placed = resolve(compiled.graph, compiled.plan)
        layers = [one for one in placed if "partitioner::experts" in one.node.op]
        assert layers
        assert all(len(layer.layouts["e"].segments) > 1 for layer in layers)
        assert all(bool(layer.sent) == (training.kind == "dispatch") for layer in layers)
    return compiled


def trained(module: nn.Module, whole: Model) -> list[float]:
    """Losses of ten steps on batches that change."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        results = module(**whole.more_inputs(step))
        loss = results if isinstance(results, Tensor) else results[0]
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


TRAININGS = {
    "mixtral_on_2": Training("mixtral", 2, 4),
    "deepseek_on_3": Training("deepseek", 3, 5),
    "gpt_oss_on_2": Training("gpt_oss", 2, 4),
    "gpt_oss_sent_on_3": Training("gpt_oss", 3, 5, "dispatch"),
    "qwen_on_4": Training("qwen", 4, 4),
    "mixtral_sent_on_3": Training("mixtral", 3, 5, "dispatch"),
    "qwen_sent_on_2": Training("qwen", 2, 4, "dispatch"),
    "listed_on_2": Training("listed", 2, 3),
    "listed_on_3": Training("listed", 3, 4),
    "moved_on_2": Training("layer", 2, 5, "dispatch", (5, 4, 1, 1, 1)),
}
JOBS = {
    name: Job(training.devices, training.run, [training.prepare], limit_s=200, slow=True)
    for name, training in TRAININGS.items()
}

if __name__ == "__main__":
    main(JOBS)

"""Jobs of test_pipelines.py: modules in stages on gloo ranks, ten AdamW steps each.

They are beside one process that accumulates the gradients of the same micro-batches. Modules are of
float64: AdamW makes whole steps of the rounding of gradients that are 0 in exact arithmetic, such
as those of the biases of attention keys.
"""

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from helpers.modules.pipeline_models import MODELS, batch_of
from helpers.modules.trained import Gpt
from helpers.plans.staged import on_trace, staged_plan, traced
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.torch.running import rank_passes
from partitioner.backends.torch.running.step_values import StepValues
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.pipeline.generate import textbook_lanes

STEPS, RATE = 10, 1e-2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1", "zbv", "dualpipev")
TWICE = ("interleaved", "zbv", "dualpipev")


@dataclass(frozen=True)
class Course:
    """What one process comes to: its losses, and its state at the end."""

    losses: tuple[float, ...]
    state: dict[str, Tensor]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=RATE)


def first(result: Any) -> Tensor:
    loss = result if isinstance(result, Tensor) else result[0]
    assert isinstance(loss, Tensor)
    return loss


def accumulate(
    start: nn.Module,
    batch: Callable[[int], dict[str, Tensor]],
    count: int,
    clip: float | None = None,
    autocast: bool = False,
) -> Course:
    """Ten steps of one process."""
    module, losses = copy.deepcopy(start), []
    optimizer = adamw(module)
    for step in range(STEPS):
        parts = {name: tensor.chunk(count) for name, tensor in batch(step).items()}
        total = 0.0
        for index in range(count):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = first(module(**{n: chunks[index] for n, chunks in parts.items()})) / count
            loss.backward()
            total += loss.item()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Course(tuple(losses), module.state_dict())


def trains(
    program: ModuleProgram,
    batch: Callable[[int], dict[str, Tensor]],
    course: Course,
    clip: float | None = None,
    autocast: bool = False,
    tolerance: float = 1e-4,
) -> None:
    """Ten steps of the ranks."""
    module = program.module()
    optimizer, losses = adamw(module), []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = first(module(**batch(step)))
        loss.backward()
        if clip is not None:
            module.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(torch.tensor(losses), torch.tensor(course.losses))
    state = module.full_state_dict()
    assert state.keys() == course.state.keys()
    for name, tensor in course.state.items():
        close(state[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


# Stages by hand ----------------------------------------------------------------------------------


@cache
def trace(model: str, size: int, count: int) -> TracedModule:
    module = MODELS[model]()
    return traced(module, (), count, batch_of(module, 0, size))


@cache
def course(model: str, size: int, count: int) -> Course:
    module = MODELS[model]()
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return accumulate(module, partial(batch_of, module, size=size), count)


@cache
def by_hand(
    model: str, schedule: str, lanes: Sequence[int], size: int, count: int
) -> ModuleProgram:
    module = trace(model, size, count)
    devices = [(lane,) for lane in lanes]
    return on_trace(module, staged_plan(module.graph, devices, schedule, count))


def job(
    model: str,
    schedule: str,
    lanes: Sequence[int],
    size: int = 8,
    count: int = 4,
    *,
    slow: bool = True,
) -> Job:
    program = partial(by_hand, model, schedule, tuple(lanes), size, count)
    expected = partial(course, model, size, count)

    def run(_: int) -> None:
        trains(program(), partial(batch_of, program().whole, size=size), expected())

    return Job(max(lanes) + 1, run, [program, expected], slow=slow)


def lanes_of(schedule: str, ranks: int) -> tuple[int, ...]:
    return textbook_lanes(schedule, ranks * (2 if schedule in TWICE else 1))


#: That of the matrix which every run takes: test_rank_passes.py has all schedules.
FAST = {("gpt2", "1f1b", 2)}

MATRIX = {
    f"{model}_{schedule}_on_{ranks}": job(
        model,
        schedule,
        lanes_of(schedule, ranks),
        count=2 * ranks,
        slow=(model, schedule, ranks) not in FAST,
    )
    for model in MODELS
    for schedule in SCHEDULES
    for ranks in (2, 4)
}
ODD = {
    "there_and_back": job("gpt2", "1f1b", (0, 1, 0), slow=False),
    **{
        f"{model}_there_and_back_{schedule}": job(model, schedule, (0, 1, 0))
        for model in MODELS
        for schedule in ("gpipe", "1f1b")
    },
    "three_stages_five_micro_batches": job("tied", "1f1b", (0, 1, 2), 15, 5, slow=False),
    "three_stages_one_row_each": job("unet", "zb1", (0, 1, 2), 5, 5),
}

# Hybrids, by `compile` ---------------------------------------------------------------------------

MESHES = {
    "pp+dp": {"pp": 2, "dp": 2},
    "pp+tp": {"pp": 2, "tp": 2},
    "pp+zero3": {"pp": 2, "dp": 2},
    "pp+dp+tp": {"pp": 2, "dp": 2, "tp": 2},
}


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(blocks=2).double()


def gpt_batch(step: int) -> dict[str, Tensor]:
    return dict(zip(("ids", "labels"), Gpt.batch(step, 8), strict=True))


@cache
def hybrid(kind: str, *, autocast: bool = False, schedule: str = "1f1b") -> ModuleProgram:
    mesh = MESHES.get(kind)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        program = partitioner.compile(
            gpt().float() if autocast else gpt(),
            gpt_batch(0),
            devices=2 if mesh is None else 2 ** len(mesh),
            training=True,
            parallel=kind,
            mesh=mesh,
            schedule=schedule,
            micro_batches=4,
            time_limit_s=5,
        )
    assert isinstance(program, ModuleProgram)
    return program


@cache
def gpt_course(clip: float | None = None, *, autocast: bool = False) -> Course:
    return accumulate(gpt().float() if autocast else gpt(), gpt_batch, 4, clip, autocast)


def hybrid_job(kind: str, *, slow: bool, clip: float | None = None) -> Job:
    ranks = 2 ** len(MESHES.get(kind, {"pp": 2}))
    program, expected = partial(hybrid, kind), partial(gpt_course, clip)
    return Job(
        ranks,
        lambda _: trains(program(), gpt_batch, expected(), clip),
        [program, expected],
        slow=slow,
    )


def trains_in_mixed_precision(_: int) -> None:
    """Roundings of bfloat16 differ by the order of sums."""
    program = hybrid("pp", autocast=True)
    trains(program, gpt_batch, gpt_course(autocast=True), autocast=True, tolerance=2e-2)


HYBRIDS = {
    "pp_dp": hybrid_job("pp+dp", slow=False),
    "pp_tp": hybrid_job("pp+tp", slow=True),
    "pp_zero3": hybrid_job("pp+zero3", slow=True),
    "pp_dp_tp": hybrid_job("pp+dp+tp", slow=True),
    "clipping": hybrid_job("pp", slow=False, clip=0.05),
    "clipping_zero3": hybrid_job("pp+zero3", slow=True, clip=0.05),
    "mixed_precision": Job(
        2,
        trains_in_mixed_precision,
        [partial(hybrid, "pp", autocast=True), partial(gpt_course, autocast=True)],
    ),
}

# What stages compute again -----------------------------------------------------------------------

#: Schedules of the jobs below.
AGAIN = ("1f1b", "zb1")


class Stack(nn.Module):
    """Blocks with GELU and layer norm, which are cheap to compute again, and a loss."""

    def __init__(self, blocks: int = 8, width: int = 16, inner: int = 48) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.ups = nn.ModuleList(nn.Linear(width, inner) for _ in range(blocks))
        self.downs = nn.ModuleList(nn.Linear(inner, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(nn.functional.gelu(up(norm(x))))
        return x.square().mean()


def stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack().double()


def stack_batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"x": torch.randn(512, 16, generator=draw, dtype=torch.float64)}


@cache
def stack_course() -> Course:
    return accumulate(stack(), stack_batch, 8)


@cache
def tight_stack(schedule: str) -> tuple[ModuleProgram, ModuleProgram]:
    """All kept, and in 85 % of the memory that this takes."""
    options: dict[str, Any] = {
        "devices": 2,
        "training": True,
        "parallel": "pp",
        "schedule": schedule,
        "micro_batches": 8,
    }
    roomy = partitioner.compile(stack(), stack_batch(0), recompute=False, **options)
    most = max(peak.bytes for peak in roomy.evaluation.peak.values())
    tight = partitioner.compile(
        stack(), stack_batch(0), recompute=True, memory=85 * most // 100, **options
    )
    assert isinstance(roomy, ModuleProgram)
    assert isinstance(tight, ModuleProgram)
    assert tight.evaluation.fits_exactly
    return roomy, tight


def most_kept(program: ModuleProgram) -> list[int]:
    """Most bytes that each rank holds between two phases of a step, as the ranks count them."""
    kept = [0]

    class Counted(StepValues):
        def finish(self, *args: Any) -> Any:
            sent = super().finish(*args)
            stored = self.plan.phases[0].stored
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for values in self._values
                for name, tensor in values.items()
                if name not in stored
            }
            kept[0] = max(kept[0], sum(storages.values()))
            return sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_passes, "StepValues", Counted)
        first(program.module()(**stack_batch(0))).backward()
    every = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor(kept))
    return [int(each) for each in every]


def computes_again(_: int, schedule: str) -> None:
    """Ten steps as of one process, with fewer bytes kept by the rank that keeps most."""
    roomy, tight = tight_stack(schedule)
    stages = {name: tight.plan.stages[at.group] for name, at in tight.plan.nodes.items()}
    again = Counter(stages[name] for name in stages if name.endswith("/again"))
    assert all(again[stage] for stage in range(2))
    if schedule == "1f1b":
        assert again[0] > again[1], "the first stage holds more micro-batches than the last"
    trains(tight, stack_batch, stack_course(), tolerance=1e-9)
    assert max(most_kept(tight)) < 0.9 * max(most_kept(roomy))


COMPUTED_AGAIN = {
    f"computed_again_{schedule}": Job(
        2,
        partial(computes_again, schedule=schedule),
        [partial(tight_stack, schedule)],
        slow=schedule != "zb1",
    )
    for schedule in AGAIN
}

JOBS = {**MATRIX, **ODD, **HYBRIDS, **COMPUTED_AGAIN}

if __name__ == "__main__":
    main(JOBS)

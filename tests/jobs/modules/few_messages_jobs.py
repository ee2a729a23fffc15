"""Steps of data parallelism, which take two messages: what the ranks agree on travels with others.

A rank that does something else while others wait in a backward pass joins them, so that all of
them say so.
"""

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partitioner
from jobs.modules.agreement_jobs import SOON_S, Noting, training_step
from jobs.processes.torch_ranks import Job
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing import agreement
from partitioner.backends.torch.graphs.eager import Carrier


class Classifier(nn.Module):
    """Returns its loss, whose mean is over the labels that are not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss."""
        return nn.functional.cross_entropy(self.down(self.up(x).relu()), y)


def batch(step: int, rows: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(10, (rows,), generator=generator)
    labels[1::3] = -100
    return torch.randn(rows, 64, generator=generator), labels


@cache
def program(ranks: int = 2) -> partitioner.ModuleProgram:
    torch.manual_seed(0)
    compiled = partitioner.compile(
        *(Classifier(), batch(0), ranks), training=True, cluster="h100", parallel="dp"
    )
    assert isinstance(compiled, partitioner.ModuleProgram)
    return compiled


def collectives(call: Callable[[], object]) -> list[str]:
    """The collectives that a call starts."""
    events: list[str] = []
    with Noting(events):
        call()
    return [event for event in events if "c10d" in event and "wait_tensor" not in event]


def takes_two_messages(_: int) -> None:
    module = program().module()
    training_step(module, *batch(0))
    took = collectives(lambda: training_step(module, *batch(1)))
    assert took == ["c10d.alltoall_base_.default", "c10d.allreduce_.default"], took
    assert module._passes[""].carriers == {False: Carrier.ROW, True: Carrier.MARK}
    module.eval()
    module(*batch(0))
    took = collectives(lambda: module(*batch(1)))
    assert took == ["c10d.alltoall_base_.default"], took


def leaves_nothing(_: int) -> None:
    """A step that is over holds no message, also before Python looks for cycles."""
    module = program().module()
    training_step(module, *batch(0))
    gc.collect()
    gc.disable()
    try:
        training_step(module, *batch(1))
        assert not [one for one in gc.get_objects() if type(one) is agreement.Meeting]
    finally:
        gc.enable()


def trains_to_the_same_weights(ranks: int) -> Callable[[int], None]:
    """As one process does, also where other calls stand between a step and its backward pass."""

    def trains(_: int) -> None:
        compiled = program(ranks)
        module, whole = compiled.module(), Classifier()
        whole.load_state_dict(module.full_state_dict())
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (whole, module)]
        for step in range(6):
            for one, optimizer in zip((whole, module), optimizers, strict=True):
                loss = one(*batch(step))
                if step == 2:
                    one(*batch(9))
                if step == 3:
                    loss = loss + one(*batch(7, 32))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, tensor in module.full_state_dict().items():
            torch.testing.assert_close(tensor, whole.state_dict()[name], rtol=1e-5, atol=1e-6)

    return trains


def says(match: str) -> Any:
    """All ranks say so, and go on."""
    return pytest.raises(BackendError, match=match)


def does_something_else(rank: int) -> None:
    """Rank 1 does, while rank 0 adds up gradients."""
    module = program().module()
    calls: dict[str, Callable[[Tensor], object]] = {
        r"rank 1: full_state_dict\(\)": lambda _: module.full_state_dict(),
        r"rank 1: training step \d+ with seed 0 on ": lambda _: module(*batch(1)),
        r"rank 1: training step \d+ with seed 0 on .*32": lambda _: module(*batch(1, 32)),
    }
    for match, call in calls.items():
        start = time.monotonic()
        training_step(module, *batch(0))
        loss = module(*batch(0))
        with says(r"^the ranks do not do the same: rank 0: backward\(\) of training .*" + match):
            call(loss) if rank else loss.backward()
        assert time.monotonic() - start < SOON_S
    loss = module(*batch(0))
    with torch.set_grad_enabled(True), says(r"^rank 1: backward with create_graph=True"):
        loss.backward(create_graph=rank == 1)
    training_step(module, *batch(1))  # they go on
    assert len(collectives(lambda: training_step(module, *batch(1)))) == 2


def fails(rank: int) -> None:
    """An error of one rank on its way to the gradients is told to all."""
    module = program().module()
    training_step(module, *batch(0))
    passes = module._passes[""]._runs[0]
    for backward in (False, True):
        loss = module(*batch(0)) if backward else torch.zeros(())
        run = passes[max(passes) if backward else min(passes)]
        node = next(node for node in run.graph.nodes if node.op == "call_function")
        target = node.target
        if rank:
            node.target = _raise
            run.recompile()
        own = r"^no memory is left$" if rank else r"^rank 1: .*no memory is left"
        with pytest.raises(ValueError if rank else BackendError, match=own):
            loss.backward() if backward else module(*batch(0))
        node.target = target
        run.recompile()
    training_step(module, *batch(1))  # they go on


def _raise(*_: Any, **__: Any) -> None:
    raise ValueError("no memory is left")


def has_no_number(_: int) -> None:
    """A gradient that is no number is told from another rank's mark by one more message."""
    module = program().module()
    training_step(module, *batch(0))
    x, y = batch(1)
    took = collectives(lambda: training_step(module, x * torch.nan, y))
    assert took[1:] == ["c10d.allreduce_.default", "c10d.alltoall_base_.default"], took
    assert all(parameter.grad.isnan().any() for parameter in module.parameters())
    took = collectives(lambda: training_step(module, *batch(1)))
    assert len(took) == 2


def compiles_alone(rank: int) -> None:
    """A rank whose passes are compiled agrees beforehand, and so do the others then."""
    module = program().module()
    if rank:
        module.compile(backend="eager")
    took = collectives(lambda: training_step(module, *batch(1)))
    assert [one for one in took if "alltoall" in one] == ["c10d.alltoall_base_.default"] * 2
    trains_to_the_same_weights(2)(rank)


def is_interrupted(rank: int) -> None:
    """While it waits for the gradients of the others, which do something else: it hears so."""
    module = program().module()
    training_step(module, *batch(0))
    loss = module(*batch(0))
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(module._agreement), "_wait", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss.backward()
    with says(r"rank 0: training step \d with .*; rank 1: full_state_dict\(\)"):
        module.full_state_dict() if rank else module(*batch(1))
    training_step(module, *batch(1))  # they go on


class _Late:
    """A message that comes just after the time that the rank waits for it is up."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait()
        if timeout is not None:
            raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _LateGroup:
    """A process group whose messages are late."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def allreduce(self, *arguments: Any) -> _Late:
        return _Late(self._group.allreduce(*arguments))

    def alltoall_base(self, *arguments: Any) -> _Late:
        return _Late(self._group.alltoall_base(*arguments))


def waits_for_late_messages(_: int) -> None:
    """A message that comes between the end of the wait and the look for it is no failure."""
    with pytest.MonkeyPatch.context() as patch:
        group_of = agreement.resolved_group
        patch.setattr(agreement, "resolved_group", lambda name: _LateGroup(group_of(name)))
        trains_to_the_same_weights(2)(0)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def ends(rank: int) -> None:
    module = program().module()
    loss = module(*batch(0))
    if rank:
        return
    with pytest.raises(BackendError, match=r"^rank 0: .*backward.*: rank 1 has ended"):
        loss.backward()


JOBS = {
    "two messages": Job(2, takes_two_messages, [program]),
    "two messages, over": Job(2, leaves_nothing, [program]),
    "two messages train": Job(2, trains_to_the_same_weights(2), [program]),
    "two messages train on 4": Job(4, trains_to_the_same_weights(4), [lambda: program(4)]),
    "two messages, something else": Job(2, does_something_else, [program]),
    "two messages, fails": Job(2, fails, [program]),
    "two messages, no number": Job(2, has_no_number, [program]),
    "two messages, compiles alone": Job(2, compiles_alone, [program]),
    "two messages, late": Job(2, waits_for_late_messages, [program]),
    "two messages, interrupted": Job(2, is_interrupted, [program]),
    "two messages, ends": Job(2, ends, [program]),
}

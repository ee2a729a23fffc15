"""Jobs of test_module_parallel.py: forced plans on gloo ranks, ten AdamW steps each."""

import copy
from collections.abc import Callable
from functools import cache, partial

import torch

import partitioner
from helpers.modules.small_gpt import small_gpt
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram


@cache
def program(kind: str, ranks: int) -> ModuleProgram:
    """Compiled before the ranks are forked."""
    model, batch = small_gpt()
    mesh = {"dp": 2, "tp": 2} if ranks == 4 else None
    compiled = partitioner.compile(
        model, batch, devices=ranks, training=True, parallel=kind, mesh=mesh, time_limit_s=10
    )
    assert isinstance(compiled, ModuleProgram)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return compiled


def train(compiled: ModuleProgram) -> torch.nn.Module:
    """Ten steps beside one process's."""
    whole = copy.deepcopy(compiled.whole)
    module = compiled.module()
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(10):
        torch.manual_seed(step)
        batch = tuple(torch.randint(64, (2, 8, 16)))
        loss, _ = module(*batch)
        loss.backward()
        expected, _ = whole(*batch)
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = module.full_state_dict()
    for name, tensor in whole.state_dict().items():
        if not name.endswith("k.bias"):  # softmax does not see it: its gradient is rounding
            torch.testing.assert_close(state[name], tensor, atol=1e-4, rtol=1e-4)
    tensors = [*module.parameters(), *(s for p in ours.state.values() for s in p.values())]
    module.nbytes = sum(_nbytes(tensor) for tensor in tensors if tensor.dim())
    return module


def _nbytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def zero_holds_its_share(compiled: ModuleProgram) -> None:
    """Parameters and both moments: half of the whole, within 5 %."""
    module = train(compiled)
    whole = 3 * sum(p.numel() * p.element_size() for p in small_gpt()[0].parameters())
    assert abs(module.nbytes / whole - 1 / 2) < 0.05, (module.nbytes, whole)


def job(
    check: Callable[[ModuleProgram], object], kind: str, ranks: int, *, sweep: bool = False
) -> Job:
    compiled = partial(program, kind, ranks)
    return Job(ranks, lambda _: check(compiled()), [compiled], slow=not sweep, sweep=sweep)


JOBS = {
    "data_parallel": job(train, "dp", 2, sweep=True),
    "zero2": job(train, "zero2", 2, sweep=True),
    "zero3_holds_its_share": job(zero_holds_its_share, "zero3", 2),
    "tensor_parallel": job(train, "tp", 2),
    "data_and_tensor": job(train, "dp+tp", 4),
}

if __name__ == "__main__":
    main(JOBS)

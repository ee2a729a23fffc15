"""Jobs of test_at_rest.py: bytes between steps under each kind of ZeRO, and ten equal steps."""

import copy
from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor, nn

import partitioner
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram


class Small(nn.Module):
    """Weights of 24 and 48 rows, which 2 and 3 ranks share, and of 5, which they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(7, 48), nn.Linear(48, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.down(self.up(x).relu()).tanh()
        return nn.functional.cross_entropy(self.out(h), y)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(11, 7), torch.randint(5, (11,))


@cache
def program(kind: str, ranks: int) -> ModuleProgram:
    """Compiled before the ranks are forked."""
    torch.manual_seed(0)
    mesh = {"dp": 2, "tp": 2} if ranks == 4 else None
    compiled = partitioner.compile(
        *(Small(), batch(0)),
        devices=ranks,
        training=True,
        parallel=kind,
        mesh=mesh,
        launches="native",
        time_limit_s=5,
    )
    assert isinstance(compiled, ModuleProgram)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return compiled


def held_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, each once."""
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())


def at_rest(module: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, int]:
    """Bytes that parameters, gradients and the optimizer's moments take behind a backward pass."""
    parameters = list(module.parameters())
    state = [s for p in optimizer.state.values() for s in p.values() if s.dim()]
    return {
        "parameters": held_bytes([*parameters, *module._at_rest.values()]),
        "gradients": held_bytes([p.grad for p in parameters if p.grad is not None]),
        "state": held_bytes(state),
    }


def train(kind: str, ranks: int, _rank: int) -> None:
    """Ten steps, some of two accumulated batches, beside one process's; then bytes at rest."""
    compiled = program(kind, ranks)
    whole = copy.deepcopy(compiled.whole)
    module = compiled.module()
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    held: Mapping[str, int] = {}
    for step in range(10):
        for again in range(1 + step % 2):
            loss, expected = (m(*batch(2 * step + again)) for m in (module, whole))
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        norm = module.clip_grad_norm_(0.5)
        torch.testing.assert_close(
            norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.5).double(), atol=1e-5, rtol=1e-4
        )
        for optimizer in (ours, theirs):
            optimizer.step()
        held = at_rest(module, ours)
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    state = module.full_state_dict()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)
    expected = expected_bytes(kind, ranks, measured=True)
    assert ranks == 4 or held == expected, (kind, held, expected)
    module.eval()
    with torch.no_grad():  # from the shards, not from what the last step gathered
        torch.testing.assert_close(module(*batch(0)), whole(*batch(0)), atol=1e-5, rtol=1e-5)


@cache
def program_in_parts(kind: str) -> ModuleProgram:
    """Compiled before the ranks are forked, for three micro-batches, the last one smaller."""
    torch.manual_seed(0)
    compiled = partitioner.compile(
        Small(), batch(0), 2, training=True, parallel=kind, micro_batches=3, time_limit_s=5
    )
    assert isinstance(compiled, ModuleProgram)
    return compiled


def train_in_parts(kind: str, _rank: int) -> None:
    """Steps of three micro-batches beside one process's of the whole batch."""
    compiled = program_in_parts(kind)
    whole = copy.deepcopy(compiled.whole)
    module = compiled.module()
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(4):
        loss, expected = (m(*batch(step)) for m in (module, whole))
        loss.backward()
        expected.backward()
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = module.full_state_dict()
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, atol=1e-5, rtol=1e-4)


def expected_bytes(kind: str, ranks: int, *, measured: bool = False) -> Mapping[str, int]:
    """Bytes of one rank by the papers; what no dim of can be shared evenly is whole.

    Columns are no part of a weight in one piece, so they lie beside it. Gradients are counted with
    those that travelled with them in one message: they share its memory. On two ranks the plan of
    zero1 sends the gradient with columns alone, so that these are all that is kept of it.
    """
    sizes = {name: p.numel() * p.element_size() for name, p in Small().named_parameters()}
    shapes = {name: p.shape for name, p in Small().named_parameters()}
    whole = sum(sizes.values())
    part = sum(
        size // ranks if any(n % ranks == 0 for n in shapes[name]) else size
        for name, size in sizes.items()
    )
    parts = {"zero1": {"state"}, "zero2": {"state", "gradients"}}.get(
        kind, {"state", "gradients", "parameters"}
    )
    held = {what: part if what in parts else whole for what in ("parameters", "gradients", "state")}
    columns = sum(
        size // ranks
        for name, size in sizes.items()
        if shapes[name][0] % ranks and any(n % ranks == 0 for n in shapes[name])
    )
    sign = -1 if ranks == 2 else 1  # less the columns that are sent, or with those beside it
    beside = {
        "parameters": columns if kind in ("zero1", "zero2") else 0,
        "gradients": columns * sign if kind == "zero1" and measured else 0,
    }
    held = {what: nbytes + beside.get(what, 0) for what, nbytes in held.items()}
    return {**held, "state": 2 * held["state"]}


JOBS = {
    f"{kind}_{ranks}": Job(
        ranks, partial(train, kind, ranks), [partial(program, kind, ranks)], slow=slow
    )
    for kind, ranks, slow in [
        ("zero1", 2, False),  # which sends a gradient alone
        ("zero1", 3, False),
        ("zero2", 2, True),
        ("zero2", 3, False),
        ("zero3", 2, True),
        ("zero3", 3, False),
        ("zero1+tp", 4, True),
        ("zero2+tp", 4, True),
    ]
} | {
    f"{kind}_in_parts": Job(
        2, partial(train_in_parts, kind), [partial(program_in_parts, kind)], slow=kind != "zero1"
    )
    for kind in ("zero1", "zero2")
}

if __name__ == "__main__":
    main(JOBS)

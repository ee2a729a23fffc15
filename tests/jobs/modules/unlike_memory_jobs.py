"""Jobs of test_unlike_memory.py: training in parts that follow the memory of unlike devices."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import partitioner
from jobs.modules import checkpoints
from jobs.processes.torch_ranks import Job, main
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.cost_model.cluster.resolve import resolve_cluster
from partitioner.cost_model.cluster.topology import Cluster

#: Memory of each device, in shares of what one device needs for the whole model.
SHARES: dict[int, tuple[float, ...]] = {2: (0.85, 0.4), 3: (0.7, 0.4, 0.22)}


class Layers(nn.Module):
    """Linear layers whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(33, 131), nn.Linear(131, 67), nn.Linear(67, 5)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(self.mid(self.up(x).relu()).tanh())
        return h.square().mean()


def batch(seed: int) -> tuple[Tensor]:
    torch.manual_seed(seed)
    return (torch.randn(6, 33),)


def unlike(shares: Sequence[float], whole_bytes: float) -> Cluster:
    """Devices of one speed with these shares of so many bytes."""
    ideal = resolve_cluster(f"{len(shares)}xideal")
    pairs = zip(ideal.devices, shares, strict=True)
    devices = (replace(spec, memory_bytes=int(share * whole_bytes)) for spec, share in pairs)
    return replace(ideal, devices=tuple(devices))


@cache
def program(ranks: int) -> ModuleProgram:
    """Compiled before the ranks are forked."""
    torch.manual_seed(0)
    module, options = Layers(), {"training": True, "time_limit_s": 20, "gap": 0.5}
    whole = partitioner.compile(module, batch(0), 1, cluster="ideal", **options)
    needs = max(whole.evaluation.needed_bytes.values())
    compiled = partitioner.compile(
        module, batch(0), cluster=unlike(SHARES[ranks], needs), parallel="tp", **options
    )
    assert isinstance(compiled, ModuleProgram)
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # its first use imports for seconds
    return compiled


def train(ranks: int, _rank: int) -> None:
    """Steps beside one process's; then checkpoints, whole tensors and what is refused."""
    compiled = program(ranks)
    whole = copy.deepcopy(compiled.whole)
    module = compiled.module()
    ours = torch.optim.AdamW(module.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(whole.parameters(), lr=1e-2)

    def step(number: int) -> None:
        for optimizer, model in ((ours, module), (theirs, whole)):
            loss = model(*batch(number))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    def check() -> None:
        state = module.full_state_dict()
        for name, parameter in module.named_parameters():
            expected = whole.get_parameter(name)
            torch.testing.assert_close(state[name], expected, atol=1e-5, rtol=1e-4)
            gathered = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            torch.testing.assert_close(gathered, expected, atol=1e-5, rtol=1e-4)

    for number in range(3):
        step(number)
    check()
    parts = [p for p in module.parameters() if isinstance(p, DTensor)]
    mine = sum(p.to_local().numel() for p in parts)
    numbers: list[int] = [0] * ranks
    torch.distributed.all_gather_object(numbers, mine)
    assert numbers == sorted(numbers, reverse=True), numbers
    assert numbers[0] > 1.4 * numbers[-1]
    checkpoints.save(module, ours, "saved")
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    step(3)
    checkpoints.restore(module, ours, "saved")
    whole.load_state_dict(before)
    check()
    drawn = {name: torch.randn_like(tensor) for name, tensor in before.items()}
    for model in (module, whole):
        model.load_state_dict(drawn)
    check()
    cut = next(p for p in parts if any(place.is_shard() for place in p.placements))
    assert cut.redistribute(placements=[Replicate()]).to_local().shape == cut.shape
    with pytest.raises(BackendError, match=r"redistribute\(\) is not computed of a tensor"):
        cut.redistribute(placements=[Shard(0)])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.ones(parameter.shape))
        first = next(iter(parts))
        first.copy_(2 * first.full_tensor())
        for name, parameter in whole.named_parameters():
            same = module.get_parameter(name) is first
            parameter.fill_(2 if same else 1)
    check()


JOBS = {
    f"{ranks} ranks": Job(ranks, partial(train, ranks), [partial(program, ranks)], slow=ranks > 2)
    for ranks in SHARES
}

if __name__ == "__main__":
    main(JOBS)

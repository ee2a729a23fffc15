"""Training on devices of unlike memory: parameters lie in parts that fit each."""

import pytest
import torch
from torch import Tensor, nn

import partitioner
from helpers.processes.torch_jobs import RunJob, job_parameters
from jobs.modules.unlike_memory_jobs import JOBS, program


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_model_is_trained_in_parts_that_follow_the_memory(ranks: int) -> None:
    compiled = program(ranks)
    needed = compiled.evaluation.needed_bytes
    assert all(
        n <= d.memory_bytes for n, d in zip(needed.values(), compiled.cluster.devices, strict=True)
    )
    assert compiled.verify()


@pytest.mark.parametrize("job", job_parameters(JOBS))
def test_ranks_train_to_the_same_weights_and_load_checkpoints(run_job: RunJob, job: str) -> None:
    run_job("modules/unlike_memory_jobs.py", job)


#: Figures of cards in a machine at home, but for their memory.
CARD = "bandwidth=936GB/s,float32=35.6TFLOPS,float16=71TFLOPS,link=31.5GB/s"


class Decoder(nn.Module):
    """A block of five heads, and of a hidden size that no number of cards divides."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (5, -1)).transpose(1, 2) for part in qkv)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(self.up(x).relu())
        return y


@pytest.mark.parametrize(("cards", "gigabytes"), [((24, 8), 25), ((24, 8, 12), 34)])
def test_unlike_cards_of_one_machine_hold_what_none_of_them_does(
    cards: tuple[int, ...], gigabytes: int
) -> None:
    """Heads, and all else, are cut by the memory of the cards; the proof needs no weights."""
    with torch.device("meta"):
        module = Decoder(640, gigabytes * 10**9 // 4 // 640 | 1).half()
    x = torch.empty(1, 8, 640, dtype=torch.half, device="meta")
    cluster = "+".join(f"(memory={memory}GB,{CARD})" for memory in cards)
    program = partitioner.compile(module, x, cluster=cluster, parallel="tp", gap=0.5)
    needed = program.evaluation.needed_bytes
    assert all(0 < needed[rank] <= memory * 1e9 for rank, memory in enumerate(cards))
    assert sum(needed.values()) > gigabytes * 1e9
    assert program.verify(symbolic=True)


@pytest.mark.parametrize("parallel", ["tp", "pp"])
def test_three_cards_run_heads_that_do_not_divide(parallel: str) -> None:
    torch.manual_seed(0)
    cards = f"2x(memory=8GB,{CARD})+(memory=24GB,{CARD})"
    decoder = nn.Sequential(*(Decoder(40, 101) for _ in range(3)))
    x = torch.randn(3, 7, 40)
    program = partitioner.compile(decoder, x, cluster=cards, parallel=parallel, gap=0.5)
    assert len([n for n in program.evaluation.needed_bytes.values() if n > 0]) == 3
    assert program.verify()

"""No thread of a process group runs after `destroy_process_group`.

One that frees a tensor while Python shuts down would end the process with SIGABRT.
"""

from pathlib import Path

import pytest

from helpers.processes.torch_jobs import run_script

SCRIPT = """
import pathlib
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)


def gloo_threads():
    threads = pathlib.Path("/proc/self/task").iterdir()
    names = [(thread / "comm").read_text().strip() for thread in threads]
    return [name for name in names if "gloo" in name]


class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x).square().mean()


model, x = Model(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 4)), torch.randn(4, 6)
layout = sys.argv[1]
if layout == "hand":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # this imports what holds the group

import partitioner
from partitioner import functional as comm

if layout == "hand":
    comm.allreduce(model(x)).backward()
else:
    stages = {"schedule": "1f1b", "micro_batches": 2} if layout == "pp" else {}
    program = partitioner.compile(
        model, (x,), devices=2, training=True, optimizer="adamw", parallel=layout, **stages
    )
    module = program.module(seed=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(x).backward()
optimizer.step()
if layout != "hand" and rank == 0:
    time.sleep(1.5)  # the other rank is seen to wait, with the group in its frames
dist.barrier()
dist.destroy_process_group(dist.new_group([0, 1]))
watches = any(thread.name == "partitioner-whereabouts" for thread in threading.enumerate())
assert watches == (layout != "hand"), "the end of one group is not that of all"
before = gloo_threads()
dist.destroy_process_group()
after = gloo_threads()
print(f"{len(before) > 0} before, {after} after\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists threads as Linux does")
@pytest.mark.parametrize(
    "layout",
    [
        "hand",
        pytest.param("pp", marks=pytest.mark.slow),
        pytest.param("zero3", marks=pytest.mark.sweep),
    ],
)
def test_no_thread_of_a_group_runs_after_its_end(tmp_path: Path, layout: str) -> None:
    (tmp_path / "end.py").write_text(SCRIPT)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_script(tmp_path, *torchrun, "end.py", layout)
    assert done.stdout.count("True before, [] after") == 2, done.stdout

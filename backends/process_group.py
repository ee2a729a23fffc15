"""Process groups of torch.distributed, made up front in one order, and timing across ranks.

Groups end when they are destroyed: what would hold them longer lets go of them.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as default_holders

from partitioner.backends.errors import BackendError, one_line

#: How long a rank waits for another one inside a communication.
TIMEOUT = timedelta(minutes=30)

#: Seconds after which a rank is said not to have started, and how long it looks for the others.
START_S = 60.0
#: Seconds that a rank stays after a failed start, so that the others hear of it.
_STAY_S = 2.0
_POLL_S = 0.05

Group = Any  #: `dist.ProcessGroup`; torch exports no type for "not a member".
_ResultT = TypeVar("_ResultT")
#: Reductions of torch.distributed by our names.
REDUCTIONS: Mapping[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass(frozen=True)
class Start:
    """The start of the ranks that torchrun began: if one fails, all of them hear why."""

    rank: int  #: This process's.
    ranks: int  #: Number of ranks.
    store: Any  #: The store that the ranks share.

    @classmethod
    def of_environment(cls) -> Start:
        """The ranks of torchrun's environment variables, once all of them are there.

        Raises:
            BackendError: They are not set, or a rank has not started within `START_S`.
        """
        env = os.environ
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= env.keys():
            raise BackendError("start it with torchrun, or use `partition run`")
        rank, ranks = int(env["RANK"]), int(env["WORLD_SIZE"])
        by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                env["MASTER_ADDR"],
                int(env["MASTER_PORT"]),
                ranks,
                is_master=rank == 0 and not by_agent,
                timeout=timedelta(seconds=START_S),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            where = f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
            raise BackendError(f"rank 0 is not there, at {where}: {one_line(error)}") from error
        attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefixed = dist.PrefixStore(f"partitioner/{attempt}", store)  # type: ignore[attr-defined]
        start = cls(rank, ranks, prefixed)
        start._said("here", "", START_S)
        return start

    @contextmanager
    def together(self, stage: str) -> Iterator[None]:
        """Do a `stage` once that may fail on single ranks: on any failure all raise the same."""
        problem = ""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks hear of it
            text = one_line(error)
            problem = text if text.startswith("rank ") else f"rank {self.rank}: {text}"
        problems = [text for text in self._said(stage, problem, TIMEOUT.total_seconds()) if text]
        if problems:
            count, until = self.store.add(f"{stage}/read", 1), time.monotonic() + _STAY_S
            while self.rank == 0 and count < self.ranks and time.monotonic() < until:
                time.sleep(_POLL_S)
                count = self.store.add(f"{stage}/read", 0)
            raise BackendError("; ".join(dict.fromkeys(problems)))

    def _said(self, stage: str, text: str, limit_s: float) -> list[str]:
        """The report of each rank on a stage; a BackendError if one says nothing for `limit_s`."""
        self.store.set(f"{stage}/{self.rank}", text)
        missing, until = set(range(self.ranks)), time.monotonic() + limit_s
        while missing:
            missing -= {rank for rank in missing if self.store.check([f"{stage}/{rank}"])}
            if missing and time.monotonic() > until:
                late = ", ".join(map(str, sorted(missing)))
                raise BackendError(f"rank {late} has not come to {stage!r} in {limit_s:g} s")
            time.sleep(_POLL_S if missing else 0)
        return [self.store.get(f"{stage}/{rank}").decode() for rank in range(self.ranks)]


@dataclass(frozen=True)
class Groups:
    """The groups of a run."""

    control: Group  #: All ranks, on gloo: for small Python objects.
    up: Group  #: All ranks: point-to-point data to higher ranks for a later round.
    #: The same to lower ranks. Two groups, because on NCCL a send waits in one queue with receives
    #: from the same rank, and two ranks that both send first would wait for ever.
    down: Group
    #: Groups of the ranks that take part in a communication, by those ranks.
    of: Mapping[tuple[int, ...], Group]

    def mail(self, source: int, target: int) -> Group:
        """The group for data of a later round."""
        return self.up if source < target else self.down


def make_groups(rank_sets: Iterable[tuple[int, ...]], device: torch.device) -> Groups:
    """Make the groups that any rank needs, in the same order everywhere, and connect them."""
    free_default_arguments()
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(set(rank_sets)), group=control)
    union: list[tuple[int, ...]] = sorted({ranks for sets in gathered for ranks in sets})
    backend = "nccl" if device.type == "cuda" else "gloo"  # as the data lies
    up, down = (dist.new_group(backend=backend, timeout=TIMEOUT) for _ in range(2))
    groups = {
        ranks: dist.new_group(list(ranks), backend=backend, timeout=TIMEOUT) for ranks in union
    }
    member = dist.get_rank()
    for group in (up, down, *(group for ranks, group in groups.items() if member in ranks)):
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # connect before data flows
    return Groups(control, up, down, groups)


def timed(
    serve: Callable[[int], _ResultT], requests: int, group: Group = None
) -> tuple[_ResultT, float]:
    """Serve one request to warm up, then all of them; their results and the slowest rank's seconds.

    A rank without requests of its own has the results of that to warm up. `group` is that of all
    ranks, on gloo; None for the default group.
    """
    results = serve(1)
    dist.barrier(group=group)
    start = time.perf_counter()
    results = serve(requests) if requests else results
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return results, seconds.item()


def timed_steps(serve: Callable[[int], object], steps: int, group: Group = None) -> list[float]:
    """Seconds of single requests, each of which all ranks begin together: the slowest rank's."""
    seconds = torch.zeros(steps, dtype=torch.float64)
    for step in range(steps):
        dist.barrier(group=group)
        start = time.perf_counter()
        serve(1)
        seconds[step] = time.perf_counter() - start
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    return seconds.tolist()


def gpu_name(device: torch.device) -> str:
    """The name of a GPU as the driver reports it, for records; "" of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


#: Barriers by which the ranks compare their clocks.
_CLOCK_BARRIERS = 32

#: Clock at the begin and end of a barrier.
Span = tuple[float, float]


def clock_offset(group: Group = None) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of rank 0's; all ranks call it."""
    spans: list[Span] = []
    for _ in range(_CLOCK_BARRIERS):
        begin = time.perf_counter()
        dist.barrier(group=group)
        spans.append((begin, time.perf_counter()))
    gathered: list[list[Span]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, spans, group=group)
    return offset_of(spans, gathered[0])


def offset_of(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds by which a clock is ahead of another one, from the same barriers on both.

    Nobody leaves a barrier before all have entered it, which bounds the offset from both sides. If
    the clocks may be one, as those of two processes of one machine are, they are taken as one; else
    the middle of the bounds is the offset.
    """
    low = max(begin - end for (begin, _), (_, end) in zip(spans, others, strict=True))
    high = min(end - begin for (_, end), (begin, _) in zip(spans, others, strict=True))
    return 0.0 if low <= 0 <= high else (low + high) / 2


@cache
def free_default_arguments() -> None:
    """Let no function of PyTorch hold the group of all ranks as the default of an argument.

    PyTorch imports `torch.distributed.nn.functional` late, with an optimizer or a trace. If that is
    after `init_process_group`, the defaults hold the group (before it they are None, which means
    the same): it outlives `destroy_process_group`, its threads run on, and one of them that frees a
    tensor while Python shuts down ends the process with SIGABRT.
    """
    for function in vars(default_holders).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(defaults, tuple):
            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default for default in defaults
            )
    _let_go_when_groups_end()


#: What is called once before the group of all ranks is destroyed.
_LAST_CALLS: list[Callable[[], None]] = []


def call_before_groups_end(last_call: Callable[[], None]) -> None:
    """Call a function once, before the group of all ranks is destroyed, and the others with it."""
    _let_go_when_groups_end()
    _LAST_CALLS.append(last_call)


@cache
def _let_go_when_groups_end() -> None:
    """Free what holds a destroyed group: last calls do, and a collection of cycles.

    Such a cycle is an exception that was caught, with its frames. Without a collection the threads
    of the group run on until Python happens to collect, or shuts down.
    """
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def destroyed(group: Any = None) -> None:
        while _LAST_CALLS and group in (None, dist.group.WORLD):
            _LAST_CALLS.pop()()
        destroy(group)
        gc.collect()

    for module in (dist, c10d):
        module.destroy_process_group = destroyed  # type: ignore[attr-defined]

"""All ranks in one process, in lock-step: no torch.distributed, always the same order.

Each rank runs until it waits for data that is not there yet, then the next one runs.
>>> run_lockstep(Path("model.partition"), {"x": x})  # doctest: +SKIP
{'y': array(...)}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from onnx import ModelProto

from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.load import load_rank, read_directory
from partitioner.backends.onnx.files.steps import Cut
from partitioner.backends.onnx.running.executor import (
    Done,
    Executor,
    Observer,
    Waiting,
    write_parts,
)
from partitioner.backends.onnx.running.turns import Turns
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.backends.regions import read_region, region_shape, whole_region
from partitioner.backends.tensors import to_numpy
from partitioner.ir.exchange import Region, Transfer
from partitioner.ir.program import CommKind

_NOTHING: Mapping[int, Collection[str]] = MappingProxyType({})

#: Where data lies between ranks: (seq, pass, source rank, target rank, number of the transfer).
_Key = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Lockstep:
    """The results of a request."""

    outputs: Mapping[str, np.ndarray]  #: Whole outputs by name.
    #: The local values to keep, by rank and local name; of a request in micro-batches those of all
    #: of them, along a first dim.
    values: Mapping[int, Mapping[str, np.ndarray]]


def run_lockstep(
    source: Path | Sequence[ModelProto],
    inputs: Mapping[str, np.ndarray],
    *,
    optimization: str = "basic",
) -> dict[str, np.ndarray]:
    """Whole outputs of one request on all ranks; see `Simulator`."""
    return dict(Simulator(source, optimization=optimization).run([inputs])[0].outputs)


class Simulator:
    """All ranks of a partitioned model with their sessions open.

    Args:
        source: A folder of rank files, or their messages in order of rank.
        keep: Local values to return beside the outputs, by rank.
        optimization: See `SessionConfig`; at "disable" cutting between operators changes no bit.
        configs: Per rank, in place of `optimization`.
        observers: Per rank, see `Executor`.
    """

    def __init__(
        self,
        source: Path | Sequence[ModelProto],
        *,
        keep: Mapping[int, Collection[str]] = _NOTHING,
        optimization: str = "basic",
        configs: Mapping[int, SessionConfig] = MappingProxyType({}),
        observers: Mapping[int, Observer] = MappingProxyType({}),
    ) -> None:
        default = SessionConfig(optimization=optimization, threads=torch.get_num_threads())
        self._mail: dict[_Key, torch.Tensor] = {}
        files: Sequence[Path | ModelProto] = (
            [source / f"rank{header.rank}.onnx" for header in read_directory(source)]
            if isinstance(source, Path)
            else source
        )
        self.executors = tuple(
            Executor(
                model,
                _Mailbox(self._mail, model.rank),
                configs.get(model.rank, default),
                observers.get(model.rank),
            )
            for model in (load_rank(file, keep.get(rank, ())) for rank, file in enumerate(files))
        )
        self.headers = tuple(executor.model.header for executor in self.executors)

    def run(self, requests: Sequence[Mapping[str, np.ndarray]]) -> tuple[Lockstep, ...]:
        """Results of requests, given by their whole inputs and in flight together if several.

        Raises:
            BackendError: An input is wrong, ONNX Runtime fails, or the ranks deadlock.
        """
        for inputs in requests:
            check_inputs(self.headers[0], inputs)
        self._mail.clear()  # of an earlier run that failed
        values: list[dict[int, Mapping[str, torch.Tensor]]] = [{} for _ in requests]
        with _one_torch_thread():
            for rank, done in self._interleave(requests):
                values[done.request][rank] = done.values
        return tuple(map(self._gather, values))

    def _interleave(
        self, requests: Sequence[Mapping[str, np.ndarray]]
    ) -> Iterator[tuple[int, Done]]:
        served = {e.model.rank: e.model.header.served(len(requests)) for e in self.executors}
        running = {
            e.model.rank: e.run(
                [e.fed(local_inputs(e.model.header, requests[n])) for n in served[e.model.rank]]
            )
            for e in self.executors
            if served[e.model.rank]
        }
        waits: dict[int, Waiting] = {}
        while running:
            moved = False
            for rank in list(running):
                while rank in running:
                    if rank in waits:
                        wait = waits[rank]
                        arrivals = _arrivals(wait.cut, rank, wait.number)
                        if not all(key in self._mail for _, key in arrivals):
                            break
                    moved = True
                    waits.pop(rank, None)
                    event = next(running[rank], None)
                    if event is None:
                        del running[rank]
                    elif isinstance(event, Done):
                        yield rank, replace(event, request=served[rank][event.request])
                    else:
                        waits[rank] = event
            if not moved:
                each = "; ".join(
                    f"rank {rank} waits for {wait.cut} (pass {wait.number})"
                    for rank, wait in sorted(waits.items())
                )
                raise BackendError(f"the ranks deadlock: {each}")

    def _gather(self, values: Mapping[int, Mapping[str, torch.Tensor]]) -> Lockstep:
        parts, kept = {}, {}
        served = [executor for executor in self.executors if executor.model.rank in values]
        for executor in served:
            model = executor.model
            arrays = {
                name: to_numpy(tensor, model.types[name].dtype)
                for name, tensor in values[model.rank].items()
            }
            parts[model.rank] = {o.value: arrays[o.value] for o in model.header.outputs}
            kept[model.rank] = {name: arrays[name] for name in model.keep}
        return Lockstep(assemble([each.model.header for each in served], parts), kept)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Copies and sums on one thread: torch's own pool costs milliseconds where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Mailbox:
    def __init__(self, mail: dict[_Key, torch.Tensor], rank: int) -> None:
        self._mail = mail
        self._rank = rank

    def begin(self, turns: Turns) -> None:
        """Nothing to prepare."""

    def finish(self) -> None:
        """Nothing to wait for: sending is a copy."""

    def send(self, cut: Cut, number: int, source: torch.Tensor) -> None:
        """Put copies of this rank's parts into the mail."""
        seq, rank = cut.comm.seq, self._rank
        if cut.comm.kind is CommKind.ALL_REDUCE:
            copy = source.clone()
            for target in cut.comm.ranks:
                self._mail[seq, number, rank, target, 0] = copy
            return
        for transfer, at in _numbered(cut.comm.transfers):
            if transfer.source == rank:
                part = source.new_empty(region_shape(transfer.read))
                read_region(source, transfer.read, part)
                self._mail[seq, number, rank, transfer.target, at] = part

    def receive(self, cut: Cut, number: int, target: torch.Tensor) -> torch.Tensor:
        """Take this rank's parts out of the mail; reductions are in ascending order of rank."""
        arrivals = _arrivals(cut, self._rank, number)
        write_parts(cut, [(region, self._mail.pop(key)) for region, key in arrivals], target)
        return target


def _arrivals(cut: Cut, rank: int, number: int) -> Iterator[tuple[Region, _Key]]:
    """Regions that a rank receives of a cut, and where in the mail their data lies."""
    if cut.comm.kind is CommKind.ALL_REDUCE:
        assert cut.target is not None
        everything = whole_region(cut.target.shape)
        for source in cut.comm.ranks:
            yield everything, (cut.comm.seq, number, source, rank, 0)
        return
    for transfer, at in _numbered(cut.comm.transfers):
        if transfer.target == rank:
            yield transfer.write, (cut.comm.seq, number, transfer.source, rank, at)


def _numbered(transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, int]]:
    """Transfers with their number among those of the same two ranks: the same on both sides."""
    seen: Counter[tuple[int, int]] = Counter()
    for transfer in transfers:
        pair = transfer.source, transfer.target
        yield transfer, seen[pair]
        seen[pair] += 1

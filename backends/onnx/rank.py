"""A rank as a process, once torch.distributed is up: its sessions and groups, run and timed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import torch.distributed as dist

from partitioner.backends.arrays import load_arrays
from partitioner.backends.launch import SOCKET, save_log
from partitioner.backends.messages import Arrays, receive_arrays, send_arrays
from partitioner.backends.observed import RankLog
from partitioner.backends.onnx.files.load import load_rank
from partitioner.backends.onnx.files.steps import RankModel
from partitioner.backends.onnx.measuring.recording import record
from partitioner.backends.onnx.measuring.timing import NAME
from partitioner.backends.onnx.running.distributed import DistributedCommunicator, rank_sets
from partitioner.backends.onnx.running.executor import Done, Executor
from partitioner.backends.onnx.running.held_inputs import HeldInputs
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.backends.process_group import (
    clock_offset,
    gpu_name,
    make_groups,
    timed,
    timed_steps,
)
from partitioner.backends.tensors import to_numpy
from partitioner.backends.waiting import STEPS


def has_gpus(count: int) -> bool:
    """Test whether this ONNX Runtime is built for GPUs and the machine has so many of them."""
    is_built = "CUDAExecutionProvider" in ort.get_available_providers()
    return is_built and torch.cuda.is_available() and torch.cuda.device_count() >= count


def rank_device(local_rank: int, local_ranks: int) -> torch.device:
    """A rank's GPU if all ranks, which must call it, have one for ONNX Runtime; else the CPU."""
    all_have = torch.tensor(int(has_gpus(local_ranks)))
    dist.all_reduce(all_have, dist.ReduceOp.MIN)
    return torch.device("cuda", local_rank) if all_have else torch.device("cpu")


class RankProcess:
    """A rank that is ready to run on its device (`rank_device`), whatever that of `config` is."""

    def __init__(
        self,
        model: RankModel,
        device: torch.device,
        config: SessionConfig,
        feed: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.device = model, device
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        torch.set_num_threads(config.threads)
        self.groups = make_groups(rank_sets(self.model), self.device)
        communicator = DistributedCommunicator(self.model, self.groups, self.device)
        self._executor = Executor(
            self.model, communicator, replace(config, gpu=self.device.index, shared_arena=True)
        )
        self._held = HeldInputs(model, feed or {}, device)
        kept = (out.value for out in model.header.outputs if out.whole not in (feed or {}))
        self._delivered = tuple(dict.fromkeys(kept))

    def run(
        self, inputs: Mapping[str, np.ndarray], requests: int
    ) -> tuple[dict[str, np.ndarray], float]:
        """Local output values of requests with the same local inputs, several of them in flight.

        The seconds are of all requests together on the slowest rank, after one to warm up. Of whole
        copies, each serves its requests.
        """
        feed, own = self._executor.fed(inputs), self.model.header.served(requests)
        values, seconds = timed(
            lambda number: self._serve([feed] * number), len(own), self.groups.control
        )
        return self._outputs(values), seconds

    def answer(self, requests: Arrays) -> list[dict[str, np.ndarray]]:
        """Local output values of requests, given by local inputs, several of them in flight.

        Results that are inputs of the next request are held, and no part of an answer.
        """
        answers: list[dict[str, np.ndarray]] = [{} for _ in requests]
        feeds = [self._held.joined(self._executor.fed(inputs)) for inputs in requests]
        self._executor.places = self._held.places
        for event in self._executor.run(feeds):
            if isinstance(event, Done):
                self._held.take(event.values)
                # copies, as a later request may be written to the same buffers
                outputs = self._outputs(event.values)
                answers[event.request] = {name: array.copy() for name, array in outputs.items()}
                STEPS.begin()
        return answers

    def _outputs(self, values: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        """The arrays of the outputs, on the memory of `values` on a processor."""
        types = self.model.types
        return {name: to_numpy(values[name], types[name].dtype) for name in self._delivered}

    def record(self, inputs: Mapping[str, np.ndarray], steps: int) -> RankLog:
        """Record steps once on all ranks; sessions write profiles and graphs (`SessionConfig`)."""
        feed, control = self._executor.fed(inputs), self.groups.control
        offset_s, barrier = clock_offset(control), partial(dist.barrier, group=control)
        recorded, held = record(self._executor, lambda: self._serve([feed]), barrier, steps)
        unrecorded_s = timed_steps(lambda number: self._serve([feed] * number), steps, control)
        threads, gpu = self._executor.config.threads, gpu_name(self.device)
        log = RankLog(NAME, threads, recorded, tuple(unrecorded_s), held, gpu)
        return log.shifted(offset_s)

    def _serve(self, feeds: list[dict[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
        last: Mapping[str, torch.Tensor] = {}
        for event in self._executor.run(feeds):
            if isinstance(event, Done):
                last = event.values
                STEPS.begin()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return last


def _serve(process: RankProcess, connection: Connection) -> None:
    """Answer what a rank is asked until nobody asks any more."""
    while True:
        try:
            requests = receive_arrays(connection)
        except EOFError:
            return
        send_arrays(connection, process.answer(requests))


def run_files(rank: int, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a rank of a job of `partitioner.backends.worker`, from and to files of its folder.

    A rank of a job that answers has no such files.
    """
    steps = job.get("steps", 0)
    own = folder / f"profile-{rank}" if steps else None
    if own is not None:
        own.mkdir()
    config = SessionConfig(
        optimization=job["optimization"], threads=job["threads"], profile=own, optimized=own
    )
    model = load_rank(Path(job["directory"]) / f"rank{rank}.onnx")
    process = RankProcess(model, rank_device(rank, job["ranks"]), config, job.get("feed"))
    if job.get("answers"):
        with Client(str(folder / SOCKET), "AF_UNIX") as connection:
            connection.send_bytes(str(rank).encode())  # that it is ready
            _serve(process, connection)
        return
    names = list(process.model.header.inputs)
    dtypes = [process.model.types[name].dtype for name in names]
    arrays = load_arrays(folder / f"inputs-{rank}.npz", dtypes)
    inputs = dict(zip(names, arrays, strict=True))
    if steps:
        save_log(folder, rank, process.record(inputs, steps))
    outputs, seconds = process.run(inputs, job["requests"])
    np.savez(folder / f"outputs-{rank}.npz", *outputs.values())
    if rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seconds))

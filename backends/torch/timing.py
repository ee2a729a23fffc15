"""A rank's program in PyTorch, ready to be run over and over: for measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

import partitioner.backends.torch.operators  # noqa: F401 - registers them
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.tensors import from_numpy
from partitioner.backends.torch.emit import emit_rank
from partitioner.ir.graph import Graph
from partitioner.ir.program import Programs

NAME = f"torch {torch.__version__}"


@contextmanager
def same_threads() -> Iterator[None]:
    """Give the process back the threads that it had."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepared(
    programs: Programs, graph: Graph, inputs: Mapping[str, np.ndarray], threads: int
) -> Callable[[], object]:
    """A function that runs the program of a single rank once, eagerly.

    It sets the threads of the process: see `same_threads`.

    Raises:
        BackendError: PyTorch does not take or run the program.
    """
    forward = emit_rank(programs, 0, graph, torch.device("cpu")).forward
    types = programs.inputs
    arguments = [from_numpy(inputs[name], types[name].dtype) for name in forward.arguments]

    def run() -> object:
        with torch.no_grad():
            return forward.module(*arguments)

    torch.set_num_threads(threads)
    try:
        run()
    except Exception as error:
        raise BackendError(one_line(error)) from error
    return run

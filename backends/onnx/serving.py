"""The rank files of a folder as processes of this machine that stay up between requests."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.launch import serving_job
from partitioner.backends.onnx.files.load import read_directory
from partitioner.backends.onnx.local import RUNNER
from partitioner.ir.checks import is_a
from partitioner.ir.errors import typed

#: Requests after which whole copies are counted anew.
_ROUND = 1024


class Session:
    """A session: one process a rank, which loads its file once and answers until `close`.

    Calls of several threads run one after the other. An error of a rank ends all of them; every
    later call says so.

    Attributes:
        folder: Has the rank files.
    """

    def __init__(self, folder: Path, optimization: str = "all", owner: object = None) -> None:
        """Start the ranks of a folder's files, and wait until they are ready.

        Args:
            folder: Has rank files, which are read once; constants of blocks, at each request.
            optimization: ONNX Runtime's level, see `SessionConfig`.
            owner: Of a temporary folder, which is there as long as its owner: kept.

        Raises:
            BackendError: A file is wrong, or a rank cannot load it.
        """
        self.folder = folder
        self._headers = read_directory(folder)
        job = {
            "runner": RUNNER,
            "directory": str(folder.resolve()),
            "optimization": optimization,
        }
        self._lock = threading.RLock()  # a signal handler may close what its own thread runs
        self._is_asking = False
        self._owner = owner
        self._process = os.getpid()
        self._first = 0  # number of the next request
        self._ended = "the session is closed"
        self._stack: contextlib.ExitStack | None
        with contextlib.ExitStack() as stack:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="partitioner-session-"))
            self._ranks = stack.enter_context(serving_job(Path(name), len(self._headers), job))
            self._stack = stack.pop_all()

    @property
    def is_open(self) -> bool:
        """Tell whether it answers: it was not closed, and no rank has ended."""
        return self._stack is not None

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a request: whole inputs by name in, whole outputs by name out.

        Raises:
            BackendError: An input is missing, unknown, or of the wrong shape or type; a rank
                raised or was killed; the session is closed, or of the process that this one was
                forked from.
        """
        (outputs,) = self.run_all([inputs])
        return outputs

    def run_all(self, requests: Iterable[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Run requests, several of them in flight at the same time; arguments as of `run`.

        Placed operators and whole copies work on several requests at once, which one call of `run`
        after the other does not let them.
        """
        requests = tuple(requests)
        for inputs in requests:
            if not is_a(inputs, Mapping):
                names = ", ".join(map(repr, self._headers[0].whole_inputs))
                what = f"the inputs of a request are {typed(inputs)}"
                raise BackendError(f"{what}, not a dict of arrays by name ({names})")
            check_inputs(self._headers[0], inputs)
        if self._process != os.getpid():  # two processes would read each other's answers
            raise BackendError("the session is of another process: start one after the fork")
        with self._lock:
            if self._stack is None:
                raise BackendError(self._ended)
            if self._is_asking:
                raise BackendError("a signal handler cannot run a request while its thread does")
            numbers = range(self._first, self._first + len(requests))
            serving = [self._headers[0].of_request(number, self._headers) for number in numbers]
            self._first = numbers.stop % _ROUND
            asked = defaultdict[int, list[dict[str, np.ndarray]]](list)
            for inputs, headers in zip(requests, serving, strict=True):
                for header in headers:
                    asked[header.rank].append(local_inputs(header, inputs))
            self._is_asking = True
            try:
                answers = self._ranks.ask(asked)
            except BaseException as error:  # also an interrupt: answers may still come
                if not self.is_open:  # the end of the ranks is no failure then
                    raise BackendError("the session was closed while a request ran") from error
                self._end(f"the session has ended: {one_line(error)}")
                raise
            finally:
                self._is_asking = False
        parts = {rank: iter(of_rank) for rank, of_rank in answers.items()}
        return [
            assemble(headers, {header.rank: next(parts[header.rank]) for header in headers})
            for headers in serving
        ]

    def close(self) -> None:
        """End the processes. A call that is running is waited for.

        A signal handler ends the call that its own thread is in, which raises a BackendError. In a
        process that was forked from the session's, nothing is done.
        """
        if self._process != os.getpid():
            return
        with self._lock:
            self._end(self._ended)

    def _end(self, why: str) -> None:
        stack, self._stack, self._ended = self._stack, None, why
        if stack is not None:
            stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""The rank files of a folder as processes of this machine that stay up between requests."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from partitioner.backends.arrays import assemble, check_inputs, local_inputs
from partitioner.backends.errors import BackendError, one_line
from partitioner.backends.feeding import local_feeds
from partitioner.backends.header import Header
from partitioner.backends.launch import serving_job
from partitioner.backends.onnx.files.load import read_directory
from partitioner.backends.onnx.local import RUNNER
from partitioner.ir.checks import is_a
from partitioner.ir.errors import typed
from partitioner.ir.nodes.feeds import Feed, named_pairs

#: Requests after which whole copies are counted anew.
_ROUND = 1024


class Session:
    """A session: one process a rank, which loads its file once and answers until `close`.

    Calls of several threads run one after the other. An error of a rank ends all of them; every
    later call says so.

    Attributes:
        folder: Has the rank files.
        feed: The input of the next request that each of these results becomes, by name.
    """

    def __init__(
        self,
        folder: Path,
        optimization: str = "all",
        owner: object = None,
        feed: Feed | None = None,
    ) -> None:
        """Start the ranks of a folder's files, and wait until they are ready.

        Args:
            folder: Has rank files, which are read once; constants of blocks, at each request.
            optimization: ONNX Runtime's level, see `SessionConfig`.
            owner: Of a temporary folder, which is there as long as its owner: kept.
            feed: Results that are inputs of the next request, by name or with a ``*``; None for
                those that the plan was made for.

        Raises:
            BackendError: A file is wrong, a rank cannot load it, or a result does not lie where the
                input is that it becomes.
            OptionError: There is no such result or input.
        """
        self.folder = folder
        headers = read_directory(folder)
        self.feed = _checked_feed(headers, feed)
        self._whole = headers  # with all inputs
        self._headers = tuple(_asked(header, self.feed, self.feed.values()) for header in headers)
        job = {
            "feed": self.feed,
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

        Results in `feed` stay on their ranks, as the inputs of the next request: neither are
        passed. They begin as zeros; such an input that is given takes the place of what is held.

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
        self._check(requests)
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
                    given = self._taking(inputs)[header.rank]
                    asked[header.rank].append(local_inputs(given, inputs))
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

    def _check(self, requests: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Refuse requests that cannot be run, before any is."""
        if self.feed and len(requests) > 1:
            result, name = next(iter(self.feed.items()))
            raise BackendError(
                f"feed {result}={name}: a request waits for the results of the one before it; give "
                "one after the other to run"
            )
        for inputs in requests:
            if not is_a(inputs, Mapping):
                names = ", ".join(map(repr, self._headers[0].whole_inputs))
                what = f"the inputs of a request are {typed(inputs)}"
                raise BackendError(f"{what}, not a dict of arrays by name ({names})")
            check_inputs(self._taking(inputs)[0], inputs)

    def _taking(self, inputs: Mapping[str, np.ndarray]) -> tuple[Header, ...]:
        """The headers of a request, with those of the held inputs that are given anew."""
        held = set(self.feed.values())
        if held.isdisjoint(inputs):
            return self._headers
        return tuple(_asked(header, self.feed, held.difference(inputs)) for header in self._whole)

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


def _checked_feed(headers: Sequence[Header], feed: Feed | None) -> dict[str, str]:
    """The pairs of a session by name, of which each rank has both sides."""
    first = headers[0]
    if feed is None:
        return dict(first.fed)
    pairs = named_pairs(feed, first.whole_outputs, first.whole_inputs)
    if pairs and first.copies is not None:
        raise BackendError(
            "feed: whole copies take the requests in turn, and each holds its own results; "
            "partition the model with this feed"
        )
    for header in headers:
        local_feeds(header, pairs)
    return pairs


def _asked(header: Header, results: Collection[str], held: Collection[str]) -> Header:
    """The header of a request without results that stay, and inputs that are held."""
    return replace(
        header,
        inputs={name: part for name, part in header.inputs.items() if part.whole not in held},
        whole_inputs={n: type_ for n, type_ in header.whole_inputs.items() if n not in held},
        outputs=tuple(output for output in header.outputs if output.whole not in results),
        whole_outputs={n: type_ for n, type_ in header.whole_outputs.items() if n not in results},
    )

"""The sessions of a rank's segments: those that stay open, and those of blocks, open in turn.

While a block runs, a thread opens the session of the next one, which reads its constants. A block's
session is closed when it has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import onnxruntime as ort

from partitioner.backends.onnx.files.steps import RankModel
from partitioner.backends.onnx.sessions.joined import Sums
from partitioner.backends.onnx.sessions.segments import SessionConfig, open_joined, open_session


@dataclass
class Sessions:
    """The sessions of the segments that run, by the index of their step."""

    model: RankModel  #: The rank.
    config: SessionConfig  #: How segments run.
    resident: Mapping[int, ort.InferenceSession]  #: Sessions that stay open.
    then: Mapping[int, int]  #: The block's step that runs after each block's.
    #: Values of segments that may lie in one place; see `joined.Piece`.
    sums: Mapping[int, tuple[Sums, ...]]
    #: Files with the profiles of closed sessions, one of each run.
    profiles: dict[int, list[Path]] = field(default_factory=dict)
    #: The graphs of sessions as they run, where they are written.
    optimized: dict[int, Path] = field(default_factory=dict)
    _opening: dict[int, Future[ort.InferenceSession]] = field(default_factory=dict)
    _thread: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, model: RankModel, config: SessionConfig, steps: Iterable[int]) -> Sessions:
        """Open the sessions that stay open.

        Raises:
            BackendError: ONNX Runtime refuses a segment.
        """
        stay: list[int] = []
        in_turn: list[int] = []
        for index in steps:
            (stay if model.segment(index).block is None else in_turn).append(index)
        joined = open_joined(model, stay, config)
        resident = {
            index: joined[index][0]
            if index in joined
            else open_session(model, model.segment(index), config)
            for index in stay
        }
        sums = {index: of_piece for index, (_, of_piece) in joined.items() if of_piece}
        return cls(model, config, resident, dict(pairwise(in_turn)), sums)

    @contextmanager
    def opened(self, index: int) -> Iterator[ort.InferenceSession]:
        """The session of a step, for one run.

        Raises:
            BackendError: ONNX Runtime refuses the segment.
        """
        if index in self.resident:
            yield self.resident[index]
            return
        waiting = self._opening.pop(index, None)
        self._drop()
        session = self._open(index) if waiting is None else waiting.result()
        if (then := self.then.get(index)) is not None:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "partitioner-load")
            self._opening[then] = self._thread.submit(self._open, then)
        try:
            yield session
        finally:
            self._close(index, session)

    def _open(self, index: int) -> ort.InferenceSession:
        return open_session(self.model, self.model.segment(index), self.config)

    def _close(self, index: int, session: ort.InferenceSession) -> None:
        if self.config.profile is not None:
            self.profiles.setdefault(index, []).append(Path(session.end_profiling()))
        if self.config.optimized is not None:
            path = session.get_session_options().optimized_model_filepath
            self.optimized.setdefault(index, Path(path))

    def _drop(self) -> None:
        """Forget sessions that were opened for a run that failed."""
        for future in self._opening.values():
            with suppress(Exception):
                future.result()
        self._opening.clear()

    def end_profiling(self) -> Mapping[int, list[Path]]:
        """The profiles of all sessions: one file each, or one for each run of a block."""
        files = {i: [Path(session.end_profiling())] for i, session in self.resident.items()}
        return {**files, **self.profiles}

    def graph_of(self, index: int) -> Path:
        """The file of a session's graph as it runs; see `SessionConfig.optimized`."""
        if index in self.optimized:
            return self.optimized[index]
        return Path(self.resident[index].get_session_options().optimized_model_filepath)

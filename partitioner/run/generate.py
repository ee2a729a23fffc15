"""`partition run --until`: calls one after the other, whose results are inputs of the next one.

Results that are fed back stay on their ranks. What else changes from call to call is told by names
that exporters of decoders use:

- `input_ids` is the next token of the prompt or, if there is a result `logits` (batch, position,
  token), the likeliest token of the last position;
- `position_ids` and `cache_position` grow by one;
- `attention_mask` gets a one more: where results grow, behind the others, of which the first one
  goes; else in the place of its first zero.

All other inputs stay as they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from partitioner.api.compiled.folder import OnnxFiles, load_plan, rank_files
from partitioner.backends.optimization import Optimization, level_line
from partitioner.foundations import units
from partitioner.ir.nodes.feeds import Feed, grown_dim
from partitioner.run.local import (
    RunError,
    check_outputs,
    draw_inputs,
    prediction,
    read_inputs,
    write_outputs,
)

if TYPE_CHECKING:
    from partitioner.backends.header import Header
    from partitioner.backends.onnx.serving import Session

IDS, LOGITS, MASK = "input_ids", "logits", "attention_mask"
POSITIONS = ("position_ids", "cache_position")
#: Most tokens that a report shows.
SHOWN = 64

Arrays = Mapping[str, np.ndarray]


def generate_directory(
    directory: Path,
    inputs: Path | None,
    outputs: Path | None,
    *,
    until: int,
    feed: Feed | None = None,
    prompt: Sequence[int] = (),
    optimization: Optimization | None = None,
    seed: int = 0,
) -> str:
    """Call a saved ONNX model again and again; returns a report of a few lines.

    Args:
        inputs: .npz of inputs of the first call. What it lacks begins as zeros where it is fed
            back, at the first position, or is drawn.
        outputs: .npz to write the outputs of the last call to and, if there are any, all `tokens`.
        until: Number of tokens to make or, of a model without `logits`, of calls.
        feed: As of `Session`.
        prompt: Tokens that the model takes first, in place of `input_ids`.
        seed: Seed of drawn inputs.
    """
    from partitioner.backends.onnx.serving import Session

    files = rank_files(directory)
    files.check(load_plan(directory))
    if not isinstance(files, OnnxFiles):
        raise RunError(
            f"{directory}: --until is of ONNX models; a module keeps its caches as buffers, and "
            "its ranks stay up under torchrun"
        )
    if outputs is not None:
        check_outputs(outputs, directory)
    files = replace(files, optimization=optimization or files.optimization)
    header = files.headers()[0]
    given = {} if inputs is None else read_inputs(inputs, header.whole_inputs)
    with Session(directory, files.optimization, feed=feed) as session:
        if not session.feed:
            raise RunError(
                f"{directory}: no result is fed back: give --feed, as 'present.*=past_key_values.*'"
            )
        missing = header.whole_inputs.keys() - given.keys() - set(session.feed.values())
        drawn = draw_inputs(directory, seed, header.whole_inputs) if missing else {}
        calls = _Calls.of(header, session.feed, [*prompt])
        first = calls.first({**given, **{name: drawn[name] for name in missing}}, {*given})
        calls.run(session, first, until)
    if outputs is not None:
        tokens = {"tokens": calls.tokens} if calls.made else {}
        write_outputs(outputs, {**calls.outputs, **tokens})
    lines = [*calls.report(), prediction(directory), level_line(files.optimization)]
    return "\n".join(lines)


@dataclass
class _Calls:
    """Calls of a session one after the other."""

    feed: Feed
    grows: bool  #: Whether results that are fed back are longer than the inputs that they become.
    greedy: bool  #: Whether the likeliest token is the next one.
    prompt: list[int]  #: The tokens that are still to be taken.
    made: list[np.ndarray] = field(default_factory=list)  #: Tokens, one for each row of the batch.
    outputs: Arrays = field(default_factory=dict)  #: The outputs of the last call.
    seconds: list[float] = field(default_factory=list)  #: Seconds of each call.

    @classmethod
    def of(cls, header: Header, feed: Feed, prompt: list[int]) -> _Calls:
        """The calls of a model; a RunError if it takes no tokens, or several a call."""
        types, results = header.whole_inputs, header.whole_outputs
        ids = types.get(IDS)
        greedy = ids is not None and LOGITS in results
        if ids is not None and (ids.rank != 2 or ids.shape[1] != 1):
            raise RunError(f"--until: {IDS} is {ids}; plan the model for one token a call, [N, 1]")
        if prompt and not greedy:
            raise RunError(f"--prompt: the model has no input {IDS} and result {LOGITS}")
        pairs = feed.items()
        dims = [grown_dim(f"feed {one}={to}", results[one], types[to]) for one, to in pairs]
        return cls(feed, any(dim is not None for dim in dims), greedy, prompt)

    def first(self, inputs: Arrays, given: set[str]) -> dict[str, np.ndarray]:
        """The inputs of the first call; positions and masks that are not given begin there."""
        first = dict(inputs)
        for name in first.keys() & set(POSITIONS) - given:
            first[name] = np.zeros_like(inputs[name])
        if MASK in first and MASK not in given:
            first[MASK] = self._with_one(np.zeros_like(inputs[MASK]))
        if self.prompt:
            first[IDS] = np.full_like(inputs[IDS], self.prompt.pop(0))
        return first

    def run(self, session: Session, inputs: dict[str, np.ndarray], until: int) -> None:
        """Run the calls until so many tokens are made, or calls done behind the prompt."""
        done = 0
        while done < until:
            begin = time.perf_counter()
            self.outputs = session.run(inputs)
            self.seconds.append(time.perf_counter() - begin)
            inputs = {name: array for name, array in inputs.items() if name not in self._held}
            for name in inputs.keys() & set(POSITIONS):
                inputs[name] = inputs[name] + np.ones_like(inputs[name])
            if MASK in inputs and (self.prompt or done + 1 < until):  # a call follows
                inputs[MASK] = self._with_one(inputs[MASK])
            if self.prompt:
                inputs[IDS] = np.full_like(inputs[IDS], self.prompt.pop(0))
                continue
            done += 1
            if self.greedy:
                self.made.append(self.outputs[LOGITS][:, -1].astype(np.float32).argmax(-1))
                inputs[IDS] = self.made[-1][:, None].astype(inputs[IDS].dtype)

    @property
    def _held(self) -> set[str]:
        return set(self.feed.values())

    @property
    def tokens(self) -> np.ndarray:
        """The tokens that were made, a row for each of the batch."""
        return np.stack(self.made, -1)

    def _with_one(self, mask: np.ndarray) -> np.ndarray:
        if self.grows:
            return np.concatenate([mask[..., 1:], np.ones_like(mask[..., :1])], -1)
        is_first = (mask == 0) & (np.cumsum(mask == 0, -1) == 1)
        if not is_first.any(-1).all():
            raise RunError(f"--until: {MASK} {list(mask.shape)} has no place for one token more")
        return np.where(is_first, np.ones_like(mask), mask)

    def report(self) -> Iterator[str]:
        """Lines on the calls: their time, the tokens, and what stays on the ranks."""
        later = self.seconds[1:] or self.seconds
        each = sum(later) / len(later)
        yield (
            f"measured on this machine: {len(self.seconds)} calls, the first in "
            f"{units.seconds(self.seconds[0])}, the others in {units.seconds(each)} each, "
            f"{units.per_second(1 / each)}"
        )
        if self.made:
            shown = ", ".join(map(str, self.tokens[0, :SHOWN]))
            more = len(self.made) - SHOWN
            yield f"  tokens: {shown}" + (f", and {more} more" if more > 0 else "")
        yield f"  on their ranks: {len(self.feed)} results, inputs of the next call"
        yield from (f"  {name}: {x.dtype}{list(x.shape)}" for name, x in self.outputs.items())

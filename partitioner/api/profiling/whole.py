"""The seconds of a whole model in one process with all cores of the machine."""

from __future__ import annotations

import time

from partitioner.api.profiling.measure import Timing
from partitioner.backends.onnx.measuring import timing
from partitioner.backends.onnx.sessions.whole import whole_runs
from partitioner.cost_model.profiles.database import Profile, whole_entry, whole_key, write_entries
from partitioner.foundations import units
from partitioner.frontends.inputs import random_inputs
from partitioner.frontends.onnx.load import Traced
from partitioner.search.request import Say, silent

#: Runs, and fewest of them: the verdict on a plan hangs on this one entry.
_REPEATS, _LEAST_REPEATS = 30, 3


def whole_seconds(traced: Traced, known: Profile, end_s: float, say: Say = silent) -> float | None:
    """Seconds of a request of an ONNX model in one session, which are added to the profile.

    Known ones are not measured again. There is no measurement, and None, if the fewest runs would
    not be over at `end_s`.

    Args:
        known: The profile of a process with all cores.
        end_s: Time of `time.perf_counter` at which the measurement ends.
        say: Tells that the measurement begins.

    Raises:
        BackendError: ONNX Runtime does not run the model.
    """
    entry = known.wholes.get(whole_key(traced.graph.digest))
    if entry is not None and entry.backend == timing.NAME:
        return entry.seconds
    if time.perf_counter() >= end_s:
        return None
    say("running the whole model in one process")
    inputs = random_inputs(traced.graph, seed=0)
    run = whole_runs(traced.whole, traced.folder, inputs, known.threads)
    runs: list[float] = []
    while len(runs) < _REPEATS:
        begin_s = time.perf_counter()
        if begin_s + max(runs, default=0.0) > end_s:
            break
        run()
        runs.append(time.perf_counter() - begin_s)
    if len(runs) < _LEAST_REPEATS:
        return None
    took = Timing.of(runs)
    entry = whole_entry(traced.graph.digest, *took, timing.NAME, units.now())
    write_entries(known.file, known.device, known.threads, [entry])
    return took.seconds

"""The clock of searches in tests: seconds that their process computes, not those that pass.

A test's search has a few seconds. On a machine that does other things too, it would be stopped
before it has found what the test expects.
"""

import time
from types import SimpleNamespace

from partitioner.solver import work


def count_computed_seconds() -> None:
    """Let the searches of this process be stopped by the seconds that it computes."""
    clock = SimpleNamespace(monotonic=time.process_time)
    work.time = clock  # type: ignore[assignment]

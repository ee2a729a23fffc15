"""ONNX Runtime reports nothing over the network unless the user wants it to."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import os
import partitioner.backends.onnx.sessions.segments
print(len(os.listdir("/proc/self/task")))
"""


def test_importing_the_backend_starts_no_reporting(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("ORT_DISABLE_TELEMETRY", None)
    for name in ("CI", "ORT_RUNNING_UNIT_TESTS"):  # these turn it off as well
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"  # no thread of its own
    assert list(tmp_path.iterdir()) == []  # and no session file

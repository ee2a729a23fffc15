"""The page on restarts: a rank is killed, and torchrun's next life ends with the same losses."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.processes.torch_jobs import ROOT, run_script

# torchrun ends the other rank as soon as it sees the dead one, often before gloo tells that rank,
# or while it is still at the end of step 4: it does not listen, so its own words can be read.
KILLED = """    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def page(language: str) -> str:
    text = (ROOT / "docs/how-to/restart.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"```{language}(?: title=\"[^\"\n]*\")?\n(.*?)```", text, re.DOTALL)
    assert isinstance(block, str)
    return block


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """The page's command, with its variable."""
    folder.mkdir()
    (folder / "resume.py").write_text(script)
    variable, command = page("console").splitlines()
    name, value = variable.removeprefix("export ").split("=")
    return run_script(
        folder, "-m", "torch.distributed.run", *shlex.split(command)[1:], **{name: value}
    )


def losses(out: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss (\S+)", out)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    script = page("python")
    line = "    loss = module(*batch(step))\n"
    assert script.count(line) == 1
    spoilt = "import os\nimport signal\n" + script.replace(line, KILLED + line)
    whole = losses(run(tmp_path / "whole", script).stdout)
    assert [step for step, _ in whole] == list(range(12))
    done = run(tmp_path / "killed", spoilt)
    resumed = losses(done.stdout)
    assert [step for step, _ in resumed] == [*range(5), *range(3, 12)]
    assert dict(resumed) == pytest.approx(dict(whole), abs=1e-6)
    assert "exitcode: -9" in done.stderr
    kept = sorted(path.name for path in (tmp_path / "killed/checkpoints").iterdir())
    assert kept == [f"step-{steps:08}" for steps in (3, 6, 9, 12)]
    if sys.platform == "linux":
        assert "CommunicationError: rank 0: " in done.stderr
        assert ": rank 1 has ended, by an error of its own or killed" in done.stderr

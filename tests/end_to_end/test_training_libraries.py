"""The page on training libraries: Trainer and Accelerate train ranks as one process."""

import re
import shlex
from pathlib import Path

import pytest

from helpers.processes.torch_jobs import ROOT, run_script

PAGE = (ROOT / "docs/how-to/trainer.md").read_text(encoding="utf-8")


def losses(folder: Path, script: str, *command: str) -> list[float]:
    """Run a script of the page in a folder."""
    (text,) = re.findall(rf'```python title="{script}"\n(.*?)```', PAGE, re.DOTALL)
    folder.mkdir()
    (folder / script).write_text(text)
    ran = run_script(folder, *command)
    (line,) = re.findall("^losses (.*)", ran.stdout, re.MULTILINE)
    return [float(loss) for loss in line.split()]


def on_ranks(folder: Path, script: str, parallel: str | None = None) -> list[float]:
    """Run the page's command, or the same with another plan."""
    (command,) = re.findall(rf"^(torchrun .* {script} .*)", PAGE, re.MULTILINE)
    words = shlex.split(command)[1:]
    if parallel is not None:
        words[-1] = parallel
    return losses(folder, script, "-m", "torch.distributed.run", *words)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer(tmp_path: Path) -> None:
    one = losses(tmp_path / "one", "train.py", "train.py")
    assert len(one) == 10
    assert on_ranks(tmp_path / "tp", "train.py") == pytest.approx(one, abs=1e-5)
    assert on_ranks(tmp_path / "pp", "train.py", "pp") == pytest.approx(one, abs=1e-5)
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    saved = [load(tmp_path / name / "out/model.safetensors") for name in ("one", "tp", "pp")]
    for other in saved[1:]:
        torch.testing.assert_close(other, saved[0], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accelerate(tmp_path: Path) -> None:
    one = losses(tmp_path / "one", "accelerated.py", "accelerated.py")
    assert len(one) == 10
    assert on_ranks(tmp_path / "zero3", "accelerated.py") == pytest.approx(one, abs=1e-6)

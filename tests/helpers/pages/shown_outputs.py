"""The outputs that pages of the documentation show below their commands, run again.

A page shows an output in a block that is marked so, behind the block with its command:

    ```console
    partition show llama.partition
    ```

    ```text title="Output"
    llama: 124 nodes on 4xh100, 4 devices
    ...
    ```

A last line `...` says that the rest is left out. All console blocks of such a page run in order,
in a folder of their own, up to the last one with an output. A block whose title is the name of a
file is written there first.
To write the outputs of all pages anew, or of those named:

    python tests/helpers/pages/shown_outputs.py [docs/tutorial.md ...]
"""

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import partitioner
from partitioner.cli.main import main as partition

os.environ["PARTITIONER_CACHE"] = "off"  # outputs are those of a first run
ROOT = Path(partitioner.__file__).resolve().parents[1]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
REST = "..."
#: Seconds of a search and of a run on this machine, and digests of graphs.
VARYING = re.compile(
    r"(?<=seed \d, )[\d.,]+ m?s\b"
    r"|(?<=requests in )[\d.,]+ m?s, [\d.,]+(?=/s\b)"
    r"|(?<=the first in )[\d.,]+ m?s, the others in [\d.,]+ m?s each, [\d.,]+(?=/s\b)"
    r"|\b[0-9a-f]{12}(?=\.\.\.)"
)


@dataclass(frozen=True)
class Shown:
    """A command of a page with the output shown below it, which stands at `start` to `end`."""

    command: str
    output: str
    start: int
    end: int


def shown(text: str) -> list[Shown]:
    """All commands of a page in order; `output` is "" where none is shown."""
    commands: list[Shown] = []
    for block in BLOCK.finditer(text):
        language, title, content = block.groups()
        if language == "console":
            lines = [line for line in content.splitlines() if shlex.split(line, comments=True)]
            commands += [Shown(line, "", 0, 0) for line in lines]
        elif title == "Output":
            commands[-1] = Shown(commands[-1].command, content, block.start(3), block.end(3))
    return commands


def write_files(text: str, folder: Path) -> None:
    """Write the files that a page shows, those blocks that have the name of a file as title."""
    for _, title, content in BLOCK.findall(text):
        if "." in title:
            (folder / title).write_text(content, encoding="utf-8")


def words_of(command: str) -> tuple[dict[str, str], list[str]]:
    """The variables of its environment that a command begins with, and its words."""
    words = shlex.split(command, comments=True)
    given = [*itertools.takewhile(re.compile(r"\w+=").match, words)]
    return dict(one.split("=", 1) for one in given), words[len(given) :]


def start(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The result of a command with python or torchrun, with the packages of the repository."""
    variables, (program, *arguments) = words_of(command)
    launcher = {"python": [], "torchrun": ["-m", "torch.distributed.run", "--standalone"]}
    return subprocess.run(
        [sys.executable, *launcher[program], *arguments],
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "LOGLEVEL": "ERROR",  # torchrun warns of its own late signs of life on a busy machine
            "PYTHONPATH": str(ROOT),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def run(command: str, folder: Path) -> str:
    """What a command prints in `folder`: its result and, if it fails, its error."""
    variables, words = words_of(command)
    if words[0] == "cp":
        shutil.copy(folder / words[1], folder / words[2])
        return ""
    if words[0] == "partition":
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(folder),
            mock.patch.dict(os.environ, variables),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = partition(words[1:])
        printed, errors = out.getvalue(), err.getvalue()
    else:
        done = start(command, folder)
        assert done.returncode == 0, done.stderr  # no page shows a script that fails
        code, printed, errors = 0, done.stdout, ""
    if code == 0:
        return printed
    # The progress of the search ends each line with dots; an error does not.
    return printed + "".join(
        f"{line}\n" for line in errors.splitlines() if not line.endswith(" ...")
    )


def comparable(text: str) -> str:
    """The text with a `#` in place of what differs from run to run, or with every change."""
    return "\n".join(line.rstrip() for line in VARYING.sub("#", text).splitlines())


def expected(output: str, printed: str) -> str:
    """The part of what was printed that the page shows, in the page's form."""
    lines = output.splitlines()
    if lines and lines[-1] == REST:
        printed_lines = printed.splitlines()[: len(lines) - 1]
        return "".join(f"{line.rstrip()}\n" for line in [*printed_lines, REST])
    return "".join(f"{line.rstrip()}\n" for line in printed.splitlines())


def renewed(page: Path, folder: Path) -> str:
    """The text of a page with the outputs that its commands print now."""
    text = page.read_text(encoding="utf-8")
    write_files(text, folder)
    parts: list[str] = []
    last = 0
    items = shown(text)
    while items and not items[-1].output:
        items.pop()
    for item in items:
        printed = run(item.command, folder)
        if not item.output:
            continue
        new = expected(item.output, printed)
        same = comparable(new) == comparable(item.output)
        parts += [text[last : item.start], item.output if same else new]
        last = item.end
    return "".join(parts) + text[last:]


def pages() -> list[Path]:
    """All pages that show an output."""
    return [
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if any(item.output for item in shown(path.read_text(encoding="utf-8")))
    ]


def main() -> None:
    for page in [Path(name) for name in sys.argv[1:]] or pages():
        with tempfile.TemporaryDirectory() as folder:
            page.write_text(renewed(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()

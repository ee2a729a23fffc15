"""Two machines on this one: network namespaces, with a slow link between them. Linux, as root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
#: Of torchrun's store; each pair of machines has ports of its own.
PORT = 29500


CLUSTER = """\
[[devices]]
count = {devices}
name = "core"
memory_bytes = "4GB"
memory_bytes_per_s = 5e9
launch_s = 5e-6
peak_flops_per_s = {{ float32 = 30e9 }}

{machine}[[levels]]
name = "link"
bandwidth_bytes_per_s = {link}
latency_s = 100e-6
"""
MACHINE = """\
[[levels]]
name = "machine"
size = {processes}
bandwidth_bytes_per_s = 2e9
latency_s = 50e-6

"""


def cluster_of(processes: int, bytes_per_s: float) -> str:
    """A cluster file of two machines, which have as many processes each."""
    machine = MACHINE.format(processes=processes) if processes > 1 else ""
    return CLUSTER.format(devices=2 * processes, machine=machine, link=bytes_per_s)


class NotPermittedError(Exception):
    """This process may not make network namespaces."""


@dataclass(frozen=True)
class TwoMachines:
    """Two machines with a link between them.

    Attributes:
        spaces: Their network namespaces.
        links: Their interfaces on the link.
    """

    spaces: tuple[str, str]
    links: tuple[str, str]

    @staticmethod
    def address(machine: int) -> str:
        """Its address on the link."""
        return f"10.213.7.{machine + 1}"

    def start(
        self, machine: int, script: Path, arguments: Sequence[str], processes: int, folder: Path
    ) -> subprocess.Popen[str]:
        """Start torchrun on a machine, whose processes see none of the other one's."""
        here = ["ip", "netns", "exec", self.spaces[machine]]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        torchrun += ["--node-rank", str(machine), "--nproc-per-node", str(processes)]
        torchrun += ["--master-addr", self.address(0), "--master-port", str(PORT)]
        return subprocess.Popen(
            [*here, *apart, *torchrun, str(script), *arguments],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in (".", "tests")),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": self.links[machine],
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        script: Path,
        arguments: Sequence[str],
        processes: int,
        folder: Path,
        *,
        limit_s: float,
        breaks: Path | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a script on all processes of both machines.

        Args:
            breaks: File whose existence breaks the link.
        """
        torchruns = [self.start(n, script, arguments, processes, folder) for n in range(2)]
        until = time.monotonic() + limit_s
        try:
            while breaks is not None and any(p.poll() is None for p in torchruns):
                if breaks.exists():
                    self.set_link("down")
                    break
                if time.monotonic() > until:
                    break
                time.sleep(0.02)
            ended = []
            for one in torchruns:
                out, err = one.communicate(timeout=max(1.0, until - time.monotonic()))
                ended.append(subprocess.CompletedProcess(one.args, one.returncode, out, err))
            return ended
        finally:
            for one in torchruns:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)  # unshare's child dies with it
                one.__exit__(None, None, None)  # closes its pipes and waits

    def set_link(self, state: str) -> None:
        """Set the link "up" or "down", on both sides."""
        for space, link in zip(self.spaces, self.links, strict=True):
            _ip("-n", space, "link", "set", link, state)


@contextmanager
def two_machines(bytes_per_s: float) -> Iterator[TwoMachines]:
    """Two machines; both directions of their link have this rate.

    Raises:
        NotPermittedError: It needs root, and the commands ip, tc and unshare.
    """
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing or os.geteuid():
        raise NotPermittedError(f"it needs {', '.join(missing) or 'root'}")
    own = f"part{os.getpid() % 100_000}"
    machines = TwoMachines((f"{own}a", f"{own}b"), (f"{own}x", f"{own}y"))
    try:
        try:
            for space in machines.spaces:
                _ip("netns", "add", space)
        except subprocess.CalledProcessError as error:
            raise NotPermittedError(error.stderr.strip()) from error
        _connect(machines, bytes_per_s)
        yield machines
    finally:
        for space in machines.spaces:  # with their interfaces
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _connect(machines: TwoMachines, bytes_per_s: float) -> None:
    (one, other), (link, peer) = machines.spaces, machines.links
    _ip("link", "add", link, "netns", one, "type", "veth", "peer", "name", peer, "netns", other)
    for number, (space, name) in enumerate(zip(machines.spaces, machines.links, strict=True)):
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "address", "add", f"{machines.address(number)}/24", "dev", name)
        _ip("-n", space, "link", "set", name, "up")
        rate = ["rate", f"{bytes_per_s * 8:.0f}bit", "burst", "64kb", "latency", "400ms"]
        _run("tc", "-n", space, "qdisc", "add", "dev", name, "root", "tbf", *rate)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)

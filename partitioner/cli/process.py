"""The process of a command: interrupts, and streams and limits of the system that stop it.

Whatever stops a command from outside is one line on stderr and an exit code. So the standard
streams are there before anything is read, and an interrupt is remembered: libraries turn it into
errors of their own while they are imported, or drop it.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

INTERRUPTED = 130
#: Seconds after which an interrupt that was dropped is sent again.
_AGAIN_S = 0.02
#: Errors of streams that cannot be written, and of limits of the system.
_OF_STREAMS = (errno.EBADF, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


def say(line: str) -> None:
    """Print a line on stderr, if that can be written."""
    with suppress(OSError):
        print(f"partition: {line}", file=sys.stderr, flush=True)


def interrupted() -> int:
    """Say that the command was interrupted; the exit code."""
    say("interrupted")
    return INTERRUPTED


def open_streams() -> None:
    """Open standard streams that are closed: another file would get their number.

    What is written to stdout then fails when it is flushed, as on a full disk.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, flags)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8")
    if sys.stderr is None:
        sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), "utf-8")


class Interrupts:
    """Interrupts of this process since it began to look at them."""

    def __init__(self) -> None:
        self.came = False
        self._is_sent_again = False
        self._timer: threading.Timer | None = None

    def note(self, _: int, frame: FrameType | None) -> None:
        """Note one, as the handler of SIGINT.

        One that comes during an import is raised when the import has ended: C++ that imports from
        Python, as PyTorch's does, aborts the process for an exception. A second one is raised.
        """
        waits = _is_import(frame) and (self._is_sent_again or not self.came)
        self.came, self._is_sent_again = True, False
        self.forget()
        if not waits:
            raise KeyboardInterrupt
        self._send_soon()

    def forget(self) -> None:
        """Send none again."""
        if self._timer is not None:
            self._timer.cancel()

    def _send_soon(self) -> None:
        self._timer = threading.Timer(_AGAIN_S, self._send)
        self._timer.start()

    def _send(self) -> None:
        self._is_sent_again = True
        os.kill(os.getpid(), signal.SIGINT)

    def dropped(self, unraisable: Any) -> None:
        """Send one again that was raised where Python cannot pass it on, as `sys.unraisablehook`.

        It comes a moment later, when the code that dropped it has ended.
        """
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._send_soon()
        elif not self.came:  # else it is of code that was interrupted
            sys.__unraisablehook__(unraisable)


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def noting_interrupts() -> Iterator[Interrupts]:
    """Note interrupts within, if they are ours to note; after it, one ends the process at once."""
    interrupts = Interrupts()
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    sys.unraisablehook = interrupts.dropped
    try:
        yield interrupts
    finally:
        interrupts.forget()
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def with_streams(run: Callable[[], int]) -> int:
    """The exit code of a command that writes to stdout; 1, with a line, where the system stops it.

    A reader of a pipe that has enough is no error to speak of.
    """
    try:
        code = run()
        sys.stdout.flush()  # here, where a closed pipe is caught
    except BrokenPipeError:
        _give_up_streams()
        return 1
    except Exception as error:
        line = _stopped_by(error)
        if not line:
            raise
        say(line)
        _give_up_streams()
        return 1
    return code


def _stopped_by(error: BaseException) -> str:
    """A line on an error that comes from a stream or a limit of the system; else ""."""
    if isinstance(error, OSError) and error.filename is None and error.errno in _OF_STREAMS:
        return f"the output cannot be written: {error.strerror}"
    if isinstance(error, MemoryError):
        return "out of memory"
    too_many = os.strerror(errno.EMFILE)
    cause: BaseException | None = error
    while cause is not None:
        if too_many in str(cause):
            import resource

            least, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            return f"{too_many}: {least} are allowed; raise it with `ulimit -n`"
        if isinstance(cause, OSError) and cause.errno in _OF_LIMITS:
            return str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return ""


def _give_up_streams() -> None:
    """Let what is left in the streams go nowhere: Python would fail to write it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)

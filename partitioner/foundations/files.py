"""Files that are read within limits; files and folders that are written whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from partitioner.ir.errors import PartitionerError

#: Most bytes of a file of text, such as a plan, a cluster or constraints.
MOST_TEXT = 2**28
_NAME_CHARACTERS = 40  #: Of a place's name in the names of its drafts.
_NOT_REGULAR = "not a regular file"


class FileError(PartitionerError, ValueError):
    """A file that cannot be written."""


class DirectoryError(PartitionerError, ValueError):
    """A folder that cannot be written, or whose files do not belong together."""


class ResultError(PartitionerError, ValueError):
    """A folder that is no saved compilation, or a compilation that lacks what a call needs."""


def cache_folder() -> Path:
    """Our folder in the user's cache, which need not exist; a RuntimeError without a home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "partitioner"


def open_file(path: Path, most: int | None = None) -> BinaryIO:
    """Open a regular file, or a link to one, of at most `most` bytes; else an OSError says why.

    A FIFO would wait for a writer, a device may never end and may act when it is opened: what is no
    regular file is refused unopened, or, if it was put there in between, unread. A ValueError is of
    a name that no file can have.
    """
    _check_regular(path, path.stat(), most)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(descriptor), most)
        os.read(descriptor, 1)  # a file of /proc may wait for the kernel: BlockingIOError
        os.lseek(descriptor, 0, os.SEEK_SET)
        return os.fdopen(descriptor, "rb")
    except BlockingIOError:
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path)) from None
    except OSError:
        os.close(descriptor)
        raise


def _check_regular(path: Path, status: os.stat_result, most: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {most}", str(path))


def read_file(path: Path, most: int = MOST_TEXT) -> bytes:
    """Read a regular file of at most so many bytes; errors as of `open_file`."""
    with open_file(path, most) as file:
        data = file.read(most + 1)  # files of /proc say that they have no bytes
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return data


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Read a regular file of UTF-8 text, else a ValueError; line ends become newlines."""
    text = read_file(path, most).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_file(path: Path, data: bytes) -> None:
    """Write a file in one step (`write_files`): an existing one is replaced, a link stays one."""
    write_files({path: data})


def write_files(contents: Mapping[Path, bytes | Path]) -> None:
    """Write files, bytes or copies, in this order once all are complete, or raise a FileError."""
    drafts: dict[Path, Path] = {}
    path = Path()
    try:
        with ExitStack() as stack:
            for path, content in contents.items():
                check_file(path)
                drafts[path] = stack.enter_context(draft_file(_final(path)))
                if isinstance(content, Path):
                    shutil.copyfile(content, drafts[path])
                else:
                    drafts[path].write_bytes(content)
            for path, draft in drafts.items():
                draft.chmod(0o666 & ~umask())
                draft.replace(_final(path))
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}") from None


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _refusing(error: type[FileError | DirectoryError], path: Path) -> Iterator[None]:
    """Turn errors of the operating system, and names that no file can have, into refusals."""
    try:
        yield
    except (FileError, DirectoryError):
        raise
    except OSError as reason:
        raise error(f"cannot write {path}: {reason.strerror or reason}") from None
    except ValueError as reason:
        raise error(f"cannot write {path}: {reason}") from None


def check_file(path: Path) -> None:
    """Refuse early what `write_file` would refuse, as a FileError."""
    with _refusing(FileError, path):
        final = _final(path)
        if final.is_symlink():
            raise FileError(f"cannot write {path}: it is a link that leads to itself")
        folder = final.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise FileError(f"cannot write {path}: there is no folder {folder}")
        try:
            final.lstat()
        except FileNotFoundError:
            pass
        else:
            if not final.is_file():
                raise FileError(f"cannot write {path}: it is there and is not a file")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise FileError(f"cannot write {path}: the folder {folder} is not writable")


def check_no_link(path: Path) -> None:
    """Refuse, as a FileError, a link in a saved folder: what is written would go elsewhere."""
    if path.is_symlink():
        raise FileError(f"cannot write {path}: it is a link; remove it, or name another file")


def _final(path: Path) -> Path:
    """The path with all links followed; the file need not exist."""
    return Path(os.path.realpath(path))


def refuse_to_replace(source: Path, path: Path) -> None:
    """Refuse, as a FileError, to replace the model that a result was made from."""
    try:
        same = path.samefile(source)
    except (OSError, ValueError):  # one of them does not exist
        return
    if same:
        raise FileError(f"cannot write {path}: it is the model itself; name another file")


def replace_directory(
    target: Path,
    write: Callable[[Path], None],
    *,
    force: bool,
    ours: Callable[[str], bool] = lambda _: True,
) -> None:
    """Let `write` fill a new folder beside `target`, then put it in place, or leave nothing.

    An existing folder is replaced with `force`; files in it whose names are not `ours` are kept.
    """
    check_target(target, force=force)
    with ExitStack() as stack:
        with _refusing(DirectoryError, target):
            draft = stack.enter_context(draft_folder(target))
        try:
            draft.chmod(0o755)
            write(draft)
            _swap(draft, target, ours)
        except OSError as error:
            raise DirectoryError(f"cannot write {target}: {error.strerror or error}") from None


def check_target(target: Path, *, force: bool) -> None:
    """Refuse early what `replace_directory` would; only empty folders and plans are replaced."""
    with _refusing(DirectoryError, target):
        if not target.parent.is_dir():
            raise DirectoryError(f"cannot write {target}: there is no folder {target.parent}")
        if not target.exists():
            return
        if not target.is_dir() or target.is_symlink():
            raise DirectoryError(f"cannot write {target}: it is there and is not a folder")
        if not force:
            raise DirectoryError(
                f"{target} is there already; pass --force (Python: force=True) to replace it, "
                "or name another folder"
            )
        if any(target.iterdir()) and not (target / "plan.json").is_file():
            raise DirectoryError(f"{target} holds something else than a plan; it is not replaced")


def _swap(draft: Path, target: Path, ours: Callable[[str], bool]) -> None:
    if not target.exists():
        draft.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    was = old / "was"
    try:
        target.rename(was)
        draft.rename(target)
        for entry in sorted(was.iterdir()):  # what this program did not write is kept
            if not ours(entry.name) and not os.path.lexists(target / entry.name):
                entry.rename(target / entry.name)
    except OSError:
        if not target.exists() and was.exists():
            was.rename(target)
        if was.exists():
            raise DirectoryError(
                f"{target} is written, but files of the old one could not be moved there; "
                f"they are in {was}"
            ) from None
        old.rmdir()
        raise
    with draft_folder(target) as trash:
        was.rename(trash / "was")
    old.rmdir()


@contextmanager
def draft_file(place: Path) -> Iterator[Path]:
    """An empty file beside `place` or an OSError; it is removed at the end unless moved away."""

    def make(prefix: str) -> str:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=place.parent)
        os.close(handle)
        return name

    with _draft(place, make) as path:
        yield path


@contextmanager
def draft_folder(place: Path) -> Iterator[Path]:
    """An empty folder beside `place` or an OSError; it is removed at the end unless moved away."""
    with _draft(place, lambda prefix: tempfile.mkdtemp(prefix=prefix, dir=place.parent)) as path:
        yield path


@contextmanager
def _draft(place: Path, make: Callable[[str], str]) -> Iterator[Path]:
    """A draft, locked while its process lives: a later run tells and removes abandoned ones."""
    _remove_abandoned(place)
    while True:
        path = Path(make(_prefix(place)))
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another process may remove one before it is locked
            continue
        if _lock(lock) is not False and path.exists():
            break
        os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _prefix(place: Path) -> str:
    return f".{place.name[:_NAME_CHARACTERS]}.draft-"


def _remove_abandoned(place: Path) -> None:
    if not os.access(place.parent, os.R_OK):
        return
    pattern = re.compile(re.escape(_prefix(place)) + "[a-z0-9_]{8}")
    for path in list(place.parent.iterdir()):
        if not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:  # gone, or somebody else's
            continue
        if _lock(lock):
            _remove(path)
        os.close(lock)


def _lock(handle: int) -> bool | None:
    """Take the lock: False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

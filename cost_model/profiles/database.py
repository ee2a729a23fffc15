"""Profiles: measured seconds of operators and communications, kept in one SQLite file.

An entry is of a device (its fingerprint), a number of threads, a number of processes that were busy
at once, a backend with its version, and a form, or a whole model in place of the form; one of a
link is of a kind of communication, a number of ranks and bytes. The file may be written to by
several processes at once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from partitioner.cost_model.errors import CostError
from partitioner.cost_model.profiles.entries import Entry, Estimate, LinkEntry, LinkTable
from partitioner.cost_model.profiles.fit import Fit
from partitioner.cost_model.profiles.forms import Form
from partitioner.foundations.files import cache_folder
from partitioner.ir.program import JOINING, CommKind

#: Marks a file as a profile in SQLite's header ("pprf").
_APPLICATION_ID = 0x70707266
_SCHEMA_VERSION = 2
_WAIT_S = 60.0  #: For other writers.
#: The tables: the type of their rows, and what tells rows of one device from each other.
_TABLES: Mapping[str, tuple[type[Entry | LinkEntry], str]] = {
    "entries": (Entry, "threads, processes, backend, form"),
    "links": (LinkEntry, "threads, backend, kind, ranks, nbytes"),
}
_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL"}
_SELECT_CONTENTS = """
SELECT device, threads, processes, backend, count(*) AS forms
FROM entries WHERE op != ? GROUP BY device, threads, processes, backend
ORDER BY forms DESC, device, threads, processes, backend
"""
#: `Entry.op` of a whole model.
_WHOLE = "whole model"


def default_profile() -> Path:
    """The profile in the user's cache folder, which need not exist."""
    return cache_folder() / "profile.sqlite"


def beside(kind: str) -> str:
    """The kind of the entries of communications that pass beside compute."""
    return f"{kind} beside"


def beside_as(kind: CommKind) -> CommKind:
    """The kind whose share of hidden seconds a kind has: messages and exchanges have one."""
    return kind if kind in JOINING else CommKind.SEND


def in_groups(kind: str, each: int) -> str:
    """The kind of communications of `each` ranks in every group of the level below.

    >>> in_groups("all_reduce", 2)
    'all_reduce of 2 a group'
    """
    return kind if each == 1 else f"{kind}{_EACH}{each} a group"


def over(kind: str, level: str) -> str:
    """The kind of the entries of communications over a level; "" is the innermost.

    >>> over("all_reduce of 2 a group beside", "network")
    'all_reduce of 2 a group beside over network'
    """
    return f"{kind}{_OVER}{level}" if level else kind


_OVER, _EACH = " over ", " of "
#: The kind of the entry of a border between two sessions; its bytes are 0.
BORDER = "border"


@dataclass(frozen=True)
class Profile:
    """The entries of one device at one number of threads."""

    file: Path  #: The SQLite file.
    device: str  #: Fingerprint of the device.
    threads: int  #: Threads of one operator.
    processes: int  #: Number of processes that share the device's machine.
    #: The newest entry of each form, by the number of processes that were busy.
    known: Mapping[int, Mapping[str, Entry]] = field(repr=False, hash=False)
    #: The newest entries of communications over the level, by kind and number of ranks, in order of
    #: bytes.
    links: Mapping[tuple[str, int], tuple[LinkEntry, ...]] = field(
        default_factory=dict, repr=False, hash=False
    )
    #: The newest entry of each whole model that one process ran alone, by `whole_key`.
    wholes: Mapping[str, Entry] = field(default_factory=dict, repr=False, hash=False)
    level: str = ""  #: Name of the level of the network; "" for the innermost, and of a device.
    #: The newest entry of a border between two sessions, which communications have.
    border: LinkEntry | None = field(default=None, repr=False, hash=False)

    @classmethod
    def read(
        cls, file: Path, device: str, threads: int, processes: int = 1, level: str = ""
    ) -> Profile:
        """The entries in a file; none if there is no such file.

        Raises:
            CostError: The file is no profile.
        """
        known: dict[int, dict[str, Entry]] = {}
        wholes: dict[str, Entry] = {}
        links: dict[tuple[str, int], dict[int, LinkEntry]] = {}
        border: LinkEntry | None = None
        if _is_begun(file):
            with _opened(file) as database:
                for row in database.execute(_selecting("entries"), (device, threads)):
                    entry = Entry(*row)
                    if entry.op == _WHOLE:
                        wholes[entry.form] = entry
                    else:
                        known.setdefault(entry.processes, {})[entry.form] = entry
                for row in database.execute(_selecting("links"), (device, threads)):
                    link = LinkEntry(*row)
                    kind, _, where = link.kind.partition(_OVER)
                    if kind == BORDER:
                        border = link if link.ranks == processes else border
                    elif where == level:
                        links.setdefault((kind, link.ranks), {})[link.nbytes] = link
        tables = {
            key: tuple(by_size[size] for size in sorted(by_size)) for key, by_size in links.items()
        }
        return cls(file, device, threads, processes, known, tables, wholes, level, border)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The newest entry of each form with as many processes busy as there are."""
        return self.known.get(self.processes, {})

    def beside(self, processes: int) -> Profile:
        """The profile of a plan that keeps so many processes busy, if that was measured."""
        if processes == self.processes or processes not in self.known:
            return self
        if processes not in self._beside:
            self._beside[processes] = replace(self, processes=processes)
        return self._beside[processes]

    @cached_property
    def _beside(self) -> dict[int, Profile]:
        """The profiles of `beside`: each fits its entries once."""
        return {}

    @property
    def crowded(self) -> Profile:
        """The profile for any plan of a machine whose processes are all busy."""
        return replace(self, known={self.processes: self.entries})

    def hidden_share(self, kind: CommKind, ranks: int) -> float | None:
        """Share of the seconds of communications of a kind that compute hides; None if not known.

        Where none of the kind was measured in both ways, the share of all kinds.
        """
        shares = self._hidden_shares
        return shares.get((beside_as(kind), ranks), shares.get((None, ranks)))

    @cached_property
    def _hidden_shares(self) -> Mapping[tuple[CommKind | None, int], float]:
        at_once_s: dict[tuple[CommKind | None, int], float] = {}
        beside_s: dict[tuple[CommKind | None, int], float] = {}
        for (kind, ranks), entries in self.links.items():
            later = {entry.nbytes: entry for entry in self.links.get((beside(kind), ranks), ())}
            both = [(entry, later[entry.nbytes]) for entry in entries if entry.nbytes in later]
            for entry, other in both:
                least_s = min(entry.seconds, other.seconds)
                for key in ((beside_as(CommKind(kind.partition(_EACH)[0])), ranks), (None, ranks)):
                    at_once_s[key] = at_once_s.get(key, 0.0) + entry.seconds
                    beside_s[key] = beside_s.get(key, 0.0) + least_s
        return {key: 1 - beside_s[key] / whole for key, whole in at_once_s.items() if whole}

    def link_seconds(self, kind: str, ranks: int, nbytes: float, each: int = 1) -> float | None:
        """Seconds over the level, of `each` ranks in each group below; None if not known."""
        return self._link_table.seconds(in_groups(kind, each), ranks, nbytes)

    @property
    def link_sizes(self) -> frozenset[float]:
        """Bytes at which communications over the level are measured."""
        return self._link_table.sizes

    @cached_property
    def _link_table(self) -> LinkTable:
        points: dict[tuple[str, int], tuple[tuple[float, float], ...]] = {}
        for key, entries in self.links.items():
            # What else the machine does makes measurements longer, never shorter: one that is
            # longer than that of more bytes is wrong.
            seconds = itertools.accumulate((entry.seconds for entry in reversed(entries)), min)
            sizes = [entry.nbytes for entry in reversed(entries)]
            points[key] = tuple(zip(sizes, seconds, strict=True))[::-1]
        return LinkTable(points)

    def estimate(self, form: Form, dtype: str, flops: float, moved_bytes: int) -> Estimate | None:
        """Seconds of a form: its own entry, else a fit over entries like it, else None.

        A form behind others, or of transposed operands, takes what is known of it there, then less
        exactly. One that computes and moves nothing takes the median of such ones.
        """
        for one in dict.fromkeys((form, form.alone, form.dense, form.alone.dense)):
            entry = self.entries.get(one.key)
            if entry is not None:
                return Estimate(entry.seconds, "measured", entry.spread)
        if not flops and not moved_bytes:
            return self._call
        return self._fit.estimate(form, dtype, flops, moved_bytes) if self._fit else None

    @cached_property
    def _call(self) -> Estimate | None:
        """Seconds of what computes and moves nothing, by all such entries; None for none."""
        seconds = sorted(entry.seconds for entry in self.entries.values() if not _works(entry))
        if not seconds:
            return None
        median = statistics.median(seconds)
        return Estimate(median, "fitted", (seconds[-1] - seconds[0]) / 2 / median)

    @cached_property
    def _fit(self) -> Fit | None:
        entries = tuple(filter(_works, self.entries.values()))
        return Fit(entries) if entries else None


def _works(entry: Entry) -> bool:
    return bool(entry.flops or entry.moved_bytes)


def whole_key(digest: str) -> str:
    """The key of a whole model's entry, by the digest of its graph."""
    return f"{_WHOLE} {digest}"


def whole_entry(
    digest: str, seconds: float, spread: float, repeats: int, backend: str, measured_at: str
) -> Entry:
    """The entry of a model's request that one process ran alone, in one session."""
    key = whole_key(digest)
    return Entry(key, _WHOLE, "", 0.0, 0, seconds, spread, repeats, backend, measured_at)


def write_entries(
    file: Path, device: str, threads: int, entries: Sequence[Entry | LinkEntry]
) -> None:
    """Add measurements to a profile, which is made if it is not there; newer ones replace older.

    Raises:
        CostError: The file is something else, or cannot be written.
    """
    check_folder(file)
    with _opened(file, write=True) as database, database:
        for table, (kind, _) in _TABLES.items():
            rows = [(device, threads, *astuple(one)) for one in entries if isinstance(one, kind)]
            names = "device", "threads", *(column.name for column in fields(kind))
            listed = f"({', '.join(names)}) VALUES ({', '.join('?' for _ in names)})"
            database.executemany(f"INSERT OR REPLACE INTO {table} {listed}", rows)


def _selecting(table: str) -> str:
    columns = f"SELECT {', '.join(column.name for column in fields(_TABLES[table][0]))}"
    return f"{columns} FROM {table} WHERE device = ? AND threads = ? ORDER BY measured_at"


def check_writable(file: Path) -> None:
    """Check, before something is measured, that entries can be added to a file."""
    check_folder(file)
    if _is_begun(file):
        with _opened(file):
            pass
    if not os.access(file if _exists(file) else file.parent, os.W_OK):
        raise CostError(f"profile {file}: it cannot be written")


def check_folder(file: Path) -> None:
    """Check that the folder of a profile exists; that of the default profile is made."""
    with _naming(file):
        if file == default_profile():
            file.parent.mkdir(parents=True, exist_ok=True)
        has_folder = file.parent.is_dir()
    if not has_folder:
        raise CostError(f"profile {file}: there is no folder {file.parent}")


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Raise that no file can have a name, or that its folder cannot be read, as a `CostError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise CostError(f"profile {file}: {getattr(error, 'strerror', None) or error}") from None


@contextlib.contextmanager
def _opened(file: Path, *, write: bool = False) -> Iterator[sqlite3.Connection]:
    if _exists(file) and not file.is_file():
        raise CostError(f"profile {file}: it is not a file")
    mode = "rwc" if write else "ro"
    try:
        uri = f"file:{quote(str(file.absolute()))}?mode={mode}"
        with contextlib.closing(sqlite3.connect(uri, timeout=_WAIT_S, uri=True)) as database:
            if write:  # another process may make the tables at once
                with database:
                    database.execute("BEGIN IMMEDIATE")
                    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                    if not tables:
                        _make_tables(database)
            _check(database, file)
            yield database
    except sqlite3.Error as error:
        raise CostError(f"profile {file}: {error}") from None


def _exists(file: Path) -> bool:
    with _naming(file):
        return file.exists()


def _is_begun(file: Path) -> bool:
    """Test whether a file holds something: one just made, as by `touch`, is a new profile."""
    return _exists(file) and not (file.is_file() and file.stat().st_size == 0)


def _make_tables(database: sqlite3.Connection) -> None:
    for table, (kind, key) in _TABLES.items():
        types = {"device": "TEXT", "threads": "INTEGER"}
        types |= {column.name: _TYPES[str(column.type)] for column in fields(kind)}
        columns = ", ".join(f"{name} {type_} NOT NULL" for name, type_ in types.items())
        database.execute(
            f"CREATE TABLE {table} ({columns}, PRIMARY KEY (device, {key})) WITHOUT ROWID"
        )
    database.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")


def _check(database: sqlite3.Connection, file: Path) -> None:
    (mark,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if mark != _APPLICATION_ID:
        raise CostError(f"profile {file}: it is a database of another program; name another file")
    views = database.execute("SELECT name FROM sqlite_master WHERE type NOT IN ('table', 'index')")
    columns = [
        column for table in _TABLES for column in database.execute(f"PRAGMA table_xinfo({table})")
    ]
    # A view or a computed column runs for as long as its writer likes, whenever it is read.
    if views.fetchone() is not None or any(hidden for *_, hidden in columns):
        raise CostError(f"profile {file}: it holds more than tables of numbers; name another file")
    if version != _SCHEMA_VERSION:
        raise CostError(
            f"profile {file}: it has version {version}, this is version {_SCHEMA_VERSION}; "
            "name another file"
        )


@dataclass(frozen=True)
class Contents:
    """The forms in a profile that one backend measured on one device."""

    device: str  #: Fingerprint of the device.
    threads: int  #: Threads of one operator.
    processes: int  #: Number of processes that were busy.
    backend: str  #: What ran them, with its version.
    forms: int  #: Number of forms.

    def __str__(self) -> str:
        """In words: "12 forms of onnxruntime 1.31.1 on AMD EPYC, 2 processes x 1 thread"."""
        forms = f"{self.forms} form{'s' if self.forms > 1 else ''}"
        return f"{forms} of {self.backend} on {self.device}, {shares(self.processes, self.threads)}"


def shares(processes: int, threads: int) -> str:
    """The share of a machine that a process has, in words: "2 processes x 1 thread"."""
    count = f"{processes} process{'es' if processes > 1 else ''}"
    return f"{count} x {threads} thread{'s' if threads > 1 else ''}"


def read_contents(file: Path) -> tuple[Contents, ...]:
    """The contents of a file, most forms first; nothing if there is no such file."""
    if not _is_begun(file):
        return ()
    with _opened(file) as database:
        return tuple(Contents(*row) for row in database.execute(_SELECT_CONTENTS, (_WHOLE,)))

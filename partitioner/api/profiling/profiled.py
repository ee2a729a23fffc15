"""What `profile` measured, and what it had no time for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from partitioner.foundations import units

#: Share of the time of the cores from which other processes are said to have taken them.
BUSY = 0.1
#: Spread from which a form's seconds are not stable; see `Timing`.
UNSTABLE = 0.1
#: If reading the model takes more than this share of the time limit, a note says so.
_SLOW_READING = 1 / 2


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """The measurements that `profile` made; printed, a few lines.

    Attributes:
        file: The profile.
        device: Fingerprint of the device that the measurements count for.
        machine: Fingerprint of the device that they were made on: a cluster file may name another
            processor.
        threads: Threads of one operator.
        backend: What ran the operators, with its version; "none" if communications alone are
            measured.
        forms: Number of forms that a search could choose.
        measured: Number of forms measured now.
        known: Number of forms that the profile had before.
        links: Number of communications (kind, number of ranks, bytes) measured now.
        unknown_links: Number of those that no time was left to measure.
        whole_s: Seconds of a request in one process with all cores, of an ONNX model that several
            processes are to share; None if it is not known.
        lacks_whole: Whether `whole_s` is not known because no time was left to measure it.
        border_s: Seconds that a communication takes in ONNX Runtime beside those of its links, as a
            session ends there and another begins; None for modules, or if it is not known.
        lacks_border: Whether `border_s` is not known because no time was left to measure it.
        failed: Reason for each form that cannot be measured, by operator; of GPUs also for the
            communications between them.
        lacks_forms: Whether forms are not known because no time was left to measure them.
        unknown_share: Share of the seconds of all forms, as priced without the measurements, that
            neither entry nor measurement covers.
        seconds: Of the whole call.
        reading_s: Of these, those before the first measurement: the model was read, and what its
            plans could run was collected.
        limit_s: The time limit, which ends measurements alone.
        busy_share: Share of the time of this process's cores that other processes took meanwhile;
            None if the system does not tell.
        unstable: Number of forms measured now whose runs differ by more than `UNSTABLE`.
        spread: The most by which they do: half the distance of the quartiles, as a share of the
            median.
        far_levels: Names of the levels between machines that have no measurements: processes that
            torchrun starts on these machines measure them.
    """

    file: Path
    device: str
    machine: str
    threads: int
    backend: str = "none"
    forms: int = 0
    measured: int = 0
    known: int = 0
    links: int
    unknown_links: int
    whole_s: float | None = None
    lacks_whole: bool = False
    border_s: float | None = None
    lacks_border: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
    lacks_forms: bool = False
    unknown_share: float = 0.0
    seconds: float
    reading_s: float = 0.0
    limit_s: float
    busy_share: float | None = None
    unstable: int = 0
    spread: float = 0.0
    far_levels: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A few lines for people."""
        threads = units.count(self.threads, "thread")
        now = f"{self.measured} measured now in {units.seconds(self.seconds)}"
        links = f"{self.links} sizes and kinds measured now" if self.links else "nothing new"
        lines = [
            f"{units.count(self.forms, 'form')} of operators: {now}, {self.known} known before",
            f"  device   {self.device}, {threads}",
            f"  backend  {self.backend}",
            f"  links    {links}",
        ]
        if self.border_s is not None:
            border = units.seconds(self.border_s)
            lines.append(f"  border   {border} more for each communication, which ends a session")
        if self.whole_s is not None:
            whole = units.seconds(self.whole_s)
            lines.append(f"  whole    {whole} in one process with all cores")
        lines.append(f"  profile  {self.file}")
        if self.machine != self.device:
            lines.append(
                f"  note: this machine is {self.machine}; its seconds now count for {self.device}, "
                "which the cluster file names"
            )
        lines += self._noise()
        if self.unknown_share:
            share = f"forms with {units.share(self.unknown_share)} of the seconds"
            lines.append(f"  note: {share} are not measured{self._goes_on * self.lacks_forms}")
        if self.unknown_links:
            kinds = f"{self.unknown_links} sizes and kinds of communications"
            lines.append(f"  note: {kinds} are not measured{self._goes_on}")
        if self.lacks_whole:
            lines.append(
                "  note: the whole model in one process is not measured, for lack of time, so that "
                f"no plan is compared with it{self._goes_on}"
            )
        if self.lacks_border:
            lines.append(
                "  note: what the end of a session of ONNX Runtime adds to a communication is not "
                f"measured, for lack of time{self._goes_on}"
            )
        if self.is_short:
            enough_s = math.ceil(self.reading_s + self.limit_s)
            lines.append(
                f"  note: the model was read for {units.seconds(self.reading_s)} of the time limit "
                f"of {units.seconds(self.limit_s)}: with --time-limit {enough_s} the measurements "
                f"have {units.seconds(self.limit_s)}"
            )
        lines += [
            f"  note: communications over {level!r} are not measured; torchrun with a process for "
            "each device measures them: -m partitioner profile, with the same arguments"
            for level in self.far_levels
        ]
        lines += [f"  note: {op} cannot be measured: {why}" for op, why in self.failed.items()]
        return "\n".join(lines)

    def _noise(self) -> Iterator[str]:
        if self.busy_share is not None and self.busy_share > BUSY:
            yield (
                f"  note: other processes took {units.share(self.busy_share)} of these cores "
                "meanwhile, and the seconds are those beside them: measure on a quiet machine"
            )
        if self.unstable:
            yield (
                f"  note: the runs of {units.count(self.unstable, 'form')} differ by up to "
                f"{units.share(self.spread)}, which is the error of plans that rest on them"
            )

    @property
    def is_short(self) -> bool:
        """Tell whether measurements are missing as reading the model took most of the limit."""
        lacks = self.unknown_links or self.lacks_whole or self.lacks_border or self.lacks_forms
        return bool(lacks) and self.reading_s > self.limit_s * _SLOW_READING

    @property
    def _goes_on(self) -> str:
        """Say what measures the rest: a run that measured nothing would be repeated in vain."""
        if self.measured or self.links:
            return "; the next run goes on"
        return "; give a longer --time-limit: this one is too short"

"""Agreement of all ranks, before a step, that they are about to do the same.

Ranks that are not (a batch of other sizes on one of them, evaluation on another) would wait in
different collectives for ever, or abort in one of them; here every rank says who differs instead.
Ranks that do the same with other weights or data would compute with pieces of different models or
batches; they send checksums along.
Gloo carries the messages, so that no rank waits for its accelerator.
"""

from __future__ import annotations

import copy
import json
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.backends.errors import BackendError, CommunicationError, one_line
from partitioner.backends.process_group import call_before_groups_end
from partitioner.backends.tensors import dtype_word, torch_dtype
from partitioner.backends.torch.agreeing.faults import Roll, cause, named, own_process
from partitioner.backends.torch.agreeing.groups import new_group, resolved_group
from partitioner.backends.torch.agreeing.rows import Rows
from partitioner.backends.torch.agreeing.sums import Sums, checksum, code, differing_within
from partitioner.backends.torch.agreeing.whereabouts import Whereabouts, look_out
from partitioner.ir.errors import PartitionerError

ResultT = TypeVar("ResultT")

#: Time that a rank waits for the others before it looks where they are.
_LOOK = timedelta(seconds=0.5)
#: Words in front of a row's checksums: the code of what a rank does, whether it has news, whether
#: its backward pass may agree with a mark (`_MARKED`: it did), and the bytes that the row carries.
_HEAD = 4
_MARKED = 2
#: Where ranks tell in the store of torch.distributed in which all-reduce they wait for others.
_REDUCING = "partitioner/reducing"
#: Least time that the ranks wait for rank 0's search.
_SEARCH = timedelta(hours=1)


class AgreedError(BackendError):
    """An error that all ranks raise at the same time."""


class Agreement:
    """Messages between all ranks; every rank must call the same methods in the same order.

    Args:
        ranks: Number of ranks: those of torch.distributed, or 1 for this process alone.
        searches: Whether ranks wait for a search on rank 0, for which the timeout of
            torch.distributed may be too short.

    Attributes:
        words: Number of checksums that each `check` has room for; the same on all ranks. A check is
            one message of 8 * (4 + words) + `ROW_BYTES` bytes from each rank.
        meetings: Number of meetings so far; the same on all ranks.
        marking: That number behind the last meeting if all ranks may agree with a mark next.
    """

    def __init__(self, ranks: int, *, searches: bool = False) -> None:
        self.words = 0
        self.meetings = 0
        self.marking = -1
        self.ranks = ranks
        self.rank = dist.get_rank() if ranks > 1 else 0
        self._members: Sequence[int] = range(ranks)
        self._backend: str | None = None
        self._group = ""  # its name
        self._device = torch.device("cpu")
        self._whereabouts: Whereabouts | None = None
        self._begun: Callable[[], object] | None = None  # that the rank has not waited for
        self._joined: tuple[int, object] = (-1, None)  # a meeting, and an all-reduce of others
        self._rows: Rows | None = None
        self.roll = Roll(())
        if self.ranks > 1:
            gloo = dist.is_gloo_available() and dist.get_backend() != "gloo"
            self._backend = "gloo" if gloo else None
            least = _SEARCH if searches else None
            group = new_group(self._members, self._backend, least)
            self._group = group.group_name
            if dist.get_backend(group) == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())
            self._whereabouts = Whereabouts.of(self.rank, self.ranks)
            self._let_go_before_groups_end()
            self.roll = Roll(tuple(self._texts(own_process())))
            look_out(self.rank, self.roll, id(dist.group.WORLD))

    def _let_go_before_groups_end(self) -> None:
        """Let go of a message that would hold the group behind its end."""
        this = weakref.ref(self)

        def let_go() -> None:
            if (one := this()) is not None:
                one._begun, one._joined = None, (-1, None)

        call_before_groups_end(let_go)

    def within(self, copies: Sequence[Sequence[int]]) -> Agreement:
        """Messages between the ranks of this rank's whole copy alone; all ranks must call it.

        A rank that is in none has messages with nobody, and so has one that is a copy by itself.
        """
        own = copy.copy(self)
        own.ranks, own._members, own._group, own._rows = 1, (self.rank,), "", None
        for ranks in copies if self.ranks > 1 else ():
            group = new_group(ranks, self._backend) if len(ranks) > 1 else None
            if group is not None and self.rank in ranks:
                own.ranks, own._members, own._group = len(ranks), ranks, group.group_name
        own._let_go_before_groups_end()
        return own

    def check(self, doing: str, problem: str = "", *, asks: bool = False) -> bool:
        """Wait for what `begin` begins; returns, and raises, what its result does."""
        return self.begin(doing, problem, asks=asks).meet()[0]

    def begin(
        self,
        doing: str,
        problem: str = "",
        sums: Sequence[Sums] = (),
        *,
        asks: bool = False,
        marks: bool = False,
    ) -> Meeting:
        """Begin to `check`: the rank may compute before it waits, but not communicate.

        A rank that was interrupted before it waited does so first: other ranks may tell it that
        they did something else.

        Args:
            doing: In words; the same on all ranks if they may go on.
            problem: Why this rank cannot go on; "" if it can.
            sums: Checksums of the values, at most `words` of them in all; given by all ranks that
                have no problem, or by none. Where a rank has news, the last are not compared.
            asks: Whether this rank has news that all are to `compare`.
            marks: Whether this rank may agree on its backward pass with a mark.
        """
        if self._begun is not None:
            self._begun()
        return Meeting(self, doing, problem, sums, asks, marks)

    def gather(
        self,
        row: list[int],
        part: Tensor | None,
        doing: str,
        compare: Callable[[Rows], ResultT],
    ) -> Callable[[], ResultT]:
        """Begin to gather the rows of all ranks for a meeting; the result waits and compares.

        Args:
            row: The numbers of this rank's row.
            part: Its part of an all-reduce, which travels behind them.
        """
        rows, self._rows = self._rows, None  # while a message is on its way, it alone has them
        if rows is None or rows.numbers != len(row):
            rows = Rows(self.ranks, len(row))
        rows.write(row, part)
        gathered = self._exchange(rows.sent, doing, rows.brought)

        def compared() -> ResultT:
            if (brought := gathered()) is not rows.brought:  # it came by an accelerator
                rows.brought.copy_(brought)
            self._rows = rows
            self.meetings += 1
            return compare(rows)

        return self._to_wait_for(compared)

    def reduce(self, part: Tensor, group: str, doing: str) -> bool:
        """Add up the parts of all ranks, in place, and tell whether all surely take part in this.

        The first element is no number if a rank that does something else has joined. Such a rank
        waits in a meeting, and looks now and then whether others wait here.
        """
        with _Telling(self, doing):
            work = resolved_group(group).allreduce([part])
        where = self.meetings, group, part

        def all_take_part() -> bool:
            with _Telling(self, doing):
                self._wait(work, doing, where)
            are_all = not math.isnan(part.view(-1)[0])
            self.meetings += are_all
            return are_all

        return self._to_wait_for(all_take_part)()

    def _to_wait_for(self, wait: Callable[[], ResultT]) -> Callable[[], ResultT]:
        """Note what the rank waits for in its next call if it is interrupted before."""

        def finish() -> ResultT:
            try:
                result = wait()
            except Exception:
                self._begun = None
                raise
            self._begun = None
            return result

        self._begun = finish
        return finish

    def compared(
        self,
        doing: str,
        problem: str,
        sums: Sequence[Sums],
        row: list[int],
        table: Sequence[list[int]],
    ) -> bool:
        """Tell whether any rank asks, from the rows of all ranks, of which this one has `row`."""
        own = [row[0], row[1], *row[_HEAD:]]
        if not problem and all([*one[:2], *one[_HEAD:]] == own for one in table):
            return bool(row[1])
        rows = torch.tensor(table)
        codes = rows[:, 0]
        if bool((codes == codes[0]).all()) and not problem:
            news, start = bool(rows[:, 1].any()), _HEAD
            for one in sums[:-1] if news else sums:
                self._check_sums(one, rows[:, start : start + len(one.words)])
                start += len(one.words)
            return news
        texts = dict(zip(self._members, self._texts(problem or doing), strict=True))
        marks = zip(self._members, codes.tolist(), strict=True)
        wrong = {rank: texts[rank] for rank, mark in marks if mark == -1}
        if not wrong:
            raise AgreedError(_differ(texts))
        if len(wrong) == self.ranks and len({*texts.values()}) == 1:
            raise AgreedError(wrong.popitem()[1])
        named_ones = (
            text if re.match(r"ranks? \d", text) else f"rank {rank}: {text}"
            for rank, text in wrong.items()
        )
        raise AgreedError("; ".join(dict.fromkeys(named_ones)))

    def checksum(self, tensor: Tensor) -> int:
        """Checksum of a tensor, to be compared; 0 where there is no other rank."""
        return checksum(tensor) if self.ranks > 1 else 0

    def compare(self, sums: Sums) -> None:
        """Compare any number of values: all ranks raise the same error if any differ."""
        if not self._group:
            return
        names = code("\n".join(sums.words).encode())
        heads = self._gather(torch.tensor([names, len(sums.words)]), "comparing weights")()
        if not bool((heads.reshape(self.ranks, 2) == heads[:2]).all()):
            raise AgreedError("the ranks have weights or constants of other names")
        if sums.words:
            words = self._gather(torch.tensor(list(sums.words.values())), "comparing weights")()
            self._check_sums(sums, words.reshape(self.ranks, -1))

    def _check_sums(self, sums: Sums, rows: Tensor) -> None:
        """Refuse other values; `rows` has the ranks' checksums."""
        if bool((rows == rows[0]).all()):
            return
        of_all = [[0] * rows.shape[1]] * (1 + max(self._members))  # 0: not known to the rank
        for rank, row in zip(self._members, rows.tolist(), strict=True):
            of_all[rank] = row
        differing = sums.differing(of_all)
        if not differing:
            return
        inner = map(json.loads, self._texts(json.dumps(dict(sums.inner))))
        tables = dict(zip(self._members, inner, strict=True))
        if any(tables.values()):
            differing = differing_within(differing, tables)
        if differing:
            raise AgreedError(sums.problem(differing))

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Do something that may fail on single ranks: if it does on any, all of them raise.

        Inside, ranks may meet in other calls of this object: the errors of those are all ranks'.

        Raises:
            BackendError: As `check`, which follows; if all ranks fail alike, each raises its own.
        """
        error: Exception | None = None
        try:
            yield
        except (CommunicationError, AgreedError):
            raise
        except Exception as raised:  # noqa: BLE001 - a user's function may raise anything
            error = raised
        if not self._group:
            if error is not None:
                raise error
            return
        problem = "" if error is None else one_line(error)
        if isinstance(error, PartitionerError):
            problem = str(error)
        try:
            self.check(doing, problem)
        except BackendError as agreed:
            if error is not None and str(agreed) == problem:
                raise error from None
            raise agreed from error

    def first(self, make: Callable[[], str], doing: str) -> str:
        """A text that the first rank makes, on all; `doing` as of `check`, which comes before.

        Raises:
            PartitionerError: Rank 0's error, with the same text and of the same class on all ranks.
        """
        if not self._group:
            return make()
        self.check(doing)
        text, error = "", None
        if self.rank == self._members[0]:
            try:
                text = "+" + make()
            except PartitionerError as raised:
                text, error = f"-{type(raised).__name__}:{raised}", raised
        text = self._texts(text)[0]
        if error is not None:
            raise error
        if text.startswith("-"):
            name, _, said = text[1:].partition(":")
            raise _error_classes(PartitionerError).get(name, BackendError)(said)
        return text[1:]

    def parts(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's part of a tensor, on the CPU; `shapes` are the parts' sizes by rank."""
        if not self._group:
            return [part]
        counts = [torch.Size(shape).numel() * part.element_size() for shape in shapes]
        packed = torch.zeros(max(counts), dtype=torch.uint8)
        flat = part.detach().cpu().contiguous().reshape(-1)
        packed[: counts[self._members.index(self.rank)]] = flat.view(torch.uint8)
        rows = self._gather(packed, "gathering a batch")().reshape(self.ranks, -1)
        return [
            row[:count].clone().view(part.dtype).reshape(shape)
            for row, count, shape in zip(rows, counts, shapes, strict=True)
        ]

    def joined(self, doing: str, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Join the ranks' tensors along their first dim, by rank; `doing` as of `check`."""
        self.check(doing)
        return [
            torch.cat(self.parts(x, [tuple(x.shape)] * self.ranks)).to(x.device) for x in tensors
        ]

    def _texts(self, text: str) -> list[str]:
        packed = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([packed.numel()]), "comparing texts")().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: packed.numel()] = packed
        rows = self._gather(padded, "comparing texts")().reshape(self.ranks, -1)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def _gather(self, part: Tensor, doing: str) -> Callable[[], Tensor]:
        """Begin to gather the ranks' tensors along their first dim; gives them, on the CPU."""
        return self._exchange(torch.cat([part] * self.ranks), doing)

    def _exchange(
        self, copies: Tensor, doing: str, whole: Tensor | None = None
    ) -> Callable[[], Tensor]:
        """Begin to send a rank's copies to all ranks; gives theirs, in `whole` if that can be."""
        # gloo's all-to-all of copies takes two thirds of the processor's time of its all-gather
        sent = copies.to(self._device)
        brought = whole if whole is not None and sent is copies else torch.empty_like(sent)
        with _Telling(self, doing):
            work = resolved_group(self._group).alltoall_base(brought, sent, [], [])

        def gathered() -> Tensor:
            with _Telling(self, doing):
                self._wait(work, doing)
            return brought.cpu()

        return gathered

    def _wait(self, work: Any, doing: str, where: tuple[int, str, Tensor] | None = None) -> None:
        """Wait for a message, and look now and then whether another rank waits for this one.

        Args:
            where: Of a message that is an all-reduce: what others join if they do something else,
                which is the number of the meeting, the group, and the rank's part.

        Raises:
            BackendError: A rank waits in another communication, which this one is to join.
        """
        assert self._whereabouts is not None
        posted = False
        while True:
            try:
                work.wait(_LOOK)
                break
            except RuntimeError:
                if work.is_completed():  # it failed, or came just after the time was up
                    work.wait()
                    break
            if not posted:
                self._whereabouts.post(doing)
                posted = True
                if where is not None:
                    meeting, group, part = where
                    words = json.dumps([meeting, group, part.numel(), dtype_word(part.dtype)])
                    self._whereabouts.store.set(f"{_REDUCING}/{self._group}", words)
            if where is None:
                self._join(self._whereabouts.store)
            elsewhere = self._whereabouts.elsewhere(doing)
            if elsewhere:
                raise BackendError(_differ(elsewhere))
        if posted:
            self._whereabouts.post("")

    def _join(self, store: Any) -> None:
        """Join an all-reduce in which others wait in place of this meeting: see `reduce`."""
        if not store.check([key := f"{_REDUCING}/{self._group}"]):
            return
        meeting, name, numel, dtype = json.loads(store.get(key))
        if meeting == self.meetings and meeting != self._joined[0]:
            part = torch.full((numel,), math.nan, dtype=torch_dtype(dtype))
            self._joined = meeting, resolved_group(name).allreduce([part])


@dataclass
class _Telling:
    """Names the activity before which a rank waits in errors of messages."""

    agreement: Agreement
    doing: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PartitionerError):
            raise CommunicationError(
                f"rank {self.agreement.rank}: waiting for the other ranks before {self.doing}: "
                f"{cause(error, self.agreement.roll)}"
            ) from error


class Meeting:
    """A message of each rank about what it is about to do: see `Agreement.begin`.

    It may carry the operand of a small all-reduce, or travel with that of another one.
    """

    def __init__(
        self,
        agreement: Agreement,
        doing: str,
        problem: str,
        sums: Sequence[Sums],
        asks: bool,
        marks: bool,
    ) -> None:
        self._agreement = agreement
        self._doing = doing
        self._problem = problem
        self._sums = sums
        self._asks = asks
        self._marks = int(marks)
        self._row: list[int] = []
        self._posted: Callable[[], tuple[Rows, list[list[int]], bool]] | None = None
        self._is_over = False
        #: The group of all ranks, if the part that `meet` is given may be marked.
        self.group = ""

    def post(self, part: Tensor | None = None) -> None:
        """Send this rank's row, once: it may compute then until it waits."""
        agreement = self._agreement
        if self._posted is not None or agreement.ranks == 1:
            return
        words = [word for one in self._sums for word in one.words.values()]
        words += [0] * (agreement.words - len(words))
        mark = -1 if self._problem else code(self._doing.encode())
        carried = 0 if part is None else part.nbytes
        self._row = [mark, int(self._asks), self._marks, carried, *words]
        self._posted = agreement.gather(self._row, part, self._doing, self._compared)

    def _compared(self, rows: Rows) -> tuple[Rows, list[list[int]], bool]:
        agreement, table = self._agreement, rows.table
        asks = agreement.compared(self._doing, self._problem, self._sums, self._row, table)
        if _MARKED in (how := [row[2] for row in table]) and how.count(_MARKED) < len(table):
            raise AgreedError(f"{self._doing}: compile() the module on all ranks or on none")
        return rows, table, asks

    def meet(self, given: Tensor | Exception | None = None) -> tuple[bool, Tensor | None]:
        """Wait for the other ranks, once.

        Args:
            given: This rank's part of an all-reduce, or the error with which it ends its pass.

        Returns:
            Whether any rank asks, and the sum of the parts; None if they are not added up.

        Raises:
            BackendError: A rank has a problem, or the ranks differ: the same text on every rank,
                but for one that has given its own error.
        """
        if self._is_over:
            return False, None
        agreement, self._is_over = self._agreement, True
        try:
            return self._meet(agreement, given if isinstance(given, Tensor) else None, given)
        except AgreedError:
            if isinstance(given, Exception):
                raise given from None
            raise

    def _meet(
        self, agreement: Agreement, part: Tensor | None, given: Tensor | Exception | None
    ) -> tuple[bool, Tensor | None]:
        if isinstance(given, Exception) and self._posted is None:
            self._problem = f"rank {agreement.rank}: {one_line(given)}"
        if agreement.ranks == 1:
            if self._problem:
                raise AgreedError(self._problem)
            return False, None
        reduced = None
        if part is not None and self.group:
            if agreement.reduce(part, self.group, self._doing):
                return False, part
            reduced, part, self._marks = part, None, _MARKED
        self.post(part)
        posted, self._posted = self._posted, None  # which refers to this meeting
        assert posted is not None
        rows, table, asks = posted()
        if reduced is not None:  # all ranks have a gradient that is no number
            return False, reduced
        agreement.marking = agreement.meetings if all(row[2] for row in table) else -1
        if part is None or any(row[_HEAD - 1] != part.nbytes for row in table):
            return asks, None
        return asks, rows.total(part)


def _differ(texts: Mapping[int, str]) -> str:
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    said = "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_text.items())
    return f"the ranks do not do the same: {said}"


def _error_classes(base: type[PartitionerError]) -> dict[str, type[PartitionerError]]:
    found = {base.__name__: base}
    for one in base.__subclasses__():
        found |= _error_classes(one)
    return found

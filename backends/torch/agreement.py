"""Agreement of all ranks, before a step, that they are about to do the same.

Ranks that are not (a batch of other sizes on one of them, evaluation on another) would wait in
different collectives for ever, or abort in one of them; here every rank says who differs instead.
Ranks that do the same with other weights or data would compute with pieces of different models or
batches; they send checksums along.
Gloo carries the messages, so that no rank waits for its accelerator.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from partitioner.backends.errors import BackendError, CommunicationError
from partitioner.backends.torch.eager import gathered
from partitioner.backends.torch.faults import Roll, cause, named, own_process
from partitioner.backends.torch.groups import new_group
from partitioner.backends.torch.sums import Sums, code
from partitioner.ir.errors import PartitionerError

c10d = torch.ops._c10d_functional


class Agreement:
    """Messages between all ranks; every rank must call the same methods in the same order.

    Attributes:
        words: Number of checksums that each `check` has room for; the same on all ranks. A check is
            one message of 8 * (2 + words) bytes from each rank.
    """

    def __init__(self) -> None:
        self.words = 0
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self._group = ""  # its name
        self._device = torch.device("cpu")
        self.roll = Roll(())
        if self.ranks > 1:
            gloo = dist.is_gloo_available() and dist.get_backend() != "gloo"
            group = new_group(range(self.ranks), "gloo" if gloo else None)
            self._group = group.group_name
            if dist.get_backend(group) == "nccl":
                self._device = torch.device("cuda", torch.cuda.current_device())
            self.roll = Roll(self._texts(own_process()))

    def check(
        self, doing: str, problem: str = "", sums: Sums | None = None, *, asks: bool = False
    ) -> bool:
        """Compare the activities that the ranks are about to begin, and the values that they take.

        Args:
            doing: In words; the same on all ranks if they may go on.
            problem: Why this rank cannot go on; "" if it can.
            sums: Checksums of the values, at most `words` of them; given by all ranks or none.
            asks: Whether this rank has news that all are to `compare`.

        Returns:
            Whether any rank has.

        Raises:
            BackendError: A rank has a problem, or the ranks differ; the same text on every rank.
        """
        if not self._group:
            if problem:
                raise BackendError(problem)
            return False
        words = list(sums.words.values()) if sums is not None and not problem else []
        words += [0] * (self.words - len(words))
        row = torch.tensor([-1 if problem else code(doing.encode()), int(asks), *words])
        rows = self._gather(row, doing).reshape(self.ranks, -1)
        codes = rows[:, 0]
        if bool((codes == codes[0]).all()) and not problem:
            if sums is not None:
                self._check_sums(sums, rows[:, 2:])
            return bool(rows[:, 1].any())
        texts = self._texts(problem or doing)
        wrong = [text for text, mark in zip(texts, codes.tolist(), strict=True) if mark == -1]
        if wrong:
            raise BackendError("; ".join(dict.fromkeys(wrong)))
        by_text: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            by_text.setdefault(text, []).append(rank)
        said = "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_text.items())
        raise BackendError(f"the ranks do not do the same: {said}")

    def compare(self, sums: Sums) -> None:
        """Compare values of the ranks, any number of them.

        Raises:
            BackendError: The ranks differ, or have other names; the same text on every rank.
        """
        if not self._group:
            return
        names = code("\n".join(sums.words).encode())
        heads = self._gather(torch.tensor([names, len(sums.words)]), "comparing weights")
        if not bool((heads.reshape(self.ranks, 2) == heads[:2]).all()):
            raise BackendError("the ranks have weights or constants of other names")
        if sums.words:
            words = self._gather(torch.tensor(list(sums.words.values())), "comparing weights")
            self._check_sums(sums, words.reshape(self.ranks, -1))

    def _check_sums(self, sums: Sums, rows: Tensor) -> None:
        """Refuse other values; `rows` has the ranks' checksums."""
        if bool((rows == rows[0]).all()):
            return
        differing = sums.differing(rows.tolist())
        if not differing:
            return
        tables = [json.loads(text) for text in self._texts(json.dumps(dict(sums.inner)))]
        inner = {
            (first, name): [rank for rank in ranks if tables[rank].get(name) != word]
            for (first, _), ranks in differing.items()
            for name, word in tables[first].items()
        }
        differing = {key: ranks for key, ranks in inner.items() if ranks} or differing
        raise BackendError(sums.problem(differing))

    def first(self, make: Callable[[], str]) -> str:
        """A text that rank 0 makes, on every rank.

        Raises:
            PartitionerError: Rank 0's error there, and its text on the other ranks.
        """
        if not self._group:
            return make()
        text, error = "", None
        if self.rank == 0:
            try:
                text = "+" + make()
            except PartitionerError as raised:
                text, error = f"-{raised}", raised
        text = self._texts(text)[0]
        if error is not None:
            raise error
        if text.startswith("-"):
            raise BackendError(f"rank 0: {text[1:]}")
        return text[1:]

    def parts(self, part: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Every rank's part of a tensor, on the CPU; `shapes` are the parts' sizes by rank."""
        if not self._group:
            return [part]
        counts = [torch.Size(shape).numel() * part.element_size() for shape in shapes]
        packed = torch.zeros(max(counts), dtype=torch.uint8)
        flat = part.detach().cpu().contiguous().reshape(-1)
        packed[: counts[self.rank]] = flat.view(torch.uint8)
        rows = self._gather(packed, "gathering a batch").reshape(self.ranks, -1)
        return [
            row[:count].clone().view(part.dtype).reshape(shape)
            for row, count, shape in zip(rows, counts, shapes, strict=True)
        ]

    def _texts(self, text: str) -> list[str]:
        """Every rank's text."""
        packed = torch.frombuffer(bytearray(text.encode() + b"\0"), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([packed.numel()]), "comparing texts").tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: packed.numel()] = packed
        rows = self._gather(padded, "comparing texts").reshape(self.ranks, -1)
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def _gather(self, part: Tensor, doing: str) -> Tensor:
        """The ranks' tensors along their first dim, on the CPU."""
        try:
            sent = gathered(part.to(self._device), self.ranks, self._group)
            whole: Tensor = c10d.wait_tensor(sent)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank}: waiting for the other ranks before {doing}: "
                f"{cause(error, self.roll)}"
            ) from error
        return whole.cpu()

"""Checksums of values that several ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partitioner.backends.torch.agreeing.faults import named


def checksum(tensor: Tensor) -> int:
    """A number from 1 to 2^56 - 1 that follows from the bytes of a tensor (1 to 2 GB/s)."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    line = dense.as_strided((dense.numel(),), (1,)) if dense.numel() else dense.new_empty(0)
    return code(line.view(torch.uint8).numpy().data)


def code(contents: bytes | memoryview) -> int:
    """A number from 1 to 2^56 - 1 that follows from bytes."""
    return int.from_bytes(hashlib.sha256(contents).digest()[:7]) or 1


@dataclass(frozen=True)
class Sums:
    """Checksums of a rank's values."""

    #: Checksum by name; 0 for a value that the rank does not know. All ranks have the same names in
    #: the same order.
    words: Mapping[str, int]
    differ: str  #: What ranks that differ have, in words: "other data in input".
    advice: str  #: What would be right.
    #: By name and rank; ranks with equal keys must have equal values. A name without keys must be
    #: alike on all ranks.
    keys: Mapping[str, Mapping[int, Hashable]] = field(default_factory=dict)
    #: Checksums of the values behind one word, by name, which are compared where the word differs.
    #: A name that a rank lacks is of a value that it does not know.
    inner: Mapping[str, int] = field(default_factory=dict)

    def differing(self, rows: Sequence[Sequence[int]]) -> dict[tuple[int, str], list[int]]:
        """Ranks that differ, by the first rank that must have the same value, and its name.

        Args:
            rows: Words of each rank.
        """
        found: dict[tuple[int, str], list[int]] = {}
        for column, name in enumerate(self.words):
            firsts: dict[Hashable, int] = {}
            for rank, row in enumerate(rows):
                if not row[column]:
                    continue
                key = self.keys[name].get(rank) if name in self.keys else None
                first = firsts.setdefault(key, rank)
                if rows[first][column] != row[column]:
                    found.setdefault((first, name), []).append(rank)
        return found

    def problem(self, differing: Mapping[tuple[int, str], Sequence[int]]) -> str:
        """The fault in words."""
        names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for (first, name), ranks in differing.items():
            names.setdefault((first, tuple(ranks)), []).append(name)
        return f"{'; '.join(self._lines(names))}: {self.advice}"

    def _lines(self, names: Mapping[tuple[int, tuple[int, ...]], Sequence[str]]) -> Iterator[str]:
        for (first, ranks), differing in names.items():
            more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            has = "has" if len(ranks) == 1 else "have"
            yield f"{named(ranks)} {has} {self.differ} {differing[0]!r}{more} than rank {first}"


def differing_within(
    differing: Mapping[tuple[int, str], Sequence[int]], tables: Sequence[Mapping[str, int]]
) -> dict[tuple[int, str], list[int]]:
    """Narrow `Sums.differing` down to the values behind words.

    Args:
        differing: Ranks whose words differ.
        tables: `Sums.inner` of each rank.
    """
    unlike: dict[tuple[int, str], list[int]] = {}
    for (first, _), others in differing.items():
        ranks = first, *others
        for name in dict.fromkeys(name for rank in ranks for name in tables[rank]):
            words = {rank: tables[rank][name] for rank in ranks if name in tables[rank]}
            knows = next(iter(words))
            if wrong := [rank for rank, word in words.items() if word != words[knows]]:
                unlike[knows, name] = wrong
    return unlike

"""Checksums of values that several ranks must have alike."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from partitioner.backends.torch.agreeing.faults import named


def checksum(tensor: Tensor) -> int:
    """A number from 1 to 2^56 - 1 that follows from the bytes of a tensor (1 to 2 GB/s)."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    line = dense.as_strided((dense.numel(),), (1,)) if dense.numel() else dense.new_empty(0)
    digest = hashlib.sha256(line.view(torch.uint8).numpy().data).digest()  # processors have it
    return int.from_bytes(digest[:7]) or 1


def code(contents: bytes) -> int:
    """A number from 1 to 2^56 - 1 that follows from a few bytes."""
    # Python's own code, where OpenSSL's of another digest looks the digest up anew
    return int.from_bytes(hashlib.blake2b(contents, digest_size=7).digest()) or 1


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
        """Ranks whose words differ, by the first rank that must have the same, and the name."""
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
        lines = []
        for (first, others), unlike in names.items():
            more = f" and {len(unlike) - 1} more" if len(unlike) > 1 else ""
            has = f"{named(others)} {'has' if len(others) == 1 else 'have'} {self.differ}"
            lines.append(f"{has} {unlike[0]!r}{more} than rank {first}")
        return f"{'; '.join(lines)}: {self.advice}"


def differing_within(
    differing: Mapping[tuple[int, str], Sequence[int]], tables: Mapping[int, Mapping[str, int]]
) -> dict[tuple[int, str], list[int]]:
    """Narrow `Sums.differing` down to the values behind words, by `Sums.inner` of each rank."""
    unlike: dict[tuple[int, str], list[int]] = {}
    for (first, _), others in differing.items():
        ranks = first, *others
        for name in dict.fromkeys(name for rank in ranks for name in tables[rank]):
            words = {rank: tables[rank][name] for rank in ranks if name in tables[rank]}
            knows = next(iter(words))
            if wrong := [rank for rank, word in words.items() if word != words[knows]]:
                unlike[knows, name] = wrong
    return unlike


# What ranks compare when they begin: weights, inputs, writes to parameters ------------------------


#: What ranks should do that are called with other data.
_GLOBAL_ADVICE = (
    "with inputs='global' every rank is called with the same whole batch: seed the loaders alike, "
    "without a DistributedSampler, or use module(inputs='rows') for own rows "
    "(module(check_inputs=0) compares no inputs)"
)
_LOCAL_ADVICE = (
    "the plan gives them the same part: with inputs='local' seed the loaders of such ranks alike "
    "(module(check_inputs=0) compares no inputs)"
)

#: What ranks should do that wrote otherwise to their parameters.
_WRITTEN_ADVICE = (
    "call optimizer.step(), and whatever else writes to parameters, equally often on every rank, "
    "as their parts no longer are of one model"
)


def of_inputs(
    known: Mapping[str, int], rank: int, keys: Mapping[str, Mapping[int, str]] | None
) -> Sums:
    """Checksums of a call's inputs by name; of none if they are not to be compared.

    `keys` tells by input and rank which part of the batch it is; None if all have the whole batch.
    """
    if keys is None:
        words = {"": code(repr(known).encode()) if known else 0}
        return Sums(words, "other data in input", _GLOBAL_ADVICE, inner=known)
    words = {name: known.get(name, 0) if rank in keys[name] else 0 for name in keys}
    return Sums(words, "another part of input", _LOCAL_ADVICE, keys)


def of_writes(counts: Mapping[str, int], trained: Mapping[int, Hashable]) -> Sums:
    """Checksum of how often a rank's trained parameters, listed by rank, were written to."""
    numbers = [*counts.values()]
    first = numbers[0] if numbers else -1
    if first >= 0 and numbers.count(first) == len(numbers):  # as by an optimizer's steps
        word = 1 + first
    else:
        word = code(array("q", numbers).tobytes()) if numbers else 0
    return Sums({"": word}, "other writes to", _WRITTEN_ADVICE, {"": trained}, counts)


def beginning(words: Mapping[str, int]) -> Sums:
    """Checksums of the weights and constants that a rank begins with."""
    return Sums(
        words,
        "other contents of",
        "begin with the same weights and constants: call torch.manual_seed with the same seed on "
        "every rank before the model is made, load the same file, or send rank 0's with "
        "torch.distributed.broadcast before compile",
    )


def loading(words: Mapping[str, int]) -> Sums:
    """Checksums of the whole weights that a rank loaded."""
    return Sums(
        words,
        "loaded other contents of",
        "call load_state_dict() on every rank, with the same tensors",
    )

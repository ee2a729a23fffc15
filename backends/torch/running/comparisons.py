"""What ranks compare by checksums when they begin: weights, inputs, writes to parameters."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.backends.torch.agreeing.sums import Sums, code
from partitioner.backends.torch.running.held_state import StatePlaces


@dataclass(frozen=True)
class Comparisons:
    """Checksums that a rank compares with the others at each call of its module."""

    rank: int
    #: By input and rank, which part of the batch it is called with; None if every rank is called
    #: with the whole batch.
    input_keys: Mapping[str, Mapping[int, str]] | None
    holders: Mapping[str, Mapping[int, str]]  #: By rank, the trained parameters that it holds.

    @classmethod
    def of(
        cls, rank: int, places: StatePlaces, inputs: Mapping[str, Mapping[int, str]] | None
    ) -> Comparisons:
        """Comparisons of a rank whose inputs have these keys."""
        holders = {rank: repr(names) for rank, names in places.trained.items()}
        return cls(rank, inputs, {"": holders})

    @property
    def words(self) -> int:
        """How many checksums a call compares."""
        return 1 + (1 if self.input_keys is None else len(self.input_keys))

    def inputs(self, known: Mapping[str, int]) -> Sums:
        """Checksums of a call's inputs.

        Args:
            known: By input; empty if they are not to be compared.
        """
        keys = self.input_keys
        if keys is None:
            words = {"": code(repr(known).encode()) if known else 0}
            return Sums(words, "other data in input", _GLOBAL_ADVICE, inner=known)
        words = {name: known.get(name, 0) if self.rank in keys[name] else 0 for name in keys}
        return Sums(words, "another part of input", _LOCAL_ADVICE, keys)

    def writes(self, counts: Mapping[str, int]) -> Sums:
        """Checksum of how often the trained parameters that this rank holds were written to."""
        word = code(array("q", counts.values()).tobytes()) if counts else 0
        return Sums({"": word}, "other writes to", _WRITTEN_ADVICE, self.holders, counts)


#: What ranks should do that are called with other data.
_GLOBAL_ADVICE = (
    "with inputs='global' every rank is called with the same whole batch: seed the loaders alike, "
    "without a DistributedSampler, or use module(inputs='local') for own parts "
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

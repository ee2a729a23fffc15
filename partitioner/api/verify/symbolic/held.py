"""Values of ranks in terms of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import TypeVar

from partitioner.api.verify.symbolic.parts import (
    RefusedError,
    any_of,
    are_disjoint,
    covers,
    joined,
    region_text,
    same_region,
)
from partitioner.api.verify.symbolic.shares import ALL, NOTHING, Box, Share, together
from partitioner.ir.exchange import Region
from partitioner.ir.types import TensorType

T = TypeVar("T")

#: Most choices that are tried among parts of one value that are alike.
_MOST_CHOICES = 64


@dataclass(frozen=True)
class Held:
    """A value of a rank in terms of the whole model."""

    value: str  #: Value of the whole model.
    region: Region  #: The part of each dim, in the rank's order.
    share: Share = ALL  #: The terms of a pending reduction that it has.
    how: str = ""  #: The reduction that is pending: "sum", "max", "min" or "prod"; "" if none is.

    def __str__(self) -> str:
        pending = f"a pending {self.how} of " if self.share != ALL else ""
        return f"{pending}{self.value!r}{region_text(self.region)}"


def zeros(value: str, shape: Sequence[int], whole: Sequence[int]) -> Held:
    """Zeros as a part of a value: no term of a sum, anywhere. A part of no elements is complete."""
    region = tuple(any_of(count, size) for count, size in zip(shape, whole, strict=True))
    return Held(value, region, NOTHING, "sum") if all(region) else Held(value, region)


Facts = tuple[Held, ...]  #: What a value of a rank is; all of them hold.
Types = Mapping[str, TensorType]  #: The whole model's values.


def of_one_value(
    sources: Mapping[int, Facts], make: Callable[[Mapping[int, Held]], Iterable[Held]]
) -> Facts:
    """Facts of a result, for each value that all sources are of.

    Raises:
        RefusedError: There is no such value, or `make` refuses the parts of it.
    """
    refused: RefusedError | None = None
    found: list[Held] = []
    for value in dict.fromkeys(held.value for facts in sources.values() for held in facts):
        parts = [[held for held in facts if held.value == value] for facts in sources.values()]
        for chosen in choices(parts, _are_apart):
            try:
                found.extend(make(dict(zip(sources, chosen, strict=True))))
            except RefusedError as error:
                refused = error
    if found:
        return tuple(dict.fromkeys(found))
    if refused is not None:
        raise refused
    texts = dict.fromkeys(str(of[0]) if of else "an unknown value" for of in sources.values())
    raise RefusedError(f"it joins {' and '.join(texts)}", is_wrong=all(sources.values()))


def choices(
    options: Sequence[Sequence[T]], are_apart: Callable[[T, T], bool]
) -> Iterator[tuple[T, ...]]:
    """Choose an option for each place, first of all options that are apart from each other.

    Of parts that are alike all hold; those that ranks have together are likely to be apart.
    """
    if not all(options):
        return
    if any(len(some) > 1 for some in options):
        spread = list[T]()
        for some in options:
            apart = (one for one in some if all(are_apart(one, other) for other in spread))
            spread.append(next(apart, some[0]))
        yield tuple(spread)
    yield from islice(product(*options), _MOST_CHOICES)


def _are_apart(one: Held, other: Held) -> bool:
    """Test whether parts of one value have no element in common, or shares of it no term."""
    pairs = [*zip(one.region, other.region, strict=True)]
    if isinstance(one.share, Box) and isinstance(other.share, Box):
        theirs = dict(other.share.parts)
        pairs += [(part, theirs[loop]) for loop, part in one.share.parts if loop in theirs]
    return any(are_disjoint(a, b) for a, b in pairs)


def reduced(helds: Sequence[Held], how: str) -> Held:
    """Join the terms that several ranks have of one part."""
    region: Region | None = helds[0].region
    for held in helds[1:]:
        region = None if region is None else same_region(region, held.region)
        if region is None:
            raise RefusedError(f"it adds {held} to {helds[0]}", is_wrong=True)
    for held in helds:
        if held.how not in ("", how):
            raise RefusedError(f"it is a {how}, and reads {held}", is_wrong=True)
    again = how in ("max", "min")
    share = together((held.share for held in helds), again=again)
    if share is None:
        raise RefusedError(
            f"the {how} of {len(helds)} ranks would not have each term of {helds[0]} once",
            is_wrong=True,
        )
    return Held(helds[0].value, region or (), share, "" if share == ALL else how)


def placed(types: Types, parts: Mapping[Region, Held], shape: tuple[int, ...]) -> Held:
    """Join parts that are written to these places of a local tensor."""
    first, *others = parts.values()
    for other in others:
        if (other.value, other.share, other.how) != (first.value, first.share, first.how):
            raise RefusedError(f"it joins {first} and {other}", is_wrong=True)
    whole = types[first.value].shape
    if len(whole) != len(shape) or not covers([*parts], shape):
        raise RefusedError("what arrives does not fill it exactly", is_wrong=True)
    region = tuple(
        joined(((held.region[dim], at[dim]) for at, held in parts.items()), size, whole[dim])
        for dim, size in enumerate(shape)
    )
    return replace(first, region=region)

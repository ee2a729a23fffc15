"""Results that are inputs of the next call: which part of a rank's becomes which of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitioner.backends.errors import BackendError
from partitioner.backends.header import Header
from partitioner.backends.regions import whole_region
from partitioner.ir.errors import OptionError
from partitioner.ir.exchange import Region
from partitioner.ir.nodes.feeds import grown_dim


@dataclass(frozen=True)
class LocalFeed:
    """A local result that becomes a local input; of one that is longer, its last elements do."""

    value: str  #: Local name of the result.
    dim: int | None  #: The dim, of the whole tensor, in which it is longer; None if none is.


def local_feeds(header: Header, feed: Mapping[str, str]) -> dict[str, LocalFeed]:
    """The local result that becomes each local input of a rank, by the local name of the input.

    Args:
        header: Of the rank.
        feed: The input that each result becomes, by their names in the model.

    Raises:
        BackendError: The result cannot become the input, or the rank lacks a part of the result.
    """
    sources = {name: result for result, name in feed.items()}
    feeds = {}
    for name, part in header.inputs.items():
        if part.whole not in sources:
            continue
        result = sources[part.whole]
        text = f"feed {result}={part.whole}"
        if result in header.bounded:
            raise BackendError(f"{text}: the size of the result depends on data")
        try:
            dim = grown_dim(text, header.whole_outputs[result], header.whole_inputs[part.whole])
        except OptionError as error:
            raise BackendError(str(error)) from None
        wanted = _places(header, part.whole, part.region, dim)
        of_result = (output for output in header.outputs if output.whole == result)
        value = next(
            (o.value for o in of_result if _places(header, result, o.region, dim) == wanted), None
        )
        if value is None:
            raise BackendError(
                f"{text}: rank {header.rank} needs a part of the input that is not its own part of "
                "the result; partition the model with this feed, so that both lie alike"
            )
        feeds[name] = LocalFeed(value, dim)
    return feeds


def _places(header: Header, name: str, region: Region | None, dim: int | None) -> object:
    """The part of each micro-batch and of the rank in it; None for all of the dim that grows."""
    batch = (None,) if header.batch is None else header.batch.regions(name)
    whole = (header.whole_inputs.get(name) or header.whole_outputs[name]).shape
    own = header.run_type(name).shape

    def places(region: Region | None, shape: tuple[int, ...]) -> list[object]:
        full = whole_region(shape)
        pairs = enumerate(zip(full if region is None else region, full, strict=True))
        # a part of the dim that grows has other elements of the one than of the other
        return [got if at != dim else None if got == all_ else name for at, (got, all_) in pairs]

    return [places(one, whole) for one in batch], places(region, own)

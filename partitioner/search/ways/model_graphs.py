"""The graphs of a model by the way that it runs: what ways ask of a model."""

from __future__ import annotations

from typing import Protocol

from partitioner.ir.graph import Graph
from partitioner.rewrites.same_in_parts import Difference


class ModelGraphs(Protocol):
    """The graphs of an ONNX model or of a PyTorch module, each made when it is first asked for."""

    @property
    def pins_reach_forms(self) -> bool:
        """Tell whether other forms than the first are planned with a user's constraints."""

    @property
    def forms(self) -> tuple[Graph, ...]:
        """Graphs of the whole batch that compute the same, the one as read or traced first."""

    @property
    def offered(self) -> Graph | None:
        """The first form, which offers to compute values again; None if nothing is offered."""

    @property
    def uncut(self) -> Graph:
        """The graph of the whole batch of which stretches may run in blocks."""

    @property
    def whole(self) -> Graph | None:
        """The graph of the whole batch that one device would run; None if there is none."""

    def batch_size(self, count: int = 1) -> int:
        """Samples of a batch, which is to be cut into so many micro-batches.

        Raises:
            PartitionerError: It cannot be, or there is no batch.
        """

    def even_counts(self) -> tuple[int, ...]:
        """All numbers of equal micro-batches, ascending, from 1 on.

        Raises:
            PartitionerError: There is no batch.
        """

    def in_micro_batches(self, count: int) -> Graph:
        """The graph of one of so many micro-batches.

        Raises:
            PartitionerError: The model has no such micro-batches.
        """

    def offered_in(self, count: int) -> Graph | None:
        """The same, which offers to compute values again; None if nothing is offered."""

    def uncut_in(self, count: int) -> Graph:
        """The graph of one of so many micro-batches, of which stretches may run in blocks.

        Raises:
            PartitionerError: The model has no such micro-batches.
        """

    def last_in(self, count: int) -> Graph | None:
        """The graph of the last of so many micro-batches, if it is smaller, with all offers."""
        del count
        return None

    def is_there(self, count: int) -> bool:
        """Tell whether the graph of so many micro-batches takes no time.

        It is known, or a guess is.
        """

    def is_guessed(self, count: int) -> bool:
        """Tell if the graph of so many micro-batches is a guess, which `confirms` takes a trace."""
        del count
        return False

    def confirms(self, count: int) -> bool:
        """Tell if the graph of so many micro-batches is that of the model, and no wrong guess.

        After a wrong one, `in_micro_batches` gives the graph itself.
        """
        return not self.is_guessed(count)

    def changes(self, count: int) -> Difference:
        """The results of so many micro-batches beside those of the whole batch.

        Raises:
            PartitionerError: The model has no such micro-batches.
        """

"""A model split by hand into a chain of submodules on several processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from partitioner.backends.process_group import Group
from partitioner.backends.torch.by_hand.functional import recv, send, tie
from partitioner.backends.torch.by_hand.wire import Call, open_call
from partitioner.ir.errors import hints_keywords


@hints_keywords
class Chain(nn.Module):
    """Connect this process's submodules to those of other processes that run one model.

    Every process makes a chain and adds the submodules that it runs, in the order in which it runs
    them. A process may be visited more than once. The split 0 -> 1 -> 0 of three layers:

        chain = partitioner.Chain()
        if rank == 0:
            chain.add(first, rank_out=1)
            chain.add(third, rank_in=1)
        else:
            chain.add(second, rank_in=0, rank_out=0)
        loss = criterion(chain(x), y) if rank == 0 else chain()
        loss.backward()

    Every process must call `backward()` on the result of its call. Receives and sends run in the
    order in which submodules were added, and on a submodule in the order of the ranks listed;
    processes whose orders cross wait for each other until the group's timeout.

    Args:
        group: Process group; None is the default one. Ranks count within it.

    Raises:
        PartitionerError: There is no process group, or this process is not in it.
    """

    def __init__(self, group: Group = None) -> None:
        super().__init__()
        open_call("Chain", group)
        self._group = group
        #: Ranks that each submodule's inputs come from and its output goes to; None: the caller.
        self._hops: list[tuple[tuple[int, ...] | None, tuple[int, ...] | None]] = []

    def add(
        self,
        module: nn.Module,
        rank_in: int | Sequence[int] | None = None,
        rank_out: int | Sequence[int] | None = None,
    ) -> None:
        """Add the next submodule of this process.

        Args:
            module: Takes as many tensors as there are ranks in `rank_in`, in that order, or the
                arguments of the chain's call; returns one tensor.
            rank_in: Ranks that its inputs come from; None: from the caller.
            rank_out: Ranks that its output goes to; None: to the caller.

        Raises:
            PartitionerError: `module` is no module; a rank is this one, or not in the group.
        """
        call = open_call("Chain.add", self._group)
        if not isinstance(module, nn.Module):
            raise call.error(f"module is {type(module).__name__}, not a torch.nn.Module")
        hop = _ranks(call, rank_in, "rank_in"), _ranks(call, rank_out, "rank_out")
        self.add_module(str(len(self._hops)), module)
        self._hops.append(hop)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run this process's submodules.

        Args:
            *inputs: For submodules without `rank_in`.

        Returns:
            The output of the last submodule without `rank_out`; if there is none, a delegate: a
            0-D tensor of value 0 to call `backward()` on.

        Raises:
            PartitionerError: Nothing was added; a submodule returned no tensor; a rank is gone.
        """
        call = open_call("Chain", self._group)
        result: torch.Tensor | None = None
        loose: list[torch.Tensor] = []  # outputs that are not returned: backward must reach them
        delegate: torch.Tensor | None = None
        for position, (rank_in, rank_out) in enumerate(self._hops):
            module = self.get_submodule(str(position))
            first = next(module.parameters(), None)
            device = None if first is None else first.device
            received = [
                recv(rank, self._group, delegate=delegate, device=device) for rank in rank_in or ()
            ]
            output = module(*(received or inputs))
            if not isinstance(output, torch.Tensor):
                raise call.error(
                    f"submodule {position} returned {type(output).__name__}, not a tensor"
                )
            if rank_out is None:
                loose += [] if result is None else [result]
                result = output
                continue
            for rank in rank_out:
                sent = send(output, rank, self._group)
                delegate = sent if delegate is None else delegate + sent
        if result is not None:
            return tie(result, [*loose, *([] if delegate is None else [delegate])])
        if delegate is None:
            raise call.error("no submodule was added on this rank")
        return delegate


def _ranks(call: Call, ranks: int | Sequence[int] | None, word: str) -> tuple[int, ...] | None:
    """The argument called `word` as a tuple of other ranks of the group; None stays None."""
    if ranks is None:
        return None
    listed = tuple(ranks) if isinstance(ranks, list | tuple) else (ranks,)
    if not listed:
        raise call.error(f"{word} is empty; None stands for the caller")
    return tuple(call.check_peer(rank, word) for rank in listed)

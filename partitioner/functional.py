"""Communication as functions of autograd, for parallel models written by hand.

>>> from partitioner import functional as comm
>>> phi = comm.send(hidden, dst=1)  # doctest: +SKIP
>>> hidden = comm.recv(src=1, delegate=phi)  # doctest: +SKIP
"""

from partitioner.backends.torch.by_hand.functional import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    recv,
    reduce_scatter,
    scatter,
    send,
)

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "gather",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]

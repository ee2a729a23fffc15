"""Memory in use while strategies change: a segment tree with range addition and a global maximum.

An addition to consecutive rows costs O(log rows), the maximum is read in O(1).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partitioner.solver.pairwise.jit import jit
from partitioner.solver.pairwise.model import Model
from partitioner.solver.pairwise.problem import Floats, Ints


class Ledger(NamedTuple):
    """Usage less capacity of the memory rows."""

    first: Ints  #: First row in which each node is live; (nodes,).
    last: Ints  #: One past its last row; (nodes,).
    #: Largest excess below each tree node; the root is entry 1, the leaves are the second half.
    tree: Floats
    pending: Floats  #: Sum of the additions to all rows below each tree node.


def ledger(model: Model, chosen: Ints) -> Ledger:
    """The ledger of a choice; the root is -inf where there is no row."""
    excess = model.over(chosen)
    leaves = 1 << max(0, len(excess) - 1).bit_length()
    tree, pending = np.full(2 * leaves, -np.inf), np.zeros(2 * leaves)
    tree[leaves : leaves + len(excess)] = excess
    _fill(tree)
    return Ledger(model.rows.first, model.rows.last, tree, pending)


@jit
def _fill(tree: Floats) -> None:
    for node in range(len(tree) // 2 - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])


@jit
def add(book: Ledger, node: int, value: float) -> None:
    """Add a value to the rows in which a node is live."""
    leaves = len(book.tree) // 2
    low, high = book.first[node] + leaves, book.last[node] + leaves
    if value == 0.0 or low >= high:
        return
    ends = (low >> 1, (high - 1) >> 1)
    while low < high:
        if low & 1:
            book.tree[low] += value
            book.pending[low] += value
            low += 1
        if high & 1:
            high -= 1
            book.tree[high] += value
            book.pending[high] += value
        low >>= 1
        high >>= 1
    for start in ends:
        above = start
        while above >= 1:
            below = max(book.tree[2 * above], book.tree[2 * above + 1])
            book.tree[above] = below + book.pending[above]
            above >>= 1

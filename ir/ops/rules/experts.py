"""A layer of experts and its gradients: which experts a token meets is known only at run time.

Loops are tokens t, choices k a token, experts e, channels h and, in each expert, columns (u i): u
is 2 if the layer is gated. A device that lacks experts adds nothing for their tokens, so that
results without experts are sums over e, and over i. FLOPs are those of balanced experts: each token
meets k of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from partitioner.ir.ops.signature import Signature
from partitioner.ir.rule import Rule

TOKENS, CHOICES, BEFORE = "t h", "t k", ["t", "k", "(u i)"]
UP, DOWN = ("e", "(u i)", "h"), ("e", "h", "i")


def experts(signature: Signature) -> Rule:
    """``t h, t k, t k, e (u i) h, e h i -> t h, t k (u i)``: the result, and the first products."""
    gates = _gates(signature, 0)
    return signature.rule(
        [TOKENS, CHOICES, CHOICES, UP, DOWN],
        [TOKENS, BEFORE],
        sizes=gates,
        reduce="e i",
        summed="i",
        whole="k h u",
        points="t k e h i",
        flops=2 * (gates["u"] + 1) / max(signature.shape(3)[0], 1),
    )


def experts_backward(signature: Signature, sums: Iterable[int] = ()) -> Rule:
    """``t h, (operands), t k (u i) -> t h, t k, e (u i) h, e h i``: gradients of the operands.

    Each device has the first products of its own experts, and zeros for others: a sum over e.
    """
    gates = _gates(signature, 1)
    return signature.rule(
        [TOKENS, TOKENS, CHOICES, CHOICES, UP, DOWN, BEFORE],
        [TOKENS, CHOICES, UP, DOWN],
        sizes=gates,
        summed="t e i",
        whole="k h u",
        addends={6},
        points="t k e h i",
        flops=2 * (2 * gates["u"] + 2) / max(signature.shape(4)[0], 1),
        sums=sums,
    )


def _gates(signature: Signature, first: int) -> dict[str, int]:
    """Sizes of u and i: how often the columns of the second product fit in those of the first."""
    columns, width = signature.shape(first + 3)[1], signature.shape(first + 4)[2]
    return {"u": columns // max(width, 1), "i": width}

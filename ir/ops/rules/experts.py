"""A layer of experts and its gradients: which experts a token meets is known only at run time.

Loops are tokens t, choices k a token, experts e, channels h and, in each expert, columns (u i): u
is 2 if the layer is gated. A device that lacks experts adds nothing for their tokens, so that
results without experts are sums over e, and over i. FLOPs are those of all experts together: each
token meets k of them. A device has those of its experts' loads, or of equal ones.

Tokens and experts may be cut over the same axis: tokens, with their ids and weights, are sent to
the devices that have some of their experts, and partial results are sent back. The first products
stay where they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from partitioner.ir.loops.dispatch import Dispatch
from partitioner.ir.ops.signature import Signature
from partitioner.ir.rule import Rule
from partitioner.ir.types import item_bytes

TOKENS, CHOICES, BEFORE = "t h", "t k", ["t", "k", "(u i)"]
UP, DOWN = ("e", "(u i)", "h"), ("e", "h", "i")
BIASES = [("e", "(u i)"), ("e", "h")]


def experts(
    signature: Signature, loads: Sequence[float] = (), *, biased: bool = False, whole: bool = False
) -> Rule:
    """``t h, t k, t k, e (u i) h, e h i -> t h, t k (u i)``: the result, and the first products.

    Args:
        signature: The call, with biases ``e (u i), e h`` behind the weights if it is `biased`.
        biased: Whether there are biases; then columns are `whole`, too.
        whole: Whether each device has all columns of its experts.
    """
    gates = _gates(signature, 0)
    columns = "i" if not (biased or whole) else ""
    return signature.rule(
        [TOKENS, CHOICES, CHOICES, UP, DOWN, *(BIASES if biased else [])],
        [TOKENS, BEFORE],
        sizes=gates,
        reduce=f"e {columns}",
        summed=columns,
        whole="k h u" if columns else "k h u i",
        points="t k e h i",
        flops=2 * (gates["u"] + 1) / max(signature.shape(3)[0], 1),
        dispatch=_dispatch(signature, 0, 1, 8 if biased else 6, loads),
    )


def experts_backward(
    signature: Signature,
    loads: Sequence[float] = (),
    *,
    biased: bool = False,
    whole: bool = False,
) -> Rule:
    """``t h, (operands), t k (u i) -> t h, t k, e (u i) h, e h i``: gradients of the operands.

    Each device has the first products of its own experts, and zeros for others: a sum over e.
    Arguments are as of `experts`.
    """
    gates = _gates(signature, 1)
    columns, biases = "" if biased or whole else "i", BIASES if biased else []
    return signature.rule(
        [TOKENS, TOKENS, CHOICES, CHOICES, UP, DOWN, *biases, BEFORE],
        [TOKENS, CHOICES, UP, DOWN, *biases],
        sizes=gates,
        summed=f"t e {columns}",
        whole="k h u" if columns else "k h u i",
        addends={6 + len(biases)},
        points="t k e h i",
        flops=2 * (2 * gates["u"] + 2) / max(signature.shape(4)[0], 1),
        sums=[0],
        dispatch=_dispatch(signature, 1, 2, 8 if biased else 6, loads),
    )


def _dispatch(
    signature: Signature, first: int, tokens: int, inside: int, loads: Sequence[float]
) -> Dispatch:
    """Count the bytes sent of a token: rows of channels, ids, weights and its place.

    Back come a row of channels and, of gradients, those of the weights. Ids and places are int32.
    """
    rows, weights = signature.type(first), signature.type(first + 2)
    assert rows is not None
    assert weights is not None
    row = rows.shape[1] * item_bytes(rows.dtype)
    chosen = weights.shape[1]
    scales = chosen * item_bytes(weights.dtype)
    there = tokens * row + scales + 4 * (chosen + 1)
    back = row + (scales if tokens > 1 else 0)
    return Dispatch("t", "e", chosen, there, back, frozenset({inside}), tuple(loads))


def _gates(signature: Signature, first: int) -> dict[str, int]:
    """Sizes of u and i: how often the columns of the second product fit in those of the first."""
    columns, width = signature.shape(first + 3)[1], signature.shape(first + 4)[2]
    return {"u": columns // max(width, 1), "i": width}

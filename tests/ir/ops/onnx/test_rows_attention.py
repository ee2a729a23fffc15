"""Rows of attention and rotary embeddings."""

import pytest

from helpers.op_rows.rows import Case, Draw, case, check_opaque, check_row, f32, flags, ints, vec
from partitioner.ir.graph import Attr

MS = "com.microsoft::"


def attention(*inputs: Draw | None, **options: object) -> Case:
    """An ONNX Attention node of opset 23 unless told otherwise."""
    return case("Attention", *inputs, **{"opset": 23, "tolerance": 1e-5, **options})


def split(heads: int, kv: int, queries: int = 5, keys: int = 4) -> tuple[Draw, Draw, Draw]:
    """4-D operands of batch 2 and 4 channels."""
    return f32(2, heads, queries, 4), f32(2, kv, keys, 4), f32(2, kv, keys, 4)


def packed(heads: int, kv: int) -> tuple[Draw, Draw, Draw]:
    """3-D operands of batch 2, 5 queries, 4 keys and 4 channels."""
    return f32(2, 5, heads * 4), f32(2, 4, kv * 4), f32(2, 4, kv * 4)


def counts(heads: int, kv: int, **attrs: Attr) -> dict[str, Attr]:
    """Attributes of the packed form."""
    return {"q_num_heads": heads, "kv_num_heads": kv, **attrs}


PAST = (f32(2, 3, 2, 4), f32(2, 3, 2, 4))
ATTENTION_CASES = (
    attention(*split(3, 3), min_cuts=3),
    attention(*split(6, 3), min_cuts=4),
    attention(*split(6, 3), attrs={"is_causal": 1}, min_cuts=4),
    attention(*split(6, 3), flags(5, 4), attrs={"is_causal": 1}, min_cuts=4),
    attention(*split(6, 3), f32(2, 1, 5, 4), attrs={"is_causal": 1}, min_cuts=4),
    attention(f32(2, 3, 5, 4), f32(2, 3, 4, 4), f32(2, 3, 4, 7), min_cuts=3),
    attention(*split(6, 1), attrs={"scale": 0.3, "softcap": 2.0}, min_cuts=3, opset=24),
    attention(*packed(3, 3), attrs=counts(3, 3), min_cuts=3),
    attention(*packed(15, 5), attrs=counts(15, 5), min_cuts=4),
    attention(*packed(6, 3), attrs=counts(6, 3, is_causal=1), min_cuts=4),
    attention(*split(6, 3), f32(5, 4), min_cuts=4),
    attention(*split(6, 3), f32(1, 1, 5, 4), min_cuts=4),
    attention(*split(6, 3), f32(2, 6, 5, 4), min_cuts=4),
    attention(*packed(6, 3), f32(6, 5, 4), attrs=counts(6, 3), min_cuts=4),
    attention(*split(6, 3), None, *PAST, outputs=3, min_cuts=4),
    attention(*split(6, 3), f32(2, 1, 5, 6), *PAST, outputs=4, min_cuts=4),
    attention(*packed(6, 3), None, *PAST, attrs=counts(6, 3, is_causal=1), outputs=3, min_cuts=4),
    attention(
        *(*split(6, 3), f32(5, 6), *PAST),
        attrs={"is_causal": 1},
        outputs=4,
        min_cuts=3,
    ),
    attention(*split(3, 3), None, None, None, ints(2, low=2, high=4), opset=24, min_cuts=3),
)

TABLE = (f32(9, 2), f32(9, 2))
PLACES = ints(2, 5, low=0, high=8)
ROTARY_CASES = (
    case("RotaryEmbedding", f32(2, 3, 5, 4), *TABLE, PLACES, opset=23, min_cuts=3),
    case("RotaryEmbedding", f32(2, 3, 5, 4), f32(2, 5, 2), f32(2, 5, 2), opset=23, min_cuts=3),
    case(
        "RotaryEmbedding",
        *(f32(2, 5, 20), f32(2, 5, 2), f32(2, 5, 2)),
        attrs={"num_heads": 5, "interleaved": 1},
        opset=24,
        min_cuts=3,
    ),
    case(f"{MS}RotaryEmbedding", f32(2, 5, 12), PLACES, *TABLE, opset=1, min_cuts=3),
    case(
        f"{MS}RotaryEmbedding", f32(2, 3, 5, 4), ints(1, low=2, high=3), *TABLE, opset=1, min_cuts=2
    ),
)


def multi_head(*inputs: Draw | None, **options: object) -> Case:
    """A MultiHeadAttention node of 3 heads."""
    fixed = {"attrs": {"num_heads": 3}, "opset": 1, "tolerance": 1e-5}
    return case(f"{MS}MultiHeadAttention", *inputs, **{**fixed, **options})


def group_query(*inputs: Draw | None, last: int, **options: object) -> Case:
    """A GroupQueryAttention node of 6 over 3 heads; `last` is the last place of each sequence."""
    lengths = (vec(last, last, dtype="int32"), vec(last + 1, dtype="int32"))
    attrs = {"num_heads": 6, "kv_num_heads": 3, "do_rotary": int(len(inputs) > 5)}
    fixed = {"attrs": attrs, "opset": 1, "outputs": 3, "tolerance": 1e-5}
    operands = (*inputs[:5], *lengths, *inputs[5:])
    return case(f"{MS}GroupQueryAttention", *operands, **{**fixed, **options})


X = f32(2, 5, 12)
MICROSOFT_CASES = (
    multi_head(X, X, X, min_cuts=3),
    multi_head(X, f32(2, 4, 12), f32(2, 4, 9), f32(33), min_cuts=3),
    multi_head(X, f32(2, 4, 12), f32(2, 4, 12), None, None, f32(1, 3, 5, 4), min_cuts=3),
    multi_head(X, X, X, None, ints(2, 5, low=0, high=1, dtype="int32"), min_cuts=3),
    multi_head(X, X, X, attrs={"num_heads": 3, "unidirectional": 1}, min_cuts=2),
    multi_head(X, X, X, None, None, f32(2, 1, 5, 7), *PAST, outputs=3, min_cuts=3),
    group_query(f32(2, 5, 48), f32(2, 5, 24), f32(2, 5, 24), None, None, last=4, min_cuts=3),
    group_query(f32(2, 5, 96), None, None, None, None, last=4, min_cuts=2),
    group_query(
        *(f32(2, 1, 96), f32(2, 1, 48), f32(2, 1, 48), f32(2, 3, 6, 16), f32(2, 3, 6, 16)),
        *(f32(9, 8), f32(9, 8)),
        last=6,
        min_cuts=3,
    ),
    group_query(
        *(f32(2, 1, 192), None, None, f32(2, 3, 9, 16), f32(2, 3, 9, 16)),
        *(f32(9, 8), f32(9, 8)),
        last=6,
        min_cuts=2,
    ),
)
CASES = (*ATTENTION_CASES, *ROTARY_CASES, *MICROSOFT_CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case) -> None:
    check_row(case)


def test_keys_with_their_heads_apart_are_opaque() -> None:
    node = multi_head(X, f32(2, 3, 4, 4), f32(2, 3, 4, 4))
    assert "three 3-D operands" in check_opaque(node)


def test_rotary_packed_batches_are_opaque() -> None:
    attrs = {"is_packed_batching": 1}
    node = case(f"{MS}RotaryEmbedding", f32(2, 3, 5, 4), PLACES, *TABLE, attrs=attrs, opset=1)
    assert "is_packed_batching" in check_opaque(node)

"""Our own PyTorch operators keep the rules of operators, and their gradients are right."""

from typing import Any

import pytest
import torch
from torch import Tensor

import partitioner.backends.torch.operators
from partitioner.backends.torch.operators import vocabulary
from partitioner.backends.torch.operators.spatial import KERNELS

assert partitioner.backends.torch.operators
operators = torch.ops.partitioner

X = torch.randn(4, 6, 5, 5)
LAST = torch.randn(4, 6, 5, 5).contiguous(memory_format=torch.channels_last)
CHANNEL = torch.rand(6) + 0.5
SETTINGS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)

#: Queries with rows before heads, keys, the result's log-sum-exp, and parts of four rows.
Q, K, L = torch.randn(2, 4, 4, 8).transpose(1, 2), torch.randn(2, 2, 4, 8), torch.rand(2, 4, 4)
ENDS = [0, 1, 3, 1, 1, 2]
RING = (True, None, ENDS, [2, 1], 1)

CALLS: list[tuple[str, tuple[Any, ...]]] = [
    ("attention_join", (Q, L, Q.contiguous(), L, True)),
    ("attention_part", (Q, K, K, None, None, [4, 4], [0, 4])),
    ("attention_part", (Q.bfloat16(), K.bfloat16(), K.bfloat16(), None, 0.5, [2, 2, 9, 2], [1, 4])),
    ("attention_part_backward", (Q, Q, K, K, None, Q, L, None, [2, 4], [2, 4])),
    ("attention_step", (Q, K, K, torch.rand(4, 4) > 0.3, *RING)),
    ("attention_step", (Q, K, K[..., :3], None, *RING)),
    ("attention_step_backward", (Q, Q, K, K, None, Q, L, *RING)),
    ("turn", (K, [1, 3, 0, 1], [3, 1], [3, 1], 2)),
    ("batch_norm_apply", (X, CHANNEL, CHANNEL, CHANNEL, None, 1e-5)),
    ("batch_norm_apply", (X.bfloat16(), None, CHANNEL, None, None, 1e-5)),
    ("batch_norm_grad_input", (X, X, CHANNEL, CHANNEL, None, torch.randn(2, 6), 100)),
    ("batch_norm_grad_sums", (X, X, CHANNEL, CHANNEL)),
    ("batch_norm_grad_sums", (X.bfloat16(), X.bfloat16(), CHANNEL, CHANNEL)),
    ("batch_norm_running", (CHANNEL, CHANNEL, CHANNEL, CHANNEL, 100, 0.1)),
    ("batch_norm_running", (CHANNEL, CHANNEL, CHANNEL.half(), CHANNEL.half(), 1, 0.1)),
    ("batch_norm_statistics", (torch.rand(2, 6).double(), 100, 1e-5, torch.float32)),
    ("batch_norm_statistics", (torch.rand(2, 6).double(), 100, 1e-5, torch.float64)),
    ("batch_norm_sums", (X,)),
    ("batch_norm_sums", (X.bfloat16(),)),
    ("convolution_grad_input", (X, torch.randn(6, 3, 2, 2), [4, 3, 6, 6], *SETTINGS)),
    ("convolution_grad_weight", (X, torch.randn(4, 3, 6, 6), [6, 3, 2, 2], *SETTINGS)),
    ("group_norm_apply", (X, torch.randn(4, 2), torch.rand(4, 2), CHANNEL, None)),
    ("group_norm_apply", (LAST, torch.randn(4, 2), torch.rand(4, 2), CHANNEL, CHANNEL)),
    (
        "group_norm_grad_planes",
        (X, LAST, torch.randn(4, 3), torch.rand(4, 3), CHANNEL, torch.randn(2, 4, 6), 50),
    ),
    ("group_norm_grad_sums", (X, LAST, torch.randn(4, 3), torch.rand(4, 3))),
    ("group_norm_statistics", (torch.rand(2, 4, 3).double(), 100, 1e-5, torch.float32)),
    ("group_norm_sums", (LAST, 3)),
    ("group_norm_grad_input", (X, X, torch.randn(4, 2), torch.rand(4, 2), CHANNEL, 2)),
    ("group_norm_grad_weight", (X, X, torch.randn(4, 2), torch.rand(4, 2), 2, torch.float32)),
    ("layer_norm_grad_input", (X, X, [5], *torch.rand(2, 4, 6, 5, 1), None)),
    ("layer_norm_grad_weight", (X, X, [5], *torch.rand(2, 4, 6, 5, 1), torch.float32)),
    ("max_pool_grad_part", (X, torch.arange(600).view(4, 6, 5, 5) % 80, [2, 1], [5, 6], [8, 10])),
    ("max_pool_part", (X, [3, 2], [2, 1], [1, 2], [1, 0, 0, 1], [4, 0], [9, 5])),
    ("max_pool_part", (X[0], [2, 2], [1, 1], [1, 1], [0, 0, 0, 0], [0, 1], [5, 6])),
    (
        "max_pool_part",
        (
            torch.arange(-12, 0).view(1, 1, 3, 4),
            [2, 2],
            [1, 1],
            [1, 1],
            [1, 1, 1, 1],
            [0, 0],
            [3, 4],
        ),
    ),
    ("rms_norm", (X, [5, 5], torch.rand(5, 5), 1e-5)),
    ("rms_norm", (X.bfloat16(), [5], torch.rand(5).bfloat16(), None)),
    ("rms_norm_grad_input", (X, X, [5], torch.rand(4, 6, 5, 1), None)),
    ("rms_norm_grad_weight", (X.bfloat16(), X.bfloat16(), [5], X[..., :1], torch.bfloat16)),
    ("upsample", (X, "cubic", [7, 9], False, [])),
    ("upsample_backward", (torch.randn(4, 6, 7, 9), "nearest", [7, 9], [4, 6, 5, 5], False, [])),
]


@pytest.mark.parametrize(("name", "args"), CALLS, ids=lambda x: x if isinstance(x, str) else "")
def test_results_are_fresh_and_fakes_are_like_them(name: str, args: tuple[Any, ...]) -> None:
    op = getattr(operators, name).default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("mode", "space"), sorted(KERNELS), ids=str)
def test_upsampling_is_pytorchs(mode: str, space: int) -> None:
    small, large = [3, 4, 2][:space], [5, 8, 3][:space]
    x = torch.randn(2, 3, *small, dtype=torch.float64, requires_grad=True)
    interpolation, _, extra = mode.partition("-anti")
    named = {"linear": {1: "linear", 2: "bilinear", 3: "trilinear"}[space], "cubic": "bicubic"}
    wanted = torch.nn.functional.interpolate(
        x, large, mode=named.get(interpolation, interpolation), antialias=bool(extra)
    )
    result = operators.upsample(x, mode, large, False, [])
    torch.testing.assert_close(result, wanted, rtol=0, atol=0)
    seed = torch.randn_like(wanted)
    (theirs,) = torch.autograd.grad(wanted, x, seed)
    (ours,) = torch.autograd.grad(result, x, seed)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_factors_of_upsampling_count_as_pytorchs_do() -> None:
    """A factor that is asked for sets the grid, even where the size is rounded."""
    x = torch.randn(2, 3, 5, 5)
    wanted = torch.nn.functional.interpolate(x, scale_factor=1.5, mode="bilinear")
    torch.testing.assert_close(
        operators.upsample(x, "linear", [7, 7], False, [1.5, 1.5]), wanted, rtol=0, atol=0
    )


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [1e-5, None])
def test_rms_norm_is_pytorchs(weighted: bool, eps: float | None) -> None:
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True) if weighted else None
    asked: list[Tensor] = [x, *([weight] if weight is not None else [])]
    wanted = torch.nn.functional.rms_norm(x, [8], weight, eps)
    result, rstd = operators.rms_norm(x, [8], weight, eps)
    assert not rstd.requires_grad
    torch.testing.assert_close(result, wanted)
    seed = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, asked, seed)
    torch.testing.assert_close(torch.autograd.grad(result, asked, seed), theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_in_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 8).to(dtype), torch.randn(8).to(dtype)
    wanted = torch.nn.functional.rms_norm(x, [8], weight)
    result, _ = operators.rms_norm(x, [8], weight, None)
    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("kind", ["layer_norm", "group_norm"])
def test_statistics_need_not_be_contiguous(kind: str) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 4, 6, 8)
    aten, operators = torch.ops.aten, torch.ops.partitioner
    if kind == "layer_norm":
        _, *stats = aten.native_layer_norm(x, [8], None, None, 1e-5)
        sizes, groups = ([8],), ()
    else:
        x, grad = x[None], grad[None]
        _, *stats = aten.native_group_norm(x, None, None, 1, 4, 48, 2, 1e-5)
        sizes, groups = (), (2,)

    def gradients(*stats: Tensor) -> list[Tensor]:
        data = getattr(operators, f"{kind}_grad_input")(grad, x, *sizes, *stats, None, *groups)
        weight = getattr(operators, f"{kind}_grad_weight")(
            grad, x, *sizes, *stats, *groups, x.dtype
        )
        return [data, *weight]

    apart = [torch.stack([one, one], -1)[..., 0] for one in stats]
    assert not apart[0].is_contiguous()
    for one, other in zip(gradients(*stats), gradients(*apart), strict=True):
        assert torch.equal(one, other)


def test_a_ring_under_a_mask_of_large_numbers() -> None:
    """In rows of one large number throughout, too, the parts of the keys have their shares."""
    query, key, value = torch.randn(3, 1, 2, 8, 4).unbind()
    mask = torch.randn(8, 8)
    mask[2], mask[3], mask[4, :5] = -1e9, torch.finfo(torch.float32).min, -1e9
    intervals, counts = [0, 5, 5, 3], [1, 1]
    turned = [operators.turn(x, [5, 3, 0, 5], [], [], 2) for x in (key, value)]
    steps = [
        operators.attention_step(query, *kv, mask, False, None, intervals, counts, step)
        for step, kv in enumerate(((key, value), turned))
    ]
    result, logsumexp = operators.attention_join(*steps[0], *steps[1], True)
    mask[2:4] = 0
    expected = operators.attention(query, key, value, mask, False, None)[0]
    torch.testing.assert_close(result, expected)
    gradients = [
        operators.attention_step_backward(
            *(result, query, *kv, mask, result, logsumexp, False, None, intervals, counts, step)
        )
        for step, kv in enumerate(((key, value), turned))
    ]
    of_query = operators.attention_backward(
        *(
            result,
            query,
            key,
            value,
            mask,
            *operators.attention(query, key, value, mask, False, None),
        ),
        *(False, None),
    )[0]
    torch.testing.assert_close(gradients[0][0] + gradients[1][0], of_query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pieces", [([0], [7]), ([2], [3]), ([5, 0], [2, 1]), ([], [])])
def test_cross_entropy_in_blocks_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pieces: tuple[list[int], list[int]]
) -> None:
    """The last block is smaller, and some targets are ignored or of other classes."""
    torch.manual_seed(0)
    classes = sum(pieces[1])
    logits = torch.randn(5, 7, 2, dtype=torch.float32).to(dtype)[:, :classes, 0]
    target, maximum = torch.tensor([0, 6, -100, 2, 4]), torch.rand(5, 1).to(dtype)
    operands = logits, maximum, target
    results = []
    for block in (1 << 16, 2 * max(1, classes)):
        monkeypatch.setattr(vocabulary, "_BLOCK", block)
        assert vocabulary._is_in_blocks(logits) == (block < logits.numel())
        sums = operators.cross_entropy_parts(*operands, -100, 7, *pieces)
        slopes = operators.cross_entropy_grad(*sums, *operands, *pieces)
        results.append((*sums, slopes))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    wide = logits.double() - maximum.double()
    torch.testing.assert_close(results[0][0].double(), wide.exp().sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_bags_of_shards_add_up(weighted: bool, padding: int) -> None:
    """A device has some rows, and all indices of all bags: one bag is empty."""
    torch.manual_seed(0)
    table, indices = torch.randn(9, 3), torch.randint(9, (17,))
    offsets = torch.tensor([0, 3, 3, 9, 12, 13])
    weights = torch.rand(17) if weighted else None
    whole = torch.nn.functional.embedding_bag(
        *(indices, table, offsets),
        mode="sum",
        per_sample_weights=weights,
        padding_idx=None if padding < 0 else padding,
    )
    settings = ([0], [17], [0], [6])
    for shards in ((([0], [5]), ([5], [4])), (([7, 0], [2, 3]), ([3], [4]), ([], []))):
        parts = [
            operators.embedding_bag(
                table[
                    [row for at, size in zip(*pieces, strict=True) for row in range(at, at + size)]
                ],
                *(indices, offsets, weights, 0, 6, padding, 9, 17, *pieces, *settings),
            )
            for pieces in shards
        ]
        torch.testing.assert_close(torch.stack(parts).sum(0), whole)


def test_offsets_of_bags_that_decrease_are_refused() -> None:
    call = torch.tensor([0, 1, 0]), torch.tensor([0, 2, 1]), None, 0, 3, -1, 2, 3
    with pytest.raises(RuntimeError, match="embedding_bag: offsets decrease"):
        operators.embedding_bag(torch.ones(2, 1), *call, [0], [2], [0], [3], [0], [3])

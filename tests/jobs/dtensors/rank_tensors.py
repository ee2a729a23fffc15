"""Operators on tensors in parts: as on the whole tensor, or refused. Jobs of module_jobs.py."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F  # noqa: N812 - the usual name
from torch.nn import init
from torch.utils import _pytree as pytree

from jobs.processes.torch_ranks import Job
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor

o = torch.optim
Cuts = Sequence[Placement]
#: A whole tensor that all ranks have.
WHOLE = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
#: Refused, whatever is advised behind it.
REFUSED = r"^\w+\(\) is not computed of a tensor that is cut over ranks: compute it of p\.full_tens"


def in_parts(whole: Tensor, mesh: DeviceMesh, cuts: Cuts) -> RankTensor:
    made = distribute_tensor(whole.detach().clone(), mesh, cuts)
    is_whole = all(cut.is_replicate() for cut in cuts)  # PyTorch makes it contiguous
    return RankTensor.of(whole.detach().clone() if is_whole else made._local_tensor, made._spec)


def full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


#: Results of a tensor, of which gradients go back to it.
RESULTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda w: w * 2 - w.sigmoid() / 3,
    lambda w: torch.where(w > 0.5, w, 0.0),
    lambda w: w * w.norm() + w.sum() * w.detach().square(),
    lambda w: w * w.amax() + w.mean(),
    lambda w: w.norm(3),
    lambda w: w.norm(torch.inf),
    lambda w: w.norm(1),
    lambda w: w * w.detach().norm(0),
    lambda w: w.square().mean() + w.abs().sum(),
    lambda w: w.std() + w.var() + w.max() + w.min(),
    lambda w: torch.stack([w.norm(), w.sum(), w.mean()]).square(),
    lambda w: w.norm(dim=0).sum() + w.norm(dim=1).sum(),
    lambda w: w * (w.norm(dim=-1, keepdim=True) + 1),
    lambda w: w / w.sum(0),
    lambda w: w.clone().to(torch.float64).exp(),
    lambda w: w.softmax(0) + w.softmax(1),
    lambda w: torch.cat([w, w * 2]).sum(),
    lambda w: F.mse_loss(w, w.detach() * 2),
    lambda w: _products(w) * w.norm(),
)
#: Writes to a tensor.
WRITES: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w.zero_(),
    lambda w: w.fill_(3.0),
    lambda w: w.mul_(2).add_(w).clamp_(0.1, 1.5),
    lambda w: w.lerp_(w * 2, 0.3),
    lambda w: w.addcdiv_(w, w + 1, value=0.5),
    lambda w: w.div_(w.norm()),
    lambda w: w.masked_fill_(w > 0.5, 0.0),
    lambda w: w.copy_(torch.arange(15.0).reshape(5, 3)),
    lambda w: w.copy_(torch.arange(15).reshape(3, 5).T),
    lambda w: w.copy_(torch.arange(3.0)),
    lambda w: w.copy_(w * 2),
    lambda w: w.copy_(torch.ones(5, 3).copy_(w) * 3),
    lambda w: torch.mul(w, 2, out=w),
    lambda w: torch._foreach_mul_([w, w], [2.0, 3.0]),
    lambda w: torch._foreach_lerp_([w], [w * 2], 0.3),
    lambda w: torch._foreach_copy_([w], [w * 2]),
    lambda w: torch._foreach_mul_([w], w.norm()),
    lambda w: w.data.mul_(0.5),
    lambda w: setattr(w, "data", w.data * 3),
    lambda w: nn.utils.clip_grad_norm_([_with_gradient(w)], 0.1),
    lambda w: nn.utils.clip_grad_value_([_with_gradient(w)], 0.1),
    lambda w: w.copy_(F.dropout(w)),
    lambda w: w.normal_(),
    lambda w: w.exponential_(),
    lambda w: w.add_(torch.randn_like(w)).mul_(torch.rand_like(w)),
    init.kaiming_uniform_,
    init.xavier_normal_,
    init.trunc_normal_,
    init.ones_,
)


def _with_gradient(w: Tensor) -> Tensor:
    w.grad = w.detach()  # what is done to it is done to the tensor
    return w


def _gradient(*losses: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor | None]:
    """The gradient to which those of losses are added, one after the other."""

    def compute(w: Tensor) -> Tensor | None:
        parameter = nn.Parameter(w)
        for loss in losses:
            loss(parameter).backward()
        return parameter.grad

    return compute


def _steps(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Tensor]:
    """Steps of which the first has the gradient of a sum, which is whole on all ranks."""

    def compute(w: Tensor) -> Tensor:
        parameter = nn.Parameter(w)
        update = make([parameter], lr=0.1, **options)
        for loss in (torch.sum, _squares, _squares):
            update.zero_grad(set_to_none=False)
            loss(parameter).backward()
            update.step()
        return parameter.detach()

    return compute


def _squares(w: Tensor) -> Tensor:
    return w.square().sum()


def _products(w: Tensor) -> Tensor:
    whole = full(w)
    return (whole @ whole.T).sum()


def _two_gradients(w: Tensor) -> list[Tensor | None]:
    """Gradients of two tensors, one of which is written to."""
    both = nn.Parameter(w), nn.Parameter(w.clone())
    (full(both[0]) + full(both[1])).sum().backward()
    assert both[0].grad is not None
    both[0].grad.mul_(2)
    return [one.grad for one in both]


MANY = torch.ones(4, 50_000, dtype=torch.float16)  # more than the largest number of the type
COLUMNS = WHOLE.T.contiguous().T  # a matrix whose columns lie in memory one after the other
#: What is computed of other tensors, without gradients of the results.
COMPUTED: tuple[tuple[Tensor, Callable[[Tensor], Any]], ...] = (
    (MANY, lambda w: (w.mean(), w.mean((0, 1)), w.mean(dtype=torch.float32))),
    (MANY * torch.tensor([[1], [1], [-1], [-1]], dtype=torch.float16), lambda w: w.sum()),
    (MANY.to(torch.bfloat16), lambda w: (w.mean(), w.sum())),
    (MANY.float(), lambda w: (w / 4).mean(dtype=torch.float16)),
    (torch.arange(15).reshape(5, 3), lambda w: (w.sum(), w.sum(dtype=torch.int32))),
    (torch.arange(15, dtype=torch.int32).reshape(5, 3), lambda w: w.sum()),
    (torch.complex(WHOLE, WHOLE + 1), lambda w: (w.conj(), w.conj().sum(), w.mean(), w.norm())),
    (COLUMNS, lambda w: (torch.randn_like(w), w.clone().normal_())),
    (COLUMNS, lambda w: w.contiguous().normal_()),
    (COLUMNS, lambda w: torch.empty_like(w, memory_format=torch.contiguous_format).normal_()),
    (COLUMNS, lambda w: torch.rand_like(w, memory_format=torch.contiguous_format).normal_()),
    (WHOLE, lambda w: torch._foreach_pow(2.0, [w, w * 2])),
    (WHOLE, lambda w: torch.add(w.sum(0).expand(5, 3).clone(), w, alpha=2)),
    (WHOLE, _gradient(torch.sum, _squares)),
    (WHOLE, _gradient(_squares, torch.sum)),
    (WHOLE, _gradient(_products, _squares)),
    (WHOLE, _gradient(lambda w: _products(w) + w.norm(), torch.sum)),
    (WHOLE, _two_gradients),
    *((WHOLE, _steps(o.SGD, momentum=0.9, foreach=way)) for way in (False, True)),
    *((WHOLE, _steps(o.Adam, foreach=way)) for way in (False, True)),
)


#: What would be of a part, or of another tensor on each rank.
OTHERS: tuple[Callable[[Tensor], object], ...] = (
    lambda w: w[0],
    lambda w: w[1:3].zero_(),
    lambda w: w.T,
    lambda w: w.view(-1),
    lambda w: w.diagonal(),
    lambda w: w.unbind(),
    lambda w: w.mul_(torch.ones(5, 3)),
    lambda w: w * torch.ones(3),
    lambda w: torch.ones(5, 3).lerp_(w, 0.1),
    lambda w: torch._foreach_mul_([w], [torch.ones(5, 3)]),
    lambda w: w.triu_(),
    lambda w: w.index_fill_(0, torch.tensor([0]), 1.0),
    lambda w: w.random_(),
    torch.bernoulli,
    lambda w: F.mse_loss(w, torch.ones(5, 3)),
    init.orthogonal_,
    lambda w: w.share_memory_(),
    torch.from_dlpack,
    lambda w: torch.native_batch_norm(w, None, None, w, w, True, 0.1, 1e-5),
)


def computes_as_whole(ranks: Any, cuts: Cuts, _: int) -> None:
    mesh = DeviceMesh("cpu", ranks)
    for compute in RESULTS:
        sides = nn.Parameter(in_parts(WHOLE, mesh, cuts)), nn.Parameter(WHOLE.clone())
        results = [compute(side) for side in sides]
        for result in results:
            result.sum().backward()
        torch.testing.assert_close(full(results[0]), results[1])
        assert isinstance(sides[0].grad, RankTensor)
        torch.testing.assert_close(full(sides[0].grad), sides[1].grad)
    with torch.no_grad():
        for write in WRITES:
            both = in_parts(WHOLE, mesh, cuts), WHOLE.clone()
            count = both[0]._version
            for side in both:
                torch.manual_seed(3)
                write(side)
            torch.testing.assert_close(full(both[0]), both[1])
            assert both[0]._version > count
        for other in OTHERS:
            part = in_parts(WHOLE, mesh, cuts)
            with pytest.raises(BackendError, match=REFUSED):
                other(part)
    _check_computed(mesh, cuts)
    part, row = in_parts(WHOLE, mesh, cuts), in_parts(WHOLE[0], mesh, [Replicate()] * mesh.ndim)
    whole = in_parts(WHOLE, mesh, [Replicate()] * mesh.ndim)
    for refused in (
        lambda: torch.cat([row, row], out=row[:0].clone()),
        lambda: torch._foreach_mul_([torch.ones(1)], [part]),
        lambda: row.clone().t_(),
        lambda: part.clone().resize_(2),
    ):
        with pytest.raises(BackendError, match=REFUSED):
            refused()
    torch.testing.assert_close(full(whole), WHOLE)
    torch.testing.assert_close(full(part * row), WHOLE * WHOLE[0])
    torch.testing.assert_close(full(whole.mul_(part)), WHOLE * WHOLE)
    count = part._version
    torch._foreach_mul_([whole], [part])
    assert part._version == count  # it was read alone
    torch.testing.assert_close(full(whole), WHOLE**3)
    with pytest.raises(RuntimeError, match=r"mean.*Input dtype must be .*floating point"):
        in_parts(WHOLE > 0, mesh, cuts).mean()
    with pytest.raises(
        BackendError, match=r"^the \.data of a tensor of torch\.float32 that .*64: co"
    ):
        part.data = part.double()
    few = in_parts(WHOLE[:2], mesh, cuts)  # some ranks have no row of it
    for order in (torch.inf, 2.0, 1.0):
        torch.testing.assert_close(full(few.norm(order)), WHOLE[:2].norm(order))
    for value in (WHOLE, in_parts(WHOLE, mesh, [Replicate()] * mesh.ndim)):
        with pytest.raises(BackendError, match=r"^the \.data of a tensor that .* not cut so"):
            part.data = value
    part.copy_(in_parts(WHOLE * 2, mesh, [Replicate()] * mesh.ndim))
    torch.testing.assert_close(full(part), WHOLE * 2)
    assert bool(torch.equal(part, part.clone()))


def _check_computed(mesh: DeviceMesh, cuts: Cuts) -> None:
    for tensor, compute in COMPUTED:
        sides = tensor.clone(), in_parts(tensor, mesh, cuts)
        expected, computed = (_seeded(compute, side) for side in sides)
        for one, other in zip(*map(pytree.tree_leaves, (computed, expected)), strict=True):
            torch.testing.assert_close(full(one), other)


def _seeded(compute: Callable[[Tensor], Any], w: Tensor) -> Any:
    torch.manual_seed(3)
    return compute(w)


def whole_ones_are_as_on_one_device(_: int) -> None:
    """Of a tensor that all ranks have, all operators are allowed."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    _check_computed(mesh, [Replicate()])
    part, whole = in_parts(WHOLE, mesh, [Replicate()]), WHOLE.clone()
    for one in (part, whole):
        one[3] += 1
        one.T[0].mul_(torch.arange(5.0))
        one[one > 0.5] = 0.5
        one.view(-1)[2] = 7
    torch.testing.assert_close(full(part), whole)
    torch.testing.assert_close(full(part @ part.T), whole @ whole.T)
    total = torch.zeros(())
    total += part.norm()
    assert type(total) is Tensor
    torch.testing.assert_close(total, whole.norm())
    assert part.sum().item() == pytest.approx(whole.sum().item())


def absent_ranks_say_so(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    part = in_parts(WHOLE, mesh, [Shard(0)])
    part.mul_(2).add_(1).copy_(WHOLE)
    part.normal_()
    if rank == 2:
        with pytest.raises(BackendError, match=r"^rank 2 has no part of .* ranks 0, 1: read it t"):
            part.amax()
        return
    part.amax()


def samples_are_as_whole(_: int) -> None:
    """PyTorch's samples: an operator of parts is that of whole tensors, or refused."""
    from torch.testing._internal.common_methods_invocations import op_db

    from helpers.drawn.operator_samples import operator_samples

    warnings.simplefilter("ignore")  # PyTorch's, of old names
    mesh, counts, wrong = DeviceMesh("cpu", [0, 1]), Counter[str](), dict[str, str]()
    for info in op_db:
        if torch.float32 not in info.supported_dtypes("cpu") or "empty" in info.name:
            continue  # nothing is said of what an empty tensor holds
        for index, sample in enumerate(operator_samples(info)):
            if index == 2:
                break
            for variant in (info.op, info.inplace_variant):
                said = _outcome(variant, sample, mesh) if variant is not None else ""
                if said:
                    counts[said.partition(":")[0]] += 1
                if said.startswith("differs"):
                    wrong[info.full_name] = said
    assert not wrong, wrong
    assert counts["equal"] > 400, counts
    assert counts["refused"] > 250, counts


def _outcome(variant: Callable[..., Any], sample: Any, mesh: DeviceMesh) -> str:
    """Say whether results of parts are equal, or how they are refused."""
    given = (sample.input, *sample.args), sample.kwargs
    first = next(
        (x for x in pytree.tree_leaves(given) if isinstance(x, Tensor) and _can_be_cut(x)), None
    )
    if first is None:
        return ""

    def part(x: Tensor) -> Tensor:
        is_alike = x.shape == first.shape and _can_be_cut(x)
        return in_parts(x, mesh, [Shard(0)]) if is_alike else x.clone()

    parts, wholes = (pytree.tree_map_only(Tensor, make, given) for make in (part, Tensor.clone))
    try:
        torch.manual_seed(0)
        expected = variant(*wholes[0], **wholes[1])
    except Exception:  # noqa: BLE001 - such as writes to tensors of another type
        return ""
    if any(x.layout is not torch.strided for x in _tensors(expected)):
        return ""  # sparse results, which no DTensor has
    try:
        torch.manual_seed(0)
        result = variant(*parts[0], **parts[1])
    except BackendError as error:
        return "refused:" if re.match(REFUSED, str(error)) else f"differs: {error}"
    except Exception as error:  # noqa: BLE001 - it is counted
        return f"raised: {type(error).__name__}: {error}"
    try:
        ours, theirs = pytree.tree_leaves((result, parts)), pytree.tree_leaves((expected, wholes))
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, Tensor | float):
                torch.testing.assert_close(full(one), other, equal_nan=True, rtol=1e-4, atol=1e-5)
    except AssertionError as error:
        return f"differs: {error}"
    return "equal:"


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _can_be_cut(x: Tensor) -> bool:
    return x.ndim > 0 and x.numel() > 1 and x.layout is torch.strided


JOBS = {
    **{
        f"parts of {len(cuts)}: {cuts}": Job(ranks, partial(computes_as_whole, mesh, cuts))
        for ranks, mesh, cuts in (
            (3, [0, 1, 2], [Shard(0)]),
            (3, [0, 1, 2], [Shard(1)]),
            (4, [[0, 1], [2, 3]], [Shard(0), Shard(1)]),
            (4, [[0, 1], [2, 3]], [Replicate(), Shard(0)]),
        )
    },
    "whole tensors": Job(3, whole_ones_are_as_on_one_device),
    "absent ranks": Job(3, absent_ranks_say_so),
    "samples of parts": Job(2, samples_are_as_whole, slow=True, limit_s=600),
}

"""A call of a rank's module as PyTorch's autograd sees it: its graphs, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from partitioner.backends.errors import BackendError
from partitioner.backends.torch.agreeing.agreement import Agreement
from partitioner.backends.torch.dtensors.rank_tensor import RankTensor
from partitioner.backends.torch.graphs.eager import Carrier
from partitioner.backends.torch.graphs.signature import Signature
from partitioner.backends.torch.running.held_state import HeldState, versions
from partitioner.backends.torch.running.rank_passes import RankPasses, Values
from partitioner.backends.torch.state.buffers import apart
from partitioner.backends.torch.state.shards import part_of, region_within


@dataclass(frozen=True)
class RankCall:
    """A call of a rank's module."""

    passes: RankPasses  #: Its graphs.
    values: list[Values]  #: Their inputs by local name.
    held: HeldState  #: The rank's parameters and buffers.
    shards: Mapping[str, Tensor]  #: Its parts of them as they lie.
    #: Waits until all ranks agree on the call; it may be given an operand of all of them.
    agreed: Callable[..., Tensor | None]
    step: int  #: Number of its training step, of its last micro-batch.

    def forward(self, *, backward: bool = False) -> tuple[tuple[Tensor, ...], Values]:
        """Run the forward graph, and count its writes to DTensors as PyTorch does to tensors."""
        results = self.passes.forward(self.values, self.shards, self.agreed, backward=backward)
        written = map(self.held.tensors.get, self.passes.whole.written)
        increment_version([tensor for tensor in written if isinstance(tensor, DTensor)])
        return results


class TrainingStep(torch.autograd.Function):
    """The forward graph, and in backward the backward graph."""

    @staticmethod
    def forward(
        ctx: Any, call: RankCall, agreement: Agreement, names: Sequence[str], *_: Tensor
    ) -> tuple[Tensor, ...]:
        """Run the forward graph; results require gradients as the module's do."""
        computed, kept = call.forward(backward=True)
        results = tuple(result.detach() for result in computed)  # kept values hold no graph
        passes, held, shards = call.passes, call.held, call.shards
        ctx.agreement, ctx.passes, ctx.held, ctx.step = agreement, passes, held, call.step
        ctx.kept, ctx.names, ctx.meetings = kept, names, agreement.meetings
        ctx.shards = {name: shards[name] for name in passes.read_again}
        counts = ((held.tensors[name]._version, x._version) for name, x in ctx.shards.items())
        ctx.versions = [*counts]  # as `writes_to` of shards that lie there
        ctx.writes = versions(kept.values())
        signature = passes.whole.signature
        named = zip(signature.results, signature.differentiable, strict=True)
        flags = [differentiable for name, differentiable in named if name]
        cut = (result for result, flag in zip(results[1:], flags[1:], strict=True) if not flag)
        ctx.mark_non_differentiable(*cut)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward graph, once: it frees the kept values.

        A rank computes until it sends something before it waits for the others to agree. Where it
        sends nothing, it goes on to its optimizer's step and waits in its next call. Only the loss,
        the first result, has a backward pass.
        """
        held, kept, problem = ctx.held, ctx.kept, ""
        if any(grad is not None for grad in grads[1:]):
            problem = (
                "a gradient reaches another result of the module than its loss, which comes first: "
                "compute all of the loss in the module, or detach() the other results"
            )
        elif torch.is_grad_enabled():
            problem = "backward with create_graph=True: a program has no gradients of gradients"
        elif kept is None:
            problem = "backward() was called a second time on one step: it is freed"
        elif held.writes_to(ctx.shards) != ctx.versions:
            problem = (
                "backward() after a parameter that it needs was written to, as by "
                "optimizer.step(): call backward() before that, or the module again"
            )
        elif versions(kept.values()) != ctx.writes:
            problem = (
                "backward() after an input, a result or a buffer of the step that it needs was "
                "written to in place: write to a clone(), or call backward() before that"
            )
        problem = problem and f"rank {held.rank}: {problem}"
        # that of a loss to which a DTensor was added, as a penalty of weights, is a DTensor
        tangent = grads[0].full_tensor() if isinstance(grads[0], DTensor) else grads[0]
        is_scaled = not (held.places.all_hold_all or problem) and float(tangent) != 1.0
        doing = f"backward() of training step {ctx.step}"
        doing = f"{doing} by {float(tangent):g}" if is_scaled else doing
        agreement: Agreement = ctx.agreement
        passes: RankPasses = ctx.passes
        meeting = agreement.begin(doing, problem)
        if problem or is_scaled:
            meeting.meet()
        elif ctx.meetings == agreement.meetings == agreement.marking:  # alike on all ranks
            meeting.group = passes.group
        elif passes.carriers.get(True) is not Carrier.ROW:
            meeting.post()

        def agreed(given: Tensor | Exception | None = None) -> Tensor | None:
            return meeting.meet(given)[1]

        ctx.kept = ctx.shards = None
        gradients = passes.backward(kept, tangent, agreed)
        return *[None] * 4, *_gradients(gradients, passes, held, tangent, ctx.names)


class Evaluated(torch.autograd.Function):
    """Results that refuse a backward pass: a sum with them would train the rest of it alone."""

    @staticmethod
    def forward(
        ctx: Any, agreement: Agreement, said: str, shown: Sequence[tuple[Tensor, bool]], _: Tensor
    ) -> tuple[Tensor, ...]:
        """Return results, those with a flag with a gradient; `said` is why none goes back."""
        ctx.agreement, ctx.said = agreement, said
        results = [(result.detach(), flag) for result, flag in shown]
        ctx.mark_non_differentiable(*(result for result, flag in results if not flag))
        return tuple(result for result, _ in results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, ...]:
        """Refuse it on all ranks."""
        problem = f"rank {ctx.agreement.rank}: {ctx.said}"
        ctx.agreement.check("backward() of an evaluation", problem)
        raise AssertionError(ctx.said)


def differentiable(
    results: Sequence[Tensor], signature: Signature, trained: Signature
) -> list[tuple[Tensor, bool]]:
    """Pair each result of a call with whether it would require a gradient.

    That is as in the call that was compiled, of the signature `trained`, if it has as many results.
    """
    names, flags = signature.results, trained.differentiable
    known = flags if len(flags) == len(names) else [True] * len(names)
    named = [flag for name, flag in zip(names, known, strict=True) if name]
    return [
        (x, flag and (x.is_floating_point() or x.is_complex()))
        for x, flag in zip(results, named, strict=True)
    ]


def _gradients(
    gradients: Mapping[str, Tensor],
    passes: RankPasses,
    held: HeldState,
    tangent: Tensor,
    names: Sequence[str],
) -> Iterator[Tensor | None]:
    """Gradients of parameters, in order; None for one that has none.

    None has memory of another, as PyTorch adds to them, and clips them, in place.

    Raises:
        BackendError: The plan gives this rank no part of a gradient that is of its parameter's.
    """
    parts: dict[str, Tensor] = {}
    shards, tensors = held.shards, held.tensors
    for name in names:
        if (gradient := gradients.get(name)) is None:
            continue
        shard = shards[name]
        if gradient.shape != shard.shape:  # a part of it is of the part here
            gradient = _part_here(gradient, name, passes, held)
        # fused optimizers read both in one order
        is_alike = gradient.stride() == shard.stride()
        parts[name] = gradient if is_alike else torch.empty_like(shard).copy_(gradient)
    parts = apart(parts, [tangent])
    for name in names:
        part, tensor = parts.get(name), tensors.get(name)
        if tensor is None:  # without elements: what asks for all ranks' goes through it
            part = torch.zeros_like(held.elsewhere[name])
        elif part is not None and isinstance(tensor, RankTensor):
            part = tensor.like(part)
        yield part


def _part_here(gradient: Tensor, name: str, passes: RankPasses, held: HeldState) -> Tensor:
    """Take the part of a gradient that is of the parameter's part here: a view, if it can be."""
    (value,) = (e.gradient for e in passes.whole.stored if e.names[0] == name)
    place = passes.whole.programs.homes[value].placement
    region = region_within(held.places.by_name[name], place, held.rank)
    if region is None:
        raise BackendError(
            f"rank {held.rank}: the optimizer's state of {name} is of no part of the "
            "gradient that it holds: compile with parallel='zero2'"
        )
    return part_of(gradient, region)

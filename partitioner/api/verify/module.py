"""Proof that the ranks of a module compute what the module does.

All ranks run in this process, in lock-step, on random inputs like the example inputs, and are
compared with the module itself: results, written buffers and, in training, every gradient. A
program in micro-batches is compared with the module's in micro-batches, and with a call of the
whole batch beside, which may differ. A module with dropout draws other masks than its program; the
program's masks do not depend on how it is cut, so its ranks are compared with the program on one
device. If a tensor differs, the first value of the graph that differs is searched for
(`partitioner.api.verify.first_difference`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from partitioner.api.verify.compare import (
    MEASURED,
    TOLERANCE,
    Difference,
    Verification,
    VerificationError,
    compare,
    largest,
    worst,
)
from partitioner.api.verify.first_difference import (
    Side,
    first_difference,
    tolerances,
    uncut_programs,
)
from partitioner.backends.errors import one_line
from partitioner.backends.tensors import from_numpy, to_numpy
from partitioner.backends.torch.running.all_ranks import AllRanks, Step
from partitioner.frontends.torch.element_types import dtype_name
from partitioner.frontends.torch.trace import TracedModule
from partitioner.ir.graph import Graph
from partitioner.ir.types import TensorType

#: Errors of a gradient are relative to at least this share of the largest gradient of all
#: parameters: gradients that are zero in exact arithmetic (of a bias before a normalisation, of an
#: attention's key bias) are rounding errors of sums whose terms are as large as other gradients.
GRADIENT_FLOOR = 0.1

#: Ranks may differ from the module by so many times the module's own error against float64: ranks
#: and module sum in different orders.
ROUNDING = 10.0
#: The limit of that allowance, as a share of a tensor's largest magnitude: less than the error if
#: one of two ranks' parts were missing.
MOST = 0.25
#: The limit does not hold if the tensor in float64 is at most this share of the module's: it is
#: zero but for rounding.
NOTHING = 0.01

#: Modules that draw numbers in training, and draw none at probability 0.
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)

#: How hooks of a parameter are set, and where it keeps them.
_PARAMETER_HOOKS = {
    "register_hook": "_backward_hooks",
    "register_post_accumulate_grad_hook": "_post_accumulate_grad_hooks",
}

Values = dict[str, torch.Tensor]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def verify_module(
    module: TracedModule,
    ranks: AllRanks,
    seed: int,
    given: Arguments | None = None,
) -> Verification:
    """Compare all ranks with the module; a BackendError if a rank fails.

    `given` are arguments in place of random ones; `seed` is that of these and of dropout.
    """
    args, kwargs = random_arguments(module, seed) if given is None else given
    inputs = module.signature.feed(args, kwargs, seed)
    ours = _FedRanks(ranks, inputs, module.stored_values())
    in_parts = module.micro is not None and module.micro.count > 1
    if module.signature.seed:
        against = (
            "the same program on one device (its dropout is drawn otherwise than the module's)"
        )
        uncut = module.traced.uncut if module.graph.blocks else module.graph
        whole = _named(module, ours.alone(uncut).step())
    else:
        against = "the whole module"
        if module.micro is not None and in_parts:
            against = f"accumulation of {module.micro.count} micro-batches"
        whole = _eager(module, args, kwargs)
    step = ours.step()
    others = [replace(step, results=results) for results in step.copies]
    copies = [_named(module, one) for one in (step, *others)]
    floors = _floors(whole)
    table = MEASURED
    compared = _compared(module, copies, whole, floors, table)
    if not all(output.equal for output in compared):
        rounding = _rounding_allowances(module, args, kwargs, floors)
        table = MEASURED if rounding else TOLERANCE
        compared = _compared(module, copies, whole, floors, table, rounding)
    first = None
    if not all(output.equal for output in compared) and ranks.micro.count == 1:
        floor = GRADIENT_FLOOR * _largest_gradient(whole)
        first = first_difference(
            module.graph, ours.side, ours.alone(module.graph).side, floor, table
        )
    said = seed if given is None else None
    verification = Verification(
        len(ranks.ranks), said, compared, first, against, copies=len(copies) * bool(others)
    )
    if not in_parts or module.signature.seed:
        return verification
    at_once = replace(module, micro=None)
    try:
        whole = _eager(at_once, args, kwargs)
        floors = _floors(whole)
        beside = _compared(module, copies, whole, floors, MEASURED)
        if not all(output.equal for output in beside):
            rounding = _rounding_allowances(at_once, args, kwargs, floors)
            beside = _compared(module, copies, whole, floors, MEASURED, rounding)
    except Exception as error:  # noqa: BLE001 - the module's own code may refuse so many samples
        return replace(verification, no_whole_batch=f"the module refuses it ({one_line(error)})")
    return replace(verification, whole_batch=beside)


def check_contents(module: TracedModule) -> None:
    """Refuse, as a VerificationError, modules whose weights or example inputs are fake."""
    if has_no_contents(module):
        raise VerificationError(
            "the module's weights or example inputs have no contents: nothing can be computed"
        )


def has_no_contents(module: TracedModule) -> bool:
    """Tell whether a weight or an example input is fake."""
    captured = module.traced.captured
    return any(
        isinstance(tensor, FakeTensor) or getattr(tensor, "is_meta", False)
        for tensor in (*captured.tensors.values(), *captured.call.example)
    )


def random_arguments(module: TracedModule, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments like the example inputs.

    They hold the example's elements in another order, so that indices stay within their tables,
    probabilities between 0 and 1, and positive numbers positive. A row of ascending numbers stays
    as it is, as offsets and boundaries must, and so do elements that are not finite, as in masks.
    Floats that are all equal are drawn between that number and half of it, zeros between 0 and 1.
    """
    signature = module.signature
    random = torch.Generator().manual_seed(seed)
    flat = [random_like(value, random) for value in signature.example]
    args, kwargs = pytree.tree_unflatten(flat, signature.in_spec)
    return tuple(args), dict(kwargs)


def arrays_like(
    examples: Mapping[str, np.ndarray], types: Mapping[str, TensorType], seed: int
) -> dict[str, np.ndarray]:
    """Random arrays (see `random_arguments`) like examples of inputs of these types."""
    random = torch.Generator().manual_seed(seed)
    return {
        name: to_numpy(random_like(from_numpy(array, types[name].dtype), random), types[name].dtype)
        for name, array in examples.items()
    }


def random_like(value: Any, random: torch.Generator) -> Any:
    """An argument like an example, see `random_arguments`."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor, row = value.detach().cpu(), value.dim() == 1
    if tensor.is_floating_point() or tensor.is_complex():
        # a copy also of a tensor that has this type
        wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)
        finite = wide.isfinite()
        flat = wide[finite]
        if torch.equal(flat, flat[:1].expand_as(flat)):
            drawn = torch.rand(flat.shape, generator=random, dtype=torch.float64)
            wide[finite] = torch.where(flat == 0, drawn, flat * (1 + drawn) / 2)
        else:
            wide[finite] = _other_order(flat, random, row=row and not flat.is_complex())
        return wide.to(tensor.dtype)
    return _other_order(tensor.reshape(-1), random, row=row).reshape(tensor.shape)


def _other_order(flat: torch.Tensor, random: torch.Generator, *, row: bool) -> torch.Tensor:
    if row and torch.equal(flat, flat.sort().values):
        return flat
    return flat[torch.randperm(flat.numel(), generator=random)]


@dataclass(frozen=True)
class _FedRanks:
    ranks: AllRanks
    inputs: Mapping[str, torch.Tensor]
    stored: Mapping[str, torch.Tensor]

    def step(self) -> Step:
        return self.ranks.step(self.inputs, self.stored)

    def alone(self, graph: Graph) -> _FedRanks:
        ranks, rest = self.ranks, self.ranks.rest
        order = ranks.programs.order
        count = None if order.is_whole else order.table.micro_batches
        alone = partial(uncut_programs, deliver_all=True, micro_batches=count)
        if rest is not None:
            rest = replace(rest, programs=alone(rest.graph))
        return replace(self, ranks=ranks.of(alone(graph), graph, rest))

    @property
    def side(self) -> Side:
        def run(keep: Mapping[int, Collection[str]]) -> Mapping[int, Mapping[str, np.ndarray]]:
            kept = self.ranks.step(self.inputs, self.stored, keep).kept
            return {rank: {name: _array(x) for name, x in of.items()} for rank, of in kept.items()}

        return Side(self.ranks.programs, run)


def _named(module: TracedModule, step: Step) -> Values:
    tensors = {**step.results, **step.gradients}
    return {name: tensors[value] for name, value in _compared_values(module).items()}


def _compared_values(module: TracedModule) -> dict[str, str]:
    """Values of the graph that are compared, by the module's names."""
    traced = module.traced
    names = zip(result_names(module), traced.call.results, strict=True)
    values = {name: value for name, value in names if value}
    values |= {f"grad:{name}": value for name, value in sorted(traced.gradients.items())}
    values |= {f"buffer:{name}": value for name, value in sorted(traced.written.items())}
    return values


def result_names(module: TracedModule) -> list[str]:
    """The name of each flat result, as ``output['logits']``; in training the first is ``loss``."""
    spec = module.signature.out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = pytree.tree_flatten_with_path(tree)[0]
    names = [f"output{pytree.keystr(path)}" for path, _ in paths]
    return ["loss", *names[1:]] if module.options.training else names


def _eager(module: TracedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Values:
    """Results, gradients and buffers of a copy of the module, which itself stays as it is."""
    try:
        copied = _copied(module.module)
    except Exception as error:
        why = " ".join(str(error).split())
        raise VerificationError(f"the module cannot be copied: {why}") from error
    values = _called(module, copied, args, kwargs)
    tensors = {
        **dict(copied.named_parameters(remove_duplicate=False)),
        **dict(copied.named_buffers(remove_duplicate=False)),
    }
    for name in sorted(module.traced.gradients):
        gradient = tensors[name].grad
        values[f"grad:{name}"] = torch.zeros_like(tensors[name]) if gradient is None else gradient
    values |= {f"buffer:{name}": tensors[name] for name in sorted(module.traced.written)}
    return values


def _called(
    module: TracedModule, copied: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Values:
    """Results by name of a copy that is called as the program is: in micro-batches if it is so."""
    training, micro = module.options.training, module.micro
    shares = (1.0,) if micro is None else micro.shares
    calls = [(args, dict(kwargs))]
    if micro is not None:
        parts = micro.parts(module.signature.flatten(args, kwargs))
        calls = [module.signature.call(part) for part in parts]
    results = []
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(training):
        for (call_args, call_kwargs), share in zip(calls, shares, strict=True):
            flat = pytree.tree_leaves(copied(*call_args, **call_kwargs))
            if training:
                (flat[0] * share).backward()
            of_values = zip(module.traced.call.results, flat, strict=True)
            results.append({value: result.detach() for value, result in of_values if value})
    whole = results[0] if micro is None else micro.whole(results)
    names = zip(result_names(module), module.traced.call.results, strict=True)
    return {name: whole[value] for name, value in names if value}


def _copied(module: nn.Module) -> nn.Module:
    """A copy, with the hooks of its parameters, which PyTorch does not copy.

    Tensors that it computed in an earlier call, which PyTorch cannot copy, are constants of it.
    """
    held = (value for part in module.modules() for value in vars(part).values())
    computed = {
        id(value): value.detach().clone()
        for value in held
        if isinstance(value, torch.Tensor) and not value.is_leaf
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about its own exported programs
        copied = copy.deepcopy(module, dict[int, Any](computed))
    copied.zero_grad(set_to_none=True)
    for name, parameter in module.named_parameters():
        for setter, kind in _PARAMETER_HOOKS.items():
            for hook in (getattr(parameter, kind) or {}).values():
                getattr(copied.get_parameter(name), setter)(hook)
    return copied


def _rounding_allowances(
    module: TracedModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    floors: Mapping[str, float],
) -> dict[str, float]:
    """The errors that the module's own rounding allows, by name (see `allowance`).

    They are measured without dropout. Empty if the module still draws numbers, or does not run in
    float64: its rounding is then unknown.
    """

    def seeded(module: TracedModule, seed: int) -> Values:
        torch.manual_seed(seed)
        return _eager(module, args, kwargs)

    try:
        calm = replace(module, module=_copied(module.module))
        for part in calm.module.modules():
            if isinstance(part, DROPOUTS):
                part.p = 0.0
        with torch.random.fork_rng(devices=[]):
            whole, again = (seeded(calm, seed) for seed in range(2))
        if any(not torch.equal(whole[name], again[name]) for name in whole):
            return {}
        args, kwargs = pytree.tree_map_only(torch.Tensor, _wide, (args, dict(kwargs)))
        with torch.autocast("cpu", enabled=False):
            exact = _eager(replace(calm, module=_copied(calm.module).double()), args, kwargs)
    except Exception:  # noqa: BLE001 - after any error the rounding is unknown
        return {}
    allowances = {}
    for name, tensor in exact.items():
        ours, theirs = _array(tensor), _array(_wide(whole[name]))
        error = compare(name, ours, theirs, floors.get(name, 0.0)).error
        allowances[name] = allowance(error, theirs, ours)
    return allowances


def allowance(error: float, whole: np.ndarray, exact: np.ndarray) -> float:
    """Relative error that ranks may have, from that of the float64 tensor relative to the module's.

    It is a multiple of that error; 0 if that is not finite. It is at most `MOST`, or a wrong rule
    would pass where a sort or a threshold makes the module jump, but has no limit where the tensor
    is zero but for rounding.
    """
    if not math.isfinite(error):
        return 0.0
    is_zero = largest(exact) <= NOTHING * largest(whole)
    return ROUNDING * error if is_zero else min(ROUNDING * error, MOST)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _largest_gradient(whole: Values) -> float:
    gradients = (value for name, value in whole.items() if name.startswith("grad:"))
    return max((largest(_array(gradient)) for gradient in gradients), default=0.0)


def _compared(
    module: TracedModule,
    copies: Sequence[Values],
    whole: Values,
    floors: Mapping[str, float],
    table: Mapping[str, float],
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Difference, ...]:
    """Each tensor, with the tolerance of its element type, or a larger one for `rounding`.

    Of whole copies, it is that of the copy which differs most.
    """
    known, differences = tolerances(module.graph, table), []
    for name, value in _compared_values(module).items():
        own = rounding.get(name, 0.0)
        one, zero, least = _array(whole[name]), floors.get(name, 0.0), max(known[value], own)
        arrays = (_array(copy[name]) for copy in copies)
        found = worst(compare(name, ours, one, zero, least, table) for ours in arrays)
        is_of_rounding = name in rounding and found.tolerance == own
        differences.append(replace(found, rounding=own / ROUNDING) if is_of_rounding else found)
    return tuple(differences)


def _floors(whole: Values) -> dict[str, float]:
    """Least magnitudes that errors are relative to, by the tensor's name; 0 of those left out.

    A running mean is that of values whose spread its running variance knows, and rounds as they do:
    it may be nearly zero, where the layer before has made the mean zero.
    """
    gradient = GRADIENT_FLOOR * _largest_gradient(whole)
    floors = {name: gradient for name in whole if name.startswith("grad:")}
    for name in whole:
        variance = whole.get(f"{name.removesuffix('running_mean')}running_var")
        if name.endswith("running_mean") and variance is not None:
            floors[name] = math.sqrt(largest(_array(variance)))
    return floors


def _array(tensor: torch.Tensor) -> np.ndarray:
    dense = tensor.detach().resolve_conj().resolve_neg()
    if dense.is_complex():
        dense = torch.view_as_real(dense)
    return to_numpy(dense, dtype_name(dense.dtype))

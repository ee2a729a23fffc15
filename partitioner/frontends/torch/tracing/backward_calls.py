"""Keeps what a module's own code says of its backward pass, which `torch.export` drops.

An export has the operators of the forward pass. So it loses the backward passes of custom
functions (`torch.autograd.Function`), and hooks of tensors, parameters and modules. While a module
is exported for training such calls are recorded, one node each, and the joint trace makes the same
calls again: there autograd finds them, and traces what they do as it traces its own formulas.

What is called is Python code, and runs once, while it is traced. So it is refused by name if it
reads tensors that are not its arguments, or if it returns no gradient: a hook that only looks at
gradients would look at none.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import (
    fetch_object_proxy,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import BackwardHook

from partitioner.frontends.errors import FrontendError
from partitioner.frontends.torch.exporting import is_writing, refused, replaced, writing
from partitioner.frontends.torch.patterns.rewrite import graph_modules
from partitioner.frontends.torch.refusing.reasons import reason


class _Recorded(HigherOrderOperator):
    """Stands for a recorded call in an exported graph: its number, then its tensors."""

    def __init__(self) -> None:
        super().__init__("partitioner_recorded")  # type: ignore[no-untyped-call]

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a recorded call that was not replaced")


_RECORDED = fx.node.has_side_effect(_Recorded())


@dataclass
class Recorded:
    """The recorded calls of an export, by number: functions of the tensors that they were given."""

    calls: list[Callable[..., Any]] = field(default_factory=list)  #: The functions.
    busy: bool = False  #: Whether a recorded call runs: what it calls itself is a part of it.

    @property
    def here(self) -> bool:
        """Tell whether a call is to be recorded: a graph is written, and no recorded call runs."""
        return not self.busy and is_writing()

    def record(
        self, call: Callable[..., Any], now: Callable[[], Any], tensors: Sequence[Tensor]
    ) -> Any:
        """Record a call of these tensors; `now` makes it for the export, and gives its results."""
        mode = writing()
        self.busy = True
        try:
            with _unwritten():
                results = now()
        finally:
            self.busy = False
        found = (fetch_object_proxy(mode.tracer, tensor) for tensor in tensors)
        arguments = (len(self.calls), *(getattr(one, "proxy", one) for one in found))
        node = mode.tracer.create_proxy("call_function", _RECORDED, arguments, {})
        self.calls.append(call)
        track_tensor_tree(results, node, constant=None, tracer=mode.tracer)
        return results

    def repeated_in(self, module: fx.GraphModule) -> None:
        """Make the recorded nodes of an exported graph calls again, in place."""
        for part in graph_modules(module):
            for node in part.graph.find_nodes(op="call_function", target=_RECORDED):
                number, *tensors = node.args
                node.target, node.args = self.calls[number], tuple(tensors)
            part.recompile()


@contextmanager
def recording(module: nn.Module, *, training: bool) -> Iterator[Recorded]:
    """Record the calls that an export for training would drop, inside of the block.

    One for inference has no backward pass: it records nothing.
    """
    calls = Recorded()
    if not training:
        yield calls
        return
    for path, part in module.named_modules():
        if part._backward_hooks and not part._is_full_backward_hook:
            raise FrontendError(
                f"{path or type(module).__name__}: hooks of register_backward_hook cannot be "
                "traced, whose gradients are those of the last operator: use "
                "register_full_backward_hook"
            )
    for name, parameter in module.named_parameters():
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            raise FrontendError(
                f"hook {_name(hook)} of parameter {name} runs after gradients are accumulated, "
                "which a trace does not have: set it on the parameters of program.module()"
            )
    replacements: Mapping[tuple[Any, str], Any] = {
        (Function, "apply"): classmethod(_recorded_apply(calls)),
        (Tensor, "register_hook"): _recorded_tensor_hook(calls),
        (Tensor, "grad_fn"): _guarded_grad_fn(calls),
        (BackwardHook, "setup_input_hook"): _recorded_module_hook(calls, "setup_input_hook"),
        (BackwardHook, "setup_output_hook"): _recorded_module_hook(calls, "setup_output_hook"),
        (torch.inference_mode, "__enter__"): _without_grad(calls),
        (saved_tensors_hooks, "__enter__"): _refused_packing(calls),
        **{
            (Tensor, name): refused(
                getattr(Tensor, name),
                f"forward calls {name}(), which would act once, while it is traced: remove it",
                lambda: calls.here,
            )
            for name in ("retain_grad", "register_post_accumulate_grad_hook")
        },
    }
    with replaced(replacements):
        yield calls


@contextmanager
def _unwritten() -> Iterator[None]:
    """Keep operators that run within out of the exported graph."""
    key = torch._C.DispatchKey.PreDispatch
    include = torch._C._dispatch_tls_local_include_set().remove(key)
    exclude = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


# Custom functions --------------------------------------------------------------------------------

#: A class method of Python in PyTorch 2.13, of C++ in 2.14: a descriptor in both.
_APPLY: Any = vars(Function)["apply"]


def _applied(function: type[Function], *args: Any, **kwargs: Any) -> Any:
    """Call a function's `apply` as PyTorch has it, whatever stands in its place now."""
    return _APPLY.__get__(None, function)(*args, **kwargs)


def _recorded_apply(calls: Recorded) -> Callable[..., Any]:
    def apply(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        if not calls.here:
            return _applied(function, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            raise FrontendError(
                f"{function.__qualname__}.apply in a transform of torch.func, such as vmap, cannot "
                "be traced for training: call it outside"
            )
        if function is CheckpointFunction:
            return _checkpointed(*args)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        guarded = _guarded_function(function)

        def call(*tensors: Tensor) -> Any:
            given, named = pytree.tree_unflatten(_filled(leaves, tensors), spec)
            with _arguments_only(f"{function.__qualname__}.forward"):
                return _applied(guarded, *given, **named)

        return calls.record(call, lambda: _applied(function, *args, **kwargs), _tensors(leaves))

    return apply


def _checkpointed(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """A checkpoint with `use_reentrant=True`: it has gradients if an argument has one."""
    has_gradient = any(one.requires_grad for one in _tensors(args))
    if torch.is_grad_enabled() and not has_gradient:
        raise FrontendError(
            "a checkpoint with use_reentrant=True gives its parameters no gradient where none of "
            "its arguments requires one: use use_reentrant=False"
        )
    with torch.set_grad_enabled(torch.is_grad_enabled() and has_gradient):
        return run(*args)


def _guarded_function(function: type[Function]) -> type[Function]:
    """The function, whose backward pass is refused by name if it cannot be traced."""
    name = "backward" if function.vjp is Function.vjp else "vjp"
    backward: Any = getattr(function, name)

    def guarded(ctx: Any, *gradients: Any) -> Any:
        with _arguments_only(f"{function.__qualname__}.{name}"):
            return backward(ctx, *gradients)

    return type(function.__name__, (function,), {name: staticmethod(guarded)})


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _filled(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
    left = iter(tensors)
    return [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


# Hooks -------------------------------------------------------------------------------------------


def _recorded_tensor_hook(calls: Recorded) -> Callable[..., Any]:
    original: Any = Tensor.register_hook

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        if not calls.here or not tensor.requires_grad:
            return original(tensor, hook)  # which refuses a tensor without a gradient
        what = f"hook {_name(hook)} of a tensor"
        if isinstance(tensor, nn.Parameter):
            raise FrontendError(
                f"{what}: forward sets it on a parameter, once more in each call: set it once, "
                "before compile"
            )
        held = _held_tensors(hook)

        def call(hooked: Tensor, *others: Tensor) -> None:
            guarded = _guarded_hook(_holding(hook, held, others), what)
            hooked.register_hook(guarded)  # type: ignore[no-untyped-call]

        calls.record(call, lambda: None, [tensor, *held.values()])
        return _Handle(what)

    return register_hook


def _recorded_module_hook(calls: Recorded, name: str) -> Callable[..., Any]:
    """The function that `nn.Module` applies for full backward hooks: to arguments, then results."""
    original = getattr(BackwardHook, name)

    def setup(hooks: BackwardHook, values: Any) -> Any:
        if not calls.here:
            return original(hooks, values)
        leaves, spec = pytree.tree_flatten(values)

        def call(*tensors: Tensor) -> Any:
            if name == "setup_input_hook":  # the first of the two, with a state of its own
                kind = f"of a {type(hooks.module).__name__}"
                behind, before = (
                    [_guarded_hook(one, f"backward hook {_name(one)} {kind}") for one in some]
                    for some in (hooks.user_hooks, hooks.user_pre_hooks)
                )
                hooks.again = BackwardHook(hooks.module, behind, before)  # type: ignore[attr-defined]
            filled = pytree.tree_unflatten(_filled(leaves, tensors), spec)
            return original(hooks.again, filled)  # type: ignore[attr-defined]

        return calls.record(call, lambda: original(hooks, values), _tensors(leaves))

    return setup


def keep_parameter_hooks(module: nn.Module, program: ExportedProgram) -> None:
    """Set the hooks of the module's parameters in an exported graph, in place."""
    targets = program.graph_signature.inputs_to_parameters
    graph = program.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    hooked: dict[int, fx.Node] = {}
    for node in placeholders:
        name = targets.get(node.name)
        parameter = None if name is None else module.get_parameter(name)
        if parameter is None or not parameter._backward_hooks:
            continue
        if id(parameter) in hooked:  # tied: one gradient, which hooks see once
            node.replace_all_uses_with(hooked[id(parameter)])
            continue
        hooked[id(parameter)] = node
        hooks = [
            _guarded_hook(hook, f"hook {_name(hook)} of parameter {name}")
            for hook in parameter._backward_hooks.values()
        ]
        with graph.inserting_after(placeholders[-1]):
            graph.call_function(_hooks_set(hooks), (node,))
    program.graph_module.recompile()


def _hooks_set(hooks: Sequence[Callable[..., Any]]) -> Callable[[Tensor], None]:
    def call(parameter: Tensor) -> None:
        for hook in hooks if parameter.requires_grad else ():
            parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    return call


def _guarded_hook(hook: Callable[..., Any], what: str) -> Callable[..., Any]:
    def guarded(*args: Any) -> Any:
        with _arguments_only(what):
            result = hook(*args)
        if result is None:
            raise FrontendError(
                f"{what} returns None: it would run once, while it is traced, and never see a "
                "gradient: return the new gradient, or remove the hook before compile and look at "
                "the parameters' gradients after backward()"
            )
        return result

    return guarded


def _name(hook: Any) -> str:
    """``name (file.py:12)``."""
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _held_tensors(hook: Any) -> dict[int, Tensor]:
    """The tensors that a function takes from around it, by place in its closure."""
    held = {}
    for place, cell in enumerate(getattr(hook, "__closure__", None) or ()):
        with suppress(ValueError):  # a cell may have no contents yet
            if isinstance(cell.cell_contents, Tensor):
                held[place] = cell.cell_contents
    return held


def _holding(hook: Any, held: Mapping[int, Tensor], others: Sequence[Tensor]) -> Any:
    if not held:
        return hook
    cells = list(hook.__closure__)
    for place, tensor in zip(held, others, strict=True):
        cells[place] = types.CellType(tensor)
    again = types.FunctionType(
        hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, tuple(cells)
    )
    again.__kwdefaults__ = hook.__kwdefaults__
    return again


# Refusals ----------------------------------------------------------------------------------------


class _Handle:
    """The handle of a hook that was set while a module is traced."""

    def __init__(self, what: str) -> None:
        self.what = what

    def remove(self) -> None:
        raise FrontendError(f"{self.what}: forward removes it, which cannot be traced")


class _Guard:
    """A node of autograd's graph, as a module's forward pass sees it: no hooks can be set."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            raise FrontendError(
                f"forward calls {self._node.name()}.{name}: hooks of autograd's nodes cannot be "
                "traced; set the hook on the tensor, with tensor.register_hook"
            )
        return getattr(self._node, name)


def _guarded_grad_fn(calls: Recorded) -> property:
    original: Any = Tensor.grad_fn

    def grad_fn(tensor: Tensor) -> Any:
        node = original.__get__(tensor)
        ours = calls.busy or sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        return node if node is None or ours else _Guard(node)

    return property(grad_fn)


def _without_grad(calls: Recorded) -> Callable[..., None]:
    """Enters `torch.inference_mode` as a region without gradients, which can be traced."""
    original = torch.inference_mode.__enter__

    def enter(region: Any) -> None:
        if calls.here:
            region._inference_mode_context = torch.set_grad_enabled(not region.mode)
        else:
            original(region)

    return enter


def _refused_packing(calls: Recorded) -> Callable[..., None]:
    original = saved_tensors_hooks.__enter__

    def enter(region: saved_tensors_hooks) -> None:
        kind = type(region)
        changes = kind is saved_tensors_hooks or not kind.__module__.startswith("torch.")
        if calls.here and changes:
            raise FrontendError(
                f"{kind.__qualname__} in forward: what autograd keeps cannot be packed in "
                "a trace; remove it (recompute= saves memory)"
            )
        original(region)

    return enter


class _ArgumentsOnly(TorchFunctionMode):
    """Refuses tensors that the trace does not know."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        reads = getattr(func, "__name__", "") == "__get__"
        leaves = () if reads else pytree.tree_leaves((args, kwargs or {}))
        mode = get_proxy_mode()
        for tensor in _tensors(leaves):
            inner: Any = tensor
            if isinstance(tensor, FunctionalTensor):
                inner = torch._from_functional_tensor(tensor.elem)
            if isinstance(inner, FakeTensor) and (
                mode is None or get_proxy_slot(inner, mode.tracer, None) is not None
            ):
                continue
            raise FrontendError(
                f"{self.what} reads a tensor {list(tensor.shape)} that is not its argument, and "
                "would be a constant: give it as an argument"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _arguments_only(what: str) -> Iterator[None]:
    """Trace code of the user, called `what`, that reads its arguments alone; else FrontendError."""
    try:
        with _ArgumentsOnly(what):
            yield
    except FrontendError:
        raise
    except Exception as error:
        raise FrontendError(f"{what} cannot be traced: {reason(error)}") from error

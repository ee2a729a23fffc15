"""The keyword arguments of `compile`, `sweep` and `dump_problem`; `compile` describes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Required, TypedDict, TypeVar, cast

from partitioner.cost_model.cluster import Cluster
from partitioner.ir.plan import Plan
from partitioner.search.request import Recompute, Request, Say
from partitioner.solver import Objective
from partitioner.strategies.constraints import Constraints

Function = TypeVar("Function", bound=Callable[..., Any])


class ModelOptions(TypedDict, total=False):
    """How a model is read or traced."""

    training: bool
    optimizer: str
    parallel: str | None
    dims: Mapping[str, int] | None
    shapes: Mapping[str, tuple[int, ...]] | None
    progress: Say | None


class SearchOptions(TypedDict, total=False):
    """What is asked of a search."""

    objective: Objective
    strategy: str
    time_limit_s: float
    gap: float
    solver: str
    seed: int


class TargetOptions(TypedDict, total=False):
    """The devices, and what is pinned on them."""

    cluster: str | Path | Cluster | None
    memory: int | str | None
    mesh: Mapping[str, int] | None
    constraints: Constraints | Plan | str | Path | None


class CompileOptions(ModelOptions, TargetOptions, SearchOptions, total=False):
    """Of `compile`."""

    recompute: Recompute


class DumpOptions(ModelOptions, TargetOptions, total=False):
    """Of `dump_problem`."""

    strategy: Required[str]
    example_inputs: Any


class SweepOptions(ModelOptions, SearchOptions, total=False):
    """Of `sweep`."""

    clusters: Iterable[str | None]
    memory: Iterable[int | str | None]
    meshes: Iterable[Mapping[str, int]]


#: Defaults that are not None and no field of `Request`.
_DEFAULTS: Mapping[str, Any] = {
    **{field.name: field.default for field in fields(Request)},
    "training": False,
    "optimizer": "adamw",
    "constraints": None,
    "clusters": (None,),
    "meshes": (),
}


def takes(options: type) -> Callable[[Function], Function]:
    """Give a function with ``**options`` the signature that lists them; others are refused.

    Args:
        options: The TypedDict of the function's keyword arguments.
    """

    def decorate(function: Function) -> Function:
        plain = inspect.signature(function)
        required: frozenset[str] = options.__required_keys__  # type: ignore[attr-defined]
        listed = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, annotation in options.__annotations__.items():
            default = inspect.Parameter.empty if name in required else _DEFAULTS.get(name)
            keyword = inspect.Parameter.KEYWORD_ONLY
            listed.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
        signature = plain.replace(parameters=listed)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return cast("Function", call)

    return decorate


def request_of(options: Mapping[str, Any], constraints: Constraints) -> Request:
    """The request in keyword arguments.

    Raises:
        OptionError: A value means nothing.
    """
    names = {field.name for field in fields(Request)} - {"constraints"}
    given = {name: options[name] for name in names if name in options}
    return Request(constraints=constraints, **given)

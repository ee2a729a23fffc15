"""Misspelt keyword arguments of public functions and methods are answered with the right one."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import partitioner
from partitioner import functional
from partitioner.ir.errors import hints_keywords

#: Made by the package only, and exceptions.
RESULTS = ("Plan", "Verification", "Infeasible", "OptionError", "PartitionerError")


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in (partitioner, functional):
        for name in sorted({*module.__all__} - {*RESULTS}):
            member = getattr(module, name)
            if not isinstance(member, type):
                if callable(member):
                    yield name, member
                continue
            yield name, member
            for base in member.__mro__:
                if base.__module__.startswith("partitioner."):
                    for method, function in vars(base).items():
                        is_method = inspect.isfunction(function) or isinstance(
                            function, classmethod
                        )
                        if is_method and not method.startswith("_"):
                            yield f"{name}.{method}", getattr(member, method)


def keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    listed = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in listed):  # a model's own arguments
        return []
    return [one for one in listed if one.kind in kinds and one.name != "self"]


CASES = dict(functions())


def test_all_doors_are_tried() -> None:
    assert {"compile", "load", "calibrate", "sweep", "Constraints.placed", "Chain.add"} <= {*CASES}
    assert {"ModuleProgram.module", "Compiled.save", "allreduce", "Cluster"} <= {*CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_misspelt_keyword_is_answered_with_the_right_one(name: str) -> None:
    function = CASES[name]
    known = {one.name for one in keywords(function)}
    given = {  # `signature.bind` speaks of missing arguments first
        one.name: None for one in keywords(function) if one.default is one.empty
    }
    if "self" in inspect.signature(function).parameters:
        given["self"] = None
    for one in sorted(known):
        wrong = one[:-1]
        if len(one) < 4 or wrong in known:
            continue
        others = {key: value for key, value in given.items() if key != one}
        if one in given:
            others[one] = None
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{wrong}'.*{one}"):
            function(**others, **{wrong: None})


@pytest.mark.parametrize(
    ("wrong", "right"), [("time_limit", "time_limit_s"), ("device", "devices")]
)
def test_an_option_of_compile(wrong: str, right: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^compile\(\) got .* argument '{wrong}'; did you mean '{right}'\?$"
    ):
        partitioner.compile("m.onnx", **{wrong: 4})


def test_an_error_of_a_call_within_is_left_alone() -> None:
    def inner(size: int) -> int:
        return size

    @hints_keywords
    def outer(sizes: int) -> int:
        return inner(sise=sizes)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"'sise'$"):
        outer(1)

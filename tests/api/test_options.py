"""The keyword arguments of the public functions: listed in signatures, checked at the call."""

import inspect
from typing import Any, Required, TypedDict

import pytest
from typing_extensions import Unpack

import partitioner
from partitioner import examples
from partitioner.api import option_table
from partitioner.api.options import takes


class Baking(TypedDict, total=False):
    """Options of `bake`; `seed` has the default of a search."""

    flour: Required[str]
    oven: str | None
    seed: int


@takes(Baking)
def bake(cake: str, **options: Unpack[Baking]) -> tuple[str, Baking]:
    """Bake a cake."""
    return cake, options


def test_the_signature_lists_the_options_with_their_defaults() -> None:
    cake, flour, oven, seed = inspect.signature(bake).parameters.values()
    assert (cake.name, cake.kind) == ("cake", cake.POSITIONAL_OR_KEYWORD)
    assert all(option.kind is option.KEYWORD_ONLY for option in (flour, oven, seed))
    assert (flour.name, flour.default) == ("flour", flour.empty)
    assert (oven.name, oven.default, oven.annotation) == ("oven", None, str | None)
    assert (seed.name, seed.default, seed.annotation) == ("seed", 0, int)
    assert (bake.__name__, bake.__doc__) == ("bake", "Bake a cake.")


def test_given_options_alone_are_passed_on() -> None:
    assert bake("apple", flour="rye") == ("apple", {"flour": "rye"})


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (["apple"], {"flour": "rye", "size": 2}, r"bake\(\) got an unexpected keyword .*'size'"),
        (["apple"], {}, r"bake\(\) missing a required .*'flour'"),
        ([], {"flour": "rye"}, r"bake\(\) missing a required .*'cake'"),
        (["apple", "rye"], {}, r"bake\(\) too many positional arguments"),
    ],
)
def test_other_arguments_are_refused(
    arguments: list[str], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        bake(*arguments, **keywords)


@pytest.mark.parametrize(
    ("function", "typed"),
    [
        (partitioner.compile, option_table.CompileOptions),
        (partitioner.dump_problem, option_table.DumpOptions),
        (partitioner.profile, option_table.ProfileOptions),
        (partitioner.sweep, option_table.SweepOptions),
    ],
)
def test_public_functions_list_and_describe_all_their_options(function: Any, typed: type) -> None:
    parameters = inspect.signature(function).parameters
    assert typed.__annotations__.keys() <= parameters.keys()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters.values())
    without_default = {p.name for p in parameters.values() if p.default is p.empty}
    positional = {"model", "path"} if function is partitioner.dump_problem else {"model"}
    required = {"strategy"} if function is partitioner.dump_problem else set()
    assert without_default == positional | required
    described = f"{function.__doc__} {partitioner.compile.__doc__}"
    assert not [name for name in parameters if f" {name}: " not in described]


def test_defaults_of_a_sweep_are_those_that_it_takes() -> None:
    parameters = inspect.signature(partitioner.sweep).parameters
    explicit = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    model = examples.build("tiny")
    swept = partitioner.sweep(model, devices=[1], **explicit)
    plain = partitioner.sweep(model, devices=[1])
    assert swept.data == plain.data

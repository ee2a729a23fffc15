"""Pairs of a result and the input of the next call that it becomes, by the names that users give.

>>> named_pairs({"present.*": "past.*"}, ["logits", "present.0.key"], ["ids", "past.0.key"])
{'present.0.key': 'past.0.key'}
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from partitioner.ir.errors import IRError, OptionError, did_you_mean, typed
from partitioner.ir.graph import Graph
from partitioner.ir.ops.onnx.feeding import FEED
from partitioner.ir.types import TensorType

#: Names of inputs, or patterns with one ``*``, by those of the results that become them.
Feed = Mapping[str, str]


def named_pairs(feed: Feed, results: Collection[str], inputs: Collection[str]) -> dict[str, str]:
    """The input that each result becomes, by name; a ``*`` stands for the same text in both names.

    Raises:
        OptionError: A name or pattern matches nothing, a result has no such input or two of them,
            or one input has two results.
    """
    pairs: dict[str, str] = {}
    for one, other in feed.items():
        for name in (one, other):
            if not isinstance(name, str):
                raise OptionError(f"feed has {typed(name)}, not a name of a result or an input")
        text = f"feed {one}={other}"
        if one.count("*") != other.count("*") or one.count("*") > 1:
            raise OptionError(f"{text}: give one * on both sides, or none")
        pattern = re.compile(re.escape(one).replace(r"\*", "(.*)"), re.DOTALL)
        found = [match for match in map(pattern.fullmatch, results) if match]
        if not found:
            near = did_you_mean(one, results)
            raise OptionError(f"{text}: the model has no result {one!r}{near}")
        for match in found:
            name = other.replace("*", match[1]) if "*" in other else other
            if name not in inputs:
                near = did_you_mean(name, inputs)
                raise OptionError(f"{text}: {match[0]!r} would become {name!r}, no input{near}")
            if pairs.setdefault(match[0], name) != name:
                known = pairs[match[0]]
                raise OptionError(f"{text}: {match[0]!r} already becomes {known!r}: give it once")
    for name in {name for name in pairs.values() if [*pairs.values()].count(name) > 1}:
        several = ", ".join(repr(result) for result, to in pairs.items() if to == name)
        raise OptionError(f"feed: input {name!r} would be several results: {several}")
    return pairs


def grown_dim(what: str, result: TensorType, fed: TensorType) -> int | None:
    """The dim in which a result is longer than the input that it becomes; None if none is.

    A refusal begins with `what`, the pair for people.

    Raises:
        OptionError: The result cannot become the input.
    """
    pairs = enumerate(zip(result.shape, fed.shape, strict=False))
    longer = [dim for dim, (a, b) in pairs if a != b]
    fits = len(longer) <= 1 and all(result.shape[dim] > fed.shape[dim] for dim in longer)
    if result.dtype != fed.dtype or result.rank != fed.rank or not fits:
        raise OptionError(
            f"{what}: a result of type {result} cannot become an input of type {fed}: give both "
            "one type and one shape, but for one dim in which the result is longer"
        )
    return longer[0] if longer else None


def fed_pairs(graph: Graph) -> dict[str, str]:
    """The input that each result of a graph becomes, as its nodes say it (`rewrites.fed_results`).

    Results have their users' names.
    """
    pairs = {}
    for node in graph.nodes:
        if node.op == FEED:
            held = graph.producers[node.inputs[1]]
            if held.inputs[0] not in graph.inputs:
                raise IRError(f"node {node.name!r} feeds {held.name!r}, which is no input")
            result = node.outputs[0]
            pairs[graph.output_names.get(result, result)] = held.inputs[0]
    return pairs

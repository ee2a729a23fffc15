"""Kinds of parallelism by name: a table, and "a+b+c" of its words as constraints on a graph.

    dp      data parallel: the batch is cut, parameters are stored and used whole
    zero1   dp with optimizer state cut; parameters and gradients are whole at rest, and what a
            step has changed of parameters is gathered at the begin of the next one
    zero2   zero1 with gradients cut too
    zero3   parameters, gradients and optimizer state are cut at rest, and parameters gathered for
            each pass and freed after their use
    tp      tensor parallel: the batch is whole, every weight matrix is stored and used cut
    ep      expert parallel: dp, but weights of experts are stored and used cut
    dispatch ep whose tokens are sent to the devices of their experts alone
    cp      context parallel: the sequence is cut, parameters are stored and used whole
    ring    cp whose attention passes keys and values round
    spatial what works on images is cut along height, width or depth, each over its axis
    pp      pipeline parallel: stages on devices of their own, which `search.stages.pipelines` cuts;
            the others are then inside of a stage
    dp+tp   and so on: several, each over its axis

A kind binds what makes it that kind; the rest is solved. A new one is a row of `KINDS`, with its
constraints in a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from partitioner.frontends.torch.options import AtRest
from partitioner.ir.checks import is_a
from partitioner.ir.errors import OptionError, did_you_mean
from partitioner.ir.graph import Graph
from partitioner.ir.plan import Plan
from partitioner.rewrites.keys import has_few_queries
from partitioner.strategies.constraints import ConstraintError, Constraints
from partitioner.strategies.kinds.data import DataParallel
from partitioner.strategies.kinds.expert import DATA as EXPERT_DATA
from partitioner.strategies.kinds.expert import DISPATCH, dispatch_constraints, expert_constraints
from partitioner.strategies.kinds.kind import Asked, Kind, ModelKind
from partitioner.strategies.kinds.sequence import (
    RING,
    SEQUENCE,
    ring_constraints,
    ring_forms,
    sequence_constraints,
    sequence_notes,
)
from partitioner.strategies.kinds.spatial import AXES, spatial_constraints, spatial_notes
from partitioner.strategies.kinds.tensor import tensor_constraints
from partitioner.strategies.spaces import SearchError

#: Kinds that other forms of a graph's attention belong to.
FORMS = (SEQUENCE, RING)
#: The word of stages.
PIPELINE = "pp"
#: The word of whole copies that share a batch: what one does without a planner.
DATA = "dp"


def _data(word: str, *, at_rest: bool, until_use: bool, **more: Any) -> Kind:
    data = DataParallel(word, at_rest, until_use)
    return Kind(word, ("dp",), data.constraints, data.notes, cuts_batch=True, **more)


_TRAINED = "it cuts what training keeps: give dp or tp"
_NO_STATE = "it cuts optimizer state, and there is none: give dp or zero3"
_NO_GRADIENTS = "it cuts gradients and optimizer state, and there are none: give dp or zero3"
_READ_WHOLE = "a rank's file holds weights as its operators read them: give dp or tp"

#: All kinds, by their word.
KINDS: Mapping[str, Kind] = {
    kind.word: kind
    for kind in (
        _data(DATA, at_rest=False, until_use=False),
        _data(
            "zero1",
            at_rest=True,
            until_use=False,
            lacks={"onnx": _TRAINED, "inference": _NO_STATE},
            stored={"training": "zero1"},
        ),
        _data(
            "zero2",
            at_rest=True,
            until_use=False,
            lacks={"onnx": _TRAINED, "inference": _NO_GRADIENTS},
            stored={"training": "zero2"},
        ),
        _data(
            "zero3",
            at_rest=True,
            until_use=True,
            lacks={"onnx": _READ_WHOLE},
            stored={"inference": "zero3"},
        ),
        Kind("tp", ("tp",), tensor_constraints),
        Kind("ep", ("ep",), expert_constraints, EXPERT_DATA.notes, cuts_batch=True),
        Kind(
            DISPATCH,
            ("ep",),
            dispatch_constraints,
            EXPERT_DATA.notes,
            lacks={"onnx": "its layers of experts are not one node: give ep"},
            cuts_batch=True,
        ),
        Kind(SEQUENCE, ("cp",), sequence_constraints, sequence_notes),
        Kind(
            RING,
            ("cp",),
            ring_constraints,
            sequence_notes,
            lacks={"onnx": "its attention gives no log-sum-exp: give cp"},
        ),
        Kind("spatial", AXES, spatial_constraints, spatial_notes),
        Kind(PIPELINE, ("pp",), None),
    )
}

#: Models in words, for refusals.
_IN_WORDS: Mapping[ModelKind, str] = {
    "onnx": "of an ONNX model",
    "inference": "in inference",
    "training": "in training",
}


#: What others call the kinds.
_OTHER_NAMES = {
    **dict.fromkeys(("ddp", "data"), "dp"),
    **dict.fromkeys(("fsdp", "fsdp2", "zero"), "zero3"),
    **dict.fromkeys(("tensor", "megatron"), "tp"),
    **dict.fromkeys(("sp", "context", "sequence"), "cp"),
    **dict.fromkeys(("pipeline", "stages"), "pp"),
    **dict.fromkeys(("expert", "experts", "moe"), "ep"),
}


def kinds(text: str | None) -> tuple[Kind, ...]:
    """The kinds that "a+b" names; none of None."""
    if text is None:
        return ()
    if not is_a(text, str):
        raise SearchError(f"parallel is {text!r}; give a text, as 'dp' or 'dp+tp'")
    words = text.split("+")
    known = ", ".join(KINDS)
    for word in words:
        if word not in KINDS:
            hint = did_you_mean(word, KINDS)
            if word.lower() in _OTHER_NAMES:
                hint = f"; did you mean {_OTHER_NAMES[word.lower()]!r}?"
            raise SearchError(
                f"parallel {text!r}: {word!r} is not one of {known}, or several joined by +{hint}"
            )
    asked = tuple(KINDS[word] for word in words)
    for index, kind in enumerate(asked):
        for other in asked[:index]:
            if set(kind.axes) <= set(other.axes) or set(other.axes) <= set(kind.axes):
                raise SearchError(
                    f"parallel {text!r}: {other.word} and {kind.word} need the same mesh axis, "
                    f"{kind.axes[0]}: give one of them"
                )
    return asked


def check_has(text: str | None, model: ModelKind) -> None:
    """Refuse, by an OptionError, kinds that a model does not have."""
    for kind in kinds(text):
        if model in kind.lacks:
            raise OptionError(f"parallel {kind.word!r} {_IN_WORDS[model]}: {kind.lacks[model]}")


def at_rest(text: str | None, *, training: bool) -> AtRest:
    """The kind of parallelism that changes what a module stores, see `ModuleOptions.at_rest`.

    Joined with another kind, parameters and gradients are kept in parts in training: a part that
    two axes cut is not always a part of what one of them cuts.
    """
    asked = kinds(text)
    if training and len(asked) > 1:
        return ""
    model: ModelKind = "training" if training else "inference"
    return next((kind.stored[model] for kind in asked if model in kind.stored), "")


def inside_stages(text: str | None) -> str | None:
    """The kinds inside of a stage: all but the stages themselves; None if there are no others."""
    return "+".join(kind.word for kind in kinds(text) if kind.word != PIPELINE) or None


def wants_stages(text: str | None) -> bool:
    """Test whether stages are among the kinds."""
    return any(kind.word == PIPELINE for kind in kinds(text))


def axes_text(text: str) -> str:
    """The mesh axes that kinds need, in words."""
    return " and ".join(" or ".join(kind.axes) for kind in kinds(text))


def parallel_mesh(text: str, devices: int, mesh: Mapping[str, int] | None) -> Mapping[str, int]:
    """Axes of kinds of parallelism: the mesh, or all devices on the axis of the only kind."""
    asked = kinds(text)
    if mesh is None and len(asked) == 1:
        return {asked[0].axes[0]: devices}
    if mesh is None or _axes(asked, mesh) is None:
        given = "none was given" if mesh is None else f"the mesh given has {', '.join(mesh)}"
        raise SearchError(f"parallel {text!r} wants a mesh of axes {axes_text(text)}; {given}")
    return mesh


def meshes(text: str, devices: int) -> tuple[Mapping[str, int], ...]:
    """The meshes of so many devices that kinds may have: at least two devices on each axis.

    >>> meshes("dp+tp", 8)
    ({'dp': 2, 'tp': 4}, {'dp': 4, 'tp': 2})
    """
    axes = [kind.axes[0] for kind in kinds(text)]
    return tuple(dict(zip(axes, sizes, strict=True)) for sizes in _products(devices, len(axes)))


def _products(devices: int, factors: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a product of so many factors, each of at least two."""
    if factors == 1 and devices > 1:
        yield (devices,)
    for first in range(2, devices // 2 + 1) if factors > 1 else ():
        if devices % first == 0:
            yield from ((first, *rest) for rest in _products(devices // first, factors - 1))


def parallel_constraints(text: str, graph: Graph, mesh: Mapping[str, int]) -> Constraints:
    """Constraints of kinds on a mesh that `parallel_mesh` accepts; ConstraintError if it cannot."""
    joined = Constraints()
    for kind, asked in _asked(text, graph, mesh):
        assert kind.constraints is not None
        joined = joined.joined(kind.constraints(asked))
    return joined


def check_even(text: str | None, graph: Graph, mesh: Mapping[str, int]) -> None:
    """Refuse, by a ConstraintError, an unequal cut of the batch: all devices do equal work."""
    if text is None or _axes(kinds(text), mesh) is None:
        return
    for kind, asked in _asked(text, graph, mesh):
        size = math.prod(asked.axes.values())
        if kind.cuts_batch and (samples := asked.batch.size(graph)) % size:
            raise ConstraintError(
                f"parallel {kind.word}: {size} devices cannot share a batch of {samples} equally, "
                "as devices of a large cluster must"
            )


def depends_on_mesh(text: str | None) -> bool:
    """Test whether the graphs that kinds are planned with depend on the mesh."""
    return any(kind.word in FORMS for kind in kinds(text))


def forms(
    text: str | None, known: tuple[Graph, ...], mesh: Mapping[str, int] | None, *, free: bool
) -> tuple[Graph, ...]:
    """The graphs to be planned: the first and, if that is `free`, other forms of its attention.

    A user's constraints are on the graph as it is. Where few queries meet a cache, a sequence is
    that of the cache, which is cut in the form whose keys are in parts alone.

    Args:
        known: The graph as read and, if there is one, its form in parts.
        free: Whether other forms may be planned than the first.

    Raises:
        ConstraintError: A form is asked for that the graph cannot have.
        SearchError: The mesh has no axis of a form.
    """
    asked_kinds, graph = kinds(text), known[0]
    words = {kind.word for kind in asked_kinds}
    if SEQUENCE in words and has_few_queries(graph):
        return known[1:] or known
    if text is None or mesh is None or words.isdisjoint(FORMS):
        return known if free else (graph,)
    usual = {axis for kind in asked_kinds for axis in kind.axes}
    own = {axis: size for axis, size in mesh.items() if axis in usual} or mesh
    for kind, asked in _asked(text, graph, parallel_mesh(text, 0, own)):
        if kind.word in FORMS:
            rounds = ring_forms(graph, asked.size, only=kind.word == RING, free=free)
            return (*rounds, *known[1:]) if free and kind.word == SEQUENCE else rounds
    return (graph,)


def parallel_notes(
    text: str | None, graph: Graph, plan: Plan, mesh: Mapping[str, int] | None
) -> tuple[str, ...]:
    """Notes for the summary on what a plan does with the kinds of parallelism.

    `mesh` has the axes that were asked for, if any; the plan may be one of stages. Several kinds
    without a mesh have that of the plan.
    """
    inside = inside_stages(text)
    if inside is None:
        return ()
    axes = {axis: size for axis, size in (mesh or {}).items() if axis != PIPELINE}
    if not axes and len(kinds(inside)) > 1:
        axes = dict(max(plan.groups, key=lambda group: group.size()).axes)
    axes = axes or {kinds(inside)[0].axes[0]: 1}
    if _axes(kinds(inside), axes) is None:
        return ()
    return tuple(
        note
        for kind, asked in _asked(inside, graph, axes)
        for note in kind.notes(replace(asked, alone=inside == text and asked.alone), plan)
    )


def _asked(text: str, graph: Graph, mesh: Mapping[str, int]) -> list[tuple[Kind, Asked]]:
    asked = kinds(text)
    axes = _axes(asked, mesh)
    assert axes is not None
    alone = len(asked) == 1
    return [
        (kind, Asked(graph, of_kind, alone, tuple(s for n, s in mesh.items() if n not in of_kind)))
        for kind, of_kind in zip(asked, axes, strict=True)
    ]


def _axes(asked: tuple[Kind, ...], mesh: Mapping[str, int]) -> list[dict[str, int]] | None:
    """The axes of a mesh that each kind has; None if they do not suit the kinds.

    Each has those with its names. If no axis has a name of any kind, they are the user's own, and
    there must be one for each kind, in their order.
    """
    usual = {axis for kind in KINDS.values() for axis in kind.axes}
    if usual.isdisjoint(mesh) and len(mesh) == len(asked):
        return [{axis: size} for axis, size in mesh.items()]
    axes = [{axis: size for axis, size in mesh.items() if axis in kind.axes} for kind in asked]
    fits = all(axes) and sorted(axis for of_kind in axes for axis in of_kind) == sorted(mesh)
    return axes if fits else None

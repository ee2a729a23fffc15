"""Rank files of PyTorch modules as programs of local nodes, collectives and messages.

A file is a phase of a rank. All phases of a rank are one program, in the order of their numbers, in
which one micro-batch could run. What a phase returns under a name, a later one takes under it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from partitioner.api.verify.symbolic.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BYTES_OF,
    REDUCE_SCATTER,
    Collective,
)
from partitioner.api.verify.symbolic.flat import Flat, Piece, concatenated, facts_of, known
from partitioner.api.verify.symbolic.held import Types
from partitioner.api.verify.symbolic.micro_batches import Rows, Runs, added, said, sum_of
from partitioner.api.verify.symbolic.nodes import LocalNode, Rank
from partitioner.api.verify.symbolic.parts import RefusedError
from partitioner.api.verify.symbolic.program import Arrival, Departure, Program, Step
from partitioner.api.verify.symbolic.proof import Proof
from partitioner.api.verify.symbolic.prove import follow_body, prove
from partitioner.api.verify.symbolic.sent_rows import Sending
from partitioner.backends.errors import BackendError
from partitioner.backends.tensors import dtype_word, to_numpy
from partitioner.backends.torch.files.archive import read_program
from partitioner.backends.torch.files.rank_files import (
    RankFile,
    file_name,
    read_rank_file,
)
from partitioner.backends.torch.graphs.calls import RESHAPES, Call
from partitioner.backends.torch.operators.registry import SENDING
from partitioner.ir.exchange import Region
from partitioner.ir.graph import AMONG, SMALL_CONSTANT, Graph
from partitioner.ir.messages import Group
from partitioner.ir.ops.aten.branches import BRANCHES, COND
from partitioner.ir.ops.aten.state import ALIAS, EITHER, KEEP, REST, STATE, UPDATE
from partitioner.ir.phases import Part as StepPart
from partitioner.ir.phases import Phases
from partitioner.ir.program import Output, Part
from partitioner.ir.types import TensorType, item_bytes

aten = torch.ops.aten
_COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL})
#: Operators of graphs that files have no nodes for.
_UNNAMED = frozenset({ALIAS, EITHER, KEEP, REST, STATE, UPDATE})
#: The name of a message: phase and rank that it is of, phase and rank that it is for.
_MESSAGE = re.compile(r"message of (\d+ on \d+) for (\d+ on \d+)")
_LAST = "last "  #: Begins the names of phases of a smaller last micro-batch.


def prove_files(folder: Path, graph: Graph, last: Graph | None = None) -> Proof:
    """Prove that the rank files in a folder compute a module.

    Args:
        folder: Folder of the files.
        graph: The module; if it runs in micro-batches, on one of them.
        last: The same on the last micro-batch of a step, if that is smaller and known.
    """
    programs = read_programs(folder)
    proof, notes = prove(graph, programs), list[str]()
    if _has_last(folder):
        if last is None:
            notes.append("the files of the last, smaller micro-batch were not followed")
        elif proof:
            proof = prove(last, read_programs(folder, last=True))
    if (runs := programs[0].runs) is not None:
        notes.append(said(runs.rows.count, runs.rows, trains=bool(graph.backward)))
    return replace(proof, notes=tuple(notes))


def _has_last(folder: Path) -> bool:
    return any(folder.glob("rank*.last_*.pt2"))


def read_programs(folder: Path, *, last: bool = False) -> tuple[Program, ...]:
    """The programs of all ranks, from a folder of their files.

    Args:
        folder: Folder of the files.
        last: Whether to read those of a smaller last micro-batch.

    Raises:
        BackendError: A file is missing or wrong, or does not say what its values are.
    """
    ranks = read_rank_file(folder / file_name(0)).header.ranks
    files = [_phases_of(folder, rank, last=last) for rank in range(ranks)]
    stages = 1 + max(_stage(file) for of in files for file, _ in of)
    phases, is_uneven = Phases(stages), _has_last(folder)
    return tuple(_Reader(_ordered(of, phases), phases, last, is_uneven).program() for of in files)


def _phases_of(folder: Path, rank: int, *, last: bool) -> list[tuple[RankFile, Path]]:
    """The descriptions of a rank's files, those of all micro-batches together included."""
    paths = [folder / file_name(rank), *sorted(folder.glob(f"rank{rank}.*.pt2"))]
    files = [(read_rank_file(path), path) for path in paths]
    for file, path in files:
        if file.parts is None or (file.staged and file.runs is None):
            raise BackendError(
                f"{path} does not say what its values are: partition the module again"
            )
        if file.header.rank != rank:
            raise BackendError(f"{path} is the {file.which} pass of rank {file.header.rank}")
    is_last = [file.which.startswith(_LAST) for file, _ in files]
    kept = [one for one, of_last in zip(files, is_last, strict=True) if of_last == last]
    if last:
        kept += [one for one in files if one[0].which == str(StepPart.REDUCE)]
    return kept


def _stage(file: RankFile) -> int:
    return int((re.findall(r"\d+", file.which) or [0])[0])


def _ordered(files: Sequence[tuple[RankFile, Path]], phases: Phases) -> list[tuple[RankFile, Path]]:
    return sorted(files, key=lambda one: _number(phases, one[0].which))


def _number(phases: Phases, which: str) -> int:
    word, _, stage = which.removeprefix(_LAST).partition(" ")
    return phases.number(StepPart(word), int(stage or 0))


@dataclass
class _Reader:
    """Reads the phases of a rank as one program."""

    files: Sequence[tuple[RankFile, Path]]
    phases: Phases
    last: bool  #: Whether the files are of the last micro-batch alone.
    is_uneven: bool  #: Whether the last micro-batch has files of its own.
    steps: list[Step] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)  #: By local name, the value in `steps`.
    tensors: dict[str, Tensor] = field(default_factory=dict)  #: Contents of constants.
    claims: dict[str, Part] = field(default_factory=dict)
    met: Counter[tuple[int, ...]] = field(default_factory=Counter)  #: Collectives by group.
    groups: set[Group] = field(default_factory=set)  #: Ranks of collectives, by phase.
    sends: dict[Hashable, int] = field(default_factory=dict)  #: Messages by phase.
    receives: dict[Hashable, int] = field(default_factory=dict)

    def program(self) -> Program:
        for file, path in self.files:
            _Phase(self, file, path).read()
        first, _ = self.files[0]
        header = first.header
        given = {**header.inputs, **(first.parts or {})}
        outputs = tuple(
            Output(
                self.sum_of(out.value) or self.known.get(out.value, out.value),
                out.whole,
                out.region,
            )
            for out in header.outputs
        )
        return Program(
            header.rank,
            tuple(self.steps),
            self.types,
            {name: part for name, part in given.items() if name in self.types},
            outputs,
            frozenset(self.tensors),
            self.claims,
            self.contents,
            {},
            None,
            header.copies,
            tuple(first.parts or ()),
            None,
            RESHAPES,
            _UNNAMED,
            delivers_all=True,
            runs=self._runs(),
        )

    def sum_of(self, name: str) -> str:
        """The sum over micro-batches of what phases return under a name; "" if there is none."""
        first, _ = self.files[0]
        if first.runs is None or name not in first.summed or name not in self.known:
            return ""
        value = self.known[name]
        if sum_of(value) not in self.types:
            self.types[sum_of(value)] = self.types[value]
            self.steps.append(added(value))
        return sum_of(value)

    def _runs(self) -> Runs | None:
        first, _ = self.files[0]
        if first.runs is None:
            return None
        rows, shares = first.runs.rows, first.runs.shares
        count, made, reads = len(shares), dict[str, int](), dict[int, frozenset[str]]()
        alike = range(count - 1 if self.is_uneven else count)
        for file, _ in self.files:
            if (file.runs, file.summed) != (first.runs, first.summed):
                raise BackendError(f"the files of rank {first.header.rank} disagree about its runs")
            phase = _number(self.phases, file.which)
            made |= dict.fromkeys(file.results, phase)
            reads[phase] = frozenset(file.arguments)
        return Runs(
            self.phases,
            Rows(count, rows, shares),
            (count - 1,) if self.last else tuple(alike),
            tuple((_number(self.phases, name), index) for name, index in first.runs.order),
            made,
            reads,
            frozenset(first.header.inputs),
            first.summed,
            self.sends,
            self.receives,
            frozenset(self.groups),
        )

    def contents(self, name: str) -> np.ndarray | None:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.device.type == "meta":
            return None
        return to_numpy(tensor, self.types[name].dtype)


@dataclass
class _Phase:
    """Reads a file; its values have the name of the phase before their own."""

    reader: _Reader
    file: RankFile
    path: Path
    named: dict[fx.Node, str] = field(default_factory=dict)  #: The value that each node is.
    #: Views of new tensors that parts are written to: the tensor, and the place in it.
    views: dict[fx.Node, tuple[fx.Node, Region]] = field(default_factory=dict)
    #: What was written so far to each new tensor: places and values.
    written: dict[fx.Node, list[tuple[Region, str]]] = field(default_factory=dict)
    #: What collectives that nobody has waited for will be.
    started: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return _number(self.reader.phases, self.file.which)

    def read(self) -> None:
        program = read_program(self.path, SMALL_CONSTANT)
        specs = iter(program.graph_signature.input_specs)
        arguments = iter(self.file.arguments)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = next(specs)
                if spec.kind is InputKind.USER_INPUT:
                    self._argument(node, next(arguments))
                else:
                    held = {**program.state_dict, **program.constants}
                    self._constant(node, str(spec.target), held[str(spec.target)])
            elif node.op == "output":
                self._return(node.args[0])
            else:
                self._call(node)

    def _name(self, node: fx.Node) -> str:
        return f"{self.file.which}: {node.name}"

    def _value(self, node: fx.Node) -> str:
        """Give the value that a node is; BackendError if nothing is sure to be there yet."""
        if node not in self.named:
            raise BackendError(f"{self.path}: {node.name} is read before it is whole")
        return self.named[node]

    def _check_own(self, message: str, end: str) -> None:
        """Refuse a message whose own end is said to be another phase, or another rank."""
        own = f"{self.number} on {self.file.header.rank}"
        if end != own:
            raise BackendError(f"{self.path}: {message!r} is met in phase {own}")

    def _typed(self, name: str, value: Any) -> str:
        if isinstance(value, Tensor):
            self.reader.types[name] = TensorType.of(dtype_word(value.dtype), value.shape)
        return name

    def _argument(self, node: fx.Node, name: str) -> None:
        given = {**self.file.header.inputs, **(self.file.parts or {})}
        message = _MESSAGE.fullmatch(name)
        if message and name not in given and name not in self.reader.known:
            self._check_own(name, message[2])
            self.named[node] = self._typed(self._name(node), node.meta["val"])
            self.reader.receives[name] = self.number
            self.reader.steps.append(Arrival(name, self.named[node]))
        elif self.file.which == str(StepPart.REDUCE) and (total := self.reader.sum_of(name)):
            self.named[node] = total
        else:
            self.named[node] = self._typed(self.reader.known.get(name, name), node.meta["val"])

    def _constant(self, node: fx.Node, buffer: str, tensor: Tensor) -> None:
        name = self.named[node] = self._typed(self._name(node), node.meta["val"])
        self.reader.tensors[name] = tensor.detach()
        claim = (self.file.header.constants or {}).get(self.file.buffers.get(buffer, ""))
        if claim is not None:
            self.reader.claims[name] = claim

    def _return(self, values: Any) -> None:
        given = {*self.file.header.inputs, *(self.file.parts or {})}
        for node, name in zip(values, self.file.results, strict=True):
            message = _MESSAGE.fullmatch(name)
            if message and name not in given:
                self._check_own(name, message[1])
                self.reader.sends[name] = self.number
                self.reader.steps.append(Departure(name, self._value(node)))
            else:
                self.reader.known[name] = self._value(node)

    def _call(self, node: fx.Node) -> None:
        if node.target is getitem or node.op == "get_attr":
            return  # named with what it is an item of; a body is read with its node
        if node.target is torch.ops.higher_order.cond:
            self.reader.steps.append(self._branched(node))
            return
        call = Call.of(node)
        if call is None:
            raise BackendError(f"{self.path}: {node.target} is not followed")
        if call.op == "_c10d_functional::wait_tensor":
            of = node.all_input_nodes[0]
            self.named[node] = self.named[of] = self.started.pop(of, "") or self._value(of)
        elif call.op.startswith("_c10d_functional::"):
            self._collective(node, call.op.partition("::")[2])
        elif call.target in SENDING:
            self._send(node, call)
        elif not self._assembles(node, call):
            self.reader.steps.append(self._local(node, call))
            if call.op == "aten::copy_":
                target = node.all_input_nodes[0]
                if target.op != "placeholder" or len(target.users) > 1:
                    raise BackendError(f"{self.path}: {node.name} writes to what others may read")

    def _assembles(self, node: fx.Node, call: Call) -> bool:
        """Note a new tensor, a view of one, or a write to it; with the last one it is a value."""
        first = next((arg for arg in node.args if isinstance(arg, fx.Node)), None)
        if call.op == "aten::new_empty":
            self.views[node] = node, tuple(((0, n),) for n in node.meta["val"].shape)
            self.written[node] = []
            return True
        if first not in self.views or call.op not in ("aten::slice.Tensor", "aten::copy_"):
            return False
        root, place = self.views[first]
        if call.op == "aten::slice.Tensor":
            dim, start, end, step = call.settings[1:]
            ((begin, size),) = place[dim]
            low, high, _ = slice(start, end).indices(size)
            at: Region = (*place[:dim], ((begin + low, max(high - low, 0)),), *place[dim + 1 :])
            self.views[node] = root, at
            return bool(step == 1)
        written = self.written[root]
        written.append((place, self._value(node.all_input_nodes[1])))
        if len(written) == self._writes(root):
            places, inputs = zip(*written, strict=True)
            name = self._typed(self._name(root), root.meta["val"])
            self.named[root] = name
            move = partial(_assembled, places, root.meta["val"].shape, inputs)
            self.reader.steps.append(
                LocalNode(name, "aten::copy_", inputs, (name,), (), name, lambda _: False, move)
            )
        return True

    def _writes(self, view: fx.Node) -> int:
        """Number of writes to a new tensor, by way of its views."""
        return sum(
            self._writes(user) if user.target is aten.slice.Tensor else 1
            for user in view.users
            if user.target in (aten.slice.Tensor, aten.copy_.default) and user.args[0] is view
        )

    def _collective(self, node: fx.Node, name: str) -> None:
        if name not in _COLLECTIVES:
            raise BackendError(f"{self.path}: {name} is not followed")
        operand, *settings, group = node.args
        assert isinstance(operand, fx.Node)
        ranks = tuple(map(int, re.findall(r"\d+", str(group))))
        writes = self.started[node] = self._typed(self._name(node), node.meta["val"])
        words = [{"product": "prod"}.get(one, one) for one in settings if isinstance(one, str)]
        splits = [tuple(map(int, one)) for one in settings if isinstance(one, list | tuple)]
        self.reader.steps.append(
            Collective(
                name,
                ranks,
                self.reader.met[ranks],
                self._value(operand),
                writes,
                words[0] if words else "",
                (splits[0], splits[1]) if splits else ((), ()),
            )
        )
        self.reader.met[ranks] += 1
        self.reader.groups.add((self.number, ranks))

    def _send(self, node: fx.Node, call: Call) -> None:
        ranks = call.named(AMONG)
        self.reader.steps.append(Sending(self._local(node, call), ranks, self.reader.met[ranks]))
        self.reader.met[ranks] += 1
        self.reader.groups.add((self.number, ranks))

    def _branched(self, node: fx.Node) -> LocalNode:
        predicate, *branches, operands = node.args
        inputs = tuple(self._value(one) for one in (predicate, *operands))  # type: ignore[misc]
        bodies = (self._body(branch) for branch in branches)  # type: ignore[arg-type]
        return LocalNode(
            self._name(node),
            COND,
            inputs,
            self._results(node),
            (),
            self._name(node),
            lambda _: True,  # all that it has are its bodies
            drops_results=True,
            bodies={
                name: partial(follow_body, body)
                for name, body in zip(BRANCHES, bodies, strict=True)
            },
        )

    def _body(self, branch: fx.Node) -> Program:
        """A branch as the program of one rank."""
        module, inputs, outputs = branch.graph.owning_module, dict[str, Part](), list[Output]()
        reader = replace(self.reader, steps=[], types={}, known={}, tensors={}, claims={})
        phase = _Phase(reader, self.file, self.path)
        for node in getattr(module, str(branch.target)).graph.nodes:
            if node.op == "placeholder":
                name = phase.named[node] = phase._typed(phase._name(node), node.meta["val"])
                inputs[name] = Part(name, None)
            elif node.op == "output":
                outputs += [Output(name, name, None) for name in map(phase._value, node.args[0])]
            else:
                phase._call(node)
        return Program(
            0,
            tuple(reader.steps),
            reader.types,
            inputs,
            tuple(outputs),
            frozenset(),
            {},
            reader.contents,
            {},
            spelled=RESHAPES,
            unnamed=_UNNAMED,
        )

    def _results(self, node: fx.Node) -> tuple[str, ...]:
        """Name the results of a call."""
        value, own = node.meta.get("val"), self._name(node)
        if isinstance(value, Tensor):
            self.named[node] = self._typed(own, value)
            return (own,)
        items = {user.args[1]: user for user in node.users if user.target is getitem}
        outputs = tuple(
            self._typed(f"{own}.{i}", item) if i in items else ""
            for i, item in enumerate(value or ())
        )
        self.named.update({items[i]: outputs[i] for i in items})  # type: ignore[index]
        return outputs

    def _local(self, node: fx.Node, call: Call) -> LocalNode:
        own, outputs = self._name(node), self._results(node)
        inputs = tuple(self._value(one) if one is not None else "" for one in call.operands)
        return LocalNode(
            own,
            call.op,
            inputs,
            outputs,
            (),
            own,
            call.is_like,
            partial(_moved, call, inputs),
            drops_results=True,
        )


def _assembled(
    places: Sequence[Region],
    shape: Sequence[int],
    inputs: Sequence[str],
    types: Types,
    rank: Rank,
) -> Flat | None:
    """Give what a new tensor is to whose places values were written."""
    flats = (rank.flat(name) for name in inputs)
    parts = [(at, facts_of(types, flat)) for at, flat in zip(places, flats, strict=True)]
    facts = known(types, parts, tuple(shape))
    return Flat.of(facts, tuple(shape))


_Move = Callable[[Call, Types, Sequence[Flat], str], Flat | None]


def _moved(call: Call, inputs: Sequence[str], types: Types, rank: Rank) -> Flat | None:
    """Give the result of an operator that moves or copies elements, or writes them otherwise."""
    move = _MOVES.get(call.op)
    if move is None:
        return None
    dtype = rank.types[inputs[0]].dtype if inputs else ""
    with suppress(RefusedError):
        return move(call, types, [rank.flat(name) for name in inputs], dtype)
    return None


def _reshaped(call: Call, _: Types, flats: Sequence[Flat], __: str) -> Flat:
    return flats[0].reshaped(call.setting(1))


def _same(_: Call, __: Types, flats: Sequence[Flat], ___: str) -> Flat:
    return flats[0]


def _written(_: Call, __: Types, flats: Sequence[Flat], ___: str) -> Flat | None:
    target, source = flats
    return source if target.shape == source.shape else None


def _sliced(call: Call, _: Types, flats: Sequence[Flat], __: str) -> Flat | None:
    flat, (dim, start, end, step) = flats[0], call.settings[1:]
    if step != 1:
        return None
    first, last, _step = slice(start, end).indices(flat.shape[dim])
    return flat.sliced(dim % len(flat.shape), first, max(first, last))


def _joined(call: Call, types: Types, flats: Sequence[Flat], _: str) -> Flat:
    dim = call.setting(1)
    return concatenated(types, flats, dim % max(1, *(len(flat.shape) for flat in flats)))


def _empty(call: Call, _: Types, flats: Sequence[Flat], __: str) -> Flat:
    shape = tuple(call.setting(len(flats)))
    size = math.prod(shape)
    return Flat(shape, (Piece((), (size,)),) if size else ())


def _cast(call: Call, _: Types, flats: Sequence[Flat], dtype: str) -> Flat | None:
    """Elements in a type that is carried or reduced, and back."""
    cast = dtype, dtype_word(call.setting(1) or torch.float32)
    if cast in (("bool", "uint8"), ("int16", "int32")):
        return flats[0].coded(cast[1])
    return flats[0].decoded("int32") if cast == ("int32", "int16") else None


def _is_true(call: Call, _: Types, flats: Sequence[Flat], __: str) -> Flat | None:
    return flats[0].decoded("uint8") if call.setting(1) == 0 else None


def _viewed(call: Call, _: Types, flats: Sequence[Flat], dtype: str) -> Flat | None:
    """The bytes of elements, and elements of their bytes."""
    (flat,), to = flats, dtype_word(call.setting(1))
    if to == dtype or not flat.shape:
        return flat if to == dtype else None
    width, other = int(item_bytes(dtype)), int(item_bytes(to))
    viewed = flat.coded(f"{BYTES_OF}{dtype}", width) if to == "uint8" else None
    viewed = flat.decoded(f"{BYTES_OF}{to}", other) if dtype == "uint8" else viewed
    shape = (*flat.shape[:-1], flat.shape[-1] * width // other)
    return None if viewed is None else viewed.reshaped(shape)


def _as_real(_: Call, __: Types, flats: Sequence[Flat], ___: str) -> Flat:
    return flats[0].coded("real", 2).reshaped((*flats[0].shape, 2))


def _as_complex(_: Call, __: Types, flats: Sequence[Flat], ___: str) -> Flat | None:
    decoded = flats[0].decoded("real", 2)
    return None if decoded is None else decoded.reshaped(flats[0].shape[:-1])


_MOVES: Mapping[str, _Move] = {
    **dict.fromkeys(("aten::reshape", "aten::view", "aten::_unsafe_view"), _reshaped),
    **dict.fromkeys(("aten::alias", "aten::clone", "aten::contiguous", "aten::detach"), _same),
    "aten::copy_": _written,
    "aten::slice.Tensor": _sliced,
    "aten::cat": _joined,
    **dict.fromkeys(("aten::empty.memory_format", "aten::new_zeros", "aten::zeros"), _empty),
    "aten::_to_copy": _cast,
    "aten::ne.Scalar": _is_true,
    "aten::view.dtype": _viewed,
    "aten::view_as_real_copy": _as_real,
    "aten::view_as_complex": _as_complex,
}

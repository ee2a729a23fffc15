"""Parts of ranks -> one model: a communication is local nodes there or, of a whole value, nothing.

Nodes, values and constants keep the names that they have on ranks. What several ranks compute alike
is there once, so a plan of whole operators gives the graph that was planned. Where ranks call
different things by one name, all but the first get the rank's number in their name.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import pairwise, product
from pathlib import Path
from typing import Any, TypeVar

import onnx
from google.protobuf.message import EncodeError  # type: ignore[import-untyped]
from onnx import FunctionProto, ModelProto, NodeProto, TensorProto, helper

from partitioner.backends.errors import BackendError
from partitioner.backends.onnx.files.emit import Builder
from partitioner.backends.onnx.files.load import captured_values
from partitioner.backends.onnx.files.messages import DOMAIN, attribute_graphs, rename_outer
from partitioner.backends.onnx.files.parts import Part, contents, stored, whole_infos
from partitioner.backends.onnx.files.steps import Cut
from partitioner.backends.onnx.files.weights import WeightFile, inline_tensor
from partitioner.backends.regions import is_whole, whole_region
from partitioner.foundations.files import FileError, draft_folder, write_files
from partitioner.ir.errors import naming
from partitioner.ir.exchange import Intervals, Region
from partitioner.ir.program import CommKind
from partitioner.ir.types import TensorType

Item = TypeVar("Item")
_REDUCTIONS = {"sum": "Add", "max": "Max", "min": "Min", "prod": "Mul"}
_OF_BOOLS = {"sum": "Or", "max": "Or", "min": "And", "prod": "And"}


@dataclass(frozen=True)
class Joined:
    """The model that all ranks make up."""

    proto: ModelProto  #: Without its constants.
    constants: Sequence[tuple[str, TensorProto, Path | None]]  #: Name, data, and their folder.

    def write(self, target: Path) -> Path | None:
        """Write the model; the file of its large constants beside it, if it has one.

        Raises:
            FileError: A file cannot be written.
            BackendError: A constant cannot be read, or ONNX's checker refuses the model.
        """
        weights = target.with_suffix(".weights")
        model = ModelProto()
        model.CopyFrom(self.proto)
        with draft_folder(target) as folder:
            draft, outside = folder / target.name, folder / weights.name
            with closing(WeightFile(outside)) as file:
                for name, tensor, place in self.constants:
                    model.graph.initializer.append(stored(name, tensor, place, file))
            try:
                draft.write_bytes(model.SerializeToString())
            except (ValueError, EncodeError):
                raise FileError(f"cannot write {target}: the model is over 2 GiB") from None
            with naming(f"{target}: the joined model", BackendError):
                onnx.checker.check_model(str(draft))
            has_weights = outside.exists()
            write_files({**({weights: outside} if has_weights else {}), target: draft})
        return weights if has_weights else None


def join(parts: Sequence[Part]) -> Joined:
    """Make one model of the parts of all ranks; a BackendError if they do not fit together."""
    joining = _Joining(parts)
    joining.feed()
    joining.place()
    outputs = joining.deliver()
    return joining.joined(outputs)


@dataclass(frozen=True)
class _Piece:
    """A region of a value that goes to a region of another one."""

    value: int
    shape: tuple[int, ...]  #: Of the value.
    read: Region
    write: Region


@dataclass(frozen=True)
class _Placed:
    """A node of the joined model. Its values are numbers, and None for what is left out."""

    proto: NodeProto
    rank: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    captures: Mapping[str, int]  #: Values that its bodies read, by the text that stands there.


@dataclass
class _Joining:
    """The joined model while it is made: values have numbers, and get names at the end."""

    parts: Sequence[Part]
    at: dict[tuple[int, str], int] = field(default_factory=dict)  #: Value by rank and local name.
    #: The name that each value has on the rank that makes it, and the rank.
    wanted: list[tuple[str, int]] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    constants: dict[int, tuple[TensorProto, Path | None]] = field(default_factory=dict)
    nodes: list[_Placed] = field(default_factory=list)
    #: Results of what was made before, by what makes it.
    known: dict[object, Any] = field(default_factory=dict)

    @cached_property
    def opsets(self) -> Mapping[str, int]:
        """The operator sets of all parts, by domain."""
        return self._same("version of operator set", _opsets)

    def _same(
        self, what: str, of: Callable[[ModelProto], Iterable[tuple[str, Item]]]
    ) -> dict[str, Item]:
        """Collect what parts have by name; a BackendError where two differ in one."""
        found: dict[str, Item] = {}
        for part in self.parts:
            for name, own in of(part.proto):
                if found.setdefault(name, own) != own:
                    raise BackendError(
                        f"rank {part.model.rank} has another {what} {name!r} than a rank before it"
                    )
        return found

    def feed(self) -> None:
        """Make the inputs, and each rank's parts of them."""
        header = self.parts[0].model.header
        self.inputs.update({name: self._new(name) for name in header.whole_inputs})
        for part in self.parts:
            for name, fed in part.model.header.inputs.items():
                shape, own = header.whole_inputs[fed.whole].shape, part.model.types[name]
                read = whole_region(shape) if fed.region is None else fed.region
                piece = _Piece(self.inputs[fed.whole], shape, read, whole_region(own.shape))
                rank = part.model.rank
                self.at[rank, name] = self._assembled(name, rank, own, [piece])

    def place(self) -> None:
        """Place all nodes and communications, each behind what it reads."""
        left = {part.model.rank: list(part.proto.graph.node) for part in self.parts}
        sides: dict[int, dict[int, Cut]] = defaultdict(dict)
        for part in self.parts:
            for cut in part.cuts:
                sides[cut.comm.seq][part.model.rank] = cut
        moved = True
        while moved:
            moved = False
            for part in self.parts:
                rank = part.model.rank
                waiting = [node for node in left[rank] if not self._place(part, node)]
                moved |= len(waiting) < len(left[rank])
                left[rank] = waiting
            for seq in [seq for seq, ends in sides.items() if self._communicated(ends)]:
                del sides[seq]
                moved = True
        for rank, nodes in left.items():
            for node in nodes:
                raise BackendError(
                    f"rank {rank}: node {node.name!r} ({node.op_type}) reads what no rank makes"
                )

    def _value(self, part: Part, name: str) -> int | None:
        """A value that a rank sends or delivers; None if it is not there yet."""
        found, tensor = self._read(part, name), part.model.constants.get(name)
        if found is None and tensor is not None:  # which no node of the part need read
            return self._of_rank(part, tensor, part.model.folder)
        return found

    def _read(self, part: Part, name: str) -> int | None:
        """A value that a node of a part reads; None if it is not there yet."""
        at, tensor = (part.model.rank, name), part.constants.get(name)
        if at not in self.at and tensor is not None:
            self.at[at] = self._of_rank(part, tensor, part.folder)
        return self.at.get(at)

    def _of_rank(self, part: Part, tensor: TensorProto, folder: Path | None) -> int:
        """A constant of a rank, under the name that it has in the model."""
        of = (part.model.header.constants or {}).get(tensor.name)
        wanted = tensor.name if of is None else of.whole
        return self._constant(wanted, tensor, folder, part.model.rank)

    def _place(self, part: Part, node: NodeProto) -> bool:
        """Place a node, unless a value is not there yet; one that is there is not placed again."""
        names = dict.fromkeys((*filter(None, node.input), *captured_values(node)))
        values: dict[str, int] = {}
        for name in names:
            value = self._read(part, name)
            if value is None:
                return False
            values[name] = value
        found = self._placed(node, part.model.rank, values)
        self.at.update({(part.model.rank, name): value for name, value in found.items()})
        return True

    def _placed(self, node: NodeProto, rank: int, values: Mapping[str, int]) -> Mapping[str, int]:
        """The results of a node by local name; `values` are those that it reads."""
        plain, captures = NodeProto(), {}
        plain.CopyFrom(node)
        for name in {*captured_values(node)}:
            captures[name] = f"{DOMAIN}.value{values[name]}"
        for attribute in plain.attribute:
            for body in attribute_graphs(attribute):
                rename_outer(body, captures)
        del plain.input[:], plain.metadata_props[:]
        kept = [entry for entry in node.metadata_props if not entry.key.startswith(f"{DOMAIN}.")]
        plain.metadata_props.extend(kept)
        inputs = tuple(values.get(name) for name in node.input)
        key = plain.SerializeToString(deterministic=True), inputs
        if key not in self.known:
            made = {name: self._new(name, rank) for name in node.output if name}
            outputs = tuple(made.get(name) for name in node.output)
            inner = {text: values[name] for name, text in captures.items()}
            self.nodes.append(_Placed(plain, rank, inputs, outputs, inner))
            self.known[key] = made
        found: Mapping[str, int] = self.known[key]
        return found

    def _new(self, name: str, rank: int = 0) -> int:
        self.wanted.append((name, rank))
        return len(self.wanted) - 1

    def _constant(self, name: str, tensor: TensorProto, folder: Path | None, rank: int) -> int:
        """A constant; equal ones of one name are one."""
        if tensor.data_type == TensorProto.STRING:
            data = tensor.SerializeToString(deterministic=True)
        else:
            data = contents(tensor, folder).tobytes()
        digest = hashlib.sha256(data).digest()
        key = name, tensor.data_type, tuple(tensor.dims), digest
        if key not in self.known:
            self.known[key] = self._new(name, rank)
            self.constants[self.known[key]] = tensor, folder
        value: int = self.known[key]
        return value

    def _communicated(self, sides: Mapping[int, Cut]) -> bool:
        """Place a communication, unless a value that it reads is not there yet."""
        part_of = {part.model.rank: part for part in self.parts}
        ready: dict[int, tuple[int, tuple[int, ...]]] = {}
        for rank, side in sides.items():
            if side.source is not None:
                value = self._value(part_of[rank], side.comm.source)
                if value is None:
                    return False
                ready[rank] = value, side.source.shape
        for rank, side in sides.items():
            if side.target is None:
                continue
            if side.comm.kind is CommKind.ALL_REDUCE:
                everything = whole_region(side.target.shape)
                arriving = [(source, everything, everything) for source in side.comm.ranks]
            else:
                arriving = [(t.source, t.read, t.write) for t in side.comm.arriving.get(rank, ())]
            pieces = [_Piece(*ready[source], read, write) for source, read, write in arriving]
            name, reduction = side.comm.target, side.comm.reduce if side.reduces else ""
            self.at[rank, name] = self._assembled(name, rank, side.target, pieces, reduction)
        return True

    def deliver(self) -> Mapping[str, int]:
        """The whole outputs, put together of what ranks deliver."""
        outputs = {}
        for name, type_ in self.parts[0].model.header.whole_outputs.items():
            pieces: dict[Region, _Piece] = {}  # several ranks may have one part
            for part in self.parts:
                for output in part.model.header.outputs:
                    if output.whole != name:
                        continue
                    value = self._value(part, output.value)
                    if value is None:
                        raise BackendError(f"rank {part.model.rank} makes no {output.value!r}")
                    shape = part.model.types[output.value].shape
                    write = whole_region(type_.shape) if output.region is None else output.region
                    pieces.setdefault(write, _Piece(value, shape, whole_region(shape), write))
            outputs[name] = self._assembled(name, 0, type_, [*pieces.values()])
        return outputs

    def _assembled(
        self,
        name: str,
        rank: int,
        type_: TensorType,
        pieces: Sequence[_Piece],
        reduction: str = "",
    ) -> int:
        """A value of pieces of others, of which those of one place are reduced in this order."""
        if len(pieces) == 1 and _is_all(pieces[0], type_.shape):
            return pieces[0].value
        key = type_, tuple(pieces), reduction
        if key not in self.known:
            self.known[key] = self._put_together(name, rank, type_, pieces, reduction)
        value: int = self.known[key]
        return value

    def _put_together(
        self,
        name: str,
        rank: int,
        type_: TensorType,
        pieces: Sequence[_Piece],
        reduction: str,
    ) -> int:
        shape = type_.shape
        if not type_.numel:
            return self._constant(name, inline_tensor(name, type_, None), None, rank)
        ends = [{0, size} for size in shape]
        for piece in pieces:
            for found, intervals in zip(ends, piece.write, strict=True):
                found.update(end for at, size in intervals for end in (at, at + size))
            for found, read, write in zip(ends, piece.read, piece.write, strict=True):
                found.update(at for _, at, _ in _runs(read, write))
        grid = [list(pairwise(sorted(found))) for found in ends]
        cells: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for piece in pieces:
            dims = [[*_cells(*ends)] for ends in zip(piece.read, piece.write, grid, strict=True)]
            for cell in product(*dims):
                box = {
                    dim: (start, grid[dim][index][1] - grid[dim][index][0])
                    for dim, (index, start) in enumerate(cell)
                }
                cells[tuple(index for index, _ in cell)].append(self._slice(piece, box, rank))
        operators = _OF_BOOLS if type_.dtype == "bool" else _REDUCTIONS
        combine = partial(self._local, rank, operators.get(reduction, ""))

        def joined(*index: int) -> int:
            dim = len(index)
            if dim < len(shape):
                found = [joined(*index, i) for i in range(len(grid[dim]))]
                concat = partial(self._local, rank, "Concat", axis=dim)
                return found[0] if len(found) == 1 else concat(*found)
            found = cells.get(index, [])
            if not found or (len(found) > 1 and not reduction):
                raise BackendError(
                    f"rank {rank}: {len(found)} pieces are written to one place of {name!r}"
                )
            return reduce(combine, found)

        return joined()

    def _slice(self, piece: _Piece, box: Mapping[int, tuple[int, int]], rank: int) -> int:
        cuts = {dim: each for dim, each in box.items() if each != (0, piece.shape[dim])}
        if not cuts:
            return piece.value
        key = piece.value, tuple(cuts.items())
        if key not in self.known:
            build = Builder(f"{DOMAIN}.join{len(self.wanted)}", self.opsets[""])
            build.slice("value", f"{build.prefix}.part", cuts)
            literals = {t.name: self._constant(t.name, t, None, rank) for t in build.literals}
            made = self._placed(build.nodes[0], rank, {"value": piece.value, **literals})
            (self.known[key],) = made.values()
        value: int = self.known[key]
        return value

    def _local(self, rank: int, op: str, *operands: int, **attributes: Any) -> int:
        """The result of a node that stands for a communication."""
        name = f"{DOMAIN}.join{len(self.wanted)}.{op}"
        names = {f"{i}": value for i, value in enumerate(operands)}
        node = helper.make_node(op, list(names), [name], name=name, **attributes)
        (made,) = self._placed(node, rank, names).values()
        return made

    def joined(self, outputs: Mapping[str, int]) -> Joined:
        """The model, with all names."""
        header = self.parts[0].model.header
        name_of = {value: name for name, value in self.inputs.items()}
        for name, value in outputs.items():
            if value in name_of or value in self.constants:
                value = self._local(0, "Identity", value)
            name_of[value] = name
        taken = {*name_of.values()}
        for value, (name, rank) in enumerate(self.wanted):
            if value not in name_of:
                name_of[value] = _free(name, rank, taken)
        model = ModelProto(
            ir_version=max(part.proto.ir_version for part in self.parts), producer_name=DOMAIN
        )
        for domain, version in sorted(self.opsets.items()):
            model.opset_import.add(domain=domain, version=version)
        model.functions.extend(self._same("function", _functions).values())
        own = self.parts[0].model
        model.metadata_props.extend(
            entry for entry in own.proto.metadata_props if not entry.key.startswith(f"{DOMAIN}.")
        )
        graph = model.graph
        graph.name = own.proto.graph.name.removesuffix(f".rank{own.rank}")
        taken = {""}
        graph.node.extend(_named(node, name_of, taken) for node in self.nodes)
        graph.input.extend(whole_infos(header, header.whole_inputs))
        graph.output.extend(whole_infos(header, header.whole_outputs))
        constants = [(name_of[n], *each) for n, each in self.constants.items()]
        return Joined(model, constants)


def _opsets(model: ModelProto) -> Iterator[tuple[str, int]]:
    for entry in model.opset_import:
        yield "" if entry.domain == "ai.onnx" else entry.domain, entry.version


def _functions(model: ModelProto) -> Iterator[tuple[str, FunctionProto]]:
    return ((f"{one.domain}::{one.name}", one) for one in model.functions)


def _is_all(piece: _Piece, shape: tuple[int, ...]) -> bool:
    return is_whole(piece.read, piece.shape) and is_whole(piece.write, shape)


def _runs(read: Intervals, write: Intervals) -> Iterator[tuple[int, int, int]]:
    """Start in what is read and what is written, and length, of what both have in one run."""
    i = j = a = b = 0
    while i < len(read) and j < len(write):
        size = min(read[i][1] - a, write[j][1] - b)
        if size:
            yield read[i][0] + a, write[j][0] + b, size
        a, b = a + size, b + size
        if a == read[i][1]:
            i, a = i + 1, 0
        if b == write[j][1]:
            j, b = j + 1, 0


def _cells(
    read: Intervals, write: Intervals, grid: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The cells of a dim that are written, by their number, and where each is read."""
    for source, target, size in _runs(read, write):
        for index, (start, end) in enumerate(grid):
            if target <= start and end <= target + size:
                yield index, source + start - target


def _free(name: str, rank: int, taken: set[str]) -> str:
    """The name, with the rank behind it if it is taken; it is taken then."""
    if name in taken:
        name = f"{name}@rank{rank}"
    while name in taken:
        name += "'"
    taken.add(name)
    return name


def _named(node: _Placed, name_of: Mapping[int, str], taken: set[str]) -> NodeProto:
    """A node with its names in the joined model."""
    proto = node.proto
    if not proto.domain:
        proto.ClearField("domain")
    if proto.name:
        proto.name = _free(proto.name, node.rank, taken)
    proto.input[:] = ["" if value is None else name_of[value] for value in node.inputs]
    proto.output[:] = ["" if value is None else name_of[value] for value in node.outputs]
    inner = {name: name_of[value] for name, value in node.captures.items()}
    for attribute in proto.attribute:
        for body in attribute_graphs(attribute):
            rename_outer(body, inner)
    return proto

"""The kernels that ONNX Runtime runs on a processor for the nodes of a session, and their tensors.

A convolution takes the normalization, the sum and the activation behind it into its kernel. Where
its weights are constants, it computes in a *blocked* layout, whose channels lie in blocks of as
many as a vector of the processor has: its result is filled up to whole blocks. Pools, sums,
concatenations and upsampling of blocked tensors stay blocked. Any other node reads plain tensors:
a kernel reorders what is blocked and read by one, or what is plain and read by a blocked kernel,
and both tensors lie there at once.

The rules are those of ONNX Runtime 1.31 (its fusions of convolutions, `nchwc_transformer.cc`),
read there and compared with the graphs that it writes as it runs them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from partitioner.ir.graph import Attr
from partitioner.ir.types import dense_bytes

#: Channels of a block: 16 with AVX-512 and with NEON (MLAS, `NchwcBlockSize`). With AVX2 it is 8,
#: which fills up less.
CHANNEL_BLOCK = 16
#: The block with AVX2: images that fill such blocks are copied where they enter a session, also
#: where they do not fill larger ones (`backends/onnx/sessions/layouts.py`).
LEAST_BLOCK = 8
#: Input channels of a blocked convolution, from one block on, and output channels of one in groups
#: are a multiple of this.
CHANNEL_STEP = 4

#: Operators that a convolution computes with its own result.
_ACTIVATIONS = frozenset({"Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid"})
#: Activations that stay blocked by themselves.
_ELEMENTWISE = frozenset({"HardSigmoid", "Relu", "Sigmoid", "Tanh", "com.microsoft::QuickGelu"})
_POOLS = frozenset({"MaxPool", "AveragePool"})
_GLOBAL_POOLS = frozenset({"GlobalMaxPool", "GlobalAveragePool"})
_SUMS = frozenset({"Add", "Sum"})
_IMAGE_RANK = 4  # batch, channels, rows, columns
#: Operators whose kernels may write into an operand that nothing else reads: measured, as sums and
#: products of two tensors do not (tests/cost_model/memory/test_sessions.py).
_IN_PLACE = _ACTIVATIONS | {
    *("Celu", "Elu", "LogSoftmax", "Selu", "Softmax", "Softplus", "Softsign", "ThresholdedRelu"),
}
#: Operators without a kernel: the operand is multiplied with what these make of it.
_STEPS: Mapping[str, tuple[str, ...]] = {
    "HardSwish": ("HardSigmoid",),
    "Mish": ("Softplus", "Tanh"),
}
#: The kernel of ``x * Sigmoid(x)``.
_SILU = "com.microsoft::QuickGelu"

Name = Hashable  #: Of a tensor.


@dataclass(frozen=True)
class Tensor:
    """A part of a value on a device."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return dense_bytes(math.prod(self.shape), self.dtype)

    @property
    def blocked(self) -> Tensor:
        """The tensor with its channels filled up to whole blocks."""
        batch, channels, *space = self.shape
        return Tensor((batch, -(-channels // CHANNEL_BLOCK) * CHANNEL_BLOCK, *space), self.dtype)

    @property
    def is_image(self) -> bool:
        """Tell whether the tensor's type and rank allow a blocked layout."""
        return len(self.shape) == _IMAGE_RANK and self.dtype == "float32"

    @property
    def fills_blocks(self) -> bool:
        """Tell whether the tensor may be blocked, and its channels fill whole blocks."""
        return self.is_image and self.shape[1] % CHANNEL_BLOCK == 0


@dataclass(frozen=True)
class LocalNode:
    """A node on a device."""

    at: int  #: Position of its task.
    op: str  #: Its operator.
    attrs: Mapping[str, Attr]  #: Its attributes.
    reads: tuple[Name | None, ...]  #: Its operands; None where one is a constant or absent.
    sizes: tuple[tuple[int, ...], ...]  #: Shapes of all its operands, () where one is absent.
    writes: tuple[Name | None, ...]  #: Its results; None where one is absent.
    view: bool = False  #: Whether its result is the first operand under another shape.
    added: Name | None = None  #: The tensor that a convolution adds in its kernel.
    inner: Name | None = None  #: The result of that convolution before the sum.

    @property
    def operands(self) -> tuple[Name, ...]:
        """The tensors that it reads, in order."""
        return tuple(name for name in (*self.reads, self.added) if name is not None)

    @property
    def result(self) -> Name | None:
        """Return the first result; None if there is none."""
        return self.writes[0] if self.writes else None


@dataclass(frozen=True)
class Kernel:
    """A kernel."""

    at: int  #: Position of the task that it belongs to.
    reads: tuple[Name, ...]  #: Tensors that it reads.
    writes: tuple[Name, ...]  #: Tensors that it writes.
    #: Operands whose memory the first result may take, if nothing else reads them.
    into: tuple[Name, ...] = ()
    view: bool = False  #: Whether the result is the first operand's memory.
    scratch_bytes: int = 0  #: Bytes that it takes for itself.


@dataclass(frozen=True)
class _Step:
    """Result of a step of an operator without a kernel."""

    of: Name
    op: str


@dataclass(frozen=True)
class Session:
    """The nodes that a device runs between two communications."""

    nodes: Sequence[LocalNode]  #: In order.
    tensors: Mapping[Name, Tensor]  #: What they read and write.
    given: Collection[Name]  #: Results that leave the session.

    def products(self) -> tuple[int, int]:
        """Products of the convolutions that may be blocked: as they are, and blocked."""
        plain = blocked = 0
        for node in self.nodes:
            if node.op == "Conv" and _may_be_blocked(node, self.tensors):
                made, window = self.tensors[node.result], math.prod(node.sizes[1][1:])
                plain += math.prod(made.shape) * window
                blocked += math.prod(made.blocked.shape) * window
        return plain, blocked

    @cached_property
    def may_be_blocked(self) -> bool:
        """Tell whether a convolution or a pool of it may have a blocked layout."""
        return any(
            _may_be_blocked(node, self.tensors)
            if node.op == "Conv"
            else node.op in _POOLS
            and all(self.tensors[name].fills_blocks for name in node.operands)
            for node in self.nodes
        )

    def kernels(self, *, blocked: bool) -> tuple[Sequence[Kernel], Mapping[Name, Tensor]]:
        """The kernels, in order, and all tensors; `blocked` allows blocked layouts."""
        session = self.in_steps()
        nodes = _fused(session)
        if blocked and self.may_be_blocked:
            return _Blocking(session, nodes).run()
        return [_plain(node, session.tensors) for node in nodes], session.tensors

    def in_steps(self) -> Session:
        """The session with the nodes that each operator without a kernel is computed by."""
        nodes, tensors = list[LocalNode](), dict(self.tensors)
        for node in self.nodes:
            data = node.reads[0] if node.op in _STEPS else None
            if data is None or node.result is None:
                nodes.append(node)
                continue
            gate: Name = data
            for op in _STEPS[node.op]:
                step = _Step(node.result, op)
                tensors[step] = tensors[node.result]
                nodes.append(replace(node, op=op, attrs={}, reads=(gate,), writes=(step,)))
                gate = step
            sizes = (*node.sizes, *node.sizes)
            nodes.append(replace(node, op="Mul", attrs={}, reads=(data, gate), sizes=sizes))
        return Session(nodes, tensors, self.given)


def _with_silu(session: Session) -> Iterator[LocalNode]:
    """The nodes, with one kernel for each ``x * Sigmoid(x)``."""
    readers = Counter(name for node in session.nodes for name in node.operands)
    gates = {
        node.result: node
        for node in session.nodes
        if node.op == "Sigmoid" and readers[node.result] == 1 and node.result not in session.given
    }
    silu: dict[Name, LocalNode] = {}  # by the result of the Sigmoid
    for node in session.nodes:
        for one, other in (node.reads, node.reads[::-1]) if node.op == "Mul" else ():
            gate = gates.get(other)
            if gate is not None and one is not None and gate.reads == (one,):
                sizes = node.sizes[:1]
                silu[other] = replace(node, op=_SILU, reads=(one,), sizes=sizes)
                break
    products = {node.result: node for node in silu.values()}
    for node in session.nodes:
        if node.op != "Sigmoid" or node.result not in silu:
            yield products.get(node.result, node)


def _fused(session: Session) -> Sequence[LocalNode]:
    """The nodes, each convolution with those that its kernel computes too."""
    nodes = tuple(_with_silu(session))
    readers = Counter(name for node in nodes for name in node.operands)
    fused: dict[int, LocalNode] = {}
    made: dict[Name, tuple[int, str]] = {}  # result of a convolution: its index, what it did last

    def before(name: Name | None) -> tuple[int, str]:
        """The convolution that makes a tensor which only one node reads."""
        is_inner = name is not None and readers[name] == 1 and name not in session.given
        return made.get(name, (-1, "")) if is_inner else (-1, "")

    for index, node in enumerate(nodes):
        of, did = before(node.reads[0] if node.reads else None)
        added = _added(node, before)
        if node.op == "Conv":
            fused[index], did, of = node, "convolved", index
        elif node.op == "BatchNormalization" and did == "convolved":
            fused[of] = replace(fused[of], writes=node.writes[:1])
        elif node.op in _ACTIVATIONS and did in ("convolved", "added"):
            fused[of], did = replace(fused[of], writes=node.writes), "active"
        elif added is not None:
            (of, _), other = added
            conv = fused.pop(of)
            fused[index] = replace(
                conv, at=node.at, writes=node.writes, added=other, inner=conv.result
            )
            of, did = index, "added"
        else:
            fused[index] = node
            continue
        made[fused[of].result] = of, did
    return [fused[index] for index in sorted(fused)]


def _added(
    node: LocalNode, before: Callable[[Name | None], tuple[int, str]]
) -> tuple[tuple[int, str], Name] | None:
    """The convolution that a sum adds another tensor to, and that tensor."""
    if node.op not in _SUMS or len(node.sizes) != 2 or node.sizes[0] != node.sizes[1]:
        return None
    for one, other in (node.reads, node.reads[::-1]):
        if before(one)[1] == "convolved" and other is not None and other != one:
            return before(one), other
    return None


def _plain(node: LocalNode, tensors: Mapping[Name, Tensor]) -> Kernel:
    into: tuple[Name, ...] = ()
    if node.added is not None:
        into = (node.added,)
    elif node.op in _IN_PLACE and node.result is not None:
        size = tensors[node.result]
        into = tuple(name for name in node.operands[:2] if tensors[name] == size)
    writes = tuple(name for name in node.writes if name is not None)
    return Kernel(node.at, node.operands, writes, into, node.view, _scratch_bytes(node, tensors))


def _scratch_bytes(node: LocalNode, tensors: Mapping[Name, Tensor]) -> int:
    """Bytes of the columns that a plain convolution makes of an image."""
    if node.op not in ("Conv", "ConvTranspose") or node.result is None or node.reads[0] is None:
        return 0
    dtype, weights = tensors[node.result].dtype, node.sizes[1]
    if node.op == "ConvTranspose":
        return dense_bytes(math.prod(weights[1:]) * math.prod(node.sizes[0][2:]), dtype)
    points = math.prod(tensors[node.result].shape[2:])
    if weights[0] <= points or math.prod(weights[2:]) == 1:  # in pieces, or without columns
        return 0
    return dense_bytes(math.prod(weights[1:]) * points, dtype)


def _may_be_blocked(node: LocalNode, tensors: Mapping[Name, Tensor]) -> bool:
    """Test whether a convolution computes in a blocked layout."""
    is_constant = all(name is None for name in node.reads[1:])
    if node.result is None or not is_constant or not tensors[node.result].is_image:
        return False
    outs, ins = node.sizes[1][:2]
    groups = node.sizes[0][1] // max(ins, 1)  # the attribute counts those of all devices
    if groups == 1:
        return ins < CHANNEL_BLOCK or ins % CHANNEL_STEP == 0
    by_channel = ins == 1 and outs == groups
    in_blocks = ins % CHANNEL_BLOCK == 0 and outs // groups % CHANNEL_BLOCK == 0
    return outs % CHANNEL_STEP == 0 and (by_channel or in_blocks)


@dataclass(frozen=True)
class _Form:
    of: Name


@dataclass(frozen=True)
class _Copy:
    """The copy of a tensor that enters a session, in the layout that it has."""

    of: Name


@dataclass
class _Blocking:
    """Goes through the nodes of a session and keeps tensors blocked where kernels can."""

    session: Session
    nodes: Sequence[LocalNode]
    kernels: list[Kernel] = field(default_factory=list)
    blocked: set[Name] = field(default_factory=set)  # made blocked
    reordered: set[Name] = field(default_factory=set)  # plain ones of which there is a copy
    forms: dict[Name, Tensor] = field(default_factory=dict)

    def run(self) -> tuple[Sequence[Kernel], Mapping[Name, Tensor]]:
        for node in self.nodes:
            self._node(node)
        read = {name for kernel in self.kernels for name in kernel.reads}
        return list(self._reordering(read)), {**self.session.tensors, **self.forms}

    def _node(self, node: LocalNode) -> None:
        tensors = self.session.tensors
        if node.op == "Conv" and _may_be_blocked(node, tensors):
            self._conv(node)
        elif self._stays_blocked(node):
            for name in node.operands:
                self._reorder(name, node.at)
            reads = tuple(map(_Form, node.operands))
            into = reads if node.op in _IN_PLACE else ()
            self._write(node.result, Kernel(node.at, reads, (), into))
        else:
            copies = tuple(self._copies(node))
            self.kernels += [Kernel(node.at, (copy.of,), (copy,)) for copy in copies]
            self.forms |= {copy: tensors[copy.of] for copy in copies}
            self.kernels.append(_plain(node, tensors))
            if copies:  # which are held up to here
                plain = self.kernels[-1]
                self.kernels[-1] = replace(plain, reads=(*plain.reads, *copies))

    def _copies(self, node: LocalNode) -> Iterator[_Copy]:
        """Copies of what a join reads from outside, made to be blocked where blocks are smaller."""
        tensors = self.session.tensors
        if node.op not in {*_SUMS, "Concat"} or not any(n.op == "Conv" for n in self.nodes):
            return
        images = [name for name in node.operands if tensors[name].is_image]
        if len(images) < len(node.reads) or any(
            tensors[name].shape[1] % LEAST_BLOCK for name in images
        ):
            return
        for name in dict.fromkeys(images):
            if self._is_outside(name):
                yield _Copy(name)

    def _is_outside(self, name: Name) -> bool:
        return not any(name in node.writes for node in self.session.nodes)

    def _conv(self, node: LocalNode) -> None:
        image, added, result = node.reads[0], node.added, node.result
        groups = node.sizes[0][1] // max(node.sizes[1][1], 1)
        if added is not None and added not in self.blocked:
            result = node.inner
        reads: list[Name] = []
        if image is not None and groups == 1 and node.sizes[1][1] < CHANNEL_BLOCK:
            reads.append(image)
        elif image is not None:
            self._reorder(image, node.at)
            reads.append(_Form(image))
        into: tuple[Name, ...] = ()
        if result is node.result and added is not None:
            into = (_Form(added),)
        self._write(result, Kernel(node.at, (*reads, *into), (), into))
        if result is not node.result:  # the sum has a kernel of its own
            assert added is not None
            self.kernels.append(Kernel(node.at, (node.inner, added), (node.result,)))

    def _stays_blocked(self, node: LocalNode) -> bool:
        tensors = self.session.tensors
        images = [name for name in node.reads if name is not None]
        if node.result is None or not images or not all(tensors[n].is_image for n in images):
            return False
        if len([name for name in node.writes if name is not None]) > 1:
            return False
        all_blocked = all(name in self.blocked for name in images)
        if node.op in _POOLS:
            return tensors[images[0]].fills_blocks
        if node.op in _GLOBAL_POOLS:
            return all_blocked and tensors[images[0]].fills_blocks
        if node.op in _SUMS or node.op == "Concat":
            is_join = node.op != "Concat" or (
                node.attrs.get("axis") == 1 and all(tensors[n].fills_blocks for n in images)
            )
            return (
                len(images) == len(node.reads)
                and is_join
                and (node.op == "Concat" or len({tensors[name] for name in images}) == 1)
                and any(name in self.blocked for name in images)
                and all(self._is_joined(name) for name in images)
            )
        if node.op == "Mul":
            same = len({tensors[name] for name in images}) == 1
            return all_blocked and same and len(images) == len(node.reads)
        if node.op in ("Resize", "Upsample"):
            return all_blocked and node.attrs.get("mode", "nearest") in ("nearest", b"nearest")
        return all_blocked and node.op in (*_ELEMENTWISE, "BatchNormalization")

    def _is_joined(self, name: Name) -> bool:
        """Test whether an operand of a sum is blocked, or made so where it enters the session."""
        fills_blocks = self.session.tensors[name].fills_blocks
        return name in self.blocked or (fills_blocks and self._is_outside(name))

    def _reorder(self, name: Name, at: int) -> None:
        """See that there is a blocked form of a tensor."""
        if name in self.blocked or name in self.reordered:
            return
        self.reordered.add(name)
        self.forms[_Form(name)] = self.session.tensors[name].blocked
        self.kernels.append(Kernel(at, (name,), (_Form(name),)))

    def _write(self, result: Name | None, kernel: Kernel) -> None:
        assert result is not None
        self.blocked.add(result)
        self.forms[_Form(result)] = self.session.tensors[result].blocked
        self.kernels.append(replace(kernel, writes=(_Form(result),)))

    def _reordering(self, read: Collection[Name]) -> Iterator[Kernel]:
        """The kernels, each followed by one that makes its blocked result plain if need be."""
        for kernel in self.kernels:
            yield kernel
            for form in kernel.writes:
                if not isinstance(form, _Form) or form.of not in self.blocked:
                    continue
                if form.of in read or form.of in self.session.given:
                    yield Kernel(kernel.at, (form,), (form.of,))

"""Sizes for the symbolic dims of a model's inputs, and of other tensors that a user knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir

from partitioner.frontends.errors import FrontendError
from partitioner.ir.checks import is_a, is_whole
from partitioner.ir.errors import did_you_mean

#: A declared dim: a size, a symbol, or None where the model says nothing.
Declared = int | str | None
#: Declared shapes of inputs by name; None where even the rank is unknown.
DeclaredShapes = Mapping[str, tuple[Declared, ...] | None]


@dataclass(frozen=True)
class Binding:
    """Static shapes of the inputs, and the size of each symbol that they fix."""

    shapes: Mapping[str, tuple[int, ...]]  #: Of each input.
    symbols: Mapping[str, int]  #: Sizes by symbol.
    given: Mapping[str, tuple[int, ...]]  #: The shapes that the user gives of results of nodes.


def bind_dims(
    declared: DeclaredShapes,
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    results: Collection[str] = (),
) -> Binding:
    """Give every input a static shape: by `--dim` of symbols, `--shape` of inputs and results."""
    _check_names(declared, dims, shapes, results)
    given = {name: tuple(sizes) for name, sizes in shapes.items() if name not in declared}
    shapes = {name: sizes for name, sizes in shapes.items() if name in declared}
    sources = {symbol: (size, f"--dim {symbol}={size}") for symbol, size in dims.items()}
    for name, sizes in shapes.items():
        _match(name, declared[name], sizes, sources)
    symbols = {symbol: size for symbol, (size, _) in sources.items()}
    static: dict[str, tuple[int, ...]] = {}
    missing: dict[str, tuple[int | None, ...] | None] = {}
    for name, shape in declared.items():
        bound: tuple[int | None, ...] | None = shapes.get(name)
        if bound is None and shape is not None:
            bound = tuple(evaluate(dim, symbols) for dim in shape)
        static[name] = tuple(int(size) for size in bound or () if size is not None)
        if bound is None or None in bound:
            missing[name] = bound
    if missing:
        raise FrontendError(_missing(missing, declared))
    for name, shape in declared.items():
        pairs = zip(shape or (), static[name], strict=False)
        symbols |= {dim: size for dim, size in pairs if isinstance(dim, str)}
    return Binding(static, symbols, given)


def evaluate(dim: Declared, symbols: Mapping[str, int]) -> int | None:
    """Size of a dim under a binding of symbols; expressions such as "past + 1" are computed."""
    if not isinstance(dim, str):
        return dim
    if dim in symbols or dim.isidentifier():
        return symbols.get(dim)
    try:
        symbolic = onnx_ir.SymbolicDim(dim)
        free = symbolic.free_symbols()
        value = symbolic.evaluate(dict(symbols)) if free and free <= set(symbols) else None
    except ValueError:  # not an expression: only a name
        return None
    return value if isinstance(value, int) and value >= 0 else None


def declared_dims(value: onnx_ir.Value) -> tuple[Declared, ...] | None:
    """Dims as the model declares them."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape.dims)


def agree(a: tuple[Declared, ...], b: tuple[Declared, ...]) -> bool:
    """Test whether two shapes may be of one tensor."""
    return len(a) == len(b) and not any(
        isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True)
    )


def text(dims: tuple[Declared, ...]) -> str:
    """A shape for messages; "?" where there is no size."""
    return "[" + ", ".join(str(d) if isinstance(d, int) else "?" for d in dims) + "]"


def _check_names(
    declared: DeclaredShapes,
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
    results: Collection[str],
) -> None:
    for option, sizes_by_name in (("dims", dims), ("shapes", shapes)):
        if not is_a(sizes_by_name, Mapping):
            raise FrontendError(f"{option} is {sizes_by_name!r}; give sizes by name, as a dict")
    known = dict.fromkeys(
        dim for shape in declared.values() for dim in shape or () if isinstance(dim, str)
    )
    names = set(known).union(*map(_free, known))
    for symbol, size in dims.items():
        if symbol not in names:
            listed = ", ".join(known) or "none"
            hint = did_you_mean(symbol, known)
            raise FrontendError(
                f"--dim {symbol}={size}: no input has that dim (dims: {listed}){hint}"
            )
        if not _is_size(size):
            raise FrontendError(f"--dim {symbol}={size}: a size is a whole number of at least 0")
    for name, sizes in shapes.items():
        if not is_a(sizes, list, tuple):
            raise FrontendError(f"shape of {name!r} is {sizes!r}; give its sizes, as (2, 16)")
        flag = f"--shape {name}={','.join(map(str, sizes))}"
        if name not in declared and name not in results:
            inputs = f"(inputs: {', '.join(declared)}), nor has a result of a node"
            hint = did_you_mean(name, (*declared, *results))
            raise FrontendError(f"{flag}: no input has that name {inputs}{hint}")
        if not all(map(_is_size, sizes)):
            raise FrontendError(f"{flag}: a size is a whole number of at least 0")


def _free(symbol: str) -> frozenset[str]:
    try:
        return frozenset(onnx_ir.SymbolicDim(symbol).free_symbols())
    except ValueError:  # not an expression: only a name
        return frozenset()


def _is_size(size: int) -> bool:
    return is_whole(size) and 0 <= size < 2**63


def _match(
    name: str,
    shape: tuple[Declared, ...] | None,
    sizes: tuple[int, ...],
    sources: dict[str, tuple[int, str]],
) -> None:
    """Bind the symbols of one input's declared shape; `sources` gets size and flag of new ones."""
    if shape is None:
        return
    flag = f"--shape {name}={','.join(map(str, sizes))}"
    if len(shape) != len(sizes):
        raise FrontendError(f"{flag}: {len(sizes)} dims, but the input is {_named(name, shape)}")
    for index, (dim, size) in enumerate(zip(shape, sizes, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise FrontendError(f"{flag}: dim {index} is {size}, but the model fixes it to {dim}")
        if isinstance(dim, str):
            before, source = sources.setdefault(dim, (size, flag))
            if before != size:
                raise FrontendError(
                    f"{flag}: dim {index} ({dim}) is {size}, but {source} makes it {before}"
                )


def _missing(missing: Mapping[str, tuple[int | None, ...] | None], declared: DeclaredShapes) -> str:
    """The message for inputs whose sizes (None: no rank either) are not all known."""
    flags: dict[str, None] = {}
    for name, sizes in missing.items():
        shape = declared[name]
        if shape is None or sizes is None:
            flags[f"--shape {name}=..."] = None
        elif None in shape:
            flags[f"--shape {name}={','.join('N' if s is None else str(s) for s in sizes)}"] = None
        else:
            free = (dim for dim, size in zip(shape, sizes, strict=True) if size is None)
            flags.update({f"--dim {dim}=N": None for dim in free})
    inputs = ", ".join(_named(name, declared[name]) for name in missing)
    word = "input has" if len(missing) == 1 else "inputs have"
    return f"{word} dims without a size: {inputs}; pass {' '.join(flags)}"


def _named(name: str, shape: tuple[Declared, ...] | None) -> str:
    shown = "..." if shape is None else ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"{name}[{shown}]"

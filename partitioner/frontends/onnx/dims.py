"""Sizes for the symbolic dims of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir

from partitioner.frontends.errors import FrontendError
from partitioner.ir.checks import is_a, is_whole

#: A declared dim: a size, a symbol, or None where the model says nothing.
Declared = int | str | None


@dataclass(frozen=True)
class Binding:
    """Static shapes of the inputs, and the size of each symbol that they fix."""

    shapes: Mapping[str, tuple[int, ...]]
    symbols: Mapping[str, int]


def bind_dims(
    declared: Mapping[str, tuple[Declared, ...] | None],
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> Binding:
    """Give every input a static shape.

    Args:
        declared: Dims of each input as the model has them; None where even the rank is unknown.
        dims: Sizes by symbol (`--dim batch=8`).
        shapes: Sizes by input (`--shape input_ids=2,16`).

    Raises:
        FrontendError: An unknown name, two sizes for one dim, or a dim left without a size.
    """
    _check_names(declared, dims, shapes)
    found = {symbol: (size, f"--dim {symbol}={size}") for symbol, size in dims.items()}
    for name, sizes in shapes.items():
        _match(name, declared[name], sizes, found)
    symbols = {symbol: size for symbol, (size, _) in found.items()}
    known = {
        name: shapes[name]
        if kind is None and name in shapes
        else _resolve(name, kind, symbols, shapes)
        for name, kind in declared.items()
    }
    open_inputs = [name for name, sizes in known.items() if sizes is None or None in sizes]
    if open_inputs:
        raise FrontendError(_missing(open_inputs, declared, known))
    static = {
        name: tuple(int(size) for size in sizes or () if size is not None)
        for name, sizes in known.items()
    }
    return Binding(static, symbols | _implied(declared, static))


def symbols_of(declared: Mapping[str, tuple[Declared, ...] | None]) -> tuple[str, ...]:
    """Symbols of the inputs' dims, in order, each once."""
    kinds = (kind for kind in declared.values() if kind is not None)
    return tuple(dict.fromkeys(dim for kind in kinds for dim in kind if isinstance(dim, str)))


def evaluate(dim: Declared, symbols: Mapping[str, int]) -> int | None:
    """Size of a dim under a binding of symbols; expressions such as "past + 1" are computed."""
    if isinstance(dim, str) and dim in symbols:
        return symbols[dim]
    if not isinstance(dim, str) or dim.isidentifier():
        return dim if isinstance(dim, int) else None
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


def agree(found: tuple[Declared, ...], said: tuple[Declared, ...]) -> bool:
    """Whether two shapes may be of one tensor."""
    pairs = zip(found, said, strict=False)
    return len(found) == len(said) and not any(
        isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs
    )


def text(dims: tuple[Declared, ...]) -> str:
    """A shape for messages; "?" where there is no size."""
    return "[" + ", ".join(str(d) if isinstance(d, int) else "?" for d in dims) + "]"


def _check_names(
    declared: Mapping[str, tuple[Declared, ...] | None],
    dims: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    for what, sizes_by_name in (("dims", dims), ("shapes", shapes)):
        if not is_a(sizes_by_name, Mapping):
            raise FrontendError(f"{what} is {sizes_by_name!r}; give sizes by name, as a dict")
    known = symbols_of(declared)
    names = {name for symbol in known for name in (symbol, *_free(symbol))}
    for symbol, size in dims.items():
        if symbol not in names:
            listed = ", ".join(known) or "none"
            raise FrontendError(f"--dim {symbol}={size}: no input has that dim (dims: {listed})")
        if not _is_size(size):
            raise FrontendError(f"--dim {symbol}={size}: a size is a whole number of at least 0")
    for name, sizes in shapes.items():
        if not is_a(sizes, list, tuple):
            raise FrontendError(f"shape of {name!r} is {sizes!r}; give its sizes, as (2, 16)")
        given = f"--shape {name}={','.join(map(str, sizes))}"
        if name not in declared:
            raise FrontendError(f"{given}: no input has that name (inputs: {', '.join(declared)})")
        if not all(map(_is_size, sizes)):
            raise FrontendError(f"{given}: a size is a whole number of at least 0")


def _is_size(size: int) -> bool:
    """Whether ONNX can hold it as a dim."""
    return is_whole(size) and 0 <= size < 2**63


def _free(symbol: str) -> frozenset[str]:
    if symbol.isidentifier():
        return frozenset((symbol,))
    try:
        return frozenset(onnx_ir.SymbolicDim(symbol).free_symbols())
    except ValueError:
        return frozenset()


def _match(
    name: str,
    kind: tuple[Declared, ...] | None,
    sizes: tuple[int, ...],
    found: dict[str, tuple[int, str]],
) -> None:
    given = f"--shape {name}={','.join(map(str, sizes))}"
    if kind is None:
        return
    if len(kind) != len(sizes):
        raise FrontendError(f"{given}: {len(sizes)} dims, but the input is {_text(name, kind)}")
    for index, (dim, size) in enumerate(zip(kind, sizes, strict=True)):
        if isinstance(dim, int) and dim != size:
            raise FrontendError(f"{given}: dim {index} is {size}, but the model fixes it to {dim}")
        if isinstance(dim, str):
            before, source = found.setdefault(dim, (size, given))
            if before != size:
                raise FrontendError(
                    f"{given}: dim {index} ({dim}) is {size}, but {source} makes it {before}"
                )


def _resolve(
    name: str,
    kind: tuple[Declared, ...] | None,
    symbols: Mapping[str, int],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[int | None, ...] | None:
    if kind is None:
        return None
    given = shapes.get(name)
    return tuple(
        given[index] if given is not None else evaluate(dim, symbols)
        for index, dim in enumerate(kind)
    )


def _implied(
    declared: Mapping[str, tuple[Declared, ...] | None], static: Mapping[str, tuple[int, ...]]
) -> dict[str, int]:
    pairs = ((kind, static[name]) for name, kind in declared.items() if kind is not None)
    return {
        dim: size
        for kind, sizes in pairs
        for dim, size in zip(kind, sizes, strict=True)
        if isinstance(dim, str)
    }


def _missing(
    names: list[str],
    declared: Mapping[str, tuple[Declared, ...] | None],
    known: Mapping[str, tuple[int | None, ...] | None],
) -> str:
    flags: dict[str, None] = {}
    for name in names:
        kind, sizes = declared[name], known[name]
        if kind is None or sizes is None:
            flags[f"--shape {name}=..."] = None
        elif any(dim is None for dim in kind):
            flags[f"--shape {name}={','.join('N' if s is None else str(s) for s in sizes)}"] = None
        else:
            free = (dim for dim, s in zip(kind, sizes, strict=True) if s is None)
            flags.update({f"--dim {dim}=N": None for dim in free})
    inputs = ", ".join(_text(name, declared[name]) for name in names)
    word = "input has" if len(names) == 1 else "inputs have"
    return f"{word} dims without a size: {inputs}; pass {' '.join(flags)}"


def _text(name: str, kind: tuple[Declared, ...] | None) -> str:
    shown = "..." if kind is None else ", ".join("?" if dim is None else str(dim) for dim in kind)
    return f"{name}[{shown}]"

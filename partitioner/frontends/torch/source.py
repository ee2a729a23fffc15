"""Where a PyTorch module comes from: a ``.pt2`` file, ``package.module:factory``, or Python."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partitioner.frontends.model_names import module_name
from partitioner.ir.errors import OptionError, PartitionerError

if TYPE_CHECKING:
    from torch import nn


class SourceError(PartitionerError, ValueError):
    """A module that cannot be had from where it should come from."""


@dataclass(frozen=True)
class Example:
    """Arguments that a module is traced with.

    Attributes:
        args: Positional ones.
        kwargs: By keyword.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> Example:
        """Arguments given as `partitioner.compile` takes them.

        Raises:
            OptionError: None are given.
        """
        if given is None:
            raise OptionError("a PyTorch module is traced with example inputs: give example_inputs")
        if isinstance(given, Example):
            return given
        if isinstance(given, Mapping):
            return cls((), dict(given))
        if isinstance(given, tuple | list):
            return cls(tuple(given), {})
        return cls((given,), {})


@dataclass(frozen=True)
class ModuleSource:
    """How to have a module again.

    Attributes:
        file: An exported program, absolute.
        factory: ``package.module:function``, which returns a module and its example inputs.
        folder: Where the factory's package is looked for first, absolute.
    """

    file: Path | None = None
    factory: str = ""
    folder: Path | None = None

    @classmethod
    def of(cls, model: object) -> ModuleSource | None:
        """What a path or text names; None for what is no module's.

        A ``.pt2`` file, or ``package.module:function`` where there is no such file.
        """
        if not isinstance(model, str | Path):
            return None
        text = str(model)
        if module_name(text) is None:
            return None
        if text.endswith(".pt2"):
            return cls(file=Path(os.path.abspath(text)))  # noqa: PTH100 - links stay
        return cls(factory=text, folder=Path.cwd())

    @property
    def name(self) -> str:
        """For people and file names; "" for a module that was given in Python."""
        return self.file.stem if self.file is not None else self.factory.rpartition(":")[2]

    def open(self) -> tuple[nn.Module, Example]:
        """The module and its example inputs. A factory runs: its folder joins `sys.path`.

        Raises:
            PartitionerError: There is no such file or function, or it gives something else.
        """
        if self.file is not None:
            return _read(self.file)
        if not self.factory:
            raise SourceError("the module was given in Python: give it again")
        return _made(self.factory, self.folder)


def _read(file: Path) -> tuple[nn.Module, Example]:
    from partitioner.backends.torch.archive import read_program

    program = read_program(file)
    if program.example_inputs is None:
        raise SourceError(f"{file}: it holds no example inputs, which it would be traced with")
    args, kwargs = program.example_inputs
    return program.module(check_guards=False), Example(tuple(args), dict(kwargs))


def _made(factory: str, folder: Path | None) -> tuple[nn.Module, Example]:
    package, _, path = factory.partition(":")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    found: Any = _import(factory, package)
    for part in path.split("."):
        if not hasattr(found, part):
            raise SourceError(f"{factory}: {package} has no function {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise SourceError(f"{factory} is a {type(found).__name__}, not a function")
    try:
        made = found()
    except Exception as error:
        raise SourceError(f"{factory}: {_said(error)}") from error
    return _checked(factory, made)


def _import(factory: str, package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{package}.".startswith(f"{error.name}."):
            raise SourceError(f"{factory}: there is no module {error.name!r}") from None
        raise SourceError(f"{factory}: {_said(error)}") from error
    except Exception as error:
        raise SourceError(f"{factory}: importing {package}: {_said(error)}") from error


def _checked(factory: str, made: Any) -> tuple[nn.Module, Example]:
    from torch import nn

    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], Example.of(made[1])
    what = type(made).__name__
    if isinstance(made, tuple):
        what = f"({', '.join(type(part).__name__ for part in made)})"
    raise SourceError(f"{factory} returned {what}; it must return (module, example_inputs)")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""The source of a PyTorch module: a file, ``package.module:factory``, or Python."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioner.frontends.model_names import config_file, module_name
from partitioner.ir.errors import OptionError, PartitionerError, naming, typed

if TYPE_CHECKING:
    from torch import nn


class SourceError(PartitionerError, ValueError):
    """A module that its file or factory does not give."""


@dataclass(frozen=True)
class Example:
    """Arguments that a module is traced with."""

    args: tuple[Any, ...]  #: Positional arguments.
    kwargs: Mapping[str, Any]  #: Keyword arguments.

    @classmethod
    def of(cls, inputs: Any) -> Example:
        """The `example_inputs` of `partitioner.compile`; OptionError of None or NumPy arrays."""
        if inputs is None:
            raise OptionError("a PyTorch module is traced with example inputs: give example_inputs")
        if isinstance(inputs, Example):
            return inputs
        if isinstance(inputs, Mapping):
            return cls((), dict(inputs))
        args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
        for value in args:
            if isinstance(value, np.ndarray):
                raise OptionError(
                    "example_inputs holds a NumPy array: torch.from_numpy(...) makes a tensor of it"
                )
        return cls(args, {})


@dataclass(frozen=True)
class ModuleSource:
    """The file or factory of a module; neither for a module that was given in Python."""

    #: An exported program (``.pt2``), or a configuration of transformers (``.json``); absolute.
    file: Path | None = None
    #: ``package.module:function``, which returns a module and its example inputs.
    factory: str = ""
    #: Folder that the factory's package is imported from first, absolute.
    folder: Path | None = None
    #: Sizes of dims of a configuration's example inputs, by name.
    dims: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: object, dims: Mapping[str, int] | None = None) -> ModuleSource | None:
        """The file or factory that a text names; None for an ONNX model, or no text and no path."""
        if not isinstance(model, str | Path) or module_name(text := str(model)) is None:
            return None
        file = Path(text) if text.endswith(".pt2") else config_file(text)
        if file is not None:
            return cls(file=Path(os.path.abspath(file)), dims=dims or {})  # noqa: PTH100 - links stay
        return cls(factory=text, folder=Path.cwd())

    @property
    def is_config(self) -> bool:
        """Tell whether it is a configuration of transformers, which has no weights."""
        return self.file is not None and self.file.suffix == ".json"

    @property
    def name(self) -> str:
        """The file's or factory's name; "" for a module that was given in Python."""
        if self.file is None:
            return self.factory.rpartition(":")[2]
        return module_name(str(self.file)) or ""

    def open(self, *, training: bool = False) -> tuple[nn.Module, Example]:
        """The module and its inputs, or PartitionerError; a factory's folder joins `sys.path`.

        Args:
            training: Give a configuration's module its labels.
        """
        if self.file is not None and self.is_config:
            from partitioner.frontends.torch.configs import open_config

            module, inputs = open_config(self.file, self.dims, training=training)
            return module, Example((), inputs)
        if self.file is not None:
            from partitioner.backends.torch.files.archive import read_program

            program = read_program(self.file)
            if program.example_inputs is None:
                raise SourceError(
                    f"{self.file}: it holds no example inputs, which it would be traced with"
                )
            args, kwargs = program.example_inputs
            return program.module(check_guards=False), Example(tuple(args), dict(kwargs))
        if not self.factory:
            raise SourceError("the module was given in Python: give it again")
        return _call(self.factory, self.folder)


def _call(factory: str, folder: Path | None) -> tuple[nn.Module, Example]:
    from torch import nn

    package, _, path = factory.partition(":")
    if folder is not None and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    function: Any = _import(factory, package)
    for part in path.split("."):
        if not hasattr(function, part):
            raise SourceError(f"{factory}: {package} has no function {path!r}")
        function = getattr(function, part)
    if not callable(function):
        raise SourceError(f"{factory} is {typed(function)}, not a function")
    with naming(factory, SourceError):
        result = function()
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module):
        return result[0], Example.of(result[1])
    types = type(result).__name__
    if isinstance(result, tuple):
        types = f"({', '.join(type(part).__name__ for part in result)})"
    raise SourceError(f"{factory} returned {types}; it must return (module, example_inputs)")


def _import(factory: str, package: str) -> Any:
    with naming(f"{factory}: importing {package}", SourceError):
        try:
            return importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{package}.".startswith(f"{error.name}."):
                raise SourceError(f"{factory}: there is no module {error.name!r}") from None
            raise

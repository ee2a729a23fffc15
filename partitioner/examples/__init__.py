"""Ready models to try: `python -m partitioner.examples NAME OUT.onnx`.

>>> from partitioner import examples
>>> examples.build("mlp", layers=2, hidden=64, batch=4).graph.name
'mlp'
"""

from collections.abc import Callable
from functools import partial
from inspect import signature

import onnx

from partitioner.examples import llama, small, zoo
from partitioner.examples.builder import ExampleError

__all__ = ["NAMES", "ExampleError", "build", "options_of"]

_BUILDERS: dict[str, Callable[..., onnx.ModelProto]] = {
    **{name: partial(zoo.build, name) for name in zoo.FILES},
    "llama": llama.build,
    "mlp": small.build_mlp,
    "tiny": small.build_tiny,
}

NAMES: tuple[str, ...] = tuple(sorted(_BUILDERS))


def build(name: str, **options: int) -> onnx.ModelProto:
    """An example model with random weights, the same for the same options.

    Shapes are static, the IR version is 10, and weights are initializers.

    Args:
        name: One of `NAMES`.
        **options: Sizes and `seed`; `options_of(name)` lists them with their defaults.

    Raises:
        ExampleError: Unknown name or option, or a size that is impossible.
    """
    known = options_of(name)
    for option, value in options.items():
        if option not in known:
            raise ExampleError(f"{name} has no option {option!r}; it has {', '.join(known)}")
        if value < (0 if option == "seed" else 1):
            raise ExampleError(f"{option} of {name} is {value}, but must be at least 1")
    return _BUILDERS[name](**options)


def options_of(name: str) -> dict[str, int]:
    """The options of an example and their defaults.

    Raises:
        ExampleError: `name` is not one of `NAMES`.
    """
    if name not in _BUILDERS:
        raise ExampleError(f"unknown example {name!r}; there are {', '.join(NAMES)}")
    return {
        key: value.default
        for key, value in signature(_BUILDERS[name]).parameters.items()
        if value.kind is value.KEYWORD_ONLY
    }

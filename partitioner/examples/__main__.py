"""`python -m partitioner.examples NAME OUT.onnx [--OPTION VALUE]...`."""

import argparse
import sys
from pathlib import Path

import onnx

from partitioner.examples import NAMES, ExampleError, build, options_of

_PROTOBUF_LIMIT_BYTES = 2**31 - 1
_HEADROOM_BYTES = 2**24  # graph and names beside the weights


def main(arguments: list[str] | None = None) -> int:
    """Write one example model.

    Returns:
        0, or 1 when the model cannot be built or written; argparse exits 2 on wrong usage.
    """
    name, out, options = _parse(arguments)
    try:
        model = build(name, **options)
        written = _write(model, out)
    except ExampleError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"cannot write {out}: {error.strerror}")
    print(f"{out}: {name}, {len(model.graph.node)} nodes, {written / 1e6:.1f} MB")
    return 0


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 1


def _parse(arguments: list[str] | None) -> tuple[str, Path, dict[str, int]]:
    """Split a command line into the example's name, the file and the options."""
    parser = argparse.ArgumentParser(
        prog="python -m partitioner.examples",
        description="Write an example model with random weights.",
        epilog="NAME --help lists an example's options.",
    )
    examples = parser.add_subparsers(
        dest="name", metavar="NAME", required=True, help=", ".join(NAMES)
    )
    for name in NAMES:
        example = examples.add_parser(name, description=f"Write {name} with random weights.")
        example.add_argument("out", metavar="OUT.onnx", type=Path)
        for option, default in options_of(name).items():
            flag, text = f"--{option.replace('_', '-')}", f"default {default}"
            example.add_argument(flag, type=int, metavar="N", default=default, help=text)
    parsed = vars(parser.parse_args(arguments))
    return parsed.pop("name"), parsed.pop("out"), parsed


def _write(model: onnx.ModelProto, out: Path) -> int:
    """Write the model, with its weights beside it where one file cannot hold them.

    Returns:
        Bytes of the weights.
    """
    weight_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if weight_bytes + _HEADROOM_BYTES > _PROTOBUF_LIMIT_BYTES:
        onnx.save(model, out, save_as_external_data=True, location=f"{out.name}.data")
    else:
        out.write_bytes(model.SerializeToString())
    return weight_bytes


if __name__ == "__main__":
    sys.exit(main())

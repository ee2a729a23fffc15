"""`python -m partitioner.examples NAME OUT.onnx [--OPTION VALUE]...`."""

import argparse
import sys
from pathlib import Path

import onnx

from partitioner.examples import NAMES, ExampleError, build, options_of

_PROTOBUF_LIMIT_BYTES = 2**31 - 1
_HEADROOM_BYTES = 2**24  # graph and names beside the weights


def main(arguments: list[str] | None = None) -> int:
    """Write an example model; 1 if it cannot be built or written, and argparse exits with 2."""
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
    options = vars(parser.parse_args(arguments))
    name, out = options.pop("name"), options.pop("out")
    try:
        model = build(name, **options)
        weight_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
        if weight_bytes + _HEADROOM_BYTES > _PROTOBUF_LIMIT_BYTES:  # weights beside the graph
            onnx.save(model, out, save_as_external_data=True, location=f"{out.name}.data")
        else:
            out.write_bytes(model.SerializeToString())
    except ExampleError as error:
        reason = str(error)
    except OSError as error:
        reason = f"cannot write {out}: {error.strerror}"
    else:
        print(f"{out}: {name}, {len(model.graph.node)} nodes, {weight_bytes / 1e6:.1f} MB")
        return 0
    print(f"error: {reason}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

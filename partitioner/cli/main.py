"""The command line: `partition MODEL ...`, `partition COMMAND ...`.

Exit codes: 0 ok, 1 bad input, 2 usage, 3 infeasible, 130 interrupted. Results go to stdout,
progress to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from partitioner import __version__
from partitioner.ir.errors import PartitionerError
from partitioner.streams import print_plainly

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None: those of the process.

    Returns:
        The exit code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    print_plainly()
    if args[:1] == ["--version"]:
        print(f"partition {__version__}")
        return 0
    from typer import Abort, TyperException

    from partitioner.cli.app import run_command, usage_line
    from partitioner.cli.terminal import one_line
    from partitioner.report.text.tables import safe

    try:
        code = run_command(args)
        sys.stdout.flush()  # here, where a closed pipe is caught
    except TyperException as error:
        print(safe(usage_line(error, args)), file=sys.stderr)
        return 2
    except PartitionerError as error:
        print(f"partition: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:  # Typer gives this code for an interrupt in a command
        print("partition: interrupted", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""The command line: `partition MODEL ...`, `partition COMMAND ...`.

Exit codes: 0 ok, 1 bad input, 2 usage, 3 infeasible, 4 not proven, 130 interrupted. Results go to
stdout, progress to stderr. Nothing is imported before interrupts are noted.
"""

from __future__ import annotations

import sys


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code. Without `argv` the process is this command's alone."""
    try:
        from partitioner.cli import process

        if argv is not None:
            return process.with_streams(lambda: _run(argv))
        process.open_streams()
        with process.noting_interrupts() as interrupts:
            try:
                code = process.with_streams(lambda: _run(sys.argv[1:]))
            except Exception:  # a library may have made one of an interrupt
                if not interrupts.came:
                    raise
                code = 1
        has_said = code == process.INTERRUPTED
        return process.interrupted() if interrupts.came and not has_said else code
    except KeyboardInterrupt:
        from partitioner.cli.process import interrupted

        return interrupted()


def _run(args: list[str]) -> int:
    from partitioner.foundations.streams import print_plainly

    print_plainly()
    if args[:1] == ["--version"]:
        from partitioner import __version__

        print(f"partition {__version__}")
        return 0
    from typer import Abort, TyperException

    from partitioner.backends.runtimes import naming_runtimes
    from partitioner.cli.app import run_command, usage_line
    from partitioner.cli.process import INTERRUPTED, interrupted
    from partitioner.cli.terminal import one_line
    from partitioner.ir.errors import PartitionerError
    from partitioner.report.text.tables import safe

    try:
        with naming_runtimes(TyperException, Abort, OSError):
            code = run_command(args)
    except TyperException as error:
        print(safe(usage_line(error, args)), file=sys.stderr)
        return 2
    except PartitionerError as error:
        print(f"partition: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except Abort:
        code = INTERRUPTED
    return interrupted() if code == INTERRUPTED else code  # Typer's code for an interrupt


if __name__ == "__main__":
    raise SystemExit(main())

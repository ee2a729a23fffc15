"""Small faults put into the source, one at a time, and which of their own folder's tests see them.

    python tests/benchmarks/mutants.py [--seed 0] [--count 60] [--only WORD] [--numbers 3,7]
        [--limit 300]

A mutant is one change of one function: a comparison, an operation, a number, a condition, a call,
a branch. The areas take turns; in each of them a seed draws functions, and a change of each. The
tests of a mutant are those in the folder under `tests/` that mirrors the module's (the nearest that
there is): the mirrored file first, then those that name the module or the function, then the
others. They run until one fails, in a copy of the repository, never in the checkout itself.

It prints a line for each mutant: its number, place and change, and the test that fails, "time" for
tests that do not end, or "SURVIVED", "SURVIVED in time" if the limit (in seconds) cut its tests
off. A test that kills must pass without a mutant: at the end those that do not are named. Some
mutants change nothing that can be seen; whoever reads the table judges that.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# Each fork has them.
import highspy  # noqa: F401
import numba  # noqa: F401
import onnx  # noqa: F401
import onnxruntime  # noqa: F401
import pytest
import torch  # noqa: F401

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).parents[2]
AREAS = (
    "ir",
    "cost_model",
    "partitioner/problem",
    "partitioner/search",
    "partitioner/strategies",
    "partitioner/api/lowering.py",
    "backends/onnx",
    "backends/torch",
    "partitioner/frontends",
)
#: Modules whose tests are those of their users: a rule is shown by the rows that have it.
TESTED_THROUGH = {"ir/ops/rules": "ir/ops"}
#: A test that takes longer than this does not end.
TEST_SECONDS = 120

Node = TypeVar("Node", bound=ast.AST)
Functions = ast.FunctionDef | ast.AsyncFunctionDef
SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """A file with one node of its source in other words."""

    path: Path  #: From the root of the repository.
    function: str
    node: ast.expr | ast.stmt
    change: ast.AST | str

    @property
    def changed(self) -> str:
        """The node in other words."""
        if isinstance(self.change, str):
            return self.change
        text = ast.unparse(ast.fix_missing_locations(self.change))
        return f"({text})" if isinstance(self.change, ast.expr) else text

    def of(self, text: bytes) -> bytes:
        """The text of the file with the change."""
        lines = text.splitlines(keepends=True)
        first, last = self.node.lineno - 1, (self.node.end_lineno or self.node.lineno) - 1
        before = b"".join(lines[:first]) + lines[first][: self.node.col_offset]
        after = lines[last][self.node.end_col_offset :] + b"".join(lines[last + 1 :])
        return before + self.changed.encode() + after

    def __str__(self) -> str:
        old = ast.unparse(self.node).splitlines()[0]
        new = self.changed.splitlines()[0]
        return f"{self.path}:{self.node.lineno} {self.function}: {old:.70} -> {new:.70}"


def changes(node: ast.AST) -> Iterator[ast.AST | str]:
    """All small faults of one node of the syntax tree, itself and not those below it."""
    yield from _of_operators(node)
    yield from _of_constants(node)
    yield from _of_branches(node)
    yield from _of_calls(node)


def _of_operators(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            yield _with(node, ops=[SWAPPED[type(operator)]()])
        case ast.BinOp(op=operator) if type(operator) in SWAPPED:
            yield _with(node, op=SWAPPED[type(operator)]())
        case ast.BoolOp(values=values):
            yield _with(node, op=SWAPPED[type(node.op)]())
            yield from (_without(node, "values", index) for index in range(len(values)))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand


def _of_constants(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
            yield from [ast.Constant(node.value - 1)] if node.value else []


def _of_branches(node: ast.AST) -> Iterator[ast.AST | str]:
    match node:
        case ast.IfExp(body=body, orelse=other):
            yield from (body, other)
        case ast.If(orelse=[]):
            yield "pass"
        case ast.Continue() | ast.Break():
            yield "pass"
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            for index, loop in enumerate(node.generators):
                for condition in range(len(loop.ifs)):
                    loops = list(node.generators)
                    loops[index] = _without(loop, "ifs", condition)
                    yield _with(node, generators=loops)


def _of_calls(node: ast.AST) -> Iterator[ast.AST | str]:
    match node:
        case ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED_CALLS:
            yield _with(node, func=ast.Name(SWAPPED_CALLS[name]))
        case ast.Call(func=ast.Name("isinstance")):
            pass  # fails wherever it runs
        case ast.Call(args=[first, second, *others]) if not isinstance(first, ast.Starred):
            if not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
                yield _with(node, args=[second, first, *others])


def _with(node: Node, **fields: object) -> Node:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _without(node: Node, name: str, index: int) -> Node:
    kept = list(getattr(node, name))
    del kept[index]
    return _with(node, **{name: kept})


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run and whose places are known: no annotations, messages or text."""
    yield node
    for name, child in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for below in child if isinstance(child, list) else [child]:
            if isinstance(below, ast.AST) and not isinstance(
                below, ast.Raise | ast.Assert | ast.JoinedStr | Functions
            ):
                yield from _nodes(below)


def functions(root: Path, area: str, only: str) -> list[tuple[Path, Functions]]:
    """The functions of an area, each with its file."""
    files = sorted((root / area).rglob("*.py")) or [root / area]
    return [
        (path, node)
        for path in (file.relative_to(root) for file in files)
        if only in str(path)
        for node in ast.walk(ast.parse((root / path).read_bytes()))
        if isinstance(node, Functions)
    ]


def mutants(path: Path, function: Functions) -> list[Mutant]:
    """All mutants of a function."""
    return [
        Mutant(path, function.name, changed, change)
        for node in _nodes(function)
        if isinstance(node, ast.expr | ast.stmt)
        for changed, change in (
            *([(node.test, ast.UnaryOp(ast.Not(), node.test))] if isinstance(node, ast.If) else ()),
            *((node, change) for change in changes(node)),
        )
    ]


def sample(root: Path, seed: int, count: int, only: str) -> list[Mutant]:
    """Draw one change each of functions of all areas in turn."""

    def draw(of: tuple[Path, Functions]) -> random.Random:
        """By the function's name, so that what others add and remove changes no draw."""
        return random.Random(f"{seed} {of[0]} {of[1].name}")

    areas = [
        sorted(functions(root, area, only), key=lambda of: draw(of).random()) for area in AREAS
    ]
    turns = (of for turn in itertools.zip_longest(*areas) for of in turn if of is not None)
    drawn = (draw(of).choice(found) for of in turns if (found := mutants(*of)))
    return list(itertools.islice(drawn, count))


def tests_of(mutant: Mutant, root: Path) -> list[str]:
    """The test files of the folder that mirrors the module's, the most fitting ones first."""
    module = mutant.path.relative_to("partitioner") if _is_ours(mutant.path) else mutant.path
    folder = root / "tests" / TESTED_THROUGH.get(str(module.parent), module.parent)
    while not any(folder.rglob("test_*.py")):
        folder = folder.parent
    if folder == root / "tests":
        files = [folder / f"test_{module.name}"]
    else:
        files = list(folder.rglob("test_*.py"))
    name = ".".join((Path("partitioner") / module.with_suffix("")).parts)

    def rank(file: Path) -> tuple[bool, bool, bool, int, str]:
        text = file.read_text()
        mirrors = file.stem in (f"test_{module.stem}", f"test_rows_{module.stem}")
        called = re.search(rf"\b{mutant.function}\b", text) is not None
        return not mirrors, name not in text, not called, len(file.parts), str(file)

    return [str(file.relative_to(root)) for file in sorted(files, key=rank)]


def _is_ours(path: Path) -> bool:
    return path.parts[0] == "partitioner"


def run(root: Path, tests: Sequence[str], seconds: float, *options: str) -> tuple[str, bool]:
    """The output of the tests in a copy of the repository, and whether they ended in time.

    They run in a fork of this process, which has imported the libraries.
    """
    with tempfile.TemporaryDirectory() as base:
        said = Path(base) / "said"
        known = "-q", "-p", "no:cacheprovider", "--no-header", f"--timeout={TEST_SECONDS}"
        arguments = [*known, f"--basetemp={base}/tests", *options, *tests]
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(root, arguments, said)
        )
        process.start()
        process.join(seconds)
        ended = process.exitcode is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # also what the tests have left
        process.join()
        return said.read_text(errors="replace"), ended


def _run(root: Path, arguments: list[str], said: Path) -> None:
    os.setsid()
    os.chdir(root)
    sys.path[:] = [str(root / ".editable"), *(p for p in sys.path if not p.startswith(str(ROOT)))]
    os.environ["PYTHONPATH"] = str(root / ".editable")
    with said.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.exit(pytest.main(arguments))


def verdict(output: str, ended: bool) -> tuple[str, str]:
    """In words what became of a mutant, and the test that kills it, "" if none does."""
    failed = re.search(
        r"^(?:FAILED|ERROR) (\S+\.py(?:::[^\n]*?)?)(?: - .*)?$", output, re.MULTILINE
    )
    if failed:
        return failed[1], failed[1]
    if "Timeout" in output:
        return "time", ""
    if " passed" not in output:
        return (
            f"killed: {output.strip().splitlines()[-1]:.100}" if ended else "SURVIVED in time",
            "",
        )
    return ("SURVIVED" if ended else "SURVIVED in time"), ""


def copied(root: Path) -> None:
    """Copy the files of the checkout, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).exists():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name, follow_symlinks=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--numbers", default="", help="those of them that run: 3,7; all if empty")
    parser.add_argument("--only", default="", help="a word of the paths of files")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a mutant's tests")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    options = parser.parse_args()
    killers: list[str] = []
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copied(root)
        drawn = list(enumerate(sample(root, options.seed, options.count, options.only)))
        if options.numbers:
            drawn = [drawn[int(number)] for number in options.numbers.split(",")]
        for number, mutant in drawn:
            print(f"{number:3} {mutant}", flush=True)
            tests = tests_of(mutant, root)
            if options.list:
                print(f"      {' '.join(tests)}")
                continue
            text = (root / mutant.path).read_bytes()
            (root / mutant.path).write_bytes(mutant.of(text))
            start = time.monotonic()
            words, killer = verdict(*run(root, tests, options.limit, "-x"))
            seconds = time.monotonic() - start
            (root / mutant.path).write_bytes(text)
            print(f"      {words} ({seconds:.0f} s)", flush=True)
            survived += words.startswith("SURVIVED")
            killers += [killer] if killer else []
        print(f"{len(drawn) - survived} of {len(drawn)} killed")
        if killers:
            output, _ = run(root, sorted(set(killers)), 10 * options.limit)
            print("\n".join(re.findall(r"^(?:FAILED|ERROR) .*", output, re.MULTILINE)))
    return survived > 0


if __name__ == "__main__":
    sys.exit(main())

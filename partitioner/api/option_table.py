"""The options of the public functions and of the commands, described once.

The type of a field is that of the keyword argument. What people read of it is in `options.toml`, as
are the options that a command alone has. From these come signatures and docstrings
(`api.options.takes`), the parameters of the commands (`cli.options.takes` and `listed`) and the
tables of the reference (`docs/hooks/options.py`). The module loads nothing heavy, so that
`partition --help` is fast: types of other modules are quoted.
"""

import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Required, TypedDict

if TYPE_CHECKING:
    from partitioner.cost_model.cluster.topology import Cluster
    from partitioner.frontends.torch.options import Optimizer
    from partitioner.ir.pipeline.generate import ScheduleName
    from partitioner.ir.plan import Plan
    from partitioner.search.request import MicroBatchCount, Recompute, Say
    from partitioner.solver.milp.engines import SolverName
    from partitioner.strategies.constraints import Constraints

#: Panels of the help of a command, in its order.
PANELS = ("Model", "Devices", "Search", "Training and stages", "Output", "Pictures")


@dataclass(frozen=True)
class Option:
    """Texts of an option, and its form on the command line.

    Texts write values in backticks, and other options in braces: ``{training}`` is `training` in
    Python and --training on the command line, ``{cluster=local}`` is `cluster="local"` and
    --cluster local.
    """

    text: str  #: What it does and its default, in a sentence or two: its help.
    panel: str = ""  #: Panel of the help of a command; "" for an option of Python alone.
    more: str = ""  #: What Python's help and the reference say beyond it.
    see: str = ""  #: Page of the documentation that says more, below `docs/`.
    #: How the command line reads a value, see `partitioner.cli.options.FORMS`; flags and choices
    #: are known by their types.
    form: str = "text"
    metavar: str | None = None  #: The value in the help of a command.
    #: Name, or names, on the command line, where it is not that of the keyword.
    flag: str = ""
    #: The help of a command, where the command takes it in another way than Python.
    command_text: str = ""
    #: What it is for ("sized": ONNX models and configurations); other models are refused on the
    #: command line.
    only: Literal["", "onnx", "sized", "module", "training"] = ""

    def flag_of(self, keyword: str) -> str:
        """Name of the option on the command line."""
        return self.flag or flag_of(keyword)

    @property
    def help(self) -> str:
        """The text of the option on the command line."""
        named = _REFERENCE.sub(_on_the_command_line, self.command_text or self.text)
        return named.replace("`", "")

    @property
    def python_help(self) -> str:
        """Full text, as of a keyword argument."""
        quoted = re.sub(r"`(.*?)`", r'"\1"', f"{self.text} {self.more}".rstrip())
        return _REFERENCE.sub(
            lambda found: f'`{found[1]}="{found[2]}"`' if found[2] else f"`{found[1]}`", quoted
        )

    @property
    def reference(self) -> str:
        """Full text, as of an option of a command, in Markdown."""
        text = f"{self.command_text or self.text} {self.more}".rstrip()
        return _REFERENCE.sub(lambda found: f"`{_on_the_command_line(found)}`", text)


_REFERENCE = re.compile(r"\{(\w+)(?:=([\w+-]+))?\}")


def flag_of(keyword: str) -> str:
    """Name on the command line of an option that has the name of its keyword."""
    return "--" + keyword.replace("_", "-")


def _on_the_command_line(found: re.Match[str]) -> str:
    return " ".join([flag_of(found[1]), *([found[2]] if found[2] else [])])


@cache
def described(options: type) -> Mapping[str, Option]:
    """The options of a TypedDict by their keywords."""
    rows = tables()
    own = rows.get(options.__name__, {})
    return {name: Option(**own.get(name, rows[name])) for name in options.__annotations__}


@cache
def tables() -> Mapping[str, Any]:
    """Give what `options.toml` holds."""
    file = resources.files("partitioner.api").joinpath("options.toml")
    return tomllib.loads(file.read_text("utf-8"))


def filled(docstring: str, options: type) -> str:
    """A docstring whose line ``**options: ...`` lists the options of a TypedDict."""

    def paragraphs(found: re.Match[str]) -> str:
        indent = found[1] + 4 * " "
        wrapper = textwrap.TextWrapper(100 - len(indent), break_on_hyphens=False)
        lines = [f"{found[1]}**options: As the signature lists them:"]
        for name, option in described(options).items():
            described_as = wrapper.wrap(f"{name}: {option.python_help}")
            lines += ["", *(f"{indent}{line}" for line in described_as)]
        return "\n".join(lines)

    return re.sub(r"^( *)\*\*options: .*$", paragraphs, docstring, flags=re.MULTILINE)


_Strategy = Literal["auto", "intra", "inter", "copies"]
_Launches = Literal["native", "eager", "autograd", "graphs"]


class ModelOptions(TypedDict, total=False):
    """Options of reading or tracing a model."""

    dims: Mapping[str, int] | None
    shapes: Mapping[str, tuple[int, ...]] | None
    feed: Mapping[str, str] | None
    training: bool
    optimizer: "Optimizer"
    loss: Callable[..., Any] | str | int | None
    target: Any
    progress: "Say | None"


class KindOptions(ModelOptions, total=False):
    """Options of reading a model that is planned."""

    parallel: str | None


class DeviceOptions(TypedDict, total=False):
    """The devices of a plan."""

    cluster: "str | Path | Cluster | None"
    memory: int | str | None
    profile: str | Path | None
    launches: _Launches | None


class GoalOptions(TypedDict, total=False):
    """Goal of a plan, and the kinds that it may be of."""

    objective: Literal["throughput", "latency", "memory"]
    strategy: _Strategy


class LayoutOptions(TypedDict, total=False):
    """Decisions on a plan that are made before the search."""

    mesh: Mapping[str, int] | None
    constraints: "Constraints | Plan | Mapping[str, Any] | str | Path | None"


class SearchOptions(TypedDict, total=False):
    """Options of a search."""

    time_limit_s: float
    gap: float
    solver: "SolverName"
    seed: int


class CompileOptions(
    KindOptions, DeviceOptions, GoalOptions, LayoutOptions, SearchOptions, total=False
):
    """Options of `compile`."""

    tune: int | None
    schedule: "ScheduleName | Path | None"
    micro_batches: "MicroBatchCount"
    recompute: "Recompute"
    plan_only: bool
    cache: bool


class GridOptions(TypedDict, total=False):
    """The values of which a sweep plans every combination."""

    clusters: Iterable[str | None]
    memory: Iterable[int | str | None]
    launches: _Launches | None
    meshes: Iterable[Mapping[str, int]]


class SweepOptions(KindOptions, GoalOptions, GridOptions, SearchOptions, total=False):
    """Options of `sweep`."""


class FitOptions(KindOptions, SearchOptions, total=False):
    """Options of `fit`."""

    batch: int | None
    cards: Sequence[str]
    launches: _Launches | None


class ProfileOptions(ModelOptions, total=False):
    """Options of `profile`."""

    parallel: str | None
    cluster: "str | Path | Cluster | None"
    profile: str | Path | None
    strategy: _Strategy
    mesh: Mapping[str, int] | None
    time_limit_s: float
    micro_batches: int | None


class DumpOptions(KindOptions, DeviceOptions, LayoutOptions, total=False):
    """Options of `dump_problem`."""

    strategy: Required[Literal["auto", "intra", "inter"]]
    example_inputs: Any

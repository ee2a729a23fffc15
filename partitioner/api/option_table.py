"""The options of the public functions and of the commands, described once: one field each.

The type of a field is that of the keyword argument, its `Option` what people read of it. From these
fields come signatures and docstrings (`api.options.takes`), the parameters of the commands
(`cli.options.takes`) and the tables of the reference (`docs/hooks/options.py`). The
module loads nothing heavy, so that `partition --help` is fast: types of other modules are quoted.
"""

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Required,
    TypedDict,
    get_args,
    get_origin,
)

if TYPE_CHECKING:
    from partitioner.cost_model.cluster.topology import Cluster
    from partitioner.frontends.torch.options import Optimizer
    from partitioner.ir.pipeline.generate import ScheduleName
    from partitioner.ir.plan import Plan
    from partitioner.search.request import MicroBatchCount, Recompute, Say
    from partitioner.solver.milp.engines import SolverName
    from partitioner.strategies.constraints import Constraints

MODEL, DEVICES, SEARCH, TRAINING = "Model", "Devices", "Search", "Training and stages"
OUTPUT, PICTURES = "Output", "Pictures"
#: Panels of the help of a command, in its order.
PANELS = (MODEL, DEVICES, SEARCH, TRAINING, OUTPUT, PICTURES)


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
    flag: str = ""  #: Name on the command line, where it is not that of the keyword.
    #: The help of a command, where the command takes it in another way than Python.
    command_text: str = ""
    #: What it is for; other models are refused on the command line.
    only: Literal["", "onnx", "module", "training"] = ""

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
    """The options of a TypedDict by their keywords, without those that nothing describes."""
    table = {}
    for name, annotation in options.__annotations__.items():
        origin: Any = get_origin(annotation)
        field = get_args(annotation)[0] if origin is Required else annotation
        for part in getattr(field, "__metadata__", ()):
            if isinstance(part, Option):
                table[name] = part
    return table


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


_Strategy = Annotated[
    Literal["auto", "intra", "inter", "copies"],
    Option(
        "`intra`: cut operators over devices; `inter`: place whole operators; `auto` (default): "
        "the best of these and of mixtures; `copies`: a whole copy on each device, or group of "
        "devices, for a stream of requests.",
        SEARCH,
        see="concepts/plans.md#kinds",
    ),
]


class ModelOptions(TypedDict, total=False):
    """Options of reading or tracing a model."""

    dims: Annotated[
        Mapping[str, int] | None,
        Option(
            "Sizes of an ONNX model's symbolic dims, by symbol.",
            MODEL,
            form="dims",
            metavar="NAME=SIZE",
            flag="--dim",
            command_text="Size of a symbolic dim; may be repeated.",
            only="onnx",
        ),
    ]
    shapes: Annotated[
        Mapping[str, tuple[int, ...]] | None,
        Option(
            "Shapes of an ONNX model's inputs, and of tensors inside, by name.",
            MODEL,
            more="A tensor inside is one whose shape nothing tells; where its size depends on "
            "data, this is a bound.",
            see="how-to/own-model.md#sizes-inside-the-model",
            form="shapes",
            metavar="NAME=D,D",
            flag="--shape",
            command_text="Shape of an input, or of a tensor inside; may be repeated.",
            only="onnx",
        ),
    ]
    training: Annotated[
        bool,
        Option(
            "For a module: plan a training step, forward and backward.",
            TRAINING,
            more="The module must return its loss first, a floating scalar.",
            see="how-to/training.md",
            only="module",
        ),
    ]
    optimizer: Annotated[
        "Optimizer",
        Option(
            "With {training}: the optimizer whose state is counted, `adamw` (default), `adam`, "
            "`sgd`, `momentum`, `rmsprop` or `adagrad`.",
            TRAINING,
            more="`momentum` is SGD with momentum.",
            metavar="NAME",
            only="training",
        ),
    ]
    progress: Annotated["Say | None", Option("Called with a line of text at each stage.")]


class KindOptions(ModelOptions, total=False):
    """Options of reading a model that is planned."""

    parallel: Annotated[
        str | None,
        Option(
            "Kind of parallelism, in place of the cheapest: `dp` (data), `tp` (tensor), `cp` "
            "(sequences), `ep` (experts), `spatial` (images), `pp` (stages); for modules also "
            "`ring`, `dispatch` and `zero3`, with {training} also `zero1` and `zero2`. Join "
            "several by `+`; without {mesh} all meshes of as many axes are weighed.",
            TRAINING,
            more="`spatial` cuts height, width and depth of images over mesh axes `h`, `w` and "
            "`d`. Stages have one device each or, joined with another kind, as many as the mesh "
            "leaves. The batch is the dim of the inputs that can be followed furthest through the "
            "model; a note says where it is not dim 0 of all inputs.",
            see="how-to/training.md#kinds-of-parallelism",
            metavar="KIND",
        ),
    ]


class DeviceOptions(TypedDict, total=False):
    """The devices of a plan."""

    cluster: Annotated[
        "str | Path | Cluster | None",
        Option(
            "Devices and links: a preset, as `4xh100`, `2x4xh200` (two machines of four), `4xcpu`, "
            "`local` or `ideal`, or a TOML file (default: `h100`).",
            DEVICES,
            more="Python takes a Cluster, too.",
            see="how-to/cluster.md",
            form="cluster",
            metavar="NAME|FILE",
        ),
    ]
    memory: Annotated[
        int | str | None,
        Option(
            "Memory limit of each device, like `8GiB`.",
            DEVICES,
            more="Default: the cluster's. Python takes a number of bytes, too. A model that fits "
            "no plan as a whole runs in blocks.",
            see="how-to/memory.md",
            form="bytes",
            metavar="SIZE",
        ),
    ]
    profile: Annotated[
        str | Path | None,
        Option(
            "Measurements of this machine, for {cluster=local} (default: in the cache folder).",
            DEVICES,
            more="The file in the user's cache folder is `profile.sqlite`. With another cluster "
            "this is refused.",
            see="how-to/measured.md",
            metavar="FILE",
        ),
    ]


class GoalOptions(TypedDict, total=False):
    """Goal of a plan, and the kinds that it may be of."""

    objective: Annotated[
        Literal["throughput", "latency", "memory"],
        Option(
            "Minimise the time between requests of a stream (`throughput`, default), the time of "
            "one request (`latency`), or the peak memory (`memory`).",
            SEARCH,
            more="The time between requests is the load of the busiest device.",
            see="concepts/objectives.md",
        ),
    ]
    strategy: _Strategy


class LayoutOptions(TypedDict, total=False):
    """Decisions on a plan that are made before the search."""

    mesh: Annotated[
        Mapping[str, int] | None,
        Option(
            "Mesh of all devices to cut over, by its axes (default: searched).",
            SEARCH,
            more='In Python a mapping, as {"dp": 2, "tp": 2}. Its product is the number of '
            "devices. An axis `pp` alone has so many stages, whose devices are left to the search.",
            see="concepts/plans.md#kinds",
            form="mesh",
            metavar="dp=2,tp=2",
        ),
    ]
    constraints: Annotated[
        "Constraints | Plan | Mapping[str, Any] | str | Path | None",
        Option(
            "Named dims, pins and loads of experts (TOML), or a plan (JSON).",
            SEARCH,
            more="The decisions of a plan are kept, with its stages, micro-batches and blocks. "
            "Python takes Constraints, a Plan, and a "
            "mapping with named dims, a layout, pins and loads of experts as in a file, too.",
            see="how-to/constraints.md",
            metavar="FILE",
        ),
    ]


class SearchOptions(TypedDict, total=False):
    """Options of a search."""

    time_limit_s: Annotated[
        float,
        Option(
            "Seconds for the search (default: 30).",
            SEARCH,
            more="They stand for so much work, of which a longer limit has more; in a sweep, for "
            "that of each point.",
            see="concepts/plans.md",
            form="seconds",
            metavar="S",
            flag="--time-limit",
        ),
    ]
    gap: Annotated[
        float,
        Option(
            "Stop once the plan is proven to be this close to the best (default: 1%).",
            SEARCH,
            more="It is a share of the cost: 0.01 is 1%.",
            see="concepts/plans.md",
            form="fraction",
            metavar="1%",
        ),
    ]
    solver: Annotated[
        "SolverName",
        Option(
            "MILP solver that PuLP finds: `highs` (default), `cbc`, `gurobi`, `cplex`, ...",
            SEARCH,
            see="concepts/solvers.md",
            metavar="NAME",
        ),
    ]
    seed: Annotated[
        int,
        Option(
            "Seed of the search's random choices (default: 0).", SEARCH, form="natural", metavar="N"
        ),
    ]


class CompileOptions(
    KindOptions, DeviceOptions, GoalOptions, LayoutOptions, SearchOptions, total=False
):
    """Options of `compile`."""

    tune: Annotated[
        int | None,
        Option(
            "With {cluster=local}: run the K best plans on this machine, and keep the fastest.",
            DEVICES,
            more="They are the best of the search and of different spaces, and run for a few "
            "steps. The certificate lists the runs as `trials`.",
            see="how-to/measured.md#choose-by-a-run",
            form="positive",
            metavar="K",
        ),
    ]
    schedule: Annotated[
        "ScheduleName | Path | None",
        Option(
            "Order of the micro-batches in stages: `forward`, `gpipe`, `1f1b`, `interleaved`, "
            "`zb1`, `zbv`, `dualpipev`, or a file (see partition schedule).",
            TRAINING,
            more="`forward` is for inference. A file holds the table of the schedule. Default: "
            "the best order.",
            see="how-to/pipelines.md#schedule-and-micro-batches",
            metavar="NAME|FILE",
        ),
    ]
    micro_batches: Annotated[
        "MicroBatchCount",
        Option(
            "Run each batch in M equal parts. `auto`: in as many as are fastest, or fit in memory, "
            "even if that changes results. Default: the whole batch; a module runs in parts if its "
            "batch does not fit, or training is faster in stages, and results stay the same.",
            TRAINING,
            more="Parts run through stages or all on the same devices; gradients are added up. "
            "With {schedule}, or with {parallel=pp} alone, several numbers are tried, of a module "
            "those that are proven to compute what the whole batch does, but for other random "
            "numbers; a note names what stands against the others, and what is not proven of a "
            "number that is given. A module whose batch does not fit runs in the fewest parts that "
            "fit and are proven to compute the same (no batch norms, no dropout); `auto` takes "
            "them without that proof. Training on up to 16 devices weighs stages by itself, on "
            "several nodes of more devices with `auto`. The batch of an ONNX model is dim 0 of the "
            "first input and of all inputs as long as that; a model whose outputs are not proven "
            "to be the same is refused.",
            see="how-to/pipelines.md#a-batch-that-does-not-fit",
            form="micro_batches",
            metavar="M|auto",
        ),
    ]
    recompute: Annotated[
        "Recompute",
        Option(
            "With {training}: whether the backward pass may recompute values instead of keeping "
            "them (default: `auto`, if memory is short).",
            TRAINING,
            more="`auto` allows it if no plan that keeps all values fits or, above 16 devices, if "
            "memory forbids a cheaper one.",
            see="how-to/training.md#memory-values-that-are-computed-again",
            form="recompute",
            only="training",
        ),
    ]
    plan_only: Annotated[
        bool,
        Option(
            "For an ONNX model: files of its weights may be missing.",
            OUTPUT,
            more="Their sizes are planned; what needs their values is refused.",
            command_text="Write the plan and the report, but no rank files; files of weights may "
            "be missing.",
        ),
    ]


class GridOptions(TypedDict, total=False):
    """The values of which a sweep plans every combination."""

    clusters: Annotated[
        Iterable[str | None],
        Option(
            "Preset names or TOML files; None is the reference accelerator.",
            DEVICES,
            form="names",
            metavar="NAME,NAME",
            command_text="Presets or TOML files, like h100,a100-80g.",
        ),
    ]
    memory: Annotated[
        Iterable[int | str | None],
        Option(
            "Memory limits of each device, in bytes or as text; None is the cluster's own.",
            DEVICES,
            form="sizes",
            metavar="SIZE,SIZE",
            command_text="Memory limits of each device, like 8GiB,16GiB.",
        ),
    ]
    meshes: Annotated[
        Iterable[Mapping[str, int]],
        Option(
            'Meshes to cut over, as {"dp": 2, "tp": 2}, each for the points with as many devices.',
            SEARCH,
            more="Points without one search theirs.",
            form="meshes",
            metavar="dp=2,tp=2",
            flag="--mesh",
            command_text="Mesh to cut over, for the points with as many devices; may be repeated.",
        ),
    ]


class SweepOptions(KindOptions, GoalOptions, GridOptions, SearchOptions, total=False):
    """Options of `sweep`."""


class ProfileOptions(ModelOptions, total=False):
    """Options of `profile`."""

    parallel: Annotated[
        str | None,
        Option(
            "Measure what a module runs that is stored like this between steps: `zero3`, with "
            "{training} also `zero1` and `zero2`.",
            TRAINING,
            see="how-to/training.md#kinds-of-parallelism",
            metavar="KIND",
        ),
    ]
    cluster: Annotated[
        "str | Path | Cluster | None",
        Option(
            "`local` (default), or a TOML file that names a profile.",
            DEVICES,
            see="how-to/measured.md",
            metavar="NAME|FILE",
        ),
    ]
    profile: Annotated[
        str | Path | None,
        Option(
            "Measurements to add to (default: in the cache folder).",
            DEVICES,
            more="The file in the user's cache folder is `profile.sqlite`.",
            metavar="FILE",
        ),
    ]
    strategy: _Strategy
    mesh: Annotated[
        Mapping[str, int] | None,
        Option(
            "Measure what this mesh needs alone (default: all meshes).",
            SEARCH,
            form="mesh",
            metavar="dp=2,tp=2",
        ),
    ]
    time_limit_s: Annotated[
        float,
        Option(
            "Seconds for the measurements (default: 120).",
            SEARCH,
            more="They end measurements, and not the reading of the model, which a note tells of "
            "if it leaves too little.",
            form="seconds",
            metavar="S",
            flag="--time-limit",
        ),
    ]
    micro_batches: Annotated[
        int | None,
        Option(
            "Measure the operators of one of M micro-batches, for plans in micro-batches.",
            TRAINING,
            more="Default: those of the batch as a whole.",
            form="positive",
            metavar="M",
        ),
    ]


class DumpOptions(KindOptions, DeviceOptions, LayoutOptions, total=False):
    """Options of `dump_problem`."""

    strategy: Required[
        Annotated[
            Literal["auto", "intra", "inter"],
            Option(
                "`intra`: the sharding problem in the format of google/iopddl; `inter`: the "
                "placement problem in that of msr-fiddle/dnn-partitioning; either as an integer "
                "program where the file is a `.lp` or `.mps`.",
                more="`auto` is refused: a file holds one problem. Without a mesh, `intra` takes "
                "the one of a single axis.",
            ),
        ]
    ]
    example_inputs: Annotated[Any, Option("As of compile.")]

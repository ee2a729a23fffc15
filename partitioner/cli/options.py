"""Options of the commands: those of the table of options as parameters, and how values are read."""

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    cast,
    get_args,
    get_origin,
)

import typer

from partitioner.api.option_table import (
    PANELS,
    Option,
    ProfileOptions,
    SearchOptions,
    described,
    flag_of,
    tables,
)
from partitioner.frontends.model_names import config_file, module_name, unusable
from partitioner.ir.errors import PartitionerError

if TYPE_CHECKING:
    from partitioner.search.request import MicroBatchCount

Item = TypeVar("Item")
Chosen = TypeVar("Chosen")
Command = TypeVar("Command", bound=Callable[..., int])


def wrong(message: str) -> NoReturn:
    """Refuse an option, as a typer.BadParameter: one line, exit code 2."""
    raise typer.BadParameter(message)


def _pair(text: str, form: str, whole: str = "") -> tuple[str, str]:
    """Both sides of an equals sign; `whole` is the option's whole value, `form` how it looks."""
    name, equals, value = text.rpartition("=")
    if not equals or not name or not value:
        wrong(f"{whole or text!r} is not like {form}")
    return name, value


def dim(text: str) -> tuple[str, int]:
    """The symbol and size of ``NAME=SIZE``."""
    name, value = _pair(text, "batch=8")
    return name, count(value, text, least=0)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """The input and shape of ``NAME=D,D``."""
    name, value = _pair(text, "x=8,16")
    return name, tuple(count(part, text, least=0) for part in value.split(","))


def feed(text: str) -> tuple[str, str]:
    """The result and input of ``RESULT=INPUT``."""
    return _pair(text, "present.*=past.*")


def mesh(text: str) -> dict[str, int]:
    """The axis sizes of ``dp=2,tp=2``."""
    pairs = [_pair(part, "dp=2,tp=2", text) for part in text.split(",")]
    axes = {name: count(value, text, least=1) for name, value in pairs}
    if len(axes) != len(pairs):
        wrong(f"{text!r} names an axis twice")
    if any(not name.isidentifier() for name in axes):
        wrong(f"{text!r}: axis names are letters, digits and _")
    return axes


def count(value: str, text: str, least: int = 1) -> int:
    """A whole number of at least `least`; `text` is the option's whole value."""
    if not value.strip().isdecimal() or int(value) < least:
        where = "" if value == text else f"{text!r}: "
        wrong(f"{where}{value!r} is not a whole number of at least {least}")
    return int(value)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return count(text, text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return count(text, text, least=0)


def memory(text: str) -> int:
    """Bytes, like ``8GiB``."""
    from partitioner.cost_model.cluster.topology import parse_bytes  # loads NumPy
    from partitioner.cost_model.errors import CostError

    try:
        return parse_bytes(text)
    except CostError as error:
        wrong(str(error))


def seconds(text: str) -> float:
    """Seconds above 0."""
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        wrong(f"{text!r} is not a number of seconds above 0")
    return value


def micro_batches(text: str) -> "MicroBatchCount":
    """A number of micro-batches, or ``auto``."""
    return "auto" if text == "auto" else positive(text)


def fraction(text: str) -> float:
    """A gap, like ``1%`` or ``0.01``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        wrong(f"{text!r} is not a gap like 1% or 0.01")
    return value


def several(item: Callable[[str], Item]) -> Callable[[str], tuple[Item, ...]]:
    """A list with commas, of items of a type of option; those in parentheses part no items."""

    def read(text: str) -> tuple[Item, ...]:
        return tuple(item(part.strip()) for part in re.split(r",(?![^(]*\))", text))

    return read


def output_file(suffixes: Sequence[str]) -> Callable[[str], Path]:
    """A file to write, whose name ends in one of `suffixes`."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in suffixes:
            wrong(f"{text!r} does not end in {' or '.join(suffixes)}")
        return path

    return read


def _presets(incomplete: str) -> list[str]:
    """Clusters that begin like what was typed, for the shell's completion."""
    from partitioner.cost_model.cluster.presets import accelerators

    before, times, _ = incomplete.rpartition("x")
    names = (f"{before}{times}{name}" for name in (*accelerators(), "local"))
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An .onnx file, an exported program (.pt2), a config.json of transformers or its "
        "folder, or package.module:factory.",
    ),
]
Written = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder that `partition MODEL` wrote.")
]


@dataclass(frozen=True)
class Form:
    """Form of the values of an option on the command line."""

    parser: Callable[[str], Any] | None = None  #: Reads one value from its text.
    repeated: bool = False  #: Whether the option may be given several times.
    choices: Any = None  #: A Literal of all values; None for any text.
    #: The keyword argument that a value, or the list of all, makes.
    keyword: Callable[[Any], Any] | None = None
    completion: Callable[[str], list[str]] | None = None  #: Completes what was typed in the shell.


#: The values of --recompute as the option of `compile`.
_RECOMPUTE: Mapping[str, bool | Literal["auto"]] = {"auto": "auto", "yes": True, "no": False}
#: Forms of values by the name that the table of options has for them.
FORMS: Mapping[str, Form] = {
    "text": Form(),
    "positive": Form(positive),
    "natural": Form(natural),
    "seconds": Form(seconds),
    "fraction": Form(fraction),
    "bytes": Form(memory),
    "cluster": Form(completion=_presets),
    "mesh": Form(mesh),
    "micro_batches": Form(micro_batches),
    "recompute": Form(choices=Literal["auto", "yes", "no"], keyword=_RECOMPUTE.__getitem__),
    "off": Form(keyword=operator.not_),
    "dims": Form(dim, repeated=True, keyword=dict),
    "shapes": Form(shape, repeated=True, keyword=dict),
    "feed": Form(feed, repeated=True, keyword=dict),
    "meshes": Form(mesh, repeated=True),
    "names": Form(several(str)),
    "sizes": Form(several(memory)),
    "counts": Form(several(positive)),
    "naturals": Form(several(natural)),
    "page": Form(output_file((".html", ".htm"))),
    "model": Form(output_file((".onnx",))),
}


def of_table(options: type, keyword: str) -> Any:
    """The parameter of a command that is an option of the table, without its type."""
    row = described(options)[keyword]
    return _parameter(row, keyword, row.help, FORMS[row.form].parser)


def listed(command: str, keyword: str, parser: Callable[[str], Any] | None = None) -> Any:
    """The same of an option that commands alone have; `parser` in place of that of its form."""
    row = Option(**tables()["commands"][command][keyword])
    return _parameter(row, keyword, row.text, parser or FORMS[row.form].parser)


def _parameter(row: Option, keyword: str, text: str, parser: Callable[[str], Any] | None) -> Any:
    """An option whose default is not shown: `text` says it where it matters."""

    def read(value: Any) -> Any:  # Typer parses defaults too
        return parser(value) if parser is not None and isinstance(value, str) else value

    return typer.Option(
        *row.flag_of(keyword).split(),
        parser=None if parser is None else read,
        metavar=row.metavar,
        help=text,
        rich_help_panel=row.panel,
        show_default=False,
        autocompletion=FORMS[row.form].completion,
    )


def _read_type(options: type, keyword: str) -> Any:
    """Type of the values that a command gets of an option of the table."""
    python_type: Any = options.__annotations__[keyword]
    form = FORMS[described(options)[keyword].form]
    if python_type is bool:
        return bool
    if form.repeated:
        return list[Any] | None
    named = (one for one in (python_type, *get_args(python_type)) if get_origin(one) is Literal)
    choices = next(named, form.choices)
    return (choices or (str if form.parser is None else Any)) | None


Devices = Annotated[int | None, listed("all", "devices")]
InputSeed = Annotated[int, listed("all", "seed")]
Json = Annotated[bool, listed("all", "json")]
Quiet = Annotated[bool, listed("all", "quiet")]
Profile = Annotated[str | None, of_table(ProfileOptions, "profile")]
Solver = Annotated[str, of_table(SearchOptions, "solver")]
Seed = Annotated[int, of_table(SearchOptions, "seed")]


def takes(options: type) -> Callable[[Command], Command]:
    """Give a command the parameters that a TypedDict of the table lists, in place of its ``**``.

    In the help they stand, in the panel of each, behind the parameters that may be positional and
    before those that may not.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters.values()
        keyword = inspect.Parameter.KEYWORD_ONLY
        listed = []
        for name, row in described(options).items():
            if row.panel:
                annotation: Any = Annotated[_read_type(options, name), of_table(options, name)]
                listed.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
        before = [one.replace(kind=keyword) for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
        behind = [one for one in own if one.kind is one.KEYWORD_ONLY]
        parameters = sorted((*before, *listed, *behind), key=_panel)
        made = cast("Any", command)
        made.__signature__ = inspect.Signature(parameters, return_annotation=int)
        made.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _panel(parameter: inspect.Parameter) -> int:
    """Place of the panel of a parameter in the help; arguments come first."""
    (info,) = parameter.annotation.__metadata__
    return -1 if info.rich_help_panel is None else PANELS.index(info.rich_help_panel)


def given(model: str, options: type[Chosen], values: Mapping[str, Any]) -> Chosen:
    """The keyword arguments that options make; those of the other kind of model are refused."""
    rows, keywords = described(cast("type", options)), {}
    for name, value in values.items():
        if value is not None and value is not False and value != []:
            form = FORMS[rows[name].form]
            keywords[name] = value if form.keyword is None else form.keyword(value)
    is_module, is_config = module_name(model) is not None, config_file(model) is not None
    rows = {name: row for name, row in rows.items() if name in keywords}
    for name, row in rows.items():
        if row.only == "sized" and is_module and not is_config:
            wrong(f"{row.flag_of(name)} is for ONNX models and configurations (config.json)")
        refused = ("onnx",) if is_module else ("module", "training")
        if row.only in refused:
            refuse_kind(row.flag_of(name), is_module=is_module)
    for name, row in rows.items():
        if row.only == "training" and "training" not in keywords:
            wrong(f"{row.flag_of(name)} is of {flag_of('training')}")
    return cast("Chosen", keywords)


def refuse_kind(name: str, *, is_module: bool) -> NoReturn:
    """Refuse, as `wrong` does, an option that is for models of the other kind."""
    of_modules = "PyTorch modules (.pt2, config.json, package.module:factory)"
    models = "ONNX models" if is_module else of_modules
    wrong(f"{name} is for {models}")


def _near(model: Path) -> str:
    """The name that was meant, of the models in the folder of a file that does not exist."""
    if not model.parent.is_dir():
        return ""
    files = [path for path in model.parent.iterdir() if path.suffix in (".onnx", ".pt2")]
    names = {path.stem: path.name for path in sorted(files)}
    stem = model.name if model.name in names else model.stem
    near = difflib.get_close_matches(stem, names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def check_model(text: str) -> Path | None:
    """The file of a model, None for a factory; a PartitionerError if it holds no graph."""
    if module_name(text) is not None and ":" in text:
        return None
    model = config_file(text) or Path(text)
    try:
        if (model / "plan.json").is_file() and (model / "request.json").is_file():
            raise PartitionerError(
                f"{model} is a partition, not a model; look at it with: partition show {model}"
            )
        if not model.is_file():
            why = f": no such file{_near(model)}" if not model.exists() else " is not a file"
            raise PartitionerError(f"{model}{why}")
    except OSError as error:
        raise PartitionerError(f"{model}: {error.strerror}") from None
    if hint := unusable(text):
        raise PartitionerError(f"{model}: {hint}")
    return model

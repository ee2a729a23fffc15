"""Exported programs are read without running what is in them."""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers import factories
from partitioner.backends.torch.files.archive import ArchiveError, read_extra, read_program

Edit = Callable[[dict[str, Any]], None]
MODEL = "models/model.json"
SAMPLES = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "good.pt2"
    program = torch.export.export(factories.classifier(), factories.batch(), strict=False)
    torch.export.save(program, path, extra_files={"note.txt": "hello"})
    return path


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def rewritten(good: Path, target: Path, contents: dict[str, bytes | None], **extra: bytes) -> Path:
    """The archive with other contents in some of its files; None leaves a file out."""
    with zipfile.ZipFile(good) as source, zipfile.ZipFile(target, "w") as file:
        for info in source.infolist():
            name = info.filename.partition("/")[2]
            data = contents.get(name, source.read(info))
            if data is not None:
                file.writestr(info.filename, data)
        for name, data in extra.items():
            file.writestr(name, data)
    return target


def edited(good: Path, target: Path, name: str, edit: Edit) -> Path:
    with zipfile.ZipFile(good) as source:
        data = json.loads(source.read(f"good/{name}"))
    edit(data)
    return rewritten(good, target, {name: json.dumps(data).encode()})


def nodes(data: dict[str, Any]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = data["graph_module"]["graph"]["nodes"]
    return nodes


def test_a_program_is_read_as_it_was_saved(good: Path) -> None:
    program = read_program(good)
    module = program.module(check_guards=False)
    assert torch.equal(
        module(*factories.batch())["logits"], factories.build()[0](*factories.batch())["logits"]
    )
    assert program.example_inputs is not None
    assert torch.equal(program.example_inputs[0][0], factories.batch()[0])
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert parameters["head.weight"] is parameters["table.weight"]  # tied as before
    assert all(tensor.requires_grad for tensor in parameters.values())
    assert read_extra(good, "note.txt") == "hello"


class _Named(nn.Module):
    """Values are called as fields of the format are."""

    def forward(
        self, target: torch.Tensor, in_spec: torch.Tensor, as_expr: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        expr_str = target + in_spec
        return expr_str, (expr_str * as_expr).sum()


@pytest.mark.parametrize("symbolic", [False, True])
def test_values_may_be_called_as_fields_are(tmp_path: Path, symbolic: bool) -> None:
    example = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in ("target", "in_spec", "as_expr")} if symbolic else None
    path = tmp_path / "named.pt2"
    torch.export.save(torch.export.export(_Named(), example, dynamic_shapes=shapes), path)
    for found, expected in zip(
        read_program(path).module()(*example), _Named()(*example), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_weights_without_contents_are_on_the_meta_device(tmp_path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),), strict=False)
    program.example_inputs = None
    torch.export.save(program, tmp_path / "fake.pt2")
    program = read_program(tmp_path / "fake.pt2")
    assert {tensor.device.type for tensor in program.state_dict.values()} == {"meta"}


@pytest.mark.parametrize("where", ["samples", "weight", "constant"])
def test_a_pickle_that_would_run_code_does_not(good: Path, tmp_path: Path, where: str) -> None:
    touched = tmp_path / "touched"
    torch.save(Touch(touched), tmp_path / "bad.pt")
    bad = (tmp_path / "bad.pt").read_bytes()
    path = tmp_path / "bad.pt2"
    if where == "samples":
        rewritten(good, path, {SAMPLES: bad})
    elif where == "weight":

        def pickled(data: dict[str, Any]) -> None:
            data["config"]["up.bias"] |= {"path_name": "weight_99", "use_pickle": True}

        edited(good, tmp_path / "part", WEIGHTS, pickled)
        rewritten(tmp_path / "part", path, {}, **{"good/data/weights/weight_99": bad})
    else:
        entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}
        config = {"config": {"thing": {**entry, "tensor_meta": None}}}
        name = "data/constants/model_constants_config.json"
        contents: dict[str, bytes | None] = {name: json.dumps(config).encode()}
        payload = pickle.dumps(Touch(touched))
        rewritten(good, path, contents, **{"good/data/constants/opaque_obj_0": payload})
    with pytest.raises(ArchiveError, match=r"would need unsafe unpickling") as caught:
        read_program(path)
    assert "\n" not in str(caught.value)
    assert "data/" in str(caught.value)
    assert not touched.exists()
    torch.load(tmp_path / "bad.pt", weights_only=False)
    assert touched.exists()  # the pickle is what it claims to be


def symbol(data: dict[str, Any]) -> None:
    values = data["graph_module"]["graph"]["tensor_values"]
    text = "__import__('os').mkdir('touched')"
    next(iter(values.values()))["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}


def call(target: str) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        nodes(data)[0]["target"] = target

    return edit


def custom(data: dict[str, Any]) -> None:
    nodes(data)[0]["inputs"][0]["arg"] = {"as_custom_obj": {"name": "x", "class_fqn": "y"}}


def structure(container: str, context: object) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        spec = [1, {"type": container, "context": context, "children_spec": []}]
        data["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(spec)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (symbol, "has no value: export with static shapes"),
        (call("torch.os.mkdir"), "it calls 'torch.os.mkdir', which is not an operator"),
        (call("torch.ops.load_library"), "is not an operator that is loaded"),
        (call("math.os"), "is not an operator that is loaded"),
        (call("torch.ops.aten.__init__.__call__"), "an operator that there is not"),
        (call("torch.ops.aten.save.default"), "which opens files"),
        (call("torch.ops.aten.from_file.default"), "which opens files"),
        (call("torch.ops.mine.op.default"), "is not an operator that is loaded"),
        (custom, "it holds a custom object"),
        (
            structure("collections.defaultdict", json.dumps({"default_factory_module": "os"})),
            "hold a collections.defaultdict, which is not loaded",
        ),
        (
            structure(
                "builtins.dict", json.dumps([{"__enum__": True, "fqn": "os:x", "name": "y"}])
            ),
            "which is not loaded",
        ),
    ],
)
def test_a_graph_that_would_run_code_is_refused(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = edited(good, tmp_path / "bad.pt2", MODEL, edit)
    with pytest.raises(ArchiveError, match=r"^.*bad.pt2: ") as caught:
        read_program(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.pt2"]


class Resized(nn.Module):
    """Computes sizes from its input's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.layer(x).view(2 * x.shape[0], -1).sum(1).view(-1, x.shape[0])
        return wide.expand(3, -1, -1) + torch.arange(x.shape[0])


def test_symbolic_sizes_are_those_of_the_example(tmp_path: Path) -> None:
    module, x = Resized(), torch.randn(4, 8)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    program = torch.export.export(module, (x,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "dynamic.pt2")
    loaded = read_program(tmp_path / "dynamic.pt2")
    assert loaded.range_constraints == {}
    targets = {str(node.target) for node in loaded.graph.nodes if node.op == "call_function"}
    assert all(target.startswith("aten.") for target in targets - {"aten.sym_size.int"})
    assert "aten.sym_size.int" not in targets
    assert torch.equal(loaded.module(check_guards=False)(x), module(x))


def test_guards_of_an_archive_are_not_run(good: Path, tmp_path: Path) -> None:
    text = f"__import__('os').mkdir({str(tmp_path / 'touched')!r})"
    path = edited(good, tmp_path / "m.pt2", MODEL, lambda data: data.update(guards_code=[text]))
    read_program(path).module()(*factories.batch())
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", [MODEL, SAMPLES, WEIGHTS, "data/weights/weight_0"])
def test_a_file_that_lacks_a_part(good: Path, tmp_path: Path, name: str) -> None:
    path = rewritten(good, tmp_path / "m.pt2", {name: None})
    with pytest.raises(ArchiveError, match=r"m.pt2: ") as caught:
        read_program(path)
    assert name in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"junk", b"[", b'{"graph_module": 3}', b"[" * 100_000])
def test_a_damaged_graph(good: Path, tmp_path: Path, data: bytes) -> None:
    path = rewritten(good, tmp_path / "m.pt2", {MODEL: data})
    with pytest.raises(ArchiveError, match=r"m.pt2: cannot be read: ") as caught:
        read_program(path)
    assert "\n" not in str(caught.value)


def test_weights_outside_their_file(good: Path, tmp_path: Path) -> None:
    def wide(data: dict[str, Any]) -> None:
        data["config"]["up.bias"]["tensor_meta"]["sizes"] = [{"as_int": 10**6}]

    with pytest.raises(ArchiveError, match="out of bounds"):
        read_program(edited(good, tmp_path / "m.pt2", WEIGHTS, wide))


def test_no_archive_a_compressed_one_and_one_with_a_file_twice(good: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.pt2").write_bytes(b"junk")
    with pytest.raises(ArchiveError, match=r"junk.pt2: not an archive of torch.export.save"):
        read_program(tmp_path / "junk.pt2")
    packed = tmp_path / "packed.pt2"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("m/" + MODEL, b"0" * 1000)
    with pytest.raises(ArchiveError, match=r"model.json is compressed"):
        read_program(packed)
    twice = rewritten(good, tmp_path / "twice.pt2", {}, **{f"other/{MODEL}": b"{}"})
    with pytest.raises(ArchiveError, match=r"other/models/model.json is there twice"):
        read_program(twice)


def test_a_text_that_is_too_long(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("partitioner.backends.torch.files.archive.MAX_TEXT_BYTES", 100)
    with pytest.raises(ArchiveError, match=r"models/model.json has \d+ bytes, more than 100"):
        read_program(good)


def test_a_text_that_is_not_there(good: Path) -> None:
    with pytest.raises(ArchiveError, match=r"it has no extra/other.txt"):
        read_extra(good, "other.txt")

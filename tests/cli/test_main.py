"""The command line: exit codes, errors of one line, no output that was not asked for."""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from helpers.onnx_files import onnx_models
from helpers.pages.command_line import one_line
from partitioner import __version__, examples
from partitioner.backends.onnx import local
from partitioner.backends.onnx.sessions.segments import SessionConfig
from partitioner.cli.main import main
from partitioner.run.local import check_outputs, write_outputs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.onnx and its partition, cut over two ideal devices."""
    folder = tmp_path_factory.mktemp("cli")
    onnx.save(examples.build("mlp", layers=2, hidden=8, batch=4), folder / "m.onnx")
    options = ["--cluster", "2xideal", "--strategy", "intra", "-q"]
    assert main([str(folder / "m.onnx"), *options, "-o", str(folder / "m.partition")]) == 0
    return folder


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(home)
    return home


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-q"], "Missing argument 'MODEL'"),
        (["m.onnx", "--wide"], "No such option: --wide"),
        (["m.onnx", "--devices", "0"], "'0' is not a whole number of at least 1"),
        (["m.onnx", "--devices", "two"], "'two' is not a whole number"),
        (["m.onnx", "--devices", "\u00b2"], "--devices"),
        (["m.onnx", "--dev", "2"], "No such option: --dev; did you mean --devices, "),
        (["m.onnx", "--objective", "speed"], "'speed' is not one of"),
        (["m.onnx", "--strategy", "both"], "'both' is not one of"),
        (["m.onnx", "--mesh", "dp"], "'dp' is not like dp=2,tp=2"),
        (["m.onnx", "--devices"], "(see partition plan --help)"),
        (["m.onnx", "--mesh", "dp=2,dp=2"], "names an axis twice"),
        (["m.onnx", "--mesh", "d:p=2"], "axis names are letters"),
        (["m.onnx", "--dim", "batch"], "'batch' is not like batch=8"),
        (["m.onnx", "--dim", "batch=-1"], "'-1' is not a whole number of at least 0"),
        (["m.onnx", "--shape", "x=2,,3"], "'' is not a whole number"),
        (["m.onnx", "--time-limit", "0"], "'0' is not a number of seconds above 0"),
        (["m.onnx", "--time-limit", "nan"], "'nan' is not a number of seconds"),
        (["m.onnx", "--gap", "100%"], "'100%' is not a gap like 1% or 0.01"),
        (["m.onnx", "--memory", "much"], "size 'much' is not like '8GiB'"),
        (["m.onnx", "--memory", "0"], "size '0' is not like '8GiB'"),
        (
            ["verfiy", "d"],
            "unknown command 'verfiy' (there are plan, fit, sweep, profile,",
        ),
        (["shwo"], "did you mean 'show'?"),
        (
            ["inspect", "d"],
            "unknown command 'inspect' (there are plan, fit, sweep, profile,",
        ),
        (["run"], "partition run: Missing argument 'DIR'"),
        (["run", "d", "--requests", "0"], "'0' is not a whole number of at least 1"),
        (["verify", "d", "--seed", "-1"], "--seed"),
        (["show", "d", "e"], "partition show: Got unexpected extra argument(s) (e)"),
    ],
)
def test_wrong_usage_exits_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert message in one_line(err)
    assert "--help)" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "4xnone"], "cluster '4xnone': no device 'none'"),
        (["--cluster", "4xh10"], "or FILE.toml; did you mean 'h100'"),
        (["--cluster", "!"], "cluster '!' is not like '4xh100'"),
        (["--cluster", "9" * 5000 + "xh100"], "is not like '4xh100'"),
        (["--cluster", "99999xh100"], "has more than 16384 devices"),
        (["--cluster", "4xh100", "--devices", "2"], "has 4 devices, 2 were asked for"),
        (["--devices", "99999"], "99999 devices were asked for; at most 16384"),
        (["--devices", "4", "--mesh", "tp=3"], "mesh tp(3) = 3 != 4 devices"),
        (["--mesh", "tp=2", "--devices", "2", "--strategy", "inter"], "--mesh shapes intra plans"),
    ],
)
def test_options_that_mean_nothing_together_exit_2(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before the model is read: its file holds none."""
    (tmp_path / "m.onnx").write_bytes(b"junk")
    target = tmp_path / "x"
    assert main([str(tmp_path / "m.onnx"), *arguments, "-q", "-o", str(target)]) == 2
    assert message in one_line(capsys.readouterr().err)
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.onnx"], "none.onnx: no such file"),
        (["plan", "none.onnx"], "none.onnx: no such file"),
        (["w.safetensors"], "w.safetensors: a .safetensors file holds weights, no graph; give "),
        (["w.pth"], "w.pth: a .pth file holds weights, no graph; give package.module:factory"),
        (["w.py"], "w.py: a Python file is no model; write a function in it that returns"),
        (["m.onnx", "--cluster", "no.toml", "-o", "m.partition"], "cluster file no.toml: No such"),
        (["."], ". is not a file"),
        (["model"], "model: no such file"),
        (["m.partition"], "m.partition is a partition, not a model; look at it with: partition"),
        (["m.onnx", "--cluster", "no.toml"], "cluster file no.toml: No such file or directory"),
        (["m.onnx", "--constraints", "no.toml"], "constraints no.toml: No such file or directory"),
        (["m.onnx", "--dim", "nothing=3"], "nothing"),
        (["m.onnx", "--shape", "x=2,9"], "x"),
        (["m.onnx", "-o", "m.partition"], "m.partition is there already; pass --force"),
        (["m.onnx", "-o", "no/where"], "there is no folder no"),
        (["junk.onnx"], "junk.onnx"),
        (["run", "none"], "none"),
        (["n" * 5000], "File name too long"),
        (["m.onnx", "-o", "n" * 5000], "File name too long"),
        (["m.onnx", "--cluster", "n" * 5000 + ".toml"], "File name too long"),
        (["m.onnx", "--constraints", "n" * 5000], "File name too long"),
        (["run", "n" * 5000], "is not a folder that `partition MODEL` wrote"),
        (["run", "m.partition", "--inputs", "junk.onnx"], "inputs junk.onnx: not an .npz file"),
        (["run", "m.partition", "--inputs", "no.npz"], "inputs no.npz: No such file or directory"),
        (["verify", "none"], "none is not a folder that `partition MODEL` wrote"),
        (["show", "none"], "none is not a folder that `partition MODEL` wrote"),
    ],
)
def test_bad_input_exits_1(
    here: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "junk.onnx").write_bytes(b"junk")
    if arguments[0].startswith("w."):
        (here / arguments[0]).touch()
    quiet = [] if arguments[0] in ("run", "verify", "show") else ["-q"]
    target = ["-o", "x"] if quiet and "-o" not in arguments else []
    assert main([*arguments, *quiet, *target]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in one_line(err)
    assert err.startswith("partition: ")
    there = {path.name for path in here.iterdir() if not path.name.startswith("w.")}
    assert there == {"junk.onnx", "m.onnx", "m.partition"}


@pytest.mark.parametrize("name", ["one.npy", "object.npz", "cut.npz"])
def test_inputs_that_are_no_plain_npz(
    here: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    array = np.array([None], dtype=object) if name == "object.npz" else np.ones(3)
    with path.open("wb") as file:
        np.save(file, array) if name == "one.npy" else np.savez(file, x=array)
    if name == "cut.npz":
        path.write_bytes(path.read_bytes()[:50])
    assert main(["run", str(here / "m.partition"), "--inputs", str(path)]) == 1
    said = one_line(capsys.readouterr().err)
    wrong = "allow_pickle=False" if name == "object.npz" else "not an .npz file"
    assert said.startswith(f"partition: inputs {path}: ")
    assert wrong in said


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_folder_with_a_plan_only(
    here: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "p")
    assert main([str(here / "m.onnx"), "--plan-only", "-q", "-o", target]) == 0
    assert main([command, target]) == 1
    assert one_line(capsys.readouterr().err) == (
        f"partition: {target} holds a plan only; partition again without --plan-only, or prove "
        "the plan with verify --symbolic\n"
    )


@pytest.mark.slow
def test_a_run_without_its_model(home: Path, tmp_path: Path) -> None:
    """Inputs are drawn from the ranges in the folder, or given."""
    shutil.copytree(home / "m.partition", tmp_path / "p")
    assert main(["run", str(tmp_path / "p")]) == 0
    np.savez(tmp_path / "in.npz", x=np.ones((4, 8), np.float32))
    assert main(["run", str(tmp_path / "p"), "--inputs", str(tmp_path / "in.npz")]) == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (".", "outputs .: it is a folder; name an .npz file"),
        ("no/out.npz", "outputs no/out.npz: No such file or directory"),
        ("m.onnx/out.npz", "outputs m.onnx/out.npz: Not a directory"),
        ("n" * 300, ": File name too long"),
        ("/dev/null", "outputs /dev/null: it is not a regular file"),
        ("m.onnx", "outputs m.onnx: name a file that ends in .npz"),
        ("m.partition/rank_0.onnx", "rank_0.onnx: name a file that ends in .npz"),
        ("m.partition/o.npz", "o.npz: it is in m.partition, the saved plan; name another place"),
    ],
)
def test_outputs_that_cannot_be_written_are_found_before_the_run(
    here: Path,
    path: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "run_local", lambda *_: pytest.fail("it ran"))
    before = sorted(here.iterdir())
    assert main(["run", "m.partition", "--outputs", path]) == 1
    assert message in one_line(capsys.readouterr().err)
    assert sorted(here.iterdir()) == before


def test_outputs_do_not_replace_what_is_no_npz(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "kept.npz").write_text("notes")
    assert main(["run", "m.partition", "--outputs", "kept.npz"]) == 1
    message = "outputs kept.npz: not an .npz file, so it is not replaced"
    assert message in one_line(capsys.readouterr().err)
    assert (here / "kept.npz").read_text() == "notes"
    (here / "kept.npz").unlink()


def test_outputs_leave_the_files_beside_them(tmp_path: Path) -> None:
    """A draft has a name that no file has."""
    theirs = tmp_path / ".out.npz.part"
    theirs.write_text("notes")
    check_outputs(tmp_path / "out.npz", tmp_path / "m.partition")
    write_outputs(tmp_path / "out.npz", {"y": np.ones(3)})
    assert theirs.read_text() == "notes"
    assert sorted(tmp_path.iterdir()) == [theirs, tmp_path / "out.npz"]


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("x", (2**12, 2**12), "input 'x' has 67108992 bytes, not float32[4,8]"),
        ("x", (8, 4), "input 'x' has shape (8, 4), not (4, 8)"),
        ("q", (2**12, 2**12), "input 'q' is not one of the model's: 'x'"),
    ],
)
def test_inputs_are_refused_by_their_headers(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    dims: tuple[int, ...],
    message: str,
) -> None:
    """Of an array of 64 MiB, which takes 64 KiB in the file, no data is read."""
    size, path = 4 * math.prod(dims), tmp_path / "in.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open(f"{name}.npy", "w", force_zip64=True) as array,
    ):
        header = {"descr": "<f4", "fortran_order": False, "shape": dims}
        np.lib.format.write_array_header_1_0(array, header)
        chunk = bytes(min(size, 2**24))
        for _ in range(size // len(chunk)):
            array.write(chunk)
    assert main(["run", str(home / "m.partition"), "--inputs", str(path)]) == 1
    assert message in one_line(capsys.readouterr().err)


def test_infeasible_exits_3(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["m.onnx", "--devices", "2", "--memory", "100", "-o", "x", "-q"]) == 3
    assert "short on device" in one_line(capsys.readouterr().err)
    assert not (here / "x").exists()


def test_the_default_folder_and_the_summary(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(home / "m.onnx"), "--plan-only"]) == 0
    out, err = capsys.readouterr()
    assert [path.name for path in tmp_path.iterdir()] == ["m.partition"]
    assert not list((tmp_path / "m.partition").glob("rank*"))
    for word in ("latency", "throughput", "peak memory", "split", "written to  m.partition"):
        assert word in out
    assert all(line.startswith("partition: ") for line in err.splitlines())
    assert main([str(home / "m.onnx"), "--plan-only", "--force", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "out")
    assert main(["m.onnx", "--devices", "2", "--json", "-q", "-o", target]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    data = json.loads(out, parse_constant=pytest.fail)
    assert data.keys() >= {
        *("objective", "cost", "bound", "gap", "status", "devices_used", "sharded_flops_share"),
        *("latency_s", "throughput_per_s", "peak_bytes", "speedup", "gain", "one_device"),
    }
    assert data["directory"] == target
    assert len(data["peak_bytes"]) == 2
    assert here.is_dir()


def test_verify(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(here / "m.partition"), "--seed", "3"]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 ranks against the whole model, seed 3\n")


def test_sessions_are_opened_at_the_level_that_is_asked_for(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        SessionConfig, "__post_init__", lambda config: made.append(config.optimization)
    )
    assert main(["verify", str(here / "m.partition"), "--optimization", "basic"]) == 0
    assert "basic" in made
    assert "all" not in made
    assert capsys.readouterr().out.startswith("equal: 2 ranks against the whole model")
    given: dict[str, object] = {}
    monkeypatch.setattr(
        "partitioner.run.local.run_directory", lambda *_, **options: given.update(options) or ""
    )
    assert main(["run", str(here / "m.partition"), "--optimization", "basic"]) == 0
    assert given["optimization"] == "basic"


def test_show_says_what_is_cut_and_sent(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(here / "m.partition")]) == 0
    out = capsys.readouterr().out
    assert "mlp: 3 nodes on 2xideal, 2 devices" in out
    assert "group 0: x=2 on 0,1" in out
    assert "layer0.out (Gemm)" in out
    assert "/x" in out
    plan = (here / "m.partition" / "plan.json").read_text()
    for node in json.loads(plan)["nodes"].values():
        for factor, cut in node.get("cuts", {}).items():
            assert f"{factor}/{cut}" in out


def test_hostile_names_are_shown_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b[31m\n\r\u202e" + "b" * 200
    nodes = [
        helper.make_node("MatMul", ["x", "w"], [evil], name=evil),
        helper.make_node("Relu", [evil], ["y"], name="act"),
        helper.make_node("NonZero\x1b[2J", ["y"], ["z"], name=evil + "2", domain="evil"),
    ]
    proto = onnx_models.model(
        nodes[:2],
        {"x": ("float32", [4, 4])},
        {"y": ("float32", [4, 4])},
        {"w": np.ones((4, 4), np.float32)},
    )
    monkeypatch.chdir(tmp_path)
    onnx.save(proto, "evil.onnx")
    assert main(["evil.onnx", "--cluster", "2xideal", "--strategy", "intra"]) == 0
    assert main(["show", "evil.partition"]) == 0
    proto.graph.node.append(nodes[2])
    onnx.save(proto, "worse.onnx")
    assert main(["worse.onnx", "--devices", "2"]) == 1
    shown = "".join(capsys.readouterr())
    assert "a?[31m" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, text in (("--version", f"partition {__version__}"), ("--help", "verify")):
        assert main([argument]) == 0
        assert text in capsys.readouterr().out


def test_the_help_names_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "--version" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_an_interrupt_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partitioner.api.compiled.reload.look", interrupted)
    assert main(["show", "m.partition"]) == 130
    assert capsys.readouterr().err == "partition: interrupted\n"


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "partitioner", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"partition {__version__}\n"


def test_a_closed_pipe_is_quiet(home: Path) -> None:
    command = f"{sys.executable} -m partitioner show {home / 'm.partition'} | true"
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    bash = ["bash", "-c", command]
    done = subprocess.run(bash, capture_output=True, text=True, check=True, env=buffered)
    assert done.stderr == ""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["intra", "inter"])
def test_outputs_that_no_node_makes(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An input, an initializer, the result of Constant and a repeated output are all returned."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    shape = ("float32", (2, 3))
    proto = onnx_models.model(
        [
            helper.make_node("Relu", ["x"], ["y"]),
            helper.make_node("Constant", [], ["c"], value=onnx.numpy_helper.from_array(-w)),
        ],
        {"x": shape},
        dict.fromkeys(("x", "w", "c", "y"), shape),
        {"w": w},
    )
    proto.graph.output.append(proto.graph.output[-1])
    model, folder = tmp_path / "m.onnx", tmp_path / "out"
    onnx.save(proto, model)
    options = ["--cluster", "2xideal", "--strategy", strategy, "-q", "-o", str(folder)]
    assert main([str(model), *options]) == 0
    assert main(["verify", str(folder)]) == 0
    x = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    files = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    assert main(["run", str(folder), *files]) == 0
    relu = np.maximum(x, 0)
    expected = {"x": x, "w": w, "c": -w, "y": relu, "y_output": relu}
    with np.load(tmp_path / "out.npz") as outputs:
        assert sorted(outputs) == sorted(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(outputs[name], array)
    out = capsys.readouterr().out
    assert "equal: 2 ranks" in out
    assert "predicted for the planned cluster 2xideal (2 devices): latency" in out


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"\xb3\x00", "c.toml", "c.toml: no text; "),
        (b'{"version": 1}', "plan.json", "plan.json: plan is malformed: it has no 'groups'"),
        (b"[dimz]", "d.toml", "found ['dimz']; did you mean 'dims'?"),
    ],
)
def test_files_of_constraints_are_named_with_what_they_should_be(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes, name: str, message: str
) -> None:
    (here / name).write_bytes(content)
    assert main(["m.onnx", "--devices", "2", "--constraints", name, "--force", "-q"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_without_its_suffix_and_a_missing_rank_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    assert main(["./m", "--devices", "2", "-q"]) == 1
    assert capsys.readouterr().err == "partition: m: no such file; did you mean 'm.onnx'?\n"
    assert main(["m.onnx", "--devices", "2", "-q", "-o", "lost"]) == 0
    Path("lost/rank1.onnx").unlink()
    assert main(["run", "lost"]) == 1
    assert capsys.readouterr().err == "partition: lost/rank1.onnx: No such file or directory\n"

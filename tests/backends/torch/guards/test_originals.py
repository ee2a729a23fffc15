"""The module that was compiled, its optimizers and a second module beside the rank's module."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import partitioner
from partitioner.api.compiled.module import ModuleProgram
from partitioner.backends.errors import BackendError
from partitioner.backends.torch.running.rank_module import RankModule

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One process of its own, as torchrun starts it."""
    meet = f"file://{tmp_path_factory.mktemp('meet') / 'store'}"
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Game(nn.Module):
    """A loss of two networks, as of a generator and a discriminator."""

    def __init__(self, one: nn.Module, other: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.one, self.other, self.factor = one, other, factor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.other(self.one(x))
        return y.square().mean() * self.factor


def networks() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 1)


def planned(module: nn.Module) -> ModuleProgram:
    program = partitioner.compile(module, X, devices=1, training=True, cluster="ideal")
    assert isinstance(program, ModuleProgram)
    return program


def stepped(module: RankModule) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(X).backward()
    optimizer.step()


def test_two_modules_over_one_network_do_not_train_apart() -> None:
    one, other = networks()
    first, second = (planned(Game(one, other, factor)).module() for factor in (1.0, -1.0))
    first(X).backward()
    second(X)  # nothing is trained yet
    stepped(first)
    with pytest.raises(
        BackendError, match=r"one.weight was trained by another rank's module, made"
    ):
        second(X)
    second.load_state_dict(first.full_state_dict())
    torch.testing.assert_close(second(X), -first(X))
    stepped(second)
    with pytest.raises(BackendError, match=r"Compile one module whose loss is the sum of both"):
        first(X)


def test_parameters_that_one_module_trains_and_another_reads() -> None:
    """A generator and a discriminator, each frozen in the other's step."""
    one, other = networks()
    other.requires_grad_(False)
    first = planned(Game(one, other)).module()
    other.requires_grad_()
    one.requires_grad_(False)
    second = planned(Game(one, other, -1.0)).module()
    stepped(first)
    with pytest.raises(BackendError, match=r"one.weight was trained by another rank's module"):
        second(X)
    second.load_state_dict(first.full_state_dict(), strict=False)
    torch.testing.assert_close(second(X), -first(X))
    stepped(second)
    with pytest.raises(BackendError, match=r"other.weight was trained by another rank's module"):
        first(X)


def test_a_module_for_inference_beside_one_that_trains(tmp_path: Path) -> None:
    whole = Game(*networks())
    program = partitioner.compile(whole, X, devices=1, cluster="ideal")
    assert isinstance(program, ModuleProgram)
    inference, module = program.module(), planned(whole).module()
    torch.testing.assert_close(inference(X), module(X).detach())
    stepped(module)
    with pytest.raises(
        BackendError, match=r"one.weight was trained .* this one, for inference, has it as it was"
    ):
        inference(X)
    with pytest.raises(BackendError, match=r"the program would take one.weight as it was before"):
        program.run({"x": X.numpy()})
    with pytest.raises(BackendError, match=r"save\(\) would take one.weight as it was before"):
        program.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    whole.load_state_dict(module.full_state_dict())
    (result,) = program.run({"x": X.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(result), module.eval()(X))


def test_modules_of_one_program_and_of_other_networks_are_apart() -> None:
    program, other = planned(Game(*networks())), planned(Game(*networks())).module()
    stepped(program.module())
    stepped(other)
    stepped(program.module())


def test_an_optimizer_made_before_compile_is_noticed_at_its_first_step() -> None:
    whole = Game(*networks())
    optimizer = torch.optim.AdamW(whole.parameters())
    module = planned(whole).module()
    module(X).backward()
    with pytest.raises(
        BackendError,
        match=r"AdamW was made over one.weight of the module that was compiled, which gets no "
        r"gradient: make it over the parameters\(\) of the rank's module",
    ):
        optimizer.step()
    whole(X).backward()  # who trains the module itself has gradients there
    optimizer.step()


USES: dict[str, tuple[str, Callable[[ModuleProgram], Any]]] = {
    "program": ("the program", lambda program: program(X)),
    "gradients": ("the program", lambda program: program.gradients(X)),
    "call": ("a call of the Game", lambda program: program.whole(X)),
    "state": (r"state_dict\(\) of the Game", lambda program: program.whole.state_dict()),
    "module": (r"module\(\)", lambda program: planned(program.whole).module()),
}


@pytest.mark.parametrize("use", USES)
def test_weights_from_before_training_are_not_taken_for_trained_ones(use: str) -> None:
    program = planned(Game(*networks()))
    module, (what, take) = program.module(), USES[use]
    module(X).backward()
    take(program)  # nothing is trained yet
    stepped(module)
    with pytest.raises(
        BackendError, match=f"^{what}.* would take one.weight as it was before training, of which"
    ):
        take(program)
    module.eval()(torch.zeros(5, 4))  # is traced anew
    program.whole.load_state_dict(module.full_state_dict())
    take(program)
    torch.testing.assert_close(program(X), module(X).detach())


def test_copies_and_other_modules_are_called_as_ever() -> None:
    program = planned(Game(*networks()))
    stepped(program.module())
    copied = copy.deepcopy(program.whole)
    copied(X)
    del program


class Versioned(nn.Linear):
    """A layer with a version in its extra state."""

    version = 3

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": self.version, "scale": torch.ones(2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


class Root(Game):
    """A module with extra state itself."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        assert state == 7


@pytest.mark.parametrize("kind", [Game, Root])
def test_extra_state_is_saved_and_loaded(kind: type[Game], tmp_path: Path) -> None:
    whole = kind(Versioned(4, 4), nn.Linear(4, 1))
    module = planned(whole).module()
    for state in (module.state_dict(), module.full_state_dict()):
        assert state.keys() == whole.state_dict().keys()
        assert state["one._extra_state"]["version"] == 3
        torch.save(state, tmp_path / "state.pt")
        assert module.load_state_dict(torch.load(tmp_path / "state.pt")).missing_keys == []
    whole.load_state_dict(module.full_state_dict())
    state["one._extra_state"] = {"version": 4, "scale": torch.ones(2)}
    with pytest.raises(BackendError, match="the extra state of one is another than when the mod"):
        module.load_state_dict(state)
    if kind is Root:
        state = {**module.state_dict(), "_extra_state": 8}
        with pytest.raises(BackendError, match="the extra state of the module is another than"):
            module.load_state_dict(state)


def test_hooks_that_change_a_state_to_load_are_called() -> None:
    whole = Game(*networks())

    def rename(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    whole.one.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
    module = planned(whole).module()
    state = module.full_state_dict()
    state["one.kernel"] = torch.zeros_like(state.pop("one.weight"))
    module.load_state_dict(state)
    assert not module.get_parameter("one.weight").any()


def test_hooks_that_would_be_left_out_are_refused_by_name() -> None:
    def rename(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")

    def loaded(_: nn.Module, __: Any) -> None: ...

    whole = Game(*networks())
    whole.one.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]
    whole.other.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]
    module = planned(whole).module()
    with pytest.raises(
        BackendError, match=r"^state_dict\(\) of a rank's module leaves out .*rename of one: load"
    ):
        module.state_dict()
    state = module.full_state_dict()
    assert state.keys() == {"one.weight", "one.bias", "other.weight", "other.bias"}
    whole.load_state_dict(state)
    assert "one.kernel" in whole.state_dict()
    with pytest.raises(BackendError, match=r"leaves out the state-dict hook .*loaded of other: "):
        module.load_state_dict(state)


def test_methods_that_would_be_left_out_are_refused_by_name() -> None:
    class Light(nn.Linear):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return {}

        def _load_from_state_dict(self, *_: Any) -> None: ...

    module = planned(Game(Light(4, 4), nn.Linear(4, 1))).module()
    with pytest.raises(BackendError, match=r"leaves out .*Light.state_dict\(\) of one"):
        module.state_dict()
    with pytest.raises(BackendError, match=r"leaves out .*Light._load_from_state_dict\(\) of one"):
        module.load_state_dict({})

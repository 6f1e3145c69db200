import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from capture_models import small_gpt, small_gpt2, small_llama
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autoparallel.passes.initialization.deferred_init import materialize, plain_build, record_build
from autoparallel.passes.initialization.recording import record


class Inits(nn.Module):
    """Every way of initializing that needs care."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.randn(4, 4))
        self.scale.data.mul_(2)
        self.scale.data[0] = 5
        self.table = torch.arange(6.0).outer(torch.ones(3))
        self.rate = float(torch.linspace(0, 1, 5)[2])
        self.tied = self.linear.weight


def quickly_made() -> list[Tensor]:
    """Tensors by the ops that ``quick_fakes`` answers, and others."""
    base = torch.empty(4, 6, dtype=torch.float64).t()
    view = base[1:3].detach()
    whole = torch.empty(2, 3, 4, 4, memory_format=torch.channels_last)
    known = torch.tensor(3.0).detach()
    parameter = nn.Parameter(torch.ones(5), requires_grad=False)
    others = [torch.zeros(3, dtype=torch.int32), torch.zeros(2, device="meta"), torch.ones(())]
    return [base, view, whole, whole.detach(), known, parameter, parameter.data, *others]


def form(tensor: Tensor) -> tuple[object, ...]:
    return (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
        getattr(tensor, "constant", None) is not None,
    )


def shared(tensors: list[Tensor]) -> list[list[bool]]:
    storages = [each.untyped_storage()._cdata for each in tensors]
    return [[one == other for other in storages] for one in storages]


def test_recorded_tensors_are_those_of_the_fake_mode():
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = quickly_made()
    found, log = record(quickly_made)
    assert [form(each) for each in found] == [form(each) for each in expected]
    assert shared(found) == shared(expected)
    assert {"aten::empty", "aten::detach", "aten::zeros", "aten::ones"} <= {
        c.name for c in log.calls
    }


BUILDS = {
    "gpt": small_gpt,
    "gpt-tied": lambda: small_gpt(tied=True),
    "llama": small_llama,
    "gpt2": small_gpt2,
    "inits": Inits,
}


def named(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


@pytest.mark.parametrize("name", BUILDS)
def test_materialized_tensors_equal_a_plain_build_bit_for_bit(name):
    deferred = record_build(BUILDS[name], seed=5)
    assert deferred.is_recorded, deferred.reason
    assert {tensor.device.type for tensor in named(deferred.model).values()} == {"meta"}
    expected = named(plain_build(BUILDS[name], seed=5))
    assert set(expected) == set(named(deferred.model))
    made: dict[str, Tensor] = {}
    materialize(deferred, expected, made.__setitem__)
    assert set(made) == set(expected)
    for key, value in expected.items():
        assert torch.equal(made[key], value), key


def test_any_subset_has_the_same_values_as_the_whole():
    deferred = record_build(small_llama, seed=5)
    expected = named(plain_build(small_llama, seed=5))
    for key in list(expected)[::4]:
        made: dict[str, Tensor] = {}
        materialize(deferred, [key], made.__setitem__)
        assert list(made) == [key]
        assert torch.equal(made[key], expected[key])


def test_ties_survive_on_meta():
    model = record_build(lambda: small_gpt(tied=True)).model
    assert model.head.weight is model.tokens.weight
    assert isinstance(model.head.weight, nn.Parameter)


def test_a_dtype_is_applied_to_floating_tensors_only():
    made: dict[str, Tensor] = {}
    materialize(
        record_build(Inits),
        ["linear.weight", "norm.num_batches_tracked"],
        made.__setitem__,
        dtype=torch.float64,
    )
    assert made["linear.weight"].dtype == torch.float64
    assert made["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("build", [small_gpt, small_llama])
def test_only_one_parameter_is_alive_at_a_time(build):
    """A caller that keeps nothing sees each storage freed before two more are handed over."""
    deferred = record_build(build)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def look(name: str, tensor: Tensor) -> None:
        nonlocal most
        most = max(most, 1 + sum(reference() is not None for reference in alive))
        alive.append(weakref.ref(tensor))

    gc.collect()
    materialize(deferred, [name for name, _ in deferred.model.named_parameters()], look)
    assert len(alive) > 20
    assert most <= 2


def test_the_generator_is_left_as_it_was():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    deferred = record_build(small_gpt, seed=9)
    materialize(deferred, ["head.weight"], lambda name, tensor: None)
    assert torch.equal(torch.get_rng_state(), before)


class Lottery(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4 if float(torch.rand(())) < 2 else 8)


def test_a_build_that_reads_random_numbers_falls_back_to_a_plain_build_and_says_so():
    deferred = record_build(Lottery, seed=2)
    assert not deferred.is_recorded
    assert "random" in deferred.reason
    assert {tensor.device.type for tensor in named(deferred.model).values()} == {"meta"}
    made: dict[str, Tensor] = {}
    materialize(deferred, ["linear.weight"], made.__setitem__)
    assert torch.equal(made["linear.weight"], plain_build(Lottery, 2).linear.weight)


def test_an_error_of_the_build_itself_reaches_the_caller():
    def broken() -> nn.Module:
        raise KeyError("no such setting")

    with pytest.raises(KeyError, match="no such setting"):
        record_build(broken)


class Loaded(nn.Module):
    """What a state dict is loaded into; ``second`` and ``late`` get other values after that."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def numpy_values(path: Path) -> dict[str, Tensor]:
    return {key: torch.from_numpy(value) for key, value in np.load(path / "w.npz").items()}


def safetensors_values(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "w.safetensors")


LOADS = {
    "a file": lambda path: torch.load(path / "w.pt"),
    "a mapped file": lambda path: torch.load(path / "w.pt", mmap=True),
    "an old file": lambda path: torch.load(path / "old.pt"),
    "a whole module": lambda path: torch.load(path / "m.pt", weights_only=False).state_dict(),
    "cast": lambda path: {k: v.half() for k, v in torch.load(path / "w.pt").items()},
    "numpy": numpy_values,
    "safetensors": safetensors_values,
}


def write_files(path: Path) -> None:
    from safetensors.torch import save_file

    model = Loaded()
    torch.save(model, path / "m.pt")
    torch.save(model.state_dict(), path / "w.pt")
    torch.save(model.state_dict(), path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(model.state_dict(), path / "w.safetensors")
    np.savez(path / "w.npz", **{key: value.numpy() for key, value in model.state_dict().items()})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", LOADS)
def test_values_from_files_are_those_of_a_plain_build_and_read_once(kind, assign, tmp_path):
    write_files(tmp_path)
    builds = 0

    def build() -> nn.Module:
        nonlocal builds
        builds += 1
        model = Loaded()
        state = LOADS[kind](tmp_path)
        state["first.weight"].mul_(2)
        del state["second.weight"]
        model.load_state_dict(state, assign=assign, strict=False)
        nn.init.normal_(model.second.bias)
        return model

    expected = named(plain_build(build, 5))
    builds = 0
    for init in ("exact", "sharded"):
        deferred = record_build(build, 5, init)
        assert deferred.is_recorded, deferred.reason
        for _ in range(2):
            made: dict[str, Tensor] = {}
            materialize(deferred, expected, made.__setitem__)
            for key, value in expected.items():
                if init == "exact" or not key.startswith("second"):
                    assert torch.equal(made[key], value), key
                    assert made[key].dtype == value.dtype
    assert builds == 2


def test_a_build_that_writes_a_file_is_built_really_and_once(tmp_path):
    builds = []

    def build() -> nn.Module:
        model = Loaded()
        builds.append(model)
        torch.save(model.state_dict(), tmp_path / "w.pt")
        return model

    deferred = record_build(build, 5)
    saved = torch.load(tmp_path / "w.pt")
    for _ in range(2):
        materialize(deferred, saved, lambda name, value: torch.equal(value, saved[name]) or 1 / 0)
    assert len(builds) == 2  # The first ended where it was to write.


def test_draws_on_meta_take_no_number_of_the_generator():
    def build() -> nn.Module:
        with torch.device("meta"):
            nn.Linear(5, 5)
        return nn.Linear(4, 4)

    made: dict[str, Tensor] = {}
    materialize(record_build(build, 3), ["weight"], made.__setitem__)
    assert torch.equal(made["weight"], plain_build(build, 3).weight)

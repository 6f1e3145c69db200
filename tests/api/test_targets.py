"""Targets: what a model file must hold, and what is said when it does not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch

from autoparallel.planner.errors import UsageError
from autoparallel.target.check import check_target
from autoparallel.target.load import load_target


def change(path: Path, old: str, new: str) -> str:
    """The model file with one text replaced; its path."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return str(path)


def refusal(target: str, *, batch: int = 4, **settings: object) -> UsageError:
    """The error that loading, building and batching the target ends in."""
    with pytest.raises(UsageError) as caught:
        check_target(load_target(target, settings), batch, None)
    return caught.value


def test_a_model_file_gives_its_model_batch_and_loss(model_file: Path) -> None:
    target = load_target(str(model_file), {"width": 8, "depth": 3})
    model = target.build_model()
    batch = target.example_batch(4, None)
    assert sum(p.numel() for p in model.parameters()) == 3 * (8 * 8 + 8)
    assert target.loss_fn is not None
    assert target.loss_fn(model(batch["x"]), batch).shape == ()
    assert target.build_optimizer is None
    assert target.settings == {"width": 8, "depth": 3}


def test_a_function_of_a_file_takes_the_place_of_build_model(model_file: Path) -> None:
    model = load_target(f"{model_file}:wide").build_model()
    assert sum(p.numel() for p in model.parameters()) == 64 * 64 + 64


def test_a_model_in_evaluation_mode_is_trained_with_its_dropout(tmp_path: Path) -> None:
    """``from_pretrained`` returns models in evaluation mode, alone or inside of another one."""
    file = tmp_path / "model.py"
    file.write_text(
        "from torch import nn\n"
        "def build_model():\n"
        "    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)).eval())\n"
        "def example_batch(global_batch): ...\n"
    )
    assert all(module.training for module in load_target(str(file)).build_model().modules())


def test_a_function_of_an_importable_module_is_a_target(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_file.rename(model_file.with_name("importable_net.py"))
    monkeypatch.chdir(model_file.parent)
    monkeypatch.syspath_prepend(str(model_file.parent))
    assert load_target("importable_net:wide").build_model() is not None


def test_a_missing_file_names_the_closest_one(model_file: Path) -> None:
    error = refusal(str(model_file.with_name("modle.py")))
    assert error.code == "AP101"
    assert "did you mean model.py?" in error.fix


def test_a_missing_module_is_a_usage_error() -> None:
    assert refusal("no_such_package.models:build").code == "AP101"


def test_a_word_that_names_nothing_is_a_usage_error() -> None:
    assert refusal("nothing/here:but words").code == "AP102"


def test_an_import_error_names_the_users_line(model_file: Path) -> None:
    error = refusal(change(model_file, "import torch\n", "import torch\nimport no_such_package\n"))
    assert error.code == "AP103"
    assert f"{model_file}:3" in error.where
    assert "no_such_package" in error.why


def test_a_syntax_error_names_the_users_line(model_file: Path) -> None:
    error = refusal(change(model_file, "class Net(nn.Module):", "class Net(nn.Module"))
    assert error.code == "AP103"
    assert str(model_file) in error.where


def test_a_file_without_build_model_says_so(model_file: Path) -> None:
    error = refusal(change(model_file, "def build_model", "def build_modle"))
    assert error.code == "AP104"
    assert error.fix == "did you mean build_modle?"


def test_a_function_that_is_not_there_names_the_closest(model_file: Path) -> None:
    error = refusal(f"{model_file}:wid")
    assert error.code == "AP104"
    assert error.fix == "did you mean wide?"


def test_an_unknown_setting_names_the_closest(model_file: Path) -> None:
    error = refusal(str(model_file), widht=3)
    assert error.code == "AP105"
    assert error.fix == "did you mean width?"


def test_a_setting_without_default_must_be_given(model_file: Path) -> None:
    error = refusal(change(model_file, "build_model(width=8", "build_model(width"))
    assert error.code == "AP104" or "width" in error.what
    assert error.fix == "--set width=VALUE"


def test_an_error_while_building_names_the_users_line(model_file: Path) -> None:
    error = refusal(change(model_file, "    return Net(width, depth)", "    return 1 // 0"))
    assert error.code == "AP106"
    assert "return 1 // 0" in error.where


def test_build_model_must_return_a_module(model_file: Path) -> None:
    error = refusal(change(model_file, "    return Net(width, depth)", "    return 'a model'"))
    assert error.code == "AP106"
    assert "returns a str" in error.what


def test_a_file_without_example_batch_says_so(model_file: Path) -> None:
    error = refusal(change(model_file, "def example_batch", "def exampel_batch"))
    assert error.code == "AP107"
    assert error.fix == "did you mean exampel_batch?"


def test_a_length_is_refused_where_the_batch_takes_none(model_file: Path) -> None:
    path = change(
        model_file, "example_batch(global_batch, seq=None)", "example_batch(global_batch)"
    )
    with pytest.raises(UsageError, match="AP107"):
        load_target(path).example_batch(4, 128)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("torch.zeros(global_batch, 8)", "returns a Tensor"),
        ("{}", "returns a dict"),
        ('{"x": [1.0, 2.0]}', "the example batch holds no tensor"),
        ('{"x": torch.zeros(3, 8)}', "no tensor of the example batch has 4 rows"),
        ("(torch.tensor(1.0),)", "no tensor of the example batch has 4 rows"),
    ],
)
def test_a_batch_of_the_wrong_kind_or_size_is_refused(
    model_file: Path, result: str, said: str
) -> None:
    good = '{"x": torch.zeros(global_batch, 8), "y": torch.zeros(global_batch, 8)}'
    error = refusal(change(model_file, good, result))
    assert error.code == "AP108"
    assert said in error.what


def test_a_tuple_of_meta_tensors_is_a_batch(model_file: Path) -> None:
    good = '{"x": torch.zeros(global_batch, 8), "y": torch.zeros(global_batch, 8)}'
    path = change(model_file, good, "(torch.empty(global_batch, 8, device='meta'),)")
    (tensor,) = load_target(path).example_batch(4, None)
    assert tensor.is_meta


def test_check_tells_parameters_bytes_batch_and_loss(model_file: Path) -> None:
    text = str(check_target(load_target(str(model_file), {"width": 1000, "depth": 4}), 4, None))
    assert "Net, 4.00 M parameters in 8 tensors, 0 B allocated" in text
    assert "x (4, 8) float32" in text
    assert "loss_fn(outputs, batch)" in text
    assert "absent: AdamW" in text


def test_a_hugging_face_folder_gives_a_model_with_its_own_loss(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    target = load_target(f"hf:{tmp_path}", {"num_hidden_layers": 3})
    with torch.device("meta"):
        model = target.build_model()
    batch = target.example_batch(4, 16)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert len(model.model.layers) == 3
    assert {name: tuple(part.shape) for name, part in batch.items()} == {
        "input_ids": (4, 16),
        "labels": (4, 16),
    }
    assert int(batch["input_ids"].max()) < LLAMA["vocab_size"]
    assert target.build_model()(**batch).loss.shape == ()


def test_a_folder_without_architectures_falls_back_to_the_causal_language_model(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    config = {name: value for name, value in LLAMA.items() if name != "architectures"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(load_target(f"hf:{tmp_path}").build_model()).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["does/not_exist", "none", "./none", "/none/at/all"])
def test_a_missing_model_is_told_without_a_look_at_a_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    calls: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: calls.append(args))
    monkeypatch.setattr(socket.socket, "connect", lambda own, address: calls.append(address))
    error = refusal(f"hf:{name}")
    assert (error.code, error.where) == ("AP101", f"hf:{name}")
    assert error.why.startswith("it is no folder, and no name in ")
    assert not calls


def test_a_name_in_the_local_cache_is_taken_without_a_look_at_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    from huggingface_hub import constants

    kept = tmp_path / "models--of--llama"
    (kept / "refs").mkdir(parents=True)
    (kept / "snapshots/1234").mkdir(parents=True)
    (kept / "refs/main").write_text("1234")
    (kept / "snapshots/1234/config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", None)
    assert type(load_target("hf:of/llama").build_model()).__name__ == "LlamaForCausalLM"


def test_images_are_made_up_for_an_image_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "image_size": 16,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "num_labels": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(f"hf:{tmp_path}")
    batch = target.example_batch(4, None)
    assert batch["pixel_values"].shape == (4, 3, 16, 16)
    assert batch["labels"].shape == (4,)
    assert target.build_model()(**batch).loss.shape == ()


def test_a_model_without_labels_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaModel"]}))
    assert refusal(f"hf:{tmp_path}").code == "AP109"


def test_an_unknown_field_of_a_configuration_names_the_closest(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    error = refusal(f"hf:{tmp_path}", num_hiden_layers=2)
    assert (error.code, error.fix) == ("AP105", "did you mean num_hidden_layers?")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert refusal(f"hf:{tmp_path}").code == "AP101"


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}

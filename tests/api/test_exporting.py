"""What is exported is what the checkpoint holds, in the dtype and the files asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from finetuned_models import save_gpt2, save_llama
from safetensors.torch import load_file
from torch import Tensor

import autoparallel
from autoparallel.planner.errors import UsageError
from autoparallel.target.lora import add_lora, parse_lora


def checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A training's checkpoint with these weights, as a folder of steps."""
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    state["step"] = torch.tensor(3)
    dcp.save(state, checkpoint_id=folder / "step-00000003", no_dist=True)
    (folder / "step-00000003" / "checkpoint.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama", tie=True)


def model_of(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_tied_weights_are_written_once_where_the_model_is_known(
    llama: Path, tmp_path: Path
) -> None:
    state = model_of(llama).state_dict()
    assert "lm_head.weight" in state
    saved = checkpoint(tmp_path / "run", state)
    autoparallel.export(saved, tmp_path / "out", to="hf", model=str(llama))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(state) - {"lm_head.weight"}
    exported = model_of(tmp_path / "out").state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in state.items())


def test_tensors_are_cast_and_the_configuration_says_so(llama: Path, tmp_path: Path) -> None:
    state = model_of(llama).state_dict()
    saved = checkpoint(tmp_path / "run", state)
    done = autoparallel.export(
        saved, tmp_path / "out", to="hf", model=str(llama), dtype="bf16", max_shard_size="20kB"
    )
    assert len(done.files) > 2
    assert all(file.stat().st_size < 22_000 for file in done.files)
    exported = model_of(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, state[name].bfloat16()), name


def test_pt_and_safetensors_need_no_model(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4), "n": torch.tensor(2)}
    saved = checkpoint(tmp_path / "run", tensors)
    autoparallel.export(saved, tmp_path / "pt", to="pt")
    autoparallel.export(saved / "step-00000003", tmp_path / "st")
    found = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    for read in (found, load_file(tmp_path / "st" / "model.safetensors")):
        assert set(read) == set(tensors)
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_folder_with_files_is_replaced_only_by_force(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", {"w": torch.zeros(1)})
    (tmp_path / "out").mkdir()
    autoparallel.export(saved, tmp_path / "out")
    (tmp_path / "out" / "own.txt").write_text("mine")
    with pytest.raises(UsageError, match="AP869"):
        autoparallel.export(saved, tmp_path / "out")
    assert (tmp_path / "out" / "own.txt").exists()
    autoparallel.export(saved, tmp_path / "out", force=True)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out", "run"]


def test_an_export_that_fails_leaves_the_folder_as_it_was(llama: Path, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", {"w": torch.zeros(1)})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "own.txt").write_text("mine")
    with pytest.raises(UsageError, match="AP872"):
        autoparallel.export(saved, tmp_path / "out", to="hf", model=str(llama), force=True)
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["own.txt"]


def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path) -> None:
    saved = checkpoint(tmp_path / "run", {"w": torch.zeros(1)})
    for wrong in ({"to": "safetensor"}, {"dtype": "bf61"}):
        with pytest.raises(UsageError, match="AP870"):
            autoparallel.export(saved, tmp_path / "out", **wrong)
    with pytest.raises(UsageError, match=r"AP871.*needs the Hugging Face model"):
        autoparallel.export(saved, tmp_path / "out", to="hf")
    with pytest.raises(UsageError, match="AP860"):
        autoparallel.export(tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def adapted(folder: Path, lora: str) -> transformers.PreTrainedModel:
    """A model with adapters that do something."""
    torch.manual_seed(3)
    model = add_lora(model_of(folder), parse_lora(lora))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def test_adapters_are_merged_or_written_in_the_format_of_peft(llama: Path, tmp_path: Path) -> None:
    lora = "r=2,alpha=6"
    model = adapted(llama, lora)
    saved = checkpoint(tmp_path / "run", model.state_dict())
    with pytest.raises(UsageError, match=r"AP871.*adapters whose settings are unknown"):
        autoparallel.export(saved, tmp_path / "out", to="hf", model=str(llama))
    autoparallel.export(saved, tmp_path / "out", to="hf", model=str(llama), lora=lora)
    tokens = torch.arange(8)[None]
    expected = model(tokens).logits
    assert torch.allclose(model_of(tmp_path / "out")(tokens).logits, expected, atol=1e-5)
    autoparallel.export(saved, tmp_path / "peft", to="peft", model=str(llama), lora=lora)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 6.0)
    written = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    own = {f"base_model.model.{k}": v for k, v in model.state_dict().items() if "lora" in k}
    assert set(written) == set(own)
    assert all(torch.equal(written[name], own[name]) for name in own)


@pytest.mark.parametrize("save", [save_llama, save_gpt2], ids=["llama", "gpt2"])
def test_peft_computes_what_the_adapted_model_does(tmp_path: Path, save: object) -> None:
    peft = pytest.importorskip("peft")
    folder, lora = save(tmp_path / "model"), "r=2,alpha=6"  # type: ignore[operator]
    model = adapted(folder, lora)
    saved = checkpoint(tmp_path / "run", model.state_dict())
    autoparallel.export(saved, tmp_path / "peft", to="peft", model=str(folder), lora=lora)
    loaded = peft.PeftModel.from_pretrained(model_of(folder), tmp_path / "peft").eval()
    tokens = torch.arange(8)[None]
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)

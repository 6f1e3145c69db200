"""Small models that tests capture."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autoparallel.passes.initialization.deferred_init import record_build
from autoparallel.passes.programs.constants import evaluate
from autoparallel.passes.programs.interpret import run
from autoparallel.passes.programs.program import Program
from autoparallel.planning.capture import capture_rows
from autoparallel.target.from_python import make_target

ROOT = Path(__file__).parents[2]


def example(name: str = "gpt") -> ModuleType:
    """The model file ``examples/<name>.py`` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program_of(build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> Program:
    """Capture a model for a batch, in float64, as planning does."""
    target = make_target(build, batch, None)
    model = record_build(target.build_model, seed=0).model
    return capture_rows(target, model, global_batch=len(batch[0]), seq=None, precision="fp64")


def check_program(build: Callable[[], nn.Module], batch: tuple[Tensor, ...]) -> None:
    """Assert that a model's program has its loss and gradients, in float64."""
    torch.manual_seed(0)
    model = build().double()
    given = [each.double() if each.is_floating_point() else each for each in batch]
    found = program_of(build, batch)
    found = found.with_batch_size(len(batch[0])) if found.graph.batch_dims else found
    constants = evaluate(found, [node.name for node in found.graph if node.kind == "constant"])
    inputs = {name: place.read(given) for name, place in found.inputs.items()}
    loss = run(found.graph, {**dict(model.named_parameters()), **constants, **inputs})
    expected = model(*given)
    assert torch.allclose(loss, expected, rtol=1e-12)
    own, plain = _gradients(loss, model), _gradients(expected, model)
    for name, value in plain.items():
        assert torch.allclose(own[name], value, rtol=1e-9, atol=1e-14), name


def _gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, values = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, values, allow_unused=True)
    pairs = zip(names, values, found, strict=True)
    return {name: torch.zeros_like(v) if g is None else g for name, v, g in pairs}


GPT_SETTINGS = {"n_layer": 3, "d_model": 32, "n_head": 4, "seq": 16, "vocab": 64}


def small_gpt(**settings: Any) -> nn.Module:
    model: nn.Module = example().build_model(**{**GPT_SETTINGS, **settings})
    return model


def small_llama(**settings: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **settings}))


def small_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            vocab_size=96,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tokens(*shape: int, vocab: int = 64, seed: int = 0) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def gpt_batch(rows: int = 2, seq: int = 16) -> dict[str, Tensor]:
    return {"tokens": tokens(rows, seq), "targets": tokens(rows, seq, seed=1)}


def hf_batch(rows: int = 2, seq: int = 12) -> dict[str, Tensor]:
    return {"input_ids": tokens(rows, seq), "labels": tokens(rows, seq, seed=1)}

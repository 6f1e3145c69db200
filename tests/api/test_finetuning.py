"""Fine-tuning on two processes is what one process does with transformers alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers
from commands import run_python, run_torchrun
from finetuned_models import save_gpt2, save_llama, save_tokenizer, words
from forced_plans import settled
from marks import slow
from torch import Tensor, nn

from autoparallel.planner.errors import UsageError
from autoparallel.runtime.update.optimizer import default_optimizer
from autoparallel.target.lora import add_lora, parse_lora
from autoparallel.training.start import check_weights as refuse_weights
from autoparallel.training.text_data import PackedText, open_tokens

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, ROWS, SEQ = 4, 8, 16
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of models, a text, and a cache of its own."""
    folder = tmp_path_factory.mktemp("finetuning")
    save_llama(folder / "llama", vocabulary=300)
    save_tokenizer(folder / "llama", words())
    save_gpt2(folder / "gpt2")
    (folder / "text.txt").write_text(words())
    return folder


@pytest.fixture(autouse=True)
def _own_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPARALLEL_CACHE", str(place / "cache"))


def command(*arguments: str) -> str:
    """What a command line of two processes says."""
    done = run_python("-m", "autoparallel", *arguments, folder=ROOT, timeout_seconds=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(place: Path, model: str, parallel: str, *more: str) -> list[float]:
    """The losses of a fine-tune from the model's own folder."""
    said = command(
        "run",
        f"hf:{place / model}",
        "--weights",
        str(place / model),
        "--seq",
        str(SEQ),
        "--data",
        str(place / "text.txt"),
        "--steps",
        str(STEPS),
        "--global-batch",
        str(ROWS),
        "--cluster",
        "cpu:2",
        "--parallel",
        settled(parallel),
        "--optimizer",
        "sgd",
        "--init",
        "exact",
        *more,
    )
    return [float(text) for text in re.findall(r"^step +\d+  loss ([\d.]+)", said, re.M)]


def plain(place: Path, model: str, lora: str | None = None) -> tuple[list[float], nn.Module]:
    """The losses of the same by transformers, and the trained model."""
    trained = transformers.AutoModelForCausalLM.from_pretrained(place / model)
    if lora is not None:
        torch.manual_seed(0)
        fresh = type(trained)(trained.config)
        fresh = add_lora(fresh, parse_lora(lora))
        adapters = {k: v for k, v in fresh.state_dict().items() if "lora" in k}
        add_lora(trained, parse_lora(lora)).load_state_dict(adapters, strict=False)
    tokens = open_tokens(str(place / "text.txt"), str(place / model), vocabulary=300)
    batches = PackedText(tokens, SEQ, 0).batches(0, 1, ROWS)
    optimizer = default_optimizer([p for p in trained.parameters() if p.requires_grad], "sgd")
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = trained(**next(batches)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, trained


def check_losses(found: list[float], expected: list[float]) -> None:
    """Losses are printed with four digits."""
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, abs=6e-5)


def check_weights(found: nn.Module, expected: dict[str, Tensor], start: nn.Module) -> None:
    """Equal within the tolerance, and changed by far more than that."""
    moved = 0.0
    begun = start.state_dict()
    for name, tensor in found.state_dict().items():
        assert float((tensor - expected[name]).abs().max()) < TOLERANCE, name
        moved = max(moved, float((tensor - begun[name]).abs().max()))
    assert moved > 20 * TOLERANCE


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        pytest.param("llama", "tp=2", marks=pytest.mark.slow),
        pytest.param("llama", "dp=2,zero=3", marks=pytest.mark.slow),
        pytest.param("gpt2", "pp=2,microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_a_fine_tune_on_two_processes_equals_transformers_on_one(
    place: Path, tmp_path: Path, model: str, parallel: str
) -> None:
    found = run(place, model, parallel, "--save", str(tmp_path / "run"))
    expected, trained = plain(place, model)
    check_losses(found, expected)
    command("export", str(tmp_path / "run"), "--to", "hf", "-o", str(tmp_path / "out"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported = load(tmp_path / "out")
    check_weights(exported, trained.state_dict(), load(place / model))
    tokens = torch.arange(SEQ)[None]
    difference = exported(tokens).logits - trained(tokens).logits
    assert float(difference.abs().max()) < 10 * TOLERANCE


def test_the_exported_folder_has_the_tokenizer(place: Path, tmp_path: Path) -> None:
    command(
        "export",
        str(place / "llama"),
        "--to",
        "hf",
        "--model",
        str(place / "llama"),
        "-o",
        str(tmp_path / "out"),
    )
    own, exported = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (place / "llama", tmp_path / "out")
    )
    assert own.encode(words(3)) == exported.encode(words(3))


@pytest.mark.parametrize(
    ("model", "parallel"),
    [slow("llama", "tp=2"), slow("gpt2", "dp=2,zero=2")],
)
def test_a_lora_fine_tune_equals_one_process_and_exports_merged(
    place: Path, tmp_path: Path, model: str, parallel: str
) -> None:
    lora = "r=4,alpha=32"
    found = run(place, model, parallel, "--lora", lora, "--save", str(tmp_path / "run"))
    expected, trained = plain(place, model, lora)
    check_losses(found, expected)
    command("export", str(tmp_path / "run"), "--to", "hf", "-o", str(tmp_path / "out"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    exported, begun = load(tmp_path / "out"), load(place / model)
    tokens = torch.arange(SEQ)[None]
    assert float((exported(tokens).logits - trained(tokens).logits).abs().max()) < TOLERANCE
    assert float((exported(tokens).logits - begun(tokens).logits).abs().max()) > 20 * TOLERANCE
    assert set(exported.state_dict()) == set(begun.state_dict())


def test_weights_that_are_not_there_are_refused_before_planning(place: Path) -> None:
    done = run_python(
        "-m", "autoparallel", "run", f"hf:{place / 'llama'}", "--weights", "none", folder=ROOT
    )
    assert done.returncode == 2
    assert "error[AP860]" in done.stderr


def test_a_run_starts_from_weights_or_goes_on_but_not_both(place: Path) -> None:
    refuse_weights(str(place / "llama"), resume=None)
    with pytest.raises(UsageError, match="AP863"):
        refuse_weights(str(place / "llama"), resume="run")


SCRIPT = """
import sys
import torch, autoparallel
from torch import nn

def batch():
    g = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 8, generator=g), "y": torch.randn(8, 1, generator=g)}

@autoparallel.parallelize(example_batch=batch(), parallel="tp=2", weights=WEIGHTS)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.head(self.layers(x)) - y).square().mean()

step = autoparallel.Step(Net())
for _ in range(3):
    sys.stdout.write(f"loss {float(step(batch())):.5f}\\n")
"""


def test_a_parallelized_class_starts_from_weights_alone_and_under_torchrun(
    tmp_path: Path,
) -> None:
    torch.manual_seed(5)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    tensors = {f"module.layers.{name}": t for name, t in layers.state_dict().items()}
    tensors |= {f"module.head.{name}": t for name, t in nn.Linear(8, 1).state_dict().items()}
    torch.save(tensors, tmp_path / "weights.pt")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("WEIGHTS", repr(str(tmp_path / "weights.pt"))))
    losses = []
    for done in (run_python(str(script)), run_torchrun(script)):
        assert done.returncode == 0, done.stderr
        losses.append(sorted(re.findall(r"loss ([\d.]+)", done.stdout)))
    assert len(set(losses[0])) == 3
    assert losses[1] == sorted(losses[0] * 2)

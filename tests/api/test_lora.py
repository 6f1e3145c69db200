"""Adapters beside frozen weights: their names, their start, their sum."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from autoparallel.planner.errors import UsageError
from autoparallel.target.lora import add_lora, merge_lora, parse_lora


class Net(nn.Module):
    """Two layers of different kinds that have the usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(6, 4)
        self.v_proj = Conv1D(5, 4)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.v_proj(self.q_proj(x)))


def test_an_adapted_model_starts_as_the_model_and_trains_its_adapters_alone() -> None:
    model, x = Net(), torch.randn(3, 6)
    names, before = set(model.state_dict()), model(x)
    add_lora(model, parse_lora("r=2"))
    assert torch.equal(model(x), before)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == set(model.state_dict()) - names
    assert trained == {f"{layer}.lora_{m}.weight" for layer in ("q_proj", "v_proj") for m in "AB"}


def test_a_merged_weight_does_what_the_adapted_layer_does() -> None:
    lora = parse_lora("r=2,alpha=5")
    model, x = add_lora(Net(), lora).double(), torch.randn(3, 6, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    expected = model(x)
    plain = Net().double()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" not in k})
    for name, is_transposed in (("q_proj", False), ("v_proj", True)):
        layer, adapted = plain.get_submodule(name), model.get_submodule(name)
        layer.weight.data = merge_lora(
            adapted.weight.data,
            adapted.lora_A.weight.data,
            adapted.lora_B.weight.data,
            lora.scale,
            transposed=is_transposed,
        )
    assert torch.allclose(plain(x), expected, atol=1e-12)


class WithHead(Net):
    """Says which layer is its head, as models of transformers do."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_all_linear_layers_are_all_but_the_head() -> None:
    model = add_lora(WithHead(), parse_lora("r=1,targets=all-linear"))
    adapted = {name.partition(".")[0] for name, _ in model.named_parameters() if "lora" in name}
    assert adapted == {"q_proj", "v_proj"}


def test_all_linear_layers_can_be_named_at_once() -> None:
    model = add_lora(Net(), parse_lora("r=1,targets=all-linear"))
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rank=8", "rank=8"),
        ("r=0", "at least 1"),
        ("r=8,alpha=x", "at least 1"),
        ("r=8,r=9", "repeated"),
        ("8", "'8'"),
        ("r=8,alpha=-1", "above 0"),
    ],
)
def test_a_mistyped_option_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as raised:
        parse_lora(text)
    assert raised.value.code == "AP867"


def test_layers_that_are_not_there_are_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="did you mean q_proj"):
        add_lora(Net(), parse_lora("r=8,targets=q_porj"))
    with pytest.raises(UsageError, match="its linear layers are 0"):
        add_lora(nn.Sequential(nn.Linear(2, 2)), parse_lora("r=8"))

"""Parts of a layer that are recomputed as Megatron-LM cuts them, of a small DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from autoparallel.cost_model.cluster.shorthand import parse_cluster
from autoparallel.passes.capture.capture_model import capture
from autoparallel.passes.programs.program import Program
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.configured.configuration_pricer import ConfigurationPricer, PricedStep
from autoparallel.planner.costs.basis import Basis, assumptions_of
from autoparallel.planner.graph.expert_dims import is_expert_layer
from autoparallel.planner.graph.graph import Graph
from autoparallel.planner.kernels.recompute import RecomputedPart
from autoparallel.planner.ops.experts import group_limit

HEADS, NOPE, ROPE, VALUE, HIDDEN, SEQ, ROWS = 4, 16, 8, 16, 64, 32, 4
TOKENS, HALF = ROWS * SEQ, 2
NOTHING: tuple[RecomputedPart, ...] = ("ssm",)
"""A part that no layer of the model has."""


@cache
def program() -> Program:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        vocab_size=128,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    with torch.device("meta"):
        model: nn.Module = DeepseekV3ForCausalLM(config)
    tokens = torch.zeros(2, SEQ, dtype=torch.long)
    return capture(model, {"input_ids": tokens, "labels": tokens}, dtype="bfloat16")


def graph() -> Graph:
    return program().graph


def priced(*parts: RecomputedPart, dp: int = 1, ep: int = 1) -> PricedStep:
    own = replace(assumptions_of("megatron", "bf16"), recomputed=parts)
    asked = Configuration(
        dp=dp,
        ep=ep,
        precision="bf16",
        microbatch_size=ROWS * dp,
        recompute="selective" if parts else "none",
        compiled=True,
        fuses_products=True,
    )
    pricer = ConfigurationPricer(program().graph, program().blocks, Basis(assumptions=own))
    return pricer.price(parse_cluster(f"{dp}xH100"), asked)


def kept(step: PricedStep) -> float:
    return step.stages[0].activation_bytes


def backward(step: PricedStep) -> float:
    return step.stages[0].seconds.backward_compute


@pytest.mark.parametrize(
    ("part", "least_per_layer", "layers"),
    [
        # queries and keys of every head, and what holds the values besides keys
        ("mla_up_proj", TOKENS * HEADS * HALF * (2 * (NOPE + ROPE) + NOPE + VALUE), 4),
        ("core_attn", TOKENS * HEADS * VALUE * HALF, 4),
        ("shared_experts", 2 * TOKENS * 32 * HALF, 3),
        ("moe", 2 * TOKENS * 32 * HALF, 3),
        ("mlp", 2 * TOKENS * 96 * HALF, 1),
    ],
)
def test_a_part_that_runs_again_keeps_less_and_takes_longer(
    part: RecomputedPart, least_per_layer: int, layers: int
) -> None:
    none, again = priced(*NOTHING), priced(part)
    assert kept(none) - kept(again) >= layers * least_per_layer
    assert backward(none) < backward(again) < backward(none) + none.stages[0].forward_seconds


def test_the_activation_of_experts_is_not_kept_where_it_runs_again() -> None:
    assert kept(priced(*NOTHING)) - kept(priced("moe_act")) == 3 * 2 * TOKENS * 32 * HALF


def test_parts_add_up_and_the_whole_layer_of_experts_holds_those_of_its_parts() -> None:
    both = kept(priced("mla_up_proj", "mlp"))
    whole = kept(priced(*NOTHING))
    assert whole - both == sum(whole - kept(priced(part)) for part in ("mla_up_proj", "mlp"))
    assert kept(priced("moe", "shared_experts")) == kept(priced("moe"))


def test_tokens_are_sent_again_only_to_experts_that_run_again() -> None:
    none, attention, experts = (
        priced(*parts, dp=4, ep=4).stages[0].seconds.backward_communication
        for parts in (NOTHING, ("core_attn",), ("moe",))
    )
    assert attention == none
    sent = priced(dp=4, ep=4).stages[0].seconds.forward_communication
    assert none < experts <= none + sent


def test_the_groups_that_a_router_chooses_from_are_found_in_the_graph() -> None:
    found = {group_limit(node, graph()) for node in graph() if is_expert_layer(node)}
    assert found == {(4, 2)}
    assert {group_limit(node, graph()) for node in graph() if not is_expert_layer(node)} == {(1, 1)}

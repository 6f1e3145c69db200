"""The corpus: models, clusters and options, and a quick sample of them for CI.

Targets and clusters are paths relative to the repository's root, or names. ``options`` are the
options of ``autoparallel plan`` by their names in ``autoparallel.plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.planning.cases import LLAMA_70B, LLAMA_405B, NARROW


@dataclass(frozen=True)
class Case:
    """A planning job. ``seq`` None leaves the length to the target."""

    name: str
    target: str
    cluster: str
    global_batch: int
    seq: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


LLAMA = "hf:examples/llama3_8b"

GPT = "examples/gpt.py"
GPT2 = {"n_layer": 12, "d_model": 768, "n_head": 12, "seq": 1024, "vocab": 50257, "tied": True}
GPT2_XL = {"n_layer": 48, "d_model": 1600, "n_head": 25, "seq": 1024, "vocab": 50257}
GPT_EVEN = {"n_layer": 12, "d_model": 1024, "n_head": 16, "seq": 1024, "vocab": 2048}
GPT_1B = {"n_layer": 24, "d_model": 2048, "n_head": 16, "seq": 2048, "vocab": 51200}
GPT_7B = {"n_layer": 32, "d_model": 4096, "n_head": 32, "seq": 2048, "vocab": 51200}
GPT_LONG = {"n_layer": 4, "d_model": 2048, "n_head": 16, "seq": 32768, "vocab": 32768}
VIT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 224,
    "patch_size": 16,
}
RESNET_50 = {
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "image_size": 224,
}
T5 = {
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 6,
    "num_heads": 16,
    "vocab_size": 32128,
}
MIXTRAL_8X7B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
EXPERTS = {
    "n_layer": 4,
    "d_model": 1024,
    "n_head": 16,
    "d_ff": 4096,
    "n_expert": 64,
    "capacity": 64,
    "vocab": 32000,
    "seq": 1024,
}
TOWERS = {"width": 1024, "num_heads": 16, "num_layers": 12, "shared": 512}
BF16 = {"precision": "bf16"}
FP16 = {"precision": "fp16"}

LLAMA_8B = Case("llama-3-8b", LLAMA, "8xH100", 64, 4096, {}, BF16)

PLANNING = (
    LLAMA_8B,
    Case("llama-3-70b", LLAMA, "8x8xH100", 256, 4096, LLAMA_70B, BF16),
    Case("gpt-39b", "hf:benchmarks/planning/gpt_39b", "8x8xV100-16GB", 1024, 1024, {}, FP16),
    Case("llama-3-405b", LLAMA, "2048x8xH100", 2048, 8192, LLAMA_405B, BF16),
    Case("mixtral-8x22b", "hf:benchmarks/planning/mixtral_8x22b", "16x8xH100", 512, 4096, {}, BF16),
    Case(
        "wide-resnet-13b",
        "benchmarks/planning/wide_resnet.py",
        "8x8xV100-16GB",
        1520,
        options={"parallel": "microbatches=38"},
    ),
    Case("1000-layers", LLAMA, "8x8xH100", 128, 2048, NARROW, BF16),
)
"""Seven jobs of ``benchmarks/planning``, for ``--planning``. All but the first take too long for
the corpus and have no baseline in it."""

CHAINS = (
    LLAMA_8B,
    Case("gpt-small-2cpu", GPT, "cpu:2@loopback", 32),
    Case("gpt-small-4cpu", GPT, "cpu:4@loopback", 32, options={"optimizer": "sgd"}),
    Case("gpt2-2xA100", GPT, "2xA100-40GB", 32, 1024, GPT2, BF16),
    Case("gpt-1b-2x8xA100", GPT, "2x8xA100-40GB@ethernet-100g", 128, 2048, GPT_1B, BF16),
    Case("gpt-7b-4x8xH100", GPT, "4x8xH100", 256, 2048, GPT_7B, BF16),
    Case("llama-8b-tight", LLAMA, "8xA100-40GB", 32, 4096, {}, BF16),
    Case("llama-8b-limit", LLAMA, "8xH100", 64, 4096, {}, {**BF16, "memory_limit": "30GiB"}),
    Case("vit-8xA100", "hf:tests/zoo/vit", "8xA100-40GB", 512, settings=VIT_LARGE, options=BF16),
    Case("mamba-2xH100", "hf:tests/zoo/mamba", "2xH100", 16, 16),
    Case("gemma2-4xA100", "hf:tests/zoo/gemma2", "4xA100-80GB", 32, 64),
)

CONVOLUTIONS = (
    Case("resnet-50-8xV100", "hf:tests/zoo/resnet", "8xV100-16GB", 256, settings=RESNET_50),
    Case("alexnet-4xV100", "examples/alexnet.py", "4xV100-16GB", 512),
    Case(
        "wrn-28-10-4xA100",
        "examples/wide_resnet.py",
        "4xA100-40GB",
        256,
        settings={"blocks": 4, "width": 10},
    ),
    Case("unet-4xH100", "examples/unet.py", "4xH100", 64, settings={"depth": 4, "channels": 64}),
    Case(
        "diffusion-8xA100",
        "examples/diffusion.py",
        "8xA100-40GB",
        128,
        settings={"depth": 3, "channels": 128},
    ),
    Case("convnext-2xH100", "hf:tests/zoo/convnext", "2xH100", 32, options=BF16),
)

BRANCHES = (
    Case("two-towers-8xA100", "examples/two_towers.py", "8xA100-40GB", 256, settings=TOWERS),
    Case("clip-4xH100", "hf:tests/zoo/clip", "4xH100", 64),
    Case("three-arms-3cpu", "tests/models/three_arms.py", "cpu:3@loopback", 24),
    Case(
        "three-arms-6xH100", "tests/models/three_arms.py", "6xH100", 96, settings={"num_layers": 8}
    ),
    Case(
        "long-skip-4xA100",
        "tests/models/long_skip.py",
        "4xA100-40GB",
        64,
        settings={"n_layer": 8, "width": 2048},
    ),
    Case("t5-8xA100", "hf:tests/zoo/t5", "8xA100-40GB", 64, 512, T5, BF16),
    Case("whisper-4xH100", "hf:tests/zoo/whisper", "4xH100", 32, 16),
)

MOE = "examples/gshard_moe.py"
EXPERT = (
    Case("gshard-8xH100", MOE, "8xH100", 64, 1024, EXPERTS, BF16),
    Case("gshard-2x8-ethernet", MOE, "2x8xA100-80GB@ethernet-100g", 64, 1024, EXPERTS, BF16),
    Case("gshard-ep8", MOE, "8xH100", 64, 1024, EXPERTS, {**BF16, "parallel": "ep=8"}),
    Case(
        "mixtral-8x7b-4x8xH100", "hf:tests/zoo/mixtral", "4x8xH100", 128, 4096, MIXTRAL_8X7B, BF16
    ),
    Case("jamba-2xH100", "hf:tests/zoo/jamba", "2xH100", 16, 16),
)

LONG = (
    Case("llama-8b-131k-cp8", LLAMA, "8xH100", 1, 131072, {}, {**BF16, "parallel": "cp=8"}),
    Case("llama-8b-65k-4x8xH100", LLAMA, "4x8xH100", 2, 65536, {}, BF16),
    Case("gpt-32k-2x8xH100", GPT, "2x8xH100", 2, 32768, GPT_LONG, BF16),
    Case("gpt-32k-cp4-tp2", GPT, "8xH100", 1, 32768, GPT_LONG, {**BF16, "parallel": "cp=4,tp=2"}),
)

HOSTS = (
    Case("gpt-1b-A100+H100", GPT, "8xA100-80GB+8xH100", 128, 2048, GPT_1B, BF16),
    Case("gpt2-V100+A100", GPT, "2xV100-16GB+2xA100-40GB", 64, 1024, GPT2, FP16),
    Case(
        "gpt2-uneven-shares", GPT, "1xA100-40GB+1xH100", 64, 1024, GPT2, {**BF16, "deny": "pp,tp"}
    ),
    Case("gpt-1b-racks", GPT, "benchmarks/corpus/clusters/racks.toml", 128, 2048, GPT_1B, BF16),
    Case("gpt2-4xV100-wires", GPT, "4xV100-16GB", 32, 1024, GPT2, FP16),
    Case("gpt2-8xV100-wires", GPT, "8xV100-16GB", 64, 1024, GPT2, FP16),
    Case(
        "gpt-1b-bridges",
        GPT,
        "benchmarks/corpus/clusters/bridged-a100.toml",
        32,
        2048,
        GPT_1B,
        BF16,
    ),
)


def _forced(
    name: str, parallel: str, cluster: str = "4xA100-40GB", settings: Mapping[str, Any] = GPT2
) -> Case:
    return Case(name, GPT, cluster, 32, 1024, settings, {**BF16, "parallel": parallel})


SCHEDULES = (
    _forced("gpipe", "pp=4,microbatches=8,schedule=gpipe"),
    _forced("1f1b", "pp=4,microbatches=8,schedule=1f1b"),
    _forced("eager-1f1b", "pp=4,microbatches=8,schedule=eager-1f1b"),
    _forced("zb-h1", "pp=4,microbatches=8,schedule=zb-h1"),
    _forced("zb-h2", "pp=4,schedule=zb-h2"),
    _forced("interleaved", "pp=4,schedule=interleaved,chunks=3"),
    _forced("interleaved-searched", "schedule=interleaved", "4xA100-40GB@pcie4"),
    _forced("bfs", "pp=2,microbatches=8,schedule=bfs,chunks=2"),
    _forced("zbv", "pp=4,microbatches=8,schedule=zbv"),
    _forced("zbv-searched", "schedule=zbv", "2x4xA100-40GB@ethernet-25g", GPT2_XL),
    _forced("dualpipev", "pp=4,microbatches=8,schedule=dualpipev"),
    _forced("zb-h1-chunks", "pp=4,microbatches=8,schedule=zb-h1,chunks=2"),
    _forced("chimera", "pp=4,microbatches=8,schedule=chimera"),
    # The stages of the GPT-2 above are unlike, as its head outweighs its layers; these are alike.
    _forced("even-gpipe", "pp=4,microbatches=8,schedule=gpipe", settings=GPT_EVEN),
    _forced("even-1f1b", "pp=4,microbatches=8,schedule=1f1b", settings=GPT_EVEN),
    _forced("even-eager-1f1b", "pp=4,microbatches=8,schedule=eager-1f1b", settings=GPT_EVEN),
    _forced("even-zb-h1", "pp=4,microbatches=8,schedule=zb-h1", settings=GPT_EVEN),
    _forced("even-zbv", "pp=4,microbatches=8,schedule=zbv", settings=GPT_EVEN),
    _forced("even-chimera", "pp=4,microbatches=8,schedule=chimera", settings=GPT_EVEN),
    _forced("terapipe", "pp=4,microbatches=4,schedule=terapipe,slices=4", settings=GPT_EVEN),
    _forced("terapipe-auto", "pp=4,microbatches=2,schedule=terapipe", settings=GPT_EVEN),
    _forced("pipedream", "pp=4,microbatches=8,schedule=pipedream", settings=GPT_EVEN),
    _forced("pipedream-2bw", "pp=4,microbatches=8,schedule=pipedream-2bw", settings=GPT_EVEN),
    _forced("ampnet", "pp=4,microbatches=8,schedule=ampnet", settings=GPT_EVEN),
)


def _gpt2(name: str, cluster: str = "8xA100-40GB", rows: int = 64, **options: Any) -> Case:
    return Case(name, GPT, cluster, rows, 1024, GPT2, {**BF16, **options})


OPTIONS = (
    _gpt2("forced-2x2x2", parallel="dp=2,tp=2,pp=2"),
    _gpt2("zero-0", parallel="dp=8,zero=0,recompute=none"),
    _gpt2("zero-3", parallel="dp=8,zero=3"),
    _gpt2("fsdp-allowed", allow="dp,zero3"),
    _gpt2("recompute-full", parallel="recompute=full,dp=2,pp=4"),
    _gpt2("recompute-selective", parallel="recompute=selective,tp=2"),
    _gpt2("no-pipeline", deny="pp"),
    _gpt2("max-tp", max_tp=2, micro_batch=16),
    _gpt2("pinned-columns", pin="layers.*.mlp.up.weight=S(0)@tp"),
    _gpt2("pinned-one-layer", pin="layers.3.mlp.up.weight=S(1)@tp"),
    _gpt2("stage-at", stage_at=("layers.4", "layers.7"), parallel="pp=4"),
    _gpt2("stage-at-interleaved", stage_at=("layers.6",), parallel="pp=2,schedule=interleaved"),
    _gpt2("compiled", compile=True),
    _gpt2("tf32-all", precision="fp32", tf32="all"),
    _gpt2("float32-ops-none", float32_ops="none", optimizer="sgd-momentum"),
    _gpt2("fastest", tolerance=0.0),
    _gpt2("narrow-gap", gap=0.001, num_candidates=2),
    _gpt2("tight-memory", "4xA100-40GB", 64, memory_limit="3GiB"),
    _gpt2("least-memory", "4xA100-40GB", 32, objective="memory"),
    _gpt2("least-cost", "2x4xA100-40GB", 32, objective="cost", price="2.0"),
    _gpt2("fewest-devices", "2x4xA100-40GB", 32, objective="devices", deadline="300ms/step"),
)

PROFILES = (
    Case(
        "measured-4xH100",
        GPT,
        "4xH100",
        64,
        options={
            "profile": "auto",
            "database": "benchmarks/corpus/measured.sqlite",
        },
    ),
)

REFUSED = (
    _gpt2("refused-memory", "2xA100-40GB", 16, memory_limit="300MB"),
    _gpt2("refused-degrees", parallel="dp=3,tp=2"),
    _gpt2("refused-pin", pin="layers.0.mlp.up.weight=S(0)@tp", parallel="tp=1"),
    _gpt2("refused-path", pin="layers.99.mlp.up.weight=S(0)@tp"),
    _gpt2("refused-stages", stage_at="layers.5", parallel="pp=1"),
    _gpt2("refused-denied", deny="tp", parallel="tp=2"),
)

CASES = (
    *CHAINS,
    *CONVOLUTIONS,
    *BRANCHES,
    *EXPERT,
    *LONG,
    *HOSTS,
    *SCHEDULES,
    *OPTIONS,
    *PROFILES,
    *REFUSED,
)

BY_NAME = {case.name: case for case in (*CASES, *PLANNING)}

QUICK = ("gpipe", "zbv", "chimera", "refused-degrees")
"""What CI plans."""

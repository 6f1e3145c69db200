"""What is planned: models from their configurations, clusters, wanted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LLAMA = f"hf:{HERE.parents[1] / 'examples' / 'llama3_8b'}"

LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA_405B = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
"""Dubey et al. 2024, "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3."""

NARROW = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 1000,
}


@dataclass(frozen=True)
class Case:
    """A planning job. ``wanted_seconds`` is what it may take on two cores, None for growth."""

    name: str
    target: str
    cluster: str
    global_batch: int
    wanted_seconds: float | None = None
    _: KW_ONLY
    seq: int | None = 4096
    precision: str = "bf16"
    parallel: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


CASES = (
    Case("llama-3-8b", LLAMA, "8xH100", 64, 10.0),
    Case("llama-3-70b", LLAMA, "8x8xH100", 256, 20.0, settings=LLAMA_70B),
    # Zheng et al. 2022 (Alpa), table 5: sequences of 1,024, a batch of 1,024, half precision
    Case(
        "gpt-39b", f"hf:{HERE / 'gpt_39b'}", "8x8xV100-16GB", 1024, 20.0, seq=1024, precision="fp16"
    ),
    Case("llama-3-405b", LLAMA, "2048x8xH100", 2048, 60.0, seq=8192, settings=LLAMA_405B),
    Case("mixtral-8x22b", f"hf:{HERE / 'mixtral_8x22b'}", "16x8xH100", 512, 40.0),
    Case(
        "wide-resnet-13b",
        str(HERE / "wide_resnet.py"),
        "8x8xV100-16GB",
        1520,
        60.0,
        seq=None,
        precision="fp32",
    ),
    # Alpa's number of micro-batches; batch norm then sees each for itself. Without, the batch is
    # one micro-batch, of which 64 V100s cannot hold what its backward needs.
    Case(
        "wide-resnet-13b-38",
        str(HERE / "wide_resnet.py"),
        "8x8xV100-16GB",
        1520,
        60.0,
        seq=None,
        precision="fp32",
        parallel="microbatches=38",
    ),
    Case("1000-layers", LLAMA, "8x8xH100", 128, 30.0, seq=2048, settings=NARROW),
)

LAYERS = tuple(2**power for power in range(3, 11))
GPUS = tuple(8 * 2**power for power in range(12))

GROWTH = (
    *(
        Case(
            f"layers-{number}",
            LLAMA,
            "8x8xH100",
            128,
            seq=2048,
            settings={**NARROW, "num_hidden_layers": number},
        )
        for number in LAYERS
    ),
    *(
        Case(
            f"gpus-{number}",
            LLAMA,
            "8xH100" if number == 8 else f"{number // 8}x8xH100",
            max(64, number // 4),
            settings=LLAMA_70B if number > 8 else {},
        )
        for number in GPUS
    ),
)
"""The first: a transformer of so many layers on 64 GPUs. The second: Llama-3-70B (8B on 8)."""

BY_NAME = {case.name: case for case in (*CASES, *GROWTH)}

"""``moe_runs.csv``: runs of models with experts, from their Hugging Face configurations.

In: a row, and the folder of its model. Out: a ``Run`` whose model is built by transformers and
captured like any user's. Of a model's layers those at the start that have a dense feed-forward are
captured, and ``FEWEST`` of those with experts, which ``depth`` repeats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import NormalDist

from autoparallel.cost_model.collectives.dispatch import DISPATCHERS, Dispatcher
from autoparallel.cost_model.ops.memory import PrecisionPolicy
from autoparallel.options.parse import parse_settings
from autoparallel.options.plan_options import PlanOptions
from autoparallel.passes.programs.program import Program as Captured
from autoparallel.planner.configured.configuration import Configuration
from autoparallel.planner.costs.basis import CostAssumptions, assumptions_of
from autoparallel.planner.kernels.recompute import RECOMPUTED_PARTS, RecomputedPart
from autoparallel.planner.ops.experts import ExpertKernels
from autoparallel.planner.plan import Precision, Recompute
from autoparallel.planning.capture import capture_target
from autoparallel.target.load import load_target

from .clusters import make_cluster
from .sources import Program
from .tables import (
    GIB,
    Row,
    Run,
    UnusableRowError,
    half_policy,
    has_eight_bits,
    measured,
    microbatches,
    number,
    scaling,
)

MODELS = Path(__file__).with_name("data") / "moe_models"
FEWEST = 4
"""Layers with experts that are captured. The dense layers of a model are fewer, so that ``depth``
takes one of these for the layer to repeat."""
LONG_CAPTURES = ("Qwen3-Next", "V4-Flash")
"""Models whose capture takes minutes, as transformers loops over many steps in their layers."""
ALTERNATING = ("Nemotron", "GPT-OSS", "Llama-4")
"""Models whose layers alternate in kind or in the window of attention, so that all are captured."""
EXPERT_VARIANCE, SEQUENCE_VARIANCE = 0.88, 0.28
"""How unevenly a router fills experts. The first is the variance of an expert's tokens, divided by
the mean of all experts, in a batch of many sequences; a batch of one sequence adds the second. Both
are means over two Mixtrals, of 8 experts (0.39 and 0.29) and of 16 (1.38 and 0.27), computed from
the tokens of 32 ranks in 1,040 layers and iterations (LAER-MoE's artifact, arXiv:2602.11686,
scripts_ae/token_analysis_backup.csv, rows of FSDP)."""
WAITS = 2.5e-3
"""Seconds of ``Program.waits`` without CUDA graphs; fitted on Qwen3-30B-A3B on B200 and H100."""
HALF_STATES = replace(half_policy(4), parameter_bytes=2, optimizer_bytes=4)
"""NeMo AutoModel's models are built in bfloat16, which torch's Adam steps with states of that
format (_transformers/auto_model.py, torch_dtype); gradients are summed in float32."""
HIDDEN_SHARE = 0.75
"""Of the messages between experts what 1F1B's overlap hides; fitted on DeepSeek-V3 and Qwen3 in
NVIDIA's pages of 2026."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model by the folder of its configuration. The first ``dense`` layers have no experts. If
    the others are equal (``is_repeated``), few of them are captured, and one is repeated."""

    folder: str
    layers: int
    dense: int
    seq: int
    is_repeated: bool

    @property
    def repeated(self) -> int | None:
        """The number of layers with experts, or None where no layer is repeated."""
        return self.layers - self.dense if self.is_repeated else None

    @property
    def few(self) -> Listed:
        """The model with no more layers than are captured."""
        few = self.dense + FEWEST if self.is_repeated else self.layers
        return replace(self, layers=min(self.layers, few))

    def program(self, dtype: str) -> Captured:
        """Capture the model."""
        settings = parse_settings([f"num_hidden_layers={self.layers}"])
        target = load_target(f"hf:{self.folder}", settings)
        precision: Precision = "bf16" if dtype == "bfloat16" else "fp32"
        return capture_target(target, PlanOptions(2, self.seq, precision=precision))


SCRIPTS: tuple[tuple[str, str, Row], ...] = (
    (
        r"dgxc-benchmarking@v25\.05\S* deepseek",
        "",
        {"dispatcher": "alltoall", "routing": "natural (token drop, capacity)"},
    ),
    (
        r"dgxc-benchmarking@v25\.08\S* deepseek",
        "H100",
        {"dispatcher": "DeepEP", "routing": "forced_balanced"},
    ),
    (
        r"dgxc-benchmarking@v25\.10\S* deepseek",
        "B200",
        {
            "dispatcher": "alltoall",
            "routing": "natural (token drop, capacity)",
            "recompute_modules": "mla_up_proj",
        },
    ),
    (
        r"25\.09 NeMo container.*DeepSeekV3",
        "H100",
        {"overlap": "expert all-to-all overlapped with compute"},
    ),
)
"""Cells that a source leaves open, and its scripts of that release settle: source, device, cells.
NVIDIA/NeMo@7a8f1cc and @9244b1e, scripts/performance/llm/pretrain_deepseek_v3.py;
NVIDIA-NeMo/Megatron-Bridge@7c0ae3f and v0.1.0rc4, scripts/performance/run_script.py."""


def with_script(row: Row) -> Row:
    """Return the row with open cells as the source's scripts have them."""
    found = dict(row)
    for source, device, cells in SCRIPTS:
        if re.search(source, row.get("source", "")) and device in row.get("gpu_type", ""):
            found |= {k: v for k, v in cells.items() if row.get(k, "") in ("", "unknown")}
    return found


def run_of(row: Row, line: int, folder: Path = MODELS) -> Run:
    """Return the run of a row."""
    row = with_script(row)
    model = row.get("model", "")
    if any(name in model for name in LONG_CAPTURES):
        raise UnusableRowError(f"{model} takes minutes to capture")
    if "layers" in row.get("uncertain_cells", "").split(";"):
        raise UnusableRowError(f"how many layers of {model} ran is uncertain")
    model = model.replace(" ", "-")
    if not (folder / model / "config.json").is_file():
        raise UnusableRowError(f"there is no configuration of {model}")
    cluster, missing = make_cluster(
        row.get("gpu_type", ""),
        number(row, "n_gpus"),
        number(row, "gpus_per_node", default=8),
        row.get("interconnect", ""),
    )
    stated = row.get("dense_layers", "")
    dense = int(stated) if stated.isdecimal() else 0
    is_repeated = not any(name in model for name in ALTERNATING)
    shape = Listed(
        str(folder / model), number(row, "layers"), dense, number(row, "seq_len"), is_repeated
    )
    configuration = _configuration(row)
    memory = row.get("peak_memory_gib", "")
    return Run(
        row.get("row_id") or f"line {line}",
        row.get("source", ""),
        shape,
        cluster,
        configuration,
        measured(row.get("derived_iter_time_s", ""), "derived_iter_time_s"),
        measured(memory, "peak_memory_gib") * GIB if memory else None,
        quality=row.get("quality") or "A",
        assumed=missing,
        program=Program(
            exposed_share=_exposed_share(row),
            graphs=_graphs(row),
            waits=_waits(row),
        ),
        assumptions=_assumptions(row),
    )


def _assumptions(row: Row) -> CostAssumptions:
    return replace(
        assumptions_of("megatron", "fp8" if has_eight_bits(row) else "bf16"),
        policy=_policy(row),
        recomputed=_recomputed(row),
        scaling=scaling(row),
        expert_kernels=_expert_kernels(row),
        dispatcher=_dispatcher(row),
        imbalance=_imbalance(row) if _is_routed_freely(row) else 1.0,
        routing="neighbours" if "fake balanced gate" in row.get("notes", "") else "any",
    )


def _policy(row: Row) -> PrecisionPolicy:
    """Adam in mixed precision: NVIDIA's recipes sum gradients in half precision and gather
    parameters in 8 bits where products are, fully sharded programs do neither."""
    if _is_automodel(row):
        return HALF_STATES
    if _is_fsdp(row):
        return half_policy(4)
    return half_policy(2, 1 if has_eight_bits(row) else 2)


def _is_automodel(row: Row) -> bool:
    return "automodel" in row.get("source", "").lower()


def _recomputed(row: Row) -> tuple[RecomputedPart, ...]:
    """Return the parts of a layer that are recomputed: those that the row states, and the scans of
    state-space layers, which mamba_ssm's kernel always recomputes."""
    stated = row.get("recompute_modules", "").split(",")
    names = [name.strip() for name in stated if name.strip()]
    unknown = set(names).difference(RECOMPUTED_PARTS)
    if unknown:
        raise UnusableRowError(f"recomputation of {', '.join(sorted(unknown))}")
    if "Nemotron" in row["model"]:
        names.append("ssm")
    return tuple(part for part in RECOMPUTED_PARTS if part in names)


def _expert_kernels(row: Row) -> ExpertKernels:
    """Return how a run's experts are divided into kernels, as stated or with one kernel for the
    activation. Megatron-LM runs each op of GPT-OSS's experts, with biases and a clamped activation,
    as a kernel: TransformerEngine's kernel for all takes these since 2026-05-27 (#2938), with a
    cuDNN frontend that came later, and NVIDIA's figures for 26.06 and 26.08 are equal."""
    if "GPT-OSS" in row["model"] and not _is_automodel(row):
        return "separate"
    return "one" if "fused grouped-MLP kernel" in row.get("notes", "") else "activation"


def _imbalance(row: Row) -> float:
    """Return the tokens of the fullest rank of experts, divided by the mean of these ranks.

    Ranks are taken as independent normal variables, of which Blom 1958 gives the expected maximum.
    """
    ranks, sharing = number(row, "ep", default=1), number(row, "tp", default=1)
    held = number(row, "num_experts") / ranks
    sequences = max(1.0, ranks / sharing) * number(row, "micro_batch")
    variance = (EXPERT_VARIANCE + SEQUENCE_VARIANCE / sequences) / held
    largest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    most = ranks * min(1.0, held / number(row, "experts_per_token"))
    return min(most, 1 + largest * sqrt(variance))


def _is_routed_freely(row: Row) -> bool:
    """Tell whether experts get as many tokens as the router says: none are dropped."""
    is_even = row.get("routing") == "forced_balanced" or "capacity" in row.get("routing", "")
    return not (is_even or _is_padded(row))


def _is_padded(row: Row) -> bool:
    """Tell whether each expert computes a fixed number of rows: tokens beyond it are dropped, and
    rows without a token are padding. All of NVIDIA's recipes of Grok-1 do so."""
    return "padded" in row.get("routing", "") or row["model"] == "Grok-1"


def _is_fsdp(row: Row) -> bool:
    return bool(re.search("FSDP2|ZeRO-3", row.get("zero_stage/fsdp", "")))


def _dispatcher(row: Row) -> Dispatcher:
    """As stated; else HybridEP in racks of NVL72, DeepEP over several hosts, NCCL in one host."""
    named = row.get("dispatcher", "").lower()
    stated = [each for each in DISPATCHERS if each == named]
    if stated:
        return stated[0]
    if "NVL72" in row.get("interconnect", ""):
        return "hybridep"
    is_wide = number(row, "ep", default=1) > number(row, "gpus_per_node", default=8)
    return "deepep" if is_wide else "alltoall"


def _configuration(row: Row) -> Configuration:
    dp, tp, pp, cp = (number(row, name, default=1) for name in ("dp", "tp", "pp", "cp"))
    rows, chunks = number(row, "micro_batch"), number(row, "vp", default=1)
    ep, etp = (number(row, name, default=1) for name in ("ep", "etp"))
    stated = row.get("recompute", "")
    recompute: Recompute = "selective" if _recomputed(row) else "none"
    if stated.startswith("full"):
        recompute = "full"
    count = microbatches(number(row, "global_batch_seqs"), dp, rows)
    chunks = chunks if pp > 1 else 1
    return Configuration(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        zero=3 if _is_fsdp(row) else 1,
        sequence_parallel=True if tp > 1 else None,
        recompute=recompute,
        recomputes_ends=recompute == "selective",
        microbatch_size=rows * dp,
        num_microbatches=count,
        num_chunks=chunks,
        compiled=True,
        fuses_products=True,
        schedule="interleaved-1f1b" if chunks > 1 else "1f1b",
        precision="fp8" if has_eight_bits(row) else "bf16",
    )


def _exposed_share(row: Row) -> float:
    """The share of the messages to experts that no compute hides."""
    return 1 - HIDDEN_SHARE if "all-to-all overlapped" in row.get("overlap", "") else 1.0


def _waits(row: Row) -> float:
    """Return how long a layer of experts waits for the host in a pass.

    CUDA graphs of parts of a layer hide a third of the wait, a graph of the whole step all of it.
    With a fixed number of tokens there is nothing to wait for. AutoModel's backward sends tokens by
    what DeepEP told the host in the forward (components/moe/megatron/fused_a2a.py).
    """
    if _is_padded(row):
        return 0.0
    if _is_automodel(row):
        return WAITS * (2 / 3 if row.get("recompute", "").startswith("full") else 1 / 2)
    graphs = _graphs(row)
    return 0.0 if graphs == 1 else WAITS * (1 - graphs * 2 / 3)


def _graphs(row: Row) -> float:
    """The share of kernels that CUDA graphs launch. Where NVIDIA's pages name none, it is taken to
    be half."""
    text = row.get("cuda_graphs", "")
    if text.startswith("full_iteration"):
        return 1.0
    is_bridge = not text and "Megatron-Bridge" in row.get("source", "")
    return 0.5 if is_bridge or re.match(r"transformer_engine|on", text) else 0.0

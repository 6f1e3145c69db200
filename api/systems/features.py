"""Features of a plan that another system may lack, each with a name and a description.

In: a plan. Out: its features. Names are as for ``--allow`` if it has the feature: tp, cp, ep, pp,
zero1 to zero3, selective, full, offload, and the schedules. ``FEATURES`` describes each; a system
maps the names of its missing features to replacements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoparallel.analysis.sharding import attention_ways
from autoparallel.planner.graph.layout import HALO, OF_GROUPS, RING
from autoparallel.planner.plan import Plan, StagePlan, rows_text
from autoparallel.planner.requests.features import MODES
from autoparallel.planner.schedules.catalogue import SCHEDULES
from autoparallel.planner.summary import SCHEDULE_TITLES, mesh_text, servers_text
from autoparallel.planner.variants.replicas import stages_of_ranks
from autoparallel.systems.degrees import EXPERTS, Roles, axis_roles, layers_of, parameters

FEATURES = {
    "tp": "tensor parallelism",
    "sp": "sequence parallelism: norms split by positions within tp",
    "cp": "context parallelism",
    "ring": "ring attention",
    "halo": "attention that receives the keys of its windows alone",
    "ulysses": "attention by heads on ranks of context parallelism",
    "ep": "expert parallelism",
    "pp": "pipeline parallelism",
    **{
        name: f"schedule {SCHEDULE_TITLES.get(name, name)}"
        for name, each in SCHEDULES.items()
        if each.trains
    },
    "uneven-stages": "stages of unequal numbers of layers",
    "mixed-stages": "stages on meshes that differ",
    "branches": "branches of the model on devices of their own",
    "zero1": "ZeRO 1",
    "zero2": "ZeRO 2",
    "zero3": "ZeRO 3",
    "mixed-zero": "ZeRO stages that differ by pipeline stage",
    "hsdp": "ZeRO within groups of ranks",
    "selective": "selective recomputation",
    "full": "full recomputation",
    "attention": "recomputation of all but attention",
    "attention-offloaded": "recomputation of all but attention, with kept values in host memory",
    "none-offloaded": "activations in host memory",
    "mixed-recompute": "recomputation of some layers",
    "tiles": "the last ops of recomputed layers in tiles",
    "offload": "masters and optimizer states in host memory",
    "offload-gradients": "optimizer states and gradients in host memory",
    "offload-parameters": "optimizer states, gradients and parameters in host memory",
    "weight-layouts": "layouts of single weights",
    "uneven-shares": "unequal shares of the batch",
    "gradient-sums": "algorithms for sums of gradients",
    "gradient-order": "sums of gradients in the order of the next forward",
    "compute-gradients": "gradients summed in half precision",
    "servers": "parameter servers",
    "device-order": "the order of devices in the mesh",
    "lora": "LoRA adapters",
    "fp16": "fp16",
    "fp8": "fp8",
    "fp64": "fp64",
    "adam": "Adam",
    "sgd": "SGD",
    "sgd-momentum": "SGD with momentum",
    "compile": "compiled blocks",
}
"""All features that a plan may use besides data parallelism, AdamW, fp32 and bf16."""

MOST_NAMED = 3
"""Number of weights listed by name; further weights are counted."""

MOST_COUNTS = 16
"""Number of stages up to which their layers are listed; for more, only minimum and maximum."""

COLUMN_NAMES = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "qkv",
    "qkv_proj",
    "query",
    "key",
    "value",
    "c_attn",
    "c_fc",
    "fc1",
    "fc_in",
    "w1",
    "w3",
    "lm_head",
    "up",
    "gate",
)
ROW_NAMES = ("o_proj", "down_proj", "out_proj", "c_proj", "fc2", "fc_out", "w2", "down", "proj")
"""Last name parts of modules that Megatron-LM's tensor parallelism shards by output (column
parallel, ``COLUMN_NAMES``) and by input (row parallel; Shoeybi et al. 2019, arXiv:1909.08053,
section 3)."""

TRANSPOSED = ("c_attn", "c_fc", "c_proj")
"""Names of modules of transformers' class ``Conv1D``, whose weight is inputs x outputs."""


@dataclass(frozen=True, slots=True)
class Feature:
    """Feature that a plan uses: key in ``FEATURES``, and a text with the plan's numbers."""

    name: str
    text: str


def features_of(plan: Plan) -> tuple[Feature, ...]:
    """Return the features (ZeRO, a schedule, LoRA, …) that a plan uses, without duplicates."""
    found = (
        *_parallelism(plan),
        *_pipeline(plan),
        *_states(plan),
        *_recomputation(plan),
        *_gradients(plan),
        *_settings(plan),
        *_layouts(plan),
    )
    return tuple({feature.name: feature for feature in reversed(found)}.values())[::-1]


WAYS_OF_ATTENTION = (("ring", {RING}), ("halo", {HALO}), ("ulysses", {"heads", OF_GROUPS}))
"""Features of attention on an axis "cp", with the labels of their ways (``attention_ways``)."""


def _parallelism(plan: Plan) -> Iterator[Feature]:
    every = [axis_roles(plan, stage) for stage in plan.stages]
    for name, what in (("tp", "tensor"), ("cp", "context"), ("ep", "expert")):
        if (most := max(getattr(roles, name) for roles in every)) > 1:
            yield Feature(name, f"{what} parallelism, {name}={most}")
    for name, labels in WAYS_OF_ATTENTION:
        if labels & set(context_ways(plan)):
            yield Feature(name, FEATURES[name])
    if any(roles.splits_norms for roles in every):
        yield Feature("sp", FEATURES["sp"])
    if plan.servers is not None:
        yield Feature("servers", servers_text(plan.servers))
    if shares := next((stage.shares for stage in plan.stages if stage.shares), ()):
        yield Feature("uneven-shares", f"unequal shares of a micro-batch: {rows_text(shares)} rows")


def context_ways(plan: Plan) -> tuple[str, ...]:
    """Return the ways of attention of a plan's stages on their axis "cp", as ``attention_ways``."""
    stages = [stage for stage in plan.stages if "cp" in stage.mesh.axes]
    found = [way for each in stages for way in attention_ways(each, each.mesh.axes.index("cp"))]
    return tuple(dict.fromkeys(found))


def _pipeline(plan: Plan) -> Iterator[Feature]:
    if not plan.has_pipeline:
        return
    ranks = stages_of_ranks(plan)
    yield Feature("pp", f"a pipeline of {len(ranks)} stages of devices")
    title = SCHEDULE_TITLES.get(plan.schedule, plan.schedule)
    chunks = f" with {plan.num_chunks} stages per rank" if plan.num_chunks > 1 else ""
    yield Feature(plan.schedule, f"the schedule {title}{chunks}")
    counts = [len(layers_of(plan, stage)) for stage in plan.stages]
    if len(set(counts)) > 1:
        every, span = ", ".join(map(str, counts)), f"{min(counts)} to {max(counts)}"
        texts = every if len(counts) <= MOST_COUNTS else span
        yield Feature("uneven-stages", f"stages of {texts} layers")
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    if len(meshes) > 1:
        texts = " and ".join(map(mesh_text, meshes[:4]))
        yield Feature("mixed-stages", f"stages on meshes that differ: {texts}")
    devices = [stage.devices for stage in plan.stages]
    if any(set(a) & set(b) and set(a) != set(b) for a in devices for b in devices):
        yield Feature("branches", "stages that share some of their devices")


def _states(plan: Plan) -> Iterator[Feature]:
    zeros = [stage.zero for stage in plan.stages]
    if max(zeros) and plan.servers is None:
        yield Feature(f"zero{max(zeros)}", f"ZeRO {max(zeros)}")
    if within := sorted({stage.shard_degree for stage in plan.stages if stage.shard_degree}):
        yield Feature("hsdp", f"ZeRO within groups of {' or '.join(map(str, within))} ranks")
    if len(set(zeros)) > 1:
        yield Feature("mixed-zero", f"ZeRO stages {', '.join(map(str, zeros))} of its stages")
    if plan.offload != "none":
        name = "offload" if plan.offload == "optimizer" else f"offload-{plan.offload}"
        yield Feature(name, FEATURES[name])


def _recomputation(plan: Plan) -> Iterator[Feature]:
    modes = [block.recompute for stage in plan.stages for block in layers_of(plan, stage)]
    counts = {mode: modes.count(mode) for mode in reversed(MODES[1:]) if mode in modes}
    for mode, count in counts.items():
        yield Feature(mode, f"{FEATURES[mode]} of {count} of {len(modes)} layers")
    if counts and len(set(modes)) > 1:
        texts = " and ".join(f"{count} {mode}" for mode, count in counts.items())
        yield Feature("mixed-recompute", f"recomputation of some layers: {texts} of {len(modes)}")
    if plan.most_tiles > 1:
        yield Feature("tiles", f"the last ops of recomputed layers in {plan.tiles} tiles")


def _gradients(plan: Plan) -> Iterator[Feature]:
    names = {each.algorithm for stage in plan.stages for each in stage.gradient_sums}
    if chosen := sorted(names - {"library"}):
        yield Feature("gradient-sums", f"sums of gradients by {', '.join(chosen)}")
    if plan.gradient_order != "backward":
        yield Feature("gradient-order", FEATURES["gradient-order"])
    is_half = plan.model.precision in ("bf16", "fp16", "fp8")
    if is_half and plan.model.gradient_dtype == "compute":
        yield Feature("compute-gradients", f"gradients summed and held in {plan.model.precision}")


def _settings(plan: Plan) -> Iterator[Feature]:
    if plan.model.precision not in ("fp32", "bf16"):
        yield Feature(plan.model.precision, f"precision {plan.model.precision}")
    if plan.model.optimizer != "adamw":
        yield Feature(plan.model.optimizer, f"optimizer {plan.model.optimizer}")
    if plan.compiled:
        yield Feature("compile", FEATURES["compile"])
    if adapters := plan.model.settings.get("lora"):
        yield Feature("lora", f"LoRA adapters alone are trained ({adapters})")
    if plan.servers is None and not _has_usual_order(plan):
        yield Feature("device-order", "devices in another order than pipeline, data, tensor")


def _has_usual_order(plan: Plan) -> bool:
    """Return whether the devices of successive pipeline ranks are numbered in ascending order."""
    order = [plan.stages[own[0]].devices for own in stages_of_ranks(plan)]
    flat = [device for devices in order for device in devices]
    return flat == sorted(flat)


def _layouts(plan: Plan) -> Iterator[Feature]:
    odd: dict[str, str] = {}
    for stage in plan.stages:
        roles = axis_roles(plan, stage)
        for name in sorted(parameters(plan, stage)):
            for axis, text in _odd_axes(plan, stage, roles, name):
                odd.setdefault(name, f"{name} {text} over {stage.mesh.axes[axis]}")
    if odd:
        texts = list(odd.values())
        more = f" and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
        named = "; ".join(texts[:MOST_NAMED])
        yield Feature("weight-layouts", f"layouts of single weights: {named}{more}")


def _odd_axes(plan: Plan, stage: StagePlan, roles: Roles, name: str) -> Iterator[tuple[int, str]]:
    """Yield the indices of mesh axes on which the weight ``name`` is not sharded as by column and
    row parallelism, each with a text that says how."""
    layout = stage.layouts[name].outputs[0]
    usual = usual_dim(name, is_hub=plan.model.target.startswith("hf:"))
    for axis, placement in enumerate(layout):
        is_spread = axis in stage.expert_axes and EXPERTS in name
        if stage.mesh.shape[axis] == 1 or stage.mesh.axes[axis] == "ep" or is_spread:
            continue
        is_tensor_axis = stage.mesh.axes[axis] == "tp" and roles.tp > 1
        if not is_tensor_axis and placement.is_shard:
            yield axis, f"split along dimension {placement.dim}"
        elif is_tensor_axis and usual is not None and placement.is_shard and placement.dim != usual:
            yield axis, f"split along dimension {placement.dim} (usually {usual})"
        elif is_tensor_axis and usual is not None and not placement.is_shard:
            yield axis, f"whole (usually split along dimension {usual})"


def usual_dim(name: str, *, is_hub: bool) -> int | None:
    """Return the dimension that tensor parallelism usually shards in a weight; None if unknown.
    ``is_hub`` says that the model is of Hugging Face, where some weights are transposed.

    >>> usual_dim("model.layers.0.mlp.down_proj.weight", is_hub=True)
    1
    >>> usual_dim("model.layers.0.input_layernorm.weight", is_hub=True)
    """
    *path, last = name.split(".")
    module = path[-1] if path else ""
    if last != "weight":
        return None
    if module.startswith("embed_tokens") or module in ("wte", "tok_embeddings"):
        return 0
    is_transposed = is_hub and module in TRANSPOSED
    if module in COLUMN_NAMES:
        return 1 if is_transposed else 0
    if module in ROW_NAMES:
        return 0 if is_transposed else 1
    return None

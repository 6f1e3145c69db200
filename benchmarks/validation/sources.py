"""What a source's program and instruments take besides the devices' own time.

In: a cluster of the presets. Out: the cluster as the source measured it, and the program.
The figures are of a source, not of a device: they stay here and never enter the presets. How
they were fitted, and the errors on rows that were held out, are in the README.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoparallel.cost_model.cluster.cluster import Cluster, Device, Host, Link
from autoparallel.cost_model.collectives.collectives import Group, collective_seconds
from autoparallel.cost_model.ops.compute import rate
from autoparallel.planner.costs.seconds import Seconds
from autoparallel.planner.stage.stage_cost import StageCost


@dataclass(frozen=True, slots=True)
class Program:
    """What a training program takes besides its kernels and bytes.

    ``message_seconds``: to start a transfer between stages, besides the link's own.
    ``loss_seconds``: of the host on the last stage per micro-batch, half in each direction,
    for a loss in more kernels than one. ``second_gradients``: bytes of gradients held besides
    those that are reduced, over the latter's (half-precision ones that are added to float32).
    ``accumulation``: bytes that adding a micro-batch's gradients to those before moves, over
    the gradients' own (two read, one written: 3), where no product does so as it ends.
    ``kept_outputs``: bytes of a stage's outputs that are held until its backward, over those of its
    checkpoints. ``cached``: bytes that the allocator holds besides, over those of what comes and
    goes, where the figure was read from nvidia-smi or is torch's reserved one.
    ``exposed_share``: of the collectives among tensor-parallel ranks what no product runs beside.
    ``optimizer_passes``: bytes that the optimizer's step moves over those that a fused one does.
    ``layer_host_seconds``: what the host takes at least for a layer in a pass, hooks included; a
    recomputed layer has three passes. ``broadcasts``: after the step each rank in turn broadcasts
    the parameters that it has updated, and nothing runs beside that. ``graphs``: the share of
    kernels that CUDA graphs launch, so that the host takes no time for them. ``waits``: in a layer
    of experts and a pass, how long the device is idle because the host first waits to learn how
    many tokens come.
    """

    message_seconds: float = 0.0
    loss_seconds: float = 0.0
    second_gradients: float = 0.0
    accumulation: float = 0.0
    optimizer_passes: float = 1.0
    exposed_share: float = 1.0
    kept_outputs: float = 0.0
    cached: float = 0.0
    layer_host_seconds: float = 0.0
    broadcasts: bool = False
    graphs: float = 0.0
    waits: float = 0.0

    def gathered(self, cost: StageCost, group: Group) -> StageCost:
        """Return a stage's cost whose step ends when all ranks of ``group`` have the parameters."""
        if not self.broadcasts or group.num_ranks == 1:
            return cost
        part = int(cost.memory_bytes["gradients"] / group.num_ranks)
        sent = group.num_ranks * collective_seconds("broadcast", part, group)
        own = cost.seconds
        seconds = own._replace(
            parameter_gather=0.0, gather_slowed=0.0, optimizer=own.optimizer + sent
        )
        return replace(cost, seconds=seconds, groups=None)

    def around(
        self,
        cost: StageCost,
        device: Device,
        passes: tuple[int, int] = (0, 0),
        *,
        is_first: bool,
        is_last: bool,
    ) -> StageCost:
        """Return a stage's cost in this program.

        ``passes``: how many layers a micro-batch passes forward, and how many backward.
        """
        seconds, (forward, backward) = self._issued(cost, passes), cost.receive_seconds
        seconds = seconds._replace(
            optimizer=seconds.optimizer * self.optimizer_passes,
            forward_communication=seconds.forward_communication * self.exposed_share,
            backward_communication=seconds.backward_communication * self.exposed_share,
        )
        if self.accumulation:
            moved = self.accumulation * cost.memory_bytes["gradients"]
            added = rate(device, "elementwise", "bfloat16").seconds(0.0, moved)
            seconds = seconds._replace(backward_compute=seconds.backward_compute + added)
        if is_last and self.loss_seconds:
            half = self.loss_seconds / 2
            seconds = seconds._replace(
                forward_compute=seconds.forward_compute + half,
                backward_compute=seconds.backward_compute + half,
                forward_issue=seconds.forward_issue + half,
                backward_issue=seconds.backward_issue + half,
            )
        if not is_first:
            forward, backward = forward + self.message_seconds, backward + self.message_seconds
        received, memory = (forward, backward), self._held(cost.memory_bytes)
        return replace(cost, seconds=seconds, receive_seconds=received, memory_bytes=memory)

    def launched(self, cluster: Cluster) -> Cluster:
        """Return the cluster as its hosts issue the kernels that no CUDA graph launches."""
        if not self.graphs:
            return cluster
        share = 1 - self.graphs
        return cluster.with_devices(
            lambda device: replace(device, issue_seconds=share * device.issue_seconds)
        )

    def _issued(self, cost: StageCost, passes: tuple[int, int]) -> Seconds:
        """Return a stage's seconds with the host's time for its layers."""
        least = [self.layer_host_seconds * number for number in passes]
        waits = [self.waits * number for number in passes]
        forward, backward = (
            max(wait, floor - own)
            for wait, floor, own in zip(waits, least, cost.compute_seconds, strict=True)
        )
        own = cost.seconds
        if not (forward or backward):
            return own
        return own._replace(
            forward_compute=cost.compute_seconds[0] + forward,
            backward_compute=cost.compute_seconds[1] + backward,
        )

    def _held(self, memory: Mapping[str, float]) -> dict[str, float]:
        activations = memory["activations"] * (1 + self.kept_outputs)
        return {
            **memory,
            "gradients": memory["gradients"] * (1 + self.second_gradients),
            "activations": activations,
            "transient": memory["transient"] * (1 + self.cached) + activations * self.cached,
        }


@dataclass(frozen=True, slots=True)
class Source:
    """Figures that take the place of the presets'; None leaves the preset's.

    ``launch_seconds``: of a kernel on the device; ``issue_seconds``: of the host per kernel;
    ``start_seconds``: of a collective within a host; ``attention`` and ``matmul``: the share of
    the peak that the implementations of attention and of products reach. ``program`` as
    ``Program`` has it.
    """

    name: str
    launch_seconds: float | None = None
    issue_seconds: float | None = None
    start_seconds: float | None = None
    attention: float | None = None
    matmul: float | None = None
    program: Program = field(default_factory=Program)

    def seen(self, cluster: Cluster) -> Cluster:
        """The cluster with these figures."""
        return replace(cluster, hosts=tuple(self._host(host) for host in cluster.hosts))

    def _host(self, host: Host) -> Host:
        device = replace(
            host.device,
            launch_seconds=_or(self.launch_seconds, host.device.launch_seconds),
            issue_seconds=_or(self.issue_seconds, host.device.issue_seconds),
        )
        given = {"attention": self.attention, "matmul": self.matmul}
        reached = {family: share for family, share in given.items() if share is not None}
        device = replace(device, efficiency={**device.efficiency, **reached})
        return replace(host, device=device, link=self._link(host.link))

    def _link(self, link: Link) -> Link:
        return replace(link, base_seconds=_or(self.start_seconds, link.base_seconds))


def _or(value: float | None, preset: float) -> float:
    return preset if value is None else value


VTRAIN_SINGLE = Source(
    "VIA-Research/vTrain validation data, single node (MIT)",
    launch_seconds=34e-6,
    issue_seconds=79e-6,
    start_seconds=74e-6,
    program=Program(message_seconds=0.3e-3, loss_seconds=1.25e-3),
)
"""Traced kernel by kernel (CUPTI), which makes every kernel and its issue longer."""

CACHED, CACHED_COMPILED = 0.23, 0.135
"""Of what comes and goes what torch's allocator had reserved besides, eager and compiled: each
fitted on one run of Llama 8B on 8 GPUs with 8,192 tokens (pytorch/torchtitan@b5bcd76, maximum of
reserved bytes)."""

EXPOSED_BESIDE_PRODUCTS = 0.65
"""Of the collectives among tensor-parallel ranks what remains where products are cut in parts and
run beside them: mean of the five pairs of runs with and without AsyncTP
(pytorch/torchtitan@b5bcd76), so with what products lose beside collectives. NVIDIA's runs do the
same by TransformerEngine's userbuffers; they were not fitted."""

FOUNDRY = Program(optimizer_passes=88 / 28)
"""llm-foundry's DecoupledAdamW steps a tensor at a time in nine kernels that move 88 bytes per
parameter, where a fused step moves 28: the decay 8, both moments 40, the denominator 24, the
update 16 (composer/optim/decoupled_weight_decay.py)."""

FOUNDRY_A100 = Source("mosaicml/llm-foundry on A100", attention=0.325, program=FOUNDRY)
"""FlashAttention 1, which reaches 25 to 40 % of the A100's peak (FlashAttention-2, Dao 2023,
abstract): the middle."""

FOUNDRY_H100 = Source("mosaicml/llm-foundry on H100", attention=0.19, matmul=0.65, program=FOUNDRY)
"""FlashAttention 1 at half the rate of FlashAttention-2, the preset's kernel (Dao 2023, abstract:
"around 2x"), and the products of a cuBLAS of 2023, fitted on the recomputed runs of 2048 tokens."""

VTRAIN_MULTI = Source(
    "VIA-Research/vTrain validation data, multi node (MIT)",
    start_seconds=45e-6,
    program=Program(accumulation=3.0),
)
"""Whole iterations of a running job; an all-reduce waits for the last of its ranks."""

ACCUMULATING = Program(accumulation=3.0)
"""Gradients of a micro-batch are added to those before by kernels of their own, as autograd and
Megatron-LM did before it fused that into the products (2022)."""

BF16_OPTIMIZER = Program(second_gradients=0.5, accumulation=4.5)
"""DeepSpeed's BF16_Optimizer: float32 gradients of all parameters of a rank, and besides them the
bfloat16 ones of the last backward until the next begins; these are cast (2 bytes read, 4
written) and added (8 read, 4 written) after every backward: 18 bytes for 4
(deepspeed/runtime/bf16_optimizer.py, update_hp_grads)."""

HOOKED_SECONDS = 4e-3
"""Of the host for a layer and pass of DeepSpeed's ZeRO 3, whose hooks gather and release each
parameter from Python: Qwen 7B on 2 A100 takes 4.0 s a step at 256 and at 512 tokens, with 8
micro-batches of 32 layers and 3 passes (QwenLM/Qwen@2df8e8a README.md)."""

INTERNEVO = Program(accumulation=3.0, broadcasts=True)
"""InternEvo's hybrid zero optimizer: bf16 gradients, added by autograd; the ranks broadcast their
shares of the parameters one after the other (internlm/solver/optimizer/hybrid_zero_optim.py,
broadcast_params), so that a step takes longer the more ranks there are."""

"""What a source's program and instruments take besides the devices' own time.

In: a cluster of the presets. Out: the cluster as the source measured it, and the program.
The figures are of a source, not of a device: they stay here and never enter the presets. How
they were fitted, and the errors on rows that were held out, are in the README.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoparallel.cost_model.cluster import Cluster, Host, Link
from autoparallel.planner.configured.configuration import Program


@dataclass(frozen=True, slots=True)
class Source:
    """Figures that take the place of the presets'; None leaves the preset's.

    ``launch_seconds``: of a kernel on the device; ``issue_seconds``: of the host per kernel;
    ``start_seconds``: of a collective within a host; ``attention``: the share of the peak that
    the implementation of attention reaches. ``program`` as ``Program`` has it.
    """

    name: str
    launch_seconds: float | None = None
    issue_seconds: float | None = None
    start_seconds: float | None = None
    attention: float | None = None
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
        if self.attention is not None:
            efficiency = {**device.efficiency, "attention": self.attention}
            device = replace(device, efficiency=efficiency)
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

CUDNN_ATTENTION = Source("cuDNN's fused attention on Hopper", attention=0.5)
"""The preset's figure is PyTorch's FlashAttention-2 kernel; cuDNN's is made for Hopper. Chosen on
Llama 8B and Nemotron 15B in bfloat16 (NVIDIA/dgxc-benchmarking@v25.02)."""

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

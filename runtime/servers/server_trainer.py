"""Training by a plan with parameter servers, on one rank: as a worker, a server, or both.

In: the captured program, a plan with ``servers``, initial weights. Out: ``step(batch)`` like
``Trainer``'s, on every rank; ``finish`` waits for the last updates and ends the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...cost_model.simulator.consistency import Clocks, bound_of
from ...passes.programs.program import Program
from ...planner.plan import Plan, ServerPlan
from ...planner.variants.parameter_servers import Shard, shards_of
from ..data.batches import DataSource, RankInputs, mark_inputs, named_inputs
from ..data.variants import variant_of
from ..messages.groups import DATA_AXIS
from ..parameters.initial_values import Weights
from ..step.rank_model import RankModel
from ..step.training_step import StepResult
from ..update.optimizer import BuildOptimizer
from .channels import Channel, Key, Link, LocalChannel, PeerChannel, Traffic
from .server import ServedPiece, Server
from .server_worker import SHARED, ServerWorker


@dataclass(slots=True)
class WholeBatches:
    """Source of batches for a worker: every worker reads all rows, as it may have to compute the
    rows of a lost worker too."""

    plan: Plan
    program: Program
    place: tuple[int, int] | None = (0, 1)
    teller: int | None = None

    def rows_of(self, inputs: Mapping[str, Tensor]) -> int:
        """Return the planned number of rows of a global batch."""
        return self.plan.model.global_batch

    def named(self, batch: object) -> RankInputs:
        """Return a batch's tensors by their names in the plan."""
        return mark_inputs(named_inputs(batch, self.program), batch)


class ServerTrainer:
    """Training on one rank with parameter servers: the rank has a worker, which computes with
    ``model``, a server, or both."""

    optimizer = None

    def __init__(
        self,
        program: Program,
        plan: Plan,
        weights: Weights,
        *,
        device: torch.device,
        build: BuildOptimizer | None = None,
        progress: Callable[..., None] | None = None,
        seed: int = 0,
    ) -> None:
        """Make this rank's worker and server. Collective over all ranks, unlike the other methods.
        ``build`` makes the user's optimizer, None the plan's."""
        assert plan.servers is not None
        self.plan, self.device, self.servers = plan, device, plan.servers
        own = plan_of_worker(plan, dist.get_rank())
        planned = variant_of(program, own)
        mesh = DeviceMesh(
            device.type,
            torch.tensor([dist.get_rank()]),
            mesh_dim_names=(DATA_AXIS,),
            _init_backend=False,
        )
        self.model = RankModel(planned, weights, device=device, progress=progress, meshes={0: mesh})
        self.program = planned.program
        self._pieces = pieces_of(self.model, len(self.servers.servers))
        rank, servers = dist.get_rank(), self.servers
        self._channels = make_channels(servers, rank)
        self.server = self.worker = None
        if rank in servers.servers:
            self.server = self._make_server(servers.servers.index(rank), build)
        if rank in servers.workers:
            self.worker = self._make_worker(servers.workers.index(rank), program, seed)
        else:
            self.model.stages.clear()
            self.model.parameters.clear()

    @property
    def batches(self) -> DataSource:
        """The source of batches for this rank's worker."""
        return WholeBatches(self.plan, self.program)

    @property
    def trains(self) -> bool:
        """Tell whether this rank has a worker, which takes training steps."""
        return self.worker is not None

    @property
    def reports(self) -> bool:
        """Tell whether this rank has the first worker that is not lost; that worker prints the
        steps."""
        return self.worker is not None and self.worker.is_first

    def step(self, *batches: Mapping[str, Tensor]) -> StepResult:
        """Run one iteration of this rank's worker on a batch. Without a worker, nothing is done and
        the loss is NaN."""
        (batch,) = batches
        loss = float("nan") if self.worker is None else self.worker.step(batch)
        return StepResult((torch.tensor(loss, dtype=torch.float64),), None)

    def settle(self) -> None:
        """Fill the model with the weights after the last step and with the gradient of its
        update."""
        if self.worker is not None:
            self.worker.finish()
            self.worker.take_gradients()

    def finish(self, progress: Callable[[str], None] | None = None) -> None:
        """Fill the model with the weights after the last step, and end the worker; a server first
        waits until all workers have ended, and calls ``progress`` repeatedly meanwhile."""
        if self.worker is not None:
            self.worker.finish()
            self.worker.close()
        if self.server is not None:
            self.server.finish(progress)

    def _make_server(self, index: int, build: BuildOptimizer | None) -> Server:
        servers = self.servers
        count = len(servers.servers)
        homes = {index, *([(index - 1) % count] if has_replicas(servers) else [])}
        shapes = {
            n: p.local.shape for n, p in self.model.parameters.items() if p.spec.requires_grad
        }
        bound = bound_of(servers.consistency, servers.staleness)
        pieces = {
            key: ServedPiece(
                self._values(shards),
                shards,
                Clocks(range(len(servers.workers)), bound),
                shapes=shapes,
                build=build,
                optimizer=self.plan.model.optimizer,
            )
            for key, shards in self._pieces.items()
            if key[0] in homes
        }
        channels = self._channels
        replica = channels.get(f"servers/copy/{index}")
        server = Server(index, pieces, len(servers.workers), replica)
        if has_replicas(servers):
            server.serve(channels[f"servers/copy/{(index - 1) % count}"], None)
        for worker in range(len(servers.workers)):
            for name, target in channel_names(servers, worker):
                if target == index and name in channels:
                    server.serve(channels[name], worker)
        return server

    def _values(self, shards: tuple[Shard, ...]) -> Tensor:
        parameters = self.model.parameters
        return torch.cat(
            [
                parameters[shard.parameter].local.reshape(-1)[shard.start : shard.stop]
                for shard in shards
            ]
        )

    def _make_worker(self, index: int, program: Program, seed: int) -> ServerWorker:
        servers = self.servers
        channels = {
            name: self._channel(name, target) for name, target in channel_names(servers, index)
        }
        links: dict[str, dict[int, Link]] = {"push": {}, "pull": {}}
        for kind, of_kind in links.items():
            for home in range(len(servers.servers)):
                begin = f"servers/{kind}/{index}/{home}/"
                of_kind[home] = Link(home, [c for n, c in channels.items() if n.startswith(begin)])
        sizes = {key: sum(shard.size for shard in shards) for key, shards in self._pieces.items()}
        dtype = next(iter(self.model.parameters.values())).local.dtype
        traffic = Traffic(links["push"], links["pull"], sizes, dtype)
        graph = program.graph.with_batch_size(self.model.plan.model.global_batch)
        executor = self.model.executor(0, seed)
        return ServerWorker(index, servers, executor, self._pieces, traffic, graph)

    def _channel(self, name: str, target: int) -> Channel:
        if self.servers.servers[target] == dist.get_rank():
            assert self.server is not None
            return LocalChannel(self.server.handle)
        return self._channels[name]


def plan_of_worker(plan: Plan, rank: int) -> Plan:
    """Return the plan by which one worker computes alone on ``rank``. If workers run in lockstep
    (bsp), it has all micro-batches of a step, of which the worker computes a part; else the
    worker's share of the global batch is a batch of its own."""
    assert plan.servers is not None
    (stage,) = plan.stages
    own = replace(plan, stages=(replace(stage, devices=(rank,)),))
    if plan.servers.consistency == "bsp":
        return own
    count = len(plan.servers.workers)
    model = replace(plan.model, global_batch=plan.model.global_batch // count)
    return replace(own, model=model, num_microbatches=plan.num_microbatches // count)


def has_replicas(servers: ServerPlan) -> bool:
    return servers.replicas and len(servers.servers) > 1


def channel_names(servers: ServerPlan, worker: int) -> list[tuple[str, int]]:
    """Return the name of each of a worker's connections, and the index of the server at the other
    end: for the pieces that a server owns, this server and, if there are replicas, the server with
    the replicas."""
    count = len(servers.servers)
    return [
        (f"servers/{kind}/{worker}/{home}/{target}", target)
        for kind in ("push", "pull")
        for home in range(count)
        for target in ([home, (home + 1) % count] if has_replicas(servers) else [home])
    ]


def make_channels(servers: ServerPlan, rank: int) -> dict[str, PeerChannel]:
    """Connect this rank to all workers and servers that it exchanges requests with; return its ends
    of the connections by name. Every rank calls it, since each end waits for the other."""
    count, made = len(servers.servers), nth_of_run(rank)
    ends = [
        (name, servers.workers[worker], servers.servers[target])
        for worker in range(len(servers.workers))
        for name, target in channel_names(servers, worker)
    ]
    if has_replicas(servers):
        ranks = servers.servers
        ends += [(f"servers/copy/{k}", ranks[k], ranks[(k + 1) % count]) for k in range(count)]
    return {
        name: PeerChannel(f"{made}/{name}", asks=rank == asks)
        for name, asks, answers in ends
        if rank in (asks, answers) and asks != answers
    }


def nth_of_run(rank: int) -> int:
    """Return how many server trainers this rank has made, including the present one; the number
    makes the names of connections unique."""
    store = dist.distributed_c10d._get_default_store()
    return int(store.add(f"servers/made/{rank}", 1))


def pieces_of(model: RankModel, num_servers: int) -> dict[Key, tuple[Shard, ...]]:
    """Divide the trained parameters over servers: return the shards of each piece, by server index
    and position of the block. The result is the same on all ranks."""
    trained = {n: p for n, p in model.parameters.items() if p.spec.requires_grad}
    shards = shards_of({n: p.local.numel() for n, p in trained.items()}, num_servers)
    found: dict[Key, list[Shard]] = {}
    for shard in shards:
        block = trained[shard.parameter].block
        found.setdefault((shard.server, SHARED if block is None else block), []).append(shard)
    return {key: tuple(found[key]) for key in sorted(found)}

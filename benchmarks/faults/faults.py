"""Deliberate faults: one expression each, which a test must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """``old``, which occurs once in ``path``, becomes ``new``; one of ``tests`` must then fail."""

    name: str
    path: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        """The package that it is in."""
        return self.path.split("/")[0]


FAULTS = (
    # what several micro-batches in flight hold counts once
    Fault(
        "activations-in-flight",
        "planner/stage/stage_cost.py",
        'memory["activations"] = kept * setting.in_flight',
        'memory["activations"] = kept',
        "tests/planner/search/test_search_bound.py tests/planner/proposers",
    ),
    # the lower bound counts a block too many
    Fault(
        "bound-too-high",
        "planner/search/bound.py",
        "(number * self._block_seconds(kind, prices)",
        "((number + 1) * self._block_seconds(kind, prices)",
        "tests/planner/search/test_search_bound.py",
    ),
    # ZeRO 3 holds one gathered block instead of two
    Fault(
        "gathered-blocks",
        "planner/stage/kind_model.py",
        "GATHERED_BLOCKS = 2",
        "GATHERED_BLOCKS = 1",
        "tests/planner/search/test_brute_force.py",
    ),
    # collectives of different groups share a price
    Fault(
        "price-without-group",
        "planner/costs/mesh_prices.py",
        "key = (name, num_bytes, group, self.profile)",
        "key = (name, num_bytes, self.profile)",
        "tests/planner/search/test_goldens_meshes.py tests/planner/search/test_goldens.py",
    ),
    # a stage warms up with one forward more than its depth
    Fault(
        "warmup-off-by-one",
        "planner/schedules/orders.py",
        "warmup=eager * ((depth[stage] if depth else num_ranks - stage) - 1),",
        "warmup=eager * ((depth[stage] if depth else num_ranks - stage) - 0),",
        "tests/planner/schedules",
    ),
    # a ring of n ranks sends n parts
    Fault(
        "ring-share",
        "cost_model/collectives/gathers.py",
        "share = (n - 1) / n",
        "share = 1",
        "tests/cost_model/test_collectives.py tests/cost_model/test_algorithms.py",
    ),
    # ZeRO 1 does not shard the optimizer's states
    Fault(
        "optimizer-unsharded",
        "cost_model/ops/memory.py",
        "optimizer=part * policy.optimizer_bytes,",
        "optimizer=numel_local * policy.optimizer_bytes,",
        "tests/cost_model/test_memory.py",
    ),
    # a collective slows nothing down
    Fault(
        "no-slowdown",
        "cost_model/simulator/overlap.py",
        "rate = 1 - self.slowed_share",
        "rate = 1",
        "tests/cost_model/test_overlap.py",
    ),
    # the first send of a rank is as late as its last
    Fault(
        "latency-twice",
        "cost_model/simulator/stage_costs.py",
        "occupied = seconds[direction][at] - first",
        "occupied = seconds[direction][at]",
        "tests/cost_model/test_simulator.py",
    ),
    # activations are never freed
    Fault(
        "activations-kept",
        "cost_model/simulator/simulation.py",
        "rank.held -= num_bytes",
        "rank.held -= 0",
        "tests/cost_model/test_simulator.py",
    ),
    # the gradient of a bias is a mean
    Fault(
        "bias-mean",
        "passes/backward/weight_gradients.py",
        "bias = rows.sum(0).reshape(shapes[1])",
        "bias = rows.mean(0).reshape(shapes[1])",
        "tests/runtime/test_split_backward.py",
    ),
    # padding of an embedding gets a gradient
    Fault(
        "padding-gradient",
        "passes/backward/weight_gradients.py",
        "padding = rest[2] if len(rest) > 2 else -1",
        "padding = -1",
        "tests/runtime/test_split_backward.py",
    ),
    # all steps draw the same random numbers
    Fault(
        "same-random-numbers",
        "passes/ops/random_ops.py",
        "return _signed(_mix(_mix(seed) + step))",
        "return _signed(_mix(_mix(seed)))",
        "tests/test_repository.py",
    ),
    # a rank leaves out the last row of its part of the batch
    Fault(
        "row-missing",
        "passes/local/input_rows.py",
        "return tuple(row for start in starts for row in range(start, start + self.rows))",
        "return tuple(row for start in starts for row in range(start, start + self.rows - 1))",
        "tests/test_repository.py",
    ),
    # two parameters in one storage count as tied
    Fault(
        "tied-by-storage",
        "passes/capture/repeats.py",
        "return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())",
        "return (storage,)",
        "tests/passes/capture/test_capture.py",
    ),
    # a rank holds the shard of the rank before
    Fault(
        "shard-offset",
        "runtime/parameters/parameters.py",
        "first = min(start + place % shards * rows, stop)",
        "first = min(start + (place % shards // 2) * rows, stop)",
        "tests/runtime/test_materialize.py",
    ),
    # gradients are not clipped
    Fault(
        "clip-nothing",
        "runtime/update/optimizer.py",
        "return (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "return (max_norm / (norm + 1e-6)).clamp(min=1.0, max=1.0)",
        "tests/runtime/test_gradient_norm.py",
    ),
    # the norm is that of the squares
    Fault(
        "norm-not-squared",
        "runtime/update/optimizer.py",
        "norms]).to(torch.float64).square().sum()",
        "norms]).to(torch.float64).sum()",
        "tests/runtime/test_gradient_norm.py",
    ),
    # the loss of a step is the sum over its micro-batches
    Fault(
        "loss-summed",
        "runtime/step/pipeline.py",
        "return torch.stack(found).sum() / self.schedule.num_microbatches if found else None",
        "return torch.stack(found).sum() if found else None",
        "tests/runtime/test_pipeline.py",
    ),
    # the oldest checkpoints stay
    Fault(
        "keeps-the-oldest",
        "runtime/checkpoint/folder.py",
        "complete_checkpoints(folder)[: -max(keep, 1)]",
        "complete_checkpoints(folder)[max(keep, 1) :]",
        "tests/runtime/test_checkpoint_folder.py",
    ),
    # every rank reads the first share of the text
    Fault(
        "same-rows-everywhere",
        "api/training/text_data.py",
        "first = step * global_batch + rank * share",
        "first = step * global_batch",
        "tests/api/test_text_data.py",
    ),
    # every epoch has the same order
    Fault(
        "same-order",
        "api/training/text_data.py",
        "np.random.default_rng((self.seed, epoch))",
        "np.random.default_rng((self.seed, 0))",
        "tests/api/test_text_data.py",
    ),
    # adapters change the model before they are trained
    Fault(
        "adapter-not-zero",
        "api/target/lora.py",
        "nn.init.zeros_(layer.lora_B.weight)",
        "nn.init.ones_(layer.lora_B.weight)",
        "tests/api/test_lora.py",
    ),
    # the last of two equal options counts
    Fault(
        "repeated-degree",
        "api/options/parse.py",
        "if name in forced:",
        "if name in ():",
        "tests/api/test_options.py",
    ),
    # keep=0 is taken
    Fault(
        "keep-none",
        "api/adoption/checkpoints.py",
        "if keep is not None and keep < 1:",
        "if keep is not None and keep < 0:",
        "tests/api/test_checkpoints.py",
    ),
    # a plan that was loaded no longer offloads the optimizer
    Fault(
        "offload-forgotten",
        "planner/plan_file.py",
        'decode(table, Plan, "")',
        'decode({**table, "offload": "none"}, Plan, "")',
        "tests/planner/test_plan_file.py tests/planner/costs/test_offload.py",
    ),
    # a coordinate without rows weighs as much in a mean as one with one row
    Fault(
        "empty-share-weighs",
        "planner/variants/shares.py",
        "return self.rows * self.parts / self.total",
        "return max(self.rows, 1) * self.parts / self.total",
        "tests/planner/variants/test_shares.py tests/runtime/test_batches.py",
    ),
    # a schedule may compute a forward before its receive, or without it
    Fault(
        "receive-not-needed",
        "planner/schedules/check.py",
        "yield Action(RECV_FORWARD if remote else FORWARD, stage if remote else other, m, part)",
        "yield Action(FORWARD, other, m, part)",
        "tests/planner/schedules/test_schedules.py",
    ),
    # the largest degree of tensor parallelism that was asked for is ignored
    Fault(
        "max-tp-ignored",
        "planner/search/solvers.py",
        "features.allows_mesh(mesh, request.max_tp)",
        "features.allows_mesh(mesh)",
        "tests/planner/requests/test_features.py",
    ),
    # the optimizer's step has one price, wherever its states are and whatever gradients are in
    Fault(
        "update-without-policy",
        "planner/costs/mesh_prices.py",
        "key = (numel, self.optimizer, self.policy, self.speed, self.profile)",
        "key = (numel, self.optimizer, self.speed, self.profile)",
        "tests/planner/search/test_tables.py tests/planner/costs/test_offload.py",
    ),
    # collectives over several racks are priced as if all hosts stood in one
    Fault(
        "racks-ignored",
        "cost_model/collectives/collectives.py",
        "inter=cluster.host_link({host.rack for host in hosts}),",
        "inter=cluster.inter_link,",
        "tests/cost_model/test_cluster_file.py",
    ),
    # ZeRO 2 needs no memory for the whole gradient of the running block
    Fault(
        "whole-gradient-forgotten",
        "cost_model/ops/memory.py",
        "gradient = numel * policy.gathered_bytes / 2 if zero >= 2 else 0.0",
        "gradient = numel * policy.gathered_bytes / 2 if zero == 3 else 0.0",
        "tests/cost_model/test_memory.py",
    ),
    # a stage that two others feed does not wait for the second of them
    Fault(
        "first-message-enough",
        "cost_model/simulator/simulation.py",
        "if come + 1 < needed:",
        "if come + 2 < needed:",
        "tests/cost_model/test_simulator.py",
    ),
    # a trace shows the memory of the first rank for each of them
    Fault(
        "memory-of-another-rank",
        "cost_model/simulator/trace.py",
        "found += _counter(rank, timeline.memory_bytes[rank])",
        "found += _counter(rank, timeline.memory_bytes[0])",
        "tests/cost_model/test_trace.py",
    ),
    # in zero-bubble schedules no backward of weights is the last: ZeRO 1 never sums gradients
    Fault(
        "no-last-weight-backward",
        "cost_model/simulator/actions.py",
        "if action.kind in (BACKWARD, WEIGHT_BACKWARD):",
        "if action.kind in (BACKWARD, INPUT_BACKWARD):",
        "tests/cost_model/test_actions.py",
    ),
    # queries that a rank takes from its partner see only the keys up to the partner's first half
    Fault(
        "balanced-mask-end",
        "passes/local/local_functions.py",
        "other = attend_upto(partner_start + query.shape[-2], taken, key, value, **options)",
        "other = attend_upto(partner_start + kept.shape[-2], taken, key, value, **options)",
        "tests/passes/ops/test_lower_right.py",
    ),
    # of a split vocabulary every rank takes its own row of the padding's number for padding
    Fault(
        "padding-offset",
        "passes/local/local_functions.py",
        "padding = padding_idx - start",
        "padding = padding_idx",
        "tests/passes/local/test_localize.py tests/passes/local/test_op_execution.py",
    ),
    # experts that two axes split are taken for others on all but a few ranks
    Fault(
        "experts-on-one-axis",
        "passes/ops/experts.py",
        "first, _ = part_of(rank, weights[0].shape[0], axes)",
        "first, _ = part_of(rank, weights[0].shape[0], axes[:1])",
        "tests/passes/local/test_op_execution.py tests/passes/ops/test_experts.py",
    ),
    # a block that runs again draws the random numbers of the latest micro-batch
    Fault(
        "recomputed-draws",
        "passes/ops/random_ops.py",
        "self.key, self.microbatch = key, microbatch",
        "self.key = key",
        "tests/test_verification_schedules.py",
    ),
    # the predicted memory has ZeRO 1's masters and optimizer states whole on every rank
    Fault(
        "zero-1-unsharded",
        "passes/memory/stage_memory.py",
        "shard_axes(spec, layout, mesh, zero, degree)",
        "shard_axes(spec, layout, mesh, zero - 1, degree)",
        "tests/passes/memory/test_stage_memory.py",
    ),
    # gradients are summed over as many axes as the bucket that has the fewest
    Fault(
        "second-axis-not-summed",
        "runtime/update/gradients.py",
        "max((len(bucket.groups) for bucket in self.buckets), default=0)",
        "min((len(bucket.groups) for bucket in self.buckets), default=0)",
        "tests/runtime/test_random_plans.py",
    ),
    # of a tied parameter all stages get the gradient of the first
    Fault(
        "tied-not-summed",
        "runtime/parameters/tied_parameters.py",
        "for term in ordered[1:]:",
        "for term in ordered[2:]:",
        "tests/runtime/test_chimera.py tests/test_verification.py",
    ),
    # from a checkpoint every rank loads rank 0's tensors of what each rank had of its own
    Fault(
        "part-of-rank-0",
        "runtime/checkpoint/parts.py",
        'return rank, [f"{PREFIX}{name}.{rank}.{i}" for i',
        'return rank, [f"{PREFIX}{name}.0.{i}" for i',
        "tests/api/test_checkpoints.py",
    ),
    # parameters that two stages hold count twice in the norm by which gradients are clipped
    Fault(
        "tied-twice-in-the-norm",
        "runtime/step/rank_model.py",
        "if (index, name) not in self.tied.elsewhere",
        "if name not in self.tied.elsewhere",
        "tests/api/test_adoption.py",
    ),
    # what ZeRO 1 and 2 gathered for a forward without gradients stays, though weights change
    Fault(
        "stale-gathered",
        "runtime/parameters/zero.py",
        "group.reshard()",
        "group.reshard() if stage.zero == 3 else None",
        "tests/runtime/test_zero.py tests/api/test_module.py",
    ),
    # a plan goes on with a buffer's old values after a script has written to it
    Fault(
        "stale-buffer",
        "api/adoption/state.py",
        "(id(value), value._version) for name, value",
        "(id(value), 0) for name, value",
        "tests/api/test_module.py",
    ),
    # of two axes of a mesh that split the same, an exported configuration has the last degree
    Fault(
        "last-degree",
        "api/systems/degrees.py",
        "degrees[role] *= size",
        "degrees[role] = size",
        "tests/api/systems/test_degrees.py",
    ),
    # all-linear adapts the layer that makes the logits too
    Fault(
        "adapted-head",
        "api/target/lora.py",
        "if layer is not head)",
        "if path != head)",
        "tests/api/test_lora.py tests/api/test_exporting.py",
    ),
    # a loader that went on in the middle of an epoch tells its position from there
    Fault(
        "position-from-resumption",
        "api/adoption/data_loader.py",
        "self._position = start",
        "self._position = 0",
        "tests/api/test_distributed_loader.py",
    ),
    # a training that accumulates goes on with the random numbers of earlier batches
    Fault(
        "updates-for-batches",
        "api/adoption/step.py",
        '"batches_begun": self._steps.trainable.batches_begun,',
        '"batches_begun": self._num_updates,',
        "tests/api/test_step.py",
    ),
)

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
    Fault("activations-in-flight", "planner/pricing/stage_cost.py",
          'memory["activations"] = kept * setting.in_flight', 'memory["activations"] = kept',
          "tests/planner/search/test_search_bound.py tests/planner/proposers"),
    # the lower bound counts a block too many
    Fault("bound-too-high", "planner/search/bound.py",
          "total += number * first", "total += (number + 1) * first",
          "tests/planner/search/test_search_bound.py"),
    # ZeRO 3 holds one gathered block instead of two
    Fault("gathered-blocks", "planner/pricing/assembly.py",
          "GATHERED_BLOCKS = 2", "GATHERED_BLOCKS = 1",
          "tests/planner/search/test_brute_force.py"),
    # collectives of different groups share a price
    Fault("price-without-group", "planner/pricing/prices.py",
          "key = (name, num_bytes, group, self.profile)",
          "key = (name, num_bytes, self.profile)",
          "tests/planner/search/test_goldens_meshes.py tests/planner/search/test_goldens.py"),
    # a stage warms up with one forward more than its depth
    Fault("warmup-off-by-one", "planner/schedules/orders.py",
          "warmup=eager * ((depth[stage] if depth else num_ranks - stage) - 1),",
          "warmup=eager * ((depth[stage] if depth else num_ranks - stage) - 0),",
          "tests/planner/schedules"),
    # a ring of n ranks sends n parts
    Fault("ring-share", "cost_model/collectives_formulas.py",
          "share = (n - 1) / n * num_bytes", "share = num_bytes",
          "tests/cost_model/test_collectives.py tests/cost_model/test_algorithms.py"),
    # ZeRO 1 does not shard the optimizer's states
    Fault("optimizer-unsharded", "cost_model/memory.py",
          "optimizer=part * policy.optimizer_bytes,",
          "optimizer=numel_local * policy.optimizer_bytes,",
          "tests/cost_model/test_memory.py"),
    # a collective slows nothing down
    Fault("no-slowdown", "cost_model/overlap.py",
          "rate = 1 - self.slowed_share", "rate = 1",
          "tests/cost_model/test_overlap.py"),
    # the first send of a rank is as late as its last
    Fault("latency-twice", "cost_model/action_costs.py",
          "found[key] = MessageCost(first, whole - first, calls[at], posts[at])",
          "found[key] = MessageCost(first, whole, calls[at], posts[at])",
          "tests/cost_model/test_simulator.py"),
    # activations are never freed
    Fault("activations-kept", "cost_model/simulation.py",
          "rank.held -= num_bytes", "rank.held -= 0",
          "tests/cost_model/test_simulator.py"),
    # the gradient of a bias is a mean
    Fault("bias-mean", "passes/local/weight_gradients.py",
          "bias = rows.sum(0).reshape(shapes[1])", "bias = rows.mean(0).reshape(shapes[1])",
          "tests/runtime/test_split_backward.py"),
    # padding of an embedding gets a gradient
    Fault("padding-gradient", "passes/local/weight_gradients.py",
          "padding = rest[2] if len(rest) > 2 else -1", "padding = -1",
          "tests/runtime/test_split_backward.py"),
    # all steps draw the same random numbers
    Fault("same-random-numbers", "passes/ops/random_ops.py",
          "return _signed(_mix(_mix(seed) + step))", "return _signed(_mix(_mix(seed)))",
          "tests/test_repository.py"),
    # a rank leaves out the last row of its part of the batch
    Fault("row-missing", "passes/local/input_rows.py",
          "return tuple(row for start in starts for row in range(start, start + self.rows))",
          "return tuple(row for start in starts for row in range(start, start + self.rows - 1))",
          "tests/test_repository.py"),
    # two parameters in one storage count as tied
    Fault("tied-by-storage", "passes/capture/tie.py",
          "return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())",
          "return (storage,)",
          "tests/passes/capture/test_capture.py"),
    # a rank holds the shard of the rank before
    Fault("shard-offset", "runtime/shards.py",
          "first = min(start + coordinates[0] * rows, stop)",
          "first = min(start + (coordinates[0] // 2) * rows, stop)",
          "tests/runtime/test_materialize.py"),
    # gradients are not clipped
    Fault("clip-nothing", "runtime/optimizer.py",
          "return (max_norm / (norm + 1e-6)).clamp(max=1.0)",
          "return (max_norm / (norm + 1e-6)).clamp(min=1.0, max=1.0)",
          "tests/runtime/test_gradient_norm.py"),
    # the norm is that of the squares
    Fault("norm-not-squared", "runtime/optimizer.py",
          "norms]).to(torch.float64).square().sum()", "norms]).to(torch.float64).sum()",
          "tests/runtime/test_gradient_norm.py"),
    # the loss of a step is the sum over its micro-batches
    Fault("loss-summed", "runtime/pipeline.py",
          "return torch.stack(found).sum() / self.schedule.num_microbatches if found else None",
          "return torch.stack(found).sum() if found else None",
          "tests/runtime/test_pipeline.py"),
    # the oldest checkpoints stay
    Fault("keeps-the-oldest", "runtime/checkpoint_folder.py",
          "complete_checkpoints(folder)[: -max(keep, 1)]",
          "complete_checkpoints(folder)[max(keep, 1) :]",
          "tests/runtime/test_checkpoint_folder.py"),
    # every rank reads the first share of the text
    Fault("same-rows-everywhere", "api/text_data.py",
          "first = step * global_batch + rank * share", "first = step * global_batch",
          "tests/api/test_text_data.py"),
    # every epoch has the same order
    Fault("same-order", "api/text_data.py",
          "np.random.default_rng((self.seed, epoch))", "np.random.default_rng((self.seed, 0))",
          "tests/api/test_text_data.py"),
    # adapters change the model before they are trained
    Fault("adapter-not-zero", "api/lora.py",
          "nn.init.zeros_(layer.lora_B.weight)", "nn.init.ones_(layer.lora_B.weight)",
          "tests/api/test_lora.py"),
    # the last of two equal options counts
    Fault("repeated-degree", "api/options.py",
          "if name in forced:", "if name in ():",
          "tests/api/test_options.py"),
    # keep=0 is taken
    Fault("keep-none", "api/checkpoints.py",
          "if keep is not None and keep < 1:", "if keep is not None and keep < 0:",
          "tests/api/test_checkpoints.py"),
)  # fmt: skip

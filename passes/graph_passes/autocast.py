"""Losses and other ops of autocast's float32 list compute in float32 in a half-precision model.

In: a graph that was captured in ``dtype``, the format of its parameters. Out: the same with casts.

- an op of ``FLOAT32`` gets its floating inputs in float32 and gives float32;
- a sum gives float32 of whatever it reads, as its kernel does that without a copy;
- a product (``LOWER``), an op that the user registered and a batch norm get results of such ops
  in their captured format;
- a kernel of ``FLOAT32_INSIDE`` reads half precision, computes in float32 and rounds only its
  result: it stays unchanged, unless an input is float32 already;
- every other op takes the widest of its inputs.

The positions of casts do not depend on ``dtype``: a cast without effect is a node, too, so the
graph of a plan can be captured in float32 or float64 for verification. In float64 the casts are to
float64.

Source of the lists: aten/src/ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE,
AT_FORALL_LOWER_PRECISION_FP, AT_FORALL_PROMOTE), which
https://docs.pytorch.org/docs/stable/amp.html#cuda-op-specific-behavior documents.
``cross_entropy_loss``, ``square`` and ``linalg_norm`` are there as their parts;
``binary_cross_entropy`` is in the list of the CPU only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...planner.graph.graph import Graph, Node, Ref, TensorSpec, map_refs
from ..ops.torch_ops import has_argument, is_pointwise, resolve

LOSSES = frozenset(
    {
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "cross_entropy_loss",
        "ctc_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
    }
)
FLOAT32 = LOSSES | frozenset(
    {
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "_upsample_nearest_exact1d",
        "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d",
        "acos",
        "asin",
        "cdist",
        "cosh",
        "cosine_similarity",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "frobenius_norm",
        "linalg_matrix_norm",
        "linalg_matrix_sqrth",
        "linalg_norm",
        "linalg_vector_norm",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_softmax",
        "logsumexp",
        "norm",
        "nuclear_norm",
        "pdist",
        "pow",
        "prod",
        "reciprocal",
        "renorm",
        "rsqrt",
        "sinh",
        "softplus",
        "square",
        "tan",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
        "upsample_linear1d",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
        "upsample_trilinear3d",
    }
)
FLOAT32_INSIDE = frozenset(
    {
        "group_norm",
        "layer_norm",
        "native_group_norm",
        "native_layer_norm",
        "rms_norm",
        "softmax",
        "_softmax",
        "_safe_softmax",
    }
)
"""Names of ops whose kernels accumulate in float32 on CUDA and CPU, and whose backward reads only
the inputs or a result in [0, 1]: without autocast's cast, their results differ from float32 only by
rounding."""
LOWER = frozenset(
    {
        "_convolution",
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "convolution",
        "cudnn_convolution",
        "cudnn_convolution_transpose",
        "einsum",
        "gru",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu",
        "rnn_relu_cell",
        "rnn_tanh",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
    }
)
_COUNTED = ("counter_dropout", "counter_uniform")
_CAST = "aten.to.dtype"
_HALVES = ("bfloat16", "float16")
_FLOATS = ("float32", "float64", *_HALVES)


@dataclass(frozen=True, slots=True)
class Autocast:
    """Graph pass that adds the casts of torch's autocast; ``dtype`` is the captured graph's
    dtype."""

    dtype: str
    name: str = "autocast"

    def __call__(self, graph: Graph) -> Graph:
        return autocast(graph, self.dtype)


def autocast(graph: Graph, dtype: str) -> Graph:
    """Return the graph with all ops in float32 for which torch's autocast uses float32; in float64
    if ``dtype`` is float64."""
    state = _Casts(graph, "float64" if dtype == "float64" else "float32")
    for node in graph.nodes:
        state.add(node)
    updates = {name: state.restored(ref, f"{name}_update") for name, ref in graph.updates.items()}
    return replace(graph, nodes=tuple(state.nodes.values()), updates=updates)


@dataclass
class _Casts:
    """State of the autocast pass: the nodes made so far, and ``raised``, the values that are now
    computed in the wider dtype ``high``."""

    graph: Graph
    high: str
    nodes: dict[str, Node] = field(default_factory=dict)
    raised: set[Ref] = field(default_factory=set)

    def add(self, node: Node) -> None:
        if node.kind not in ("op", "constant") or not node.inputs:
            self.nodes[node.name] = node
            return
        _, kind, _ = node.op.split(".")
        has_raised = any(ref in self.raised for ref in node.inputs)
        if kind == "sum" and not has_raised and _reads_floats(self.graph, node):
            self._sum(node)
        elif _says_dtype(node):
            self.nodes[node.name] = node
        elif node.rule is None and (kind in FLOAT32 or (has_raised and kind in FLOAT32_INSIDE)):
            self._raise(self._with_inputs(node, self._up))
        elif not has_raised:
            self.nodes[node.name] = node
        elif _keeps_format(node, kind):
            self.nodes[node.name] = self._with_inputs(node, self.restored)
        elif is_pointwise(node.op) and kind != "lerp":  # lerp takes no two formats
            self._promote(node)
        else:
            self._raise(self._with_inputs(node, self._up))

    def restored(self, ref: Ref, name: str) -> Ref:
        """Return ``ref`` in the dtype that it was captured in; if it is now in the wider dtype, add
        a cast node called ``name``."""
        return self._cast(ref, name, self.graph.spec(ref).dtype) if ref in self.raised else ref

    def _up(self, ref: Ref, name: str) -> Ref:
        is_float = self.graph.spec(ref).dtype in _FLOATS
        return self._cast(ref, name, self.high) if is_float and ref not in self.raised else ref

    def _cast(self, ref: Ref, name: str, dtype: str) -> Ref:
        source = self.nodes[ref.name]
        before = source.outputs[ref.index]
        user = self.graph.by_name.get(name.rpartition("_cast")[0])
        self.nodes[name] = Node(
            name,
            "constant" if source.kind == "constant" else "op",
            _CAST,
            (ref, getattr(torch, dtype)),
            {},
            (replace(before, dtype=dtype),),
            module=(user or source).module,
            source=(user or source).source,
        )
        return Ref(name)

    def _with_inputs(self, node: Node, change: Any) -> Node:
        """Return ``node`` with each input replaced by ``change(value, name)``, which may add a cast
        node called ``name``."""
        changed = {
            ref: change(ref, f"{node.name}_cast{position}")
            for position, ref in enumerate(dict.fromkeys(node.inputs))
        }

        def now(ref: Ref) -> Ref:
            return changed[ref]  # type: ignore[no-any-return]

        return replace(node, args=map_refs(node.args, now), kwargs=map_refs(dict(node.kwargs), now))

    def _raise(self, node: Node) -> None:
        """Add ``node`` with its floating outputs in the wider dtype."""
        self.nodes[node.name] = node.with_outputs(
            tuple(_in(spec, self.high) for spec in node.outputs)
        )
        self.raised |= {
            Ref(node.name, index) for index, spec in enumerate(node.outputs) if _is_float(spec)
        }

    def _sum(self, node: Node) -> None:
        if _is_float(node.spec):
            dtype = getattr(torch, self.high)
            self._raise(replace(node, kwargs={**node.kwargs, "dtype": dtype}))

    def _promote(self, node: Node) -> None:
        """Add a pointwise op with torch's type promotion: its result is in the wider dtype if a
        tensor that it reads is (0-dimensional tensors do not count beside others)."""
        specs = [(ref, self.graph.spec(ref)) for ref in node.inputs]
        floats = [(ref, spec) for ref, spec in specs if _is_float(spec)]
        decide = [ref for ref, spec in floats if spec.shape] or [ref for ref, _ in floats]
        if any(ref in self.raised for ref in decide):
            self._raise(node)
        else:
            self.nodes[node.name] = node


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype in _FLOATS


def _in(spec: TensorSpec, dtype: str) -> TensorSpec:
    return replace(spec, dtype=dtype) if _is_float(spec) else spec


def _reads_floats(graph: Graph, node: Node) -> bool:
    return _is_float(graph.spec(node.inputs[0])) and not _says_dtype(node)


def _says_dtype(node: Node) -> bool:
    """Return whether the call sets the dtype of its result: a cast, or a reduction's ``dtype=``."""
    if node.rule is not None or not has_argument(node.op, "dtype"):
        return False
    names = [argument.name for argument in resolve(node.op)._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return given.get("dtype") is not None


def _keeps_format(node: Node, kind: str) -> bool:
    """Return whether an op of this ``kind`` (name) is computed in its captured dtype even under
    autocast."""
    is_own = not node.op.startswith("aten.") and kind not in _COUNTED
    return node.rule is not None or is_own or kind in LOWER or "batch_norm" in kind

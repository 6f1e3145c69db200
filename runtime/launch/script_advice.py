"""Advice where torch refuses a script's own code on weights that are spread."""

from __future__ import annotations

from ...planner.errors import UsageError

_PAGE = "docs/scripts.md has these lines for averages, penalties, norms and other optimizers"
_WHOLE = (
    "autoparallel.whole(tensor) gives the whole of it, on every rank; methods beside forward are "
    f"named to parallelize: methods=[...]; {_PAGE}"
)
_ADVICE = (
    ("mixed torch.Tensor and DTensor", "a plain tensor meets a weight that is spread", _WHOLE),
    ("reshape sharded dimension", "a weight that is spread cannot be given this shape", _WHOLE),
    ("Sharding propagation failed", "this op has no form for weights that are spread", _WHOLE),
    ("sharding strategy registered", "this op has no form for weights that are spread", _WHOLE),
    ("in-place operations", "this op cannot write to a weight that is spread", _WHOLE),
)


def advice_for(error: BaseException) -> UsageError | None:
    """Return AP944 with the line to write, for an error of torch about tensors that are spread."""
    text = str(error)
    if not isinstance(error, RuntimeError | NotImplementedError | TypeError):
        return None
    for sign, what, fix in _ADVICE:
        if sign in text:
            why = text.strip().splitlines()[0][:200]
            return UsageError("AP944", what, why=f"torch: {why}", fix=fix)
    return None

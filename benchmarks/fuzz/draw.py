"""Random models as Python text, from a seed.

In: a seed. Out: a ``Model``, a tree of snippets with what it is trained on, whose ``source()`` is a
module with a class ``Net`` and a function ``criterion``. The tree can be cut down (``shrink``).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field, replace

from benchmarks.fuzz.snippets import (
    GLUE,
    IMAGES,
    LAYERS,
    NORMS,
    PIXELS,
    POSITIONS,
    REGIONS,
    ROWS,
    SEQUENCE,
    Snippet,
)

ALTERNATIVES = re.compile(r"\{([^{}]*\|[^{}]*)\}")
NUMBER = re.compile(r"(?<=\w)@")

TARGETS = ("y", "t", "count", "share")
"""What a batch has for losses; ``count`` are all targets, ``share`` weights of rows."""

HEADER = """import torch
import torch.utils.checkpoint
import torch.nn.functional as F
from torch import nn

"""


@dataclass(frozen=True, slots=True)
class Part:
    """A snippet with its alternatives chosen, and the parts in it."""

    name: str
    init: str
    forward: str
    first: tuple[Part, ...] = ()
    second: tuple[Part, ...] = ()
    copies: int = 0
    """0 for parts of the model itself, else the number of layers of a class of their own."""


@dataclass(frozen=True, slots=True)
class Model:
    """A random model and what it is trained on.

    ``domain`` is "seq", "vec" or "img"; ``inputs`` "tokens" or "numbers"; ``head`` how x becomes
    outputs; ``form`` what the forward returns.
    """

    domain: str
    sizes: tuple[tuple[str, int], ...]
    inputs: str
    trunk: tuple[Part, ...]
    head: str
    loss: str
    form: str
    weights_are_buffer: bool = False
    shapes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", dict(self.sizes))

    @property
    def returns_loss(self) -> bool:
        return self.form != "outputs"

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the forward's arguments."""
        given = ["tokens" if self.inputs == "tokens" else "numbers"]
        given += ["mask"] if self.domain == "seq" else []
        needed = [name for name in TARGETS if name in _names(self.loss)] or ["t"]
        return (*given, *(needed if self.returns_loss else ()))

    def source(self) -> str:
        """Return the model as a module of Python."""
        writer = _Writer()
        body = writer.lines_of(self.trunk)
        init, forward = self._ends()
        inits, lines = [*init[0], *writer.init, *init[1]], [*forward[0], *body, *forward[1]]
        text = "\n".join(lines)
        if "aux" in text:
            lines.insert(len(forward[0]), "aux = 0.0")
        names = ", ".join(self.shapes)
        values = ", ".join(str(size) for size in self.shapes.values())
        parts = [HEADER + f"{names} = {values}\n", *writer.classes]
        parts.append(_class("Net", inits, self.arguments, lines))
        if not self.returns_loss:
            given = ", ".join(("o", *TARGETS, *(["mask"] if self.domain == "seq" else [])))
            parts.append(
                f"def criterion({given}):\n    return {self.loss.replace('WEIGHTS', _CAST)}\n"
            )
        return "\n\n".join(parts)

    def _ends(self) -> tuple[tuple[list[str], list[str]], tuple[list[str], list[str]]]:
        """The lines around the trunk: of the constructor, and of the forward."""
        width = "C" if self.domain == "img" else "D"
        first, last = [], []
        if self.inputs == "tokens":
            first.append("self.embed = nn.Embedding(V, D)")
            start = "x = self.embed(tokens)"
        elif self.domain == "img":
            first.append("self.stem = nn.Conv2d(3, C, 3, padding=1)")
            start = "x = self.stem(numbers)"
        else:
            first.append("self.stem = nn.Linear(5, D)")
            start = "x = self.stem(numbers)"
        out = f"nn.Linear({width}, K)"
        before = []
        if self.head == "tied":
            last += [
                "self.head = nn.Linear(D, V, bias=False)",
                "self.head.weight = self.embed.weight",
            ]
            out, before = "", ["o = self.head(x)[..., :K]"]
        elif self.head == "dense":
            out, before = "nn.Conv2d(C, K, 1)", ["o = self.head(x)"]
        else:
            before = [f"o = self.head({self.head})"]
        if out:
            last.append(f"self.head = {out}")
        loss = self.loss
        if self.returns_loss and "WEIGHTS" in loss:
            if self.weights_are_buffer:
                last.append(f"self.register_buffer('weights', {_WEIGHTS})")
            loss = loss.replace("WEIGHTS", "self.weights" if self.weights_are_buffer else _CAST)
        if not self.returns_loss:
            return (first, last), ([start], [*before, "return o"])
        uses_aux = any(_uses_aux(part) for part in self.trunk)
        before.append(f"loss = {loss}" + (" + aux" if uses_aux else ""))
        before.append(f"return {self.form}")
        return (first, last), ([start], before)


_WEIGHTS = "torch.linspace(0.3, 2.0, K)"
_CAST = f"{_WEIGHTS}.to(o.dtype)"


def _names(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w.'])[A-Za-z_]\w*", text))


def _uses_aux(part: Part) -> bool:
    own = "aux" in part.forward and part.name != "checkpointed"
    inner = part.name != "checkpointed" and any(map(_uses_aux, (*part.first, *part.second)))
    return own or inner


def _indented(lines: list[str], by: int) -> list[str]:
    return [" " * by + line if line else "" for line in lines]


def _class(name: str, init: list[str], arguments: tuple[str, ...], forward: list[str]) -> str:
    given = "".join(f", {each}" for each in arguments)
    return "\n".join(
        [
            f"class {name}(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *_indented("\n".join(init).split("\n"), 8),
            "",
            f"    def forward(self{given}):",
            *_indented("\n".join(forward).split("\n"), 8),
            "",
        ]
    )


class _Writer:
    """Text of parts: constructor lines, forward lines and classes, with numbered names."""

    def __init__(self) -> None:
        self.init: list[str] = []
        self.classes: list[str] = []
        self._number = 0

    def lines_of(self, parts: tuple[Part, ...]) -> list[str]:
        """Return the forward lines of parts and note their constructor lines and classes."""
        lines: list[str] = []
        for part in parts:
            self._number += 1
            lines += self._layers(part) if part.copies else self._own(part, str(self._number))
        return lines

    def _own(self, part: Part, number: str) -> list[str]:
        if part.init:
            self.init += NUMBER.sub(number, part.init).split("\n")
        lines: list[str] = []
        for line in NUMBER.sub(number, part.forward).split("\n"):
            place = line.strip()
            indent = len(line) - len(line.lstrip())
            if place in ("FIRST", "SECOND"):
                inner = self.lines_of(part.first if place == "FIRST" else part.second)
                lines += _indented(inner or ["pass"], indent)
            else:
                lines.append(line)
        return lines

    def _layers(self, part: Part) -> list[str]:
        number = self._number
        outer, self.init = self.init, []
        body = self.lines_of(part.first)
        has_aux = any(map(_uses_aux, part.first))
        takes_mask = any("mask" in line for line in body)
        arguments = ("x", *(("mask",) if takes_mask else ()))
        end = ["return x, aux" if has_aux else "return x"]
        start = ["aux = 0.0"] if has_aux or any("aux" in line for line in body) else []
        name = f"Block{number}"
        self.classes.append(_class(name, self.init, arguments, [*start, *body, *end]))
        self.init = outer
        self.init.append(
            f"self.layers{number} = nn.ModuleList({name}() for _ in range({part.copies}))"
        )
        call = f"layer({', '.join(arguments)})"
        inside = [f"x, a = {call}", "aux = aux + a"] if has_aux else [f"x = {call}"]
        return [f"for layer in self.layers{number}:", *_indented(inside, 4)]


def draw_model(seed: int | str) -> Model:
    """Return the random model of a seed."""
    rng = random.Random(f"model {seed}")
    domain = rng.choices(("seq", "vec", "img"), (5, 2.5, 2.5))[0]
    sizes = {"B": rng.choice((4, 4, 8, 8, 8, 6)), "K": rng.choice((3, 5))}
    if domain == "seq":
        sizes |= {
            "L": rng.choice((4, 6, 7, 8)),
            "D": rng.choice((8, 8, 12)),
            "H": 2,
            "V": rng.choice((11, 16)),
        }
    elif domain == "vec":
        sizes |= {"D": rng.choice((6, 8, 12)), "V": 16}
    else:
        sizes |= {"C": rng.choice((4, 6)), "S": rng.choice((4, 6))}
    trunk = _trunk(rng, domain)
    inputs = "tokens" if domain == "seq" and rng.random() < 0.7 else "numbers"
    if domain == "seq":
        head = "tied" if inputs == "tokens" and rng.random() < 0.25 else "x"
        losses = POSITIONS
        if rng.random() < 0.2 and head == "x":
            head, losses = rng.choice(("x.mean(1)", "x[:, 0]", "x[:, -1]", "x.amax(1)")), ROWS
    elif domain == "vec":
        head, losses = "x", ROWS
    elif rng.random() < 0.5:
        head, losses = "dense", PIXELS
    else:
        head, losses = (
            rng.choice(
                ("x.mean((2, 3))", "x.amax((-1, -2))", "F.adaptive_avg_pool2d(x, 1).flatten(1)")
            ),
            ROWS,
        )
    loss = _chosen(rng.choice(losses), rng)
    form = rng.choices(
        ("loss", "loss, o", "o, loss", "dict(loss=loss, logits=o)", "outputs"), (4, 2, 1, 2, 2)
    )[0]
    return Model(domain, tuple(sizes.items()), inputs, trunk, head, loss, form, rng.random() < 0.5)


def _trunk(rng: random.Random, domain: str) -> tuple[Part, ...]:
    parts: list[Part] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2))):
        some = _parts(rng, domain, rng.choice((1, 1, 2, 2, 3)), 2)
        copies = rng.choice((0, 0, 0, 1, 2, 2, 3, 5))
        parts += [Part("layers", "", "", some, copies=copies)] if copies else list(some)
    return tuple(parts)


def _parts(rng: random.Random, domain: str, count: int, depth: int) -> tuple[Part, ...]:
    return tuple(_part(rng, domain, depth) for _ in range(count))


def _part(rng: random.Random, domain: str, depth: int) -> Part:
    layers = {"seq": (*SEQUENCE, *LAYERS), "vec": LAYERS, "img": (*IMAGES, *LAYERS)}[domain]
    tables = [(layers, 5.0), (NORMS, 1.5), (GLUE, 2.2), (REGIONS, 1.6 if depth else 0.0)]
    table = rng.choices([each for each, _ in tables], [weight for _, weight in tables])[0]
    fitting = [each for each in table if domain in each.domains]
    snippet: Snippet = rng.choices(fitting, [each.weight for each in fitting])[0]
    first = (
        _parts(rng, domain, rng.choice((1, 1, 2)), depth - 1) if "FIRST" in snippet.forward else ()
    )
    while snippet.name == "checkpointed" and any(map(_trains_buffers, first)):
        first = _parts(rng, domain, 1, depth - 1)
    second = _parts(rng, domain, 1, depth - 1) if "SECOND" in snippet.forward else ()
    init, forward = _chosen(snippet.init, rng), _chosen(snippet.forward, rng)
    return Part(snippet.name, init, forward, first, second)


def _trains_buffers(part: Part) -> bool:
    """Return whether a part updates buffers, which plain PyTorch does twice when it recomputes."""
    signs = ("self.training", "BatchNorm", "batch_norm", "track_running_stats")
    own = any(sign in text for sign in signs for text in (part.init, part.forward))
    return own or any(map(_trains_buffers, (*part.first, *part.second)))


def _chosen(text: str, rng: random.Random) -> str:
    return ALTERNATIVES.sub(lambda match: rng.choice(match[1].split("|")), text)


def without(model: Model) -> list[Model]:
    """Return models that are smaller by one change, the largest changes first."""
    smaller = [replace(model, trunk=trunk) for trunk in _smaller(model.trunk)]
    simple = {"seq": "o.square().mean()", "vec": "o.square().mean()", "img": "o.square().mean()"}
    if model.form not in ("loss", "outputs"):
        smaller.append(replace(model, form="loss"))
    if "square().mean()" not in model.loss:
        smaller.append(replace(model, loss=simple[model.domain]))
    return smaller


def _smaller(parts: tuple[Part, ...]) -> list[tuple[Part, ...]]:
    found: list[tuple[Part, ...]] = []
    for i, part in enumerate(parts):
        before, after = parts[:i], parts[i + 1 :]
        found.append((*before, *after))
        if part.first:
            found.append((*before, *part.first, *after))
        if part.copies > 1:
            found.append((*before, replace(part, copies=part.copies - 1), *after))
        found += [(*before, replace(part, first=each), *after) for each in _smaller(part.first)]
        found += [(*before, replace(part, second=each), *after) for each in _smaller(part.second)]
    return found

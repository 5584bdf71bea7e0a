"""The styles of a tensor-parallel table: what can be done with a layer, a parameter or a module."""

import difflib
import re
from dataclasses import dataclass

_STYLE = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]*)\))?\s*")

STYLES = {
    "colwise": "a linear layer's output features, or an embedding's features, are split and stay split",
    "packed_colwise": "as colwise, for several layers fused into one: packed_colwise(3) for 3 equal parts, or their "
    "sizes, as in packed_colwise(64, 32, 32)",
    "colwise_gather": "a linear layer's output features are split, and its output is gathered",
    "rowwise": "a linear layer's input features are split, and its output is summed over the ranks",
    "vocab": "an embedding's rows are split, and its output is summed over the ranks",
    "replicate": "whole on every rank; replicate(sum_grad) where each rank applies it to activations of its own, so "
    "that its gradients are to be added",
    "slice": "slice(dim): a parameter, or a module's parameters, cut along a dimension; for what works element by "
    "element on split features",
    "heads": "an nn.MultiheadAttention's heads are split, and with them its packed weights; its out_proj is rowwise",
    "divide": "divide(name, ...): attributes of a module that are to be divided by the number of ranks, such as "
    "divide(num_heads); config.name for one of the module's config",
}
"""Every style and what it means."""


@dataclass(frozen=True)
class Style:
    """One entry's right-hand side.

    Args:
        kind: a key of :data:`STYLES`.
        sizes: of ``packed_colwise``: the number of equal parts, or the parts' sizes; of ``slice``: the
            dimension.
        names: of ``divide``: the attributes; of ``replicate``: ("sum_grad",) or nothing.
    """

    kind: str
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        options = ", ".join([*map(str, self.sizes), *self.names])
        return f"{self.kind}({options})" if options else self.kind

    @property
    def sums_gradients(self) -> bool:
        """Whether the gradients of what it names are partial on each rank and have to be added."""
        return self.kind == "replicate" and bool(self.names)


COLWISE = Style("colwise")
ROWWISE = Style("rowwise")
COLWISE_GATHER = Style("colwise_gather")
VOCAB = Style("vocab")
HEADS = Style("heads")
SUM_GRADIENTS = Style("replicate", names=("sum_grad",))


def parse_style(text: str) -> Style:
    """The style that `text` spells, such as ``"packed_colwise(3)"``.

    Raises:
        ValueError: an unknown style, with the nearest; options that it does not have, or needs and was not
            given.
    """
    match = _STYLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no style: write a name, or a name with options as in packed_colwise(3)")
    kind, inside = match.groups()
    if kind not in STYLES:
        near = difflib.get_close_matches(kind, STYLES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the styles are {', '.join(STYLES)}"
        raise ValueError(f"{kind!r} is no style; {hint}")
    options = [option.strip() for option in inside.split(",")] if inside and inside.strip() else []
    if kind == "divide":
        if not options or not all(re.fullmatch(r"(config\.)?\w+", option) for option in options):
            raise ValueError(f"{text!r}: divide needs the names of attributes, as in divide(num_heads)")
        return Style(kind, names=tuple(options))
    if kind == "replicate":
        if options not in ([], ["sum_grad"]):
            raise ValueError(f"{text!r}: replicate takes sum_grad or nothing")
        return Style(kind, names=tuple(options))
    if kind in ("packed_colwise", "slice"):
        least = 1 if kind == "packed_colwise" else 0
        if not options or not all(option.isdecimal() and int(option) >= least for option in options):
            raise ValueError(f"{text!r}: {kind} needs numbers, {STYLES[kind]}")
        if kind == "slice" and len(options) > 1:
            raise ValueError(f"{text!r}: slice takes one dimension, as in slice(0)")
        return Style(kind, sizes=tuple(map(int, options)))
    if options:
        raise ValueError(f"{text!r}: {kind} takes no options")
    return Style(kind)

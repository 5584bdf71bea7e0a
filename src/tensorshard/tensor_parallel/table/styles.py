"""The styles of a tensor-parallel table: what can be done with a layer, a parameter or a module."""

import difflib
import re
from dataclasses import dataclass

_STYLE = re.compile(r"\s*([a-z_]+)\s*(?:\(([^()]*)\))?\s*")

STYLES = {
    "colwise": "a linear layer's output features, a convolution's output channels, or an embedding's features, are "
    "split and stay split",
    "packed_colwise": "as colwise, for several layers fused into one: packed_colwise(3) for 3 equal parts, or their "
    "sizes, as in packed_colwise(64, 32, 32)",
    "colwise_shared": "as colwise, for key and value layers that have fewer heads than there are ranks: "
    "colwise_shared(2) for 2 heads, of which each rank holds a part, and gathers the rest from the ranks that use the "
    "same head; colwise_shared(2, 64, 16, 16) for queries, keys and values of these sizes fused into one layer",
    "colwise_gather": "a linear layer's output features, or a convolution's output channels, are split, and its output "
    "is gathered; colwise_gather(sum_grad) for a linear layer whose output each rank's own activations meet, so that "
    "its gradients are to be added",
    "rowwise": "a linear layer's input features, or a convolution's input channels, are split, and its output is "
    "summed over the ranks; rowwise(sum_grad) as colwise_gather(sum_grad)",
    "channels": "a module that computes channel by channel, or by groups of channels (batch, group and instance "
    "norms, grouped and depthwise convolutions): each rank has some of them, and their running statistics; "
    "channels(2) where they are 2 equal parts, each to be cut",
    "classes": "the classes of a ParallelLinearCrossEntropy are split, and its loss is that of all",
    "vocab": "an embedding's rows are split, and its output is summed over the ranks",
    "replicate": "whole on every rank; replicate(sum_grad) where each rank applies it to activations of its own, so "
    "that its gradients are to be added; replicate(divided) for what is added to each rank's part of a sum: it is "
    "divided by their number",
    "slice": "slice(dim): a parameter, or a module's parameters, cut along a dimension; for what works element by "
    "element on split features; slice(dim, parts) where there are several equal parts along it, each to be cut",
    "gather": "gather(dim): a parameter, or a module's parameters, of which each rank keeps a slice along a dimension; "
    "it is put together whenever its module is called, so that memory is split and computation is not; "
    "gather(dim, 1) for one that is read in the forward of the module around its own, 2 for the one around that",
    "sum": "a module whose parameters are sliced so that each rank computes its part of a sum, as of stacked experts: "
    "its output is summed over the ranks, and so are the gradients of its inputs",
    "heads": "an nn.MultiheadAttention's heads are split, and with them its packed weights; its out_proj is rowwise",
    "divide": "divide(name, ...): attributes of a module that are to be divided by the number of ranks, such as "
    "divide(num_heads); config.name for one of the module's config; name/2 for one that is to be divided by 2 instead; "
    "input.name.0/num_heads for an argument of its forward that has, along dimension 0, an entry for each of num_heads "
    "heads, or for each sample and head: each rank takes those of its heads; input.name.0 for one that has an entry "
    "for each head; reshape.sizes for the sizes that its "
    "forward reshapes and splits to, where it takes them from an input that has all features",
}
"""Every style and what it means."""


@dataclass(frozen=True)
class Style:
    """The right-hand side of one entry.

    Args:
        kind: a key of :data:`STYLES`.
        sizes: for ``packed_colwise``: the number of equal parts, or the parts' sizes. For ``colwise_shared``: the
            number of key-value heads, then the sizes of queries, keys and values if they are fused. For ``slice``: the
            dimension, and the number of parts along it if there are several. For ``gather``: the dimension, and how
            many modules further out it is read. For ``channels``: the number of parts.
        names: for ``divide``: the attributes. For ``replicate``, ``rowwise`` and ``colwise_gather``: ("sum_grad",) or
            nothing. For ``replicate`` also ("divided",).
    """

    kind: str
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        options = ", ".join([*map(str, self.sizes), *self.names])
        return f"{self.kind}({options})" if options else self.kind

    @property
    def parts(self) -> int:
        """For ``channels``: the number of equal parts that the channels consist of. Each part is split."""
        return self.sizes[0] if self.sizes else 1

    @property
    def sums_gradients(self) -> bool:
        """Whether each rank has only a part of the gradients of what the style names, so they have to be summed."""
        return self.kind == "replicate" and bool(self.names)

    @property
    def sums_output_gradients(self) -> bool:
        """The same for the gradients of the output of a row or gathered layer: each rank continues on its own."""
        return self.kind in _LEADING_IN and bool(self.names)


COLWISE = Style("colwise")
ROWWISE = Style("rowwise")
COLWISE_GATHER = Style("colwise_gather")
VOCAB = Style("vocab")
CLASSES = Style("classes")
HEADS = Style("heads")
COLUMN_KINDS = ("colwise", "packed_colwise", "colwise_shared")
"""Kinds after which each rank has its own features."""

_LEADING_IN = ("rowwise", "colwise_gather")
ROWWISE_INTO = Style("rowwise", names=("sum_grad",))
COLWISE_GATHER_INTO = Style("colwise_gather", names=("sum_grad",))
RESHAPE_SIZES = "reshape.sizes"
"""The one option of ``divide`` that is no attribute: sizes that a forward takes from its input."""
_DIVIDED = re.compile(r"reshape\.sizes|(config\.)?[^\W\d]\w*(/\d+)?|input\.[^\W\d]\w*\.\d+(/(config\.)?[^\W\d]\w*)?")
SUM = Style("sum")
CHANNELS = Style("channels")
SUM_GRADIENTS = Style("replicate", names=("sum_grad",))
DIVIDED = Style("replicate", names=("divided",))


def parse_style(text: str) -> Style:
    """The style that `text` spells, such as ``"packed_colwise(3)"``.

    Raises:
        ValueError: the style is unknown (the message names the nearest), or its options are wrong or missing.
    """
    match = _STYLE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a style: write a name, or a name with options as in packed_colwise(3)")
    kind, inside = match.groups()
    if kind not in STYLES:
        near = difflib.get_close_matches(kind, STYLES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the styles are {', '.join(STYLES)}"
        raise ValueError(f"{kind!r} is not a style; {hint}")
    options = [option.strip() for option in inside.split(",")] if inside and inside.strip() else []
    if kind == "divide":
        if not options or not all(_DIVIDED.fullmatch(option) for option in options):
            raise ValueError(
                f"{text!r}: divide needs the names of attributes, as in divide(num_heads), which may be followed by "
                f"what to divide by, as in divide(num_key_value_groups/2), or inputs, as in "
                f"divide(input.alibi.0/num_heads), or divide(reshape.sizes)"
            )
        if any((by := option.partition("/")[2]).isdecimal() and int(by) < 2 for option in options):
            raise ValueError(f"{text!r}: an attribute is divided by 2 or more, as in divide(num_key_value_groups/2)")
        return Style(kind, names=tuple(options))
    if kind in ("replicate", *_LEADING_IN):
        known = ["sum_grad", "divided"] if kind == "replicate" else ["sum_grad"]
        if len(options) > 1 or not set(options) <= set(known):
            raise ValueError(f"{text!r}: {kind} takes {' or '.join(known)} or nothing")
        return Style(kind, names=tuple(options))
    if kind in ("packed_colwise", "colwise_shared", "slice", "gather"):
        least = 0 if kind in ("slice", "gather") else 1
        if not options or not all(option.isdecimal() and int(option) >= least for option in options):
            raise ValueError(f"{text!r}: {kind} needs numbers, {STYLES[kind]}")
        if kind == "slice" and (len(options) > 2 or options[1:] == ["0"]):
            raise ValueError(f"{text!r}: slice takes one dimension, as in slice(0), and a number of parts if not 1")
        if kind == "gather" and len(options) > 2:
            raise ValueError(
                f"{text!r}: gather takes one dimension, as in gather(0), and how many modules further out it is read"
            )
        if kind == "colwise_shared" and len(options) not in (1, 4):
            raise ValueError(
                f"{text!r}: colwise_shared takes the number of key-value heads, as in colwise_shared(2), and for a "
                f"fused layer the sizes of its queries, keys and values, as in colwise_shared(2, 64, 16, 16)"
            )
        return Style(kind, sizes=tuple(map(int, options)))
    if kind == "channels" and options:
        if len(options) > 1 or not options[0].isdecimal() or int(options[0]) < 2:
            raise ValueError(f"{text!r}: channels takes a number of equal parts, as in channels(2), or nothing")
        return Style(kind, sizes=(int(options[0]),))
    if options:
        raise ValueError(f"{text!r}: {kind} takes no options")
    return Style(kind)

"""Pairs of narrow layers beside a linear layer, as LoRA adds them: y = W x + B A x, with A: in -> r and B: r -> out."""

from dataclasses import dataclass, field

from torch import nn

from tensorshard.common.dotted_names import join_names
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable


@dataclass(frozen=True)
class LowRankPairs:
    """The low-rank pairs of a block, each with the layer that it adds to; names are relative to the block.

    Where the layer is split by its outputs, A stays whole, and B is split as the layer is. Where it is split by its
    inputs, A is too, and B stays whole. So nothing as wide as the layer is communicated for the pair.

    Args:
        first: for each A, its layer.
        second: for each B, its layer.
    """

    first: dict[str, str] = field(default_factory=dict)
    second: dict[str, str] = field(default_factory=dict)

    def owner_of(self, name: str) -> str:
        """The module that calls `name`. One that calls only a layer and what is added to it does not count."""
        layer = self.first.get(name) or self.second.get(name) or name
        owner = layer.rpartition(".")[0]
        return owner.rpartition(".")[0] if layer in self.second.values() else owner


def low_rank_pairs(block: nn.Module) -> LowRankPairs:
    """Finds low-rank pairs by their shapes: one linear layer in a module, and in that module narrow ones alone."""
    pairs = LowRankPairs()
    for path, module in block.named_modules():
        linear = {n: s for n, m in module.named_children() if (s := as_splittable(m)) and s.kind == "linear"}
        inside = {n: s for n, m in module.named_modules() if (s := as_splittable(m)) and s.has_rows}
        for name, layer in linear.items():
            narrow = min(layer.inputs, layer.outputs)
            others = {n: s for n, s in inside.items() if n != name}
            first = {n: s.outputs for n, s in others.items() if s.inputs == layer.inputs and s.outputs < narrow}
            second = {n: s.inputs for n, s in others.items() if s.outputs == layer.outputs and s.inputs < narrow}
            if others and first.keys() | second.keys() == others.keys() and set(first.values()) == set(second.values()):
                whole = join_names(path, name)
                pairs.first.update(dict.fromkeys([join_names(path, n) for n in first], whole))
                pairs.second.update(dict.fromkeys([join_names(path, n) for n in second], whole))
    return pairs

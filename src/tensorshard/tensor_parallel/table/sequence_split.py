"""Sequence parallelism of a model's blocks, as data: what is split along the sequence, and where it is put together."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class SequenceSplit:
    """How one block computes on its part of a sequence (Korthikanti et al. 2022). Names are relative to the block.

    Between the split layers each rank has some of the positions and all features; within them all positions and some of
    the features.

    Args:
        ndim: dimensions of the input that is split. dim: the one along which the sequence runs.
        input: the tensor input of the block that is split, by its index among the leaves of (args, kwargs).
        outputs: the tensor outputs that are.
        columns: column layers that read the sequence, and whether they gather their input themselves; if not, a module
            around them did.
        modules: modules whose tensor inputs, by their indices, are gathered when they are called.
        whole: modules that are not split and mix positions: each rank runs all of them, on the whole sequence. Their
            tensor inputs that are gathered, and their outputs that are cut, by their indices.
        rows: row layers, whose summed output is scattered along the sequence.
        partial: parameters that are applied to parts of the sequence, so that their gradients are to be added.
        attentions: split ``nn.MultiheadAttention`` modules that read the sequence, and which of their tensor inputs
            come in parts, by their indices.
        scatters: whether the input comes whole, and is to be cut.
        gathers: whether the outputs are needed whole.
        copied: of the modules whose inputs are gathered, those that come in full, from elsewhere than the sequence, so
            that what each rank makes of them adds to their gradients.
        reshapes: whether reshapes of tensors with all positions ask for the length of a part, and are to get all.
    """

    ndim: int
    dim: int
    input: int
    outputs: tuple[int, ...]
    columns: Mapping[str, bool]
    modules: Mapping[str, tuple[int, ...]]
    whole: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    rows: tuple[str, ...]
    partial: tuple[str, ...]
    scatters: bool = False
    gathers: bool = False
    attentions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reshapes: bool = False
    copied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def linked(self, *, scatters: bool, gathers: bool) -> "SequenceSplit":
        """A copy of this split, with what happens at the block's ends."""
        return replace(self, scatters=scatters, gathers=gathers)

    def describe(self) -> str:
        """In a few words, without names of parameters."""
        places = [*(name for name, alone in self.columns.items() if alone), *self.modules, *self.attentions]
        whole = f", whole in {', '.join(self.whole)}" if self.whole else ""
        return f"dim {self.dim}, gathered for {', '.join(places)}, scattered by {', '.join(self.rows)}{whole}"

"""Sequence parallelism of a model's blocks, as data: what is split along the sequence, and where it is gathered."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class SequenceSplit:
    """How one block computes on its part of a sequence (Korthikanti et al. 2022). Names are relative to the block.

    Between the split layers, each rank has some of the positions and all features. Within the split layers, it has all
    positions and some of the features.

    Args:
        ndim: number of dimensions of the input that is split.
        dim: the dimension of the sequence.
        input: index of the tensor input that is split, among the leaves of (args, kwargs).
        outputs: indices of the tensor outputs that are split.
        columns: column layers that read the sequence, and whether they gather their input themselves. If not, a module
            around them gathers it.
        modules: modules that gather some of their tensor inputs when they are called: the indices of these inputs.
        whole: modules that are not split and mix positions. Each rank runs all of them, on the whole sequence. For
            each: the indices of the tensor inputs to gather, and of the outputs to cut.
        rows: row layers, whose summed output is scattered along the sequence.
        partial: parameters that are applied to parts of the sequence, so their gradients have to be summed.
        attentions: split ``nn.MultiheadAttention`` modules that read the sequence: the indices of their tensor inputs
            that come in parts.
        scatters: whether the input comes whole and has to be cut.
        gathers: whether the outputs are needed whole.
        copied: for modules in `modules`, the inputs that come in full from outside of the sequence. Each rank computes
            something else with them, so their gradients are summed.
        reshapes: whether reshapes of tensors with all positions ask for the length of a part, and have to be corrected.
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
        """A copy of this split that scatters its input, or gathers its outputs, as given."""
        return replace(self, scatters=scatters, gathers=gathers)

    def describe(self) -> str:
        """Describes the split in a few words, without names of parameters."""
        places = [*(name for name, alone in self.columns.items() if alone), *self.modules, *self.attentions]
        whole = f", whole in {', '.join(self.whole)}" if self.whole else ""
        return f"dim {self.dim}, gathered for {', '.join(places)}, scattered by {', '.join(self.rows)}{whole}"

"""Smaller batches: fewer samples, shorter sequences, smaller images."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tensorshard.model.batches import batch_size
from tensorshard.model.tensors import map_tensors_once, tensor_leaves
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.pytree import tree_map

_POSITIONS = 12
_PIXELS = 96  # of a side: deep models for images still have several positions in the end
_SAMPLES = 2  # of a micro-batch, since batch norms need several
_TOKENS = re.compile(r"(^|_)input_ids$|^(src|tgt)_tokens$")
_LABELS = "labels"
_FADE = 0.9


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of a whole step, of all data ranks, and what of them is smaller than what was given."""

    inputs: Any
    targets: Any
    said: tuple[str, ...] = ()

    def with_tokens(self, model: nn.Module, tokens: Callable[[torch.Tensor], torch.Tensor] | None) -> "Batch":
        """The batch in another vocabulary; `model`, of transformers, says where its tokens are.

        Targets are tokens if the model has output embeddings.
        """
        if tokens is None:
            return self
        find: Any = getattr(model, "get_output_embeddings", None)
        predicts = find is not None and find() is not None
        return replace(
            self,
            inputs=_inputs_with_tokens(model, self.inputs, tokens, labels=predicts),
            targets=tree_map(lambda leaf: tokens(leaf) if predicts and _may_be_tokens(leaf) else leaf, self.targets),
        )


def fewer_samples(inputs: Any, targets: Any, plan: Plan) -> Batch:
    """The first samples: as many as the data ranks and micro-batches of a resolved `plan` need.

    If there are too few, copies of them follow in which numbers are smaller and integers moved by one sample, so that
    no two samples are equal.
    """
    given = batch_size(inputs)
    wanted = plan.dp_size * plan.micro_batches * _SAMPLES

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.size(0) != given:
            return tensor
        tensor = tensor.detach().cpu()
        if wanted <= given:
            return tensor[:wanted].clone()
        times = -(-wanted // given)
        return torch.cat([_another(tensor, copy) for copy in range(times)])[:wanted]

    inputs, targets = map_tensors_once(cut, [inputs, targets])
    if wanted <= given:
        said = f"{wanted} of {given} samples" if wanted < given else f"all {given} samples"
    else:
        said = f"{wanted} samples, made of the {given} given"
    return Batch(inputs, targets, (said,))


def _another(tensor: torch.Tensor, copy: int) -> torch.Tensor:
    """The same samples, changed. Masks stay, and so do indices within a sample."""
    if not copy:
        return tensor
    if tensor.is_floating_point():
        is_mask = bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())
        return tensor if is_mask else tensor * _FADE**copy
    if tensor.dim() > 1 and tensor.dtype == torch.long and (tensor != tensor[..., :1]).any():
        return tensor if _is_sorted(tensor) else tensor.flip(-1) if copy % 2 else tensor.roll(copy, -1)
    return tensor.roll(copy, 0)


def _is_sorted(tensor: torch.Tensor) -> bool:
    """Whether it may hold positions, segments or a mask rather than tokens."""
    return bool((tensor[..., 1:] >= tensor[..., :-1]).all() or (tensor[..., 1:] <= tensor[..., :-1]).all())


def smaller_samples(batch: Batch, plan: Plan) -> Batch | None:
    """The batch with shorter sequences or smaller images; None if it has none that are long or large.

    A length that divides evenly by the ranks along it still does, and one that does not still does not.
    """
    ranks = 2 * plan.cp * plan.tp
    leaves = [leaf for leaf in tensor_leaves(batch.inputs) if leaf.dim() > 1]
    sizes: dict[int, int] = {}
    if leaves and all(leaf.dim() == 4 and leaf.is_floating_point() for leaf in leaves):
        said = "pixels of a side"
        sizes = {size: _PIXELS for leaf in leaves for size in leaf.shape[2:] if size > _PIXELS * 4 // 3}
    else:
        said = "positions"
        numbers = [leaf for leaf in leaves if not leaf.is_floating_point()]
        lengths = sorted({t.size(1) for t in numbers} or {t.size(1) for t in leaves if t.dim() == 3})
        for place, length in enumerate(lengths, 1):
            short = -(-_POSITIONS * place // ranks) * ranks + length % ranks
            if short < length:
                sizes[length] = short
    if not sizes:
        return None

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        for dim in range(1, tensor.dim()):
            if tensor.size(dim) in sizes and not (dim == tensor.dim() - 1 and _is_features(tensor)):
                tensor = tensor.narrow(dim, 0, sizes[tensor.size(dim)])
        return tensor.contiguous()

    inputs, targets = map_tensors_once(cut, [batch.inputs, batch.targets])
    return Batch(inputs, targets, (*batch.said, *(f"{small} of {size} {said}" for size, small in sizes.items())))


def _is_features(tensor: torch.Tensor) -> bool:
    """Whether its last dimension is that of channels."""
    return tensor.dim() < 4 and tensor.is_floating_point()


def _inputs_with_tokens(
    model: nn.Module, inputs: Any, tokens: Callable[[torch.Tensor], torch.Tensor], *, labels: bool
) -> Any:
    def again(name: str, value: Any) -> Any:
        found = _TOKENS.search(name) or (labels and name == _LABELS)
        return tokens(value) if found and _may_be_tokens(value) else value

    if isinstance(inputs, Mapping):
        return {name: again(name, value) for name, value in inputs.items()}
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    if isinstance(inputs, tuple | list):
        return type(inputs)(again(name, value) for name, value in zip(names, inputs, strict=False))
    return again(names[0], inputs)


def _may_be_tokens(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.dtype in (torch.long, torch.int)

"""Rows that values choose, as the tokens of an expert: which tokens they are, so that their numbers belong to these."""

from typing import Any, NamedTuple

import torch

from tensorshard.torch_private.pytree import tree_tensors

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x2545F4914F6CDD1D


class Routed(NamedTuple):
    """Where the rows of a draw come from, as a trial run showed.

    Args:
        chosen: the module that is called with chosen rows, such as an expert.
        source: the module whose input has all of them, such as a mixture of experts.
        rows: how many rows that has for each sample.
        size: how many numbers are drawn for a row.
    """

    chosen: str
    source: str
    rows: int
    size: int


class Rows(NamedTuple):
    """Rows that a module computes, and what they are.

    Args:
        tensor: [rows, features]; None where nothing is chosen of them.
        numbers: int64 [rows]: of each in the whole batch, where a sample's rows follow one another.
        per_sample: how many each sample has.
        module: the name of the module; None for rows of several ranks, or of a part of each sequence.
    """

    tensor: torch.Tensor | None
    numbers: torch.Tensor
    per_sample: int
    module: str | None = None


def rows_of(inputs: Any) -> torch.Tensor | None:
    """The first input of at least two dimensions, as [rows, features]."""
    found = next((t for t in tree_tensors(inputs) if t.dim() > 1 and t.is_floating_point()), None)
    rows = None if found is None else found.detach().flatten(0, -2)
    return rows if type(rows) is torch.Tensor else None  # a part of a sequence has the whole's shape


def find_rows(chosen: torch.Tensor, source: torch.Tensor) -> torch.Tensor | None:
    """The place of each row of `chosen` in `source`, by their values: int64 [rows].

    Equal rows are taken in their order. None if one is not there, or if some, but not all, of several equal ones are
    chosen, or one is chosen twice.
    """
    if chosen.shape[1:] != source.shape[1:] or chosen.dtype != source.dtype or len(chosen) > len(source):
        return None
    keys, order = _hashes(source).sort(stable=True)
    wanted, wanted_order = _hashes(chosen).sort(stable=True)
    first, end = torch.searchsorted(keys, wanted), torch.searchsorted(keys, wanted, right=True)
    own_first, own_end = torch.searchsorted(wanted, wanted), torch.searchsorted(wanted, wanted, right=True)
    if not torch.equal(end - first, own_end - own_first):
        return None
    places = torch.empty_like(order[: len(chosen)])
    places[wanted_order] = order[first + torch.arange(len(wanted), device=wanted.device) - own_first]
    return places if torch.equal(source[places], chosen) else None


def _hashes(rows: torch.Tensor) -> torch.Tensor:
    """An int64 for each row, the same wherever it is. The order in which it is summed changes no bit."""
    bits = rows.view(_INTEGERS[rows.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.size(1) + 1, device=rows.device)
    return ((bits + places) * (2 * places + _ODD)).sum(1)

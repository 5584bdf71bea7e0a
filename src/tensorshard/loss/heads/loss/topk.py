"""The largest logits over the classes of all ranks."""

import torch
import torch.distributed as dist

from tensorshard.comm import primitives
from tensorshard.loss.heads.tiles.tiles import Tiles
from tensorshard.loss.softmax_cross_entropy import cap


def largest_logits(
    tiles: Tiles, k: int, start: int, group: dist.ProcessGroup | None, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, k] logits, capped, largest first; and [N, k] their classes, counted over all ranks.

    Args:
        k: at most the classes of all ranks.
        start: this rank's first class.
    """
    samples = len(tiles.input)
    best = tiles.input.new_full((samples, k), -torch.inf, dtype=tiles.precision.wide)
    classes = torch.zeros((samples, k), dtype=torch.long, device=best.device)
    for tile in tiles:
        weight = tiles.weight(tile)
        tiles.note_norms(tile, weight)
        logits = tiles.logits(tile, weight)
        logits = logits if softcap is None else cap(logits, softcap)
        values, columns = logits.topk(min(k, tile.width), dim=1)
        best, classes = _merge(torch.cat([best, values], 1), torch.cat([classes, columns + (start + tile.begin)], 1), k)
    if group is not None and group.size() > 1:
        best = primitives.gather_flat(best, group).transpose(0, 1).flatten(1)
        classes = primitives.gather_flat(classes, group).transpose(0, 1).flatten(1)
        best, classes = _merge(best, classes, k)
    return best, classes


def _merge(values: torch.Tensor, classes: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    best, places = values.topk(k, dim=1)
    return best, classes.gather(1, places)

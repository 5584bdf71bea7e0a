"""Partial FC's sampling of classes (An et al. 2022)."""

import torch


def sample_classes(targets: torch.Tensor, start: int, held: int, rate: float, most: int) -> torch.Tensor:
    """Some of this rank's classes, ascending: those of targets, and others at random up to `rate` of all.

    It takes at least as many classes as there are targets. So it need not know how many of them are this rank's, which
    would mean waiting for the GPU. They are drawn from the device's default generator, so that recomputation draws the
    same.

    Args:
        targets: class numbers, counted over all ranks.
        start, held: this rank's first class, and how many it has.
        rate: in (0, 1].
        most: the most classes that a rank holds. Every rank draws so many numbers. So equal generators stay equal, and
            later dropout is the same on all ranks.
    """
    count = min(held, max(round(rate * held), targets.numel()))
    order = torch.rand(most + 1, device=targets.device)
    local = targets.flatten() - start
    order[local.where((local >= 0) & (local < held), most)] = 2.0  # targets of other ranks mark the last place
    return order[:held].topk(count).indices.sort().values

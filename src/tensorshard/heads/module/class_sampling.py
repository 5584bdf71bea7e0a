"""Partial FC's sampling of classes (An et al. 2022)."""

import torch


def sample_classes(targets: torch.Tensor, start: int, held: int, rate: float, most: int) -> torch.Tensor:
    """Some of this rank's classes, ascending: those that are targets, and others at random up to `rate` of all.

    At least as many as there are targets are taken, so that how many need not be known, which a GPU would have to be
    waited for. They are drawn from the default generator of the device, so that recomputation draws the same.

    Args:
        targets: numbered over all ranks.
        start, held: this rank's classes.
        rate: in (0, 1].
        most: the most classes that a rank holds. All ranks draw as many numbers, so that their generators, if equal,
            stay so, and what comes after is dropped alike on all.
    """
    count = min(held, max(round(rate * held), targets.numel()))
    order = torch.rand(most + 1, device=targets.device)
    local = targets.flatten() - start
    order[local.where((local >= 0) & (local < held), most)] = 2.0  # what is held elsewhere marks the last place
    return order[:held].topk(count).indices.sort().values

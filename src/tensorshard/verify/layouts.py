"""``verify_layout``: other people's parallel training, compared with one process."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorshard.comm.world import join_world
from tensorshard.common.words import kind_of
from tensorshard.trainer.launch.notebook import notebook_launch
from tensorshard.verify.compare import compare
from tensorshard.verify.culprit import find_culprit
from tensorshard.verify.record import Record, TorchSource, plain_name, record
from tensorshard.verify.verification import Verification, versions

Layout = Callable[[], tuple[nn.Module, Callable[[int], Any]]]
Gather = Callable[[str, torch.Tensor], torch.Tensor]


def verify_layout(
    reference: Layout,
    parallel: Layout,
    *,
    ranks: int = 4,
    steps: int = 3,
    gather: Gather | None = None,
    rename: Callable[[str], str] | None = None,
    timeout: float = 120.0,
) -> Verification:
    """Is what `parallel` trains on some ranks what `reference` trains in one process? For layouts of any library.

    Both are functions without arguments that build a model and return ``(model, step)``. ``step(i)`` takes training
    step `i` (0, 1, ...) on the global batch of that number, of which each rank takes its share, and returns the loss or
    None. They have to start from the same weights: seed torch before the constructor.

    `reference` runs in a process of its own, `parallel` on `ranks` of them, forks of this one that have joined a Gloo
    world. The functions may be closures. Compared are the loss (the mean over the ranks), every gradient before
    clipping, the norm that ``clip_grad_norm_`` returned, every weight, buffer and optimizer state after each step. How
    much rounding may make of it is measured: the reference runs once more from weights that are changed in their last
    place.

    Args:
        reference: the layout that is right, on one process.
        parallel: the layout in question: FSDP2, DDP, DeepSpeed, Accelerate, DTensor, or written by hand. DTensors and
            DeepSpeed's parameters are read whole. A plain tensor of the reference's shape has to be the same on each
            rank that has it.
        ranks: how many processes.
        steps: how many steps.
        gather: ``gather(name, tensor)`` returns the whole tensor of a plain one that has another shape than in the
            reference, such as a weight of a tensor-parallel layer written by hand. Every rank calls it.
        rename: makes the reference's name of a name on the ranks. What wrappers add (``module.``, ``_orig_mod.``) is
            gone already.
        timeout: seconds that each of the two may take.

    Returns:
        The verdict: true if all agree. ``describe()`` says it in a few lines, ``culprit`` what went wrong first.

    Raises:
        TypeError, ValueError: an argument makes no sense.
        RankFailedError: a function raised an error, returned something else, or has a tensor that is not whole. The
            message says which, with the traceback of the rank.
        TimeoutError: it took longer than `timeout`; ranks that wait for each other do.

    Examples:
        >>> def reference():
        ...     torch.manual_seed(0)
        ...     model = torch.nn.Linear(4, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def step(i):
        ...         loss = model(torch.ones(8, 4) * i).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         return loss
        ...     return model, step
        >>> bool(ts.verify_layout(reference, reference, ranks=2))
        True
    """
    _check(reference, parallel, ranks, steps)
    begin = time.monotonic()
    to_name = _renaming(rename)
    plain, disturbed = notebook_launch(partial(_alone, reference, steps), ranks=1, timeout=timeout)[0]
    shapes = {name: value.shape for name, value in plain.initial.items()}
    records = notebook_launch(partial(_on_rank, parallel, steps, shapes, gather, to_name), ranks=ranks, timeout=timeout)
    _share_losses(records)
    comparison = compare(plain, disturbed, records, None)
    culprit = find_culprit(plain, disturbed, records, comparison, None)
    facts = {
        "reference": _name(reference),
        "parallel": _name(parallel),
        "ranks": ranks,
        "steps": steps,
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        **versions(),
    }
    return Verification(_name(parallel), comparison, culprit, ranks, steps, time.monotonic() - begin, facts)


def _check(reference: Any, parallel: Any, ranks: Any, steps: Any) -> None:
    for name, function in (("reference", reference), ("parallel", parallel)):
        if not callable(function) or isinstance(function, nn.Module):
            raise TypeError(
                f"{name} is {kind_of(function)}; it must be a function without arguments that builds a model "
                f"and returns (model, step), where step(i) takes training step i"
            )
    for name, number in (("ranks", ranks), ("steps", steps)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} is {number!r}; it must be a number from 1 on")


def _renaming(rename: Callable[[str], str] | None) -> Callable[[str], str]:
    return plain_name if rename is None else lambda name: rename(plain_name(name))


def _built(function: Layout) -> tuple[nn.Module, Callable[[int], Any]]:
    made = function()
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module) or not callable(made[1]):
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"{kind_of(made)}"
        raise TypeError(
            f"{_name(function)} returned {what}; it must return (model, step): an nn.Module, and a function step(i) "
            f"that takes training step i"
        )
    return made


def _alone(function: Layout, steps: int) -> tuple[Record, Record]:
    """The reference, and once more from weights that differ in their last place."""
    records = []
    for is_disturbed in (False, True):
        model, take_step = _built(function)
        if is_disturbed:
            disturb(model)
        records.append(record(TorchSource(model, rename=plain_name), model, take_step, steps, plain_name))
    return records[0], records[1]


@torch.no_grad()
def disturb(model: nn.Module, eps: float | None = None) -> None:
    """Changes each weight by its dtype's `eps`, relative, up or down: in its last place or so."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            step = torch.finfo(parameter.dtype).eps if eps is None else eps
            parameter.mul_(1 + signs.to(parameter.dtype) * step)


def _on_rank(
    function: Layout, steps: int, shapes: dict[str, torch.Size], gather: Gather | None, rename: Callable[[str], str]
) -> Record:
    join_world(torch.device("cpu"))
    model, take_step = _built(function)
    source = TorchSource(model, shapes=shapes, gather=gather, rename=rename)
    return record(source, model, take_step, steps, rename)


def _share_losses(records: Sequence[Record]) -> None:
    """Each record gets the mean loss of all ranks."""
    for steps in zip(*(one.steps for one in records), strict=True):
        losses = [step.loss for step in steps if step.loss is not None]
        for step in steps:
            step.loss = sum(losses) / len(losses) if losses else None


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", type(function).__name__).replace("<locals>.", "")

"""The numbers that an Engine draws, for a loop on one process without an Engine."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tensorshard.model.forward_contexts import surround_parts
from tensorshard.random.call_sites import ModelRandomness
from tensorshard.random.trial_runs import TrialModel, samples_of
from tensorshard.torch_private.autograd import is_in_backward

_REMEDY = "leave ts.same_randomness out, and let it draw from torch's generator"


@contextmanager
def same_randomness(model: nn.Module, seed: int = 0) -> Iterator[ModelRandomness]:
    """Within this, each random number that `model` draws belongs to an element, and depends on nothing else.

    It is a function of the seed, the step, the call that draws and the element's place in the whole batch: what was
    drawn before, recomputation and torch's own seed do not matter. The step is how often an optimizer with parameters
    of `model` has updated, of several the one that did most often. An Engine draws the same under every plan with
    ``random="same"``, the default, and the same seed.
    Put it around the whole loop, on one process, evaluations too; it leaves the model as it was.

    Args:
        model: not laid out. It is called on whole batches, or its parts and methods are.
        seed: of all numbers.

    Raises:
        DrawRefusedError: in a forward: the numbers would not be the same at every layout; the message says why.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
        >>> with ts.same_randomness(model, seed=1):
        ...     first = model(torch.ones(2, 4))
        >>> with ts.same_randomness(model, seed=1):
        ...     again = model(torch.ones(2, 4))
        >>> torch.equal(first, again)
        True
    """
    randomness = ModelRandomness(lambda: seed, make_trial(model), model.named_modules(), remedy=_REMEDY)
    opened: list[ExitStack] = []
    steps: Counter[int] = Counter()
    own = {id(parameter) for parameter in model.parameters()}

    def count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            steps[id(optimizer)] += 1

    def alone(name: str, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        randomness.begin_step(max(steps.values(), default=0))
        return randomness.part(name, (args, kwargs), 0)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        opened.append(ExitStack())
        randomness.begin_step(max(steps.values(), default=0))
        samples = samples_of((args, kwargs))
        if randomness.next_first is None:
            randomness.continue_with(0, samples)
        else:
            randomness.begin_samples(randomness.next_first, samples)
            randomness.next_first = None
        randomness.note_inputs((args, kwargs))
        opened[-1].enter_context(randomness.forward())

    def leave(*_: Any) -> None:
        if opened:
            opened.pop().close()

    with ExitStack() as hooks:
        hooks.callback(randomness.end)
        for undo in surround_parts(model, alone, lambda: not (randomness.is_running or is_in_backward())).values():
            hooks.callback(undo)
        for handle in (
            model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            model.register_forward_hook(leave, always_call=True),
            register_optimizer_step_post_hook(count),
        ):
            hooks.callback(handle.remove)
        yield randomness


def make_trial(model: nn.Module) -> TrialModel | Exception:
    """For trial runs of `model` as it is now; the error if it cannot be copied."""
    try:
        return TrialModel(model)
    except Exception as error:  # code of the user's, such as a __deepcopy__
        return error

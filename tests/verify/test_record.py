"""When a step's gradients are read."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from tensorshard.verify.record import TorchSource, plain_name, record


def _recorded(update):
    """The record of one step of a linear layer, and its gradient before `update(model, optimizer)`."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []

    def step(_):
        nonlocal optimizer
        model(torch.ones(4, 3)).square().sum().backward()
        seen.append(model.weight.grad.clone())
        update(model, optimizer)
        optimizer.step()

    return record(TorchSource(model, rename=plain_name), model, step, 1, plain_name).steps[0], seen[0]


def _clip(model, _):
    clip_grad_norm_(model.parameters(), 0.1)


def _clip_by_a_given_norm(model, _):
    gradients = [parameter.grad for parameter in model.parameters()]
    clip_grads_with_norm_(model.parameters(), 0.1, get_total_norm(gradients))


@pytest.mark.parametrize("clip", [_clip, _clip_by_a_given_norm])
def test_before_clipping(clip):
    step, gradient = _recorded(clip)
    torch.testing.assert_close(step.gradients["weight"], gradient)
    assert step.norm is not None
    assert step.clipped == pytest.approx(0.1 / step.norm, rel=1e-3)


def test_not_before_an_update_that_makes_states_alone():
    def make_states(model, optimizer):
        kept = [parameter.grad for parameter in model.parameters()]
        rates = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient

    step, gradient = _recorded(make_states)
    torch.testing.assert_close(step.gradients["weight"], gradient)
    assert step.clipped is None


def test_before_the_only_update_even_where_its_rate_is_zero():
    def stop(_, optimizer):
        optimizer.param_groups[0]["lr"] = 0.0

    step, gradient = _recorded(stop)
    torch.testing.assert_close(step.gradients["weight"], gradient)

"""Checks the arguments of ``parallelize``, before anything is allocated or a world is joined."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensorshard.plan.plan import Plan


def check_arguments(model: Any, plan: Any, optimizer: Any, loss_fn: Any, seed: Any) -> None:
    """Refuses arguments of :func:`tensorshard.parallelize` of the wrong kind.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}; it must be a tensorshard.Plan")
    _check_model(model)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise TypeError(
            f"optimizer is a {type(optimizer).__name__}; it must be a callable from parameters to an optimizer, such "
            f"as functools.partial(torch.optim.AdamW, lr=3e-4), because the parameters it updates do not exist yet"
        )
    if not callable(loss_fn):
        raise TypeError(f"loss_fn is a {type(loss_fn).__name__}; it must be a callable (output, targets) -> loss")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn is the class {loss_fn.__name__} itself; it must be an object of it: pass {loss_fn.__name__}()"
        )
    _check_takes_two(loss_fn)
    _check_has_no_parameters(loss_fn)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise (ValueError if isinstance(seed, int) else TypeError)(
            f"seed is {seed!r}; it must be an integer of at least 0, the same on every rank"
        )


def as_device(device: torch.device | str) -> torch.device:
    """The device that the user named for this rank.

    Raises:
        ValueError: the device does not exist, or not on this machine.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"there is no device {device!r}; use 'cpu' or 'cuda', or leave device out") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} was given; plans run on 'cpu' or 'cuda'")
    if found.type == "cpu":
        return found
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ValueError(f"device {device!r} was given, but there is no CUDA device here; use 'cpu', or leave it out")
    if found.index is not None and found.index >= count:
        raise ValueError(f"device {device!r} was given, but there are {count} CUDA devices here, from 'cuda:0' on")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _check_model(model: Any) -> None:
    if isinstance(model, str):
        raise TypeError(
            f"model is a str; it must be an nn.Module or a callable that returns one. For weights in files give "
            f"tensorshard.from_pretrained({model!r})"
        )
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; it must be an nn.Module or a callable that returns one")
    if isinstance(model, nn.Module):
        return
    missing = _refused_call(model)
    if missing is not None:
        raise TypeError(
            f"{getattr(model, '__name__', type(model).__name__)} was given as the model, and is called as model() "
            f"({missing}); pass its arguments with functools.partial(...) or a lambda"
        )


def _check_takes_two(loss_fn: Any) -> None:
    called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    refused = _refused_call(called, None, None)
    if refused is not None:
        raise TypeError(
            f"loss_fn takes {inspect.signature(called)}, and is called as loss_fn(output, targets) ({refused}); if "
            f"the model computes its own loss, pass lambda output, targets: output"
        )


def _check_has_no_parameters(loss_fn: Any) -> None:
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        raise ValueError(
            f"loss_fn is a {type(loss_fn).__name__} with parameters ({', '.join(names[:3])}), which the Engine would "
            f"not train, split or save: make it the model's last layer, called with the targets in the model's "
            f"forward, pass (inputs, targets) as inputs, and loss_fn=lambda output, targets: output"
        )


def _refused_call(function: Callable[..., Any], *args: Any) -> str | None:
    """Why ``function(*args)`` does not fit its signature; None if it does, or if the signature is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions in C
        return None
    try:
        signature.bind(*args)
    except TypeError as error:
        return str(error)
    return None

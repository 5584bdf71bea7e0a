"""What runs around what in a model's forward: the order of the roles decides, not that of the registrations."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tensorshard.model.forward_contexts import RootRole, hook_root, surround_root

ROLES = (RootRole.DATA_PARALLEL, RootRole.PRECISION, RootRole.WHOLE_PARAMETERS)


@pytest.mark.parametrize(
    "order", list(itertools.permutations(ROLES)), ids=lambda order: "-".join(r.name for r in order)
)
def test_roles_are_nested_in_their_order(order):
    log: list[str] = []

    @contextmanager
    def within(role: RootRole) -> Iterator[None]:
        log.append(f"enter {role.name}")
        yield
        log.append(f"leave {role.name}")

    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda *_: log.append("earlier hook"))
    for role in order:
        surround_root(model, role, lambda role=role: within(role))
    model.register_forward_pre_hook(lambda *_: log.append("later hook"), prepend=True)
    model(torch.ones(2))
    names = [role.name for role in ROLES]
    entered = [f"enter {name}" for name in reversed(names)]
    assert log == ["later hook", *entered, "earlier hook", *(f"leave {name}" for name in names)]


def test_hooks_of_one_role_and_after_an_error():
    log: list[str] = []
    model = nn.Linear(2, 2)
    hook_root(model, RootRole.WHOLE_PARAMETERS, after=lambda *_: log.append("outer"), always=True)
    hook_root(model, RootRole.PRECISION, after=lambda *_: log.append("first"), always=True)
    hook_root(model, RootRole.PRECISION, after=lambda *_: log.append("second"), always=True)
    hook_root(model, RootRole.TRANSFERS, after=lambda *_: log.append("not after an error"))
    with pytest.raises(RuntimeError):
        model(torch.ones(3))
    assert log == ["first", "second", "outer"]

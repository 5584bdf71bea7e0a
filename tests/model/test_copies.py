"""Copies of modules: nothing is shared that may change, and code refers to the copy."""

import itertools
import math
import random
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tensorshard.model.copies import copy_module
from tensorshard.torch_private.fake_tensors import FakeTensorMode


class Holder(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


def test_what_attributes_share_they_share_in_the_copy():
    shared = {"state": [0]}
    module = Holder(one=shared, other=[shared], table=torch.ones(3))
    module.view = module.table[1:]
    copied = copy_module(module, {})
    assert copied.one is copied.other[0] and copied.one is not shared
    copied.table.fill_(5.0)
    assert copied.view.tolist() == [5.0, 5.0] and module.table.tolist() == [1.0, 1.0, 1.0]


def closure(module):
    def run(x):
        return module.layer(x)

    return run


def closure_of_a_closure(module):
    inner = closure(module)

    def run(x):
        return inner(x)

    return run


def default(module):
    def run(x, layer=module.layer):
        return layer(x)

    return run


WAYS = {
    "closure": closure,
    "closure of a closure": closure_of_a_closure,
    "default": default,
    "method": lambda module: module.layer.forward,
    "partial": lambda module: partial(nn.Linear.forward, module.layer),
    "module": lambda module: module.layer,
}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_code_in_attributes_runs_the_copys_modules(make):
    module = Holder()
    vars(module)["run"] = {"inside": (make(module),)}
    weight = nn.Parameter(torch.zeros(2, 2))
    copied = copy_module(module, {id(module.layer.weight): weight})
    x = torch.ones(1, 2)
    assert torch.equal(copied.run["inside"][0](x), module.layer.bias[None].detach())
    assert copied.layer.weight is weight


def test_modules_reached_through_objects_and_weak_references_are_the_copys():
    module = Holder()
    module.object = SimpleNamespace(layers=[module.layer], parameter=module.layer.weight)
    module.weak = weakref.ref(module.layer)
    module.proxy = weakref.proxy(module)
    copied = copy_module(module, {})
    assert copied.object.layers[0] is copied.layer and copied.object.parameter is copied.layer.weight
    assert copied.weak() is copied.layer and copied.proxy.layer is copied.layer


def test_what_cannot_be_copied_is_shared():
    lock = threading.Lock()
    module = Holder(lock=lock, module=math, generator=(i for i in range(3)), held=[lock], kind=nn.Linear)
    copied = copy_module(module, {})
    assert copied.lock is lock and copied.held[0] is lock and copied.held is not module.held
    assert copied.module is math and copied.generator is module.generator and copied.kind is nn.Linear


def test_generators_of_random_numbers_are_of_the_copys_own():
    module = Holder(torchs=torch.Generator().manual_seed(3), pythons=random.Random(3), count=itertools.cycle([1, 2]))
    copied = copy_module(module, {})
    drawn = torch.rand(3, generator=copied.torchs), copied.pythons.random()
    assert torch.equal(drawn[0], torch.rand(3, generator=module.torchs)) and drawn[1] == module.pythons.random()


def test_results_of_a_computation_lose_their_graph():
    module = Holder()
    module.computed = module.layer.weight * 2
    copied = copy_module(module, {})
    assert copied.computed.is_leaf and torch.equal(copied.computed, module.computed)


def test_plain_tensors_are_copied_under_a_fake_mode_too():
    module = Holder(table=torch.ones(3))
    with FakeTensorMode():
        copied = copy_module(module, {})
    assert type(copied.table) is torch.Tensor and copied.table is not module.table

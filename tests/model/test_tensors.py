"""Tensors in nested structures: found and mapped in one order, in dataclasses too."""

import pickle
import warnings
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tensorshard.model.tensors import map_tensors, map_tensors_once, storage_key, take_apart, tensor_leaves


@dataclass
class Pair:
    first: Any
    second: Any = None


def test_leaves_are_found_and_mapped_in_one_order():
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    tree = {"x": [a, Pair(b, (Pair("text", c), 3))], "y": (None, d)}
    assert [id(leaf) for leaf in tensor_leaves(tree)] == [id(leaf) for leaf in (a, b, c, d)]
    assert [id(leaf) for leaf in take_apart(tree)[0]] == [id(leaf) for leaf in (a, b, c, d)]
    order = iter(range(4))
    mapped = map_tensors(lambda tensor: tensor + 10 * next(order), tree)
    assert [leaf.item() for leaf in tensor_leaves(mapped)] == [0, 11, 22, 33]
    assert mapped["x"][1].second[0].first == "text" and mapped["x"][1].second[1] == 3
    assert tree["x"][1].first is b  # it is a copy


def test_a_tensor_that_is_there_twice_stays_one():
    a = torch.zeros(2)
    one, other = map_tensors_once(torch.clone, (a, Pair(a))), map_tensors(torch.clone, (a, Pair(a)))
    assert one[0] is one[1].first and one[0] is not a
    assert other[0] is not other[1].first


def test_views_share_a_storage():
    a = torch.zeros(2, 3)
    assert storage_key(a) == storage_key(a.t()[1:]) != storage_key(a.clone())


_Pair = namedtuple("_Pair", "first second")


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        {"a": torch.ones(1), "b": [1, (None, torch.zeros(3))]},
        _Pair(torch.ones(1), OrderedDict(x=torch.ones(2), y=[])),
        [],
    ],
    ids=["tensor", "nested", "named", "empty"],
)
def test_a_structure_is_sent_without_a_warning_of_torch(value: Any) -> None:
    tensors, structure = take_apart(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        received = pickle.loads(pickle.dumps(structure))
    assert received == structure
    again, _ = take_apart(received.build(tensors))
    assert type(received.build(tensors)) is type(value) and all(a is b for a, b in zip(again, tensors, strict=True))

"""Tensors in nested structures: found and mapped in one order, in dataclasses too."""

from dataclasses import dataclass
from typing import Any

import torch

from tensorshard.model.tensors import map_tensors, map_tensors_once, storage_key, tensor_leaves
from tensorshard.model.values import take_apart


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

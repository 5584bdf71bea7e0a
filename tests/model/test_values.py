"""What modules return, taken apart, sent and put together again."""

import pickle
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

from tensorshard.model.values import take_apart

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

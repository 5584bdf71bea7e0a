"""Counted operations, and that the counter is not taken for the one who raises."""

import pytest
import torch

from tensorshard.model.model_errors import raised_by_model, raised_in_operation
from tensorshard.model.operation_counter import OperationCounter


def test_operations_are_counted_up_to_one_that_fails():
    counter = OperationCounter()
    with pytest.raises(RuntimeError) as failed, counter:
        torch.ones(2).add(1).view(3)
    assert counter.operations == 3
    assert raised_in_operation(failed.value)


def test_an_error_that_passes_the_counter_is_the_models():
    with pytest.raises(TypeError) as failed, OperationCounter():
        torch.ones(2).view("as if")
    assert raised_by_model(failed.value)
    with pytest.raises(ValueError, match="mine") as raised:
        raise ValueError("mine")
    assert not raised_in_operation(raised.value)

"""Provenance: what tensors are computed from, through views, writes in place, and operations that look at shapes."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from tensorshard.model.model_errors import raised_by_model, raised_in_operation
from tensorshard.model.provenance import OperationCounter, Provenance


def fakes(*shapes: tuple[int, ...]) -> tuple[FakeTensorMode, list[torch.Tensor]]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        return mode, [torch.empty(shape) for shape in shapes]


def test_results_come_from_all_inputs():
    mode, (a, b, c) = fakes((2, 3), (2, 3), (2, 3))
    provenance = Provenance[str](mode)
    for name, tensor in zip("abc", (a, b, c), strict=True):
        provenance.set(tensor, [name])
    with provenance:
        total = (a + b).exp()
        apart = c * 2
    assert provenance.of([total]) == {"a", "b"}
    assert provenance.of([apart]) == {"c"}
    assert provenance.of([total, apart]) == {"a", "b", "c"}


# `_foreach_add_` returns nothing: only its schema says what it changes.
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "method": lambda into, source: into.add_(source),
    "view": lambda into, source: into.view(-1)[1:3].copy_(source.view(-1)[:2]),
    "out": lambda into, source: torch.exp(source, out=into),
    "list": lambda into, source: torch._foreach_add_([into], [source]),
    "keyword": lambda into, source: into.index_add_(0, index=torch.tensor([0, 1]), source=source),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_in_place_comes_from_both(write):
    mode, (into, source) = fakes((2, 3), (2, 3))
    view = into.t()
    provenance = Provenance[str](mode)
    provenance.set(into, ["held"])
    provenance.set(source, ["written"])
    with provenance:
        WRITES[write](into, source)
    assert provenance.of([into]) == provenance.of([view]) == {"held", "written"}
    assert provenance.of([source]) == {"written"}


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_are_written_in_training_alone(training):
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    provenance = Provenance[str](FakeTensorMode())
    provenance.set(x, ["x"])
    with provenance:
        F.batch_norm(x, mean, var, training=training)
    assert provenance.of([mean, var]) == ({"x"} if training else frozenset())


@pytest.mark.parametrize("make", [torch.zeros_like, torch.rand_like, lambda x: x.new_full((3,), 1.0)])
def test_the_shape_of_a_tensor_is_no_source(make):
    mode, (x,) = fakes((2, 3))
    provenance = Provenance[str](mode)
    provenance.set(x, ["x"])
    with provenance:
        made = make(x)
        filled = make(x).copy_(x.sum())
    assert provenance.of([made]) == frozenset()
    assert provenance.of([filled]) == {"x"}


def test_random_operations_are_counted():
    mode, (x,) = fakes((1, 2, 4, 8))
    provenance = Provenance[str](mode)
    with provenance:
        F.dropout(x, 0.5, training=False)
        F.dropout(x, 0.0)
        F.scaled_dot_product_attention(x, x, x)
        assert provenance.rng_ops == 0
        F.dropout(x, 0.5)
        assert provenance.rng_ops == 1
        torch.randn(3)
        x.bernoulli_(0.5)
        assert provenance.rng_ops == 3


def test_a_storage_is_not_used_again():
    provenance = Provenance[str](FakeTensorMode())
    with provenance:
        for _ in range(50):
            provenance.set(torch.zeros(7), ["first"])
        made = [torch.zeros(7) for _ in range(50)]
    assert provenance.of(made) == frozenset()


def test_operations_on_real_tensors_are_real():
    mode, (fake,) = fakes((3,))
    with Provenance[str](mode):
        mask = torch.arange(3) < 2
        assert mask.tolist() == [True, True, False]  # code may look at it
        assert isinstance(fake * mask, FakeTensor)


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

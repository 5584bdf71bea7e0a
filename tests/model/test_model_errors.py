"""Whose fault an error is: a model's that cannot run so, or this package's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raised_errors import BY_VALUES, OTHERS, OURS, from_file, raising
from tensorshard.layers.arguments import check_indices
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import Provenance
from tensorshard.models import GPT
from tensorshard.tensor_parallel.apply.local_shapes import forward_with_full_lengths


def caught(function: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as info:
        function()
    return info.value


class Model(nn.Module):
    def __init__(self, inner: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("error", [*BY_VALUES, *OTHERS])
def test_errors_of_the_models_own_code_are_its(error):
    assert raised_by_model(caught(lambda: Model(raising(error, "modeling.py"))(torch.zeros(2))))
    assert raised_by_model(caught(lambda: GPT(8, 4, 1, 1, 4)(raising(error, "modeling.py")())))


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_of_this_package_are_its_own(error):
    assert not raised_by_model(caught(lambda: Model(raising(error, OURS))(torch.zeros(2))))


@pytest.mark.parametrize("error", BY_VALUES)
def test_shapes_and_values_are_the_models_wherever_they_are_found_wrong(error):
    assert raised_by_model(caught(lambda: Model(raising(error, OURS))(torch.zeros(2))))


def test_indices_of_a_wrong_type_are_the_models():
    """A split embedding refuses numbers in place of indices, as torch does by a RuntimeError: a guess was wrong."""
    assert raised_by_model(caught(lambda: check_indices(torch.zeros(2), 4, "index", "embeddings")))


def test_what_torch_raises_is_its_callers():
    def wrong_type(x: Any) -> Any:
        return torch.relu("text")  # type: ignore[arg-type]

    assert raised_by_model(caught(lambda: Model(wrong_type)(torch.zeros(2))))
    assert raised_by_model(caught(lambda: nn.Linear(2, 2)(torch.zeros(2), torch.zeros(2))))  # too many arguments
    ours = from_file("def made(x):\n    return torch.relu('text')\n", OURS, torch=torch)
    assert not raised_by_model(caught(lambda: Model(ours)(torch.zeros(2))))


def test_the_models_operations_are_its_own_under_provenance():
    class Strict(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError("no kernel")

    def run() -> None:
        with Provenance[str](FakeTensorMode()):
            torch.zeros(2).as_subclass(Strict) + 1

    assert raised_by_model(caught(run))


def test_what_a_mode_of_this_package_passes_on_is_its_callers():
    def wrong_type(x: Any) -> Any:
        return torch.einsum("a,a->", x, None)

    def run() -> None:
        forward_with_full_lengths(lambda: (1, 2), 0, Model(wrong_type), torch.zeros(2))

    assert raised_by_model(caught(run))


def test_memory_that_is_not_enough_says_nothing_about_a_model():
    assert not raised_by_model(caught(raising(torch.OutOfMemoryError, "modeling.py")))
    assert not raised_by_model(caught(raising(MemoryError, "modeling.py")))


def test_what_torchs_layers_assert_of_shapes_is_the_models():
    attention = nn.MultiheadAttention(8, 2)
    x = torch.zeros(3, 1, 4)
    assert raised_by_model(caught(lambda: attention(x, x, x)))

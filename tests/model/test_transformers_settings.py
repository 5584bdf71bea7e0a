"""Positions of Hugging Face's models while there are no values."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from tensorshard.model.transformers_settings import NotPacked

NAME = "transformers.masking_utils"


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(NAME)
    module.find_packed_sequence_indices = lambda position_ids: "looked"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


@pytest.mark.parametrize(("inputs", "found"), [({"input_ids": 1}, None), ({"position_ids": 1}, "looked")])
def test_rows_are_one_sequence_unless_positions_are_given(masks: Any, inputs: Any, found: Any) -> None:
    with NotPacked(inputs):
        assert masks.find_packed_sequence_indices(0) == found
    assert masks.find_packed_sequence_indices(0) == "looked"


def test_transformers_may_come_with_the_model(masks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, NAME)

    def build() -> nn.Module:
        sys.modules[NAME] = masks
        return nn.Identity()

    with NotPacked(None) as rows:
        rows.building(partial(build))()
        assert masks.find_packed_sequence_indices(0) is None
    assert masks.find_packed_sequence_indices(0) == "looked"


def test_what_is_no_function_is_left_as_it_is() -> None:
    model = nn.Identity()
    assert NotPacked(None).building(model) is model

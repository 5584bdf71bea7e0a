"""States that users register."""

from pathlib import Path
from typing import Any

import pytest
import torch

import parity
from tensorshard.checkpoint.registered import decode, encode


class _Average:
    """An average of the weights, with its number of updates."""

    def __init__(self, engine: Any) -> None:
        self.values = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
        self.updates = 0

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "counts": {1: (self.updates, None)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in self.values.items():
            value.copy_(state["values"][name])
        self.updates = state["counts"][1][0]


class _Number:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def _whole(average: _Average) -> dict[str, torch.Tensor]:
    return {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in average.values.items()}


def _save(folder: Path, fields: dict) -> dict[str, torch.Tensor]:
    engine = parity.make_engine("gpt", fields)
    average, position = _Average(engine), _Number([engine.mesh.rank, torch.arange(3) + engine.mesh.rank])
    engine.register_state("average", average)
    engine.register_state("position", position, per_rank=True)
    for value in average.values.values():
        value.mul_(0.5)
    average.updates = 7
    engine.save(folder / "saved")
    engine.save(folder / "background", background=True)
    for value in average.values.values():
        value.zero_()
    engine.wait_for_save()
    engine.load(folder / "background")
    assert average.updates == 7 and position.value[0] == engine.mesh.rank
    assert torch.equal(position.value[1], torch.arange(3) + engine.mesh.rank)
    return _whole(average)


def _load(folder: Path, fields: dict) -> tuple[dict[str, torch.Tensor], int, str]:
    engine = parity.make_engine("gpt", fields)
    average = _Average(engine)
    engine.register_state("average", average)
    engine.load(folder / "saved")
    engine.register_state("position", _Number(0), per_rank=True)
    with pytest.raises((ValueError, RuntimeError), match="the state 'position' of 2 ranks") as error:
        engine.load(folder / "saved")
    return _whole(average), average.updates, str(error.value)


def test_states_are_loaded_under_other_plans(ranks, tmp_path):
    saved = ranks(2, _save, tmp_path, dict(zero=3))[0]
    loaded, updates, _ = ranks(4, _load, tmp_path, dict(zero=2))[0]
    assert updates == 7 and saved.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in saved.items())


def _differs(folder: Path) -> list[str]:
    engine = parity.make_engine("gpt", {})
    found = []
    for name, value, match in (
        ("number", engine.mesh.rank, "a registered state differs between ranks"),
        ("tensor", torch.ones(2) * engine.mesh.rank, "tensor.value is"),
        ("object", object(), "state.object.value is an object"),
    ):
        engine._states.shared.clear()
        engine.register_state(name, _Number(value))
        with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
            engine.save(folder / "saved")
        found.append(name)
    for name, part in (("a.b", _Number(0)), ("object", _Number(0)), ("none", object())):
        with pytest.raises((ValueError, TypeError), match="register"):
            engine.register_state(name, part)
    return found


def test_states_that_differ_and_what_is_no_state_are_refused(ranks, tmp_path):
    assert ranks(2, _differs, tmp_path) == [["number", "tensor", "object"]] * 2
    assert list(tmp_path.iterdir()) == []


def test_containers_come_back_as_they_were():
    state = {"a": [1, 2.5, None, True, "x"], 3: (torch.ones(2), {"$b": -1}), "nested": {0: {"c": ()}}}
    tensors: dict[str, Any] = {}
    back = decode(encode(state, "state.x", tensors), tensors)
    assert torch.equal(back[3][0], torch.ones(2))
    assert {**back, 3: back[3][1]} == {**state, 3: state[3][1]} and isinstance(back["nested"][0]["c"], tuple)

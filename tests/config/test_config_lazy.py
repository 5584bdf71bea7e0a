"""LazyCall: what it records, what it refuses, and what `instantiate` makes of it."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import tensorshard
from tensorshard import Plan
from tensorshard.config import ConfigError, LazyCall, instantiate
from tensorshard.config.lazy import find_target, target_name


class Block:
    def __init__(self, width: int, *, norm: Any = None, betas: Any = (), name: str = "block") -> None:
        self.width, self.norm, self.betas, self.name = width, norm, betas, name

    @classmethod
    def narrow(cls, name: str) -> "Block":
        return cls(1, name=name)


class WideBlock(Block): ...


def total(*numbers: int, scale: int = 1) -> int:
    return sum(numbers) * scale


def anything(**options: Any) -> dict[str, Any]:
    return options


def fail(reason: str) -> None:
    raise FileNotFoundError(reason)


def test_a_call_is_recorded_as_data() -> None:
    call = LazyCall(Block)(8, norm=LazyCall(Block)(width=2), betas=(0.9, 0.95))
    assert OmegaConf.to_container(call) == {
        "_target_": "test_config_lazy.Block",
        "width": 8,
        "norm": {"_target_": "test_config_lazy.Block", "width": 2},
        "betas": [0.9, 0.95],
    }


def test_instantiate_makes_the_calls_inside_first_and_hands_over_plain_containers() -> None:
    block = instantiate(LazyCall(Block)(8, norm=LazyCall(Block)(width=2), betas={"a": [1, 2]}))
    assert isinstance(block, Block) and isinstance(block.norm, Block)
    assert (block.width, block.norm.width) == (8, 2)
    assert type(block.betas) is dict and type(block.betas["a"]) is list


def test_variable_arguments_stay_positional() -> None:
    assert instantiate(LazyCall(total)(1, 2, 3, scale=10)) == 60


def test_any_keyword_is_fine_for_a_target_that_takes_any() -> None:
    assert instantiate(LazyCall(anything)(a=1, b="x")) == {"a": 1, "b": "x"}


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.optim.AdamW, "torch.optim.AdamW"),
        (tensorshard.Plan, "tensorshard.Plan"),
        (tensorshard.data.StdlibText, "tensorshard.data.StdlibText"),
        (tensorshard.Plan.from_deepspeed, "tensorshard.Plan.from_deepspeed"),
        (Block, "test_config_lazy.Block"),
    ],
)
def test_the_name_is_the_public_one(target: Callable[..., Any], name: str) -> None:
    """So a config of an earlier version is read where the package has moved the definition."""
    assert target_name(target) == name
    assert find_target(name, "model") == target


def test_a_classmethod_is_named_by_the_class_it_was_taken_from() -> None:
    call = LazyCall(WideBlock.narrow)(name="n")
    assert call._target_ == "test_config_lazy.WideBlock.narrow"
    assert type(instantiate(call)) is WideBlock


def test_partial_waits_for_the_rest_of_the_arguments() -> None:
    factory = instantiate(LazyCall(torch.optim.AdamW, partial=True)(lr=0.5, betas=(0.8, 0.9)))
    assert isinstance(factory, functools.partial)
    optimizer = factory([torch.nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, torch.optim.AdamW)
    assert (optimizer.defaults["lr"], tuple(optimizer.defaults["betas"])) == (0.5, (0.8, 0.9))


def test_arguments_given_to_instantiate_win_and_are_not_copied() -> None:
    norm = torch.nn.LayerNorm(2)
    block = instantiate(LazyCall(Block)(width=1, name="recorded"), norm=norm, name="given")
    assert block.norm is norm
    assert (block.width, block.name) == (1, "given")


def test_arguments_given_to_instantiate_of_a_partial_are_added_to_it() -> None:
    factory = instantiate(LazyCall(Block, partial=True)(name="recorded"), width=3)
    assert factory().width == 3


def test_what_the_target_raises_comes_through_with_its_place() -> None:
    config = OmegaConf.create({"data": LazyCall(fail)(reason="no such file")})
    with pytest.raises(FileNotFoundError, match="no such file") as caught:
        instantiate(config)
    (note,) = caught.value.__notes__
    assert "test_config_lazy.fail" in note and "data" in note


def test_an_unknown_argument_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"Block has no argument 'widht'; did you mean 'width'\?"):
        LazyCall(Block)(widht=8)


def test_too_many_positional_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="Block cannot be called so: too many positional"):
        LazyCall(Block)(1, 2)


def test_a_required_argument_may_come_later() -> None:
    assert instantiate(LazyCall(Block)(name="later"), width=4).width == 4


@pytest.mark.parametrize("target", [lambda: None, functools.partial(total, 1)])
def test_a_target_without_a_name_of_its_own_is_refused(target: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="define it at the top level of a module"):
        LazyCall(target)


def test_paths_become_strings() -> None:
    assert LazyCall(Block)(width=1, name=Path("a/b")).name == "a/b"


def test_a_function_as_a_value_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"argument 'norm' .* write LazyCall\(total, partial=True\)\(\)"):
        LazyCall(Block)(width=1, norm=total)


def test_an_object_as_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"argument 'norm' of test_config_lazy\.Block is of type Tensor"):
        LazyCall(Block)(width=1, norm=torch.zeros(1))


def test_a_plan_is_built_like_anything_else() -> None:
    assert instantiate(LazyCall(Plan)(dp_shard=2, zero="os_g")) == Plan(dp_shard=2, zero=2)
    with pytest.raises(ConfigError, match="no argument 'dp_shrad'; did you mean 'dp_shard'"):
        LazyCall(Plan)(dp_shrad=2)

"""Overrides on the command line: how values are read, which keys are known, which types fit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tensorshard import Offload, Plan
from tensorshard.config import ConfigError, LazyCall, apply_overrides, instantiate


class Scaler:
    def __init__(
        self,
        *,
        factor: float | torch.Tensor = 1.0,
        mode: Literal["fast", "slow"] = "fast",
        sizes: Sequence[int] = (),
        path: Path | None = None,
        loss: Callable[..., Any] | None = None,
        unannotated=3,  # type: ignore[no-untyped-def]
    ) -> None: ...


@pytest.fixture
def config() -> DictConfig:
    return OmegaConf.create(
        {
            "train": {
                "steps": 200,
                "lr": 0.1,
                "name": "run",
                "limit": None,
                "verbose": False,
                "free": {},
                "plan": LazyCall(Plan)(zero=3),
            },
            "optimizer": LazyCall(torch.optim.AdamW, partial=True)(lr=1e-3, betas=(0.9, 0.95)),
            "hooks": [LazyCall(Scaler)(), LazyCall(Scaler)(factor=2.0)],
        }
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=7", 7),
        ("train.steps=1e3", 1000),
        ("train.lr=3e-4", 3e-4),
        ("train.lr=2", 2.0),
        ("train.name=quick", "quick"),
        ("train.name=123", "123"),
        ("train.name=a=b", "a=b"),
        ("train.name='x y'", "x y"),
        ("train.name=None", None),
        ("train.steps=null", None),
        ("train.limit=[1, 2.5, x]", [1, 2.5, "x"]),
        ("train.limit={a: 1}", {"a": 1}),
        ("train.verbose=true", True),
        ("train.free={a: 1}", {"a": 1}),
        ("train.plan.zero=os_g", "os_g"),
        ("train.plan.zero=1", 1),
        ("train.plan.dp_shard=2", 2),
        ("train.plan.clip_grad_norm=1", 1.0),
        ("train.plan.shard_units=[a.*, b]", ["a.*", "b"]),
        ("train.plan.tp_plan={'layers.*.q': colwise}", {"layers.*.q": "colwise"}),
        ("train.plan.offload=disk", "disk"),
        ("train.plan.offload.optimizer=disk", "disk"),
        ("train.plan.offload.host_memory=6GiB", "6GiB"),
        ("optimizer.lr=1", 1.0),
        ("optimizer.weight_decay=0", 0.0),
        ("optimizer.betas=[0.8, 0.9]", [0.8, 0.9]),
        ("optimizer.betas[1]=0.99", 0.99),
        ("hooks.1.factor=3", 3.0),
        ("hooks.0.mode=slow", "slow"),
        ("hooks.0.path=a/b", "a/b"),
        ("hooks.0.unannotated=4", 4),
        ("hooks.0.sizes=[1]", [1]),
    ],
)
def test_a_value_arrives_with_its_type(config: DictConfig, override: str, expected: object) -> None:
    changed = apply_overrides(config, [override])
    value = OmegaConf.select(changed, override.partition("=")[0])
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    assert value == expected
    assert type(value) is type(expected)


def test_overrides_apply_in_order_to_a_copy(config: DictConfig) -> None:
    before = OmegaConf.to_container(config)
    changed = apply_overrides(config, ["train.steps=1", "train.steps=2", "train.plan.micro_batches=4"])
    assert changed.train.steps == 2
    assert instantiate(changed.train.plan) == Plan(zero=3, micro_batches=4)
    assert OmegaConf.to_container(config) == before


def test_a_mapping_for_a_group_changes_what_it_names(config: DictConfig) -> None:
    changed = apply_overrides(config, ["train.plan={dp_shard: 2, zero: 1}"])
    assert instantiate(changed.train.plan) == Plan(dp_shard=2, zero=1)
    with pytest.raises(ConfigError, match=r"train\.plan\.zzero: .* did you mean 'zero'"):
        apply_overrides(config, ["train.plan={zzero: 1}"])


def test_a_group_can_be_turned_off(config: DictConfig) -> None:
    assert apply_overrides(config, ["optimizer=null"]).optimizer is None


def test_a_call_can_be_given_another_target(config: DictConfig) -> None:
    config = OmegaConf.create({"optimizer": LazyCall(torch.optim.AdamW)(lr=1e-3)})
    changed = apply_overrides(config, ["optimizer._target_=torch.optim.SGD", "optimizer.momentum=0.9"])
    assert changed.optimizer == {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.stpes=1",
            r"train\.stpes: there is no key 'stpes' here; did you mean 'steps'\? \(the keys here: free",
        ),
        ("trian.steps=1", r"no key 'trian' here; did you mean 'train'\?"),
        (
            "train.plan.dp_shrad=2",
            r"tensorshard\.Plan has no argument 'dp_shrad'; did you mean 'dp_shard'\?",
        ),
        ("optimizer.learning_rate=1", r"AdamW has no argument 'learning_rate'; its arguments: amsgrad"),
        ("train.steps.x=1", r"train\.steps is 200 and has no keys of its own"),
        ("train.steps=abc", r"train\.steps takes an integer \(it is 200 now\), and 'abc' is not one"),
        ("train.steps=1.5", "takes an integer"),
        ("train.steps=true", "takes an integer"),
        ("train.verbose=1", r"takes true or false \(it is False now\)"),
        ("train.lr=fast", "takes a number"),
        ("train.name=[1]", "takes a string"),
        ("train.plan.compile=3", r"takes true or false \(it is False now\)"),
        ("hooks.0.factor=abc", "takes a number"),
        ("hooks.0.sizes=3", "takes a list"),
        ("hooks.5.factor=1", r"the list has 2 items, at 0 to 1, and none at '5'"),
        ("train.plan=3", r"train\.plan is a group of keys \(zero\); set one of them: train\.plan\.zero="),
        (
            "optimizer._target_=torch.optim.SDG",
            r"optimizer calls 'torch\.optim\.SDG', which cannot be imported",
        ),
        (
            "optimizer._target_=torch.optim.SGD",
            r"optimizer\.betas: torch\.optim\.SGD has no argument 'betas'",
        ),
        ("optimizer._target_=torch.optim", "is a module and cannot be called"),
        ("train.steps", "'train.steps' is not an override; one is written key=value"),
        ("=3", "is not an override"),
        ("train..steps=3", "is not an override"),
        ("train.name=[1", r"the value in 'train\.name=\[1' is not YAML"),
    ],
)
def test_what_cannot_be_is_refused(config: DictConfig, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(config, [override])


def test_fields_of_an_offload_that_was_not_there(config: DictConfig) -> None:
    changed = apply_overrides(config, ["train.plan.offload.optimizer=disk", "train.plan.offload.path=/data"])
    assert instantiate(changed.train.plan) == Plan(zero=3, offload=Offload(optimizer="disk", path="/data"))
    with pytest.raises(ConfigError, match=r"no argument 'optimiser'; did you mean 'optimizer'"):
        apply_overrides(config, ["train.plan.offload.optimiser=disk"])

"""DeepSpeed's CIFAR script with its import line changed: as one process computes, and as DeepSpeed where it is."""

import json
import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peer_scripts
from rank_pool import RankError

_IMPORTS = {"import deepspeed": "from tensorshard.compat import deepspeed"}
_NAME = "cifar10_deepspeed"
_RATES = [0.0, 0.0, 1e-3, 2e-3, 3e-3, *(3e-3 * left / 9 for left in range(8, 0, -1)), *[0.0] * 8]  # before each step


def _ours(*arguments: str) -> dict[str, Any]:
    return peer_scripts.run(_NAME, list(arguments), _IMPORTS)


def _alone(accumulate: int = 1) -> dict[str, list[float]]:
    """The script's training, by torch alone."""
    names = peer_scripts.names_of(_NAME, _IMPORTS)
    torch.manual_seed(0)
    model, pictures = names["Net"](), names["pictures"]()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.999), eps=1e-6, weight_decay=0.01)
    sampler = torch.utils.data.DistributedSampler(pictures, num_replicas=1, rank=0)
    losses, norms = [], []
    for _ in range(2):
        for index, (inputs, labels) in enumerate(
            torch.utils.data.DataLoader(pictures, batch_size=8 // accumulate, sampler=sampler)
        ):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if (index + 1) % accumulate == 0:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
                optimizer.param_groups[0]["lr"] = _RATES[len(norms) - 1]
                optimizer.step()
                optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


@pytest.mark.parametrize(
    ("stage", "accumulate"),
    [
        (3, 1),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
        pytest.param(0, 2, marks=pytest.mark.slow),
    ],
)
def test_the_script_trains_as_one_process(ranks, stage, accumulate):
    sizes = ["--micro_batch", str(4 // accumulate), "--accumulate", str(accumulate)]
    found, alone = ranks(2, _ours, "--stage", str(stage), *sizes), _alone(accumulate)
    for one in found:
        assert one["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert one["rates"][accumulate - 1 :: accumulate][:-1] == pytest.approx(_RATES[1:20])
        assert one["boundaries"] == [(i + 1) % accumulate == 0 for i in range(20 * accumulate)]
        assert one["steps"] == [20, 20 * accumulate, 8]


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_under_another_stage(ranks, tmp_path):
    ranks(2, _ours, "--stage", "3", "--micro_batch", "4", "--epochs", "1", "--save", str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step10"
    (resumed,) = ranks(1, _ours, "--stage", "1", "--micro_batch", "8", "--resume", str(tmp_path))
    assert resumed["losses"] == pytest.approx(_alone()["losses"][10:], abs=1e-5)
    assert resumed["rates"][:-1] == pytest.approx(_RATES[11:20])


_PLAIN = {"import deepspeed": "from peer_scripts import plain_deepspeed as deepspeed"}


def _script(name: str, imports: dict[str, str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = peer_scripts.run(name, list(arguments), imports)
    return found


def _bert_config(path: Path, data_ranks: int, accumulate: int, **more: Any) -> str:
    """The path of a config whose steps have 16 samples."""
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 16 // data_ranks // accumulate,
        "gradient_accumulation_steps": accumulate,
        "steps_per_print": 1000,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "eps": 1e-5, "torch_adam": True}},
        **more,
    }
    file = path / f"{len(list(path.glob('*.json')))}.json"
    file.write_text(json.dumps(config))
    return str(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "more"),
    [
        (1, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
        (2, {"zero_optimization": {"stage": 1}}),
    ],
)
def test_bert_is_pretrained_as_by_one_process(ranks, tmp_path, accumulate, more):
    """Tied weights, groups with and without decay, rates that the script sets, a run that goes on."""
    pytest.importorskip("transformers")
    name, plain = "bert_mlm_deepspeed", _bert_config(tmp_path, 1, accumulate)
    (alone,) = ranks(1, _script, name, _PLAIN, "--deepspeed_config", plain)
    given = ["--deepspeed_config", _bert_config(tmp_path, 2, accumulate, **more), "--save", str(tmp_path)]
    for one in ranks(2, _script, name, _IMPORTS, *given):
        assert one["losses"] == pytest.approx(alone["losses"], abs=1e-5) and len(one["losses"]) == 8 * accumulate
        assert one["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert one["rates"] == alone["rates"]
    (resumed,) = ranks(1, _script, name, _IMPORTS, "--deepspeed_config", plain, "--resume", str(tmp_path))
    assert resumed["losses"] == pytest.approx(alone["losses"][4 * accumulate :], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 1])
def test_a_script_of_zero_3_reads_and_writes_whole_parameters(ranks, stage):
    name = "zero3_deepspeed"
    (alone,) = ranks(1, _script, name, _PLAIN)
    for rank, one in enumerate(ranks(2, _script, name, _IMPORTS, "--micro_batch", "4", "--stage", str(stage))):
        for key in ("losses", "norms"):
            assert one[key] == pytest.approx(alone[key], rel=1e-4, abs=1e-5)
        for mine, theirs in zip(one["rows"], alone["rows"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4)
        if rank == 0:
            assert list(one["state"]) == list(alone["state"])
            for key, values in alone["state"].items():
                torch.testing.assert_close(torch.tensor(one["state"][key]), torch.tensor(values), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (_NAME, ["--micro_batch", "2", "--stage", "1", "--accumulate", "1"]),
        (_NAME, ["--micro_batch", "2", "--stage", "1", "--accumulate", "2"]),
        (_NAME, ["--micro_batch", "2", "--stage", "3", "--accumulate", "1"]),
        (_NAME, ["--micro_batch", "2", "--stage", "3", "--accumulate", "2"]),
        ("zero3_deepspeed", ["--micro_batch", "4"]),
        ("bert_mlm_deepspeed", []),
    ],
)
def test_losses_are_those_of_deepspeed(tmp_path: Path, name: str, arguments: list[str]) -> None:
    if util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    if name == "bert_mlm_deepspeed":
        config = _bert_config(tmp_path, 2, 2, zero_optimization={"stage": 1, "overlap_comm": False})
        arguments = ["--deepspeed_config", config]
    theirs = (peer_scripts.SCRIPTS / f"{name}.py").read_text()
    found: list[dict[str, Any]] = []
    for text in (theirs, theirs.replace(*next(iter(_IMPORTS.items())))):
        (tmp_path / "train.py").write_text(text)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
        ran = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True,
            text=True, timeout=500, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
        found.append(json.loads(max(re.findall(r"found (\{.+\})", ran.stdout), key=len)))  # rank 0's may have more
    for key in ("losses", "rates", "norms"):
        assert _flat(found[1].get(key)) == pytest.approx(_flat(found[0].get(key)), abs=1e-5), key
    assert found[1].get("boundaries") == found[0].get("boundaries") and found[1].get("steps") == found[0].get("steps")


def _flat(values: Any) -> list[float]:
    return [one for value in values or [] for one in (value if isinstance(value, list) else [value])]


def _config(**more: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}


def _gathered() -> list[torch.Tensor]:
    """Rank 0 alone reads and writes whole parameters, as DeepSpeed's scripts do."""
    from tensorshard.compat import deepspeed

    torch.manual_seed(1)
    with deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    rank = torch.distributed.get_rank()
    with deepspeed.zero.GatheredParameters(model[1].bias, modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model[1].bias, 3.0)  # before initialize, which takes rank 0's weights
    engine, *_ = deepspeed.initialize(model=model, config=_config(zero_optimization={"stage": 3}))
    weight = engine.module[0].weight
    with deepspeed.zero.GatheredParameters(list(engine.parameters()), modifier_rank=0):
        if rank == 0:
            engine.module[0].weight.data.mul_(2.0)
            assert engine.module[0].weight.shape == (6, 4) and float(engine.module[0].weight.norm()) > 0
    assert engine.module[0].weight is weight
    with deepspeed.zero.GatheredParameters(weight):
        whole = engine.module[0].weight.detach().clone()
        engine.module[0].weight.data.zero_()  # without modifier_rank, nothing is kept
    state = engine.engine.full_state_dict()
    return [whole, *(state[name] for name in ("0.weight", "1.bias") if state)]


def test_parameters_are_gathered_for_one_rank(ranks):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    first, second = ranks(2, _gathered)
    for whole in (first[0], first[1], second[0]):
        torch.testing.assert_close(whole, 2 * model[0].weight.detach())
    torch.testing.assert_close(first[2], torch.full((2,), 3.0))


def _called(how: str) -> None:
    from tensorshard.compat import deepspeed

    model = nn.Linear(4, 2)
    config = _config(gradient_accumulation_steps=2)
    if how == "key":
        config["gradient_clippping"] = 1.0
    if how == "refused":
        config["zero_optimization"] = {"stage": 3, "zero_quantized_weights": True}
    if how == "optimizer":
        del config["optimizer"]
    if how == "pipe":
        _ = deepspeed.pipe
    given = {} if how == "none" else {"config": config}
    if how == "mpu":
        given["mpu"] = object()
    engine, *_ = deepspeed.initialize(model=model, **given)
    if how == "part":
        engine.load_checkpoint("nowhere", load_module_only=True)
    if how == "exclude":
        engine.save_checkpoint("nowhere", exclude_frozen_parameters=True)
    if how == "boundary":
        engine.set_gradient_accumulation_boundary(False)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("key", "gradient_clipping"),
        ("refused", "zero_quantized_weights=true: what ranks send is never quantized"),
        ("optimizer", "initialize was given no optimizer: pass optimizer=, or set 'optimizer' in the config"),
        ("pipe", "has no 'pipe': any nn.Module takes Plan"),
        ("none", "initialize was given no configs; pass one of"),
        ("mpu", "initialize was given mpu, which divides the processes its own way"),
        ("part", "load_checkpoint was asked for a part of a checkpoint"),
        ("exclude", "exclude_frozen_parameters=True was given"),
        ("boundary", r"this is the last of the gradient_accumulation_steps=2 of the config"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(ranks, how, message):
    with pytest.raises(RankError, match=message):
        ranks(1, _called, how)

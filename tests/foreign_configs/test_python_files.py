"""Configs that are Python, LiBai's and torchtitan's: they are read and never run, and what is more has its line."""

import math
from pathlib import Path

import pytest
import torch

from tensorshard.foreign_configs import Ledger, read_file
from tensorshard.trainer.schedulers import warmup_decay

LIBAI = """
from libai.config import LazyCall, get_config
from libai.evaluation import PPLEvaluator
from .common.models.gpt import pretrain_model as model
from .common.train import train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph

gpus, base_rate = 8, 1e-4
model.cfg.hidden_layers = 6
model.cfg.loss = PPLEvaluator()
for dataset in dataloader.train.dataset:
    dataset.max_seq_length = model.cfg.max_seq_length
train.update(dict(train_micro_batch_size=4, amp=dict(enabled=True), warmup_ratio=5 / 300))
train.dist.tensor_parallel_size = 2
train.dist.pipeline_num_layers = sum([model.cfg.hidden_layers, 2])
train.zero_optimization = dict(enabled=True, stage=2)
train.num_accumulation_steps = 2 if graph.enabled else 1
if gpus > 4:
    optim.lr = base_rate * train.train_micro_batch_size * gpus / 32
else:
    optim.lr = 1.0
del optim.params.weight_decay_norm
train.evaluation.evaluator = LazyCall(PPLEvaluator)(top=1)
"""
TITAN = """
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer
from . import model_registry


def _training(steps, length=2048):
    return TrainingConfig(num_tokens_per_microbatch_per_dp_rank=4 * length, max_context_length=length, steps=steps)


def small() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("debugmodel"),
        optimizer=default_adamw(lr=3e-4),
        training=_training(10),
        activation_checkpoint=FullAC.Config(),
    )


def split() -> Trainer.Config:
    config = small()
    config.training.steps += 90
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism = ParallelismConfig(tensor_parallel_degree=4)
    config.activation_checkpoint = None
    return config


def quantized() -> Trainer.Config:
    config = small()
    enabled = config.compile.enable and "model" in config.compile.components
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(enabled=enabled)])
    return config
"""


def _read(folder: Path, text: str, **given: object) -> Ledger:
    (folder / "config.py").write_text(text)
    return read_file(folder / "config.py", world_size=8, given=given)


def _keys(ledger: Ledger) -> dict[str, str]:
    return {entry.key: entry.text for entry in ledger.refused}


def test_a_lazy_config_is_followed_where_libais_own_files_are_not_there(tmp_path: Path) -> None:
    ledger = _read(tmp_path, LIBAI)
    assert ledger.source == "libai" and not ledger.refused, ledger.describe()
    plan, settings = ledger.plan, ledger.settings
    assert (plan["tp"], plan["dp_shard"], plan["zero"], plan["precision"]) == (2, -1, 2, "fp16")
    assert (plan["micro_batches"], plan["clip_grad_norm"], settings["train.global_batch_size"]) == (2, 1.0, 32)
    assert (settings["optimizer.lr"], settings["optimizer.weight_decay"]) == (1e-4, 0.01)  # the latter is LiBai's own
    assert (settings["train.steps"], settings["scheduler.warmup_steps"]) == (10000, math.ceil(10000 * 5 / 300))
    said = {entry.key: entry for entry in ledger.entries}
    assert said["model.cfg.hidden_layers"].value == 6 and said["train.dist.pipeline_num_layers"].value == 8
    assert said["train.evaluation.evaluator._target_"].value == "libai.evaluation.PPLEvaluator"
    assert "LiBai's own is taken" in said["base common/train"].text and "base common/models/gpt" in said


def test_files_beside_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "train.py").write_text(
        "from omegaconf import DictConfig\n"
        "train = DictConfig(dict(train_micro_batch_size=3, train_iter=50, dist=dict(tensor_parallel_size=1)))\n"
    )
    (tmp_path / "projects").mkdir()
    text = "from configs.x import nothing\nfrom ..common.train import train\ntrain.dist.tensor_parallel_size *= 4\n"
    ledger = _read(tmp_path / "projects", text + "train.global_batch_size = 6\n")
    assert not ledger.refused and ledger.plan["tp"] == 4 and ledger.settings["train.steps"] == 50


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("train.train_micro_batch_size = pick(8)", "train.train_micro_batch_size", "config.py, line 2"),
        ("while True: train.seed = 1", "line 2", "read and not run"),
        ("tune(train)", "line 2", "may change the config"),
        ("train = scaled(train)", "missing train", "is not read"),
        ("if pick(): train.train_iter = 5", "train.train_iter", "config.py, line 2"),
        ("train.num_accumulation_steps = 10 ** 10 ** 10", "train.num_accumulation_steps", "set train.num"),
        ("train.scheduler._target_ = 'libai.scheduler.WarmupStepLR'", "train.scheduler._target_", "is not there"),
    ],
)
def test_what_is_more_is_refused_with_its_line(tmp_path: Path, line: str, key: str, words: str) -> None:
    assert words in _keys(_read(tmp_path, f"from .common.train import train\n{line}\n"))[key]


def test_what_is_not_read_matters_only_where_a_key_needs_it(tmp_path: Path) -> None:
    text = "import sys\nfrom .common.train import train\nsys.path.append(here())\ntrain.output_dir = pick('here')\n"
    ledger = _read(tmp_path, text)
    assert not ledger.refused, ledger.describe()
    assert "code in line 3" in {entry.key for entry in ledger.entries}
    ledger = _read(tmp_path, text + "train.train_iter = pick(3)\n", **{"train.train_iter": 30})
    assert not ledger.refused and ledger.settings["train.steps"] == 30


def test_endless_python_ends(tmp_path: Path) -> None:
    loops = "for a in range(1000):\n  for b in range(1000):\n    train.seed = b\n"
    with pytest.raises(ValueError, match="statements would have to be followed"):
        _read(tmp_path, f"from .common.train import train\n{loops}")
    with pytest.raises(ValueError, match="cannot be read as Python"):
        _read(tmp_path, "train = (")


def test_epochs_of_libai_are_no_steps_and_eager_runs_have_no_amp(tmp_path: Path) -> None:
    text = "from .common.train import train\nfrom .common.models.graph import graph\ngraph.enabled = False\n"
    text += "train.train_epoch = 3\ntrain.amp.enabled = True\ntrain.zero_optimization = dict(enabled=True, stage=2)\n"
    ledger = _read(tmp_path, text)
    assert ledger.settings["train.steps"] == "???"
    assert (ledger.plan["precision"], ledger.plan["zero"]) == ("fp32", 0)


def test_a_function_of_the_registry_is_followed(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"several configs; name one, as config=small \(it has small, split, quantized\)"
    ):
        _read(tmp_path, TITAN)
    with pytest.raises(ValueError, match="no config 'other'"):
        _read(tmp_path, TITAN, config="other")
    small, split = _read(tmp_path, TITAN, config="small"), _read(tmp_path, TITAN, config="split")
    assert not small.refused and not split.refused, split.describe()
    assert (small.settings["train.global_batch_size"], small.settings["text.context_length"]) == (32, 2048)
    assert (small.settings["train.steps"], split.settings["train.steps"]) == (10, 100)
    assert (small.plan["recompute"], split.plan["recompute"], split.plan["tp"]) == ("full", "none", 4)
    assert (small.settings["optimizer.lr"], small.settings["optimizer.weight_decay"]) == (3e-4, 0.1)
    assert "Float8LinearConverter" in _keys(_read(tmp_path, TITAN, config="quantized"))["model_spec"]


def test_older_classes_of_the_registry(tmp_path: Path) -> None:
    ledger = _read(
        tmp_path,
        "def only() -> 'Trainer.Config':\n"
        "    return Trainer.Config(\n"
        "        optimizer=OptimizersContainer.Config(name='AdamW', lr=1e-3),\n"
        "        training=TrainingConfig(local_batch_size=2, seq_len=512, steps=5),\n"
        "        activation_checkpoint=ActivationCheckpointConfig(mode='full'),\n"
        "        model_converters=ModelConvertersContainer.Config(converters=[Float8LinearConverter.Config()]))\n",
    )
    assert (ledger.settings["train.global_batch_size"], ledger.plan["recompute"]) == (16, "full")
    assert list(_keys(ledger)) == ["model_converters.converters"]


def test_the_schedule_counts_as_libai() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_decay(
        optimizer, warmup_steps=2, total_steps=5, shape="cosine", start_ratio=0.5, min_ratio=0.1, overlap=True
    )
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    cosine = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 5)) for step in range(6)]
    assert rates == pytest.approx([0.5, 0.5 + (cosine[2] - 0.5) / 2, *cosine[2:]])

"""Configs of DeepSpeed, imported and trained: by the commands that the import prints, and against DeepSpeed itself."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import util
from pathlib import Path
from typing import Any

import pytest

import pretrained_models
import tensorshard
from tensorshard.trainer.loggers.files import read_metrics

pytestmark = pytest.mark.slow

_JSON: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 3, "total_num_steps": 12, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-2},
    },
}


_CLI = ("-c", "import sys; from tensorshard.cli import main; sys.exit(main())")


def _run(command: list[str], folder: Path, **environment: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(tensorshard.__file__).parents[1]), **environment},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-5000:]
    return ran.stdout


def test_the_printed_command_trains_what_was_imported(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pretrained_models.llama().save_pretrained(tmp_path / "in")
    words = {"[UNK]": 0, **{f"w{number}": number for number in range(1, 64)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "in" / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(" ".join(f"w{1 + number * number % 63}" for number in range(30000)))
    (tmp_path / "ds.json").write_text(json.dumps(_JSON))
    command = [*_CLI, "import", "ds.json", "--world-size", "2", "--output", "ours.yaml"]
    said = _run(command, tmp_path)
    (line,) = re.findall(r"^  tensorshard (train .+)$", said, re.MULTILINE)
    filled = line.replace("model.pretrained=DIR", "model.pretrained=in").replace("texts/*.txt", "text.txt")
    small = ["text.context_length=16", "train.steps=3", "train.eval_every=0", "--output", "run"]
    _run([*_CLI, *shlex.split(filled), *small], tmp_path)
    lines = [entry for entry in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in entry]
    assert "--nproc 2" in line and lines[-1]["step"] == 3 and all(0 < entry["loss"] < 6 for entry in lines)
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "global_batch_size: 8" in config and "warmup_decay" in config


_SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
theirs, config = sys.argv[1] == "deepspeed", json.load(open(sys.argv[2]))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16),
                      nn.Linear(16, 11))
def loss_of(output, y):
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())
def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (8, 5), generator=generator), torch.randint(11, (8, 5), generator=generator)
losses = []
if theirs:
    import deepspeed
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = dist.get_rank()
    for step in range(10):
        x, y = batch(step)
        total = torch.zeros(())
        for part in range(2):
            # Ours gives rank r the r-th half of the batch, and splits it into micro-batches; so does this.
            rows = slice(rank * 4 + part * 2, rank * 4 + part * 2 + 2)
            loss = loss_of(engine(x[rows]), y[rows])
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 2
        dist.all_reduce(total)
        losses.append(total.item() / 2)
else:
    import tensorshard as ts
    from tensorshard.trainer import warmup_decay
    plan = ts.Plan.from_deepspeed(config, world_size=2)
    settings = plan.ledger.settings
    def group(name):
        return {k[len(name):]: v for k, v in settings.items() if k.startswith(name) and not k.endswith("_target_")}
    made = []
    def optimizer(parameters):
        made.append(torch.optim.AdamW(parameters, **group("optimizer.")))
        return made[0]
    engine = ts.parallelize(model, plan, optimizer=optimizer, loss_fn=loss_of)
    schedule = warmup_decay(made[0], **{**group("scheduler."), "total_steps": settings["train.steps"]})
    rank = dist.get_rank()
    for step in range(10):
        x, y = batch(step)
        rows = slice(rank * 4, rank * 4 + 4)
        losses.append(float(engine.step(x[rows], y[rows])))
        schedule.step()
if rank == 0:
    print("losses", json.dumps(losses))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_losses_are_those_of_deepspeed(tmp_path: Path, stage: int) -> None:
    if util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    (tmp_path / "both.py").write_text(_SCRIPT)
    optimizer = {**_JSON["optimizer"], "params": {**_JSON["optimizer"]["params"], "torch_adam": True}}
    config = {**_JSON, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    losses = []
    for who in ("deepspeed", "tensorshard"):
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "both.py", who, "ds.json"]
        said = _run(command, tmp_path, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        losses.append(json.loads(re.findall(r"losses (\[.+\])", said)[0]))
    assert len(losses[0]) == 10 and losses[0][0] != losses[0][9]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)

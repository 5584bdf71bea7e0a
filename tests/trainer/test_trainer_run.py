"""Whole runs, through the real engine, on CPU ranks."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset, IterableDataset

import pretrained_models
from rank_pool import RankError, RankPool
from tensorshard import Plan, cli, parallelize
from tensorshard.commands import train
from tensorshard.config import ConfigError, load_config
from tensorshard.data import write_token_file
from tensorshard.engine.engine import Engine
from tensorshard.trainer import LossEvaluator
from tensorshard.trainer.estimated_run import EstimatedRun, estimate_run
from tensorshard.trainer.initial_model import check_files, initial_model
from tensorshard.trainer.loaders import Collate, evaluation_loader
from tensorshard.trainer.loggers import read_metrics
from tensorshard.trainer.run import run
from tensorshard.trainer.run_directory import read_sessions
from tensorshard.weights.files.checkpoint_files import open_checkpoint

CONFIG = """
from torch.nn.functional import mse_loss
from torch.optim import AdamW
from torchmetrics import MeanSquaredError

from tensorshard.config import LazyCall, get_config
from tensorshard.trainer.schedulers import warmup_cosine
from test_trainer_run import Sums, SmallNet

train = get_config("common/train.py").train
train.steps = 10
train.estimate = False
train.global_batch_size = 8
train.eval_every = 4
train.save_every = 4
train.keep_checkpoints = 0
train.log_every = 1
model = LazyCall(SmallNet)(dropout=0.0)
optimizer = LazyCall(AdamW, partial=True)(lr=0.05)
scheduler = LazyCall(warmup_cosine, partial=True)(warmup_steps=3, total_steps="${train.steps}")
loss = LazyCall(mse_loss, partial=True)()
metrics = {"val_error": LazyCall(MeanSquaredError)()}
data = {"train": LazyCall(Sums)(count=100, seed=0), "validation": LazyCall(Sums)(count=21, seed=1)}
"""


class SmallNet(nn.Module):
    """Blocks, and layers outside of them, which belong to the root's unit."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.outlet = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = x + self.dropout(torch.relu(block(x)))
        return self.outlet(x)


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Four numbers and their sum. One sample may be NaN; loading another may press Ctrl-C."""

    def __init__(self, count: int, seed: int, nan_index: int = -1, interrupt_index: int = -1) -> None:
        self.inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        self.interrupt_index = interrupt_index
        if nan_index >= 0:
            self.inputs[nan_index] = float("nan")

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.interrupt_index:
            os.kill(os.getpid(), signal.SIGINT)
        return self.inputs[index], self.inputs[index].sum(dim=0, keepdim=True)


class SumsInAStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, one after the other."""

    def __init__(self, count: int, seed: int) -> None:
        self.samples, self.next = Sums(count, seed), 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(self.samples):
            self.next += 1
            yield self.samples[self.next - 1]

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return path


def _run(config: Path | str, *overrides: str, output: Path, resume: str | Path | None = None) -> None:
    run(
        load_config(config, overrides, allow=[__name__]),
        resume=None if resume is None else str(resume),
        output=str(output),
    )


def _losses(directory: Path) -> dict[int, float]:
    return {int(line["step"]): line["loss"] for line in read_metrics(directory / "metrics.jsonl")}


@pytest.mark.slow
def test_a_run_leaves_its_config_metrics_logs_and_checkpoints(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    best = "train.save_best=lowest val_error"
    background = "train.save_in_background=true"
    ranks(2, _run, config, "train.keep_checkpoints=2", "train.profile_memory=true", best, background, output=output)
    assert "measured, rank" in (output / "profile" / "memory.html").read_text()
    lines = read_metrics(output / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11))
    always = {"loss", "lr", "grad_norm", "step_seconds", "samples_per_second", "peak_memory_bytes", "samples"}
    assert all(always <= line.keys() for line in lines)
    assert [line["step"] for line in lines if "val_loss" in line] == [4, 8, 10]
    assert lines[-1]["loss"] < lines[0]["loss"] / 4
    assert lines[-1]["val_error"] == pytest.approx(lines[-1]["val_loss"], rel=1e-5)
    assert [line["samples"] for line in lines] == [8 * step for step in range(1, 11)]
    for line in (lines[0], lines[-1]):
        assert line["peak_memory_bytes/rank0"] == line["peak_memory_bytes"] < 2 * line["peak_memory_bytes/rank1"]
    (session,) = read_sessions(output / "sessions.jsonl")
    assert (session.first_step, session.steps, session.world_size, session.device) == (1, 10, 2, "cpu")
    assert session.plan["dp_shard"] == 2 and len(session.held_before_bytes) == 2 and session.estimated_bytes is None
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["best", "step-10", "step-8"]
    for name in ("config.yaml", "asked.yaml", "rank0.log", "rank1.log"):
        assert (output / name).stat().st_size > 0
    assert "saved checkpoint" in (output / "rank1.log").read_text()


@pytest.mark.slow
def test_a_resumed_run_continues_on_another_number_of_ranks_and_zero_level(
    ranks: RankPool, config: Path, tmp_path: Path
) -> None:
    ranks(2, _run, config, output=tmp_path / "whole")
    undisturbed = _losses(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-4"
    for world_size, zero in ((1, 3), (2, 1), (4, 2)):
        output = tmp_path / f"on-{world_size}"
        ranks(world_size, _run, config, f"train.plan.zero={zero}", output=output, resume=checkpoint)
        resumed = _losses(output)
        assert list(resumed) == [5, 6, 7, 8, 9, 10]
        assert resumed == pytest.approx({step: undisturbed[step] for step in resumed}, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_middle_of_a_stream(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    config.write_text(
        config.read_text().replace('"train": LazyCall(Sums)(count=100', '"train": LazyCall(SumsInAStream)(count=52')
    )
    config.write_text(config.read_text().replace("import Sums,", "import Sums, SumsInAStream,"))
    ranks(2, _run, config, output=tmp_path / "whole")
    undisturbed = _losses(tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-4"
    ranks(1, _run, config, output=tmp_path / "resumed", resume=checkpoint)
    assert _losses(tmp_path / "resumed") == pytest.approx({step: undisturbed[step] for step in range(5, 11)}, rel=1e-5)


def samples_of_a_stream() -> Iterator[dict[str, Any]]:
    inputs = Sums(count=52, seed=0).inputs
    return ({"x": x.tolist(), "y": [x.sum().item()]} for x in inputs)


def stateful_loader(**options: Any) -> Any:
    """torchdata's loader, of samples."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(SumsInAStream(count=52, seed=0), batch_size=None, **options)


def hugging_face_stream(buffer_size: int) -> Any:
    """A streaming data set, whose state leaves out what is in its shuffle buffer."""
    import datasets

    stream = datasets.IterableDataset.from_generator(samples_of_a_stream)
    return stream.shuffle(seed=0, buffer_size=buffer_size) if buffer_size else stream


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """A batch of either kind of samples."""
    if isinstance(samples[0], dict):
        samples = [(torch.tensor(sample["x"]), torch.tensor(sample["y"])) for sample in samples]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "stream", "workers"),
    [
        (None, "SumsInAStream)(count=52, seed=0)", 2),
        ("torchdata", "stateful_loader)()", 2),
        ("torchdata", "stateful_loader)(num_workers=1)", 0),
        ("datasets", "hugging_face_stream)(buffer_size=0)", 2),
        ("datasets", "hugging_face_stream)(buffer_size=7)", 2),
    ],
)
def test_a_stream_with_workers_that_is_resumed_twice_repeats_and_drops_no_sample(
    config: Path, tmp_path: Path, package: str | None, stream: str, workers: int
) -> None:
    if package is not None:
        pytest.importorskip(package)
    text = CONFIG.replace("Sums)(count=100, seed=0)", stream)
    config.write_text(f"from test_trainer_run import *\nfrom test_trainer_run import pairs as collate\n{text}")

    def train(output: str, resume: Path | None = None) -> dict[int, float]:
        # A process of its own: it may have workers, which a rank of the pool may not.
        command = [sys.executable, "-m", "tensorshard.cli", "train", str(config), f"train.num_workers={workers}"]
        command += ["--allow", __name__, "--output", str(tmp_path / output)]
        command += [] if resume is None else ["--resume", str(resume)]
        paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return _losses(tmp_path / output)

    undisturbed = train("whole")  # an epoch has 6 batches
    for output, checkpoint in (("once", "whole/checkpoints/step-4"), ("twice", "once/checkpoints/step-8")):
        begin = int(checkpoint.rpartition("-")[2])
        assert train(output, tmp_path / checkpoint) == {step: undisturbed[step] for step in range(begin + 1, 11)}


def _flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_damaged_newest_checkpoint_is_passed_over(
    ranks: RankPool, config: Path, tmp_path: Path, world_size: int
) -> None:
    output, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    ranks(world_size, _run, config, output=output)
    undisturbed = _losses(output)
    (checkpoints / "step-10" / "engine.json").unlink()  # seen without reading tensors
    _flip_a_bit(checkpoints / "step-8" / "tensors-1.bin")  # seen by a rank that reads it
    ranks(world_size, _run, output / "config.yaml", output=output, resume="latest")
    said = (output / "rank1.log").read_text()
    assert "step-10 is damaged and is passed over; it is kept as step-10.damaged" in said
    assert "step-8 is damaged and is passed over; it is kept as step-8.damaged" in said and "tensors-1.bin is" in said
    assert [session.first_step for session in read_sessions(output / "sessions.jsonl")] == [1, 5]
    assert _losses(output) == pytest.approx(undisturbed, rel=1e-6)
    _flip_a_bit(checkpoints / "step-8" / "tensors-1.bin")
    with pytest.raises(RankError, match=r"--resume: .*step-8.*tensors-1.bin is damaged"):
        ranks(world_size, _run, config, output=output, resume=checkpoints / "step-8")  # which the user names


def test_a_resumed_run_may_change_its_optimizer(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    ranks(1, _run, config, output=tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-4"
    ranks(1, _run, config, "optimizer.lr=0.1", output=tmp_path / "resumed", resume=checkpoint)
    rates = {line["step"]: line["lr"] for line in read_metrics(tmp_path / "whole" / "metrics.jsonl")}
    for line in read_metrics(tmp_path / "resumed" / "metrics.jsonl"):
        assert line["lr"] == pytest.approx(2 * rates[line["step"]])


@pytest.mark.slow
def test_dropout_continues_where_it_was(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    ranks(2, _run, config, "model.dropout=0.5", output=tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-4"
    ranks(2, _run, config, "model.dropout=0.5", output=tmp_path / "resumed", resume=checkpoint)
    resumed = _losses(tmp_path / "resumed")
    undisturbed = _losses(tmp_path / "whole")
    assert resumed == pytest.approx({step: undisturbed[step] for step in range(5, 11)}, rel=1e-6)


@pytest.mark.slow
def test_ctrl_c_on_one_rank_saves_and_the_resumed_run_is_the_undisturbed_one(
    ranks: RankPool, config: Path, tmp_path: Path
) -> None:
    ranks(2, _run, config, output=tmp_path / "whole")
    output = tmp_path / "stopped"
    ranks(2, _run, config, "data.train.interrupt_index=43", output=output)
    stopped = list(_losses(output))
    assert 1 <= len(stopped) < 10
    assert (output / "checkpoints" / f"step-{len(stopped)}").is_dir()
    said = (output / "rank0.log").read_text()
    assert f"stopped early, after step {len(stopped)} of 10" in said
    assert f"tensorshard train {config} data.train.interrupt_index=43 --output {output} --resume" in said
    ranks(2, _run, output / "config.yaml", output=output, resume="latest")
    assert _losses(output) == pytest.approx(_losses(tmp_path / "whole"), rel=1e-6)
    assert len(read_metrics(output / "metrics.jsonl")) == 10
    assert [session.first_step for session in read_sessions(output / "sessions.jsonl")] == [1, len(stopped) + 1]


def _paste(command: str) -> None:
    """Runs a command line in this process, which is a rank."""
    with (
        mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}),
        mock.patch.object(train, "run_worker", lambda worker, call, report: worker(*call)),
    ):
        assert cli.main(shlex.split(command)[1:]) == 0


def test_the_command_that_continues_a_run_can_be_pasted(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    config = config.rename(tmp_path / "a small one.py")
    output = tmp_path / "a run"
    asked = ["optimizer.betas=[0.5, 0.95]", "train.steps=10", "train.name=it's", "data.train.interrupt_index=43"]
    ranks(1, _run, config, *asked, output=output)
    said = (output / "rank0.log").read_text().splitlines()
    command = said[next(i for i, line in enumerate(said) if line.endswith("continue with:")) + 1]
    stopped = len(_losses(output))
    assert 1 <= stopped < 10 and command.startswith("tensorshard train ")
    ranks(1, _paste, command.replace("=43", "=-1"))
    assert list(_losses(output)) == list(range(1, 11))
    continued = load_config(next(output.glob("config-from-step-*.yaml")), allow=[__name__])
    assert (continued.optimizer.betas, continued.train.name) == ([0.5, 0.95], "it's")


def test_a_nan_loss_stops_the_run_and_names_the_last_good_checkpoint(
    ranks: RankPool, config: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with pytest.raises(RankError, match="NonFiniteLossError") as caught:
        ranks(2, _run, config, "data.train.nan_index=43", output=output)
    good = max((output / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-")))
    steps = list(_losses(output))
    assert good.name == f"step-{len(steps)}"
    assert f"of step {len(steps) + 1} is nan" in str(caught.value)
    assert f"The last good checkpoint is {good}" in str(caught.value)


def test_a_run_does_not_begin_where_another_is(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    ranks(1, _run, config, "train.steps=1", output=tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(RankError, match="holds a run already") as caught:
        ranks(2, _run, config, output=tmp_path / "run")
    assert "rank 0" in str(caught.value) and "rank 1" in str(caught.value)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_finished_run_has_nothing_left_to_train(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    ranks(1, _run, config, "train.steps=2", output=tmp_path / "run")
    ranks(1, _run, config, "train.steps=2", output=tmp_path / "run", resume="latest")
    assert "step-2 has all 2 steps; raise train.steps" in (tmp_path / "run" / "rank0.log").read_text()
    assert len(_losses(tmp_path / "run")) == 2


def _engine(zero: int = 3) -> Engine:
    return parallelize(
        SmallNet, Plan(zero=zero), optimizer=partial(torch.optim.SGD, lr=0.1), loss_fn=mse_loss, device="cpu"
    )


def _validation_loss(count: int, batch: int) -> tuple[float, float]:
    engine = _engine()
    dataset = Sums(count, seed=3)
    loader = evaluation_loader(dataset, engine.mesh, global_batch_size=batch, shuffle=False)
    measured = LossEvaluator(loader).evaluate(engine)["val_loss"]
    single = SmallNet()
    state = [engine.full_state_dict()]
    dist.broadcast_object_list(state, src=0)
    single.load_state_dict(state[0])
    outputs = single(dataset.inputs)
    return measured, mse_loss(outputs, dataset.inputs.sum(dim=1, keepdim=True)).item()


def _pins_memory() -> bool:
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        dataset = Sums(8, seed=3)
        return bool(evaluation_loader(dataset, _engine().mesh, global_batch_size=4, shuffle=False).pin_memory)


def test_ranks_on_the_cpu_make_no_context_on_a_gpu_that_is_there(ranks):
    assert ranks(1, _pins_memory) == [False]


@pytest.mark.parametrize(("count", "batch"), [(21, 8), (17, 8), (16, 8), (3, 2)])
def test_the_validation_loss_is_the_mean_over_every_sample_whatever_the_ranks(
    ranks: RankPool, count: int, batch: int
) -> None:
    for measured, expected in ranks(2, _validation_loss, count, batch):
        assert measured == pytest.approx(expected, rel=1e-5)


SMALL = (
    "train.steps=2",
    "train.global_batch_size=4",
    "train.eval_batches=1",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.width=8",
)


@pytest.mark.parametrize(("name", "kind"), [("hf", "llama"), ("classifier", "bert")])
def test_a_directory_of_transformers_is_trained(ranks: RankPool, tmp_path: Path, name: str, kind: str) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    directory = tmp_path / "in"
    getattr(pretrained_models, kind)().save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "def": 1, "self": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    size = "text.context_length=16" if name == "hf" else "text.length=16"
    overrides = [word for word in SMALL if not word.startswith("model.")]
    ranks(1, _run, name, *overrides, f"model.pretrained={directory}", size, output=tmp_path / "run")
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2 and last["val_loss"] > 0 and ("val_accuracy" in last) == (name == "classifier")
    with pytest.raises(ConfigError, match=r"model\.pretrained=DIR, a directory as Hugging Face writes it"):
        check_files(load_config(name).model)
    with pytest.raises(ConfigError, match=r"model\.pretrained=nowhere: there is no file or directory nowhere"):
        check_files(load_config(name, ["model.pretrained=nowhere"]).model)


def test_a_config_json_alone_is_estimated_and_trained(ranks: RankPool, tmp_path: Path) -> None:
    described = pretrained_models.llama().config
    described.update({"architectures": ["LlamaForCausalLM"], "vocab_size": 256})
    described.save_pretrained(tmp_path / "in")
    words = ["hf", f"model.config={tmp_path / 'in'}", "text.context_length=16"]
    config = load_config(words[0], words[1:])
    assert EstimatedRun(config, 2).estimate().largest.by_category["parameters"] > 0
    overrides = [word for word in SMALL if not word.startswith("model.")]
    ranks(1, _run, *words, "text.tokenizer=bytes", *overrides, output=tmp_path / "run")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
    with pytest.raises(ConfigError, match=r"model\.config=nowhere: there is no nowhere/config\.json"):
        EstimatedRun(load_config("hf", ["model.config=nowhere"]), 2)
    with pytest.raises(ConfigError, match=r"has no value; give it one: model\.pretrained=DIR.*or model\.config=DIR"):
        EstimatedRun(load_config("hf"), 2)


def _with_adapters(folder: Path) -> tuple[nn.Module, list[str]]:
    """A base of 16 bits in `folder`, and the words that train adapters of it."""
    pytest.importorskip("peft")
    described = pretrained_models.llama().config
    described.update({"vocab_size": 256})
    base = type(pretrained_models.llama())(described).to(torch.bfloat16)
    base.save_pretrained(folder)
    words = [f"model.pretrained={folder}", "text.context_length=16", "text.tokenizer=bytes"]
    return base, [*words, "adapters.rank=4", "adapters.layers=[q_proj, down_proj]"]


_ADAPTED = 2 * 4 * (32 + 32 + 48 + 32)  # elements of A and B, in two layers of two blocks


def test_adapters_are_made_by_their_rank(tmp_path: Path) -> None:
    base, words = _with_adapters(tmp_path)
    built = initial_model(load_config("hf", words).model)()
    held = {name: (p.requires_grad, p.dtype) for name, p in built.named_parameters()}
    assert sum(p.numel() for p in built.parameters() if p.requires_grad) == _ADAPTED
    assert held["base_model.model.model.embed_tokens.weight"] == (False, torch.bfloat16)
    assert torch.equal(built.state_dict()["base_model.model.model.norm.weight"], base.state_dict()["model.norm.weight"])
    for word, said in (("rank=0", r"adapters\.rank=0 was given"), ("rnk=8", "did you mean 'rank'")):
        with pytest.raises(ConfigError, match=said):
            check_files(load_config("hf", [*words, f"adapters.{word}"]).model)


@pytest.mark.slow
def test_adapters_are_estimated_and_trained(ranks: RankPool, tmp_path: Path) -> None:
    _, words = _with_adapters(tmp_path / "in")
    estimated = EstimatedRun(load_config("hf", words), 2).estimate()
    assert estimated.largest.by_category["optimizer states"] == pytest.approx(8 * _ADAPTED / 2, rel=0.05)
    overrides = [word for word in SMALL if not word.startswith("model.")]
    ranks(1, _run, "hf", *words, *overrides, "train.save_every=2", output=tmp_path / "run")
    there = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-2").metadata.state_dict_metadata
    assert "model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in there


@pytest.mark.parametrize("name", ["bert", "gpt", "quickstart", "vit"])
def test_every_shipped_config_runs(ranks: RankPool, tmp_path: Path, name: str) -> None:
    overrides = list(SMALL)
    if name != "vit":
        overrides.append("model.context_length=16")
    if name == "gpt":
        tokens = tmp_path / "some.npy"
        write_token_file(tokens, [np.arange(500) % 50], vocab_size=50)
        overrides += [
            f"data.train.source={tokens}",
            f"data.validation.source={tokens}",
            "model.vocab_size=50",
        ]
        overrides.append("train.plan.micro_batches=2")
    ranks(1, _run, name, *overrides, output=tmp_path / "run")
    last: dict[str, Any] = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == 2 and last["val_loss"] > 0
    assert ("val_accuracy" in last) == (name == "vit")
    assert ("tokens_per_second" in last) == (name != "vit")
    json.dumps(last)


class Ragged(Dataset[Any]):
    """Sums of one to four numbers: not to be stacked."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.arange(1 + index % 4).float()
        return numbers, numbers.sum()[None]


def padded(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows = [nn.functional.pad(numbers, (0, 4 - len(numbers))) for numbers, _ in samples]
    return torch.stack(rows), torch.stack([total for _, total in samples])


@pytest.mark.slow
@pytest.mark.parametrize("fields", ["train.plan.zero=3", "train.plan.pp=2"])
def test_a_config_may_make_its_batches_itself(ranks: RankPool, config: Path, tmp_path: Path, fields: str) -> None:
    text = re.sub(r"LazyCall\(Sums\)\([^)]*\)", "LazyCall(Ragged)()", CONFIG)
    config.write_text("from test_trainer_run import Ragged, padded as collate\n" + text)
    ranks(2, _run, config, fields, "train.plan.micro_batches=2", "train.steps=3", output=tmp_path / "run")
    assert sorted(_losses(tmp_path / "run")) == [1, 2, 3]
    estimate = estimate_run(load_config(str(config), [fields, "train.plan.micro_batches=2"]), 2, device="cpu")
    assert estimate.largest.peak_allocated > 0


def test_batches_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be stacked .* write a function collate\(samples\) in the config"):
        Collate()([Ragged()[0], Ragged()[1]])
    with pytest.raises(ConfigError, match=r"have the form of 3 parts, and a batch has two parts: let it give pairs"):
        Collate()([(1, 2, 3)])
    with pytest.raises(ConfigError, match=r"collate returned Tensor, and a batch has two parts: let it return \(in"):
        Collate(lambda samples: torch.zeros(2))([1])


def _refused(config: Path, folder: Path) -> list[str]:
    """What runs are told that cannot be begun."""
    found = []
    for overrides, output in (["optimizer.lr=-1"], "a"), ([], "b"), ([], "file/c"):
        with pytest.raises(ConfigError) as caught:
            _run(config, *overrides, output=folder / output)
        found.append(str(caught.value))
    return found


def test_what_a_config_asks_for_and_cannot_be_had(ranks: RankPool, config: Path, tmp_path: Path) -> None:
    missing = 'LazyCall(TokenDataset)(source="no.npy", context_length=4)'
    text = CONFIG.replace("LazyCall(Sums)(count=100, seed=0)", missing)
    config.write_text("from tensorshard.data import TokenDataset\n" + text)
    (tmp_path / "file").write_text("")
    rate, tokens, directory = ranks(1, _refused, config, tmp_path)[0]
    assert rate == "optimizer: Invalid learning rate: -1.0"
    assert tokens.startswith("data.train: there is no token file") and "tensorshard data tokenize" in tokens
    assert "file/c cannot be written" in directory and "--output" in directory

"""Command lines that cannot be done: each costs one sentence and the exit code 2, and no traceback.

All of them run in one process. ``AT_ONCE`` are refused before any process is started; ``BY_WORKERS`` is what only a
worker finds out, here one in a world of one.
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tensorshard import cli
from tensorshard.data import write_token_file

_CONFIG = """
from tensorshard.config import LazyCall, get_config
from tensorshard.data import TokenDataset
from tensorshard.models import GPT, next_token_loss

train = get_config("common/train.py").train
train.steps = 1
train.global_batch_size = 2
train.estimate = False
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler
model = LazyCall(GPT)(vocab_size=11, context_length=4, num_layers=1, num_heads=2, width=16)
loss = LazyCall(next_token_loss, partial=True)()
data = {"train": LazyCall(TokenDataset)(source="good.npy", context_length=4), "validation": None}
"""

# the words of the command line, as one text or a list, and those of the sentence
AT_ONCE: dict[str, tuple[Any, ...]] = {
    "a command that does not exist": ("trian", "invalid choice: 'trian'", "'train'"),
    "an option that does not exist": ("train mine.py --nprocs 2", "unknown option --nprocs", "did you mean --nproc?"),
    "a config that does not exist": ("train quickstrat", "no config 'quickstrat'", "did you mean 'quickstart'?"),
    "a file that does not exist": ("train nowhere.py", "no config file 'nowhere.py'", "current directory"),
    "two configs": ("train mine.py gpt", "one config at a time, not mine.py and gpt"),
    "a key that does not exist": ("train mine.py train.stpes=3", "'stpes'", "did you mean 'steps'?"),
    "an argument that does not exist": ("train mine.py model.widht=3", "'widht'", "did you mean 'width'?"),
    "a field of no plan": ("train mine.py train.plan.micro_batch=2", "'micro_batch'", "did you mean 'micro_batches'?"),
    "a key without a value": ("train mine.py =3", "'=3' is not an override", "key=value"),
    "a value that is no YAML": (["train", "mine.py", "train.name=[a"], "not YAML", "quotes make it a string"),
    "text for a number": ("train mine.py train.steps=many", "train.steps=many", "takes an integer"),
    "a group of keys": ("train mine.py train=3", "train is a group of keys", "train.plan=..."),
    "no steps": ("train mine.py train.steps=0", "train.steps is 0", "at least 1"),
    "a best that is none": (["train", "mine.py", "train.save_best=val_loss"], "train.save_best", "'lowest val_loss'"),
    "a best of nothing": (["train", "mine.py", "train.save_best=lowest val_loss"], "nothing is evaluated without"),
    "steps below 0": ("train mine.py train.steps=-5", "train.steps is -5", "at least 1"),
    "a batch that does not divide": ("train mine.py train.global_batch_size=3", "3 does not divide", "2 or 4"),
    "a level that does not exist": ("train mine.py train.plan.zero=4", "train.plan: zero is 4", "0, 1, 2 and 3"),
    "degrees that do not fit": ("train mine.py train.plan.tp=3", "train.plan", "there are 2", "multiple of 3"),
    "broken Python": ("train broken.py", "broken.py, line 2", "SyntaxError"),
    "Python that fails": ("train fails.py", "fails.py, line 2", "ZeroDivisionError"),
    "broken YAML": ("train broken.yaml", "broken.yaml cannot be read as YAML"),
    "YAML of a list": ("train list.yaml", "holds a list", "a mapping"),
    "YAML that calls anything": ("train evil.yaml", "calls os.system", "--allow os"),
    "YAML without sections": ("train sectionless.yaml", "the config has no", "quickstart.py"),
    "a value that is required": ("train gpt", "data.train.source", "tensorshard data tokenize"),
    "no processes": ("train mine.py --nproc 0", "nproc is 0", "at least 1"),
    "processes as text": ("train mine.py --nproc two", "--nproc", "'two'"),
    "machines without a place to meet": ("train mine.py --nnodes 2", "HOST:PORT"),
    "a place without a port": ("train mine.py --nnodes 2 --rdzv-endpoint node0", "'node0'", "HOST:PORT"),
    "a machine that is not there": ("train mine.py --node-rank 1", "node_rank is 1", "between 0 and 0"),
    "no checkpoint": ("train mine.py --resume nowhere", "--resume nowhere", "no such checkpoint"),
    "a file for a directory": ("train mine.py --output mine.py", "--output mine.py", "a file"),
    "no time": ("train mine.py --timeout 0", "--timeout 0", "above 0"),
    "generating with nothing": ("generate", "a model and a prompt", "given nothing"),
    "generating from nowhere": ("generate nowhere once", "nowhere does not exist", "a run with a checkpoint"),
    "generating from a file": ("generate mine.py once", "mine.py has no model", "a run with a checkpoint"),
    "no new tokens": ("generate run once --tokenizer bytes --max-new-tokens 0", "max_new_tokens=0", "at least 1"),
    "a temperature below 0": ("generate run once --tokenizer bytes --temperature -1", "temperature=-1", "at least 0"),
    "none of the likeliest": ("generate run once --tokenizer bytes --top-k 0", "top_k=0", "at least 1"),
    "importing no checkpoint": ("import-checkpoint", "a checkpoint and a folder", "given nothing"),
    "exporting nothing": ("export", "a checkpoint and a directory", "given nothing"),
    "exporting what is not a checkpoint": ("export run out", "run is not a checkpoint", "engine.json"),
    "exporting to what is there": ("export run/checkpoints/step-1 run", "run is there already"),
    "exporting to another kind": ("export run/checkpoints/step-1 out --to onnx", "'onnx'", "'hf'", "'torch'"),
    "exporting in another type": ("export run/checkpoints/step-1 out --dtype int8", "'int8'", "'bf16'"),
    "exporting in files of no size": (
        "export run/checkpoints/step-1 out --max-shard-size none", "'none'", "such as '5GB'"
    ),
    "a text that is not UTF-8": ("data tokenize text.txt latin1.txt --output new", "latin1.txt", "UTF-8", "iconv"),
    "a tokenizer that is not UTF-8": ("data tokenize text.txt --tokenizer latin1.txt", "latin1.txt is not a tokenizer"),
    "Python that is not UTF-8": ("train latin1.py", "latin1.py is not UTF-8 text"),
    "YAML that is not UTF-8": ("train latin1.yaml", "latin1.yaml is not UTF-8 text"),
    "a prompt that is not UTF-8": (["generate", "run", "caf\udce9"], "the prompt is not UTF-8 text"),
    "tokenizing nothing": ("data tokenize", "at least one text file"),
    "a verb that data has not": ("data clean text.txt", "given clean text.txt", "tokenize TEXT"),
    "a text that is not there": ("data tokenize no.txt", "there is no file no.txt"),
    "a text of nothing": ("data tokenize empty.txt --output new", "train.npy", "empty"),
    "a share above 1": ("data tokenize text.txt --validation 2", "--validation 2", "below 1"),
    "a tokenizer that is not there": ("data tokenize text.txt --tokenizer nowhere", "no tokenizer nowhere", "'bytes'"),
    "a tokenizer that is none": ("data tokenize text.txt --tokenizer list.yaml", "list.yaml is not a tokenizer.json"),
    "tokens that are there": ("data tokenize text.txt --output there", "there already", "--overwrite"),
    "a folder that is a file": ("data tokenize text.txt --output mine.py", "mine.py"),
    "words that env does not take": ("env all", "takes no arguments", "all"),
    "words that test does not take": ("test gpt", "takes no arguments", "gpt"),
    "testing with no processes": ("test --nproc 0", "nproc is 0", "at least 1"),
}  # fmt: skip

BY_WORKERS: dict[str, tuple[Any, ...]] = {
    "tokens that are not there": ("train mine.py data.train.source=no.npy", "data.train", "no token file", "no.npy"),
    "a text for tokens": ("train mine.py data.train.source=text.txt", "data.train", "text.txt is not a token file"),
    "no validation tokens": (
        "train mine.py data.validation._target_=tensorshard.data.TokenDataset data.validation.source=no.npy",
        "data.validation",
    ),
    "a negative rate": ("train mine.py optimizer.lr=-1", "optimizer", "learning rate: -1"),
    "a negative width": ("train mine.py model.width=-16", "model", "width"),
    "heads that do not divide the width": ("train mine.py model.num_heads=3", "model", "3"),
    "tokens outside of the vocabulary": (
        "train mine.py model.vocab_size=5", "data: ", "0 to 10", "5 rows", "vocabulary"
    ),
    "a directory that holds a run": ("train mine.py --output run", "run holds a run already", "--resume"),
    "a directory that cannot be made": ("train mine.py --output mine.py/run", "cannot be written", "--output"),
    "nothing to resume": ("train mine.py --resume", "no run", "with a checkpoint"),
    "a checkpoint that is none": ("train mine.py --resume there --output out", "is not a checkpoint", "engine.json"),
    "another model's checkpoint": (
        "train mine.py model.width=32 --resume run/checkpoints/step-1 --output out", "another model", "(11, 16)"
    ),
    "weights that are not there": ("train mine.py model.pretrained=nowhere", "model.pretrained=nowhere"),
    "a prompt of nothing": (["generate", "run", "", "--tokenizer", "bytes"], "the prompt is empty", "at least one"),
    "a prompt that is too long": (["generate", "run", "\x01\x02\x03\x04\x05", "--tokenizer", "bytes"], "at most 4"),
    "a run that does not say its tokenizer": ("generate run a", "which tokenizer its model has", "--tokenizer bytes"),
    "a prompt outside of the vocabulary": (
        "generate run zz --tokenizer bytes --max-new-tokens 1", "122", "11 rows", "vocabulary"
    ),
    "a tokenizer for text that is none": ("generate run a --tokenizer nowhere", "no tokenizer nowhere", "'bytes'"),
}  # fmt: skip


def _write_files(folder: Path) -> None:
    texts = {
        "mine.py": _CONFIG,
        "broken.py": "x = 1\nx = (\n",
        "fails.py": "x = 1\nx / 0\n",
        "broken.yaml": "train: [1\n",
        "list.yaml": "- 1\n",
        "evil.yaml": "model: {_target_: os.system, command: ls}\n",
        "sectionless.yaml": "train: {steps: 3}\n",
        "text.txt": "once upon a time\n" * 9,
        "empty.txt": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("latin1.txt", "latin1.py", "latin1.yaml"):
        (folder / name).write_bytes("# café".encode("latin1"))
    (folder / "there").mkdir()
    write_token_file(folder / "good.npy", [np.arange(40) % 11], vocab_size=11)
    write_token_file(folder / "there" / "train.npy", [np.arange(9)], vocab_size=9)


def _started(*_: Any, **__: Any) -> None:
    raise AssertionError("processes were started")


def _exit(code: int) -> None:
    raise SystemExit(code)


def _outcome(words: Any) -> tuple[Any, str, str]:
    """The exit code, and what was written to the two streams."""
    out, err = io.StringIO(), io.StringIO()
    code: Any
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(words.split() if isinstance(words, str) else words)
        except SystemExit as error:
            code = error.code
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    return code, out.getvalue(), err.getvalue()


def _run_all(folder: Path) -> dict[str, tuple[Any, str, str]]:
    _write_files(folder)
    world = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch("tensorshard.trainer.launch.worker._exit_at_once", _exit),
        mock.patch("tensorshard.trainer.launch.launcher.launch", _started),
        mock.patch("tensorshard.trainer.launch.launcher.visible_gpus", lambda: 0),
    ):
        made = _outcome("train mine.py --output run")
        found = {"the run that is right": made}
        found |= {what: _outcome(words) for what, (words, *_) in BY_WORKERS.items()}
        with mock.patch.dict(os.environ):
            for name in world:
                os.environ.pop(name, None)
            found |= {what: _outcome(words) for what, (words, *_) in AT_ONCE.items()}
    torch.distributed.barrier()  # the world is still there
    return found


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory) -> dict[str, tuple[Any, str, str]]:
    return ranks(1, _run_all, tmp_path_factory.mktemp("wrong"))[0]


@pytest.mark.parametrize("what", [*AT_ONCE, *BY_WORKERS])
def test_a_wrong_command_line(found, what):
    _, *expected = (AT_ONCE | BY_WORKERS)[what]
    code, _, written = found[what]
    assert code == 2, f"the exit code is {code}:\n{written}"
    sentence = " ".join(written.partition(": error: ")[2].split())  # as terminals may break its lines
    missing = [word for word in expected if word not in sentence]
    assert sentence and "Traceback" not in written
    assert not missing, f"it does not say {missing}:\n{written}"


def test_what_is_right_runs(found):
    code, printed, written = found["the run that is right"]
    assert code == 0, written
    assert "step" in printed

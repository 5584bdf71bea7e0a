"""Every block of code in README and docs runs as it is printed, or says in a comment why it does not."""

import contextlib
import glob
import io
import os
import re
import shlex
import sys
from collections import Counter
from dataclasses import fields
from functools import partial
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

import pretrained_models
import tensorshard as ts
from pages import PAGES, ROOT, blocks
from tensorshard import Plan, cli
from tensorshard.config import instantiate, load_config
from tensorshard.data import StdlibText, write_token_file
from tensorshard.models import GPT, next_token_loss

# Pages with Python code, and on how many ranks it runs.
RANKS = {
    "README.md": 2,
    "docs/adapters.md": 2,
    "docs/axes.md": 1,
    "docs/context-parallelism.md": 1,
    "docs/expert-parallelism.md": 1,
    "docs/checkpoints.md": 2,
    "docs/clusters.md": 2,
    "docs/coming-from.md": 2,
    "docs/coupled-losses.md": 2,
    "docs/custom-parallel-layer.md": 2,
    "docs/data.md": 2,
    "docs/estimate.md": 1,
    "docs/exactness.md": 4,
    "docs/heads.md": 2,
    "docs/logits.md": 2,
    "docs/losses.md": 2,
    "docs/offload.md": 1,
    "docs/optimizers.md": 2,
    "docs/pipelines.md": 4,
    "docs/planning.md": 1,
    "docs/port-my-script.md": 2,
    "docs/pretrained.md": 4,
    "docs/quickstart.md": 4,
    "docs/several-models.md": 2,
    "docs/tensor-parallelism.md": 2,
    "docs/torchshard.md": 2,
    "docs/training.md": 1,
    "docs/your-own-loop.md": 2,
}
NOT_RUN = {
    "installs packages; .ci/run runs it": 3,
    "takes hours": 2,
    "needs accelerate; tests/docs/test_coming_from.py runs it where it is": 1,
    "needs datasets; tests/data/test_packing.py runs the same where it is": 1,
    "needs deepspeed; tests/docs/test_coming_from.py runs it where it is": 1,
    "needs lightning": 2,
    "needs torchao": 1,
    "needs Paddle": 1,
    "needs two machines; tests/docs/test_clusters.py runs it on one": 3,
    "needs Kubernetes; tests/docs/test_clusters.py reads it": 1,
    "needs Ray; tests/docs/test_clusters.py runs it where Ray is": 1,
    "train.py is the block above, which runs on 2 ranks": 1,
    "train.py is the block above, which runs on 4 ranks": 1,
    "installs packages": 1,
    "makes the model that the test makes, too": 1,
    "for GitHub": 1,
    "needs Slurm": 1,
    "needs GPUs; tests/benchmarks/test_gpu_checks.py runs it on the CPU": 1,
}
OWN_PLAN = 'ts.Plan(zero=3, precision="bf16", clip_grad_norm=1.0)'  # of docs/your-own-loop.md
ELSEWHERE = ("docs/estimate.md", "docs/planning.md")  # they are about a world that is not there
SHOWN = {"", "text", "diff"}  # what no program runs: tables, pictures, what is printed


def test_every_block_is_run_or_says_why_not():
    found = [block for page in PAGES for block in blocks(page)]
    assert {block.page for block in found if block.language == "python"} == set(RANKS)
    assert {block.language for block in found} <= SHOWN | {"python", "yaml", "bash", "sh"}
    assert Counter(block.reason for block in found if block.reason) == NOT_RUN


def test_the_readme_is_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) < 1200
    assert "GPUs yet" in readme[: readme.index("```bash")]  # what was not tried, in the first screen


def test_the_readmes_first_script_is_the_file():
    first = next(block for block in blocks("README.md") if block.language == "python")
    assert first.code == (ROOT / "examples" / "train.py").read_text(encoding="utf-8")


def _rows_of_the_readme() -> dict[str, str]:
    """What stands beside each name of the table of what it does."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- can -->")[2].partition("<!-- /can -->")[0]
    return dict(re.findall(r"^\| \*\*(.+?)\*\* \| (.+) \|$", table, re.MULTILINE))


@pytest.mark.parametrize("name", _rows_of_the_readme())
def test_what_the_readme_lists_is_there(name, capsys):
    row = _rows_of_the_readme()[name]
    for code in re.findall(r"`([^`]+)`", row):
        if found := re.match(r"(?:Plan\()?(\w+=.*?)\)?$", code):
            assert eval(f"Plan({found[1]})", {"Plan": Plan})
        elif found := re.match(r"(ts|engine)\.([\w.]+)", code):
            attrgetter(found[2])(ts if found[1] == "ts" else ts.Engine)
        elif found := re.match(r"tensorshard (\w+)$", code):
            with pytest.raises(SystemExit, match=r"^0$"):
                cli.main([found[1], "--help"])
        else:
            assert code == "nn.Module"
    linked = re.findall(r"\]\((docs/[\w-]+\.md)\)", row)
    assert any(page in RANKS for page in linked) or linked == ["docs/models.md"] or "`Plan(" in row


def test_the_readme_lists_every_axis_and_what_was_counted():
    rows = " ".join(_rows_of_the_readme().values())
    assert [axis for axis in ("dp_replicate", "tp", "pp", "cp", "ep", "zero") if f"{axis}=" not in rows] == []
    (said,) = re.findall(r"Of (\d+) models .*?exact for (\d+), `tp=2` for (\d+), `pp=2` for (\d+)", rows)
    results = (ROOT / "benchmarks" / "results" / "models.md").read_text(encoding="utf-8")
    counts = [
        re.search(rf"^\| {plan} \| (\d+) \| (\d+) ", results, re.MULTILINE) for plan in ("ZeRO 3", "tp 2", "pp 2")
    ]
    assert list(said) == [counts[0][1], *(count[2] for count in counts)]


def _what_it_cannot_do() -> list[str]:
    said = []
    model = partial(GPT, vocab_size=64, context_length=16, num_layers=2, num_heads=2, width=32)
    given = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "loss_fn": next_token_loss}
    for attempt in (
        lambda: ts.parallelize(model, Plan(cp=2, compile=True), **given),
        lambda: ts.parallelize(model, Plan(pp=2, micro_batches=2), **given).model(torch.zeros(4, 16, dtype=torch.long)),
    ):
        try:
            attempt()
            said.append("")
        except Exception as error:
            said.append(str(error))
    return said


def test_what_the_readme_says_that_it_cannot_do_is_refused(ranks):
    compiled, called = ranks(2, _what_it_cannot_do)[0]
    assert "cp=2" in compiled and "engine.step" in called


# -- Python --


def _write_inputs(folder: Path) -> None:
    """The files that the pages read."""
    (folder / "path" / "to").mkdir(parents=True)
    pretrained_models.llama().save_pretrained(folder / "path" / "to" / "llama")
    pretrained_models.bert().save_pretrained(folder / "path" / "to" / "bert")
    torch.save(torch.nn.Linear(16, 4).state_dict(), folder / "weights.pt")
    for name in ("train", "validation"):
        write_token_file(folder / f"{name}.npy", [np.arange(2050) % 256], vocab_size=256)


def _run_page(page: str, folder: Path, plan: str | None = None) -> dict[str, Any]:
    """Runs a page's Python blocks one after the other; returns what they left that can be told.

    Args:
        plan: in place of that of docs/your-own-loop.md.
    """
    names: dict[str, Any] = {"__name__": "page"}
    if page in ELSEWHERE:
        dist.destroy_process_group()
    short = mock.patch.object(StdlibText, "__len__", lambda self: 40)  # an epoch of 3 batches, the last of 8 samples
    torch.manual_seed(1)
    # Where this forbids AVX-512 to a processor that has it, torch's kernel for bf16 packs all the same, and raises.
    narrow = os.environ.get("ATEN_CPU_CAPABILITY", "avx512") != "avx512"
    kernels = sdpa_kernel(SDPBackend.MATH) if narrow else contextlib.nullcontext()
    # Nobody says a rank to a world of one that follows an estimate.
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    alone = mock.patch.dict(os.environ, outside, clear=True) if page in ELSEWHERE else contextlib.nullcontext()
    with contextlib.chdir(folder), short, kernels, alone:
        for block in blocks(page):
            if block.language == "python" and not block.reason:
                # So that errors show the page's line.
                code = block.code if plan is None else block.code.replace(OWN_PLAN, plan)
                exec(compile("\n" * block.line + code, str(ROOT / page), "exec"), names)
        for name in ("check", "main"):
            if name in names:
                names[name]()
    found = {"seen": sorted(names["seen"])} if "seen" in names else {}
    if "engine" in names:
        found["steps"] = names["engine"].step_count
    if isinstance(names.get("loss"), torch.Tensor | tuple):  # a mean, or a sum and a count
        total, count = names["loss"] if isinstance(names["loss"], tuple) else (names["loss"], 1)
        found["loss"] = float(total / count)
    return found


def _check_readme(found: dict[str, Any], folder: Path) -> None:
    assert found["steps"] == 3 + 1 and 4 < found["loss"] < 6


def _check_own_loop(found: dict[str, Any], folder: Path) -> None:
    assert found["steps"] == 2 * 32 + 13  # two epochs of 32 batches, then the sections' own
    assert found["seen"] == sorted(
        f"{name}.{kind}" for name in ("blocks.0.0", "blocks.1.0", "head", "inlet") for kind in ("bias", "weight")
    )
    assert (folder / "checkpoints" / "weights.pt").is_file()


def _check_pretrained(found: dict[str, Any], folder: Path) -> None:
    assert (folder / "finetuned" / "config.json").is_file()


def _check_quickstart(found: dict[str, Any], folder: Path) -> None:
    assert found["steps"] == 2 * 5 and found["loss"] < 4
    assert (folder / "checkpoints" / "last" / "engine.json").is_file()
    assert (folder / "finetuned" / "model.safetensors").is_file()


CHECKS = {
    "docs/quickstart.md": _check_quickstart,
    "README.md": _check_readme,
    "docs/your-own-loop.md": _check_own_loop,
    "docs/pretrained.md": _check_pretrained,
}


@pytest.mark.slow_cases("docs/pipelines.md", "docs/pretrained.md", "docs/quickstart.md")
@pytest.mark.parametrize("page", RANKS)
def test_python_runs(ranks, page, tmp_path):
    ranks(1, _write_inputs, tmp_path)
    found = ranks(RANKS[page], _run_page, page, tmp_path)
    CHECKS.get(page, lambda *_: None)(found[0], tmp_path)


@pytest.mark.slow_cases("ts.Plan(zero=0)")
@pytest.mark.parametrize(
    "plan",
    [
        "ts.Plan(zero=0)",
        pytest.param('ts.Plan(zero=2, precision="bf16")', marks=pytest.mark.slow),
        pytest.param("ts.Plan(tp=2)", marks=pytest.mark.slow),
    ],
)
def test_a_loop_of_ones_own_runs_under_other_plans(ranks, plan, tmp_path):
    assert any(OWN_PLAN in block.code for block in blocks("docs/your-own-loop.md"))
    found = ranks(2, _run_page, "docs/your-own-loop.md", tmp_path, plan)[0]
    _check_own_loop(found, tmp_path)


def test_the_config_of_training_is_one(tmp_path, monkeypatch):
    write_token_file(tmp_path / "train.npy", [np.arange(2050) % 256], vocab_size=256)
    (block,) = (block for block in blocks("docs/training.md") if block.language == "python")
    (tmp_path / "my_config.py").write_text(block.code)
    monkeypatch.chdir(tmp_path)
    config = load_config(
        "my_config.py", ["model.context_length=32", "train.plan.dp_shard=2", "optimizer.betas=[0.9,0.99]"]
    )
    assert len(instantiate(config.data.train)) == 2049 // 32
    assert config.optimizer.betas == [0.9, 0.99] and config.train.plan.micro_batches == 4


@pytest.mark.parametrize("page", PAGES)
def test_yaml_is_a_config(page, tmp_path):
    for block in blocks(page):
        if block.language == "yaml" and not block.reason:
            OmegaConf.create(block.code)
            (tmp_path / "config.yaml").write_text(block.code)
            load_config(tmp_path / "config.yaml")


def test_a_page_has_every_field_of_a_plan():
    page = (ROOT / "docs" / "axes.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(Plan) if not re.search(rf"`{field.name}\b", page)] == []


def test_the_architectures_files_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    sources = [path.as_posix() for path in (ROOT / "src" / "tensorshard").rglob("*.py")]
    missing = [
        name
        for name in sorted(named)
        if not (ROOT / name).is_file() and not any(path.endswith(f"/{name}") for path in sources)
    ]
    assert len(named) > 20 and not missing


# -- the command line --


class _Started(Exception):
    """Processes would be started now: all that can be checked before is."""


def _start(*_: Any, **__: Any) -> None:
    raise _Started


def _words(line: str) -> list[str]:
    """A line of shell as words, without comments, its globs expanded."""
    expanded: list[str] = []
    for word in shlex.split(line, comments=True):
        expanded += sorted(glob.glob(word)) or [word]
    return expanded


def _command(words: list[str]) -> str:
    """Runs a command of tensorshard up to the start of processes; of other programs, checks that it could run."""
    program, *rest = words
    if program == "tensorshard":
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code: Any = cli.main(rest)
            except _Started:
                return "started"
            except SystemExit as error:
                code = error.code
        return "done" if code == 0 else err.getvalue()
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(rest)
        program, rest = "python", [options.training_script, *options.training_script_args]
    if program == "python":
        return "done" if (ROOT / rest[0]).is_file() else f"there is no {rest[0]}"
    return f"{program} is not known"


def _run_commands(page: str, folder: Path) -> dict[str, str]:
    """What became of each line of a page's shell blocks."""
    tiny = "train.steps=1 train.save_every=1 train.eval_batches=1 model.width=16 model.num_layers=1 sample=null"
    started = mock.patch("tensorshard.trainer.launch.launcher.launch", _start)
    no_estimate = mock.patch("tensorshard.trainer.estimated_run.estimate_first", lambda *_, **__: (None, []))
    verified = mock.patch.object(import_module("tensorshard.verify.verify"), "notebook_launch", _start)
    with contextlib.chdir(folder), mock.patch.object(sys, "path", list(sys.path)), started, no_estimate, verified:
        Path("my_config.py").write_text((ROOT / "src/tensorshard/configs/quickstart.py").read_text())
        for file in Path().glob("*.npy"):  # which a command writes
            file.unlink()
        Path("book.txt").write_text("once upon a time\n" * 99)
        lines = [
            line
            for block in blocks(page)
            if block.language in ("bash", "sh") and not block.reason
            for line in block.code.replace("\\\n", " ").splitlines()
            if _words(line)
        ]
        assert _command(["tensorshard", "train", *tiny.split(), "--output", "runs/quickstart-1"]) == "done"
        Path("path/to/weights").mkdir(parents=True)
        save_file({"bias": torch.zeros(1)}, "path/to/weights/model.safetensors")  # workers would read it
        Path("runs/my_run-1").mkdir(parents=True)
        Path("runs/my_run-1/checkpoints").mkdir()
        Path("runs/wide-1").mkdir()
        Path("runs/wide-1/config.yaml").write_text("train: {steps: 1000}\n")
        Path("runs/my_run-1/checkpoints/step-1000").symlink_to(folder / "runs/quickstart-1/checkpoints/step-1")
        with mock.patch.dict(os.environ):
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
            found = {}
            for line in lines:
                found[line] = _command(_words(line))
                for written in ("weights",):  # two lines that write the same are alternatives
                    Path(written).rename(f"{written}-{len(found)}") if Path(written).is_dir() else None
    return found


_WITH_COMMANDS = [p for p in PAGES if any(b.language in ("bash", "sh") and not b.reason for b in blocks(p))]


@pytest.mark.parametrize("page", _WITH_COMMANDS)
def test_commands_run(ranks, page, tmp_path):
    ranks(1, _write_inputs, tmp_path)
    found = ranks(1, _run_commands, page, tmp_path)[0]
    wrong = {line: outcome for line, outcome in found.items() if outcome not in ("done", "started")}
    assert not wrong

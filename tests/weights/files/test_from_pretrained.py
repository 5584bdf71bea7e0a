"""Weights that exist already, under any plan: trained from files as one process does, and written for others."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pretrained_models
import tensorshard as ts
from log_lines import logged
from pretrained_models import token_loss

ADAMW = partial(torch.optim.AdamW, lr=1e-2, eps=1e-4)
BATCH = torch.arange(4 * 12).view(4, 12) * 7 % 61


def _train(directory: Path, fields: dict[str, Any], out: Path | None) -> tuple[float, dict[str, torch.Tensor]]:
    engine = ts.parallelize(
        ts.from_pretrained(directory), ts.Plan(**fields), optimizer=ADAMW, loss_fn=token_loss, seed=5
    )
    mine = BATCH.tensor_split(engine.mesh.dp_size)[engine.mesh.dp_rank]
    for _ in range(2):
        loss = engine.step({"input_ids": mine}, mine)
    if out is not None:
        engine.save_pretrained(out, max_shard_size="40KB")
    return loss.item(), engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "size"),
    [
        ("llama", {"zero": 3}, 2),
        ("llama-tied", {"tp": 2, "zero": 1}, 2),
        pytest.param("llama-tied", {"pp": 2, "micro_batches": 2}, 2, marks=pytest.mark.slow),
        ("mixtral", {"tp": 2}, 2),
        pytest.param("llama", {"pp": 2, "tp": 2, "micro_batches": 2}, 4, marks=pytest.mark.slow),
    ],
)
def test_in_trained_and_out(ranks, tmp_path, kind, fields, size):
    directory = pretrained_models.write(kind, tmp_path / "in")
    found, state = ranks(size, _train, directory, fields, tmp_path / "out")[0]
    model = pretrained_models.KINDS[kind]().from_pretrained(directory)
    optimizer = ADAMW(model.parameters())
    for _ in range(2):
        loss = token_loss(model(BATCH), BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == pytest.approx(loss.item(), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
    again = type(model).from_pretrained(tmp_path / "out")
    assert again.config.architectures == [type(model).__name__]
    for name, value in again.state_dict().items():
        assert torch.equal(value, state[name]), name
    with torch.no_grad():
        torch.testing.assert_close(again(BATCH).logits, model(BATCH).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", pretrained_models.KINDS)
def test_files_are_called_and_filled_as_transformers_does(ranks, tmp_path, kind):
    directory = pretrained_models.write(kind, tmp_path / "in")
    ranks(1, _copy, directory, tmp_path / "out", torch.bfloat16)
    read = [_read(directory), _read(tmp_path / "out")]
    assert read[0].keys() == read[1].keys()
    assert all(torch.equal(value.bfloat16(), read[1][name]) for name, value in read[0].items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def _copy(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    engine = ts.parallelize(ts.from_pretrained(source), ts.Plan(), optimizer=ADAMW, loss_fn=token_loss)
    engine.save_pretrained(target, dtype=dtype, max_shard_size="15KB")


def _read(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def test_a_new_head_starts_as_its_constructor_makes_it_and_that_is_said(ranks, tmp_path):
    pretrained_models.bert().save_pretrained(tmp_path / "base")
    state, said = ranks(1, _with_a_new_head, tmp_path / "base")[0]
    stored = _read_one(tmp_path / "base")
    assert all(torch.equal(state[f"bert.{name}"], value) for name, value in stored.items())
    assert state["classifier.weight"].std() > 0
    assert any(
        "has no classifier.weight, classifier.bias; the model's constructor initialises them" in line for line in said
    )


def _read_one(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _with_a_new_head(directory: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    from transformers import AutoConfig, BertForSequenceClassification

    config = AutoConfig.from_pretrained(directory)
    pretrained = ts.from_pretrained(directory, lambda: BertForSequenceClassification(config))
    with logged() as lines:
        engine = ts.parallelize(pretrained, ts.Plan(), optimizer=ADAMW, loss_fn=token_loss)
    return engine.full_state_dict(), lines


class _Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.layers[2].weight if width == 3 else self.head.weight
        self.register_buffer("steps", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


@pytest.mark.parametrize("wrapped", ["", "module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("under", [None, "model"])
def test_a_state_dict_of_torch_save(tmp_path, wrapped, under):
    model = _Plain(width=3)
    with torch.no_grad():
        model.steps.fill_(9)
    state = {wrapped + name: value for name, value in model.state_dict().items()}
    torch.save({under: state, "step": 3} if under else state, tmp_path / "weights.pt")
    loaded = ts.from_pretrained(tmp_path / "weights.pt", partial(_Plain, width=3))()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert loaded.head.weight is loaded.layers[2].weight and loaded.steps == 9


def test_a_plain_model_goes_out_and_in(ranks, tmp_path):
    ranks(2, _write_plain, tmp_path / "plain")
    loaded = ts.from_pretrained(tmp_path / "plain", partial(_Plain, width=3))()
    assert loaded.head.weight is loaded.layers[2].weight
    assert torch.equal(loaded.head.weight, torch.full((3, 3), 0.5))
    assert sorted(file.name for file in (tmp_path / "plain").iterdir()) == ["model.safetensors", "tokenizer.json"]


def _write_plain(directory: Path) -> None:
    model = _Plain(width=3)
    nn.init.constant_(model.head.weight, 0.5)
    engine = ts.parallelize(model, ts.Plan(zero=3), optimizer=ADAMW, loss_fn=lambda output, target: output.mean())
    engine.save_pretrained(directory)
    with pytest.raises(FileExistsError, match="is not overwritten"):
        engine.save_pretrained(directory)
    torch.distributed.barrier()
    if engine.mesh.rank == 0:
        (directory / "tokenizer.json").write_text("mine")
        (directory / "model-00001-of-00002.safetensors").write_text("of an older one")
    engine.save_pretrained(directory, overwrite=True)
    with pytest.raises(ValueError, match="max_shard_size='much' was given; it must be a number of bytes"):
        engine.save_pretrained(directory / "other", max_shard_size="much")


def test_bad_inputs_are_sentences(ranks, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is downloaded"):
        ts.from_pretrained(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"has no config.json, which would say whose weights"):
        ts.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"files of weights were expected .*; it has none"):
        ts.from_pretrained(tmp_path, _Plain)
    with pytest.raises(TypeError, match="from_pretrained needs what builds it"):
        ts.from_pretrained(tmp_path, _Plain())  # type: ignore[arg-type]
    torch.save(_Plain(), tmp_path / "module.pt")
    with pytest.raises(ValueError, match="holds more than tensors, numbers and containers, and is not opened"):
        ts.from_pretrained(tmp_path / "module.pt", _Plain)
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match="is not a safetensors file, or is cut off"):
        ts.from_pretrained(tmp_path / "cut.safetensors", _Plain)
    torch.save(_Plain(width=16).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(ValueError, match=r"layers.0.weight has shape \(16, 4\) in the files and \(8, 4\) in the model"):
        ts.from_pretrained(tmp_path / "wide.pt", _Plain)()
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="has no weight of this _Plain: its names are like a, the model's like"):
        ts.from_pretrained(tmp_path / "other.pt", _Plain)()
    with pytest.raises(FileNotFoundError, match=r"names 1 files of weights, of which 1 are not there, such as a.pt"):
        (tmp_path / "index.json").write_text('{"weight_map": {"a": "a.pt"}}')
        ts.from_pretrained(tmp_path / "index.json", _Plain)
    with pytest.raises(AssertionError, match=r"rank 1 finds other files in .* than rank 0"):
        ranks(2, _other_files, tmp_path)


def _other_files(directory: Path) -> None:
    rank = torch.distributed.get_rank()
    state = _Plain().state_dict()
    torch.save(state if rank == 0 else {**state, "more": torch.ones(1000)}, directory / f"of{rank}.pt")
    pretrained = ts.from_pretrained(directory / f"of{rank}.pt", _Plain)
    ts.parallelize(pretrained, ts.Plan(), optimizer=ADAMW, loss_fn=token_loss)

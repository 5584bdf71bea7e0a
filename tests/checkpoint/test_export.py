"""Checkpoints of any plan, written for other programs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrained_models
import tensorshard as ts
from pretrained_models import token_loss
from tensorshard import cli
from tensorshard.checkpoint.export import export_checkpoint
from tensorshard.trainer.initial_model import initial_model

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
BATCH = torch.arange(4 * 12).view(4, 12) * 7 % 61


def _save(kind: str, directory: Path, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    build = pretrained_models.KINDS[kind]
    engine = ts.parallelize(build, ts.Plan(**fields), optimizer=SGD, loss_fn=token_loss)
    mine = BATCH.tensor_split(engine.mesh.dp_size)[engine.mesh.dp_rank]
    engine.step({"input_ids": mine}, mine)
    engine.save(directory)
    return engine.full_state_dict()


@pytest.mark.parametrize(
    ("kind", "fields"), [("mixtral", {"zero": 3}), ("llama-tied", {"pp": 2, "micro_batches": 2}), ("gpt2", {"tp": 2})]
)
def test_what_others_read_is_what_was_trained(ranks, tmp_path, capsys, kind, fields):
    state = ranks(2, _save, kind, tmp_path / "saved", fields)[0]
    saved = str(tmp_path / "saved")
    assert cli.main(["export", saved, str(tmp_path / "hf"), "--max-shard-size", "40KB"]) == 0
    assert "model.safetensors.index.json" in capsys.readouterr().out
    opened = pretrained_models.KINDS[kind]().from_pretrained(tmp_path / "hf").state_dict()
    assert opened.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in opened.items())
    assert cli.main(["export", saved, str(tmp_path / "torch"), "--to", "torch", "--dtype", "bf16"]) == 0
    loaded = torch.load(tmp_path / "torch" / "model.pt", weights_only=True)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in loaded.items())
    assert cli.main(["export", saved, str(tmp_path / "torch"), "--to", "torch", "--overwrite"]) == 0
    assert torch.load(tmp_path / "torch" / "model.pt", weights_only=True)[next(iter(state))].dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "saved", "torch"]


def test_bad_calls_are_sentences_and_write_nothing(ranks, tmp_path, capsys):
    ranks(1, _save, "gpt2", tmp_path / "saved", {})
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    for words, said in {
        ("saved",): "export takes a checkpoint and a directory to write, and was given",
        ("there", "new"): "is not a checkpoint of tensorshard: it has no file engine.json",
        ("saved", "there"): "move it away, or give --overwrite, which replaces it",
        ("saved", "there", "--overwrite"): "is not a directory of weights, so --overwrite does not replace it",
        ("saved", "new", "--max-shard-size", "some"): "max_shard_size='some' was given; it must be a number of bytes",
    }.items():
        for to in ("hf", "torch"):
            paths = [str(tmp_path / word) if word in ("saved", "there", "new") else word for word in words]
            assert cli.main(["export", *paths, "--to", to]) == 2
            assert said in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ValueError, match="to='onnx' was given; it must be 'hf' or 'torch'"):
        export_checkpoint(tmp_path / "saved", tmp_path / "new", to="onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "there"]


def test_a_config_names_the_files_that_training_starts_from(tmp_path):
    from tensorshard.config import ConfigError, load_config
    from tensorshard.models import GPT

    given = GPT(vocab_size=256, context_length=16, num_layers=1, num_heads=2, width=16)
    torch.save(given.state_dict(), tmp_path / "gpt.pt")
    sizes = ["model.context_length=16", "model.num_layers=1", "model.num_heads=2", "model.width=16"]
    config = load_config("quickstart", [*sizes, f"model.pretrained={tmp_path / 'gpt.pt'}"])
    built = initial_model(config.model)()
    assert all(torch.equal(value, given.state_dict()[name]) for name, value in built.state_dict().items())
    with pytest.raises(ConfigError, match=r"model.pretrained=none.pt: there is no file or directory none.pt"):
        initial_model(load_config("quickstart", ["model.pretrained=none.pt"]).model)
    assert type(initial_model(load_config("quickstart", sizes).model)()) is GPT

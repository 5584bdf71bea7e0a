"""Text from a trained model, on the command line and at the end of a run."""

import contextlib
import io
from functools import partial
from pathlib import Path

import pytest
import torch

import pretrained_models
import tensorshard as ts
from tensorshard.commands.export import _copy_tokenizer
from tensorshard.config import ConfigError, load_config, save_config
from tensorshard.data.text import find_codec
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.text import TextSettings, find_model, print_text, tokenizer_of

SIZES = ["model.context_length=32", "model.num_layers=1", "model.num_heads=2", "model.width=16"]


def _run(directory: Path) -> tuple[str, str]:
    """A run that has trained nothing; what its checkpoint says, and what the model that wrote it does."""
    config = load_config("quickstart", SIZES)
    (directory / "checkpoints").mkdir(parents=True)
    save_config(config, directory / "config.yaml")
    engine = ts.parallelize(
        initial_model(config.model), ts.Plan(), optimizer=partial(torch.optim.AdamW, lr=0.1), loss_fn=lambda o, t: o
    )
    engine.save(directory / "checkpoints" / "step-0")
    tokens = engine.generate(torch.tensor([list(b"def ")]), max_new_tokens=8)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_text(str(directory), TextSettings("def ", max_new_tokens=8, temperature=0.0))
    return printed.getvalue(), find_codec("bytes").decode(tokens[0].tolist())


def test_a_runs_newest_checkpoint_continues_a_prompt(ranks, tmp_path):
    printed, expected = ranks(1, _run, tmp_path / "run")[0]
    assert printed.startswith("def ")
    assert [a for a in printed.rstrip("\n") if a.isalnum()] == [b for b in expected if b.isalnum()]
    assert find_model(tmp_path / "run" / "checkpoints" / "step-0")[1] == "bytes"


def test_a_directory_of_transformers_has_its_own_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    directory = pretrained_models.write("llama", tmp_path / "in")
    assert find_model(directory)[1] is None
    with pytest.raises(ConfigError, match=r"does not say which tokenizer its model has: give --tokenizer FILE"):
        print_text(str(directory), TextSettings("once"))
    words = {"[UNK]": 0, "once": 1, "upon": 2, "time": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    codec = find_codec(find_model(directory)[1])
    assert codec.encode("once upon it") == [1, 2, 0] and codec.decode([1, 3]) == "once time"


def test_what_cannot_be_asked_is_told(tmp_path):
    with pytest.raises(ConfigError, match="has no model; expected the directory of a run with a checkpoint, one of"):
        find_model(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer .*; give a tokenizer.json, its directory, or"):
        find_codec(str(tmp_path / "none.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer.json"):
        find_codec(str(tmp_path / "bad.json"))
    with pytest.raises(ConfigError, match="there is no key 'promt'; did you mean"):
        TextSettings.from_config({"promt": "a"})


def test_a_run_on_text_has_the_tokenizer_that_it_was_trained_with(tmp_path):
    config = load_config("hf", [f"model.pretrained={tmp_path}", "text.tokenizer=words/tokenizer.json"])
    assert tokenizer_of(config) == "words/tokenizer.json"
    assert tokenizer_of(load_config("hf", [f"model.pretrained={tmp_path}"])) == str(tmp_path)
    assert tokenizer_of(load_config("quickstart", [])) == "bytes"


def test_an_export_has_the_tokenizer_of_its_run(tmp_path):
    run, words = tmp_path / "runs" / "one", tmp_path / "words"
    words.mkdir(parents=True)
    (words / "tokenizer.json").write_text("{}")
    (words / "tokenizer_config.json").write_text("{}")
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    save_config(load_config("hf", [f"model.pretrained={words}"]), run / "config.yaml")
    target = tmp_path / "out"
    target.mkdir()
    _copy_tokenizer(run / "checkpoints" / "step-1", target)
    assert sorted(file.name for file in target.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    _copy_tokenizer(tmp_path / "elsewhere" / "step-1", target)  # of no run

"""Files that are not there, are damaged, or hold something else: each told in a sentence."""

import json
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tensorshard as ts
from tensorshard.data import MaskedTokens, ShardedBatchSampler, StdlibText, TokenDataset, TokenFile, write_token_file
from wrong_inputs import Case, Said, assert_refused, say_all

SGD = partial(torch.optim.SGD, lr=0.1)


class Files:
    """A folder of files that are wrong, each in its way."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = partial(nn.Linear, 6, 3)
        for name in ("empty", "two", "no_model", "missing", "bad_config", "bad_index"):
            (folder / name).mkdir()
        weights = nn.Linear(6, 3).state_dict()
        save_file(weights, folder / "good.safetensors")
        for name in ("a", "b"):
            save_file(weights, folder / "two" / f"{name}.safetensors")
        save_file(weights, folder / "no_model" / "model.safetensors")
        save_file(weights, folder / "bad_config" / "model.safetensors")
        (folder / "bad_config" / "config.json").write_text("{")
        save_file({"other": torch.zeros(3)}, folder / "other.safetensors")
        save_file({"weight": torch.zeros(4, 6), "bias": torch.zeros(4)}, folder / "wider.safetensors")
        (folder / "cut.safetensors").write_bytes((folder / "good.safetensors").read_bytes()[:-9])
        (folder / "bad_index" / "model.safetensors.index.json").write_text("[]")
        index = json.dumps({"weight_map": {"weight": "model-1.safetensors"}})
        (folder / "missing" / "model.safetensors.index.json").write_text(index)
        torch.save({"weight": Path("x")}, folder / "code.pt")
        torch.save([torch.zeros(2)], folder / "list.pt")
        (folder / "old.pt").write_bytes(pickle.dumps({}))
        (folder / "weights.npz").write_bytes(b"")
        (folder / "text.txt").write_text("once")
        write_token_file(folder / "good.npy", [np.arange(20)], vocab_size=20)
        (folder / "cut.npy").write_bytes((folder / "good.npy").read_bytes()[:-3])
        engine = self.parallelize(self.model())
        engine.save(folder / "checkpoint")
        (folder / "damaged").mkdir()
        (folder / "damaged" / "engine.json").write_text("{")
        (folder / "latin1").mkdir()
        (folder / "latin1" / "engine.json").write_bytes(b'{"caf\xe9": 1}')
        (folder / "keyless").mkdir()
        (folder / "keyless" / "engine.json").write_text('{"format": 1}')
        (folder / "newer").mkdir()
        (folder / "newer" / "engine.json").write_text('{"format": 99}')

    def parallelize(self, model: Any, optimizer: Any = SGD) -> ts.Engine:
        return ts.parallelize(model, ts.Plan(), optimizer=optimizer, loss_fn=nn.functional.cross_entropy)

    def start_from(self, name: str) -> ts.Engine:
        return self.parallelize(ts.from_pretrained(self.folder / name, self.model))


WEIGHTS: dict[str, Case] = {
    "no such directory": (lambda f: f.start_from("nowhere"), "nowhere", "nothing is downloaded"),
    "a name of a model": (lambda f: ts.from_pretrained("org/llama"), "org/llama", "snapshot_download"),
    "no path": (lambda f: ts.from_pretrained(None), "path is None", "a directory or a file"),
    "an empty directory": (lambda f: f.start_from("empty"), "model.safetensors", "it has none"),
    "a directory of two": (lambda f: f.start_from("two"), "a.safetensors, b.safetensors", "name one"),
    "no config.json": (lambda f: ts.from_pretrained(f.folder / "no_model"), "config.json"),
    "a broken config.json": (lambda f: ts.from_pretrained(f.folder / "bad_config"), "bad_config", "config.json"),
    "an index that is none": (lambda f: f.start_from("bad_index"), "not an index of weights", "'weight_map'"),
    "an index of files that are gone": (lambda f: f.start_from("missing"), "not there", "model-1.safetensors"),
    "a file that is cut off": (lambda f: f.start_from("cut.safetensors"), "cut.safetensors", "cut off"),
    "a file that would run code": (lambda f: f.start_from("code.pt"), "code.pt", "could run code"),
    "a file of a list": (lambda f: f.start_from("list.pt"), "list.pt", "a state dict was expected"),
    "a pickle": (lambda f: f.start_from("old.pt"), "old.pt", "not a file of torch.save"),
    "a file of another kind": (lambda f: f.start_from("weights.npz"), "'.npz'", ".safetensors"),
    "another model's weights": (lambda f: f.start_from("other.safetensors"), "no weight of this Linear", "other"),
    "weights of another shape": (lambda f: f.start_from("wider.safetensors"), "weight", "(4, 6)", "(3, 6)"),
    "a model that is built": (
        lambda f: ts.from_pretrained(f.folder / "good.safetensors", nn.Linear(6, 3)), "model is a Linear", "a lambda"
    ),
}  # fmt: skip

CHECKPOINTS: dict[str, Case] = {
    "a directory of something else": (lambda f: f.start_from("good.safetensors").load(f.folder), "not a checkpoint"),
    "a damaged description": (lambda f: f.parallelize(f.model()).load(f.folder / "damaged"), "engine.json is damaged"),
    "a description that is not UTF-8": (
        lambda f: f.parallelize(f.model()).load(f.folder / "latin1"), "engine.json is damaged", "UTF-8"
    ),
    "a description without a key": (lambda f: f.parallelize(f.model()).load(f.folder / "keyless"), "keyless"),
    "one of another version": (
        lambda f: f.parallelize(f.model()).load(f.folder / "newer"), "format 99", "reads format"
    ),
    "another model's": (lambda f: f.parallelize(nn.Linear(6, 4)).load(f.folder / "checkpoint"), "(3, 6)", "(4, 6)"),
    "another optimizer's": (
        lambda f: f.parallelize(f.model(), torch.optim.AdamW).load(f.folder / "checkpoint"), "SGD", "AdamW"
    ),
}  # fmt: skip

DATA: dict[str, Case] = {
    "no such file": (lambda f: TokenDataset(f.folder / "no.npy", 4), "there is no token file", "no.npy"),
    "a text": (lambda f: TokenFile(f.folder / "text.txt"), "not a token file", "write_token_file"),
    "a file that is cut off": (lambda f: TokenFile(f.folder / "cut.npy"), "truncated or damaged"),
    "fewer tokens than a window": (lambda f: TokenDataset(f.folder / "good.npy", 20), "holds 20 tokens", "need 21"),
    "a window of nothing": (lambda f: TokenDataset(f.folder / "good.npy", 0), "context_length is 0", "at least 1"),
    "an array of floats": (lambda f: TokenDataset(np.zeros(9), 4), "float64[9]", "array of integers"),
    "a source that is none": (lambda f: TokenDataset(9, 4), "source has the type int", "token file"),
    "tokens above the vocabulary": (
        lambda f: write_token_file(f.folder / "x", [np.array([9])], vocab_size=9), "from 9 to 9", "0 to 8"
    ),
    "no tokens": (lambda f: write_token_file(f.folder / "x", [], vocab_size=9), "no tokens to write"),
    "a file that is there": (
        lambda f: write_token_file(f.folder / "good.npy", [np.array([1])], vocab_size=9), "already there"
    ),
    "a folder that is not": (
        lambda f: write_token_file(f.folder / "no" / "x", [np.array([1])], vocab_size=9), "no/x cannot be written"
    ),
    "a split that does not exist": (lambda f: StdlibText("val", 8), "split is 'val'", '"validation"'),
    "a folder without text": (lambda f: StdlibText("train", 8, root=f.folder), "no text", "write_token_file"),
    "a mask outside of the vocabulary": (
        lambda f: MaskedTokens(TokenDataset(np.arange(9), 4), vocab_size=9, mask_token=9), "mask_token is 9", "10"
    ),
    "a batch that does not divide": (lambda f: ShardedBatchSampler(9, 3, dp_size=2), "does not divide", "2 or 4"),
    "a rank that is not there": (lambda f: ShardedBatchSampler(9, 2, dp_rank=2, dp_size=2), "dp_rank is 2", "0 to 1"),
}  # fmt: skip

ALL = {
    f"{where}: {what}": case
    for where, cases in dict(weights=WEIGHTS, checkpoints=CHECKPOINTS, data=DATA).items()
    for what, case in cases.items()
}


def _say_all(folder: Path) -> dict[str, Said]:
    return say_all(ALL, Files(folder))


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory) -> dict[str, Said]:
    return ranks(1, _say_all, tmp_path_factory.mktemp("wrong"))[0]


@pytest.mark.parametrize("what", ALL)
def test_a_wrong_file(found, what):
    assert_refused(what, found[what], ALL[what])

"""Checkpoints in object stores: no rename, so the manifest decides."""

import os
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import tensorshard as ts
from tensorshard import cli
from tensorshard.checkpoint.integrity import DamagedCheckpointError, check, is_whole
from tensorshard.common import stores
from tensorshard.data import TokenDataset, write_token_file


def _engine() -> ts.Engine:
    return ts.parallelize(
        partial(torch.nn.Linear, 16, 4),
        ts.Plan(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=torch.nn.functional.mse_loss,
    )


def _step(engine: ts.Engine) -> float:
    generator = torch.Generator().manual_seed(engine.step_count)
    return engine.step(torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator)).item()


def _use(url: str) -> None:
    """Saves, replaces, loads, damages; at the end there is the checkpoint of step 2."""
    engine = _engine()
    _step(engine)
    engine.save(url)
    with pytest.raises(FileExistsError, match="is there already and is not overwritten"):
        engine.save(url)
    files = fsspec.core.url_to_fs(url)[0]
    first = set(files.find(url))
    _step(engine)

    original = stores.RemoteStore.write

    def fails(store: Any, file: str, data: bytes) -> None:
        if file == "manifest.json":
            raise OSError("the store has gone away")
        original(store, file, data)

    stores.RemoteStore.write = fails
    try:
        with pytest.raises(OSError, match="gone away"):
            engine.save(url, overwrite=True)
    finally:
        stores.RemoteStore.write = original
    assert set(files.find(url)) == first  # the one before it is untouched
    check(url)

    engine.save(url, overwrite=True, background=True)
    loss = _step(engine)
    engine.wait_for_save()
    assert len(files.find(url)) == 3
    other = _engine()
    other.load(url)
    assert other.step_count == 2 and _step(other) == loss
    assert cli.main(["checkpoint", url]) == 0
    data = next(name for name in files.find(url) if name.endswith("tensors-0.bin"))
    good = files.cat_file(data)
    files.pipe_file(data, good[:100] + bytes([good[100] ^ 4]) + good[101:])
    with pytest.raises(DamagedCheckpointError, match=r"tensors-0\.bin is damaged"):
        other.load(url)
    assert is_whole(url) and cli.main(["checkpoint", url]) == 1
    files.pipe_file(data, good)


def _in_memory() -> None:
    _use(f"memory://{uuid.uuid4().hex}/run/step-1")
    fsspec.filesystem("memory").pipe_file("/mine/thesis.tex", b"mine")
    with pytest.raises(FileExistsError, match=r"not of a checkpoint, such as thesis\.tex"):
        _engine().save("memory://mine", overwrite=True)
    with pytest.raises(ValueError, match="nostore"):
        _engine().save("nostore://mine/a")


def test_a_store_in_memory(ranks):
    ranks(1, _in_memory)


def _weights_in_memory(folder: Path) -> None:
    """Weights go to a store, and come from it: from a checkpoint, exports, and what the engine writes itself."""
    os.environ["TENSORSHARD_CACHE"] = str(folder)
    build, place = partial(torch.nn.Linear, 16, 4), f"memory://{uuid.uuid4().hex}"
    engine = _engine()
    _step(engine)
    engine.save(f"{place}/step-1")
    export = ["export", f"{place}/step-1"]
    assert cli.main([*export, f"{place}/hf"]) == cli.main([*export, f"{place}/torch", "--to", "torch"]) == 0
    assert cli.main([*export, f"{place}/hf"]) == 2 and cli.main([*export, f"{place}/step-1", "--overwrite"]) == 2
    engine.save_pretrained(f"{place}/saved", max_shard_size=100)  # two files, and an index
    expected = engine.full_state_dict()
    for name in ("step-1", "hf", "torch", "saved", "hf/model.safetensors", "saved/model.safetensors.index.json"):
        state = ts.from_pretrained(f"{place}/{name}", build)().state_dict()
        torch.testing.assert_close(state, expected, rtol=0, atol=0)
    _step(engine)
    engine.save_pretrained(f"{place}/saved", overwrite=True)
    files = fsspec.filesystem("memory").ls(f"{place}/saved", detail=False)
    assert [file.rpartition("/")[2] for file in files] == ["model.safetensors"]
    state = ts.from_pretrained(f"{place}/saved", build)().state_dict()  # not the copy of what was there before
    torch.testing.assert_close(state, engine.full_state_dict(), rtol=0, atol=0)
    with pytest.raises(FileNotFoundError, match="there is no file or folder memory"):
        ts.from_pretrained(f"{place}/none", build)


def test_weights_go_to_a_store_and_come_from_it(ranks, tmp_path):
    ranks(1, _weights_in_memory, tmp_path)


def test_a_token_file_in_a_store(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORSHARD_CACHE", "off")  # the copy ends with the process
    write_token_file(tmp_path / "train.npy", [np.arange(100)], vocab_size=200)
    for file in ("train.npy", "train.json"):
        fsspec.filesystem("memory").pipe_file(f"/tokens/{file}", (tmp_path / file).read_bytes())
    dataset = TokenDataset("memory://tokens/train.npy", context_length=10)
    assert dataset[3][0].tolist() == list(range(30, 40)) and dataset.source.vocab_size == 200
    dataset.source.verify()
    with pytest.raises(FileNotFoundError, match=r"no token file memory://tokens/test\.npy"):
        TokenDataset("memory://tokens/test.npy", context_length=10)


class _WithoutRights(MemoryFileSystem):
    """A bucket that may be read, and not written to."""

    protocol = "readable"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        raise PermissionError(f"Access Denied: {path}")

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"Access Denied: {path}")
        return super()._open(path, mode, **kwargs)


def _without_rights() -> None:
    fsspec.register_implementation("readable", _WithoutRights, clobber=True)
    engine = _engine()
    _step(engine)
    with pytest.raises((OSError, RuntimeError), match=r"readable://bucket/step-1.*Access Denied"):
        engine.save("readable://bucket/step-1")
    with pytest.raises((OSError, RuntimeError), match=r"readable://bucket/step-1.*Access Denied"):
        engine.save("readable://bucket/step-1", background=True)
        engine.wait_for_save()
    assert _WithoutRights.store == {} and engine.step_count == 1
    _step(engine)


def test_a_bucket_without_the_right_to_write(ranks):
    ranks(1, _without_rights)


def _in_s3() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        }.items():
            patch.setenv(name, value)
        try:
            fsspec.filesystem("s3").mkdir("bucket")
            _use("s3://bucket/run/step-1")
            with pytest.raises((OSError, RuntimeError), match="s3://missing/step-1"):
                _engine().save("s3://missing/step-1")
        finally:
            server.stop()


@pytest.mark.slow
def test_a_server_of_s3(ranks):
    pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    ranks(1, _in_s3)

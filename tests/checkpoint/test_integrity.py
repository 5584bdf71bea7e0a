"""What is wrong with a checkpoint is found, and named, before anything is changed."""

import json
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import parity
import tensorshard as ts
from tensorshard.checkpoint.integrity import DamagedCheckpointError, check, is_whole, why_not_whole
from tensorshard.weights.files.checkpoint_files import open_checkpoint, read_tensors
from tensorshard.weights.files.manifest import CHUNK, CheckedFile, ChecksummedWriter


def _linear() -> ts.Engine:
    return ts.parallelize(
        partial(torch.nn.Linear, 16, 4),
        ts.Plan(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        loss_fn=torch.nn.functional.mse_loss,
    )


def _flip_bits(folder: Path, tries: int) -> list[str]:
    """Loads with one flipped bit each; returns where it was not found, or something changed."""
    engine = _linear()
    engine.step(torch.ones(8, 16), torch.ones(8, 4))
    engine.save(folder / "saved", extra={"name": "run"})
    before = engine.full_state_dict()
    draws = random.Random(0)
    files = sorted((folder / "saved").iterdir(), key=lambda file: file.name)
    silent = []
    for number in range(tries):
        file = files[number % len(files)]
        good = file.read_bytes()
        place, bit = draws.randrange(len(good)), draws.randrange(8)
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        file.write_bytes(bad)
        try:
            engine.load(folder / "saved")
            silent.append(f"{file.name}: bit {bit} of byte {place}")
        except ValueError as error:
            if file.name not in str(error) or is_whole(folder / "saved") != (file.suffix == ".bin"):
                silent.append(str(error))
        file.write_bytes(good)
    engine.load(folder / "saved")
    after = engine.full_state_dict()
    return silent + [name for name, value in before.items() if not torch.equal(value, after[name])]


def test_each_flipped_bit_is_found(ranks, tmp_path):
    assert ranks(1, _flip_bits, tmp_path, 60)[0] == []


def _save(folder: Path, kind: str, fields: dict) -> None:
    engine = parity.make_engine(kind, fields)
    engine.step(*parity.shard(engine, *parity.batch(kind, 0)))
    engine.save(folder)


def _load(folder: Path, kind: str, fields: dict) -> tuple[str, int]:
    engine = parity.make_engine(kind, fields)
    try:
        engine.load(folder)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        return str(error), engine.step_count
    return "", engine.step_count


@pytest.mark.slow
def test_missing_and_cut_off_files_are_named_on_all_ranks(ranks, tmp_path):
    ranks(2, _save, tmp_path / "saved", "gpt", dict(zero=3))
    assert check(tmp_path / "saved").document["step_count"] == 1
    for file in sorted((tmp_path / "saved").iterdir()):
        for damage in ("missing", "cut off"):
            copy = tmp_path / f"{file.name} {damage}"
            shutil.copytree(tmp_path / "saved", copy)
            (copy / file.name).unlink()
            if damage == "cut off":
                (copy / file.name).write_bytes(file.read_bytes()[:-1])
            assert file.name in (why_not_whole(copy) or "")
            with pytest.raises(DamagedCheckpointError, match=file.name):
                check(copy)
            for message, steps in ranks(2, _load, copy, "gpt", dict(zero=3)):
                assert file.name in message and "load an older checkpoint" in message
                assert steps == 0


def test_what_ranks_read_of_a_file_is_checked_in_chunks(tmp_path):
    data = random.Random(0).randbytes(2 * CHUNK + 1000)
    with (tmp_path / "file").open("wb") as stream:
        writer = ChecksummedWriter(stream)
        for start in range(0, len(data), 1_000_003):
            writer.write(data[start : start + 1_000_003])
    entry = writer.entry()
    damaged = bytearray(data)
    damaged[CHUNK + 5] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    from tensorshard.common.stores import LocalStore

    found = bytearray(3000)
    with CheckedFile(LocalStore(tmp_path), "file", entry) as file:
        file.read_into(2 * CHUNK - 0, memoryview(found)[:1000])
        assert found[:1000] == data[2 * CHUNK :]
        file.read_into(CHUNK - 3000, memoryview(found))
        assert found == data[CHUNK - 3000 : CHUNK]
        with pytest.raises(DamagedCheckpointError, match="bytes 4,194,304 to 8,388,607"):
            file.read_into(CHUNK - 1, memoryview(found))
        whole = bytearray(CHUNK + 1000)  # a chunk that is read to its place, and the beginning of the next
        file.read_into(0, memoryview(whole)[:CHUNK])
        assert whole[:CHUNK] == data[:CHUNK]
        with pytest.raises(DamagedCheckpointError, match="bytes 4,194,304 to 8,388,607"):
            file.read_into(CHUNK, memoryview(whole)[:CHUNK])
        with pytest.raises(DamagedCheckpointError, match="bytes 4,194,304 to 8,388,607"):
            file.read_into(0, memoryview(whole))


def test_format_1_is_read(ranks, tmp_path):
    """It is torch's distributed checkpoint and engine.json, without a manifest."""
    ranks(2, _save, tmp_path / "new", "gpt", dict(zero=3))
    stored = open_checkpoint(tmp_path / "new")
    tensors = read_tensors(tmp_path / "new", "")
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "old"), no_dist=True)
    (tmp_path / "old" / "engine.json").write_text(json.dumps({**stored.document, "format": 1}))
    assert ranks(2, _load, tmp_path / "old", "gpt", dict(zero=1)) == [("", 1)] * 2
    assert is_whole(tmp_path / "old")
    check(tmp_path / "old")
    for name, value in read_tensors(tmp_path / "old", "model.").items():
        assert torch.equal(value, tensors[f"model.{name}"])
    (data,) = (tmp_path / "old").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-2000])
    assert data.name in (why_not_whole(tmp_path / "old") or "")

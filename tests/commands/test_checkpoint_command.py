"""``tensorshard checkpoint``."""

from pathlib import Path

import pytest

import parity
from tensorshard import cli


def _save(folder: Path) -> None:
    engine = parity.make_engine("gpt", dict(zero=3))
    engine.step(*parity.shard(engine, *parity.batch("gpt", 0)))
    engine.save(folder, extra={"scheduler": {}})


def test_it_says_what_a_checkpoint_holds_and_whether_it_is_whole(
    ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "saved"
    ranks(2, _save, path)
    assert cli.main(["checkpoint", str(path)]) == 0
    printed = capsys.readouterr().out
    for said in ("step       1", "zero=3, fp32, on 2 ranks", "weights: ", "optimizer states: ", "extra      scheduler"):
        assert said in printed
    assert f"{sum(file.stat().st_size for file in path.iterdir() if file.name != 'manifest.json'):,} bytes" in printed
    assert printed.endswith("whole      all bytes are as they were written\n")
    file = path / "tensors-1.bin"
    good = file.read_bytes()
    file.write_bytes(good[:500] + bytes([good[500] ^ 1]) + good[501:])
    assert cli.main(["checkpoint", str(path), "--quick"]) == 0
    assert cli.main(["checkpoint", str(path)]) == 1
    assert "tensors-1.bin is damaged: its bytes 0 to" in capsys.readouterr().err
    file.unlink()
    assert cli.main(["checkpoint", str(path)]) == 1
    assert "tensors-1.bin is missing" in capsys.readouterr().err
    for words, said in (([], "given nothing"), ([str(tmp_path)], "is not a checkpoint")):
        assert cli.main(["checkpoint", *words]) == 2
        assert said in capsys.readouterr().err

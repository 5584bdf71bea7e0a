"""Folders that are replaced: a crash at any instant leaves the old one or the new one, whole."""

import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from tensorshard.common import folders
from tensorshard.common.folders import WholeFolder, recover


class Crash(BaseException):
    """The process ends here."""


def _folder(target: Path) -> WholeFolder:
    return WholeFolder(target, ("part-*",), needed=1, kind="a folder of parts", overwrite=True)


def _write(target: Path, text: str) -> None:
    folder = _folder(target)
    for name in ("part-1", "part-2"):
        (folder.begin() if name == "part-1" else folder.temporary).joinpath(name).write_text(text)
    folder.finish()


def _held(target: Path) -> set[str]:
    return {(target / name).read_text() for name in ("part-1", "part-2")}


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("instant", range(6))
def test_a_crash_at_any_instant(tmp_path: Path, instant: int, exchanges: bool) -> None:
    target = tmp_path / "best"
    _write(target, "old")
    calls = iter(range(100))

    def crashing(function):
        def call(*args, **kwargs):
            if next(calls) == instant:
                raise Crash
            return function(*args, **kwargs)

        return call

    exchange = folders._exchange if exchanges else lambda one, other: False
    with (
        mock.patch.object(Path, "rename", crashing(Path.rename)),
        mock.patch.object(folders, "_exchange", crashing(exchange)),
        mock.patch.object(folders, "_sync", crashing(folders._sync)),
        mock.patch.object(shutil, "rmtree", crashing(shutil.rmtree)),
        suppress(Crash),
    ):
        _write(target, "new")
    recover(target)
    assert _held(target) in ({"old"}, {"new"})
    _write(target, "newer")
    assert _held(target) == {"newer"} and [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_crash_between_two_renames_is_mended(tmp_path: Path) -> None:
    target = tmp_path / "best"
    _write(target, "old")
    (tmp_path / "best").rename(tmp_path / ".best.replaced")
    with pytest.raises(FileExistsError, match="best is there already and is not overwritten"):
        WholeFolder(target, ("part-*",), needed=1, kind="a folder of parts", overwrite=False)
    assert _held(target) == {"old"}


def test_what_is_beside_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "best"
    _write(target, "old")
    (target / "part-3").write_text("old")
    (target / "notes").mkdir()
    (target / "notes" / "one").write_text("mine")
    (target / "link").symlink_to("nowhere")
    _write(target, "new")
    assert sorted(path.name for path in target.iterdir()) == ["link", "notes", "part-1", "part-2"]
    assert (target / "notes" / "one").read_text() == "mine" and (target / "link").is_symlink()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is not a folder of parts, so overwrite=True does not replace it"):
        _folder(tmp_path / "file")

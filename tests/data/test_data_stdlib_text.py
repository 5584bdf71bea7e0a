import sysconfig
from pathlib import Path

import pytest

from tensorshard.data import StdlibText


def text_of(dataset: StdlibText) -> bytes:
    return dataset.source.tobytes()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    for number in range(200):
        path = tmp_path / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"number = {number}\n")
    return tmp_path


def test_this_pythons_sources_are_split_by_file():
    train, validation = StdlibText("train", 128), StdlibText("validation", 128)
    assert 5_000_000 < len(text_of(train)) < 50_000_000
    assert 0.02 < len(text_of(validation)) / len(text_of(train)) < 0.12
    argparse = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
    assert (argparse in text_of(train)) != (argparse in text_of(validation))


def test_every_file_is_in_one_split(sources):
    files = {
        split: {line for line in text_of(StdlibText(split, 4, root=sources)).split(b"\0") if line}
        for split in ("train", "validation")
    }
    assert files["train"] | files["validation"] == {b"number = %d\n" % number for number in range(200)}
    assert not files["train"] & files["validation"]
    assert 1 <= len(files["validation"]) <= 25


def test_the_split_of_a_file_does_not_depend_on_the_others(sources):
    before = text_of(StdlibText("validation", 4, root=sources))
    (sources / "package1" / "module_new.py").write_text("new\n")
    after = text_of(StdlibText("validation", 4, root=sources))
    assert after.replace(b"new\n\0", b"") == before


def test_files_come_in_the_order_of_their_names(tmp_path):
    for name in ("c.py", "a.py", "d/b.py", "b/z.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert text_of(StdlibText("train", 4, root=tmp_path)) == b"a.py\0c.py\0b/z.py\0d/b.py\0"


def test_tests_packages_and_other_files_are_left_out(sources):
    before = text_of(StdlibText("train", 4, root=sources))
    for name in ("test/a.py", "package0/tests/a.py", "site-packages/a.py", "__pycache__/a.py", "notes.txt"):
        (sources / name).parent.mkdir(exist_ok=True)
        (sources / name).write_text("left out")
    (sources / "dangling.py").symlink_to(sources / "nowhere.py")
    assert text_of(StdlibText("train", 4, root=sources)) == before


def test_windows_are_bytes():
    tokens, targets = StdlibText("validation", 64)[0]
    assert tokens.shape == targets.shape == (64,)
    assert tokens[1:].equal(targets[:-1])
    assert tokens.max() < StdlibText.vocab_size


def test_a_root_without_sources_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no text of the train split among the"):
        StdlibText("train", 4, root=tmp_path)


def test_another_split_is_refused():
    with pytest.raises(ValueError, match='split is \'test\'; expected "train" or "validation"'):
        StdlibText("test", 4)

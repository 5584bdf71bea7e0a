import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tensorshard.data import TokenDataset, TokenFile, write_token_file
from tensorshard.data.token_file import token_dtype


def chunks_of(tokens: np.ndarray, size: int = 7):
    for start in range(0, len(tokens), size):
        yield tokens[start : start + size]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.npy"
    write_token_file(path, chunks_of(np.arange(100) * 3), vocab_size=1000)
    return path


def patch(path: Path, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    ("vocab_size", "item_bytes"), [(2, 1), (256, 1), (257, 2), (1 << 16, 2), ((1 << 16) + 1, 4), (1 << 32, 4)]
)
def test_tokens_come_back_in_the_smallest_type(tmp_path, vocab_size, item_bytes):
    tokens = np.random.default_rng(0).integers(vocab_size, size=500)
    tokens[:2] = 0, vocab_size - 1
    write_token_file(tmp_path / "tokens.npy", chunks_of(tokens), vocab_size=vocab_size)
    file = TokenFile(tmp_path / "tokens.npy")
    file.verify()
    assert (len(file), file.vocab_size, file.tokens.itemsize) == (500, vocab_size, item_bytes)
    assert np.array_equal(np.load(tmp_path / "tokens.npy"), tokens)
    assert json.loads((tmp_path / "tokens.json").read_text())["vocab_size"] == vocab_size


@pytest.mark.parametrize("vocab_size", [0, -5, (1 << 32) + 1])
def test_a_vocabulary_that_no_type_holds_is_refused(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size is {vocab_size}; expected 1 to 4294967296"):
        token_dtype(vocab_size)


def test_the_map_is_read_only(token_file):
    with pytest.raises(ValueError, match="read-only"):
        TokenFile(token_file).tokens[0] = 1


def test_a_pickled_file_is_its_path(token_file):
    packed = pickle.dumps(TokenFile(token_file))
    assert len(packed) < 500
    assert np.array_equal(pickle.loads(packed).tokens, np.arange(100) * 3)


def test_an_existing_file_is_kept_unless_overwrite(token_file):
    before = token_file.read_bytes()
    with pytest.raises(FileExistsError, match="already there; give another name, or overwrite=True"):
        write_token_file(token_file, [np.array([1])], vocab_size=10)
    assert token_file.read_bytes() == before
    write_token_file(token_file, [np.array([1])], vocab_size=10, overwrite=True)
    assert TokenFile(token_file).tokens.tolist() == [1]


def test_a_crash_while_writing_leaves_no_file(tmp_path):
    def failing_chunks():
        yield np.arange(10)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_file(tmp_path / "tokens.npy", failing_chunks(), vocab_size=10)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_overwriting_leaves_the_old_file(token_file):
    before = token_file.read_bytes()
    with pytest.raises(ValueError, match="Chunk 1 holds tokens from 10 to 10; with vocab_size 10 they must be 0 to 9"):
        write_token_file(token_file, [np.arange(10), np.array([10])], vocab_size=10, overwrite=True)
    assert token_file.read_bytes() == before
    assert sorted(token_file.parent.iterdir()) == [token_file.with_suffix(".json"), token_file]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([np.array([3, -1])], "tokens from -1 to 3; with vocab_size 10"),
        ([np.array([[1, 2]])], r"Chunk 0 is int64\[1, 2\]; expected a one-dimensional array of integers"),
        ([np.array([0.5])], r"Chunk 0 is float64\[1\]"),
        ([[1, 2]], "Chunk 0 is list"),
        ([], "There are no tokens to write"),
        ([np.array([], dtype=np.int64)], "There are no tokens to write"),
    ],
)
def test_what_are_not_tokens_is_refused(tmp_path, chunks, message):
    with pytest.raises(ValueError, match=message):
        write_token_file(tmp_path / "tokens.npy", chunks, vocab_size=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [327, 100, 20])
def test_a_truncated_file_is_refused(token_file, size):
    with open(token_file, "r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=rf"truncated or damaged .* it has {size} bytes"):
        TokenFile(token_file)


def test_a_file_with_something_appended_is_refused(token_file):
    with open(token_file, "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="followed by foreign bytes: its 100 tokens end before its 332 bytes"):
        TokenFile(token_file)


@pytest.mark.parametrize("content", [b"", b"TSTOKENS", b"PK\x03\x04" + bytes(100)])
def test_a_foreign_file_is_refused(tmp_path, content):
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ValueError, match=rf"not a token file: .* found {len(content)} bytes"):
        TokenFile(tmp_path / "foreign")


@pytest.mark.parametrize("array", [np.zeros(9), np.zeros((3, 3), dtype=np.int64), np.array(3)])
def test_an_array_of_something_else_is_refused(tmp_path, array):
    np.save(tmp_path / "array.npy", array)
    with pytest.raises(ValueError, match="expected a one-dimensional array of integers"):
        TokenFile(tmp_path / "array.npy")


def test_an_array_that_numpy_wrote_is_read(tmp_path):
    np.save(tmp_path / "array.npy", np.arange(9))
    file = TokenFile(tmp_path / "array.npy")
    assert file.tokens.tolist() == list(range(9))
    assert file.vocab_size is None
    with pytest.raises(ValueError, match=r"array\.json is not there, which holds the checksum"):
        file.verify()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"num_tokens": 9, "vocab_size": 3, "crc32": 1}'])
def test_a_json_that_is_not_of_the_file_is_refused(token_file, content):
    token_file.with_suffix(".json").write_text(content)
    with pytest.raises(ValueError, match=r"text\.json (does not describe a token file|is of a file of 9 tokens)"):
        TokenFile(token_file)


def test_verify_finds_one_changed_bit(token_file):
    last_byte = token_file.read_bytes()[-1]
    patch(token_file, 327, bytes([last_byte ^ 1]))
    with pytest.raises(ValueError, match=r"corrupted: its tokens have the CRC-32 [0-9a-f]{8}, but were written"):
        TokenFile(token_file).verify()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        TokenDataset(tmp_path / "nothing-here", context_length=4)


def test_windows_follow_each_other_and_targets_are_one_further(token_file):
    for source in (token_file, str(token_file), TokenFile(token_file), np.arange(100) * 3):
        dataset = TokenDataset(source, context_length=11)
        assert len(dataset) == 9
        tokens, targets = (torch.cat(parts) for parts in zip(*dataset, strict=True))
        assert tokens.dtype == targets.dtype == torch.int64
        assert tokens.tolist() == [3 * i for i in range(99)]
        assert targets.tolist() == [3 * i for i in range(1, 100)]


def test_a_window_outside_is_an_index_error():
    dataset = TokenDataset(np.arange(10), context_length=3)
    for index in (3, -1):
        with pytest.raises(IndexError, match=f"Window {index} of a dataset of 3"):
            dataset[index]


def test_text_shorter_than_a_window_is_refused(token_file):
    assert len(TokenDataset(token_file, context_length=99)) == 1
    with pytest.raises(
        ValueError, match="holds 100 tokens; a window of context_length 100 and its next token need 101"
    ):
        TokenDataset(token_file, context_length=100)
    with pytest.raises(ValueError, match="context_length is 0; expected at least 1"):
        TokenDataset(token_file, context_length=0)


@pytest.mark.parametrize("source", [np.zeros(9), np.zeros((3, 3), dtype=np.int64)])
def test_an_array_that_holds_no_tokens_is_refused(source):
    with pytest.raises(ValueError, match=r"source is .*\]; expected a one-dimensional array of integers"):
        TokenDataset(source, context_length=2)

"""Text that is turned into tokens when a dataset is made."""

import pytest
import torch

from tensorshard.data import LabelledText, Text


def test_windows_of_files_are_split_in_ten(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 4096 * 9 + "b" * 4096)
    pattern = str(tmp_path / "*.txt")
    train, validation = (Text(split, 8, "bytes", pattern) for split in ("train", "validation"))
    assert len(train) == 4096 * 9 // 8 - 1 and {int(token) for token in train[0][0]} == {ord("a")}
    assert {int(token) for token in validation[-1 % len(validation)][1]} == {ord("b")}
    assert len(Text("validation", 8, "bytes")) > 100  # of the standard library


def test_rows_of_a_file_have_labels(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("label,id,text\n" + "".join(f'{"good" if i % 2 else "bad"},{i},"text, {i}"\n' for i in range(20)))
    train, validation = (LabelledText(split, 6, "bytes", 2, str(file), pad=7) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (18, 2) and train.labels == ["bad", "good"]
    inputs, label = train[1]
    assert bytes(inputs["input_ids"].tolist()) == b"text, " and label == 1
    short = LabelledText("train", 9, "bytes", 2, str(file), pad=7)[1][0]
    assert short["input_ids"].tolist()[-3:] == [ord("1"), 7, 7] and short["attention_mask"].tolist() == [1] * 7 + [0, 0]
    assert {int(label) for _, label in LabelledText("validation", 6, "bytes", 3)} == {0, 1, 2}
    assert short["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: Text("test", 8, "bytes"), r'split is \'test\'; expected "train" or "validation"'),
        (lambda folder: Text("train", 8, "bytes", str(folder / "*.txt")), "there is no text file"),
        (lambda folder: Text("train", 8, str(folder)), "there is no tokenizer"),
        (lambda folder: Text("train", 99, "bytes", str(folder / "rows.csv")), "has 13 tokens; .* need 100: give more"),
        (lambda folder: LabelledText("train", 8, "bytes", 2, str(folder / "no.csv")), "first line is text,label"),
        (lambda folder: LabelledText("train", 8, "bytes", 2, str(folder / "rows.csv")), "has the columns one, two"),
    ],
)
def test_what_is_wrong_is_said(make, said, tmp_path):
    (tmp_path / "rows.csv").write_text("one,two\n1,2\n\n")
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        make(tmp_path)

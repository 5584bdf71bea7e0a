"""The example scripts of the parallel layers, run on ranks as torchrun would."""

import re

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from rank_pool import RankError
from scripts import run_example

_IMAGENET = ["--arch", "tiny", "--image-size", "16", "--classes", "10", "--samples", "61", "--batch-size", "12"]
_MINGPT = ["--widths", "32", "--heads", "4", "--context", "16", "--batch-size", "8", "--steps", "3"]


def _run(name: str, *arguments: str) -> str:
    """Runs a script in this process, which is a rank; what it printed."""
    printed = run_example(name, *arguments)
    assert not dist.is_initialized()
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "options", "other"),
    [
        (2, ["--model-parallel-dim", "1", "--amp", "--zero"], ["--model-parallel-dim", "0"]),
        (2, ["--model-parallel-dim", "0"], ["--model-parallel-dim", "-1", "--zero"]),
        (2, [], ["--zero"]),
    ],
)
def test_imagenet_resumes(ranks, tmp_path, saving, options, other):
    whole, half, resumed = (str(tmp_path / f"{name}.pt") for name in ("whole", "half", "resumed"))
    printed = ranks(saving, _run, "imagenet", *_IMAGENET, *options, "--epochs", "2", "--save", whole)[0]
    assert len(re.findall(r"^epoch \d  step 5/5  loss \d\.\d{4}  [\d.]+ images/s$", printed, re.MULTILINE)) == 2
    assert "6,226 parameters, of which every rank holds " in printed
    assert ("the last layer is split along" in printed) == bool(options)
    ranks(saving, _run, "imagenet", *_IMAGENET, *options, "--epochs", "1", "--save", half)
    ranks(saving, _run, "imagenet", *_IMAGENET, *options, "--epochs", "2", "--resume", half, "--save", resumed)
    expected, found = (torch.load(path, weights_only=True) for path in (whole, resumed))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # On one process, split otherwise, and evaluated: what it prints is what the two of them printed.
    validation = printed.splitlines()[-2]
    assert validation.startswith("validation")
    for world, others in ((1, []), (2, other)):
        printed = ranks(world, _run, "imagenet", *_IMAGENET, *others, "--evaluate", "--resume", whole)[0]
        assert printed.splitlines()[-1] == validation or "--amp" in options


@pytest.mark.slow
def test_imagenet_reads_a_folder(ranks, tmp_path):
    for part, number in (("train", 4), ("val", 3)):
        for label, color in enumerate([(255, 0, 0), (0, 255, 0)]):
            folder = tmp_path / "images" / part / f"class{label}"
            folder.mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (20 + index, 17), color).save(folder / f"{index}.png")
    folder = str(tmp_path / "images")
    options = ["--arch", "tiny", "--image-size", "16", "--batch-size", "4", "--lr", "0.02", "--model-parallel-dim", "1"]
    printed = ranks(2, _run, "imagenet", folder, *options, "--epochs", "6")[0]
    assert "2 classes" in printed
    assert "top 1 100.00%  top 5 100.00%  of 6 images" in printed.splitlines()[-1]
    with pytest.raises(RankError, match="--classes 1 was given for a folder with images of 2"):
        ranks(1, _run, "imagenet", folder, *options, "--classes", "1")
    with pytest.raises(RankError, match="has no folder 'train': expected train/CLASS/IMAGE"):
        ranks(1, _run, "imagenet", str(tmp_path), *options)
    with pytest.raises(RankError, match="--batch-size 5 is that of all 2 processes"):
        ranks(2, _run, "imagenet", *options[:4], "--batch-size", "5")
    with pytest.raises(RankError, match=r"--resume .*nowhere.pt: there is no such file"):
        ranks(1, _run, "imagenet", *options[:4], "--resume", str(tmp_path / "nowhere.pt"))
    with pytest.raises(RankError, match=r"--save .*: there is no folder to put it in"):
        ranks(1, _run, "imagenet", *options[:4], "--save", str(tmp_path / "no" / "run.pt"))


@pytest.mark.slow
def test_mingpt_is_the_same_on_any_number_of_ranks(ranks):
    tables = [
        ranks(world, _run, "mingpt_scaling", *_MINGPT, "--layers", "1", "2", *options)[0].splitlines()[2:]
        for world, options in [(1, []), (2, []), (4, ["--model-parallel", "2"])]
    ]
    rows = [[line.split() for line in table] for table in tables]
    for row, *others in zip(*rows, strict=True):
        for other in others:
            assert other[2] == row[2]  # all parameters
            assert int(other[3].replace(",", "")) < 0.6 * int(row[3].replace(",", ""))  # this rank's
            assert float(other[6]) == pytest.approx(float(row[6]), abs=2e-4)  # the loss
    with pytest.raises(RankError, match="width 32 and 3 heads on groups of 2: the heads must divide the width"):
        ranks(2, _run, "mingpt_scaling", *_MINGPT, "--heads", "3")
    with pytest.raises(RankError, match="--batch-size 9 is that of all 2 groups: use a multiple of them"):
        ranks(2, _run, "mingpt_scaling", *_MINGPT, "--model-parallel", "1", "--batch-size", "9")
    with pytest.raises(RankError, match=r"--steps \d+: the text has \d+ batches of --batch-size 8"):
        ranks(1, _run, "mingpt_scaling", *_MINGPT, "--steps", "10000000")

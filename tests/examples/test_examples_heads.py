"""The example scripts of heads of many classes, run on ranks as torchrun would."""

import re

import pytest
from test_examples_tensor import _run

_CLASSES = ["--backbone", "mlp", "--classes", "3001", "--features", "64", "--batch-size", "16", "--seen", "16"]
_FACES = ["--people", "40", "--features", "16", "--batch-size", "64", "--steps", "40", "--pairs", "400"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "states", "bytes_held"),
    [
        pytest.param(1, "fp32", 8.0, marks=pytest.mark.slow),
        pytest.param(2, "bf16", 4.0, marks=pytest.mark.slow),
        (2, "int8", 3.1),
    ],
)
def test_million_classes(ranks, world_size, states, bytes_held):
    printed = ranks(world_size, _run, "million_classes", *_CLASSES, "--steps", "30", "--states", states)
    losses = [float(loss) for loss in re.findall(r"^step \d+/30  loss (\S+)", printed[0], re.MULTILINE)]
    assert len(losses) == 30 and losses[-1] < losses[0] / 2
    assert "of fresh samples of 16 classes, 100% have theirs among the first 5 of all" in printed[0]
    (per_class,) = re.findall(r"^3,001 classes of 64 features, (\d+) bytes each", printed[0], re.MULTILINE)
    assert int(per_class) <= bytes_held * 64 + 1
    (classes,) = re.findall(r"8 x 12 GB +would hold +([\d.]+) million classes", printed[0])
    assert float(classes) == pytest.approx(0.9 * 96e3 / int(per_class), rel=0.02)
    assert not any(printed[1:])  # the first rank speaks


def test_million_classes_of_images(ranks):
    options = [
        "--backbone",
        "resnet-tiny",
        "--classes",
        "101",
        "--image-size",
        "16",
        "--batch-size",
        "4",
        "--steps",
        "2",
    ]
    assert "101 classes of 16 features, 128 bytes each" in ranks(1, _run, "million_classes", *options)[0]


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(1, []), (2, ["--margin", "cosface"]), pytest.param(2, ["--sample-rate", "0.5"], marks=pytest.mark.slow)],
)
def test_arcface(ranks, world_size, options):
    printed = ranks(world_size, _run, "arcface", *_FACES, *options)[0]
    before, after = (float(share) for share in re.findall(r"([\d.]+)% (?:of pairs|are)", printed))
    assert 50 < before + 5 < after

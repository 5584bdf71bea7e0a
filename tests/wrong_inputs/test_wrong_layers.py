"""Wrong arguments of parallel layers, heads, losses, collectives and state functions: each told in a sentence."""

from typing import Any

import pytest
import torch
from torch import nn

import tensorshard as ts
from wrong_inputs import Case, Said, assert_refused, say_all

F = ts.nn.functional
X, LOGITS, CLASSES = torch.randn(4, 6), torch.randn(4, 5), torch.tensor([0, 1, 2, 4])


def _linear(**options: Any) -> nn.Module:
    return ts.nn.ParallelLinear(**{"in_features": 6, "out_features": 5, **options})


def _head(*arguments: Any, **options: Any) -> Any:
    return ts.nn.ParallelLinearCrossEntropy(*(arguments or (6, 5)), **options)


def _split_logits() -> torch.Tensor:
    return ts.register_parallel_dim(LOGITS.clone(), 1, size=5)


LAYERS: dict[str, Case] = {
    "a dimension that a weight does not have": (lambda: _linear(dim=2), "dim=2", "0 (rows), 1 or -1 (columns)"),
    "a dimension as text": (lambda: _linear(dim="row"), "dim='row'", "0 (rows)"),
    "features below 0": (lambda: _linear(in_features=-6, dim=1), "in_features is -6", "at least"),
    "features as a fraction": (lambda: _linear(out_features=2.5, dim=1), "out_features is 2.5", "an integer"),
    "inputs of another width": (lambda: _linear(dim=1)(torch.randn(4, 7)), "[4, 7]", "6 input features"),
    "a group that is none": (lambda: _linear(dim=1, group=[0, 1]), "group=[0, 1]", "a torch.distributed process group"),
    "converting what is no module": (
        lambda: ts.nn.ParallelLinear.convert_parallel_linear([nn.Linear(6, 5)], dim=1),
        "a list",
        "nn.Module",
    ),
    "converting by a name that is not there": (
        lambda: ts.nn.ParallelLinear.convert_parallel_linear(nn.Sequential(nn.Linear(6, 5)), dim=1, names=["fc*"]),
        "'fc*'",
    ),
    "an embedding of floats": (lambda: ts.nn.ParallelEmbedding(7, 6, dim=0)(X), "torch.float32", "integer"),
    "a row that is not there": (
        lambda: ts.nn.ParallelEmbedding(7, 6, dim=0)(CLASSES + 3),
        "index 7, number 3 of 4, is outside the 7",
        "0 to 6",
    ),
    "sparse gradients": (lambda: ts.nn.ParallelEmbedding(7, 6, dim=0, sparse=True), "sparse=True"),
    "a table of no rows": (lambda: ts.nn.ParallelEmbedding(-7, 6, dim=0), "num_embeddings is -7", "at least"),
    "a mark along a dimension that is not there": (lambda: ts.register_parallel_dim(X, 7), "dim=7", "2 dimensions"),
    "a mark on a list": (lambda: ts.register_parallel_dim([1], 0), "a list", "a tensor"),
}

LOSSES: dict[str, Case] = {
    "targets of floats": (
        lambda: F.parallel_cross_entropy(_split_logits(), CLASSES.float()),
        "torch.float32",
        "class numbers",
    ),
    "targets out of range": (
        lambda: F.parallel_cross_entropy(_split_logits(), CLASSES + 1),
        "target 5, number 3 of 4, is outside the 5",
        "0 to 4",
    ),
    "fewer targets than logits": (lambda: F.parallel_cross_entropy(_split_logits(), CLASSES[:2]), "[2]", "[4, 5]"),
    "weights of other classes": (
        lambda: F.parallel_cross_entropy(_split_logits(), CLASSES, weight=torch.ones(3)),
        "weight",
        "[3]",
        "5",
    ),
    "smoothing above 1": (lambda: ts.nn.ParallelCrossEntropyLoss(label_smoothing=2.0), "label_smoothing=2.0", "0"),
    "a reduction that does not exist": (lambda: ts.nn.ParallelCrossEntropyLoss(reduction="avg"), "'avg'", "'mean'"),
    "a cap of 0": (lambda: ts.nn.ParallelCrossEntropyLoss(softcap=0.0), "softcap=0.0", "above 0"),
}

HEADS: dict[str, Case] = {
    "no classes": (lambda: _head(6, 0), "num_classes", "0"),
    "inputs of another width": (lambda: _head()(LOGITS, CLASSES), "[4, 5]", "[*, 6]"),
    "targets of floats": (lambda: _head()(X, CLASSES.float()), "torch.float32", "class numbers"),
    "targets out of range": (lambda: _head()(X, CLASSES + 1), "target 5", "outside the 5 classes", "0 to 4"),
    "fewer targets than inputs": (lambda: _head()(X, CLASSES[:2]), "[2]", "expected [4]"),
    "no targets": (lambda: _head()(X, None), "None", "class numbers"),
    "smoothing below 0": (lambda: _head(label_smoothing=-1.0), "label_smoothing=-1.0", "0"),
    "a margin with a bias": (lambda: _head(bias=True, margin=ts.nn.ArcFace(0.5)), "a bias", "cosines", "Leave it out"),
    "a margin without cosines": (lambda: _head(margin=ts.nn.CosFace(0.3), normalize=False), "normalize=True"),
    "a margin that is a number": (lambda: _head(margin=0.5), "margin=0.5", "ArcFace"),
    "a cap and a margin": (lambda: _head(softcap=30.0, margin=ts.nn.ArcFace(0.5)), "softcap=30.0", "leave softcap out"),
    "more than all classes": (lambda: _head(sample_rate=2.0), "sample_rate=2.0", "1"),
    "a scale of 0": (lambda: _head(scale=0.0), "scale=0.0", "above 0"),
    "weights of other classes": (
        lambda: _head(class_weight=torch.ones(3)), "class_weight", "[3]", "5"
    ),
    "an update without a rate": (lambda: _head(update={}), "update", "lr"),
    "an update with a negative rate": (lambda: _head(update=dict(lr=-1.0)), "lr=-1.0"),
    "an update by another rule": (lambda: _head(update=dict(lr=0.1, betas=(0.9, 0.99))), "betas", "momentum"),
    "a momentum that does not exist": (
        lambda: _head(update=dict(lr=0.1, momentum=0.9, momentum_dtype="fp8")), "'fp8'", "'int8'"
    ),
    "weights of integers": (lambda: _head(dtype=torch.int64), "torch.int64", "float"),
    "none of the largest": (lambda: _head().topk(X, 0), "k=0"),
    "more than there are": (lambda: _head().topk(X, 9), "k=9", "5"),
    "accumulating without update=": (lambda: _head().accumulate(), "built with update="),
}  # fmt: skip

NAMES: dict[str, Case] = {
    "groups of a size that does not divide": (
        lambda: ts.init_process_group(3), "group_size=3", "1 processes", "one of 1"
    ),
    "groups of text": (lambda: ts.init_process_group("2"), "group_size='2'", "a number of ranks"),
    "groups of -1": (lambda: ts.init_process_group(-1), "group_size=-1", "one of 1"),
    "other groups than there are": (
        lambda: ts.init_process_group(1, check_collectives=True), "exist already", "destroy_process_group()"
    ),
    "gathering a number": (lambda: ts.distributed.gather(5), "an int", "a tensor"),
    "gathering a list": (lambda: ts.distributed.gather([X]), "a list", "a tensor"),
    "gathering along what is not there": (lambda: ts.distributed.gather(X, 3), "3", "2"),
    "scattering along what is not there": (lambda: ts.distributed.scatter(X, -5), "-5", "2"),
    "a group by its name": (lambda: ts.distributed.reduce(X, group="tp"), "group='tp'", "process group"),
    "no slices": (lambda: ts.slice(X, 0), "num_partitions=0", "at least 1"),
    "slices along what is not there": (lambda: ts.slice(X, 2, dim=4), "4", "2"),
    "slices of a list": (lambda: ts.slice([1, 2], 2), "a list", "a tensor"),
    "the state of a dict": (lambda: ts.collect_state_dict({"a": 1}), "a dict", "a module or an optimizer"),
    "a state for a dict": (lambda: ts.relocate_state_dict({"a": 1}, {}), "a dict", "a module or an optimizer"),
    "a name that TorchShard has not": (lambda: ts.gather, "'gather'", "distributed.gather"),
}  # fmt: skip

ALL = {
    f"{where}: {what}": case
    for where, cases in dict(layers=LAYERS, losses=LOSSES, heads=HEADS, names=NAMES).items()
    for what, case in cases.items()
}


def _say_all() -> dict[str, Said]:
    ts.init_process_group(1)
    return say_all(ALL)


@pytest.fixture(scope="module")
def found(ranks) -> dict[str, Said]:
    return ranks(1, _say_all)[0]


@pytest.mark.parametrize("what", ALL)
def test_a_wrong_argument(found, what):
    assert_refused(what, found[what], ALL[what])

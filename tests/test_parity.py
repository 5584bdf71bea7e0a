"""Every plan gives what one process gives: losses, weights, gradient norms. A covering subset of all combinations."""

from functools import cache, partial
from typing import Any

import pytest
import torch

import optimizers
import parity
import pretrained_models
import tensorshard as ts
from bounds import assert_within
from tensorshard.models import GPT

CLIP = 1.1  # some steps' norms are above it, some below

# id: (model, ranks, fields of the plan). Between them, each model, world size, level, number of micro-batches, kind of
# recomputation and unit, clipped or not, meets most values of the others.
FP32: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-1-zero3": ("gpt", 1, dict()),
    "gpt-2-zero0-full-clip": ("gpt", 2, dict(zero=0, recompute="full", clip_grad_norm=CLIP)),
    "gpt-2-zero2-micro4-clip": ("gpt", 2, dict(zero=2, micro_batches=4, clip_grad_norm=CLIP)),
    "gpt-2-zero3-micro4-full-clip": ("gpt", 2, dict(zero=3, micro_batches=4, recompute="full", clip_grad_norm=CLIP)),
    "gpt-2-zero1-named-units": ("gpt", 2, dict(zero=1, shard_units=["blocks.*.mlp", "embedding"])),
    "gpt-2-zero3-large-units": ("gpt", 2, dict(zero=3, shard_units=40_000)),
    "gpt-4-zero1-selective-clip": ("gpt", 4, dict(zero=1, recompute="selective", clip_grad_norm=CLIP)),
    "gpt-2x2-zero1-clip": ("gpt", 4, dict(dp_replicate=2, zero=1, clip_grad_norm=CLIP)),
    "gpt-2x2-zero3-micro4-clip": ("gpt", 4, dict(dp_replicate=2, zero=3, micro_batches=4, clip_grad_norm=CLIP)),
    "gpt-2x1-zero3-replicas": ("gpt", 2, dict(dp_replicate=2, dp_shard=1, zero=3)),
    "gpt-2-zero2-micro2-clip-offload": ("gpt", 2, dict(zero=2, micro_batches=2, clip_grad_norm=CLIP, offload="cpu")),
    "tied-2-zero0-micro4": ("gpt_tied", 2, dict(zero=0, micro_batches=4)),
    "tied-4-zero2-clip": ("gpt_tied", 4, dict(zero=2, clip_grad_norm=CLIP)),
    "tied-2x2-zero3": ("gpt_tied", 4, dict(dp_replicate=2, zero=3)),
    "bert-2-zero1-micro4": ("bert", 2, dict(zero=1, micro_batches=4)),
    "bert-4-zero3-selective": ("bert", 4, dict(zero=3, recompute="selective")),
    "vit-4-zero0": ("vit", 4, dict(zero=0)),
    "vit-2-zero3-micro4-full": ("vit", 2, dict(zero=3, micro_batches=4, recompute="full")),
    "resnet-1-micro4": ("resnet", 1, dict(micro_batches=4)),
    "resnet-2-zero0-selective": ("resnet", 2, dict(zero=0, recompute="selective")),
    "resnet-2-zero3-micro2": ("resnet", 2, dict(zero=3, micro_batches=2)),
    "llama-2-zero3-full": ("llama", 2, dict(zero=3, recompute="full")),
    "gpt-2-zero3-micro2-clip-tiled": ("gpt", 2, dict(zero=3, micro_batches=2, clip_grad_norm=CLIP, logits="tiled")),
    "hf_bert-2-zero0": ("hf_bert", 2, dict(zero=0)),
    "llama-4-cp2-zero1-micro2-tiles": ("llama", 4, dict(cp=2, zero=1, micro_batches=2, tiles=2)),
}

# Of each model, level, layout, recomputation and number of micro-batches one stays that is not slow.

BF16: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-2-zero0": ("gpt", 2, dict(zero=0)),
    "gpt-4-zero3-selective": ("gpt", 4, dict(zero=3, recompute="selective")),
    "bert-2-zero3": ("bert", 2, dict(zero=3)),
    "resnet-2-zero1": ("resnet", 2, dict(zero=1)),
    "gpt-2-zero3-tiled": ("gpt", 2, dict(zero=3, logits="tiled")),
    "llama-2-zero3": ("llama", 2, dict(zero=3)),
    "llama-2-cp2-zero3-full": ("llama", 2, dict(cp=2, recompute="full")),
    "mixtral-2-ep2-zero1": ("mixtral", 2, dict(ep=2, zero=1)),
    "mixtral-4-ep4-cp2-zero3": ("mixtral", 4, dict(ep=4, cp=2, zero=3)),
}


@pytest.mark.fast_cases(
    "gpt-1-zero3",
    "gpt-2x1-zero3-replicas",
    "gpt-2-zero2-micro2-clip-offload",
    "hf_bert-2-zero0",
)
@pytest.mark.parametrize("case", FP32)
def test_fp32_is_exact(ranks, case):
    """With dropout, in models that have some."""
    kind, world_size, fields = FP32[case]
    kind += parity.DROPPING
    clip = fields.get("clip_grad_norm")
    found = ranks(world_size, parity.train, kind, fields)
    # The parts of a batch can be told apart by batch normalization alone.
    cuts = (fields.get("micro_batches", 1), world_size) if kind.startswith("resnet") else (1, 1)
    expected = parity.reference(kind, clip, parity.STEPS, *cuts)
    parity.assert_same(found[0], expected, 1e-5)
    if clip is not None:
        assert min(expected["norms"]) < clip < max(expected["norms"])
        torch.testing.assert_close(found[0]["norms"], expected["norms"], rtol=1e-5, atol=1e-6)
    for other in found[1:]:
        assert other["losses"] == found[0]["losses"]
        assert other["norms"] == found[0]["norms"]
        assert other["state"] == {}


# In fp64: Newton-Schulz iterations make small singular values, which are mostly rounding, hundreds of times larger.
MUON_WITH_ADAMW: dict[str, tuple[int, dict[str, Any]]] = {
    "2-zero2-micro2-clip": (2, dict(zero=2, micro_batches=2, clip_grad_norm=CLIP)),
    "2-zero3": (2, dict(zero=3)),
    "2-tp": (2, dict(tp=2)),
    "2x2-zero3": (4, dict(dp_replicate=2, zero=3)),
}


@pytest.mark.fast_cases("2-zero2-micro2-clip")
@pytest.mark.parametrize("case", MUON_WITH_ADAMW)
def test_muon_with_adamw_is_exact(ranks, case):
    world_size, fields = MUON_WITH_ADAMW[case]
    found = ranks(world_size, _train_with_muon, fields)[0]
    expected = parity.reference("gpt_fp64", fields.get("clip_grad_norm"), optimizer=_muon_with_adamw)
    parity.assert_same(found, expected, 1e-5)


def _train_with_muon(fields: dict[str, Any]) -> dict[str, Any]:
    return parity.train("gpt_fp64", fields, optimizer=_muon_with_adamw)


def _muon_with_adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    given = list(parameters)
    matrices = [p for p in given if p.ndim == 2]
    return [optimizers.Muon(matrices), parity.ADAMW([p for p in given if p.ndim != 2])]


@pytest.fixture(scope="module")
def bf16_alone(ranks):
    """One process's training in bf16, and in fp32."""

    @cache
    def run(kind: str, micro_batches: int) -> list[dict[str, Any]]:
        fields = [dict(precision=precision, micro_batches=micro_batches) for precision in ("bf16", "fp32")]
        return [ranks(1, parity.train, kind, each)[0] for each in fields]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", BF16)
def test_bf16_is_as_near_to_fp32_as_one_process_is(ranks, bf16_alone, case):
    """Which way a sum of 8-bit numbers rounds differs with the order of its terms, and training amplifies it. So how
    far rounding takes one process is the measure of both: the distance to it, and that to fp32."""
    kind, world_size, fields = BF16[case]
    found = ranks(world_size, parity.train, kind, dict(precision="bf16", **fields))[0]
    alone, exact = bf16_alone(kind, fields.get("micro_batches", 1))
    assert [(n, v.dtype) for n, v in found["state"].items()] == [(n, v.dtype) for n, v in alone["state"].items()]
    for distance, times in ((_loss_distance, 3), (_weight_distance, 1.5)):
        bound = times * distance(alone, exact)
        assert_within(distance(found, exact), bound, distance.__name__)
        assert_within(distance(found, alone), bound, distance.__name__)


def _loss_distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return (torch.tensor(a["losses"]) - torch.tensor(b["losses"])).abs().max().item()


def _weight_distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    return torch.stack([(a["state"][n].double() - b["state"][n].double()).norm() for n in a["state"]]).norm().item()


def _initial(model: Any, fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = ts.parallelize(
        model, ts.Plan(**fields), optimizer=parity.ADAMW, loss_fn=parity.loss_function("gpt"), seed=5
    )
    return engine.full_state_dict()


class Recurrent(torch.nn.Module):
    """Dropout, an LSTM, a weight under two names, and initialisations that replace others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(24, 8)
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.dropout = torch.nn.Dropout(0.5)
        self.inner = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 24)
        self.head.weight = self.embedding.weight
        torch.nn.init.trunc_normal_(self.embedding.weight, std=0.5)
        torch.nn.init.orthogonal_(self.inner.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.dropout(self.lstm(self.embedding(x))[0])))


CONSTRUCTORS = {
    "gpt": partial(GPT, 61, 16, 2, 2, 30),
    "gpt_tied": partial(GPT, 61, 16, 2, 2, 30, tie_embeddings=True),
    "recurrent": Recurrent,
    "llama": pretrained_models.llama,
    "llama_tied": partial(pretrained_models.llama, tie_word_embeddings=True),
}


def _all_initial(fields: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    names = [name for name in CONSTRUCTORS if name != "recurrent" or "pp" not in fields]  # it has no layers to cut at
    return {name: _initial(CONSTRUCTORS[name], fields) for name in names}


def _initial_of_meta(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = GPT(61, 16, 2, 2, 30)
    return _initial(model, fields)


def _initial_of_own(fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 + torch.distributed.get_rank())
    return _initial(GPT(61, 16, 2, 2, 30), fields)


LAYOUTS = [(1, dict()), (2, dict(zero=1)), (4, dict(zero=0)), (4, dict(zero=2)), (4, dict(zero=3)), (2, dict(zero=3))]


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, (2, dict(tp=2)), (2, dict(pp=2, micro_batches=2))], ids=str)
def test_weights_of_a_callable_are_those_of_its_seeded_constructor(ranks, layout):
    world_size, fields = layout
    for name, found in ranks(world_size, _all_initial, fields)[0].items():
        torch.manual_seed(5)
        _assert_equal(found, CONSTRUCTORS[name]().state_dict())


@pytest.mark.slow
def test_weights_of_a_meta_module_do_not_depend_on_the_plan(ranks):
    first, *others = (ranks(world_size, _initial_of_meta, fields)[0] for world_size, fields in LAYOUTS)
    for other in others:
        _assert_equal(other, first)
    assert first["blocks.0.mlp.up.weight"].std() > 0.05  # that of nn.Linear


@pytest.mark.parametrize("level", [0, 1, 3])
def test_of_modules_that_differ_rank_0s_counts(ranks, level):
    torch.manual_seed(100)
    _assert_equal(ranks(2, _initial_of_own, dict(zero=level))[0], GPT(61, 16, 2, 2, 30).state_dict())


@pytest.mark.slow
def test_a_callable_trains_as_the_module_that_it_builds(ranks):
    found = ranks(2, _train_callable, "gpt", dict(zero=3))[0]
    parity.assert_same(found, ranks(1, _train_callable, "gpt", dict())[0], 1e-5)


def _train_callable(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    return parity.train(kind, fields, as_callable=True)

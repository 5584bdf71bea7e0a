"""Norms and MLPs that compute a sequence in tiles: what they compute at once, and a tile's results in memory alone."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parity
import tensorshard as ts
from tensorshard.passes.tiles import apply_tiles

WIDTH, INNER, LENGTH = 8, 40, 12

# id: (model, ranks, fields of the plan)
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama-full": ("llama", 1, dict(recompute="full")),
    "gpt-zero3": ("gpt", 2, dict(zero=3)),
    "gpt-zero1-micro2-clip": ("gpt", 2, dict(zero=1, micro_batches=2, clip_grad_norm=1.1)),
    "llama-tp2": ("llama", 2, dict(tp=2)),
    "hf_bert-pp2": ("hf_bert", 2, dict(pp=2, micro_batches=2)),
    "llama-cp2-zigzag-full": ("llama", 2, dict(cp=2, cp_order="zigzag", recompute="full")),
    "llama-cp2-tp2-zero3": ("llama", 4, dict(cp=2, tp=2, zero=3)),
    "vit-offload": ("vit", 2, dict(zero=2, offload="cpu")),
    "mixtral-cp2": ("mixtral", 2, dict(cp=2)),
    "llama-activations": ("llama", 2, dict(recompute="full", offload=ts.Offload(activations="cpu"))),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fp32_is_exact(ranks, case):
    kind, world_size, fields = CASES[case]
    found = ranks(world_size, parity.train, kind, {**fields, "tiles": 3})
    parity.assert_same(found[0], parity.reference(kind, fields.get("clip_grad_norm"), parity.STEPS, 1, 1), 1e-5)


def _losses(fields: dict[str, Any]) -> list[float]:
    engine = parity.make_engine("llama", fields)
    return [float(engine.step(*parity.shard(engine, *parity.batch("llama", step)))) for step in range(5)]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_bf16_is_as_near_as_without_tiles(ranks, zero):
    whole = ranks(2, _losses, dict(zero=zero, precision="bf16"))[0]
    tiled = ranks(2, _losses, dict(zero=zero, precision="bf16", tiles=4))[0]
    assert tiled == pytest.approx(whole, rel=1e-3) and tiled != whole  # gradients of weights are summed in fp32


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Hidden(MLP):
    """Attention whose last layer begins at zero, so that at first nothing of it is seen."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).cumsum(1))


class Counting(MLP):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Dropping(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))


class RandomByFunction(MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.5)


class OfPositions(MLP):
    """Scales each position by a number that the block has given it."""

    scales = torch.linspace(0.5, 1.5, LENGTH)[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales


class Block(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True) + self.mlp(self.norm(x))


class _Inner(TorchDispatchMode):
    """Notes how many positions the results inside of the MLP have."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 3 and out.shape[-1] == INNER:
            self.positions.add(out.shape[1])
        return out


def _step(model: nn.Module, tiles: int) -> tuple[torch.Tensor, list[Any], set[int]]:
    """Output and gradients of two calls, and how many positions the second one's inner results have."""
    if tiles > 1:
        apply_tiles([model], tiles, {module: name for name, module in model.named_modules()})
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
        with _Inner() as inner:
            out = model(x)
            out.square().sum().backward()
    return out.detach(), [x.grad, *(parameter.grad for parameter in model.parameters())], inner.positions


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        (MLP, 4),
        (Hidden, LENGTH),
        (Counting, LENGTH),
        (Dropping, LENGTH),
        (RandomByFunction, LENGTH),
        (OfPositions, LENGTH),
    ],
)
def test_what_acts_on_positions_alone_is_tiled(kind, positions):
    found = []
    for tiles in (1, 3):
        torch.manual_seed(7)
        found.append(_step(Block(kind()), tiles))
    (whole, gradients, _), (out, tiled, held) = found
    assert held == {positions}
    torch.testing.assert_close(out, whole)
    for one, other in zip(tiled, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_hook_inside_sees_whole_batches():
    block, seen = Block(MLP()), []
    block.mlp.up.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    assert _step(block, 3)[2] == {LENGTH} == set(seen)


def test_no_random_numbers_are_drawn():
    torch.manual_seed(7)
    block = Block(RandomByFunction())
    _step(block, 3)
    drawn = torch.get_rng_state()
    torch.manual_seed(7)
    _step(Block(RandomByFunction()), 1)
    assert torch.equal(drawn, torch.get_rng_state())


def test_evaluation_and_second_derivatives():
    torch.manual_seed(7)
    block = Block(MLP())
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    expected = block(x)
    apply_tiles([block], 3, {})
    with torch.no_grad():
        block(x)  # which tries them
        with _Inner() as inner:
            torch.testing.assert_close(block(x), expected)
    assert inner.positions == {4}
    with pytest.raises(NotImplementedError, match=r"second derivatives .* set Plan\(tiles=1\)"):
        torch.autograd.grad(block(x).sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(tiles=0), "tiles is 0; it must be at least 1"),
        (dict(tiles=2, recompute="selective"), "recompute='selective', which keeps the results of matrix products"),
        (dict(tiles=2, compile=True), "compile=True, which compiles blocks as a whole; set compile=False, or tiles=1"),
        (dict(tiles=2, tp=1, pp=1, sequence_parallel=True), "sequence_parallel=True"),
    ],
    ids=str,
)
def test_wrong_plans(fields, message):
    with pytest.raises(ValueError, match=message):
        ts.Plan(**fields).resolve(1)


def _refusal() -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError) as refusal:
        ts.parallelize(model, ts.Plan(tiles=2), optimizer=parity.ADAMW, loss_fn=nn.functional.mse_loss)
    return str(refusal.value)


def test_a_model_without_such_layers_is_refused(ranks):
    assert "tiles=2 was given, but no block of the model has a norm, or a module of linear" in ranks(1, _refusal)[0]

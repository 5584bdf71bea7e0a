"""In 16 bits, modules that mix parameters or activations with fp32 buffers train as in fp32, but for rounding."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tensorshard as ts
from rank_pool import RankError

ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-5)
WIDTH = 16


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("beta", torch.zeros(WIDTH))
        self.prepare()

    def prepare(self) -> None:
        pass


class LayerNorm(Mixing):
    def forward(self, h):
        return F.layer_norm(h, h.shape[-1:], self.gamma, self.beta)


class LayerNormOfBuffer(Mixing):
    def forward(self, h):
        return torch.layer_norm(h, h.shape[-1:], weight=self.beta + 1, bias=self.gamma)


class PlainTensor(Mixing):
    def prepare(self):
        self.table = torch.zeros(WIDTH)

    def forward(self, h):
        return F.layer_norm(h, h.shape[-1:], self.gamma, self.table)


class GroupNorm(Mixing):
    def forward(self, h):
        return F.group_norm(h, 4, self.gamma, self.beta)


class RMSNorm(Mixing):
    def forward(self, h):
        return F.rms_norm(h, h.shape[-1:], self.beta + 1) * self.gamma


class Helper(Mixing):
    def normalize(self, h):
        return _helped(h, self.gamma, self.beta)

    def forward(self, h):
        return self.normalize(h)


def _helped(h, gamma, beta):
    return F.layer_norm(h, h.shape[-1:], gamma, beta)


class ByHand(Mixing):
    def forward(self, h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * self.gamma + self.beta


class Products(Mixing):
    """Products with a buffer as weight or bias."""

    def prepare(self):
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.register_buffer("fixed", torch.eye(WIDTH))

    def forward(self, h):
        h = F.linear(F.linear(h, self.weight, self.beta), self.fixed, self.gamma)
        h = F.conv1d(h[..., None], self.fixed[..., None], self.gamma)[..., 0]
        mixed = torch.einsum("ij,jk->ik", self.weight, self.fixed)
        return torch.tensordot(h, mixed, 1) + h @ self.fixed + torch.mv(self.fixed, self.gamma)


class Average(Mixing):
    """A buffer that is written to in place."""

    def forward(self, h):
        self.beta.lerp_(0 * self.gamma.detach(), 0.1)
        return h + torch.lerp(self.beta, self.gamma, 0.5)


class Tables(Mixing):
    """fp32 tensors into which 16 bits are written."""

    def prepare(self):
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        places = torch.arange(len(h), device=h.device)
        wide = places[:, None].expand_as(h)
        h = self.linear(h)
        zeros = torch.zeros(h.shape, device=h.device)
        out = zeros.index_add(0, places, h) + zeros.clone().index_add_(0, places, h)
        out = out + zeros.scatter(0, wide, h) + zeros.scatter_add(0, wide, h)
        out = out + zeros.scatter_reduce(0, wide, h, "sum") + zeros.index_copy(0, places, h)
        out = out + zeros.masked_scatter(torch.ones_like(zeros, dtype=torch.bool), h)
        out = out + torch.where(h > 0, h, zeros) + torch.cat([zeros, h])[len(h) :]
        return out / 9


class Assigned(Mixing):
    def prepare(self):
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        out = self.beta.expand(len(h), WIDTH).clone()
        out[torch.arange(len(h))] = self.linear(h)
        return out


class WithoutAutocast(Mixing):
    """As routers do, which compute in fp32."""

    def prepare(self):
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        with torch.autocast(h.device.type, enabled=False):
            return self.gate(h.float()) @ torch.diag(self.gamma) + F.linear(h.float(), self.gate.weight, self.beta)


class DecoratedWithoutAutocast(Mixing):
    def prepare(self):
        self.gate = nn.Linear(WIDTH, WIDTH)

    @torch.autocast("cpu", enabled=False)
    def forward(self, h):
        return self.gate(h.float())


class Net(nn.Module):
    def __init__(self, kind: type[Mixing]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.GELU()) for _ in range(2)])
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


KINDS = {
    kind.__name__: kind
    for kind in (
        LayerNorm, LayerNormOfBuffer, PlainTensor, GroupNorm, RMSNorm, Helper, ByHand, Products, Average, Tables,
        Assigned, WithoutAutocast, DecoratedWithoutAutocast,
    )
}  # fmt: skip


def _losses(name: str | type[Mixing], fields: dict[str, Any]) -> list[float]:
    sample = torch.zeros(4, WIDTH)
    engine = ts.parallelize(
        Net(KINDS[name] if isinstance(name, str) else name),
        ts.Plan(**fields),
        optimizer=ADAMW,
        loss_fn=F.mse_loss,
        sample_inputs=sample,
    )
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 1, generator=generator)
        x, y = (t.chunk(engine.mesh.dp_size)[engine.mesh.dp_rank] for t in (x, y))
        losses.append(engine.step(x, y).item())
    return losses


@pytest.mark.fast_cases("Assigned-{'pp': 2, 'zero': 0, 'micro_batches': 2}")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(dict(zero=0), marks=pytest.mark.slow),
        pytest.param(dict(zero=1), marks=pytest.mark.slow),
        dict(zero=3),
        pytest.param(dict(zero=3, precision="fp16"), marks=pytest.mark.slow),
        pytest.param(dict(zero=1, precision="fp16"), marks=pytest.mark.slow),
        dict(tp=2),
        dict(pp=2, zero=0, micro_batches=2),
        pytest.param(dict(zero=3, recompute="full"), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_the_same_but_for_rounding(ranks, name, fields):
    expected = ranks(2, _losses, name, dict(zero=0))
    found = ranks(2, _losses, name, {"precision": "bf16", **fields})
    compared = 1 if fields.get("precision") == "fp16" else 3  # which may skip steps
    assert found[0][:compared] == pytest.approx(expected[0][:compared], rel=2e-2, abs=2e-2)


class Hidden(Mixing):
    """Code in which the function's name cannot be read."""

    def forward(self, h):
        return getattr(F, "layer" + "_norm")(h, h.shape[-1:], self.gamma, self.beta)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [dict(zero=3), dict(pp=2, zero=0, micro_batches=2)], ids=str)
def test_an_error_of_types_names_the_module(ranks, fields):
    with pytest.raises(RankError, match=r"module 'blocks.0.1' \(Hidden\) .*precision='bf16'"):
        ranks(2, _losses, Hidden, {"precision": "bf16", **fields})

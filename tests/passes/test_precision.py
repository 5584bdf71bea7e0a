"""What stays fp32 under mixed precision: norms, subclasses of them by their own forwards, and computed weights."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import tensorshard as ts
from tensorshard.model.forwards import Role, convert_forward
from tensorshard.passes.precision import keep_norms_fp32
from tensorshard.passes.recompute import apply_recompute

WIDTH = 8


class ChannelsFirst(nn.LayerNorm):
    """Two ways in one class, as the norms of ConvNeXt and of Segment Anything have them."""

    def __init__(self, width, first=False):
        super().__init__(width)
        self.first = first

    def forward(self, x):
        if not self.first:
            return super().forward(x)
        x = x.float()
        centered = x - x.mean(1, keepdim=True)
        return self.weight * centered * torch.rsqrt(x.var(1, unbiased=False, keepdim=True) + self.eps) + self.bias


class Activated(nn.GroupNorm):
    def __init__(self, width):
        super().__init__(2, width)

    def forward(self, x):
        return F.gelu(super().forward(x))


def _users(width):
    norm = nn.LayerNorm(width)
    own = norm.forward
    norm.forward = lambda x: torch.tanh(own(x))
    return norm


class Conditioned(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps) * self.weight


LAYERS = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
    "super": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ChannelsFirst(WIDTH)),
    "by hand": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), ChannelsFirst(WIDTH, first=True)),
    "group": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Activated(WIDTH)),
    "rms": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Conditioned(WIDTH)),
    "on the instance": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), _users(WIDTH)),
    "spectral": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "spectral hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
    "weight": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()),
}


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([LAYERS[kind]() for _ in range(2)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(0, 3, (8,), generator=generator)


OPTIMIZER = partial(torch.optim.SGD, lr=0.05)


def _train_under(kinds, fields):
    found = {}
    for kind in kinds:
        engine = ts.parallelize(Net(kind), ts.Plan(**fields), optimizer=OPTIMIZER, loss_fn=F.cross_entropy)
        cut = lambda t, e=engine: t.chunk(e.mesh.dp_size)[e.mesh.dp_rank]  # noqa: E731
        losses = [engine.step(*map(cut, _batch(step))).item() for step in range(4)]
        found[kind] = losses, engine.full_state_dict()
    return found


def _train_alone(kind, autocast):
    model = Net(kind)
    optimizer = OPTIMIZER(model.parameters())
    losses = []
    for step in range(4):
        inputs, targets = _batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs)
        loss = F.cross_entropy(output.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def _assert_close(found, autocast, tolerance):
    for kind, (losses, state) in found.items():
        expected, wanted = _train_alone(kind, autocast)
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance, msg=lambda m, k=kind: f"{k}: {m}")
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            error = (state[name] - value).norm() / value.norm().clamp(min=0.1)
            assert error <= tolerance, f"{kind}: {name} differs by {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 3}, marks=pytest.mark.slow),
        {"zero": 2, "recompute": "full"},
    ],
    ids=str,
)
def test_norms_and_computed_weights_in_bf16(ranks, fields):
    found = ranks(2, _train_under, list(LAYERS), {"precision": "bf16", **fields})
    _assert_close(found[0], True, 2e-2)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_repeats_the_power_iteration_of_a_spectral_norm(ranks, recompute):
    found = ranks(2, _train_under, ["spectral", "spectral hook"], {"zero": 1, "recompute": recompute})
    _assert_close(found[0], False, 1e-5)


def _narrow(module):
    """`module` as a rank computes with it: its parameters in 16 bits, its buffers as they are."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    return module


@pytest.mark.parametrize("kind", LAYERS)
def test_parameters_are_the_modules_own_before_and_after_and_get_gradients(kind):
    block = _narrow(LAYERS[kind]())
    own = dict(block.named_parameters())
    keep_norms_fp32(block.modules())
    with torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(4, WIDTH)).float().square().sum().backward()
        with pytest.raises(RuntimeError):
            block(torch.randn(4, WIDTH + 1))
    assert {name: id(p) for name, p in block.named_parameters()} == {name: id(p) for name, p in own.items()}
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in own.values())


@pytest.mark.parametrize("kind", ["plain", "super", "on the instance"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_compiled_block_computes_the_same(kind, recompute):
    block = _narrow(LAYERS[kind]())
    with torch.no_grad():
        block[1].weight.copy_(torch.linspace(0.9, 1.1, WIDTH))
    plain = copy.deepcopy(block) if kind != "on the instance" else _narrow(LAYERS[kind]())
    plain.load_state_dict(block.state_dict())
    for module in (block, plain):
        keep_norms_fp32(module.modules())
        apply_recompute([module], recompute)
    convert_forward(block, Role.COMPILATION, partial(torch.compile, backend="aot_eager"))
    x = torch.randn(4, WIDTH)
    for module in (block, plain):
        with torch.autocast("cpu", torch.bfloat16):
            module(x).float().square().sum().backward()
    for one, other in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=2e-2, atol=1e-3)


def test_a_recomputed_block_with_a_plain_norm_is_compiled_in_one_piece():
    block = _narrow(LAYERS["plain"]())
    keep_norms_fp32(block.modules())
    apply_recompute([block], "full")
    convert_forward(block, Role.COMPILATION, partial(torch.compile, backend="aot_eager", fullgraph=True))
    with torch.autocast("cpu", torch.bfloat16):
        block(torch.randn(4, WIDTH)).float().sum().backward()
    assert block[1].weight.grad is not None

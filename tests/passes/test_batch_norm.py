"""Normalizations over the samples of all data ranks: a subclass's own forward runs, and no batch is counted twice."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorshard as ts

CHANNELS = 4
STEPS = 4
SAMPLES = 8


class NormAct(nn.BatchNorm1d):
    """As the building blocks of many vision models: an activation after the base class's forward."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class FunctionalAct(nn.BatchNorm2d):
    """Calls the function itself, with bookkeeping of its own, and an activation that may be given."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop = nn.Dropout(0.0)
        self.act = nn.SiLU()

    def forward(self, x):
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        training = self.training or self.running_mean is None
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training, 0.2, self.eps)
        return self.act(self.drop(x))


class OwnNorm(nn.Module):
    """No subclass of torch's, and it calls another of torch's functions; it has a bias and no weight."""

    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.full((channels,), 0.1))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        x = torch.batch_norm(
            x,
            None,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            0.1,
            1e-5,
            torch.backends.cudnn.enabled,
        )
        return F.elu(x)


class WithNoBias(nn.BatchNorm1d):
    def __init__(self, channels):
        super().__init__(channels)
        self.bias = None

    def forward(self, x):
        return super().forward(2 * x)


class Conditional(nn.BatchNorm1d):
    """Takes a second argument, so that it cannot be tried out on one tensor alone."""

    def __init__(self, channels):
        super().__init__(channels, affine=False)
        self.gain = nn.Embedding(2, channels)

    def forward(self, x, which):
        return self.gain(which).unsqueeze(-1) * super().forward(x)


class Frozen(nn.BatchNorm1d):
    """Normalizes by constants, by hand: each sample by itself."""

    def forward(self, x):
        scale = (self.weight * (self.running_var + self.eps).rsqrt()).unsqueeze(-1)
        return x * scale + self.bias.unsqueeze(-1) - self.running_mean.unsqueeze(-1) * scale


def _users(channels):
    norm = nn.BatchNorm1d(channels)
    own = norm.forward
    norm.forward = lambda x: torch.tanh(own(x))
    return norm


def _frozen(channels):
    norm = NormAct(channels)
    norm.running_mean.copy_(torch.linspace(-1, 1, channels))
    return norm.eval()


NORMS = {
    "plain": nn.BatchNorm1d,
    "cumulative": partial(nn.BatchNorm2d, momentum=None),
    "untracked": partial(NormAct, track_running_stats=False),
    "super": NormAct,
    "functional": FunctionalAct,
    "own": OwnNorm,
    "no bias": WithNoBias,
    "two arguments": Conditional,
    "on the instance": _users,
    "by hand and frozen": Frozen,
    "evaluating": _frozen,
    "synchronized": nn.SyncBatchNorm,
    "cumulative subclass": partial(NormAct, momentum=None),
    "instance": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
}
TWO_DIMENSIONAL = ("cumulative", "functional", "instance")


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(6, 3 * CHANNELS)
        self.kind = kind
        self.norm = NORMS[kind](CHANNELS)
        self.out = nn.Linear(3 * CHANNELS, 6)

    def forward(self, x):
        hidden = self.linear(x).unflatten(1, (CHANNELS, 3))
        if self.kind in TWO_DIMENSIONAL:
            hidden = hidden.unsqueeze(-1)
        if self.kind == "two arguments":
            hidden = self.norm(hidden, (x[:, 0] > 0).long())
        else:
            hidden = self.norm(hidden)
        return x + self.out(hidden.flatten(1))


class Net(nn.Module):
    def __init__(self, kind, dtype):
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block(kind) for _ in range(2)])
        self.head = nn.Linear(6, 3)
        self.to(dtype)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _batch(step, dtype):
    generator = torch.Generator().manual_seed(step)
    # Two halves that differ much, as the statistics of either alone would.
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=dtype)
    inputs[: SAMPLES // 2] = 3 * inputs[: SAMPLES // 2] + 2
    return inputs, torch.randint(0, 3, (SAMPLES,), generator=generator)


OPTIMIZER = partial(torch.optim.SGD, lr=0.1)


def _train_under(kinds, fields, dtype):
    found = {}
    for kind in kinds:
        plan = ts.Plan(**fields)
        engine = ts.parallelize(Net(kind, dtype), plan, optimizer=OPTIMIZER, loss_fn=F.cross_entropy)
        cut = lambda t, e=engine: t.chunk(e.mesh.dp_size)[e.mesh.dp_rank]  # noqa: E731
        losses = [engine.step(*map(cut, _batch(step, dtype))).item() for step in range(STEPS)]
        losses.append(engine.evaluate(*map(cut, _batch(99, dtype))).item())
        found[kind] = losses, engine.full_state_dict()
    return found


def _train_alone(kind, dtype, autocast=False):
    model = Net(kind, dtype)
    optimizer = OPTIMIZER(model.parameters())
    losses = []

    def loss_of(step):
        inputs, targets = _batch(step, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(inputs)
        return F.cross_entropy(output.to(dtype), targets)

    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        losses.append(loss_of(99).item())
    return losses, model.state_dict()


def _assert_close(found, expected, tolerance):
    for kind, (losses, state) in found.items():
        wanted_losses, wanted = expected[kind]
        torch.testing.assert_close(
            losses, wanted_losses, rtol=tolerance, atol=tolerance, msg=lambda m, k=kind: f"{k}: {m}"
        )
        assert list(state) == list(wanted), kind
        for name, value in wanted.items():
            error = (state[name].double() - value.double()).norm() / value.double().norm().clamp(min=0.1)
            assert error <= tolerance, f"{kind}: {name} differs by {error:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"zero": 0},
        {"zero": 3, "recompute": "full"},
        {"zero": 2, "recompute": "selective"},
        {"dp_replicate": 2, "dp_shard": 1},
    ],
    ids=str,
)
def test_a_norms_own_forward_runs_on_the_statistics_of_all_ranks(ranks, fields):
    found = ranks(2, _train_under, list(NORMS), fields, torch.float64)
    expected = {kind: _train_alone(kind, torch.float64) for kind in NORMS}
    _assert_close(found[0], expected, 1e-9)


@pytest.mark.slow
def test_the_same_in_fp32(ranks):
    found = ranks(2, _train_under, list(NORMS), {"zero": 3}, torch.float32)
    _assert_close(found[0], {kind: _train_alone(kind, torch.float32) for kind in NORMS}, 1e-5)


@pytest.mark.slow_cases("none")
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_the_same_in_bf16(ranks, recompute):
    kinds = [kind for kind in NORMS if kind not in ("own",)]
    found = ranks(2, _train_under, kinds, {"zero": 2, "precision": "bf16", "recompute": recompute}, torch.float32)
    _assert_close(found[0], {kind: _train_alone(kind, torch.float32, autocast=True) for kind in kinds}, 2e-2)


def test_one_data_rank_beside_tensor_parallel_ranks(ranks):
    fields = {"tp": 2, "tp_plan": {"head": "colwise_gather"}}
    found = ranks(2, _train_under, ["synchronized", "super"], fields, torch.float32)
    _assert_close(found[0], {kind: _train_alone(kind, torch.float32) for kind in ("synchronized", "super")}, 1e-5)


@pytest.mark.slow
def test_stages_of_a_pipeline(ranks):
    kinds = ["super", "functional", "own", "on the instance", "instance"]
    fields = {"pp": 2, "micro_batches": 1, "pp_schedule": "gpipe", "recompute": "full"}
    found = ranks(4, _train_under, kinds, fields, torch.float32)
    _assert_close(found[0], {kind: _train_alone(kind, torch.float32) for kind in kinds}, 1e-5)


# -- what is refused --


class ByHand(nn.BatchNorm1d):
    def forward(self, x):
        mean, var = x.mean((0, 2), keepdim=True), x.var((0, 2), keepdim=True)
        return (x - mean) * torch.rsqrt(var + self.eps)


class Renormalized(nn.BatchNorm1d):
    """Mixes the function with statistics of its own."""

    def forward(self, x):
        return super().forward(x) * x.std()


class Tracking(nn.Module):
    """Its output is of each sample alone; what it keeps is of the batch."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        output = x - self.running_mean.unsqueeze(-1)
        if self.training:
            self.running_mean.lerp_(x.detach().mean((0, 2)), 0.1)
        return output


class LocalHalves(nn.BatchNorm1d):
    """Other halves of a batch, if the batch is another."""

    def forward(self, x):
        first, second = x.chunk(2)
        return torch.cat([super().forward(first), second])


class MaskedByHand(nn.BatchNorm1d):
    """Takes two arguments, so that what it does shows in a step alone."""

    def forward(self, x, which):
        return (x - x.mean((0, 2), keepdim=True)) * which[:, None, None]


class OwnSynchronized(nn.SyncBatchNorm):
    def forward(self, x):
        return torch.relu(super().forward(x))


REFUSED = {
    "by hand": (ByHand, "ByHand.*depends on the other samples of its batch"),
    "two arguments": (MaskedByHand, "MaskedByHand.*depends on the other samples of its batch"),
    "renormalized": (Renormalized, "Renormalized"),
    "tracking": (Tracking, "Tracking"),
    "halves": (LocalHalves, "LocalHalves"),
    "synchronized subclass": (OwnSynchronized, "OwnSynchronized, an nn.SyncBatchNorm with a forward of its own"),
    "lazy": (lambda _: nn.LazyBatchNorm1d(), "has no shape yet"),
}


def _refusals(kinds):
    found = {}
    for kind in kinds:
        NORMS[kind] = REFUSED[kind][0]
        model = Net(kind, torch.float32)
        before = {name: dict(vars(module)) for name, module in model.named_modules()}
        try:
            engine = ts.parallelize(model, ts.Plan(zero=2), optimizer=OPTIMIZER, loss_fn=F.cross_entropy)
        except ValueError as error:
            found[kind] = str(error)
            assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
            continue
        try:
            engine.step(*(tensor.chunk(2)[engine.mesh.dp_rank] for tensor in _batch(0, torch.float32)))
            found[kind] = "nothing was raised"
        except RuntimeError as error:
            found[kind] = str(error)
    return found


def test_what_cannot_be_synchronized_is_refused_by_name(ranks):
    found = ranks(2, _refusals, list(REFUSED))[0]
    for kind, (_, message) in REFUSED.items():
        if kind != "lazy":
            assert "'blocks.0.norm" in found[kind], kind
        assert re.search(message, found[kind]), found[kind]

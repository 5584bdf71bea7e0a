"""``ts.swap`` finds parts by what they compute, and changes what numbers confirm; every plan trains the result."""

import copy
import re
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import parity
import seeds
import tensorshard as ts
from rank_pool import RankError

WIDTH, HEADS, CLASSES = 32, 4, 61


class Alpha(nn.Module):
    """An RMS norm."""

    def __init__(self, features: int = WIDTH, tiny: float = 3e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(features))
        self.tiny = tiny

    def forward(self, values):
        wide = values.float()
        return self.g * (wide / (wide.square().mean(-1, keepdim=True) + self.tiny).sqrt()).to(values.dtype)


class Beta(nn.Module):
    """A layer norm, whose parameters are not in torch's order."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.stretch = nn.Parameter(torch.ones(WIDTH))

    def forward(self, values):
        centred = values - values.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.var(-1, keepdim=True, unbiased=False) + 1e-5) * self.stretch + self.shift


class Gamma(nn.Module):
    """A SwiGLU MLP."""

    def __init__(self, dropout: float = 0.0, twist: float = 1.0):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.third = nn.Linear(48, WIDTH, bias=False)
        self.drop, self.twist = nn.Dropout(dropout), twist

    def forward(self, values):
        gate = self.second(values)
        return self.third(self.drop(self.first(values) * gate * torch.sigmoid(self.twist * gate)))


class Delta(nn.Module):
    """Causal attention, written out."""

    def __init__(self):
        super().__init__()
        self.packed, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        parts = [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.packed(values).chunk(3, -1)]
        scores = parts[0] @ parts[1].transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ parts[2]
        return self.last(mixed.transpose(1, 2).flatten(2))


def turn(a, b, c, s):
    """A rotary embedding."""

    def half(x):
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)

    return a * c.unsqueeze(1) + half(a) * s.unsqueeze(1), b * c.unsqueeze(1) + half(b) * s.unsqueeze(1)


def mix(q, k, v, factor):
    """Attention over everything, written out."""
    return ((q @ k.transpose(-1, -2)) * factor).softmax(-1) @ v


class Epsilon(nn.Module):
    """Attention with rotary positions, in functions."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.factor = 0.4

    def forward(self, values):
        size = WIDTH // HEADS
        q, k, v = (f(values).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        rates = 10.0 ** -torch.linspace(0, 2, size // 2, device=values.device)
        angles = torch.arange(values.shape[1], device=values.device)[:, None] * rates
        angles = torch.cat((angles, angles), -1)[None]
        q, k = turn(q, k, angles.cos(), angles.sin())
        return self.o(mix(q, k, v, self.factor).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d, self.e, self.f = Alpha(), Beta(), Alpha(), Gamma(), Delta(), Epsilon()

    def forward(self, x):
        x = x + self.e(self.a(x))
        x = x + self.f(self.b(x))
        return x + self.d(self.c(x))


class Net(nn.Module):
    def __init__(self, blocks: int = 2):
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _silu_mul(gate, up):
    return F.silu(gate) * up


def _rotate(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first = cos.shape[-1] // 2
    return tuple(x * cos + torch.cat((-x[..., first:], x[..., :first]), -1) * sin for x in (q, k))


ALL = {"rms_norm": "torch", "layer_norm": "torch", "attention": "torch", "swiglu": _silu_mul, "rotary": _rotate}
TOKENS = torch.arange(32).view(2, 16)


def _net(blocks: int = 2) -> Net:
    seeds.seed(3)
    return Net(blocks)


def test_parts_of_any_name_are_found_and_the_model_stays_the_same():
    model = _net()
    calls = []
    model.blocks[0].d.register_forward_hook(lambda *_: calls.append("mlp"))
    expected, names = model(TOKENS), list(model.state_dict())
    calls.clear()
    swaps = ts.swap(model, ALL, sample_inputs=TOKENS, min_speedup=0)
    found = {(change.kind, change.name): change.modules for change in swaps.changed}
    assert found == {
        ("rms_norm", "Alpha"): ("blocks.0.a", "blocks.0.c", "blocks.1.a", "blocks.1.c"),
        ("layer_norm", "Beta"): ("blocks.0.b", "blocks.1.b"),
        ("swiglu", "Gamma"): ("blocks.0.d", "blocks.1.d"),
        ("attention", "Delta"): ("blocks.0.e", "blocks.1.e"),
        ("rotary", "turn()"): ("blocks.0.f", "blocks.1.f"),
        ("attention", "mix()"): ("blocks.0.f", "blocks.1.f"),
    }
    assert all(change.before > 0 and change.after > 0 and change.difference < 1e-5 for change in swaps.changed)
    assert swaps.left == []
    calls.clear()  # hooks also run while parts are tried
    torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
    assert calls == ["mlp"] and list(model.state_dict()) == names and model.head.weight is model.table.weight
    assert type(model.blocks[0].a) is Alpha and all(p.grad is None for p in model.parameters())
    with _Seen() as seen:
        copy.deepcopy(model)(TOKENS)
    assert seen.functions.count(F.scaled_dot_product_attention) == 4 and seen.functions.count(F.rms_norm) == 4
    text = swaps.describe()
    assert "swapped (6)" in text and "rms_norm: Alpha (blocks.0.a, blocks.0.c and 2 more) by torch's rms_norm:" in text
    assert "model: " in text and "forward and backward" in text


class _Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


class _Twisted(Alpha):
    def forward(self, values):
        return super().forward(values) * 0.999


def _slow(x, shape, weight, eps):
    time.sleep(2e-3)
    return F.rms_norm(x, shape, weight, eps)


def _wrong(x, shape, weight, eps):
    return F.rms_norm(x, shape, weight, 2 * eps) * 1.001


def _failing(x, shape, weight, eps):
    raise RuntimeError("no such kernel")


def _with_own_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, WIDTH), Alpha())
    model[1].forward = lambda values: Alpha.forward(model[1], values)
    return model


@pytest.mark.parametrize(
    ("model", "functions", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), _Twisted()), {"rms_norm": "torch"}, None),
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), Gamma(twist=1.1)), {"swiglu": _silu_mul}, None),
        (
            lambda: nn.Sequential(nn.Linear(8, WIDTH), Gamma(dropout=0.5)),
            {"swiglu": _silu_mul},
            r"_silu_mul differs by \d\S+ in training",
        ),
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), Alpha()), {"rms_norm": _slow}, "_slow takes .* and its own code"),
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), Alpha()), {"rms_norm": _wrong}, "_wrong differs by 1e-03"),
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), Alpha()), {"rms_norm": _failing}, "raised RuntimeError: no such"),
        (_with_own_forward, {"rms_norm": "torch"}, "its forward was set on the instance, and stays"),
        (
            lambda: nn.Sequential(nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)),
            {"layer_norm": "torch"},
            "it is torch's layer_norm already",
        ),
        (lambda: nn.Sequential(nn.Linear(8, WIDTH), Gamma()), None, "torch has no fused form of it, .* need a GPU"),
    ],
)
def test_what_is_left_alone_is_named_with_the_reason(model, functions, reason):
    model = model()
    swaps = ts.swap(model, functions, sample_inputs=torch.randn(4, 8))
    assert swaps.changed == [] and swaps.step is None
    assert all("forward" not in vars(m) for m in model.modules()) or "instance" in reason
    assert [bool(left.reason) for left in swaps.left] == ([] if reason is None else [True])
    if reason is not None:
        assert re.search(reason, swaps.left[0].reason)


class _Padded(nn.Module):
    """A mean over what is not class 0."""

    def forward(self, scores, labels):
        each = scores.logsumexp(-1) - scores.gather(-1, labels[..., None])[..., 0]
        return (each * (labels != 0)).sum() / (labels != 0).sum()


@pytest.mark.parametrize("ignored", [0, None])
def test_a_loss_keeps_the_class_that_it_leaves_out(ignored):
    """The sample has no label 0, so that only labels of our own can show it."""
    loss = _Padded()
    loss.padding = 0 if ignored == 0 else "0"
    scores, labels = torch.randn(3, 5, 7), torch.randint(1, 7, (3, 5))
    swaps = ts.swap(loss, {"cross_entropy": "torch"}, sample_inputs=(scores, labels), min_speedup=0)
    assert [change.kind for change in swaps.changed] == (["cross_entropy"] if ignored == 0 else [])
    labels[0] = 0
    torch.testing.assert_close(loss(scores, labels), _Padded()(scores, labels))


def test_other_calls_than_those_checked_run_the_modules_own_code():
    class Optional(Delta):
        def forward(self, values, double=False):
            return super().forward(values) * (2 if double else 1)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Optional()

        def forward(self, values, double=False):
            return self.inner(values, double)

    model = Outer()
    values = torch.randn(2, 6, WIDTH)
    expected = [model(values), model(values, True)]
    assert ts.swap(model, {"attention": "torch"}, sample_inputs=values, min_speedup=0).changed[0].name == "Optional"
    assert "forward" in vars(model.inner)
    for double in (False, True):
        torch.testing.assert_close(model(values, double), expected[double])


class _Quick(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def test_a_module_class_takes_the_models_own_weights():
    model = nn.Sequential(nn.Linear(8, WIDTH), Alpha())
    nn.init.normal_(model[1].g)
    values = torch.randn(4, 8)
    expected = model(values)
    swaps = ts.swap(model, {"rms_norm": _Quick}, sample_inputs=values, min_speedup=0)
    assert swaps.changed[0].function == "_Quick" and [n for n, _ in model.named_parameters()][-1] == "1.g"
    torch.testing.assert_close(model(values), expected)
    with torch.no_grad():
        model[1].g.mul_(2)
    torch.testing.assert_close(model(values), 2 * expected)


def test_changes_go_to_a_deeper_model_on_the_meta_device():
    swaps = ts.swap(_net(1), ALL, sample_inputs=TOKENS, min_speedup=0)
    with torch.device("meta"):
        deep = Net(3)
    assert swaps.apply(deep) is deep
    assert sum("forward" in vars(m) for m in deep.modules()) == 3 * 6
    with pytest.raises(ValueError, match=r"none of what was changed .*rms_norm of Alpha.* is in this Linear"):
        swaps.apply(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("model", "arguments", "error", "message"),
    [
        (Net, {"functions": {"rmsnorm": "torch"}}, ValueError, "unknown kind 'rmsnorm'; did you mean 'rms_norm'"),
        (Net, {"functions": {"rms_norm": "apex"}}, ValueError, "'apex'; it must be 'torch', 'liger', 'auto', or a"),
        (Net, {"functions": {"swiglu": "torch"}}, ValueError, "torch has no fused form of it: give a function"),
        (Net, {"functions": {"swiglu": "liger"}}, ValueError, "its kernels need a GPU; the model is on cpu"),
        (Net, {"functions": {"swiglu": Gamma}}, ValueError, "is the class Gamma; classes are taken for norms"),
        (Net, {"functions": "torch"}, TypeError, "functions is a str; it must be a dict"),
        (Net, {"min_speedup": "fast"}, TypeError, "min_speedup='fast' was given; it must be a number"),
        (lambda: Net, {}, TypeError, "was given a type; it must be an nn.Module"),
        (lambda: nn.Linear(4, 4, device="meta"), {}, ValueError, "on the meta device"),
        (lambda: nn.ModuleList([nn.Linear(4, 4)]), {}, ValueError, "no inputs could be guessed .* pass sample_inputs"),
    ],
)
def test_what_cannot_be_done_is_an_error_at_the_call(model, arguments, error, message):
    with pytest.raises(error, match=message):
        ts.swap(model(), **arguments)


# -- every plan --


def _swapped(blocks: int = 2) -> Net:
    model = _net(blocks)
    swaps = ts.swap(model, ALL, sample_inputs=TOKENS, min_speedup=0)
    assert len(swaps.changed) == 6
    return model


def _train(fields: dict[str, Any], swapped: bool = True) -> dict[str, Any]:
    engine = ts.parallelize(
        _swapped() if swapped else _net(),
        ts.Plan(**fields),
        optimizer=parity.ADAMW,
        loss_fn=parity.loss_function("gpt"),
    )
    losses = [engine.step(*parity.shard(engine, *parity.batch("gpt", step))).item() for step in range(4)]
    return {"losses": losses, "state": engine.full_state_dict()}


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 3": (2, dict(zero=3, recompute="full")),
    "tp 2": (2, dict(tp=2)),
    "tp 2, sequence parallel": (2, dict(tp=2, sequence_parallel=True)),
    "pp 2": (2, dict(pp=2, micro_batches=2)),
    "cp 2": (2, dict(cp=2)),
    "zero 1, compiled": (2, dict(zero=1, compile=True)),
    "zero 3, tp 2, pp 2": (8, dict(zero=3, tp=2, pp=2, micro_batches=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANS)
def test_every_plan_trains_the_swapped_model_as_one_process_trains_the_original(ranks, case):
    world, fields = PLANS[case]
    (expected,) = ranks(1, _train, {"zero": 0}, False)
    parity.assert_same(ranks(world, _train, fields)[0], expected, 2e-5)


@pytest.mark.slow
def test_bf16_is_as_near_to_fp32_as_the_original(ranks):
    """bf16: within the spread of 16-bit digits."""
    (exact,) = ranks(1, _train, {"zero": 0}, False)
    (plain,) = ranks(1, _train, {"zero": 0, "precision": "bf16"}, False)
    found = ranks(2, _train, {"zero": 3, "precision": "bf16"})[0]
    off = [max(abs(a - b) for a, b in zip(run["losses"], exact["losses"], strict=True)) for run in (plain, found)]
    assert off[1] < 3 * off[0]


def _decided_on_all_ranks() -> tuple[list[str], list[int]]:
    model = _net()
    swaps = ts.swap(model, ALL, sample_inputs=TOKENS)  # what is faster is up to the time that rank 0 takes
    return swaps.describe().splitlines(), [("forward" in vars(m)) for m in model.modules()]


def test_rank_0_decides_for_all(ranks):
    first, second = ranks(2, _decided_on_all_ranks)
    assert first == second


def _laid_out() -> None:
    engine = ts.parallelize(_net(), ts.Plan(), optimizer=parity.ADAMW, loss_fn=parity.loss_function("gpt"))
    ts.swap(engine.model)


def test_a_laid_out_model_is_refused(ranks):
    with pytest.raises(RankError, match="the model is laid out already"):
        ranks(1, _laid_out)


@pytest.mark.slow
def test_eager_attention_of_transformers_is_swapped():
    pytest.importorskip("transformers")
    model = parity.build("llama")
    model.config._attn_implementation = "eager"
    inputs = {"input_ids": TOKENS}
    expected = model(**inputs).logits
    swaps = ts.swap(model, {"attention": "torch", "rms_norm": "torch"}, sample_inputs=inputs, min_speedup=0)
    assert {change.kind for change in swaps.changed} == {"attention", "rms_norm"}
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-5)

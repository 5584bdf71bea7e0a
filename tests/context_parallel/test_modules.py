"""Modules and functions as users write them, on ranks that are threads: exact in fp64, for any layout."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sequence_parity import LAYOUTS, check_model
from torch import nn

from tensorshard.context_parallel import contiguous, zigzag
from tensorshard.context_parallel.rules import attention
from tensorshard.torch_private.recomputation import function_calls

VOCABULARY, BATCH, LENGTH, WIDTH = 31, 2, 23, 16


def tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, length))


class Body(nn.Module):
    """An embedding, what a test makes of it, and the loss of the next token."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = middle
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
        z = self.head(self.middle(self.embedding(x), **masks))
        return F.cross_entropy(z[:, :-1].flatten(0, 1), y[:, 1:].flatten())


class Attention(nn.Module):
    """Attention of any kind: its mask is made by `mask_of(positions, given mask)`."""

    def __init__(self, mask_of: Any = None, heads: int = 4, kv_heads: int = 4, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.mask_of, self.options = heads, kv_heads, mask_of, options
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH * kv_heads // heads)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, h: torch.Tensor, mask: torch.Tensor | None = None, memory: torch.Tensor | None = None
    ) -> torch.Tensor:
        source = h if memory is None else memory
        q = self.query(h).view(*h.shape[:2], self.heads, -1).transpose(1, 2)
        k, v = self.key_value(source).view(*source.shape[:2], 2, self.kv_heads, -1).permute(2, 0, 3, 1, 4)
        if self.mask_of is not None:
            mask = self.mask_of(torch.arange(h.shape[1]), mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return h + self.out(out.transpose(1, 2).flatten(2))


def causal(positions: torch.Tensor) -> torch.Tensor:
    return positions[:, None] >= positions[None]


def alibi(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    distance = (positions[None] - positions[:, None]).to(torch.float64)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)[:, None, None]
    return (slopes * distance).masked_fill(~causal(positions), -math.inf)


def padded(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return causal(positions)[None, None] & mask[:, None, None, :].bool() | torch.eye(len(positions), dtype=torch.bool)


def hidden(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return causal(positions)[None, None] & mask[:, None, None, :].bool()


def hidden_by_the_lowest(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    """A query that sees no key sees all alike."""
    shown = hidden(positions, mask) & (positions[:, None] - positions[None] < 9)
    return torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, torch.finfo(torch.float64).min)


def packed(positions: torch.Tensor, documents: Any) -> torch.Tensor:
    return causal(positions)[None, None] & (documents[:, None, :, None] == documents[:, None, None, :])


def windowed(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return causal(positions) & (positions[:, None] - positions[None] < 5)


def near(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return (positions[:, None] - positions[None]).abs() < 3


def prefixed(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return causal(positions) | (positions[None] < 6)


class Local(nn.Module):
    """A function of the hidden states, with parameters."""

    def __init__(self, function: Any, **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(modules)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.function(h, **self.parts)


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        size = WIDTH // (2 if options.get("bidirectional") else 1)
        self.layer = kind(WIDTH, size, num_layers=2, batch_first=True, **options)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.layer(h)[0]


def along_time(function: Any) -> Any:
    return lambda h, **parts: function(h.transpose(1, 2), **parts).transpose(1, 2)


def left_mask(samples: Any = 1) -> torch.Tensor:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[samples, :12] = 0  # all tokens of a rank, in contiguous parts
    return mask


def documents() -> torch.Tensor:
    return torch.tensor([0] * 7 + [1] * 10 + [2] * (LENGTH - 17)).expand(BATCH, -1).contiguous()


def chunked(positions: torch.Tensor, mask: Any) -> torch.Tensor:
    return causal(positions) & (positions[:, None] // 5 == positions // 5)


def with_sink(h: torch.Tensor, sink: nn.Embedding) -> torch.Tensor:
    """Causal attention in which a learned logit takes a share of each query's weights, as in gpt-oss."""
    scores = (h @ h.transpose(1, 2)).masked_fill(~causal(torch.arange(h.shape[1])), -torch.inf)
    logits = torch.cat([scores, sink.weight.expand(*scores.shape[:2], 1)], -1)
    return logits.softmax(-1)[..., :-1] @ h


def with_learned_bias(h: torch.Tensor, table: nn.Embedding) -> torch.Tensor:
    """Attention with a learned bias for each distance, as in T5."""
    positions = torch.arange(h.shape[1])
    distances = (positions - positions[:, None]).clamp(-4, 4) + 4
    return F.scaled_dot_product_attention(h, h, h, attn_mask=table(distances).squeeze(-1))


def with_later_tokens(h: torch.Tensor, later: nn.Linear) -> torch.Tensor:
    """A second head's features, which are of the token after the next, as in heads for several tokens."""
    return h + F.pad(later(h)[:, 1:], (0, 0, 0, 1))


MODULES: dict[str, Any] = {
    "causal": lambda: (Attention(is_causal=True), {}),
    "causal, grouped queries": lambda: (Attention(is_causal=True, kv_heads=1, enable_gqa=True), {}),
    "causal mask": lambda: (Attention(lambda positions, mask: causal(positions)), {}),
    "window": lambda: (Attention(windowed), {}),
    "ALiBi": lambda: (Attention(alibi), {}),
    "padding left": lambda: (Attention(padded), {"mask": left_mask()}),
    "padding right": lambda: (Attention(padded), {"mask": left_mask().flip(1)}),
    "a rank without tokens": lambda: (Attention(padded), {"mask": left_mask(samples=slice(None))}),
    "queries without keys": lambda: (Attention(hidden), {"mask": left_mask(samples=slice(None))}),
    "queries without keys, by the lowest number": lambda: (
        Attention(hidden_by_the_lowest), {"mask": left_mask(samples=slice(None))}
    ),
    "a query without keys in one sample": lambda: (Attention(hidden_by_the_lowest), {"mask": left_mask()}),
    "near": lambda: (Attention(near), {}),
    "packed documents": lambda: (Attention(packed), {"mask": documents()}),
    "chunked": lambda: (Attention(chunked), {}),
    "sink": lambda: (Local(with_sink, sink=nn.Embedding(1, 1)), {}),
    "learned bias": lambda: (Local(with_learned_bias, table=nn.Embedding(9, 1)), {}),
    "heads for later tokens": lambda: (Local(with_later_tokens, later=nn.Linear(WIDTH, WIDTH)), {}),
    "prefix LM": lambda: (Attention(prefixed), {}),
    "no mask": lambda: (Attention(), {}),
    "cross attention": lambda: (Attention(), {"memory": torch.randn(BATCH, 17, WIDTH)}),
    "torch's encoder layer": lambda: (nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True), {}),
    "causal convolution": lambda: (
        Local(along_time(lambda h, conv: conv(F.pad(h, (3, 0)))), conv=nn.Conv1d(WIDTH, WIDTH, 4, groups=4)),
        {},
    ),
    "centred convolution": lambda: (
        Local(along_time(lambda h, conv: conv(h)), conv=nn.Conv1d(WIDTH, WIDTH, 5, padding="same")),
        {},
    ),
    "strided convolution": lambda: (
        Local(
            along_time(lambda h, conv: conv(h).repeat_interleave(2, -1)[..., :LENGTH]),
            conv=nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1),
        ),
        {},
    ),
    "running mean": lambda: (Local(lambda h: h.cumsum(1) / torch.arange(1, h.shape[1] + 1)[:, None]), {}),
    "linear attention": lambda: (
        Local(lambda h: torch.einsum("btd,bde->bte", h, torch.einsum("btd,bte->bde", h, h))),
        {},
    ),
    "LSTM": lambda: (Recurrent(nn.LSTM), {}),
    "GRU": lambda: (Recurrent(nn.GRU), {}),
    "LSTM both ways": lambda: (Recurrent(nn.LSTM, bidirectional=True), {}),
    "batch norm": lambda: (Local(along_time(lambda h, norm: norm(h)), norm=nn.BatchNorm1d(WIDTH)), {}),
    "group norm": lambda: (Local(along_time(lambda h, norm: norm(h)), norm=nn.GroupNorm(4, WIDTH)), {}),
    "mean pooling": lambda: (Local(lambda h: h.mean(1, keepdim=True)), {}),
    "first position": lambda: (Local(lambda h: h[:, :1] * h[:, -1:]), {}),
    "softmax pooling": lambda: (Local(lambda h: (torch.softmax(h.sum(-1), 1)[..., None] * h).sum(1, keepdim=True)), {}),
    "shifts": lambda: (
        Local(
            lambda h: h.roll(1, 1).flip(1) + F.pad(h, (0, 0, 2, 0))[:, :-2] + torch.cat([h[:, 3:], h[:, :3]], 1)
        ),
        {},
    ),
    "mixing positions": lambda: (Local(along_time(lambda h, mix: mix(h)), mix=nn.Linear(LENGTH, LENGTH)), {}),
    "a loop over positions": lambda: (
        Local(lambda h: torch.stack([h[:, t] * h[:, t - 1] for t in range(h.shape[1])], 1)),
        {},
    ),
    "sorted tokens": lambda: (Local(lambda h: h.flatten(0, 1)[h.flatten(0, 1)[:, 0].argsort()].view(h.shape)), {}),
    "chunks": lambda: (
        Local(lambda h: F.pad(h, (0, 0, 0, 1)).view(h.shape[0], 4, 6, -1).cumsum(2).flatten(1, 2)[:, :-1]),
        {},
    ),
    "dropout": lambda: (Local(lambda h, drop: drop(h), drop=nn.Dropout(0.4)), {}),
    "dropout of attention": lambda: (Attention(lambda positions, mask: causal(positions), dropout_p=0.3), {}),
    "norm and activations": lambda: (
        Local(
            lambda h, norm, up, down: down(F.gelu(up(norm(h)))),
            norm=nn.LayerNorm(WIDTH),
            up=nn.Linear(WIDTH, 40),
            down=nn.Linear(40, WIDTH),
        ),
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_what_it_computes_on_one_rank(name, layout, size):
    torch.manual_seed(0)
    middle, extra = MODULES[name]()
    x = tokens()
    y = x.clone()
    y[:, :12] = -100  # no target on the first rank, in contiguous parts
    dims = {"x": 1, "y": 1} | dict.fromkeys(extra, 1)
    check_model(Body(middle), {"x": x, "y": y, **extra}, dims, size=size, layout=LAYOUTS[layout])


@pytest.mark.parametrize("name", ["causal", "norm and activations", "padding left", "dropout", "LSTM", "batch norm"])
def test_usual_modules_need_no_whole_tensors(name):
    torch.manual_seed(0)
    middle, extra = MODULES[name]()
    x = tokens()
    group = check_model(Body(middle), {"x": x, "y": x, **extra}, {"x": 1, "y": 1} | dict.fromkeys(extra, 1))
    assert not group.fallbacks


class Twice(nn.Module):
    """Two layers of attention with one mask."""

    def __init__(self, mask_of: Any) -> None:
        super().__init__()
        self.layers, self.mask_of = nn.ModuleList([Attention(), Attention()]), mask_of

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mask = self.mask_of(torch.arange(h.shape[1]), None)
        for layer in self.layers:
            h = layer(h, mask)
        return h


@pytest.mark.parametrize(
    ("mask_of", "layout", "positions"),
    [
        (near, contiguous, 2),
        (near, zigzag, 4),  # it has 0 to 2 and 21 to 23, and gets 3, 4, 19 and 20
        (lambda positions, mask: positions[:, None] // 6 == positions // 6, contiguous, 0),
        (windowed, contiguous, 0),  # rank 0 has the first positions
        (lambda positions, mask: positions[:, None] >= positions - 22, contiguous, 18),  # nearly all: so all
    ],
)
def test_keys_and_values_travel_that_a_mask_shows(mask_of, layout, positions):
    """What rank 0 of 4 gets for one layer: `positions` of keys and values for each sample, in fp64."""
    torch.manual_seed(0)
    x = torch.randint(0, VOCABULARY, (BATCH, 24))
    group = check_model(Body(Twice(mask_of)), {"x": x, "y": x}, {"x": 1, "y": 1}, size=4, layout=layout)
    assert group.received["attention"] == 2 * positions * BATCH * 2 * WIDTH * 8
    assert group.calls["attention: which keys a mask shows"] == 1  # for both layers


def test_an_unknown_operation_is_computed_on_whole_tensors_and_counted():
    group = check_model(
        Body(Local(lambda h: torch.fft.fft(h, dim=1).real + h.cumprod(1))),
        {"x": tokens(), "y": tokens()},
        {"x": 1, "y": 1},
    )
    [(operation, line)] = group.fallbacks
    assert operation == "fft_fft" and "test_modules.py:" in line


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_custom_autograd_function_is_given_whole_tensors():
    body = Body(Local(lambda x: Doubled.apply(x)))  # noqa: PLW0108
    group = check_model(body, {"x": tokens(), "y": tokens()}, {"x": 1, "y": 1})
    assert [name for name, _ in group.fallbacks] == ["Doubled"]


def test_a_custom_autograd_function_whose_apply_was_taken_before():
    batch, dims = {"x": tokens(), "y": tokens()}, {"x": 1, "y": 1}
    body = Body(Local(Doubled.apply))
    if function_calls.sees_bound:
        assert [name for name, _ in check_model(body, batch, dims).fallbacks] == ["Doubled"]
    else:
        with pytest.raises(RuntimeError, match=r"Doubled was called through an `apply` that was taken from it before"):
            check_model(body, batch, dims)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal, grouped queries", "causal mask", "padding left"])
def test_keys_and_values_may_be_fetched_again_in_backward(name, layout):
    torch.manual_seed(0)
    middle, extra = MODULES[name]()
    x = tokens()
    dims = {"x": 1, "y": 1} | dict.fromkeys(extra, 1)
    group = check_model(
        Body(middle), {"x": x, "y": x, **extra}, dims, layout=LAYOUTS[layout], refetches=True, backward_outside=True
    )
    assert group.calls["attention again"] == 1


@pytest.mark.parametrize(("size", "neighbours"), [(2, 2), (3, 3), (4, 2), (6, 3), (6, 2), (3, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["causal", "causal, grouped queries", "no mask", "cross attention"])
def test_keys_and_values_may_come_in_rounds(name, layout, size, neighbours, monkeypatch):
    """In each a message of one rank; causal attention does without rounds where positions are scattered."""
    monkeypatch.setattr(attention, "_MESSAGE", 0)
    monkeypatch.setattr(attention, "_heads_send_less", lambda *_: False)
    torch.manual_seed(0)
    middle, extra = MODULES[name]()
    x = tokens()
    dims = {"x": 1, "y": 1} | dict.fromkeys(extra, 1)
    batch = {"x": x, "y": x, **extra}
    group = check_model(
        Body(middle), batch, dims, size=size, layout=LAYOUTS[layout], refetches=True, neighbours=neighbours
    )
    messages = {group.calls[what] for what in ("attention", "attention again", "attention'")}
    at_once = layout == "scattered" and "causal" in name
    assert messages == {size - 1} or (at_once and messages == {1})
    if name == "no mask" and neighbours > 1:  # from each other machine the keys of one rank
        for what in ("attention", "attention'"):
            across, received = group.received_across[what], group.received[what]
            assert across * (size - 1) == pytest.approx(received * (size // neighbours - 1), rel=0.4)


@pytest.mark.parametrize(
    ("name", "over_heads"), [("causal", 2), ("no mask", 2), ("causal, grouped queries", 0), ("causal mask", 0)]
)
def test_attention_takes_the_way_that_sends_less(name, over_heads):
    middle, extra = MODULES[name]()
    x = tokens()
    group = check_model(Body(middle), {"x": x, "y": x, **extra}, {"x": 1, "y": 1})
    assert group.calls["attention over heads"] == over_heads
    assert (group.calls["attention"] > 0) == (over_heads == 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_outside_of_the_group(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(lambda positions, mask: causal(positions))
            self.drop = Local(lambda h, drop: drop(h), drop=nn.Dropout(0.0))

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda h: self.drop(self.inner(h)), h, use_reentrant=reentrant)

    group = check_model(Body(Recomputed()), {"x": tokens(), "y": tokens()}, {"x": 1, "y": 1}, backward_outside=True)
    assert not group.fallbacks

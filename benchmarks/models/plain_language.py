"""Language models and other sequence models as people write them by hand."""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.batches import VOCABULARY, Batches, class_loss, numbers, token_loss, tokens
from benchmarks.models.case import Batch, Case, Loss

WIDTH, HEADS, LAYERS, LENGTH = 32, 4, 3, 12


class NanoAttention(nn.Module):
    """Causal attention with packed queries, keys and values, in nanoGPT's manner: sizes are read from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MinAttention(nn.Module):
    """Causal attention with three linears and a mask that is a buffer, in minGPT's manner."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.n_head = nn.Linear(WIDTH, WIDTH), HEADS
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        k = self.key(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = self.query(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = self.value(x).view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
        return self.proj((scores @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class HandGPT(nn.Module):
    """A GPT whose positions are an embedding (nanoGPT) or a parameter of the root (minGPT)."""

    def __init__(self, attention: Callable[[], nn.Module], *, tied: bool, parameter: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = None if parameter else nn.Embedding(LENGTH, WIDTH)
        self.pos_emb = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH)) if parameter else None
        self.h = nn.ModuleList(GPTBlock(attention) for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        _, t = idx.size()
        positions = self.pos_emb[:, :t] if self.wpe is None else self.wpe(torch.arange(t, device=idx.device))
        x = self.wte(idx) + positions
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class RotaryBlock(nn.Module):
    """A Llama's block by hand: grouped heads, rotary positions as complex numbers, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = HEADS, 2, WIDTH // HEADS
        self.wq = nn.Linear(WIDTH, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(WIDTH, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, WIDTH, bias=False)
        self.w1, self.w3 = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.w2 = nn.Linear(64, WIDTH, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self.attention_norm(x)
        q = _rotate(self.wq(h).view(b, t, self.heads, self.head_dim), freqs).transpose(1, 2)
        k = _rotate(self.wk(h).view(b, t, self.kv_heads, self.head_dim), freqs).transpose(1, 2)
        v = self.wv(h).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        k, v = (s.repeat_interleave(self.heads // self.kv_heads, dim=1) for s in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def _rotate(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * freqs[None, :, None]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


class HandLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(RotaryBlock() for _ in range(LAYERS))
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        half = WIDTH // HEADS // 2
        inverse = 1e4 ** (-torch.arange(half, device=tokens.device) / half)
        angles = torch.outer(torch.arange(tokens.shape[1], device=tokens.device).float(), inverse)
        freqs = torch.polar(torch.ones_like(angles), angles)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, freqs)
        return self.output(self.norm(x))


class RecurrentLM(nn.Module):
    def __init__(
        self, kind: Callable[..., nn.RNNBase], *, both: bool = False, width: int = WIDTH, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = kind(width, width, num_layers=2, batch_first=True, bidirectional=both)
        self.head = nn.Linear(width * (2 if both else 1), vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


class GRUClassifier(nn.Module):
    """The last hidden state of a GRU, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(VOCABULARY, WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(tokens))[1][-1])


class CellLM(nn.Module):
    """An LSTM cell in a Python loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(VOCABULARY, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        state = (x.new_zeros(x.shape[0], WIDTH), x.new_zeros(x.shape[0], WIDTH))
        steps = []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            steps.append(state[0])
        return self.head(torch.stack(steps, 1))


class AttentionSeq2Seq(nn.Module):
    """A GRU encoder and decoder with Bahdanau's attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.query, self.key, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, last = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), last)
        energy = self.score(torch.tanh(self.query(states)[:, :, None] + self.key(memory)[:, None]))[..., 0]
        return self.head(torch.cat([states, energy.softmax(-1) @ memory], -1))


class TorchTransformer(nn.Module):
    """``nn.Transformer``, encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        mask = mask.to(self.head.weight.dtype)
        return self.head(self.transformer(self.source(source), self.target(target), tgt_mask=mask))


class TorchEncoder(nn.Module):
    """``nn.TransformerEncoder``, before the pre-norm layers of which come positions; causal or not."""

    def __init__(self, *, causal: bool, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.embed, self.causal = nn.Embedding(VOCABULARY, WIDTH), causal
        self.positions = nn.Parameter(0.1 * torch.randn(1, LENGTH, WIDTH))
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[:, : tokens.shape[1]]
        if not self.causal:
            return self.head(self.encoder(x))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device).to(x.dtype)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


class HandMoE(nn.Module):
    """Top-2 routing, each expert run on the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return out.view_as(x)


class MoEBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.moe = nn.LayerNorm(WIDTH), MinAttention(), nn.LayerNorm(WIDTH), HandMoE()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.moe(self.ln_2(x))


class StackedLM(nn.Module):
    """An embedding, blocks one after the other, a norm and a head."""

    def __init__(self, block: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*(block() for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


class LinearAttentionBlock(nn.Module):
    """Attention without a softmax, by einsum and a cumulative sum, heads first in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.out, self.norm = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), RMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.to_qkv(self.norm(x)).view(b, t, 3, HEADS, c // HEADS).unbind(2)
        state = torch.einsum("bthi,bthj->bthij", F.elu(k) + 1, v).cumsum(1)
        mixed = torch.einsum("bthi,bthij->bthj", F.elu(q) + 1, state) / t
        return x + self.out(mixed.reshape(b, t, c))


class CausalConvBlock(nn.Module):
    """A gated, dilated convolution over time, as in WaveNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=2), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.pad(x.transpose(1, 2), (4, 0))
        signal, gate = self.conv(h).chunk(2, 1)
        return x + self.out(torch.tanh(signal) * torch.sigmoid(gate)).transpose(1, 2)


class BagClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.bag(tokens))


class Perceiver(nn.Module):
    """Latents that attend to the input with ``nn.MultiheadAttention``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.latents = nn.Parameter(torch.randn(4, WIDTH))
        self.attend = nn.ModuleList(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
        self.mix = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        latents = self.latents.expand(x.shape[0], -1, -1)
        for attend, mix in zip(self.attend, self.mix, strict=True):
            latents = latents + attend(latents, x, x, need_weights=False)[0]
            latents = latents + mix(latents)
        return self.head(latents.mean(1))


def _case(name: str, build: Callable[[], nn.Module], batch: Batches | None = None, loss: Loss = token_loss) -> Case:
    return Case(name, "plain", build, batch or tokens(), loss, "language", is_sequence=True)


def _two_texts(samples: int, generator: torch.Generator) -> Batch:
    drawn = [torch.randint(0, VOCABULARY, (samples, size), generator=generator) for size in (LENGTH, 8, 8)]
    return (drawn[0], drawn[1]), drawn[2]


_classes = tokens(targets="classes")

CASES = [
    _case("nanoGPT", lambda: HandGPT(NanoAttention, tied=True, parameter=False)),
    _case("minGPT", lambda: HandGPT(MinAttention, tied=False, parameter=True)),
    _case("hand-Llama", HandLlama),
    _case("LSTM", lambda: RecurrentLM(nn.LSTM)),
    _case("bidirectional-LSTM", lambda: RecurrentLM(nn.LSTM, both=True)),
    _case("GRU", lambda: RecurrentLM(nn.GRU)),
    _case("RNN", lambda: RecurrentLM(nn.RNN)),
    _case("GRU-classifier", GRUClassifier, _classes, class_loss),
    _case("LSTM-cell", CellLM),
    _case("seq2seq-attention", AttentionSeq2Seq, _two_texts),
    _case("nn.Transformer", TorchTransformer, _two_texts),
    _case("nn.TransformerEncoder", lambda: TorchEncoder(causal=False, norm_first=False)),
    _case("nn.TransformerEncoder-causal", lambda: TorchEncoder(causal=True, norm_first=True)),
    _case("hand-MoE", lambda: StackedLM(MoEBlock)),
    _case("linear-attention", lambda: StackedLM(LinearAttentionBlock)),
    _case("WaveNet", lambda: StackedLM(CausalConvBlock)),
    _case("EmbeddingBag", BagClassifier, _classes, class_loss),
    _case("Perceiver", Perceiver, _classes, class_loss),
    _case(
        "MLP of a sequence",
        lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Flatten(), nn.Linear(384, 5)),
        numbers(LENGTH, WIDTH, targets="classes"),
        class_loss,
    ),
]

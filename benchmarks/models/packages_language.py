"""Cases of other people's packages: models of sequences of tokens."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models.batches import CLASSES, VOCABULARY, token_loss, tokens
from benchmarks.models.case import Case
from benchmarks.models.packages import First, Through, case, own_loss

_LENGTH = 12


def _lm(name: str, module: str, build: Any, *, length: int = _LENGTH, **others: Any) -> Case:
    """A causal or bidirectional model of tokens that gives logits."""
    return case(name, module, build, tokens(length=length), token_loss, is_sequence=True, **others)


def _wrapped(x: Any, *, wrapper: dict[str, Any] | None = None, **layers: Any) -> nn.Module:
    return x.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=_LENGTH, attn_layers=x.Decoder(dim=32, depth=2, heads=4, **layers),
        **(wrapper or {}),
    )  # fmt: skip


_LLAMA = dict(rotary_pos_emb=True, ff_swish=True, ff_glu=True, use_rmsnorm=True, ff_no_bias=True)


def _two_towers(x: Any) -> nn.Module:
    return x.XTransformer(
        dim=32, enc_num_tokens=VOCABULARY, enc_depth=1, enc_heads=4, enc_max_seq_len=_LENGTH,
        dec_num_tokens=VOCABULARY, dec_depth=1, dec_heads=4, dec_max_seq_len=_LENGTH,
    )  # fmt: skip


def _two_sequences(samples: int, generator: torch.Generator) -> Any:
    source = torch.randint(1, VOCABULARY, (samples, _LENGTH), generator=generator)
    target = torch.randint(1, VOCABULARY, (samples, _LENGTH), generator=generator)
    return (source, target), target


def _torchtune(module: Any, name: str, **others: Any) -> nn.Module:
    return getattr(module, name)(
        vocab_size=VOCABULARY, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=16,
        intermediate_dim=64, **others,
    )  # fmt: skip


_LORA = dict(lora_attn_modules=["q_proj", "v_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8.0)


def _litgpt(module: Any, **settings: Any) -> nn.Module:
    config = module.Config(
        name="small", block_size=16, n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY, **settings,
    )  # fmt: skip
    model = module.GPT(config)
    model.apply(lambda part: model._init_weights(part) if isinstance(part, nn.Linear | nn.Embedding) else None)
    return model


_RMS = dict(norm_class_name="RMSNorm", bias=False, parallel_residual=False, rotary_percentage=1.0)
_GATED = dict(mlp_class_name="LLaMAMLP", intermediate_size=64, **_RMS)


def _reformer(module: Any) -> nn.Module:
    # Short sequences attend in full, without the hashes that are drawn anew in every forward.
    return module.ReformerLM(
        num_tokens=VOCABULARY, dim=32, depth=2, max_seq_len=16, heads=4, dim_head=8, bucket_size=4, n_hashes=2,
        ff_chunks=1, causal=True, full_attn_thres=64, fixed_position_emb=True,
    )  # fmt: skip


def _nystrom(module: Any) -> nn.Module:
    # The inverse starts from a maximum over the batch, of which enough iterations leave no trace.
    part = module.Nystromformer(
        dim=32, depth=2, dim_head=8, heads=4, num_landmarks=4, attn_values_residual_conv_kernel=3, pinv_iterations=16
    )
    return Through(nn.Embedding(VOCABULARY, 32), part, nn.Linear(32, VOCABULARY))


def _soft_moe(module: Any) -> nn.Module:
    part = module.SoftMoE(
        dim=32, seq_len=_LENGTH, num_experts=4, is_distributed=False, offload_unused_experts_to_cpu=False
    )
    return Through(nn.Embedding(VOCABULARY, 32), part, nn.Linear(32, VOCABULARY))


def _mamba(module: Any, pscan: bool) -> nn.Module:
    part = module.Mamba(module.MambaConfig(d_model=32, n_layers=2, d_state=8, pscan=pscan))
    return Through(nn.Embedding(VOCABULARY, 32), part, nn.Linear(32, VOCABULARY))


def _isab(module: Any) -> nn.Module:
    part = module.ISAB(dim=32, heads=4, num_latents=8)
    return Through(nn.Embedding(VOCABULARY, 32), part, nn.Linear(32, VOCABULARY))


class Tagger(nn.Module):
    """An LSTM under a conditional random field, whose forward is the loss."""

    def __init__(self, crf: Any) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, 16), nn.LSTM(16, 16, batch_first=True)
        self.head, self.crf = nn.Linear(16, CLASSES), crf.CRF(CLASSES, batch_first=True)

    def forward(self, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.head(self.lstm(self.embed(x))[0]), tags, reduction="mean")


def _tags(samples: int, generator: torch.Generator) -> Any:
    words = torch.randint(0, VOCABULARY, (samples, _LENGTH), generator=generator)
    tags = torch.randint(0, CLASSES, (samples, _LENGTH), generator=generator)
    return (words, tags), tags


class Entmax(nn.Module):
    """Sparse attention."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Embedding(VOCABULARY, 32), nn.Linear(32, 96)
        self.normalize, self.head = package.Entmax15(dim=-1), nn.Linear(32, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, -1)
        return self.head(self.normalize(q @ k.transpose(1, 2) / 6) @ v)


class LowRank(nn.Module):
    """A classifier of tokens whose layers have low-rank updates, all weights in training."""

    def __init__(self, lora: Any) -> None:
        super().__init__()
        self.embed = lora.Embedding(VOCABULARY, 32, r=4)
        self.first, self.merged = lora.Linear(32, 64, r=4), lora.MergedLinear(64, 64, r=4, enable_lora=[True, False])
        self.last = nn.Linear(64, VOCABULARY)
        lora.mark_only_lora_as_trainable(self, bias="all")
        self.last.requires_grad_(True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.merged(self.first(self.embed(x)).relu()).relu())


def _retnet(module: Any) -> nn.Module:
    return module.RetNet(
        num_tokens=VOCABULARY, d_model=32, nhead=2, num_layers=2, dropout=0.0, dim_feedforward=64
    )  # fmt: skip


def _tcn(module: Any) -> nn.Module:
    part = module.TCN(num_inputs=16, num_channels=[16, 16], kernel_size=3, dropout=0.0, input_shape="NLC")
    return Through(nn.Embedding(VOCABULARY, 16), part, nn.Linear(16, VOCABULARY))


def _rotary(module: Any) -> nn.Module:
    return RotaryBlock(module.RotaryEmbedding(dim=8))


class RotaryBlock(nn.Module):
    """Two layers of attention that share one rotary embedding, which keeps a table of what it has computed."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(RotaryAttention(rotary) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RotaryAttention(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary, self.norm = rotary, nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def _product_keys(module: Any) -> nn.Module:
    part = module.PKM(32, heads=2, num_keys=8, topk=4, dim_head=16)
    return Through(nn.Embedding(VOCABULARY, 32), part, nn.Linear(32, VOCABULARY))


class Positional(nn.Module):
    """A method other than forward."""

    def __init__(self, part: nn.Module, method: str) -> None:
        super().__init__()
        self.part, self.method = part, method

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self.part, self.method)(x)


_SIZES = dict(num_tokens=VOCABULARY, dim=32, depth=2)
_COUNT = dict(heads=4, dim_head=8)

CASES = [
    _lm("GPT", "x_transformers", _wrapped),
    _lm("Llama-like", "x_transformers", partial(_wrapped, **_LLAMA, attn_kv_heads=2,
        wrapper=dict(use_abs_pos_emb=False))),
    _lm("ALiBi, talking heads", "x_transformers", partial(_wrapped, alibi_pos_bias=True, attn_pre_talking_heads=True)),
    _lm("memory tokens, shared weights", "x_transformers",
        partial(_wrapped, wrapper=dict(num_memory_tokens=4, tie_embedding=True))),
    _lm("hyper connections", "x_transformers", partial(_wrapped, num_residual_streams=2)),
    _lm("macaron, gated residuals", "x_transformers", partial(_wrapped, macaron=True, gate_residual=True)),
    case("encoder and decoder", "x_transformers", _two_towers, _two_sequences, own_loss, is_sequence=True),
    _lm("Performer", "performer_pytorch", lambda m: m.PerformerLM(max_seq_len=16, **_SIZES, **_COUNT, nb_features=8)),
    _lm("Linformer", "linformer", lambda m: m.LinformerLM(VOCABULARY, 32, _LENGTH, 2, k=8, heads=4)),
    _lm("Reformer", "reformer_pytorch", _reformer),
    _lm("linear attention", "linear_attention_transformer",
        lambda m: m.LinearAttentionTransformerLM(max_seq_len=16, causal=True, use_axial_pos_emb=False, **_SIZES,
        **_COUNT)),
    _lm("linear attention, reversible", "linear_attention_transformer",
        lambda m: m.LinearAttentionTransformerLM(max_seq_len=16, reversible=True, use_rotary_emb=True, **_SIZES,
        **_COUNT)),
    _lm("local attention", "local_attention",
        lambda m: m.LocalTransformer(max_seq_len=16, local_attn_window_size=4, **_SIZES, **_COUNT)),
    _lm("routing by clusters", "routing_transformer",
        lambda m: m.RoutingTransformerLM(max_seq_len=16, window_size=4, causal=True, **_SIZES, **_COUNT)),
    _lm("gMLP", "g_mlp_pytorch", lambda m: m.gMLP(seq_len=_LENGTH, causal=True, **_SIZES)),
    _lm("Nyströmformer", "nystrom_attention", _nystrom),
    _lm("soft mixture of experts", "soft_moe_pytorch", _soft_moe),
    _lm("PaLM", "palm_pytorch", lambda m: m.PaLM(**_SIZES, **_COUNT), package="PaLM-pytorch"),
    _lm("MEGABYTE", "MEGABYTE_pytorch", lambda m: m.MEGABYTE(
        num_tokens=VOCABULARY, dim=(32, 16), depth=(1, 1), max_seq_len=(4, 4), dim_head=8, heads=2)),
    _lm("block-recurrent", "block_recurrent_transformer_pytorch", lambda m: First(m.BlockRecurrentTransformer(
        max_seq_len=16, block_width=4, **_SIZES, **_COUNT))),
    _lm("gated loops", "gateloop_transformer", lambda m: m.Transformer(
        dim=32, num_tokens=VOCABULARY, depth=2, use_gate_looped_attn=True, checkpoint_gate_looped_attn=False)),
    _lm("hierarchical", "simple_hierarchical_transformer", lambda m: m.HierarchicalTransformer(
        seq_len=16, **_SIZES, **_COUNT, hierarchies=(1, 2), window_sizes=(4, None))),
    _lm("Sinkhorn", "sinkhorn_transformer", lambda m: m.SinkhornTransformerLM(
        max_seq_len=16, bucket_size=4, heads=4, **_SIZES), length=16),
    _lm("ISAB", "isab_pytorch", _isab),
    _lm("product keys", "product_key_memory", _product_keys),
    _lm("rotary table kept", "rotary_embedding_torch", _rotary),
    _lm("Titans", "titans_pytorch", lambda m: m.MemoryAsContextTransformer(
        segment_len=4, num_persist_mem_tokens=2, num_longterm_mem_tokens=2, neural_memory_layers=(2,), **_SIZES,
        **_COUNT)),
    _lm("Llama 3", "torchtune.models.llama3", partial(_torchtune, name="llama3")),
    _lm("Llama 3 with LoRA", "torchtune.models.llama3", partial(_torchtune, name="lora_llama3", **_LORA)),
    _lm("Qwen 2, tied", "torchtune.models.qwen2", partial(_torchtune, name="qwen2", tie_word_embeddings=True)),
    _lm("Gemma", "torchtune.models.gemma", partial(_torchtune, name="gemma", head_dim=8)),
    _lm("Pythia", "litgpt", _litgpt),
    _lm("Llama", "litgpt", partial(_litgpt, n_query_groups=2, **_GATED)),
    _lm("Mixtral", "litgpt", partial(
        _litgpt, **{**_GATED, "mlp_class_name": "LLaMAMoE"}, n_expert=4, n_expert_per_token=2)),
    _lm("Llama with LoRA", "litgpt.lora", partial(_litgpt, lora_r=4, lora_query=True, lora_value=True, **_GATED)),
    _lm("Mamba", "mambapy.mamba", partial(_mamba, pscan=False)),
    _lm("Mamba, parallel scan", "mambapy.mamba", partial(_mamba, pscan=True)),
    _lm("RetNet", "yet_another_retnet.retnet", lambda m: Positional(_retnet(m), "forward_parallel")),
    _lm("TCN", "pytorch_tcn", _tcn),
    case("LSTM and CRF", "torchcrf", Tagger, _tags, own_loss, package="pytorch-crf"),
    _lm("entmax", "entmax", Entmax),
    _lm("LoRA", "loralib", LowRank),
]  # fmt: skip

"""Decoders of transformers: dense ones, mixtures of experts, and recurrent ones."""

from benchmarks.models.transformers_ import GROUPED, NO_TOKENS, TEXT, text_case

_SMALL = {**TEXT, **NO_TOKENS}
_LLAMA = {**_SMALL, **GROUPED}
_MOE = {**_LLAMA, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
_WIDE = {"vocab_size": 64, **NO_TOKENS}
_OPT = {
    **_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1,
}  # fmt: skip

CASES = [
    text_case("Llama", "LlamaForCausalLM", _LLAMA),
    text_case("Mistral", "MistralForCausalLM", _LLAMA),
    text_case("Qwen2", "Qwen2ForCausalLM", _LLAMA),
    text_case("Qwen3", "Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}),
    text_case("Gemma", "GemmaForCausalLM", {**_LLAMA, "head_dim": 8}),
    text_case("Gemma 2", "Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}),
    text_case("Gemma 3", "Gemma3ForCausalLM", {**_LLAMA, "head_dim": 8}, config="Gemma3TextConfig"),
    text_case("Phi", "PhiForCausalLM", _SMALL),
    text_case("Phi-3", "Phi3ForCausalLM", {**_LLAMA, "pad_token_id": 0}),
    text_case("StableLM", "StableLmForCausalLM", _LLAMA),
    text_case("OLMo 2", "Olmo2ForCausalLM", _LLAMA),
    text_case("Cohere", "CohereForCausalLM", _LLAMA),
    text_case("Granite", "GraniteForCausalLM", _LLAMA),
    text_case("Starcoder 2", "Starcoder2ForCausalLM", _LLAMA),
    text_case("SmolLM 3", "SmolLM3ForCausalLM", _LLAMA),
    text_case("GLM", "GlmForCausalLM", {**_LLAMA, "head_dim": 8, "pad_token_id": 0}),
    text_case("Nemotron", "NemotronForCausalLM", _LLAMA),
    text_case("Persimmon", "PersimmonForCausalLM", _SMALL),
    text_case("GPT-2", "GPT2LMHeadModel", {**_WIDE, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    text_case("GPT-Neo", "GPTNeoForCausalLM", {
        **_WIDE, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
        "max_position_embeddings": 64,
    }),
    text_case("GPT-NeoX", "GPTNeoXForCausalLM", _SMALL),
    text_case("GPT-J", "GPTJForCausalLM", {
        **_WIDE, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
    }),
    text_case("CodeGen", "CodeGenForCausalLM", {
        **_WIDE, "n_positions": 64, "n_ctx": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4,
    }),
    text_case("GPT-BigCode", "GPTBigCodeForCausalLM", {
        **_WIDE, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    }),
    text_case("OPT", "OPTForCausalLM", _OPT),
    text_case("BLOOM", "BloomForCausalLM", {**_WIDE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    text_case("Falcon", "FalconForCausalLM", _SMALL),
    text_case("MPT", "MptForCausalLM", {**_WIDE, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    text_case("XGLM", "XGLMForCausalLM", {
        **_WIDE, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4, "pad_token_id": 1,
        "max_position_embeddings": 64,
    }),
    text_case("BioGPT", "BioGptForCausalLM", {**_SMALL, "pad_token_id": 1}),
    text_case("Mixtral", "MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}),
    text_case("OLMoE", "OlmoeForCausalLM", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    text_case("Qwen2-MoE", "Qwen2MoeForCausalLM", {
        **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 64,
    }),
    text_case("Qwen3-MoE", "Qwen3MoeForCausalLM", {**_MOE, "num_experts": 4, "head_dim": 8}),
    text_case("DeepSeek-V3", "DeepseekV3ForCausalLM", {
        **_MOE, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8, "first_k_dense_replace": 1,
    }),
    text_case("gpt-oss", "GptOssForCausalLM", {
        **_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    }),
    text_case("Jamba", "JambaForCausalLM", {
        **_LLAMA, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "pad_token_id": 0,
    }),
    text_case("Mamba", "MambaForCausalLM", {
        **_WIDE, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4,
    }, group="recurrent"),
    text_case("Mamba 2", "Mamba2ForCausalLM", {
        **_WIDE, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8,
        "n_groups": 2, "chunk_size": 8,
    }, group="recurrent"),
    text_case("RWKV", "RwkvForCausalLM", {
        **_WIDE, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64,
    }, group="recurrent"),
    text_case("RecurrentGemma", "RecurrentGemmaForCausalLM", {
        **_LLAMA, "num_hidden_layers": 3, "lru_width": 32, "head_dim": 8,
    }, group="recurrent"),
]  # fmt: skip

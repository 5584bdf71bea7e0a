"""axolotl's and LLaMA-Factory's YAML: both fill in transformers' TrainingArguments, and their own keys around these."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tensorshard.foreign_configs import adapters, deepspeed
from tensorshard.foreign_configs.accelerate import both_names
from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
    Table,
    follow,
)
from tensorshard.foreign_configs.rules import (
    CLIP,
    DATA,
    LOGS,
    MODEL,
    OFFLOAD_ALL,
    OFFLOADED,
    RECOMPUTE,
    RESHARD,
    SAVES,
    betas,
    different,
    each,
    refused,
    to,
    unneeded,
)

_LORA = "such adapters are not there in a config: wrap the model with peft in a Python config (docs/adapters.md)"
_QUANT = "weights of 8 and 4 bits are not trained on here; load the model in 16 bits"
_EPOCHS = "a run counts steps: set train.steps to epochs x samples / samples a step"


def _optimizer(reading: Reading, value: str) -> Outcome:
    if value in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused"):
        reading.settings["optimizer._target_"] = "torch.optim.AdamW"
        return TRANSLATED, "optimizer is torch.optim.AdamW, fused where it can be"
    if value in ("sgd", "adagrad", "rmsprop"):
        name = {"sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}[value]
        reading.settings["optimizer._target_"] = f"torch.optim.{name}"
        return TRANSLATED, f"optimizer is torch.optim.{name}"
    return REFUSED, f"{value} is not in torch; adamw_torch_fused with train.plan.zero or offload saves memory exactly"


def _schedule(reading: Reading, value: str) -> Outcome:
    shapes = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if value not in shapes:
        return REFUSED, f"{value} is not there; use {', '.join(shapes)}, or a schedule in a Python config"
    reading.settings["schedule.shape"] = shapes[value]
    return TRANSLATED, f"scheduler.shape={shapes[value]}"


def _half(name: str) -> Rule:
    def act(reading: Reading, value: Any) -> Outcome:
        if value in (False, "false"):
            return NOT_NEEDED, f"{name} is off"
        if value == "full":
            return REFUSED, "weights of 16 bits without fp32 masters are not there; true keeps masters"
        reading.settings["train.plan.precision"] = name
        note = " (auto: bf16 where the device has it, as every supported one has)" if value == "auto" else ""
        return TRANSLATED, f"train.plan.precision={name}{note}"

    return Rule((True, False, "auto", "full", "true", "false"), act)


def _recompute(reading: Reading, value: Any) -> Outcome:
    if value == "offload":
        reading.settings["train.plan.offload"] = {"activations": "cpu"}
    reading.settings["train.plan.recompute"] = "full" if value else "none"
    return TRANSLATED, f"train.plan.recompute={reading.settings['train.plan.recompute']}"


def _fsdp(reading: Reading, value: Any) -> Outcome:
    words = value.split() if isinstance(value, str) else [str(word) for word in value] if value else []
    unknown = set(words) - {"full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "auto_wrap", "offload"}
    if unknown:
        return REFUSED, f"{', '.join(sorted(unknown))} is no word of FSDP; full_shard, shard_grad_op and auto_wrap are"
    if not words:
        return NOT_NEEDED, "it is empty"
    reading.settings["train.plan.zero"] = 2 if "shard_grad_op" in words else 0 if "no_shard" in words else 3
    if "offload" in words:
        reading.settings["train.plan.offload"] = dict(OFFLOADED)
    return TRANSLATED, f"train.plan.zero={reading.settings['train.plan.zero']}"


def _deepspeed(reading: Reading, value: Any) -> Outcome:
    return REFUSED, f"{value} is not beside this file; import it apart, or put it there"


def _report(reading: Reading, value: Any) -> Outcome:
    names = [value] if isinstance(value, str) else list(value)
    loggers = [name for name in names if name in ("tensorboard", "wandb", "mlflow")]
    reading.settings["train.loggers"] = loggers
    return TRANSLATED, f"train.loggers={loggers}"


def _steps(reading: Reading, value: float) -> Outcome:
    if value <= 0:
        return NOT_NEEDED, "it is off"
    if value < 1:
        return DIFFERENT, "a part of the run: set train.save_every or eval_every in steps"
    reading.settings["train.save_every"] = int(value)
    return TRANSLATED, f"train.save_every={int(value)}"


def _warmup(reading: Reading, value: float) -> Outcome:
    name, number = ("warmup_ratio", value) if 0 < value < 1 else ("warmup", int(value))
    reading.settings[f"schedule.{name}"] = number
    return TRANSLATED, f"scheduler.warmup_steps={number if name == 'warmup' else f'{number} of train.steps'}"


def _eval_steps(reading: Reading, value: float) -> Outcome:
    if value < 1:
        return DIFFERENT, "a part of the run: set train.eval_every in steps"
    reading.settings["train.eval_every"] = int(value)
    return TRANSLATED, f"train.eval_every={int(value)}"


def _max_steps(reading: Reading, value: int) -> Outcome:
    if value <= 0:
        return NOT_NEEDED, "it is off, epochs count"
    reading.settings["train.steps"] = value
    return TRANSLATED, f"train.steps={value}"


_HF: Table = {
    "gradient_accumulation_steps": to("batch.accumulate", int),
    "learning_rate": to("optimizer.lr", float),
    "weight_decay": to("optimizer.weight_decay", float),
    "adam_beta1": betas(0),
    "adam_beta2": betas(1),
    "max_grad_norm": CLIP,
    "max_steps": Rule(int, _max_steps),
    "warmup_steps": Rule(float, _warmup),
    "warmup_ratio": Rule(float, _warmup),
    "bf16": _half("bf16"),
    "fp16": _half("fp16"),
    **each("float16 bfloat16 fp32", refused("16-bit weights without fp32 masters; set bf16: true or fp16: true", bool)),
    "tf32": different("torch.set_float32_matmul_precision('high') in the config says it", None),
    **each("gradient_checkpointing activation_checkpointing", Rule((True, False, "offload", "true", "unsloth"), _recompute)),
    "activation_checkpointing_kwargs.use_reentrant": unneeded("recomputation is never re-entrant", bool),
    "gradient_checkpointing_kwargs.use_reentrant": unneeded("recomputation is never re-entrant", bool),
    **each("gradient_checkpointing_kwargs.*", unneeded("recomputation has no options")),
    "logging_steps": to("train.log_every", int),
    "save_steps": Rule(float, _steps),
    "save_total_limit": to("train.keep_checkpoints", int),
    "eval_steps": Rule(float, _eval_steps),
    "seed": to("train.seed", int),
    "dataloader_num_workers": to("train.num_workers", int),
    "report_to": Rule((str, list), _report),
    "torch_compile": Rule((True, False, "auto"), lambda r, v: to("train.plan.compile", None).act(r, v is True)),
    **each("torch_compile_backend torch_compile_mode", refused("blocks are compiled with inductor", str, ("inductor",))),
    "fsdp": Rule((str, list), _fsdp),
    **both_names("fsdp_config."),
    "fsdp_config": unneeded("it is empty"),
    "deepspeed": Rule(None, _deepspeed),
    "group_by_length": different("give the dataset in that order; samples are shuffled by the seed alone", bool),
    "neftune_noise_alpha": refused("noise on embeddings: add it in the model's forward", None, ()),
    "label_smoothing_factor": different("give loss=next_token_loss with label_smoothing in a Python config", float),
    **each(
        "save_strategy save_only_model save_safetensors output_dir overwrite_output_dir resume_from_checkpoint "
        "load_best_model_at_end metric_for_best_model greater_is_better hub_model_id push_to_hub hub_strategy "
        "auto_resume_from_checkpoints saves_per_epoch save_first_step",
        different(SAVES),
    ),
    **each("eval_strategy evaluation_strategy evals_per_epoch do_eval eval_batch_size per_device_eval_batch_size "
           "eval_accumulation_steps eval_on_start prediction_loss_only do_predict predict_with_generate eval_max_new_tokens "
           "eval_table_size eval_sample_packing eval_causal_lm_metrics do_bench_eval",
           different("data.validation is evaluated every train.eval_every steps")),
    **each("ddp_timeout ddp_backend local_rank device_map gpu_memory_limit", different("the start says it")),
    **each("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers low_cpu_mem_usage "
           "dataloader_prefetch_factor dataloader_pin_memory torch_empty_cache_steps include_tokens_per_second "
           "remove_unused_columns disable_tqdm logging_first_step logging_dir logging_strategy ",
           unneeded("the trainer here does it, or does without")),
    **each("do_train", unneeded("'tensorshard train' trains", bool)),
    **each("trackio_* use_trackio use_comet otel_* use_otel_metrics use_swanlab project hf_mlflow_* log_level log_level_replica "
           "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen include_for_metrics include_tkps "
           "include_effective_tokens_per_second skip_memory_metrics print_param_status", different(LOGS)),
    **each("hub_* ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint save_on_each_node",
           different(SAVES)),
    **each("eval_delay eval_do_concat_batches eval_on_each_dataset eval_use_gather_object batch_eval_metrics bf16_full_eval "
           "fp16_full_eval compute_accuracy generation_* eval_num_beams eval_sequence_len",
           different("data.validation is evaluated every train.eval_every steps")),
    **each("data_seed dataloader_drop_last dataloader_in_order dataloader_persistent_workers train_sampling_strategy "
           "dataloader_multiprocessing_context length_column_name label_names sortish_sampler", different(DATA)),
    **each("average_tokens_across_devices", different("a loss_fn that returns (sum, count) is weighed by tokens", bool)),
    "full_determinism": different("call torch.use_deterministic_algorithms(True) in the config", bool),
    **each("use_ray ray_* resources_per_worker world_size device use_cpu master_addr master_port", different("the start says it")),
    **each("use_liger_kernel liger_kernel_config liger_kernel_config.* ddp_static_graph debug use_kv_cache auto_find_batch_size",
           unneeded("the trainer here does it, or does without")),
    **each("profiler_steps profiler_steps_start enable_torch_profiler profiler_* profile_modules", different("train.profile=10-12")),
    **each("wandb_* mlflow_* comet_* use_tensorboard use_wandb use_mlflow swanlab_* run_name plot_loss", different(LOGS)),
    **each("load_in_8bit load_in_4bit quantization_bit gptq", refused(_QUANT, None)),
    **each("quantization_method bnb_config_kwargs.* bnb_4bit_* double_quantization gptq_* quantization_type "
           "quantization_device_map quantize_moe_experts", unneeded("it says how weights are quantized")),
    **each("trust_remote_code tokenizer_* use_fast_tokenizer special_tokens special_tokens.* added_tokens_overrides.* "
           "resize_vocab new_special_tokens add_tokens attn_implementation flash_attention flash_attn sdp_attention "
           "xformers_attention eager_attention flex_attention flex_attn_compile_kwargs.* rope_scaling "
           "s2_attention shift_attn use_cache hf_hub_token cache_dir revision_of_model model_revision",
           different(MODEL)),
}  # fmt: skip


def _adapter(key: str, *quantized: str) -> tuple[Rule, Callable[[Reading], bool]]:
    """The rule of the key that asks for adapters, and whether it does; the base has 16 bits unless one of `quantized` is set."""

    def act(reading: Reading, value: Any) -> Outcome:
        if value in (None, "", "full", False):
            return NOT_NEEDED, "all parameters are trained"
        if value == "qlora" or any(reading.get(name) for name in quantized):
            return REFUSED, adapters.QUANTIZED
        return adapters.begin(reading) if value == "lora" else (REFUSED, f"{value}: {_LORA}")

    return Rule(None, act), lambda reading: reading.get(key) in ("lora", "qlora")


_AXOLOTL_ADAPTER, _axolotl_adapts = _adapter("adapter", "load_in_4bit", "load_in_8bit", "gptq")
_FACTORY_ADAPTER, _factory_adapts = _adapter("finetuning_type", "quantization_bit")
_V1_ADAPTER, _v1_adapts = _adapter("peft_config.name", "quant_config.name")


def _all_linear(reading: Reading, value: bool) -> Outcome:
    if not value or not _axolotl_adapts(reading):
        return NOT_NEEDED, "it is off" if not value else "there are no adapters"
    return to("model.target_modules", None).act(reading, "all-linear")


AXOLOTL: Table = {
    **_HF,
    "micro_batch_size": to("batch.micro", int),
    "batch_size": to("batch.global", int),
    "num_epochs": different(_EPOCHS, float),
    "optimizer": Rule(str, _optimizer),
    "lr_scheduler": Rule(str, _schedule),
    "adam_epsilon": to("optimizer.eps", float),
    "adam_eps": different("axolotl's key is adam_epsilon; this one does nothing there either", float),
    "cosine_min_lr_ratio": to("schedule.min_ratio", float),
    **each("cosine_constant_lr_ratio lr_quadratic_warmup", refused("the schedule is not there", None)),
    "lr_scheduler_kwargs": refused("the schedule's options are not there", None, ()),
    "sequence_len": to("text.context_length", int),
    "dp_shard_size": to("train.plan.dp_shard", int),
    "dp_replicate_size": to("train.plan.dp_replicate", int),
    "tensor_parallel_size": to("train.plan.tp", int),
    "context_parallel_size": to("train.plan.cp", int),
    "sequence_parallel_degree": to("train.plan.cp", int),
    "fsdp_version": Rule((1, 2), lambda r, v: (TRANSLATED, "ZeRO 3 here is FSDP2, exact for both versions")),
    "fsdp_final_state_dict_type": different("'tensorshard export' writes whole weights", str),
    "activation_offloading": Rule((True, False, "legacy", "disk"), lambda r, v: to(
        "train.plan.offload", None).act(r, {"activations": "disk" if v == "disk" else "cpu"} if v else None)),
    "expert_parallel_size": to("train.plan.ep", int),
    **each("expert_parallel_*", unneeded("it says how experts are spread")),
    **each("fp8 fp8_enable_fsdp_float8_all_gather", refused("fp8 is not there; bf16 is", bool)),
    "adapter": _AXOLOTL_ADAPTER,
    **adapters.numbers(_axolotl_adapts, {
        "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
        "lora_modules_to_save": "modules_to_save", "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora"}, layers=adapters.pattern),
    "lora_target_linear": Rule(bool, _all_linear),
    **each("lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_on_cpu qlora_sharded_model_loading "
           "peft_autocast_adapter_dtype merge_lora merge_method", unneeded("it does not change what adapters compute")),
    "lora_fan_in_fan_out": unneeded("peft finds it out", bool),
    **each("lora_* peft_* peft.* loraplus_* relora* qlora_*", adapters.others(_axolotl_adapts)),
    **each("base_model base_model_config base_model_ignore_patterns model_type is_llama_derived_model is_*_derived_model "
           "overrides_of_model_config.* overrides_of_model_kwargs.* model_config.** processor_type experts_implementation "
           "dsv4_fp4_grouped_mode gemma4_hybrid_attn_impl llama4_linearized_experts torchdistx_path flash_optimum "
           "cls_model_config model_quantization_config* hf_use_auth_token mean_resizing_embeddings "
           "shrink_embeddings resize_token_embeddings_to_32x fix_untrained_tokens unfrozen_parameters",
           different(MODEL)),
    **each("liger_* cut_cross_entropy plugins use_kernels use_scattermoe use_sonicmoe use_glm_dsa_kernels fused_attn_kernel "
           "flash_attn_* unsloth_* kernels.*",
           unneeded("kernels of theirs: torch's are used, and logits are tiled where they are large")),
    **each("datasets test_datasets dataset_* val_set_size dataset_prepared_path sample_packing sample_packing_* "
           "pad_to_sequence_len train_on_inputs chat_template chat_template_* default_system_message eot_tokens "
           "excess_length_strategy max_packed_sequence_len pretraining_dataset shuffle_merged_datasets "
           "push_dataset_to_hub multipack_real_batches streaming total_num_tokens roles_to_train dataloader_* "
           "skip_prepare_dataset remove_unused_columns image_size image_resize_algorithm batch_flattening "
           "curriculum_sampling min_sample_len shuffle_* pretrain_multipack_* ",
           different(DATA)),
    **each("early_stopping_patience", different("train.save_best keeps the best checkpoint; stop the run by hand", int)),
    **each("loss_watchdog_threshold loss_watchdog_patience", different("a loss that is not a number stops the run")),
    **each("gradio_* bench_* axolotl_config_path capabilities env_capabilities is_preprocess gc_collect_steps dynamic_checkpoint "
           "num_dataset_shards_to_save", unneeded("it has no work to do here")),
    **each("tokens tokens.* num_labels processor_kwargs sage_attention sdpa_varlen hub_revision type_of_model", different(MODEL)),
    **each("role_boundaries pad_to_multiple_of preprocess_iterable pretraining_sample_concatenation streaming_multipack_buffer_size "
           "total_supervised_tokens", different(DATA)),
    **each("debug strict team auto_find_batch_size gc_steps", unneeded("it has no work to do here")),
    **each("rl rl.* trl.** vllm.** dpo_* kto_* orpo_* reward_model process_reward_model", refused(
        "preference training: write the loss with a model, loss_fn(model, batch), in a Python config", None)),
}  # fmt: skip

LLAMA_FACTORY: Table = {
    **_HF,
    **each("per_device_train_batch_size micro_batch_size", to("batch.micro", int)),  # the latter is Megatron's
    "global_batch_size": to("batch.global", int),
    "num_train_epochs": different(_EPOCHS, float),
    "optim": Rule(str, _optimizer),
    "lr_scheduler_type": Rule(str, _schedule),
    "adam_epsilon": to("optimizer.eps", float),
    "lr_scheduler_kwargs": refused("the schedule's options are not there", None, ()),
    **each("lr_scheduler_kwargs.*", refused("the schedule's options are not there")),
    "cutoff_len": to("text.context_length", int),
    **each("tensor_model_parallel_size tensor_parallel_size", to("train.plan.tp", int)),
    "pipeline_model_parallel_size": to("train.plan.pp", int),
    "context_parallel_size": to("train.plan.cp", int),
    "sequence_parallel": to("train.plan.sequence_parallel", bool),
    "use_distributed_optimizer": to("train.plan.zero", bool, int),
    **each("overlap_* *_fusion use_mcore_* moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap moe_token_dispatcher_type "
           "variable_seq_lengths", unneeded("it tunes Megatron's own way of working")),
    **each("use_reentrant_gc recompute_method recompute_num_layers",
           unneeded("communication overlaps here where a stream exists, and every block is recomputed")),
    "recompute_granularity": RECOMPUTE,
    "expert_model_parallel_size": to("train.plan.ep", int),
    "disable_gradient_checkpointing": Rule(bool, lambda r, v: _recompute(r, not v)),
    **each("gradient_checkpointing activation_checkpointing", Rule((True, False, "true"), lambda r, v: (
        _recompute(r, v) if v else (NOT_NEEDED, "LLaMA-Factory recomputes all the same, unless disable_gradient_checkpointing")))),
    **each("do_sample repetition_penalty num_beams max_length length_penalty skip_special_tokens sglang_*", unneeded(
        "it is for generation; 'tensorshard generate' has its own options")),
    **each("add_special_tokens init_special_tokens model_max_length compute_dtype upcast_lmhead_output offload_folder *_hub_token "
           "crop_to_patches use_audio_in_video preserve_thinking", different(MODEL)),
    **each("block_diag_attn disable_shuffling split_special_tokens", different(DATA)),
    "pure_bf16": refused("master weights are always fp32", bool),
    "upcast_layernorm": unneeded("master weights are fp32", bool),
    "stage": Rule(("pt", "sft", "rm", "ppo", "dpo", "kto"), lambda r, v: (
        (DIFFERENT, "the loss of the next token; give labels of -100 to tokens that do not count") if v in ("pt", "sft")
        else (REFUSED, f"{v}: write the loss with a model, loss_fn(model, batch), in a Python config"))),
    "finetuning_type": _FACTORY_ADAPTER,
    **adapters.numbers(_factory_adapts, {
        "lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target": "target_modules",
        "additional_target": "modules_to_save", "use_dora": "use_dora", "use_rslora": "use_rslora"}),
    "create_new_adapter": unneeded("adapters are new, unless adapter_name_or_path names some", bool),
    **each("lora_* loraplus_* pissa_*", adapters.others(_factory_adapts)),
    "adapter_name_or_path": adapters.others(_factory_adapts, "new adapters are trained; engine.load_adapters reads some"),
    **each("freeze_trainable_* freeze_extra_modules", unneeded("it says what is trained, see finetuning_type")),
    **each("freeze_vision_tower freeze_multi_modal_projector freeze_language_model train_mm_proj_only", different(
        "requires_grad_(False) on those parameters in a Python config", bool)),
    **each("use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro", refused("no such optimizer is there", bool)),
    **each("galore_* apollo_* badam_*", unneeded("it belongs to an optimizer that is not there")),
    **each("model_name_or_path adapter_folder new_special_tokens_config enable_liger_kernel use_unsloth "
           "image_* video_* audio_* mixture_of_depths use_kernels moe_aux_loss_coef infer_dtype use_unsloth_gc use_v1_kernels",
           different(MODEL)),
    **each("dataset dataset_dir eval_dataset template default_system max_samples preprocessing_num_workers "
           "overwrite_cache packing neat_packing streaming val_size train_on_prompt mask_history mix_strategy "
           "interleave_probs buffer_size tokenized_path media_dir ignore_pad_token_for_loss tool_format enable_thinking "
           "use_packed_sequences data_shared_file_system preprocessing_batch_size",
           different(DATA)),
    **each("max_new_tokens top_p top_k temperature sample_backend export_* infer_backend vllm_*", unneeded(
        "it is for generation and export; 'tensorshard generate' and 'export' have their own options")),
    **each("pref_* dpo_* kto_* simpo_gamma reward_model* ppo_* ref_model*", refused(
        "preference training: write the loss with a model, loss_fn(model, batch), in a Python config", None)),
    "mixed_precision": Rule(("bf16_mixed", "fp16_mixed", "no", "bf16", "fp16"), lambda r, v: to(
        "train.plan.precision", None).act(r, {"no": "fp32"}.get(v, v[:4]))),
    "eval_dataset_split": different(DATA),
}  # fmt: skip


_PREFERENCE = "preference training: write the loss with a model, loss_fn(model, batch), in a Python config"
LLAMA_FACTORY_V1: Table = {
    "micro_batch_size": to("batch.micro", int),
    "global_batch_size": to("batch.global", int),
    "cutoff_len": to("text.context_length", int),
    "learning_rate": to("optimizer.lr", float),
    "num_train_epochs": different(_EPOCHS, float),
    "max_steps": Rule(int, _max_steps),
    "max_grad_norm": to("train.plan.clip_grad_norm", float),
    "bf16": Rule(bool, lambda r, v: to("train.plan.precision", None).act(r, "bf16" if v else "fp32")),
    "enable_activation_checkpointing": Rule(bool, _recompute),
    "seed": to("train.seed", int),
    "full_determinism": different("call torch.use_deterministic_algorithms(True) in the config", bool),
    "logging_steps": to("train.log_every", int),
    "save_steps": Rule(float, _steps),
    "save_total_limit": to("train.keep_checkpoints", int),
    **each("output_dir resume_from_checkpoint save_epochs save_ckpt_as_hf", different(SAVES)),
    "batching_strategy": Rule(("normal", "padding_free", "dynamic_batching", "dynamic_padding_free"), lambda r, v: (
        (DIFFERENT, "batches have one number of samples; tokens of several are packed into one where it helps") if v == "normal"
        else (DIFFERENT, f"{v}: samples are pieces of text.context_length tokens, without padding"))),
    **each("batching_workers dataloader_num_workers", to("train.num_workers", int)),
    "dist_config.name": Rule(("fsdp2", "deepspeed", "fsdpturbo"), lambda r, v: (
        to("train.plan.zero", None).act(r, 3) if v != "deepspeed" else (NOT_NEEDED, "the file that it names says how"))),
    "dist_config.reshard_after_forward": RESHARD,
    "dist_config.offload_params": OFFLOAD_ALL,
    "dist_config.ep_size": to("train.plan.ep", int),
    **each("pin_memory dcp_path ep_dispatcher", unneeded("the trainer here does it, or does without"), "dist_config."),
    "dist_config.config_file": Rule(None, _deepspeed),
    "dp_size": to("train.plan.dp_shard", int),
    "cp_size": to("train.plan.cp", int),
    "cp_mode": unneeded("context parallelism finds its own way", str),
    "mp_replicate_size": to("train.plan.dp_replicate", int),
    "mp_shard_size": Rule(int, lambda r, v: to("train.plan.dp_shard", None).act(r, v // int(r.number("cp_size", 1)))),
    "dist_timeout": different("--timeout at the start, and train.watchdog", int),
    "optim_config.name": Rule(str, _optimizer),
    "optim_config.lr": unneeded("learning_rate counts there, too"),
    **each("optim_config.*", unneeded("it belongs to optim_config.name")),
    "lr_scheduler_config.name": refused("the schedule is a plugin of yours: write it in a Python config", str, ()),
    **each("lr_scheduler_config.*", unneeded("it belongs to lr_scheduler_config.name")),
    "peft_config.name": _V1_ADAPTER,
    **adapters.numbers(_v1_adapts, {name: name for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora",
                                                             "use_rslora", "modules_to_save")}, "peft_config."),
    **each("export_dir export_size export_hub_model_id infer_dtype export_legacy_format", unneeded(
        "it is for the export; 'tensorshard export' has its own options"), "peft_config."),
    "peft_config.adapter_name_or_path": adapters.others(_v1_adapts, "new adapters are trained; engine.load_adapters reads some"),
    **each("peft_config.*", unneeded("it says what is trained, see peft_config.name")),
    "quant_config.name": refused(_QUANT, str, ()),
    **each("quant_config.*", unneeded("it belongs to quant_config.name")),
    **each("model model_class custom_chat_template trust_remote_code flash_attn init_config.* kernel_config.*", different(MODEL)),
    **each("train_dataset eval_dataset", different(DATA)),
    **each("sample_backend max_new_tokens", unneeded("it is for generation; 'tensorshard generate' has its own options")),
    **each("pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha", refused(_PREFERENCE, None, ())),
}  # fmt: skip


# Keys of a DeepSpeed file which the Trainer compares with its own arguments.
_TWICE = {
    "train_micro_batch_size_per_gpu": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulate",
    "gradient_clipping": "train.plan.clip_grad_norm",
    "optimizer.params.lr": "optimizer.lr",
}


_TRAINER: dict[str, tuple[str, Any]] = {
    "train.plan.clip_grad_norm": ("max_grad_norm", 1.0),
    "train.plan.zero": ("fsdp", 0),
    "train.plan.precision": ("bf16", "fp32"),
    "optimizer._target_": ("optimizer", "torch.optim.AdamW"),
    "optimizer.betas": ("adam_beta1, adam_beta2", [0.9, 0.999]),
    "optimizer.eps": ("adam_epsilon", 1e-8),
    "optimizer.lr": ("learning_rate", 5e-5),
    "optimizer.weight_decay": ("weight_decay", 0.0),
    "schedule.shape": ("lr_scheduler", "linear"),
    "batch.micro": ("batch size", 8),
    "batch.accumulate": ("gradient_accumulation_steps", 1),
}
DEFAULTS: dict[str, dict[str, tuple[str, Any]]] = {
    "axolotl": {**_TRAINER, "schedule.shape": ("lr_scheduler", "cosine"), "batch.micro": ("batch size", 1)},
    "LLaMA-Factory": {**_TRAINER, "train.plan.recompute": ("disable_gradient_checkpointing", "full")},
    "LLaMA-Factory v1": {
        **_TRAINER,
        "train.plan.precision": ("bf16", "bf16"),
        "train.plan.recompute": ("enable_activation_checkpointing", "full"),
        "optimizer.lr": ("learning_rate", 1e-4),
        "optimizer.weight_decay": ("weight_decay", 0.01),
        "schedule.shape": ("lr_scheduler_config", "constant"),
        "batch.micro": ("micro_batch_size", 1),
        "text.context_length": ("cutoff_len", 2048),
    },
}
"""What each program takes for a key that is not there, by the target here."""
_ADAPTERS: dict[str, dict[str, Any]] = {
    "axolotl": {"lora_dropout": 0.0},
    "LLaMA-Factory": {"r": 8, "lora_dropout": 0.0, "target_modules": "all-linear"},
    "LLaMA-Factory v1": {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all-linear"},
}


def _settle_warmup(reading: Reading, program: str) -> None:
    """What axolotl warms up by default; and that transformers' constant schedule does not warm up."""
    settings, steps = reading.settings, reading.settings.get("train.steps")
    if program == "axolotl" and not settings.keys() & {"schedule.warmup", "schedule.warmup_ratio"}:
        why = "their default is 3% of the steps, and 100 at most"
        if isinstance(steps, int):
            reading.imply("warmup_steps", "schedule.warmup", min(int(0.03 * steps), 100), why)
        else:
            reading.imply("warmup_steps", "schedule.warmup_ratio", 0.03, why)
    if program == "axolotl" and settings.get("schedule.warmup") == 1:
        settings["schedule.warmup"] = 2  # as axolotl makes it
    if "constant" in (reading.get("lr_scheduler"), reading.get("lr_scheduler_type")):
        settings["schedule.warmup"] = 0


def read(reading: Reading, program: str) -> None:
    """Follows the program's table, and a DeepSpeed file that it points to; writes its defaults out."""
    inner = "deepspeed."
    ours = {key[len(inner) :]: value for key, value in reading.values.items() if key.startswith(inner)}
    reading.values = {key: value for key, value in reading.values.items() if not key.startswith(inner)}
    groups = {key.partition(".")[0] for key in reading.values}
    if (
        program == "LLaMA-Factory"
        and "model" in groups
        and not groups & {"model_name_or_path", "stage", "finetuning_type"}
    ):
        program = "LLaMA-Factory v1"
    tables = {"axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY, "LLaMA-Factory v1": LLAMA_FACTORY_V1}
    follow(tables[program], reading, program)
    settings, defaults = reading.settings, DEFAULTS[program]
    if ours:
        apart = Reading(ours, reading.world_size, around={"batch.micro": defaults["batch.micro"][1], **settings})
        deepspeed.read(apart)
        entries = {entry.key: replace(entry, key=inner + entry.key) for entry in apart.entries}
        for key, target in _TWICE.items():
            if key in entries and target in settings and apart.settings[target] != settings[target]:
                text = f"the file around it says {settings[target]}, and {program} refuses two values: write 'auto'"
                entries[key] = replace(entries[key], verdict=REFUSED, text=text)
        reading.entries += entries.values()
        settings.update(
            {key: value for key, value in apart.settings.items() if key.startswith("train.plan") or key not in settings}
        )
    is_sgd = settings.get("optimizer._target_", "").endswith("SGD")
    idle = {"optimizer.betas", "optimizer.eps"} if is_sgd else set()
    idle |= {"batch.accumulate"} if "batch.global" in settings else set()  # it follows from the others
    for target, (key, value) in defaults.items():
        if target not in idle:
            why = "whole replicas, as DDP has them" if target == "train.plan.zero" else "their default"
            reading.imply(key, target, value, why)
    _settle_warmup(reading, program)
    twice = {"lora_alpha": 2 * settings.get("model.r", 8)} if program == "LLaMA-Factory" else {}
    adapters.imply(reading, **_ADAPTERS[program], **twice)
    if "train.steps" not in settings:
        settings["train.steps"] = "???"
        reading.add("max_steps", "(implied)", DIFFERENT, _EPOCHS)

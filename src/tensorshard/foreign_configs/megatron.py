"""Megatron-LM's arguments, from a launch script or a list, and NeMo's keys, which pass them on.

The table is of the arguments that launch scripts commonly have; keys.json has all of Megatron-LM's. An argument that the
table lacks is refused by name.
"""

import re
from typing import Any

from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    IMPLIED,
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
    RECOMPUTE,
    SAVES,
    STAGES,
    betas,
    degree,
    different,
    each,
    listed,
    ranks,
    refused,
    say_what_decays,
    to,
    unneeded,
)
from tensorshard.foreign_configs.shell import LAUNCHER

_FLAG = ("", "true", "True", True, False, "false", "False", 1, "1")


def _flag(target: str, value: Any) -> Rule:
    return Rule(_FLAG, lambda r, v: to(target, None).act(r, value) if _on(v) else (NOT_NEEDED, "it is off"))


def _on(value: Any) -> bool:
    return value in ("", "true", "True", True, 1, "1")


def _precision(name: str, other: str) -> Rule:
    def act(reading: Reading, value: Any) -> Outcome:
        if _on(value) and _on(reading.values.get(other)):
            return REFUSED, f"--{name} and --{other} are both there, which Megatron refuses, too; take one out"
        return _flag("train.plan.precision", name).act(reading, value)

    return Rule(_FLAG, act)


def _number(reading: Reading, name: str, default: float) -> int:
    """The number at `name`, which NeMo has under ``model.``."""
    return int(reading.number(name, reading.number(f"model.{name}", default)))


def _virtual(reading: Reading, value: int) -> Outcome:
    stages, layers = _number(reading, "pipeline_model_parallel_size", 1), _number(reading, "num_layers", 0)
    if stages <= 1:
        return NOT_NEEDED, "there is no pipeline"
    if not layers or layers % (stages * value):
        return REFUSED, f"{layers or 'unknown'} layers do not divide into {stages} ranks of stages of {value}"
    reading.settings["train.plan.pp_schedule"] = "interleaved_1f1b"
    reading.settings["train.plan.pp_stages_per_rank"] = layers // stages // value
    return TRANSLATED, f"train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank={layers // stages // value}"


def _virtual_size(reading: Reading, value: int) -> Outcome:
    if value == 1 or _number(reading, "pipeline_model_parallel_size", 1) <= 1:
        return NOT_NEEDED, "stages are not interleaved"
    reading.settings["train.plan.pp_schedule"] = "interleaved_1f1b"
    reading.settings["train.plan.pp_stages_per_rank"] = value
    return TRANSLATED, f"train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank={value}"


def _decay_style(reading: Reading, value: str) -> Outcome:
    if value in ("inverse-square-root", "WSD"):
        return REFUSED, f"{value} is not there; use linear, cosine or constant, or a Python config"
    reading.settings["schedule.shape"] = value
    return TRANSLATED, f"scheduler.shape={value}"


def _counted(what: str, target: str) -> Rule:
    """A number of samples, or of tokens, which is steps of ours; what comes first ends a run."""

    def act(reading: Reading, value: int) -> Outcome:
        size = reading.number("global_batch_size", 0)
        length = reading.number("seq_length", 0) if what == "tokens" else 1
        if value == 0:
            return to(target, None).act(reading, 0)
        if not size or not length:
            needed = "--global-batch-size" + (" and --seq-length" if what == "tokens" else "")
            return REFUSED, f"{what} become steps by {needed}, which is not given; set it, as KEY=VALUE"
        steps = max(1, int(value // (size * length)))
        reading.settings[target] = min(steps, reading.settings.get(target, steps))
        return TRANSLATED, f"{target}={reading.settings[target]} ({value} {what} / {size * length:.0f} a step)"

    return Rule(int, act)


def _eval_interval(reading: Reading, value: int) -> Outcome:
    if reading.number("eval_iters", 100) == 0:
        return NOT_NEEDED, "nothing is evaluated: eval_iters is 0"
    return to("train.eval_every", None).act(reading, value)


def _eval_iters(reading: Reading, value: int) -> Outcome:
    return to("train.eval_batches" if value else "train.eval_every", None).act(reading, value)


def _sharding(reading: Reading, value: str) -> Outcome:
    level = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}[value]
    reading.settings["train.plan.zero"] = level
    return TRANSLATED, f"train.plan.zero={level}"


def _optimizer(reading: Reading, value: str) -> Outcome:
    reading.settings["optimizer._target_"] = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}[value]
    return TRANSLATED, f"optimizer is {reading.settings['optimizer._target_']}"


_RAN_ONLY = "parameters in layers' own kernels; PyTorch's, or the model's, are used here"
_ARCHITECTURE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention num_query_groups "
    "max_position_embeddings position_embedding_type rotary_base rotary_percent rotary_interleaved "
    "rotary_seq_len_interpolation_factor rotary_scaling_factor use_rotary_position_embeddings use_rope_scaling "
    "make_vocab_size_divisible_by normalization norm_epsilon layernorm_epsilon apply_layernorm_1p swiglu squared_relu "
    "quick_geglu geglu openai_gelu untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias qk_layernorm "
    "attention_dropout hidden_dropout init_method_std init_method_xavier_uniform vocab_size padded_vocab_size "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mscale mscale_all_dim "
    "mtp_num_layers mtp_loss_scaling_factor glu_linear_offset activation_func_clamp_value softmax_type window_size "
    "window_attn_skip_freq transformer_impl use_mcore_models spec attention_softmax_in_fp32 use_checkpoint_args "
    "apply_residual_connection_post_layernorm model_type encoder_num_layers decoder_num_layers img_h img_w patch_dim "
    "no_position_embedding use_flash_attn attention_backend export_force_local_attention use_cpu_initialization "
    "init_model_with_meta_device no_rope_fusion no_masked_softmax_fusion no_bias_gelu_fusion no_bias_swiglu_fusion "
    "no_bias_dropout_fusion no_persist_layer_norm cross_entropy_loss_fusion cross_entropy_fusion_impl "
    "enable_experimental qk_nope_head_dim qk_rope_head_dim use_llama2_rotary_position_embeddings rope_type"
)
_SAVING = (
    "save load auto_detect_ckpt_format ckpt_format dist_ckpt_strictness exit_on_missing_checkpoint finetune "
    "no_load_optim no_load_rng no_save_optim no_save_rng pretrained_checkpoint async_save use_dist_ckpt "
    "non_persistent_save_interval ckpt_fully_parallel_load ckpt_fully_parallel_save exit_interval exit_signal_handler"
)
_PASSIVE = (
    "overlap_grad_reduce overlap_param_gather no_async_tensor_model_parallel_allreduce no_gradient_accumulation_fusion "
    "tp_comm_overlap align_grad_reduce accumulate_allreduce_grads_in_fp32 fsdp_double_buffer use_nccl_ub manual_gc "
    "manual_gc_interval no_check_for_nan_in_loss_and_grad deterministic_mode use_custom_fsdp "
    "overlap_p2p_communication defer_embedding_wgrad_compute empty_unused_memory_level use_tp_pp_dp_mapping "
    "no_create_attention_mask_in_dataloader no_mmap_bin_files check_weight_hash_across_dp_replicas_interval "
    "ddp_bucket_size ddp_num_buckets ddp_average_in_collective num_distributed_optimizer_instances "
    "disable_bf16_reduced_precision_matmul high_priority_stream_groups"
)
_LOGGING = (
    "log_throughput log_params_norm log_num_zeros_in_grad log_timers_to_tensorboard log_memory_to_tensorboard "
    "log_batch_size_to_tensorboard log_validation_ppl_to_tensorboard log_learning_rate_to_tensorboard "
    "log_loss_scale_to_tensorboard log_world_size_to_tensorboard log_progress logging_level timing_log_level "
    "timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size wandb_project wandb_exp_name "
    "wandb_save_dir wandb_entity moe_per_layer_logging log_straggler"
)
_INPUT = (
    "data_path train_data_path valid_data_path test_data_path data_cache_path split data_args_path tokenizer_type "
    "tokenizer_model tokenizer_name_or_path vocab_file merge_file vocab_extra_ids extra_vocab_size mock_data dataset "
    "dataloader_type num_dataset_builder_threads reset_position_ids reset_attention_mask eod_mask_loss "
    "legacy_tokenizer tiktoken_pattern no_use_tokenizer_model_from_checkpoint_args trust_remote_code "
    "max_padding_length patch_tokenizer_type"
)
_TOOLS = "sample cpuctxsw trace capture_range capture_range_end cuda_graph_trace cuda_memory_usage force_overwrite"

_LISTED: Table = {
    **listed(
        "Megatron",
        "log_* otel_* one_logger_* no_one_logger nvtx_ranges record_shapes memory_snapshot_path record_memory_history "
        "pytorch_profiler_* barrier_with_L1_time throughput_window_size app_tag_*",
        different(LOGS),
    ),
    **listed(
        "Megatron",
        "ckpt_* dist_ckpt_* non_persistent_* save_optim save_rng load_optim load_rng async_ckpt_* async_strategy save_retain_interval "
        "save_config_filepath use_persistent_ckpt_worker most_recent_k verify_integrity",
        different(SAVES),
    ),
    **listed(
        "Megatron",
        "tp_comm_* inprocess_* flight_recorder_* rerun_* straggler_* overlap_* ddp_* use_te_rng_tracker te_rng_tracker "
        "no_pin_cpu_grads no_pin_cpu_params use_gloo_process_groups batch_p2p_* use_sharp deallocate_pipeline_outputs "
        "delay_wgrad_compute use_torch_optimizer_for_cpu_offload enable_msc disable_msc gpu_sniff_test_interval "
        "nccl_communicator_config_path use_precision_aware_optimizer enable_gloo_process_groups",
        unneeded("it tunes Megatron's own way of working; results are exact without it"),
    ),
    **listed(
        "Megatron",
        "mamba_* linear_* mtp_* mhc_* dsa_* yarn_* heterogeneous_* hybrid_* init_method embedding_init_method_std "
        "fp32_residual_connection apply_query_key_layer_scaling qk_l2_norm rope_scaling_factor no_rope_freq is_hybrid_model "
        "bias_activation_fusion bias_dropout_fusion masked_softmax_fusion persist_layer_norm apply_rope_fusion softmax_scale "
        "num_moe_experts gated_linear_unit activation_func experimental_attention_variant",
        different(MODEL),
    ),
    **listed(
        "Megatron",
        "fim_* sft sft_tokenizer_prompt_format per_split_data_args_path per_dataset_sequences_path dataloader_* chat_template "
        "tokenizer_* special_tokens mid_level_dataset_surplus use_tokenizer_model_from_checkpoint_args full_validation "
        "multiple_validation_sets validation_set_names null_tokenizer_*",
        different(DATA),
    ),
    **listed("Megatron", "rl_* grpo_* perform_rl_step langrl_*", refused("reinforcement learning is not there")),
}
"""Arguments of the release of keys.json, by patterns: only real ones, so that a slip of the pen stays one."""

_FORKS: Table = {
    "deepspeed": unneeded("the sharding is in the file of --deepspeed-config, and in --zero-stage", _FLAG),
    "deepspeed_config": Rule(None, lambda r, v: (
        (DIFFERENT, "--zero-stage says what is sharded; import that file as well to see the rest of it") if "zero_stage" in r.values
        else (REFUSED, "its zero_optimization says what is sharded: import that file as well, and give zero_stage=LEVEL"))),
    "moe_expert_parallel_size": degree("ep"),
    "zero_stage": to("train.plan.zero", (0, 1, 2, 3)),
    "ds_sequence_parallel_size": degree("cp"),
    "train_tokens": _counted("tokens", "train.steps"),
    "lr_decay_tokens": _counted("tokens", "schedule.total"),
    "lr_warmup_tokens": _counted("tokens", "schedule.warmup"),
    "cpu_optimizer": _flag("train.plan.offload", {"optimizer": "cpu", "gradients": "cpu"}),
    "no_pipeline_parallel": unneeded("train.plan.pp=1 is no pipeline", _FLAG),
    **each("task epochs train_data valid_data", refused("it belongs to a script of Megatron's tasks/, which is not read", None, ())),
    "encoder_seq_length": to("text.context_length", int),
    **each("decoder_seq_length retriever_* indexer_* evidence_data_path bert_load", different(MODEL)),
    **each("activations_checkpoint_method activations_checkpoint_num_layers", different("every block is recomputed")),
    **each("kd kd_* load_teacher *_teacher mos", refused("distillation: write the loss with both models in a Python config")),
    **each("random_ltd data_efficiency_curriculum_learning ds_sequence_parallel_fpdt", refused(
        "it is not there; take the flag out")),
    **each("checkpoint_num_layers distribute_checkpointed_activations partition_activations checkpoint_in_cpu "
           "contigious_checkpointing synchronize_each_layer", different("train.plan.recompute says it for every block")),
    **each("DDP_impl no_contiguous_buffers_in_local_ddp no_scatter_gather_tensors_in_pipeline override_lr_scheduler "
           "use_checkpoint_lr_scheduler deepspeed_activation_checkpointing profile_backward cpu_torch_adam ds_fused_adam "
           "force_ds_sequence_parallel use_pin_memory use_tutel zero_* no_barrier_with_level_1_timing remote_device "
           "ds_sequence_parallel_fpdt_* no_load_lr_state reset_iteration", unneeded(
               "it tunes older Megatrons' or Megatron-DeepSpeed's own way of working")),
    **each("data_impl mmap_warmup train_*_path train_data_exact_num_epochs return_data_index repeated_dataloader "
           "aml_data_download_path", different(DATA)),
    **each("mlp_type topk create_moe_param_group expert_interval num_experts_switch num_key_value_heads "
           "rotary_position_embeddings_theta use_flash_attn_* embedding_weights_in_fp32 no_query_key_layer_scaling "
           "disable_mem_efficient_ln disable_moe_* standalone_embedding_stage enable_expert_tensor_parallelism "
           "pipeline_model_parallel_split_rank no_initialization", different(MODEL)),
    **each("universal_checkpoint load_tag kill_switch_file", different(SAVES)),
    **each("log_optimizer_states_to_tensorboard no_log_*_to_tensorboard", different(LOGS)),
}  # fmt: skip
"""Arguments of Megatron-DeepSpeed (of July 2025), and of Megatron-LM's releases before 0.4."""

TABLE: Table = {
    **_LISTED,
    "tensor_model_parallel_size": degree("tp"),
    "pipeline_model_parallel_size": degree("pp"),
    "context_parallel_size": degree("cp"),
    "cp_comm_type": unneeded("context parallelism finds its own way", str),
    "num_layers_per_virtual_pipeline_stage": Rule(int, _virtual),
    "virtual_pipeline_model_parallel_size": Rule(int, _virtual_size),
    "num_virtual_stages_per_pipeline_rank": Rule(int, _virtual_size),
    **each(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        different(STAGES),
    ),
    "expert_model_parallel_size": degree("ep"),
    "expert_tensor_parallel_size": different("each expert is split over all ranks of train.plan.tp", int),
    "sequence_parallel": _flag("train.plan.sequence_parallel", True),
    "use_distributed_optimizer": _flag("train.plan.zero", 1),
    "use_torch_fsdp2": _flag("train.plan.zero", 3),
    "use_megatron_fsdp": _flag("train.plan.zero", 3),
    "data_parallel_sharding_strategy": Rule(("no_shard", "optim", "optim_grads", "optim_grads_params"), _sharding),
    "micro_batch_size": to("batch.micro", int),
    "global_batch_size": to("batch.global", int),
    "rampup_batch_size": refused("batches have one size throughout"),
    "train_iters": Rule(int, lambda r, v: to("train.steps", None).act(r, min(v, r.settings.get("train.steps", v)))),
    "train_samples": _counted("samples", "train.steps"),
    "seq_length": to("text.context_length", int),
    "seed": to("train.seed", int),
    "lr": to("optimizer.lr", float),
    "min_lr": to("schedule.min_lr", float),
    "lr_decay_style": Rule(("constant", "linear", "cosine", "inverse-square-root", "WSD"), _decay_style),
    "lr_decay_iters": to("schedule.total", int),
    "lr_decay_samples": _counted("samples", "schedule.total"),
    "lr_warmup_iters": to("schedule.warmup", int),
    "lr_warmup_samples": _counted("samples", "schedule.warmup"),
    "lr_warmup_fraction": to("schedule.warmup_ratio", float),
    "lr_warmup_init": to("schedule.start_lr", float),
    "override_opt_param_scheduler": unneeded("a resumed run goes by its own config"),
    "use_checkpoint_opt_param_scheduler": unneeded("a resumed run goes by its own config"),
    "optimizer": Rule(("adam", "sgd"), _optimizer),
    "adam_beta1": betas(0),
    "adam_beta2": betas(1),
    "adam_eps": to("optimizer.eps", float),
    "weight_decay": to("optimizer.weight_decay", float),
    "clip_grad": CLIP,
    **each(
        "start_weight_decay end_weight_decay weight_decay_incr_style", refused("decay is constant", None, ("constant",))
    ),
    "bf16": _precision("bf16", "fp16"),
    "fp16": _precision("fp16", "bf16"),
    **each("fp8_format fp8_hybrid fp4_format", refused("fp8 is not there; bf16 is: take --fp8-format out")),
    **each(
        "fp8_amax_compute_algo fp8_amax_history_len fp8_param_gather fp8_recipe fp8_margin fp8_interval",
        unneeded("it says how fp8 works"),
    ),
    "loss_scale": refused("losses are scaled dynamically under fp16"),
    **each(
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis", different("the scale adapts by itself", float)
    ),
    "recompute_granularity": RECOMPUTE,
    "recompute_activations": _flag("train.plan.recompute", "selective"),
    "recompute_method": different("every block is recomputed", str),
    "recompute_num_layers": different("every block is recomputed by itself", int),
    "recompute_modules": different("selective keeps products of matrices and attention of every block"),
    "checkpoint_activations": _flag("train.plan.recompute", "full"),
    "distribute_saved_activations": different("train.plan.sequence_parallel splits what is kept"),
    "cpu_offloading_num_layers": refused("train.plan.offload.activations=cpu moves those of all blocks"),
    "optimizer_cpu_offload": _flag("train.plan.offload", {"optimizer": "cpu", "gradients": "cpu"}),
    "optimizer_offload_fraction": different("all states are offloaded; offload.host_memory bounds it", float),
    "grad_reduce_in_bf16": _flag("train.plan.reduce_dtype", "bf16"),
    "megatron_fsdp_grad_comm_dtype": Rule(
        ("bf16", "fp32", "auto"), lambda r, v: to("train.plan.reduce_dtype", None).act(r, v if v == "bf16" else None)
    ),
    "megatron_fsdp_main_grads_dtype": different("gradients are kept as reduce_dtype says", str),
    "calculate_per_token_loss": different("a loss_fn that returns (sum, count) is weighed by tokens", _FLAG),
    "eval_interval": Rule(int, _eval_interval),
    "eval_iters": Rule(int, _eval_iters),
    "save_interval": to("train.save_every", int),
    "log_interval": to("train.log_every", int),
    "num_workers": to("train.num_workers", int),
    **each("exit_duration_in_mins", different("the batch system's signal ends a run after its step, saved")),
    **each(
        "profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler",
        different("train.profile=10-12"),
    ),
    **each(
        "cuda_graph_impl enable_cuda_graph external_cuda_graph",
        refused("CUDA graphs are not there", None, (False, "none")),
    ),
    **each("num_experts moe_*", different(MODEL)),
    **each(_ARCHITECTURE, different(MODEL)),
    **each(_INPUT, different(DATA)),
    **each(_LOGGING, different(LOGS)),
    **each(_SAVING, different(SAVES)),
    **each(LAUNCHER, different("the start says it: 'tensorshard train' or torchrun")),
    **each(_PASSIVE, unneeded("it tunes Megatron's own way of working; results are exact without it")),
    **each(_TOOLS, unneeded("it belongs to another program of the script, such as nsys")),
    **each("inference_*", unneeded("it is for generation; 'tensorshard generate' has its own options")),
    "rlhf_*": refused("reinforcement learning is not there"),
    **_FORKS,
    "command **": different("another command of the script; its arguments are not looked at"),
    **dict.fromkeys(
        ("if **", "case **"),
        refused(
            "the script goes one way or the other by this, and it is not known: set its variable, as NAME=VALUE",
            None,
            (),
        ),
    ),
}


def read(reading: Reading) -> None:
    """Follows Megatron's table, and writes its defaults out. Names may be written as on a command line."""
    per_node = "nproc_per_node" if "nproc_per_node" in reading.values else "num_gpus"
    ranks(reading, per_node, "nnodes" if per_node == "nproc_per_node" else "num_nodes")
    lost = "the value comes from a variable that the script does not set; give it, as NAME=VALUE"
    for key, value in list(reading.values.items()):
        if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d+)?", value):
            reading.values[key] = float(value) if re.search(r"[.eE]", value) else int(value)
        if isinstance(value, str) and "$" in value:
            rule = next((r for k, r in TABLE.items() if k == key), None)
            if rule is not None and rule.kind is not None and rule.kind is not str:
                reading.add(key, value, REFUSED, lost)
                del reading.values[key]
    follow(TABLE, reading, "Megatron")
    imply(reading)


def imply(reading: Reading) -> None:
    """Writes Megatron's defaults out."""
    settings = reading.settings
    if "data_parallel_sharding_strategy" in reading.values and not _on(reading.values.get("use_megatron_fsdp")):
        reading.add("use_megatron_fsdp", IMPLIED, DIFFERENT, "the sharding strategy is followed without this flag")
    reading.imply("use_distributed_optimizer", "train.plan.zero", 0)
    reading.imply("clip_grad", "train.plan.clip_grad_norm", 1.0)
    reading.imply("optimizer", "optimizer._target_", "torch.optim.AdamW")
    for name, value in (("betas", [0.9, 0.999]), ("eps", 1e-8), ("weight_decay", 0.01)):
        reading.imply(name, f"optimizer.{name}", value)
    say_what_decays(reading, "Megatron")
    reading.imply("lr_decay_style", "schedule.shape", "linear")
    settings.setdefault("optimizer.lr", "???")
    if settings["optimizer.lr"] == "???":
        reading.add("lr", IMPLIED, DIFFERENT, "there is no rate; set optimizer.lr")
        settings.pop("schedule.min_lr", None)
        settings.pop("schedule.start_lr", None)

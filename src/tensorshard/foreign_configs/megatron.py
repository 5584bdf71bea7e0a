"""Megatron-LM's arguments, from a launch script or a list, and NeMo's keys, which pass them on.

The table is of the arguments that launch scripts commonly have; keys.json has all of Megatron-LM's. An argument that the
table lacks is refused by name.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
    Table,
    different,
    each,
    follow,
    listed,
    refused,
    to,
    unneeded,
)
from tensorshard.foreign_configs.torchtitan import DATA, LOGS, MODEL, betas

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


def _ranks(name: str) -> Rule:
    return to(f"train.plan.{name}", int)


def _virtual(reading: Reading, value: int) -> Outcome:
    stages = int(reading.number("pipeline_model_parallel_size", 1))
    layers = int(reading.number("num_layers", 0))
    if stages <= 1:
        return NOT_NEEDED, "there is no pipeline"
    if not layers or layers % (stages * value):
        return REFUSED, f"{layers or 'unknown'} layers do not divide into {stages} ranks of stages of {value}"
    reading.settings["train.plan.pp_schedule"] = "interleaved_1f1b"
    reading.settings["train.plan.pp_stages_per_rank"] = layers // stages // value
    return TRANSLATED, f"train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank={layers // stages // value}"


def _virtual_size(reading: Reading, value: int) -> Outcome:
    if value == 1 or reading.number("pipeline_model_parallel_size", 1) <= 1:
        return NOT_NEEDED, "stages are not interleaved"
    reading.settings["train.plan.pp_schedule"] = "interleaved_1f1b"
    reading.settings["train.plan.pp_stages_per_rank"] = value
    return TRANSLATED, f"train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank={value}"


def _decay_style(reading: Reading, value: str) -> Outcome:
    if value in ("inverse-square-root", "WSD"):
        return REFUSED, f"{value} is not there; use linear, cosine or constant, or a Python config"
    reading.settings["schedule.shape"] = value
    return TRANSLATED, f"scheduler.shape={value}"


def _samples(target: str) -> Rule:
    def act(reading: Reading, value: int) -> Outcome:
        size = reading.number("global_batch_size", 0)
        if not size:
            return REFUSED, "samples become steps by --global-batch-size, which is not given; set it, as KEY=VALUE"
        reading.settings[target] = max(1, int(value // size)) if value else 0
        return TRANSLATED, f"{target}={reading.settings[target]} ({value} samples / {size:.0f} a step)"

    return Rule(int, act)


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
_MACHINE = (
    "nnodes nproc_per_node node_rank master_addr master_port rdzv_endpoint rdzv_id rdzv_backend rdzv_conf local_rank "
    "standalone max_restarts monitor_interval start_method log_dir redirects tee no_python job_name "
    "partition account nodes ntasks ntasks_per_node gpus_per_node gres time exclusive dependency output error container_image "
    "container_mounts container_workdir no_container_mount_home mpi kill_on_bad_exit wait requeue parsable pty export "
    "distributed_backend distributed_timeout_minutes no_sync termination_id cpus_per_task mem signal"
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
        different("train.output_dir, train.save_every and --resume say what is kept and read"),
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

TABLE: Table = {
    **_LISTED,
    "tensor_model_parallel_size": _ranks("tp"),
    "pipeline_model_parallel_size": _ranks("pp"),
    "context_parallel_size": _ranks("cp"),
    "cp_comm_type": unneeded("context parallelism finds its own way", str),
    "num_layers_per_virtual_pipeline_stage": Rule(int, _virtual),
    "virtual_pipeline_model_parallel_size": Rule(int, _virtual_size),
    "num_virtual_stages_per_pipeline_rank": Rule(int, _virtual_size),
    **each(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        different("stages are balanced by cost; train.plan.pp_split sets the cuts"),
    ),
    "expert_model_parallel_size": _ranks("ep"),
    "expert_tensor_parallel_size": different("each expert is split over all ranks of train.plan.tp", int),
    "sequence_parallel": _flag("train.plan.sequence_parallel", True),
    "use_distributed_optimizer": _flag("train.plan.zero", 1),
    "use_torch_fsdp2": _flag("train.plan.zero", 3),
    "use_megatron_fsdp": _flag("train.plan.zero", 3),
    "data_parallel_sharding_strategy": Rule(("no_shard", "optim", "optim_grads", "optim_grads_params"), _sharding),
    "micro_batch_size": to("batch.micro", int),
    "global_batch_size": to("batch.global", int),
    "rampup_batch_size": refused("batches have one size throughout"),
    "train_iters": to("train.steps", int),
    "train_samples": _samples("train.steps"),
    "seq_length": to("text.context_length", int),
    "seed": to("train.seed", int),
    "lr": to("optimizer.lr", float),
    "min_lr": to("schedule.min_lr", float),
    "lr_decay_style": Rule(("constant", "linear", "cosine", "inverse-square-root", "WSD"), _decay_style),
    "lr_decay_iters": to("schedule.total", int),
    "lr_decay_samples": _samples("schedule.total"),
    "lr_warmup_iters": to("schedule.warmup", int),
    "lr_warmup_samples": _samples("schedule.warmup"),
    "lr_warmup_fraction": to("schedule.warmup_ratio", float),
    "lr_warmup_init": to("schedule.start_lr", float),
    "override_opt_param_scheduler": unneeded("a resumed run goes by its own config"),
    "use_checkpoint_opt_param_scheduler": unneeded("a resumed run goes by its own config"),
    "optimizer": Rule(("adam", "sgd"), _optimizer),
    "adam_beta1": betas(0),
    "adam_beta2": betas(1),
    "adam_eps": to("optimizer.eps", float),
    "weight_decay": to("optimizer.weight_decay", float),
    "clip_grad": to("train.plan.clip_grad_norm", float, lambda value: value or None),
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
    "recompute_granularity": Rule(("full", "selective"), lambda r, v: to("train.plan.recompute", None).act(r, v)),
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
    "eval_interval": to("train.eval_every", int),
    "eval_iters": to("train.eval_batches", int, lambda value: value or None),
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
    **each(_SAVING, different("train.output_dir, train.save_every and --resume say what is kept and read")),
    **each(_MACHINE, different("the start says it: 'tensorshard train' or torchrun")),
    **each(_PASSIVE, unneeded("it tunes Megatron's own way of working; results are exact without it")),
    **each(_TOOLS, unneeded("it belongs to another program of the script, such as nsys")),
    **each("inference_*", unneeded("it is for generation; 'tensorshard generate' has its own options")),
    "rlhf_*": refused("reinforcement learning is not there"),
    "command **": different("another command of the script; its arguments are not looked at"),
    "if **": refused(
        "the script goes one way or the other by this, and it is not known: set its variable, as NAME=VALUE"
    ),
}


def read(reading: Reading) -> None:
    """Follows Megatron's table, and writes its defaults out. Names may be written as on a command line."""
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
        reading.add("use_megatron_fsdp", "(implied)", DIFFERENT, "the sharding strategy is followed without this flag")
    reading.imply("use_distributed_optimizer", "train.plan.zero", 0)
    reading.imply("clip_grad", "train.plan.clip_grad_norm", 1.0)
    reading.imply("optimizer", "optimizer._target_", "torch.optim.AdamW")
    for name, value in (("betas", [0.9, 0.999]), ("eps", 1e-8), ("weight_decay", 0.01)):
        reading.imply(name, f"optimizer.{name}", value)
    reading.add(
        "weight_decay of biases and norms",
        "(implied)",
        DIFFERENT,
        "Megatron decays matrices alone; here all, unless the config's optimizer has groups",
    )
    reading.imply("lr_decay_style", "schedule.shape", "linear")
    settings.setdefault("optimizer.lr", "???")
    if settings["optimizer.lr"] == "???":
        reading.add("lr", "(implied)", DIFFERENT, "there is no rate; set optimizer.lr")
        settings.pop("schedule.min_lr", None)
        settings.pop("schedule.start_lr", None)


_ASSIGN = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)$")


def arguments(text: str, given: dict[str, str]) -> dict[str, Any]:
    """The arguments of a launch script, with its variables and arrays followed.

    Args:
        text: the script. given: variables that are set from outside; they win.
    """
    text = re.sub(r"\\\r?\n", " ", text)
    text = re.sub(r"(?m)(^|\s)#.*$", r"\1", text)
    text = re.sub(r"\(([^()]*)\)", lambda match: "(" + match[1].replace("\n", " ") + ")", text)
    text = re.sub(r'"(\$\{\w+\[[@*]\]\})"', r"\1", text)  # as many words as the array has
    variables, branches = dict(given), _Branches()
    lines = []
    for line in _joined(text):
        if branches.take(line, variables):
            continue
        match = _ASSIGN.match(line)
        if match:
            name, more, value = match.groups()
            value = value.strip()
            if len(value) > 1 and value[0] + value[-1] in ("()", "''", '""'):
                value = value[1:-1]
            value = expand(value, variables, name)
            variables[name] = given.get(name, f"{variables.get(name, '')} {value}" if more else value)
        elif "--" in line or "$" in line:
            lines.append(line)
    commands = [_split(expand(line, variables)) for line in lines]
    commands = [words for words in commands if any(word.startswith("--") for word in words)]
    if not commands:
        commands = [[word for value in variables.values() for word in _split(value)]]
    read = [pairs(words) for words in commands]
    counts = [sum(name in TABLE for name in options) for options in read]
    main = counts.index(max(counts))
    others = {f"command {number + 1}": " ".join(commands[number][:8]) for number in range(len(read)) if number != main}
    return {**read[main], **others, **branches.undecided}


class _Branches:
    """Which lines of a script are run, where it branches by ``if``.

    Attributes:
        undecided: conditions by what is not known, each with what its branches set.
    """

    def __init__(self) -> None:
        self.undecided: dict[str, str] = {}
        self._stack: list[tuple[bool | None, bool, str]] = []  # runs; an earlier branch ran; the undecided condition

    def take(self, line: str, variables: Mapping[str, str]) -> bool:
        """Whether nothing is to be done with `line`: it belongs to a branch that is not taken, or to an ``if`` itself."""
        match = re.match(r"\s*(if|elif|else|fi|then)\b\s*(.*?)\s*(;\s*then)?\s*;?\s*$", line)
        if match is None:
            for runs, _, condition in self._stack:
                if runs is None and ("--" in line or _ASSIGN.match(line)):
                    self.undecided[condition] = f"{self.undecided.get(condition, '')} {line.strip()}".strip()
            return any(not runs for runs, _, _ in self._stack)
        word, condition, _ = match.groups()
        if word == "if":
            self._stack.append(self._branch(condition, variables, False))
        elif self._stack and word == "fi":
            self._stack.pop()
        elif self._stack and word in ("elif", "else"):
            runs, ran, before = self._stack.pop()
            ran = ran or bool(runs)
            if runs is None:
                self._stack.append((None, ran, before))
            elif word == "else":
                self._stack.append((not ran, ran, ""))
            else:
                self._stack.append(self._branch(condition, variables, ran))
        return True

    @staticmethod
    def _branch(condition: str, variables: Mapping[str, str], ran: bool) -> tuple[bool | None, bool, str]:
        holds = False if ran else _holds(condition, variables)
        return holds, ran, re.sub(r"\s*\.\s*", ".", f"if {condition}") if holds is None else ""


_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": eq, "==": eq, "!=": ne, "-eq": eq, "-ne": ne, "-gt": gt, "-lt": lt, "-ge": ge, "-le": le
}  # fmt: skip


def _holds(condition: str, variables: Mapping[str, str]) -> bool | None:
    """Whether a condition of the shell holds; None if that is not known from the variables."""
    for joint, joined in ((r"\|\||-o", any), (r"&&|-a", all)):
        parts = re.split(rf"\s(?:{joint})\s", condition.strip().strip("[]"))
        if len(parts) > 1:
            found = [_holds(part, variables) for part in parts]
            decides = joined is any
            return decides if decides in found else None if None in found else not decides
    words = _split(expand(condition, variables).strip().strip("[]"))
    negated = words[:1] == ["!"]
    words = words[negated:]
    holds: bool | None = None
    if len(words) == 2 and words[0] in ("-z", "-n"):
        is_set = bool(re.sub(r"\$\{?\w+\}?", "", words[1]))  # what the script does not set is empty
        holds = is_set is (words[0] == "-n")
    elif len(words) == 1 and words[0] in ("-z", "-n"):
        holds = words[0] == "-z"
    elif len(words) == 3 and words[1] in _COMPARISONS and "$" not in words[0] + words[2]:
        one, other = words[0], words[2]
        if not words[1].startswith("-"):
            holds = _COMPARISONS[words[1]](one, other)
        elif re.fullmatch(r"-?\d+", one) and re.fullmatch(r"-?\d+", other):
            holds = _COMPARISONS[words[1]](int(one), int(other))
    elif words in (["true"], ["false"]):
        holds = words == ["true"]
    return holds if holds is None else holds is not negated


def _joined(text: str) -> list[str]:
    """Lines, those within double quotes joined."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].count('"') % 2:
            lines[-1] += " " + line
        else:
            lines.append(line)
    return lines


def expand(text: str, variables: Mapping[str, str], own: str = "") -> str:
    """`text` with known variables replaced, defaults ``${A:-1}`` taken, and ``$((...))`` of whole numbers reckoned."""
    for _ in range(8):
        before = text
        text = re.sub(
            r"\$\{(\w+)(?::?-([^{}]*))?(?:\[[@*]\])?\}",
            lambda m: variables.get(m[1], m[2] if m[2] is not None else m[0]),
            text,
        )
        text = re.sub(r"\$([A-Za-z_]\w*|\d)", lambda m: variables.get(m[1], m[0]), text)
        text = re.sub(
            r"\$\(\([^()]*\)\)",
            lambda m: re.sub(r"(?<![\w$])[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), m[0]),
            text,
        )
        text = re.sub(r"\$\(\(([\d\s+*/%-]+)\)\)", lambda m: _reckoned(m[1]) or m[0], text)
        if text == before or len(text) > 100_000:
            break
    return text


def _reckoned(text: str) -> str | None:
    """The value of a sum or product of whole numbers, from left to right within one kind of operator."""
    terms = re.findall(r"\d+|[+*/%-]", text)
    kinds = set(terms[1::2])
    if not terms or not terms[0].isdigit() or (kinds & set("+-") and kinds & set("*/%")):
        return None
    value = int(terms[0])
    for operator, term in zip(terms[1::2], terms[2::2], strict=False):
        if not term.isdigit() or (operator in "/%" and int(term) == 0):
            return None
        number = int(term)
        value = {"+": value + number, "-": value - number, "*": value * number}.get(operator) or (
            value // max(1, number) if operator == "/" else value % max(1, number) if operator == "%" else 0
        )
    return str(value)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=False)
    except ValueError:
        return text.split()


def pairs(words: Any) -> dict[str, Any]:
    """Arguments by name, with ``_`` for ``-``, from words, or from pairs of a name and a value.

    An option of the launcher has one value: what follows is the program. What the shell redirects, pipes or runs next
    belongs to no option.
    """
    options: dict[str, Any] = {}
    if words and isinstance(words[0], list | tuple):
        for name, value in words:
            options[_name(str(name))] = value
        return options
    name = None
    for word in map(str, words):
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word.partition("=")
            name = _name(name)
            options[name] = value if equals else ""
        elif _SHELL.match(word):
            name = None
        elif name is not None and word != "\\" and ("$" in word or not _ends_launcher(name, options[name], word)):
            options[name] = f"{options[name]} {word}".strip()
    return options


_SHELL = re.compile(r"(\d*|&)>|(<|\||\|\||&|&&|;)$")
_LAUNCHER = frozenset(_MACHINE.split())
_PROGRAM = re.compile(r"(.*/)?(python[\d.]*|torchrun|bash|sh|[\w.-]+\.(py|sh))$")


def _ends_launcher(name: str, value: str, word: str) -> bool:
    """Whether `word` is no part of the value of `name`, but the program that a launcher starts, or an option of it."""
    return name in _LAUNCHER and (bool(value) or _PROGRAM.match(word) is not None)


def _name(word: str) -> str:
    return word.lstrip("-").replace("-", "_")

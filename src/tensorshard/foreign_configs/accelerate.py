"""Accelerate's YAML: launch settings, FSDP of both versions, and a DeepSpeed JSON that it points to.

The keys are those of Accelerate 1.15 (keys.json). A key that the table lacks is refused by name.
"""

from typing import Any

from tensorshard.foreign_configs import deepspeed
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
    OFFLOADED,
    RECOMPUTE,
    STAGES,
    degree,
    different,
    each,
    refused,
    to,
    unneeded,
)

_VERSIONS = {
    "sharding_strategy": "reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "use_orig_params": "nothing: version 2 keeps the parameters as they are",
    "sync_module_states": "nothing: version 2 does not need it",
    "backward_prefetch": "nothing: version 2 always prefetches",
    "forward_prefetch": "nothing",
    "limit_all_gathers": "nothing",
}


def _version(reading: Reading) -> int:
    for key in ("fsdp_config.fsdp_version", "fsdp_version", "fsdp_config.version"):
        if reading.get(key) in (2, "2"):
            return 2
    return 1


def _strategy(reading: Reading, value: Any) -> Outcome:
    if _version(reading) == 2 and not isinstance(value, bool):
        return DIFFERENT, f"a version-1 key under fsdp_version: 2, not read there; {_VERSIONS['sharding_strategy']}"
    name = {1: "FULL_SHARD", 2: "SHARD_GRAD_OP", 3: "NO_SHARD", 4: "HYBRID_SHARD", 5: "HYBRID_SHARD_ZERO2"}.get(
        value, str(value).upper()
    )
    if name in ("4", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2"):
        machines = int(reading.number("num_machines", 1))
        reading.settings["train.plan.dp_replicate"] = machines
        reading.settings["train.plan.zero"] = 2 if name.endswith("2") else 3
        return TRANSLATED, f"train.plan.zero={reading.settings['train.plan.zero']}, dp_replicate={machines} (machines)"
    level = {"1": 3, "2": 2, "3": 0, "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}.get(name)
    if level is None:
        return REFUSED, f"{value} is none of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"
    reading.settings["train.plan.zero"] = level
    return TRANSLATED, f"train.plan.zero={level}"


def _reshard(reading: Reading, value: Any) -> Outcome:
    if not isinstance(value, bool):
        return _strategy(reading, value)
    if _version(reading) == 1:
        return DIFFERENT, "a version-2 key under fsdp_version: 1, where it is not read; set sharding_strategy"
    reading.settings["train.plan.zero"] = 3 if value else 2
    return TRANSLATED, f"train.plan.zero={3 if value else 2}"


def _offload(reading: Reading, value: bool) -> Outcome:
    if not value:
        return NOT_NEEDED, "nothing is offloaded, as by default here"
    reading.settings["train.plan.offload"] = dict(OFFLOADED)
    return TRANSLATED, "train.plan.offload of optimizer, gradients and parameters to cpu"


def _recompute(reading: Reading, value: bool) -> Outcome:
    reading.settings["train.plan.recompute"] = "full" if value else "none"
    return TRANSLATED, f"train.plan.recompute={reading.settings['train.plan.recompute']}"


def _old(name: str, text: str) -> Rule:
    def act(reading: Reading, value: Any) -> Outcome:
        if _version(reading) == 2:
            return NOT_NEEDED, f"a version-1 key under fsdp_version: 2, not read there either; use {_VERSIONS[name]}"
        return NOT_NEEDED, text

    return Rule(None, act)


FSDP: Table = {
    "version": Rule((1, 2, "1", "2"), lambda r, v: (TRANSLATED, "ZeRO 3 here is FSDP2, exact for both versions")),
    "sharding_strategy": Rule((str, int), _strategy),
    "reshard_after_forward": Rule((bool, str, int), _reshard),
    "offload_params": Rule(bool, _offload),
    "activation_checkpointing_offload": Rule(
        bool,
        lambda r, v: (
            to("train.plan.offload", None).act(r, {**r.settings.get("train.plan.offload", {}), "activations": "cpu"})
            if v
            else (NOT_NEEDED, "it is off")
        ),
    ),
    "activation_checkpointing": Rule(bool, _recompute),
    "auto_wrap_policy": different("units are found: the model's blocks; train.plan.shard_units names others", str),
    "transformer_layer_cls_to_wrap": different("the model's blocks are found, whatever their class"),
    "min_num_params": different("train.plan.shard_units=BYTES makes units of at least that size", float),
    "use_orig_params": _old("use_orig_params", "parameters always stay as they are"),
    "sync_module_states": _old("sync_module_states", "every rank makes the same initial weights, or reads its slices"),
    "backward_prefetch": _old("backward_prefetch", "the next unit is always gathered ahead"),
    "forward_prefetch": _old("forward_prefetch", "the next unit is always gathered ahead"),
    "limit_all_gathers": _old("limit_all_gathers", "gathers are bounded always"),
    "cpu_ram_efficient_loading": unneeded("each rank reads its own slices of the weights", bool),
    "state_dict_type": different("checkpoints are sharded; 'tensorshard export' writes whole weights", str),
    "ignored_modules": refused("parameters that are not trained: requires_grad_(False); all are held alike"),
    **each(
        "mixed_precision_policy mixed_precision_policy.* mixed_precision", refused("train.plan.precision is for all")
    ),
    **each("xla xla_fsdp_v2 xla_fsdp_grad_ckpt", refused("XLA devices are not there", bool)),
}


def both_names(prefix: str) -> dict[str, Rule]:
    """FSDP's rules under `prefix`, with and without the ``fsdp_`` before a name."""
    return {f"{prefix}{start}{name}": rule for name, rule in FSDP.items() for start in ("fsdp_", "")}


def _precision(reading: Reading, value: str) -> Outcome:
    if value == "fp8":
        return REFUSED, "fp8 is not there; bf16 is"
    name = {"no": "fp32"}.get(value, value)
    reading.settings["train.plan.precision"] = name
    return TRANSLATED, f"train.plan.precision={name}"


_KINDS = "NO MULTI_GPU MULTI_CPU FSDP DEEPSPEED MEGATRON_LM TP MULTI_XPU MULTI_NPU XLA TPU MULTI_MLU MULTI_HPU"


def _distributed(reading: Reading, value: str) -> Outcome:
    if value in ("XLA", "TPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU"):
        return REFUSED, f"{value} is not there; plans run on CUDA devices and CPUs"
    if value in ("NO", "MULTI_GPU", "MULTI_CPU"):
        reading.settings["train.plan.zero"] = 0
        return TRANSLATED, "train.plan.zero=0: whole replicas, as DDP has them"
    if value == "FSDP":
        reading.settings.setdefault("train.plan.zero", 3)
        return TRANSLATED, "a Plan with ZeRO; fsdp_config says which"
    return TRANSLATED, "a Plan; the groups of keys below say which"


def _processes(reading: Reading, value: int) -> Outcome:
    reading.world_size = reading.world_size or value
    return DIFFERENT, f"the start says it: --nproc, or torchrun; the Plan is for {reading.world_size}"


_LAUNCH = "the start says it: 'tensorshard train' or torchrun, with --nnodes, --node-rank and --rdzv-endpoint"
_DEEPSPEED: Table = {
    "zero_stage": to("train.plan.zero", (0, 1, 2, 3)),
    "offload_optimizer_device": deepspeed.offload_device("optimizer"),
    "offload_param_device": deepspeed.offload_device("parameters"),
    "offload_optimizer_nvme_path": unneeded("train.plan.offload.path is the system's temporary folder", str),
    "offload_param_nvme_path": unneeded("train.plan.offload.path is the system's temporary folder", str),
    "gradient_accumulation_steps": to("batch.accumulate", int, auto=1),
    "gradient_clipping": to("train.plan.clip_grad_norm", float, auto=1.0),
    "zero3_init_flag": unneeded("a model is never built whole on every rank", bool),
    "zero3_save_16bit_model": different("Engine.save_pretrained writes whole weights", bool),
    "deepspeed_config_file": unneeded("its keys are read as well"),
    "deepspeed_hostfile": different(_LAUNCH, str),
    **each(
        "deepspeed_multinode_launcher deepspeed_exclusion_filter deepspeed_inclusion_filter", different(_LAUNCH, str)
    ),
    "deepspeed_moe_layer_cls_names": refused("layers of experts are not sharded apart"),
}
_MEGATRON = {
    "tp_degree": degree("tp"),
    "pp_degree": degree("pp"),
    "num_micro_batches": to("batch.accumulate", int),
    "gradient_clipping": to("train.plan.clip_grad_norm", float),
    "sequence_parallelism": to("train.plan.sequence_parallel", bool),
    "recompute_activations": Rule(
        bool, lambda r, v: to("train.plan.recompute", None).act(r, "selective" if v else "none")
    ),
    "use_distributed_optimizer": to("train.plan.zero", bool, int),
    "context_parallel_size": degree("cp"),
    "expert_model_parallel_size": degree("ep"),
    "recompute_granularity": RECOMPUTE,
    "optimizer_cpu_offload": Rule(
        bool,
        lambda r, v: to("train.plan.offload", None).act(r, {"optimizer": "cpu", "gradients": "cpu"} if v else None),
    ),
    "expert_tensor_parallel_size": different("each expert is split over all ranks of train.plan.tp", int),
    "decoder_last_pipeline_num_layers": different(STAGES),
    "calculate_per_token_loss": different("a loss_fn that returns (sum, count) is weighed by tokens"),
    **each(
        "attention_backend attention_dropout attention_softmax_in_fp32 hidden_dropout use_rotary_position_embeddings "
        "eod_mask_loss",
        different("the model and the data are yours; this key says how theirs are"),
    ),
    **each(
        "recompute_method recompute_num_layers overlap_cpu_optimizer_d2h_h2d use_custom_fsdp use_precision_aware_optimizer",
        unneeded("it tunes Megatron's own way of working"),
    ),
    **each("no_load_optim no_save_optim", different("checkpoints have all states; engine.load reads what is there")),
}
_DYNAMO = {
    "backend": Rule(
        ("no", "NO", "inductor", "INDUCTOR", "eager", "EAGER", "aot_eager", "AOT_EAGER"),
        lambda r, v: (
            to("train.plan.compile", None).act(r, v.lower() == "inductor")
            if v.lower() in ("no", "inductor")
            else (REFUSED, f"blocks are compiled with inductor, and {v} was given; use INDUCTOR or NO")
        ),
    ),
    "mode": refused("blocks are compiled in torch's default mode", str, ("default",)),
    **each("use_dynamic use_fullgraph use_regional_compilation", different("each block is compiled by itself", bool)),
}
TABLE: Table = {
    "distributed_type": Rule((*_KINDS.split(), "no"), lambda r, v: _distributed(r, v.upper())),
    "mixed_precision": Rule(("no", "fp16", "bf16", "fp8"), _precision),
    "num_processes": Rule(int, _processes),
    **each("num_machines machine_rank main_process_port", different(_LAUNCH, int)),
    **each("main_process_ip rdzv_backend rdzv_conf same_network compute_environment gpu_ids", different(_LAUNCH)),
    **each("main_training_function", unneeded("the script is yours", str)),
    **each(
        "tpu_env tpu_vm tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands",
        refused("TPUs are not there"),
    ),
    **each(
        "ec2_instance_type iam_role_name image_uri profile region base_job_name py_version pytorch_version "
        "transformers_version sagemaker_inputs_file sagemaker_metrics_file additional_args additional_args.**",
        refused("jobs are not sent to Amazon SageMaker; give a config of distributed_type MULTI_GPU or FSDP"),
    ),
    "downcast_bf16": refused("it is for TPUs", None, ("no", False)),
    "use_cpu": different("--device cpu at the start, or no visible GPU", bool),
    "debug": different("what each rank waits for is always watched: train.watchdog", bool),
    **each("enable_cpu_affinity mpirun_config.** ipex_config.**", unneeded("threads are set by the start")),
    "gradient_accumulation_steps": to("batch.accumulate", int),
    "gradient_clipping": to("train.plan.clip_grad_norm", float),
    "dynamo_backend": _DYNAMO["backend"],
    **{f"dynamo_config.{start}{name}": rule for name, rule in _DYNAMO.items() for start in ("dynamo_", "")},
    **{f"deepspeed_config.{name}": rule for name, rule in _DEEPSPEED.items()},
    **both_names("fsdp_config."),
    **{f"megatron_lm_config.megatron_lm_{name}": rule for name, rule in _MEGATRON.items()},
    **each("deepspeed_config fsdp_config megatron_lm_config dynamo_config", unneeded("it is empty")),
    **{
        f"parallelism_config.parallelism_config_{name}_size": degree(name)
        for name in ("dp_replicate", "dp_shard", "tp", "cp")
    },
    "parallelism_config.parallelism_config_sp_size": Rule(
        int, lambda r, v: to("train.plan.cp", None).act(r, v) if v > 1 else (NOT_NEEDED, "sequences are whole")
    ),
    **each(
        "cp_comm_strategy cp_backend sp_backend sp_seq_length sp_seq_length_is_variable sp_attn_implementation",
        unneeded("context parallelism finds its own way, for sequences of any length"),
        "parallelism_config.parallelism_config_",
    ),
    **each("fp8_config.** fp8_backend", refused("fp8 is not there; bf16 is")),
}


def read(reading: Reading) -> None:
    """Follows Accelerate's table, and DeepSpeed's for a file that the config points to."""
    inner = "deepspeed_config.deepspeed_config_file."
    if any(key.startswith(inner) for key in reading.values):
        ours = {key: value for key, value in reading.values.items() if key.startswith(inner)}
        reading.values = {key: value for key, value in reading.values.items() if key not in ours}
        follow(TABLE, reading, "Accelerate")
        inner_reading = Reading({key[len(inner) :]: value for key, value in ours.items()}, reading.world_size)
        deepspeed.read(inner_reading)
        reading.settings.update(inner_reading.settings)
        reading.entries += inner_reading.entries
        return
    follow(TABLE, reading, "Accelerate")
    pointed = reading.get("deepspeed_config.deepspeed_config_file")
    if pointed is not None:
        reading.add(
            "deepspeed_config.deepspeed_config_file", pointed, REFUSED, "there is no such file; give it, or take it out"
        )
    if reading.get("distributed_type") == "DEEPSPEED" and "train.plan.zero" not in reading.settings:
        reading.imply("deepspeed_config.zero_stage", "train.plan.zero", 2)
    reading.imply("mixed_precision", "train.plan.precision", "fp32")
    reading.imply("gradient_clipping", "train.plan.clip_grad_norm", None, "the script clips, or does not")


def read_fsdp(reading: Reading) -> None:
    """Follows FSDP's options alone, as transformers' ``fsdp_config`` has them."""
    follow(both_names(""), reading, "FSDP")
    reading.imply("sharding_strategy", "train.plan.zero", 3)
    reading.imply("activation_checkpointing", "train.plan.recompute", "none")

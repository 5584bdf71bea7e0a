"""DeepSpeed's JSON: its keys and what becomes of them (facts from deepspeed 0.19's config classes and documentation)."""

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
    follow,
)
from tensorshard.foreign_configs.rules import (
    LOGS,
    different,
    each,
    only_if,
    refused,
    to,
    unneeded,
)

PROGRAM = "DeepSpeed"
_UNITS = "units of gathering and reduction are the model's blocks; train.plan.shard_units sets their size"
_ALWAYS = "it is always so here"
_SCALE = "the scale of losses adapts by itself here, as torch's GradScaler does: from 65536, doubled after 2000 steps"
_COMPRESS = (
    "weights and activations are not quantized or pruned here; train without it, then compress the exported model"
)


def offload_device(part: str) -> Rule:
    """The rule of a device that optimizer states or parameters are kept on."""

    def act(reading: Reading, value: Any) -> Outcome:
        if value == "none":
            return NOT_NEEDED, "nothing is offloaded, as by default here"
        tier = {"cpu": "cpu", "nvme": "disk"}[value]
        stage = reading.settings.get("train.plan.zero", reading.get("zero_optimization.stage", 0))
        if part == "parameters" and stage != 3:
            return DIFFERENT, f"at ZeRO stage {stage} parameters are not offloaded in DeepSpeed either, only at 3"
        if part == "optimizer" and stage == 0:
            return DIFFERENT, "at ZeRO stage 0 the optimizer is not offloaded in DeepSpeed either; set a stage"
        offload = reading.settings.setdefault("train.plan.offload", {})
        offload[part] = tier
        if part == "optimizer":
            offload["gradients"] = tier
        return TRANSLATED, f"train.plan.offload={offload}"

    return Rule(("none", "cpu", "nvme"), act)


def _path(reading: Reading, value: Any) -> Outcome:
    if "nvme" not in (reading.get(f"zero_optimization.offload_{part}.device") for part in ("optimizer", "param")):
        return NOT_NEEDED, "nothing goes to a disk"
    reading.settings.setdefault("train.plan.offload", {})["path"] = value
    return TRANSLATED, f"train.plan.offload.path={value}"


def _stage(reading: Reading, value: Any) -> Outcome:
    if isinstance(value, list):
        return REFUSED, "a list is for DeepSpeed's autotuning; give one stage, or let 'tensorshard plan' search"
    reading.settings["train.plan.zero"] = value
    return TRANSLATED, f"train.plan.zero={value}"


def _precision(name: str) -> Rule:
    def act(reading: Reading, value: Any) -> Outcome:
        other = {"bf16": "fp16", "fp16": "bf16"}[name]
        if not value:
            return NOT_NEEDED, f"{name} is off"
        if any(reading.get(f"{key}.enabled") is True for key in (other, *(["bfloat16"] * (other == "bf16")))):
            return REFUSED, "fp16 and bf16 are both on, which DeepSpeed refuses, too; turn one off"
        reading.settings["train.plan.precision"] = name
        return TRANSLATED, f"train.plan.precision={name}"

    return Rule(bool, act, auto="the Trainer's argument of this name decides, off by default")


def _loss_scale(reading: Reading, value: Any) -> Outcome:
    if value == 0:
        return TRANSLATED, "dynamic loss scaling, which precision=fp16 has"
    return REFUSED, f"a fixed loss scale of {value} is not there; 0 makes it dynamic, bf16 needs none"


_CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adagrad": "torch.optim.Adagrad",
    "muon": "torch.optim.Muon",
}


def _optimizer(reading: Reading, value: Any) -> Outcome:
    name = _CLASSES.get(value.lower())
    if name is None:
        known = "Adam, AdamW, SGD, Adagrad"
        return REFUSED, f"no exact counterpart of {value} is known here; use one of {known}, or a class of your own"
    if value.lower() == "muon":
        return REFUSED, "DeepSpeed's Muon uses Adam for some parameters; write the two optimizers in a Python config"
    if value.lower() == "adam" and reading.get("optimizer.params.adam_w_mode", True) is False:
        name = "torch.optim.Adam"
    reading.settings["optimizer._target_"] = name
    note = " (DeepSpeed's Adam decouples the decay unless adam_w_mode is false)" if value.lower() == "adam" else ""
    return TRANSLATED, f"optimizer is {name}{note}"


def _scheduler(reading: Reading, value: str) -> Outcome:
    shapes = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if value not in shapes:
        return REFUSED, f"{value} is not there; use {', '.join(shapes)}, or write a schedule in a Python config"
    reading.settings["schedule.shape"] = shapes[value]
    reading.settings["schedule.offset"] = -1
    if value == "WarmupCosineLR":
        reading.settings["schedule.decay_offset"] = 1
    return TRANSLATED, f"scheduler is tensorshard.trainer.schedulers.warmup_decay, shape={shapes[value]}"


def _peak(reading: Reading, value: Any) -> Outcome:
    reading.settings["optimizer.lr"] = value
    return TRANSLATED, f"optimizer.lr={value}, which the schedule rises to"


def _mics(reading: Reading, value: int) -> Outcome:
    if value < 1:
        return NOT_NEEDED, "states are sharded over all data ranks"
    if reading.world_size is None:
        reading.settings["train.plan.dp_shard"], reading.settings["train.plan.dp_replicate"] = value, -1
    elif reading.world_size % value:
        return REFUSED, f"{reading.world_size} processes do not divide into groups of {value}"
    else:
        reading.settings["train.plan.dp_shard"] = value
        reading.settings["train.plan.dp_replicate"] = reading.world_size // value
    return TRANSLATED, f"train.plan.dp_shard={value}, and dp_replicate takes the rest of the processes"


def _autotp(reading: Reading, value: int) -> Outcome:
    reading.settings["train.plan.tp"] = max(1, value)
    return TRANSLATED, f"train.plan.tp={max(1, value)}; the layers to split are found"


def _sum_type(reading: Reading, value: str) -> Outcome:
    kind = {"fp32": None, "bf16": "bf16", "fp16": "fp16"}[value]
    reading.settings["train.plan.reduce_dtype"] = kind
    return TRANSLATED, f"train.plan.reduce_dtype={kind}"


def _parts(reading: Reading, value: bool) -> Outcome:
    if value and reading.get("activation_checkpointing.cpu_checkpointing") is not True:
        return DIFFERENT, "with tensor parallelism, train.plan.sequence_parallel=true splits activations"
    return DIFFERENT, "inputs of recomputed blocks are split by train.plan.sequence_parallel, under tp"


def _cpu_checkpointing(reading: Reading, value: bool) -> Outcome:
    if not value:
        return NOT_NEEDED, "it is off"
    return DIFFERENT, (
        "it moves the inputs of blocks that the model's code recomputes; train.plan.recompute=full with "
        "train.plan.offload.activations=cpu does both here"
    )


_ZERO: Table = {
    "stage": Rule((int, list), _stage),
    **each(
        "reduce_bucket_size allgather_bucket_size prefetch_bucket_size stage3_prefetch_bucket_size sub_group_size "
        "max_live_parameters stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance "
        "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
        "stage3_model_persistence_threshold module_granularity_threshold stage3_module_granularity_threshold "
        "parameter_alignment",
        unneeded(_UNITS, float),
    ),
    **each("contiguous_gradients reduce_scatter allgather_partitions round_robin_gradients", unneeded(_ALWAYS, bool)),
    **each(
        "overlap_comm allgather_sequential use_multi_rank_bucket_allreduce use_all_reduce_for_fetch_params "
        "stage3_use_all_reduce_for_fetch_params compute_grad_norm ignore_unused_parameters legacy_stage1 "
        "memory_efficient_linear override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "pipeline_loading_checkpoint load_from_fp32_weights elastic_checkpoint mics_hierarchical_params_gather "
        "save_muon_momentum_buffer_in_memory cpu_offload_use_pin_memory",
        unneeded("it tunes DeepSpeed's own way of working; communication overlaps here where a stream exists", bool),
    ),
    **each(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "gather_16bit_weights_on_model_save",
        different("checkpoints are sharded; 'tensorshard export' or Engine.save_pretrained writes whole weights", bool),
    ),
    "cpu_offload": Rule(bool, lambda r, v: offload_device("optimizer").act(r, "cpu" if v else "none")),
    "cpu_offload_param": Rule(bool, lambda r, v: offload_device("parameters").act(r, "cpu" if v else "none")),
    "offload_optimizer.device": offload_device("optimizer"),
    "offload_param.device": offload_device("parameters"),
    **each("offload_optimizer.nvme_path offload_param.nvme_path", Rule(str, _path)),
    **each(
        "offload_optimizer.pin_memory offload_optimizer.pipeline_read offload_optimizer.pipeline_write "
        "offload_optimizer.fast_init offload_param.pin_memory",
        unneeded("buffers are pinned where the device needs it, and transfers overlap", bool),
    ),
    **each(
        "offload_optimizer.buffer_count offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu "
        "offload_optimizer.cpuadam_cores_perc",
        unneeded("train.plan.offload.buffer_memory bounds the buffers", float),
    ),
    "offload_optimizer.ratio": refused(
        "a part of the states alone is not offloaded; use host_memory", float, (1.0, 0.0)
    ),
    "offload_optimizer.super_offload": refused("it is not there; offload=cpu, overlap=true is the nearest", bool),
    **each(
        "zero_quantized_weights zero_quantized_gradients zero_quantized_nontrainable_weights",
        refused("what ranks send is never quantized; train.plan.reduce_dtype=bf16 halves gradients", bool),
    ),
    "zero_hpz_partition_size": refused("use train.plan.dp_replicate and dp_shard for hybrid sharding", int, (0, 1)),
    "mics_shard_size": Rule(int, _mics),
    **each("leaf_module leaf_module.** zenflow zenflow.**", refused("it is not there; take the key out")),
}

_FP16 = {
    "loss_scale": Rule(float, _loss_scale),
    **each(
        "initial_scale_power loss_scale_window hysteresis min_loss_scale fp16_scale_tolerance", different(_SCALE, float)
    ),
    "consecutive_hysteresis": different(_SCALE, bool),
    "auto_cast": different("inputs of the model are cast where a layer computes in 16 bits", bool),
    "opt_level": unneeded("it is Apex's; DeepSpeed's fp16 does not read it either", str),
    "fp16_master_weights_and_grads": refused("master weights are always fp32 here", bool),
}

TABLE: Table = {
    "train_batch_size": to("batch.global", int, auto="it is the product of the two others, and of the data ranks"),
    "train_micro_batch_size_per_gpu": to("batch.micro", int, auto=8),
    "gradient_accumulation_steps": to("batch.accumulate", int, auto=1),
    "gradient_clipping": to("train.plan.clip_grad_norm", float, lambda value: value or None, auto=1.0),
    "optimizer.type": Rule(str, _optimizer),
    "optimizer.params.lr": to("optimizer.lr", float, auto=5e-5),
    "optimizer.params.betas": to("optimizer.betas", list, auto=[0.9, 0.999]),
    "optimizer.params.eps": to("optimizer.eps", float, auto=1e-8),
    "optimizer.params.weight_decay": to("optimizer.weight_decay", float, auto=0.0),
    "optimizer.params.momentum": to("optimizer.momentum", float),
    "optimizer.params.nesterov": to("optimizer.nesterov", bool),
    "optimizer.params.adam_w_mode": unneeded("it is settled by optimizer.type's line", bool),
    "optimizer.params.max_grad_norm": refused("DeepSpeed refuses it, too; gradient_clipping says it", float, ()),
    "optimizer.params.amsgrad": refused("DeepSpeed's Adam refuses it, too", bool),
    "optimizer.params.bias_correction": refused("torch's optimizers correct the bias always", bool, (True,)),
    **each("optimizer.params.torch_adam optimizer.params.fused", unneeded("torch's optimizers are used", bool)),
    **each(
        "optimizer.params.freeze_step optimizer.params.cuda_aware optimizer.params.comm_backend_name "
        "optimizer.params.var_freeze_step optimizer.params.var_update_scaler optimizer.params.local_step_scaler "
        "optimizer.params.local_step_clipper optimizer.params.max_coeff optimizer.params.min_coeff "
        "optimizer.params.factor_min optimizer.params.factor_max optimizer.params.factor_threshold "
        "optimizer.params.coeff_beta optimizer.legacy_fusion",
        unneeded("it belongs to an optimizer of DeepSpeed's own; see optimizer.type"),
    ),
    "scheduler.type": Rule(str, _scheduler),
    "scheduler.params.warmup_num_steps": to("schedule.warmup", int, auto=0),  # the Trainer's warmup_steps
    "scheduler.params.total_num_steps": to("schedule.total", int, auto="all steps of the run, train.steps"),
    "scheduler.params.warmup_min_lr": to("schedule.start_lr", float, auto=0.0),
    "scheduler.params.warmup_max_lr": Rule(float, _peak, auto="it is the optimizer's rate"),
    "scheduler.params.warmup_min_ratio": to("schedule.start_ratio", float),
    "scheduler.params.cos_min_ratio": to("schedule.min_ratio", float),
    "scheduler.params.warmup_type": to("schedule.warmup_shape", ("log", "linear")),
    "scheduler.params.last_batch_iteration": refused("a resumed run goes on by its checkpoint", int, (-1,)),
    **each("scheduler.params.*", unneeded("it belongs to a schedule that is not there; see scheduler.type")),
    "bf16.enabled": _precision("bf16"),
    "bfloat16.enabled": _precision("bf16"),
    "fp16.enabled": _precision("fp16"),
    **{f"fp16.{name}": only_if("fp16.enabled", rule, "fp16 is off") for name, rule in _FP16.items()},
    **{
        f"bf16.{name}": unneeded("bf16 needs no loss scale; DeepSpeed does not read it either")
        for name in _FP16
        if name not in ("opt_level", "fp16_master_weights_and_grads")
    },
    **each(
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states",
        refused("master weights and optimizer states are always fp32", bool),
    ),
    **each("bf16.immediate_grad_update bf16.check_grad_overflow", unneeded("DeepSpeed's own way of working", bool)),
    "fp16.fp16": unneeded("it is GPT-NeoX's own, and says what enabled says", bool),
    **each("torch_autocast.*", refused("set bf16.enabled, which precision=bf16 translates")),
    **each("amp.*", refused("Apex is not there; use bf16 or fp16")),
    **{f"zero_optimization.{name}": rule for name, rule in _ZERO.items()},
    **each(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_python_gc disable_allgather "
        "use_data_before_expert_parallelism dump_state memory_breakdown managed_gradient_accumulation",
        unneeded("DeepSpeed's own way of working; any elementwise optimizer works with every ZeRO level here", bool),
    ),
    **each("communication_data_type", Rule(("fp32", "bf16", "fp16"), _sum_type)),
    "seq_parallel_communication_data_type": unneeded("context parallelism sends values as they are", str),
    "data_types.grad_accum_dtype": refused("gradients are summed in fp32", str, ("fp32",)),
    "prescale_gradients": different("sums are in fp32, where the order of dividing makes no difference", bool),
    "gradient_predivide_factor": different("sums are in fp32, and the mean over the ranks is exact", float),
    "gradient_allreduce_op": refused("gradients are those of the mean loss", str, ("mean",)),
    "sparse_gradients": refused("gradients of embeddings are dense", bool),
    "steps_per_print": to("train.log_every", int),
    "wall_clock_breakdown": different("train.profile=10-12 traces steps", bool),
    **each(
        "flops_profiler.* comms_logger.* comms_config.* monitor_config.** tensorboard.* wandb.* csv_monitor.* comet.*",
        different(LOGS),
    ),
    "activation_checkpointing.partition_activations": Rule(bool, _parts),
    "activation_checkpointing.cpu_checkpointing": Rule(bool, _cpu_checkpointing),
    **each(
        "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile",
        unneeded("train.plan.recompute recomputes blocks; no buffers are to be sized"),
        "activation_checkpointing.",
    ),
    "tensor_parallel.autotp_size": Rule(int, _autotp),
    **each("tensor_parallel.*", refused("train.plan.tp and tp_plan say how layers are split")),
    "compile.disable": to("train.plan.compile", bool, lambda value: not value),
    "compile.enabled": to("train.plan.compile", bool),
    "compile.backend": refused("blocks are compiled with inductor", str, ("inductor",)),
    **each("compile.**", refused("train.plan.compile=true compiles each block; it has no options")),
    "checkpoint.load_universal": unneeded("every checkpoint is read under any plan", bool),
    **each(
        "checkpoint.** use_node_local_storage", unneeded("checkpoints are written in parallel, whole or not at all")
    ),
    **each("aio.**", unneeded("it tunes DeepSpeed's own reading of disks")),
    **each("nebula.** elasticity.**", different("a resumed run may have another number of processes, with --resume")),
    "dataloader_drop_last": unneeded("an epoch's last, smaller batch is left out", bool),
    "pipeline.stages": refused("set train.plan.pp", str, ("auto",)),
    **each("pipeline.*", different("train.plan.pp, pp_split and pp_schedule say how a pipeline is cut")),
    **each("_comment comment", unneeded("it is a remark")),
    **each("sequence_parallel_size", to("train.plan.cp", int)),
}


def _switchable(group: str, text: str) -> Rule:
    """A group of options that is refused, unless each ``enabled`` in it is false."""

    def act(reading: Reading, value: Any) -> Outcome:
        mine = {key: given for key, given in reading.values.items() if key.startswith(group + ".")}
        switches = [given for key, given in mine.items() if key.endswith("enabled")]
        if switches and not any(switches):
            return NOT_NEEDED, f"{group} is off"
        return REFUSED, text

    return Rule(None, act)


_CURRICULUM = "samples do not grow or get harder with the steps; order the dataset yourself, or take the group out"
_LTD = "no layer leaves tokens out at random (random-LTD); take the group out"
_AUTOTUNE = "'tensorshard plan' searches for the plan; take the group out"
_GROUPS = {
    "compression_training": _COMPRESS,
    "quantize_training": _COMPRESS,
    "eigenvalue": "it steers the quantization of quantize_training, which is not there; take the group out",
    "data_efficiency": f"{_CURRICULUM}, and {_LTD}",
    "curriculum_learning": _CURRICULUM,
    "random_ltd": _LTD,
    "progressive_layer_drop": "no schedule leaves out layers; LayerDrop of the model's own trains under every plan",
    "autotuning": _AUTOTUNE,
    "hybrid_engine": "generation during training is 'ts.generate' on the Engine; take the group out",
    "sparse_attention": "attention is the model's own; take the group out",
}
ALL: Table = {**TABLE, **{f"{group}.**": _switchable(group, text) for group, text in _GROUPS.items()}}


def read(reading: Reading, prefix: str = "") -> None:
    """Follows DeepSpeed's table for the keys under `prefix`, and writes its implied defaults out."""
    follow(ALL, reading, PROGRAM, prefix)
    reading.imply("zero_optimization.stage", "train.plan.zero", 0)
    reading.imply("gradient_clipping", "train.plan.clip_grad_norm", None, "no clipping is their default")
    if "optimizer._target_" in reading.settings:
        is_adamw = reading.settings["optimizer._target_"].endswith("AdamW")
        of_torch = reading.get("optimizer.params.torch_adam") and is_adamw
        imply_optimizer(reading, 1e-3, decay=0.01 if of_torch else 0.0)  # DeepSpeed's own Adams decay nothing
    if "schedule.shape" in reading.settings:
        reading.imply("scheduler.params.warmup_num_steps", "schedule.warmup", 1000)
        reading.imply("scheduler.params.warmup_type", "schedule.warmup_shape", "log")
        reading.settings["schedule.warmup"] = max(2, reading.settings["schedule.warmup"])
        if reading.get("scheduler.type") == "WarmupDecayLR":
            reading.settings["schedule.min_lr"] = reading.settings.get("schedule.start_lr", 0.0)
        if reading.get("scheduler.type") == "WarmupCosineLR":
            reading.imply("scheduler.params.cos_min_ratio", "schedule.min_ratio", 1e-4)
        if reading.get("scheduler.type") == "WarmupDecayLR" and "scheduler.params.warmup_max_lr" not in reading.values:
            reading.settings["optimizer.lr"] = 1e-3
            reading.add("scheduler.params.warmup_max_lr", "(implied)", TRANSLATED, "optimizer.lr=0.001 (their default)")
    if not any(key.startswith("batch.") for key in reading.settings):
        reading.imply("train_micro_batch_size_per_gpu", "batch.micro", 1, "DeepSpeed needs a batch size; set one")


def imply_optimizer(reading: Reading, rate: float, decay: float = 0.0) -> None:
    """Writes the defaults of an Adam out."""
    reading.imply("optimizer.lr", "optimizer.lr", rate)
    if "Adam" in reading.settings["optimizer._target_"]:
        reading.imply("optimizer.betas", "optimizer.betas", [0.9, 0.999])
        reading.imply("optimizer.eps", "optimizer.eps", 1e-8)
    reading.imply("optimizer.weight_decay", "optimizer.weight_decay", decay)

"""torchtitan's TOML, and the functions of its config_registry, which came later: their keys and what becomes of them."""

from typing import Any

from tensorshard.foreign_configs.ledger import (
    NOT_NEEDED,
    REFUSED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
    Unread,
    follow,
)
from tensorshard.foreign_configs.rules import (
    DATA,
    LOGS,
    MODEL,
    OFFLOAD_ALL,
    STAGES,
    betas,
    degree,
    different,
    each,
    only_if,
    refused,
    to,
    unneeded,
)

_SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


def _schedule(reading: Reading, value: str) -> Outcome:
    if not _has_pipeline(reading):
        return "not needed", "there is no pipeline"
    reading.settings["train.plan.pp_schedule"] = _SCHEDULES[value]
    return TRANSLATED, f"train.plan.pp_schedule={_SCHEDULES[value]}"


def _has_pipeline(reading: Reading) -> bool:
    return any(reading.number(f"{group}.pipeline_parallel_degree", 1) > 1 for group in ("parallelism", "experimental"))


def _compile(reading: Reading, value: bool) -> Outcome:
    parts = reading.get("compile.components", ["model", "loss"])
    reading.settings["train.plan.compile"] = value and "model" in parts
    return TRANSLATED, f"train.plan.compile={reading.settings['train.plan.compile']}"


def _optimizer(reading: Reading, value: str) -> Outcome:
    reading.settings["optimizer._target_"] = f"torch.optim.{value}"
    return TRANSLATED, f"optimizer is torch.optim.{value}"


def _decay(reading: Reading, value: str) -> Outcome:
    reading.settings["schedule.shape"] = value
    return TRANSLATED, f"scheduler.shape={value}"


def _dtype(name: str, fits: tuple[str, ...]) -> Rule:
    def act(reading: Reading, value: str) -> Outcome:
        short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(value, value)
        if name == "param":
            reading.settings["train.plan.precision"] = short
            return TRANSLATED, f"train.plan.precision={short}"
        reading.settings["train.plan.reduce_dtype"] = None if short == "fp32" else short
        return TRANSLATED, f"train.plan.reduce_dtype={reading.settings['train.plan.reduce_dtype']}"

    return Rule(fits, act)


def _reshard(reading: Reading, value: str) -> Outcome:
    keeps = value == "never" or (value == "default" and _has_pipeline(reading))
    level = 2 if keeps else 3
    reading.settings["train.plan.zero"] = level
    why = " (theirs keeps weights between the micro-batches of a pipeline)" if value == "default" and keeps else ""
    return TRANSLATED, f"train.plan.zero={level}{why}"


def _validation(rule: Rule, group: str = "validation") -> Rule:
    return only_if(f"{group}.enable", rule, "validation is off")


def _tokens(target: str) -> Rule:
    """A number of tokens, which are samples of the length ``max_context_length``."""

    def act(reading: Reading, value: int) -> Outcome:
        length = int(reading.number("training.max_context_length", 2048))
        if value < 0:
            return NOT_NEEDED, "it leaves the number to the others"
        if value % length:
            return REFUSED, f"{value} tokens are no whole number of samples of {length} tokens"
        verdict, text = to(target, None).act(reading, value // length)
        return verdict, f"{text} ({value} tokens / {length} a sample)"

    return Rule(int, act)


def _policy(reading: Reading, value: str) -> Outcome:
    kinds = {"FullAC": "full", "SelectiveAC": "selective"}
    name = value.removesuffix(".Config").rpartition(".")[2]
    if name == "ActivationCheckpointConfig":
        return NOT_NEEDED, "its mode says what is recomputed"
    if name not in kinds:
        return REFUSED, f"{name} is not there; use FullAC or SelectiveAC"
    return to("train.plan.recompute", None).act(reading, kinds[name])


def _group(reading: Reading, value: list[Any]) -> Outcome:
    if len(value) != 1 or not isinstance(value[0], dict) or value[0].get("pattern") != ".*":
        return REFUSED, "groups of parameters with their own optimizers: make them in a Python config"
    name, arguments = value[0].get("optimizer_name"), value[0].get("optimizer_kwargs", {})
    if name not in ("Adam", "AdamW"):
        return REFUSED, f"{name} is not known here; use AdamW, or an optimizer of a Python config"
    known = {key: given for key, given in arguments.items() if key in ("lr", "betas", "eps", "weight_decay")}
    reading.settings.update({f"optimizer.{key}": given for key, given in known.items()})
    return to("optimizer._target_", None).act(reading, f"torch.optim.{name}")


def _model(reading: Reading, value: Any) -> Outcome:
    """The model: converters that it is given make other layers of it."""
    converters = value.keywords.get("converters") if isinstance(value, Unread) else None
    if isinstance(converters, list) and converters:
        names = ", ".join(str(one.get("_target_") if isinstance(one, dict) else one) for one in converters)
        return REFUSED, f"{names.replace('.Config', '')}: converted layers are not there; leave the converters out"
    return ("different", MODEL) if converters in (None, []) else (REFUSED, f"its converters are not read: {converters}")


_HALF = ("float32", "bfloat16")
TABLE: dict[str, Rule] = {
    "parallelism.data_parallel_replicate_degree": degree("dp_replicate"),
    "parallelism.data_parallel_shard_degree": degree("dp_shard"),
    "parallelism.tensor_parallel_degree": degree("tp"),
    "parallelism.pipeline_parallel_degree": degree("pp"),
    "parallelism.context_parallel_degree": degree("cp"),
    "parallelism.pipeline_parallel_schedule": Rule(tuple(_SCHEDULES), _schedule),
    "parallelism.pipeline_parallel_microbatch_size": different("train.plan.micro_batches says how many there are", int),
    "parallelism.pipeline_parallel_split_points": different("train.plan.pp_split names the modules that start a stage"),
    "parallelism.pipeline_parallel_layers_per_stage": different("train.plan.pp_stages_per_rank says how many", int),
    **each(
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_schedule_csv pipeline_parallel_expert_parallel_overlap",
        different(STAGES),
        "parallelism.",
    ),
    "parallelism.fsdp_reshard_after_forward": Rule(("default", "always", "never"), _reshard),
    "parallelism.enable_async_tensor_parallel": refused(
        "collectives of split layers are not fused with products", bool
    ),
    "parallelism.disable_loss_parallel": different("losses of split logits are always exact", bool),
    "parallelism.context_parallel_rotate_method": unneeded("context parallelism finds its own way", str),
    "parallelism.enable_compiled_autograd": refused("train.plan.compile compiles blocks", bool),
    "parallelism.expert_parallel_degree": degree("ep"),
    "parallelism.expert_tensor_parallel_degree": different("each expert is split over all ranks of train.plan.tp", int),
    **each(
        "expert_parallel_comm_backend expert_parallel_a2a_impl",
        refused("tokens travel by torch's all-to-all; set it to standard", str, ("standard", "default")),
        "parallelism.",
    ),
    "training.local_batch_size": to("batch.micro", int),
    "training.global_batch_size": to("batch.global", int, lambda value: value if value > 0 else None),
    "training.steps": to("train.steps", int),
    "training.max_norm": to("train.plan.clip_grad_norm", float),
    "training.seq_len": to("text.context_length", int),
    "training.mixed_precision_param": _dtype("param", _HALF),
    "training.mixed_precision_reduce": _dtype("reduce", _HALF),
    "training.dtype": refused("master weights are always fp32", str, ("float32",)),
    "training.enable_cpu_offload": OFFLOAD_ALL,
    "training.seed": to("train.seed", int),
    **each("data.** training.dataset training.dataset_path training.dataset_name", different(DATA)),
    **each("training.img_size training.classifier_free_guidance_prob training.dataloader.**", different(DATA)),
    "training.deterministic": different("call torch.use_deterministic_algorithms(True) in the config", bool),
    **each("training.gc_freq training.gc_debug", unneeded("garbage is collected between steps as Python does")),
    "optimizer.name": Rule(("Adam", "AdamW"), _optimizer),
    "optimizer.lr": to("optimizer.lr", float),
    "optimizer.eps": to("optimizer.eps", float),
    "optimizer.beta1": betas(0, 0.95),
    "optimizer.beta2": betas(1),
    "optimizer.weight_decay": to("optimizer.weight_decay", float),
    "optimizer.implementation": unneeded("torch's fused update is used where it can be", str),
    "optimizer.early_step_in_backward": refused("updates come after the whole gradient, whose norm is clipped", bool),
    "lr_scheduler.warmup_steps": to("schedule.warmup", int),
    "lr_scheduler.decay_ratio": to("schedule.decay_ratio", float),
    "lr_scheduler.decay_type": Rule(("linear", "sqrt", "cosine"), _decay),
    "lr_scheduler.min_lr_factor": to("schedule.min_ratio", float),
    "lr_scheduler.total_steps": to("schedule.total", int),
    "activation_checkpoint.mode": Rule(
        ("none", "selective", "full", "memory_budget"),
        lambda r, v: (
            (REFUSED, "a budget is not there; 'tensorshard plan' finds what to recompute for a memory")
            if v == "memory_budget"
            else to("train.plan.recompute", None).act(r, v)
        ),
    ),
    "activation_checkpoint.selective_ac_option": different(
        "selective keeps products of matrices and attention of every block, as theirs does with 'op'", str
    ),
    **each("activation_checkpoint.*", different("selective keeps products of matrices and attention")),
    "compile.enable": Rule(bool, _compile),
    "compile.components": unneeded("it is settled by compile.enable's line", list),
    "compile.backend": refused("blocks are compiled with inductor", str, ("inductor",)),
    **each(
        "checkpoint.enable checkpoint.enable_checkpoint", different("train.save_every=0 saves at the end alone", bool)
    ),
    "checkpoint.interval": only_if("checkpoint.enable", to("train.save_every", int), "checkpoints are off"),
    "checkpoint.async_mode": Rule(
        ("disabled", "async", "async_with_pinned_mem"),
        lambda r, v: to("train.save_in_background", None).act(r, v != "disabled"),
    ),
    "checkpoint.keep_latest_k": to("train.keep_checkpoints", int),
    "checkpoint.export_dtype": different("'tensorshard export' sets the type of a copy", str),
    "checkpoint.last_save_model_only": different(
        "the last checkpoint is whole; 'tensorshard export' writes weights", bool
    ),
    **each("checkpoint.*", different("train.output_dir is the run's directory; --resume takes up a checkpoint")),
    **each("job.description job.print_config job.config_file", unneeded("it is a remark, or says what is printed")),
    "job.dump_folder": different("train.output_dir is the run's directory, runs/NAME-N by default", str),
    "job.custom_config_module": different(MODEL, str),
    **each(
        "model.name model.flavor model.tokenizer_path model.hf_assets_path model.print_after_conversion",
        different(MODEL),
    ),
    **each("model.converters", refused("fp8 and other converters are not there; take them out", list)),
    **each("quantize.**", unneeded("it says how model.converters work")),
    **each("float8.**", unneeded("it says how model.converters work")),
    **each("encoder.** experimental.custom_import experimental.custom_args_module", different(MODEL)),
    **each("experimental.custom_model_path experimental.enable_simple_fsdp", different(MODEL)),
    "experimental.pipeline_parallel_microbatches": to("batch.accumulate", int),
    "metrics.log_freq": to("train.log_every", int),
    **each("metrics.*", different(LOGS)),
    **each("profiling.** memory_estimation.**", different("train.profile=10-12 and train.profile_memory write them")),
    "comm.train_timeout_seconds": different("--timeout at the start, and train.watchdog", int),
    **each("comm.*", different("--timeout at the start, and train.watchdog")),
    **each("fault_tolerance.enable", refused("use --max-restarts: ranks start again from the last checkpoint", bool)),
    **each("fault_tolerance.*", unneeded("it says how fault_tolerance.enable works")),
    "validation.enable": different("data.validation is evaluated every train.eval_every steps", bool),
    "validation.freq": _validation(to("train.eval_every", int)),
    "validation.steps": _validation(to("train.eval_batches", int)),
    **each("validation.**", different("data.validation is evaluated every train.eval_every steps")),
    **each("debug.seed", to("train.seed", int)),
    **each("debug.*", different("call torch.use_deterministic_algorithms(True) in the config")),
    # The keys of the registry's classes.
    "training.num_tokens_per_microbatch_per_dp_rank": _tokens("batch.micro"),
    "training.num_tokens_per_train_step": _tokens("batch.global"),
    "training.max_context_length": to("text.context_length", int),
    "training.disable_cuda_graphs": unneeded("there are no CUDA graphs", bool),
    "parallelism.num_pp_microbatches": Rule(int, lambda r, v: (
        to("batch.accumulate", None).act(r, v) if _has_pipeline(r) else (NOT_NEEDED, "there is no pipeline"))),
    "parallelism.enable_sequence_parallel": Rule(bool, lambda r, v: (
        to("train.plan.sequence_parallel", None).act(r, v) if r.number("parallelism.tensor_parallel_degree", 1) > 1
        else (NOT_NEEDED, "there is no tensor parallelism"))),
    "parallelism.module_fqns_per_model_part": different("train.plan.pp_split names the modules that start a stage"),
    **each("spmd_backend context_parallel_load_balancer context_parallel_ptrr_mask_key enable_fsdp_symm_mem",
           unneeded("it tunes torchtitan's own way of working"), "parallelism."),
    "activation_checkpoint._target_": Rule(str, _policy),
    "optimizer._target_": Rule(str, lambda r, v: (
        (REFUSED, "updates come after the whole gradient, whose norm is clipped") if "InBackwardContainer" in v
        else (NOT_NEEDED, "its arguments say which optimizer it is"))),
    "optimizer.param_groups": Rule(list, _group),
    "optimizer.betas": to("optimizer.betas", list),
    "optimizer.optimizer_factory_kwargs_by_name": unneeded("it belongs to an optimizer of torchtitan's own"),
    "compile.enable_async_tensor_parallel": refused("collectives of split layers are not fused with products", bool),
    "validator.enable": different("data.validation is evaluated every train.eval_every steps", bool),
    "validator.freq": _validation(to("train.eval_every", int), "validator"),
    "validator.steps": _validation(to("train.eval_batches", int), "validator"),
    **each("validator.**", different("data.validation is evaluated every train.eval_every steps")),
    "model_spec": Rule(None, _model, heeds=False),
    **each("model_converters.converters model_converters", refused("fp8 and other converters are not there; take them out", None, ())),
    **each("hf_assets_path hf_model tokenizer tokenizer.** inference.**", different(MODEL)),
    **each("dataloader dataloader.**", different(DATA)),
    **each("loss loss.**", different("the loss is the model's own, or a loss function of yours; its mean is over all tokens")),
    "dump_folder": different("train.output_dir is the run's directory, runs/NAME-N by default", str),
    **each("profiler.**", different("train.profile=10-12 and train.profile_memory write them")),
    **each("async_loop.** generator.** trainer.** renderer.** rollouter.** grader.**", refused(
        "reinforcement learning, with generation in the loop, is not there", None, ())),
    "override.imports": refused("functions that change the model at its build are yours to call", None, ([],)),
    **each("_target_ **._target_", unneeded("it is the class of its group")),
    "line *": refused("the file is read and not run, and this may change the config: take it out", None, ()),
    "code in line *": unneeded("no config is given to it"),
    "base *": different("it is not beside this file; the model and the data are yours"),
}  # fmt: skip


# Older releases have these in other groups.
TABLE |= {
    key.replace("parallelism.", group): rule
    for group in ("experimental.", "training.")
    for key, rule in TABLE.items()
    if key.startswith("parallelism.")
}
TABLE |= {"training.batch_size": TABLE["training.local_batch_size"]}
TABLE |= {key.replace("profiler.", "profiling."): rule for key, rule in TABLE.items() if key.startswith("profiler.")}


def read(reading: Reading) -> None:
    """Follows torchtitan's table, and writes its defaults out."""
    if reading.values.get("activation_checkpoint", "") is None:
        reading.values["activation_checkpoint.mode"] = reading.values.pop("activation_checkpoint") or "none"
    follow(TABLE, reading, "torchtitan")
    settings: dict[str, Any] = reading.settings
    if settings.get("batch.global") is None:
        settings.pop("batch.global", None)
    reading.imply("training.mixed_precision_param", "train.plan.precision", "bf16")
    reading.imply("training.max_norm", "train.plan.clip_grad_norm", 1.0)
    reading.imply("parallelism.data_parallel_shard_degree", "train.plan.dp_shard", -1)
    level, why = (2, "their default with pipelines") if _has_pipeline(reading) else (3, "their default")
    reading.imply("parallelism.fsdp_reshard_after_forward", "train.plan.zero", level, why)
    if settings["train.plan.dp_shard"] == 1 and settings.get("train.plan.dp_replicate", 1) > 1:
        settings["train.plan.zero"] = 0
    if settings.get("train.plan.tp", 1) > 1:
        reading.imply("parallelism.tensor_parallel_degree", "train.plan.sequence_parallel", True, "as theirs always is")
    if settings.get("train.plan.pp", 1) > 1:
        reading.imply("parallelism.pipeline_parallel_schedule", "train.plan.pp_schedule", "1f1b")
    reading.imply("activation_checkpoint.mode", "train.plan.recompute", "selective")
    length = int(reading.number("training.max_context_length", 0))
    key = "num_tokens_per_microbatch_per_dp_rank" if length else "local_batch_size"
    reading.imply(f"training.{key}", "batch.micro", max(1, 16384 // length) if length else 8)
    reading.imply("training.steps", "train.steps", 10000)
    reading.imply("training.seq_len", "text.context_length", 2048)
    reading.imply("optimizer.name", "optimizer._target_", "torch.optim.AdamW")
    for name, value in (("lr", 8e-4), ("betas", [0.9, 0.95]), ("eps", 1e-8), ("weight_decay", 0.1)):
        reading.imply(f"optimizer.{name}", f"optimizer.{name}", value)
    reading.imply("lr_scheduler.warmup_steps", "schedule.warmup", 200)
    reading.imply("lr_scheduler.decay_type", "schedule.shape", "linear")
    settings["schedule.offset"] = 1

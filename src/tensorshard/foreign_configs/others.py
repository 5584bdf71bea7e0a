"""Paddle's, Lightning's and NeMo's configs, and those of programs that are refused by name."""

from typing import Any

from tensorshard.foreign_configs import megatron
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
    refused,
    to,
    unneeded,
)
from tensorshard.foreign_configs.torchtitan import DATA, LOGS, MODEL, betas

_SAVES = "train.output_dir, train.save_every and --resume say what is kept and read"


def _axis(name: str) -> Rule:
    return to(f"train.plan.{name}", int)


def _class(names: dict[str, str]) -> Rule:
    def act(reading: Reading, value: str) -> Outcome:
        name = names.get(value.rpartition(".")[2].lower())
        if name is None:
            return REFUSED, f"{value} is not known here; use AdamW, or a class of your own in a Python config"
        reading.settings["optimizer._target_"] = f"torch.optim.{name}"
        return TRANSLATED, f"optimizer is torch.optim.{name}"

    return Rule(str, act)


def _shape(names: dict[str, str]) -> Rule:
    def act(reading: Reading, value: str) -> Outcome:
        if value not in names:
            return REFUSED, f"{value} is not there; use {', '.join(names)}, or a schedule in a Python config"
        reading.settings["schedule.shape"] = names[value]
        return TRANSLATED, f"scheduler.shape={names[value]}"

    return Rule(str, act)


def _on(target: str, value: Any) -> Rule:
    return Rule(bool, lambda r, v: to(target, None).act(r, value) if v else (NOT_NEEDED, "it is off"))


def _paddle_precision(group: str) -> Rule:
    def act(reading: Reading, value: bool) -> Outcome:
        kind = (
            "bf16"
            if reading.get(f"{group}.mix_precision.dtype") == "bfloat16"
            or reading.get(f"{group}.mix_precision.fp16_dtype") == "bfloat16"
            else "fp16"
        )
        reading.settings["train.plan.precision"] = kind if value else "fp32"
        return TRANSLATED, f"train.plan.precision={reading.settings['train.plan.precision']}"

    return Rule(bool, act)  # fmt: skip


def _paddle_stage(reading: Reading, value: int) -> Outcome:
    degree = reading.number("Distributed.sharding.sharding_degree", 1)
    reading.settings["train.plan.zero"] = value if degree > 1 else 0
    note = "" if degree > 1 else f": stage {value} over a sharding_degree of 1 shards nothing"
    return TRANSLATED, f"train.plan.zero={reading.settings['train.plan.zero']}{note}"


def _paddle_dp(reading: Reading, value: int) -> Outcome:
    if reading.number("Distributed.sharding.sharding_degree", 1) > 1:
        reading.settings["train.plan.dp_replicate"] = value
        return TRANSLATED, f"train.plan.dp_replicate={value}"
    reading.settings["train.plan.dp_shard"] = value
    reading.settings.setdefault("train.plan.zero", 0)
    return TRANSLATED, f"train.plan.dp_shard={value}"


def _decay_steps(reading: Reading, value: float) -> Outcome:
    reading.settings["schedule.total"] = int(value)
    if reading.get("Optimizer.lr.use_increments"):
        return TRANSLATED, f"scheduler.total_steps is {int(value)} samples / samples a step"
    return TRANSLATED, f"scheduler.total_steps={int(value)}"


def _increments(reading: Reading, value: bool) -> Outcome:
    reading.settings["schedule.in_samples"] = value
    return (TRANSLATED, "decay_steps counts samples") if value else (NOT_NEEDED, "decay_steps counts steps")


def _paddle_shape(reading: Reading, value: str) -> Outcome:
    decay = reading.get("Optimizer.lr.decay_type", "cosine")
    names = {"CosineAnnealingWithWarmupDecay": "cosine", "LinearDecayWithWarmup": "linear", "ViTLRScheduler": decay}
    verdict, text = _shape(names).act(reading, value)
    if value == "LinearDecayWithWarmup" and verdict == TRANSLATED:
        reading.settings["schedule.overlap"] = True
        return DIFFERENT, f"{text}, from the first step on as theirs; the warm-up ends where the decay is by then"
    if value == "CosineAnnealingWithWarmupDecay" and not reading.get("Optimizer.lr.use_increments"):
        return DIFFERENT, f"{text}, by steps; theirs never leaves its first rate without use_increments"
    return verdict, text


def _unless_epochs(target: str) -> Rule:
    """A number of steps, which is below 1 where a run counts epochs."""

    def act(reading: Reading, value: int) -> Outcome:
        if value < 1:
            return "different", f"{value} counts epochs, and a run here counts steps: set {target}"
        return to(target, None).act(reading, value)

    return Rule(int, act)


_PADDLE_WORK = {
    "max_steps": _unless_epochs("train.steps"),
    "accumulate_steps": to("batch.accumulate", int),
    "logging_freq": to("train.log_every", int),
    "eval_freq": _unless_epochs("train.eval_every"),
    "eval_iters": to("train.eval_batches", int),
    "test_iters": unneeded("there is no test at the end", int),
    "num_train_epochs": different("a run counts steps: train.steps", int),
    "save_load.save_steps": _unless_epochs("train.save_every"),
    **each("save_load.*", different(_SAVES)),
    "mix_precision.scale_loss": different("the scale adapts by itself, from 65536", float),
    **each("mix_precision.custom_black_list mix_precision.custom_white_list mix_precision.level",
           different("layers compute in 16 bits, losses and norms as torch's autocast does")),
    **each("mix_precision.use_fp16_guard mix_precision.use_fp16_cumulative_gradients", unneeded("Paddle's own way of working")),
    **each("mix_precision.dtype mix_precision.fp16_dtype", unneeded("it is settled by the line of enable")),
    "balance_loss_weight": different(MODEL),
    "run_mode": different("a run counts steps: train.steps", str),
}  # fmt: skip
PADDLE: Table = {
    "_base_": refused("the file that it builds on is not beside it; put it there"),
    "Global.global_batch_size": to("batch.global", int),
    "Global.micro_batch_size": to("batch.micro", int),
    "Global.local_batch_size": Rule(int, lambda r, v: (
        to("batch.accumulate", None).act(r, max(1, v // int(r.number("Global.micro_batch_size", v)))))),
    "Global.seed": to("train.seed", int),
    "Global.device": different("the devices are what the start sees", str),
    "Global.binary_head": different(MODEL),
    **each("Global.flags.** Fused.tensor_fusion", unneeded("Paddle's own way of working")),
    "Tuning.enable": refused("'tensorshard plan' searches for the plan", bool),
    "Quantization.enable": refused("weights are not quantized in training", bool),
    **each("Tuning.** Quantization.**", unneeded("it belongs to the enable of its group")),
    **{f"{group}.{name}": rule for group in ("Global", "Engine") for name, rule in _PADDLE_WORK.items()},
    **{f"{group}.mix_precision.enable": _paddle_precision(group) for group in ("Global", "Engine")},
    **{f"{group}.mix_precision.use_pure_fp16": _paddle_precision(group) for group in ("Global", "Engine")},
    "Distributed.dp_degree": Rule(int, _paddle_dp),
    "Distributed.mp_degree": _axis("tp"),
    "Distributed.pp_degree": _axis("pp"),
    "Distributed.sep_degree": _axis("cp"),
    "Distributed.sharding.sharding_degree": _axis("dp_shard"),
    "Distributed.sharding.sharding_stage": Rule((1, 2, 3), _paddle_stage),
    "Distributed.sharding.sharding_offload": _on("train.plan.offload", "cpu"),
    **each("Distributed.sharding.*", unneeded("communication overlaps here where a stream exists")),
    **each("Distributed.*", unneeded("groups of processes are made by the Plan")),
    "Model.use_recompute": Rule(bool, lambda r, v: to("train.plan.recompute", None).act(r, "full" if v else "none")),
    "Model.recompute_granularity": different("full recomputes each block; selective keeps products and attention", str),
    "Model.sequence_parallel": to("train.plan.sequence_parallel", bool),
    "Model.virtual_pp_degree": different("train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank", int),
    **each("Model.**", different(MODEL)),
    **each("Loss.**", different("the loss is yours: loss in the config")),
    "Optimizer.name": _class({"fusedadamw": "AdamW", "adamw": "AdamW", "adam": "Adam", "momentum": "SGD"}),
    "Optimizer.weight_decay": to("optimizer.weight_decay", float),
    "Optimizer.beta1": betas(0),
    "Optimizer.beta2": betas(1),
    "Optimizer.epsilon": to("optimizer.eps", float),
    "Optimizer.momentum": to("optimizer.momentum", float),
    "Optimizer.lr.name": Rule(str, _paddle_shape),
    "Optimizer.lr.decay_type": Rule(("cosine", "linear"), lambda r, v: (TRANSLATED, f"scheduler.shape={v}")),
    "Optimizer.lr.warmup_steps": to("schedule.warmup", int),
    "Optimizer.lr.linear_end": to("schedule.min_lr", float),
    "Optimizer.lr.run_mode": refused("rates go by steps", str, ("step",)),
    **each("milestones gamma update_unit epochs", unneeded("it belongs to the schedule; see Optimizer.lr.name"), "Optimizer.lr."),
    "Optimizer.lr.max_lr": to("optimizer.lr", float),
    "Optimizer.lr.learning_rate": to("optimizer.lr", float),
    "Optimizer.lr.min_lr": to("schedule.min_lr", float),
    "Optimizer.lr.decay_steps": Rule(float, _decay_steps),
    "Optimizer.lr.step_each_epoch": different("a run counts steps: train.steps"),
    "Optimizer.lr.warmup_rate": to("schedule.warmup_ratio", float),
    "Optimizer.lr.warmup": Rule(float, lambda r, v: to(
        "schedule.warmup_ratio" if v < 1 else "schedule.warmup", None).act(r, v if v < 1 else int(v))),
    "Optimizer.lr.use_increments": Rule(bool, _increments),
    "Optimizer.grad_clip.name": Rule(("ClipGradByGlobalNorm", "ClipGradForMOEByGlobalNorm"), lambda r, v: (
        TRANSLATED, "train.plan.clip_grad_norm, over the whole model")),
    "Optimizer.grad_clip.clip_norm": to("train.plan.clip_grad_norm", float),
    **each("Optimizer.multi_precision Optimizer.tensor_fusion", unneeded("master weights are always fp32", bool)),
    **each("Data.**", different(DATA)),
    **each("Profiler.**", different("train.profile=10-12 writes traces")),
    **each("Compress.Quantization.enable", refused("weights are not quantized in training", bool)),
    **each("Compress.**", unneeded("it says how a model is compressed")),
    **each("Inference.** Generation.** Offline_Eval.** Export.**", unneeded("it is for inference")),
}  # fmt: skip


def _strategy(reading: Reading, value: Any) -> Outcome:
    name = str(value)
    levels = {"auto": 0, "ddp": 0, "ddp_spawn": 0, "ddp_find_unused_parameters_true": 0, "ddp_find_unused_parameters_false": 0,
              "fsdp": 3, "fsdp_cpu_offload": 3, "deepspeed": 1, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2,
              "deepspeed_stage_3": 3, "deepspeed_stage_2_offload": 2, "deepspeed_stage_3_offload": 3}  # fmt: skip
    if name not in levels:
        return REFUSED, f"the strategy {name} is not known here; set train.plan yourself"
    reading.settings["train.plan.zero"] = levels[name]
    if name.endswith("offload"):
        reading.settings["train.plan.offload"] = "cpu"
    return TRANSLATED, f"train.plan.zero={levels[name]}"


def _precision(reading: Reading, value: Any) -> Outcome:
    name = str(value)
    kinds = {"32": "fp32", "32-true": "fp32", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16", "bf16-mixed": "bf16"}
    if name not in kinds:
        return REFUSED, f"{name} is not there: masters are always fp32; use bf16-mixed, 16-mixed or 32"
    reading.settings["train.plan.precision"] = kinds[name]
    return TRANSLATED, f"train.plan.precision={kinds[name]}"


def _limit(target: str) -> Rule:
    def act(reading: Reading, value: Any) -> Outcome:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return REFUSED, f"{value} was given, but it takes a number"
        if isinstance(value, str) or value <= 0:
            return NOT_NEEDED, "it sets no limit"
        if isinstance(value, float):
            return "different", f"{value} of an epoch: set {target} in steps"
        reading.settings[target] = value
        return TRANSLATED, f"{target}={value}"

    return Rule(None, act)


_TRAINER: Table = {
    "max_steps": _limit("train.steps"),
    "max_epochs": different("a run counts steps: train.steps"),
    **each("min_epochs min_steps max_time", different("a run counts steps: train.steps")),
    "accumulate_grad_batches": to("batch.accumulate", int),
    "gradient_clip_val": to("train.plan.clip_grad_norm", float, lambda value: value or None),
    "gradient_clip_algorithm": refused("clipping is by norm", str, ("norm",)),
    "precision": Rule(None, _precision),
    "strategy": Rule(None, _strategy),
    "strategy._target_": different("the Plan says how the model is split", str),
    "strategy.tensor_model_parallel_size": _axis("tp"),
    "strategy.pipeline_model_parallel_size": _axis("pp"),
    "strategy.context_parallel_size": _axis("cp"),
    **each("strategy.*", different("the Plan says how the model is split")),
    **each("devices num_nodes accelerator", different("the start says it: --nproc, --nnodes, --device")),
    "log_every_n_steps": to("train.log_every", int),
    "val_check_interval": _limit("train.eval_every"),
    "limit_val_batches": _limit("train.eval_batches"),
    **each("limit_train_batches limit_test_batches limit_predict_batches fast_dev_run overfit_batches "
           "check_val_every_n_epoch num_sanity_val_steps reload_dataloaders_every_n_epochs",
           different("data.validation is evaluated every train.eval_every steps")),
    **each("enable_checkpointing default_root_dir", different(_SAVES)),
    **each("logger callbacks callbacks.** enable_progress_bar enable_model_summary profiler", different(LOGS)),
    "deterministic": different("call torch.use_deterministic_algorithms(True) in the config"),
    **each("benchmark detect_anomaly inference_mode barebones plugins use_distributed_sampler replace_sampler_ddp "
           "amp_level amp_backend devices_of_sampler", unneeded("the trainer here does it, or does without")),
    "sync_batchnorm": different("batch norms see their rank's samples; a loss that couples samples is found", bool),
    "_target_": unneeded("'tensorshard train' is the trainer", str),
}  # fmt: skip
_OPTIM: Table = {
    **each("name _target_", _class({"adamw": "AdamW", "adam": "Adam", "fused_adam": "AdamW", "sgd": "SGD",
           "distributed_fused_adam": "AdamW", "megatron_fused_adam": "AdamW", "adamax": "Adamax"})),
    "lr": to("optimizer.lr", float),
    "weight_decay": to("optimizer.weight_decay", float),
    "betas": to("optimizer.betas", list),
    "eps": to("optimizer.eps", float),
    "momentum": to("optimizer.momentum", float),
    "sched.name": _shape({"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupHoldPolicy": "constant"}),
    "sched.min_lr": to("schedule.min_lr", float),
    "sched.warmup_steps": to("schedule.warmup", int),
    "sched.warmup_ratio": to("schedule.warmup_ratio", float),
    "sched.constant_steps": refused("the rate falls right after the warm-up", int),
    "sched.max_steps": to("schedule.total", int),
    **each("sched.*", different("scheduler.shape, warmup_steps and min_ratio say it")),
    **each("bucket_cap_mb overlap_grad_sync overlap_param_sync contiguous_grad_buffer contiguous_param_buffer "
           "grad_sync_dtype", unneeded("communication overlaps here where a stream exists")),
}  # fmt: skip
_GIVEN = (
    "init_from_*",
    "max_time_per_run",
    "defaults",
    "hydra",
    "hydra.**",
    "name",
    "do_training",
    "do_testing",
    "restore_from_path",
    "ckpt_path",
)
LIGHTNING: Table = {
    **_TRAINER,
    **{f"trainer.{name}": rule for name, rule in _TRAINER.items()},
    **{f"model.optim.{name}": rule for name, rule in _OPTIM.items()},
    **{f"optim.{name}": rule for name, rule in _OPTIM.items()},
    **{f"optimizer.{name}": rule for name, rule in _OPTIM.items()},
    **each("seed_everything seed", to("train.seed", int)),
    **each(" ".join(_GIVEN), different("the command line of 'tensorshard train' says it")),
    **each("exp_manager.** ckpt_path resume.**", different(_SAVES)),
    "model.train_ds.batch_size": to("batch.micro", int),
    **each("model.** model_target model_weights", different(MODEL)),
    **each(
        "data.** datamodule.** data_module.** train_dataset validation_datasets test_datasets sup_data_* spl_tokens.**",
        different(DATA),
    ),
}


def _nemo() -> dict[str, Rule]:
    """NeMo's model section: Megatron's names under ``model.``."""
    inner = {
        name: rule for name, rule in megatron.TABLE.items() if "*" not in name and name not in ("seed", "optimizer")
    }
    return {f"model.{name}": rule for name, rule in inner.items()}


def _amp(reading: Reading, value: bool) -> Outcome:
    return NOT_NEEDED, "master weights are always fp32"


_ADAPTERS = "adapters: 'tensorshard train' trains all weights; wrap the model with peft in a Python config"
_NONE = ("none", "None", "", False)


def _nemo_class(reading: Reading, value: str) -> Outcome:
    verdict, text = _OPTIM["name"].act(reading, value)
    if value.rpartition(".")[2].lower() != "distributed_fused_adam":
        return verdict, text
    reading.settings.setdefault("train.plan.zero", 2)
    return (
        verdict,
        f"{text}; its states and gradients are sharded: train.plan.zero={reading.settings['train.plan.zero']}",
    )


NEMO: Table = {
    **LIGHTNING,
    **_nemo(),
    "model.optim.name": Rule(str, _nemo_class),
    "model.megatron_amp_O2": Rule(bool, _amp),
    "model.encoder_seq_length": to("text.context_length", int),
    "model.seed": to("train.seed", int),
    "model.activations_checkpoint_granularity": Rule(("full", "selective"), lambda r, v: to(
        "train.plan.recompute", None).act(r, v)),
    **each("model.activations_checkpoint_*", different("train.plan.recompute says it for every block")),
    **each("model.fp8 model.fp8_*", refused("fp8 is not there; bf16 is")),
    **each("model.fsdp", _on("train.plan.zero", 3)),
    "model.fsdp_sharding_strategy": Rule(("full", "hybrid", "grad"), lambda r, v: (
        to("train.plan.zero", None).act(r, 2 if v == "grad" else 3) if r.get("model.fsdp") else (NOT_NEEDED, "fsdp is off"))),
    "model.expert_model_parallel_size": _axis("ep"),
    "model.tokenizer.*": different(MODEL),
    "model.data.**": different(DATA),
    "model.peft._target_": refused(_ADAPTERS),
    "model.peft.peft_scheme": refused(_ADAPTERS, str, (*_NONE, "null")),
    **each("model.peft.restore_from_path model.peft.restore_from_ckpt.*", refused(_ADAPTERS, None, _NONE)),
    "model.peft.**": unneeded("it says how adapters are made, or which of them"),
    "optim._target_": different("optim.config says which optimizer it is", str),
    "optim.config._target_": different("optim.config says which optimizer it is", str),
    **{f"optim.config.{name}": rule for name, rule in _OPTIM.items() if "." not in name and name != "_target_"},
    "optim.config.optimizer": _OPTIM["name"],
    "optim.config.clip_grad": to("train.plan.clip_grad_norm", float, lambda value: value or None),
    "optim.config.use_distributed_optimizer": _on("train.plan.zero", 1),
    "optim.config.bf16": _on("train.plan.precision", "bf16"),
    "optim.config.fp16": _on("train.plan.precision", "fp16"),
    "optim.config.adam_beta1": betas(0),
    "optim.config.adam_beta2": betas(1),
    "optim.lr_scheduler._target_": Rule(str, lambda r, v: _shape(
        {"CosineAnnealingScheduler": "cosine", "WarmupAnnealingScheduler": "linear"}).act(r, v.rpartition(".")[2])),
    "optim.lr_scheduler.warmup_steps": to("schedule.warmup", int),
    "optim.lr_scheduler.min_lr": to("schedule.min_lr", float),
    "optim.lr_scheduler.max_steps": to("schedule.total", int),
    "optim.lr_scheduler.constant_steps": refused("the rate falls right after the warm-up", int),
    "plugins._target_": different("train.plan.precision says it", str),
    "plugins.precision": Rule(None, _precision),
    "plugins.*": different("train.plan.precision says it"),
    **{name.removeprefix("trainer."): rule for name, rule in LIGHTNING.items() if name.startswith("trainer.strategy.")},
    **each("run.** s3_checkpointing.** callbacks.** log.** logger.** ", different(_SAVES)),
}  # fmt: skip


def read(reading: Reading, table: Table, program: str) -> None:
    """Follows the table of one of these programs, and writes out what they imply."""
    follow(table, reading, program)
    settings = reading.settings
    reading.imply("precision", "train.plan.precision", "fp32")
    reading.imply("zero or sharding", "train.plan.zero", 0, "whole replicas are their default")
    reading.imply("clipping", "train.plan.clip_grad_norm", None, "none is their default")
    if "schedule.shape" not in settings:
        reading.imply("schedule", "schedule.shape", "constant", "no schedule is their default")
    if "optimizer.lr" in settings:
        reading.imply("optimizer", "optimizer._target_", "torch.optim.AdamW")
    if "train.steps" not in settings:
        settings["train.steps"] = "???"


REFUSED_PROGRAMS = {
    "verl": "verl trains by reinforcement learning, with generation in the loop, which is not there",
    "ms-swift": "ms-swift's scripts are not read; train.plan, optimizer and scheduler of 'tensorshard train hf' take their place",
    "nanotron": "nanotron's configs are not read; its parallelism section is train.plan's dp_shard, tp and pp",
    "picotron": "picotron's configs are not read; its distributed section is train.plan's dp_shard, tp, pp and cp",
    "litgpt": "LitGPT's configs are not read; train.plan, optimizer and scheduler of 'tensorshard train hf' take their place",
    "llm-foundry": "LLM Foundry's configs are not read; fsdp_config is train.plan.zero=3 with precision=bf16",
    "automodel": "NeMo Automodel's recipes name Python classes; distributed is train.plan's tp, cp, pp and dp_shard",
    "veomni": "VeOmni's configs are not read; train.accelerator is train.plan's dp_shard, tp and cp",
    "arctic": "Arctic Training's configs are not read; import its deepspeed section by itself",
    "gpt-neox": "GPT-NeoX builds its own models; import its zero_optimization and optimizer sections by themselves",
}
"""Programs whose configs are known and not read, with what to do instead."""

"""Paddle's YAML, as PaddleFleetX has it."""

import math

from tensorshard.foreign_configs.ledger import (
    DIFFERENT,
    NOT_NEEDED,
    TRANSLATED,
    Outcome,
    Reading,
    Rule,
    Table,
    follow,
)
from tensorshard.foreign_configs.rules import (
    DATA,
    MODEL,
    RECOMPUTE_ALL,
    SAVES,
    betas,
    degree,
    different,
    each,
    imply_little,
    optimizer,
    refused,
    say_what_decays,
    schedule,
    switch,
    to,
    unneeded,
)


def _precision(group: str) -> Rule:
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


def _shards(reading: Reading) -> bool:
    return reading.number("Distributed.sharding.sharding_degree", 1) > 1


def _stage(reading: Reading, value: int) -> Outcome:
    reading.settings["train.plan.zero"] = value if _shards(reading) else 0
    note = "" if _shards(reading) else f": stage {value} over a sharding_degree of 1 shards nothing"
    return TRANSLATED, f"train.plan.zero={reading.settings['train.plan.zero']}{note}"


def _sharding_degree(reading: Reading, value: int) -> Outcome:
    if value <= 1:
        return NOT_NEEDED, "nothing is sharded"
    if reading.get("Distributed.dp_degree") is None and reading.world_size:  # dp takes the ranks that are left
        others = math.prod(
            int(reading.number(f"Distributed.{name}", 1)) for name in ("mp_degree", "pp_degree", "sep_degree")
        )
        reading.settings["train.plan.dp_replicate"] = max(1, reading.world_size // (value * others))
    return to("train.plan.dp_shard", None).act(reading, value)


def _dp(reading: Reading, value: int) -> Outcome:
    if _shards(reading):
        return to("train.plan.dp_replicate", None).act(reading, value)
    reading.settings.setdefault("train.plan.zero", 0)
    return to("train.plan.dp_shard", None).act(reading, value)


def _decay_steps(reading: Reading, value: float) -> Outcome:
    reading.settings["schedule.total"] = int(value)
    if reading.get("Optimizer.lr.use_increments"):
        return TRANSLATED, f"scheduler.total_steps is {int(value)} samples / samples a step"
    return TRANSLATED, f"scheduler.total_steps={int(value)}"


def _increments(reading: Reading, value: bool) -> Outcome:
    reading.settings["schedule.in_samples"] = value
    return (TRANSLATED, "decay_steps counts samples") if value else (NOT_NEEDED, "decay_steps counts steps")


def _shape(reading: Reading, value: str) -> Outcome:
    decay = reading.get("Optimizer.lr.decay_type", "cosine")
    names = {"CosineAnnealingWithWarmupDecay": "cosine", "LinearDecayWithWarmup": "linear", "ViTLRScheduler": decay}
    verdict, text = schedule(names).act(reading, value)
    if value == "LinearDecayWithWarmup" and verdict == TRANSLATED:
        reading.settings["schedule.overlap"] = True
        return DIFFERENT, f"{text}, from the first step on as theirs; the warm-up ends where the decay is by then"
    if value == "CosineAnnealingWithWarmupDecay" and not reading.get("Optimizer.lr.use_increments"):
        return DIFFERENT, f"{text}, by steps; theirs never leaves its first rate without use_increments"
    return verdict, text


def _unless_epochs(target: str) -> Rule:
    """A number of steps, which is below 1, or of epochs, where a run counts epochs."""

    def act(reading: Reading, value: int) -> Outcome:
        if value < 1 or "epoch" in (reading.get("Engine.run_mode"), reading.get("Global.run_mode")):
            return DIFFERENT, f"the run counts epochs, and here it counts steps: set {target}"
        return to(target, None).act(reading, value)

    return Rule(int, act)


def _parts(reading: Reading, value: int) -> Outcome:
    if reading.get("Global.local_batch_size") is not None:
        return NOT_NEEDED, "Paddle, too, takes local_batch_size / micro_batch_size"
    return to("batch.accumulate", None).act(reading, value)


def _loaded(reading: Reading, value: int) -> Outcome:
    if str(reading.get("Model.module", "")).startswith(("GPT", "Ernie", "MoE", "Language")):
        return NOT_NEEDED, "this module, too, takes the batch sizes of Global"
    reading.settings["batch.loaded"] = value
    return TRANSLATED, f"each data rank loads {value} samples a step, whatever Global says"


_WORK = {
    "max_steps": _unless_epochs("train.steps"),
    "accumulate_steps": Rule(int, _parts),
    "logging_freq": to("train.log_every", int),
    "eval_freq": _unless_epochs("train.eval_every"),
    "eval_iters": to("train.eval_batches", int, lambda value: value if value > 0 else None),
    "test_iters": unneeded("there is no test at the end", int),
    "num_train_epochs": different("a run counts steps: train.steps", int),
    "save_load.save_steps": _unless_epochs("train.save_every"),
    **each("save_load.*", different(SAVES)),
    "mix_precision.scale_loss": different("the scale adapts by itself, from 65536", float),
    **each("mix_precision.custom_black_list mix_precision.custom_white_list mix_precision.level",
           different("layers compute in 16 bits, losses and norms as torch's autocast does")),
    **each("mix_precision.use_fp16_guard mix_precision.use_fp16_cumulative_gradients", unneeded("Paddle's own way of working")),
    **each("mix_precision.dtype mix_precision.fp16_dtype", unneeded("it is settled by the line of enable")),
    "balance_loss_weight": different(MODEL),
    "run_mode": different("a run counts steps: train.steps", str),
}  # fmt: skip
TABLE: Table = {
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
    **{f"{group}.{name}": rule for group in ("Global", "Engine") for name, rule in _WORK.items()},
    **{f"{group}.mix_precision.enable": _precision(group) for group in ("Global", "Engine")},
    **{f"{group}.mix_precision.use_pure_fp16": _precision(group) for group in ("Global", "Engine")},
    "Distributed.dp_degree": Rule(int, _dp),
    "Distributed.mp_degree": degree("tp"),
    "Distributed.pp_degree": degree("pp"),
    "Distributed.sep_degree": degree("cp"),
    "Distributed.sharding.sharding_degree": Rule(int, _sharding_degree),
    "Distributed.sharding.sharding_stage": Rule((1, 2, 3), _stage),
    "Distributed.sharding.sharding_offload": switch("train.plan.offload", "cpu"),
    **each("Distributed.sharding.*", unneeded("communication overlaps here where a stream exists")),
    **each("Distributed.*", unneeded("groups of processes are made by the Plan")),
    "Model.use_recompute": RECOMPUTE_ALL,
    "Model.recompute_granularity": different("full recomputes each block; selective keeps products and attention", str),
    "Model.sequence_parallel": to("train.plan.sequence_parallel", bool),
    "Model.virtual_pp_degree": different("train.plan.pp_schedule=interleaved_1f1b, pp_stages_per_rank", int),
    **each("Model.**", different(MODEL)),
    **each("Loss.**", different("the loss is yours: loss in the config")),
    "Optimizer.name": optimizer({"fusedadamw": "AdamW", "adamw": "AdamW", "adam": "Adam", "momentum": "SGD"}),
    "Optimizer.weight_decay": to("optimizer.weight_decay", float),
    "Optimizer.beta1": betas(0),
    "Optimizer.beta2": betas(1),
    "Optimizer.epsilon": to("optimizer.eps", float),
    "Optimizer.momentum": to("optimizer.momentum", float),
    "Optimizer.lr.name": Rule(str, _shape),
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
    **each("Data.Train.sampler.batch_size Data.Train.loader.batch_size", Rule(int, _loaded)),
    **each("Data.**", different(DATA)),
    **each("Profiler.**", different("train.profile=10-12 writes traces")),
    **each("Compress.Quantization.enable", refused("weights are not quantized in training", bool)),
    **each("Compress.**", unneeded("it says how a model is compressed")),
    **each("Inference.** Generation.** Offline_Eval.** Export.**", unneeded("it is for inference")),
}  # fmt: skip


def read(reading: Reading) -> None:
    """Follows Paddle's table, and writes out what it implies."""
    follow(TABLE, reading, "Paddle")
    settings = reading.settings
    loaded = settings.pop("batch.loaded", None)
    if loaded is not None:
        settings.pop("batch.global", None)
        settings["batch.micro"] = max(1, loaded // settings.get("batch.accumulate", 1))
    if _shards(reading):
        reading.imply("Distributed.sharding.sharding_stage", "train.plan.zero", 2)
    if reading.get("Optimizer.name") == "FusedAdamW" and settings.get("optimizer.weight_decay"):
        say_what_decays(reading, "Paddle")
    imply_little(reading)

"""LiBai's configs, facts from its sources of October 2024 and OneFlow's: the keys of its trainer, and its own base files."""

from typing import Any

from tensorshard.foreign_configs.deepspeed import imply_optimizer
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
    DATA,
    MODEL,
    SAVES,
    STAGES,
    different,
    each,
    only_if,
    optimizer,
    refused,
    to,
    unneeded,
)

_GROUPS = "groups of parameters, as of biases and norms without decay: an optimizer of a Python config makes them"
_SCHEDULES = {
    "WarmupCosineLR": "cosine",
    "WarmupCosineAnnealingLR": "cosine",
    "WarmupPolynomialLR": "linear",
    "WarmupExponentialLR": "constant",
}


def _in_graphs(target: str, value: Any) -> Rule:
    """A switch that LiBai reads in its static graphs alone."""

    def act(reading: Reading, on: bool) -> Outcome:
        if on and reading.get("graph.enabled") is False:
            return NOT_NEEDED, "it does nothing in LiBai either where graph.enabled is false"
        return to(target, None).act(reading, value) if on else (NOT_NEEDED, "it is off")

    return Rule(bool, act)


def _stage(reading: Reading, value: int) -> Outcome:
    on = reading.get("train.zero_optimization.enabled") and reading.get("graph.enabled") is not False
    return to("train.plan.zero", None).act(reading, value if on else 0)


def _iterations(reading: Reading, value: int) -> Outcome:
    if reading.number("train.train_epoch", 0) > 0:
        return DIFFERENT, "it counts where it is more than the steps of train_epoch: set train.steps to the larger one"
    return to("train.steps", None).act(reading, value)


def _data_ranks(reading: Reading, value: int) -> Outcome:
    others = int(
        reading.number("train.dist.tensor_parallel_size", 1) * reading.number("train.dist.pipeline_parallel_size", 1)
    )
    if reading.world_size is None and value > 1:
        reading.world_size = value * others
    if reading.world_size == value * others:
        return to("train.plan.dp_shard", None).act(reading, value)
    reading.settings["train.plan.dp_shard"] = -1
    return TRANSLATED, "train.plan.dp_shard=-1: LiBai, too, takes all ranks that tp and pp leave"


def _clip(reading: Reading, value: float) -> Outcome:
    if reading.get("optim.params.clip_grad_norm_type") is None:
        return NOT_NEEDED, "it does nothing in LiBai either without clip_grad_norm_type"
    reading.settings["train.plan.clip_grad_norm"] = value
    return DIFFERENT, f"train.plan.clip_grad_norm={value}, of the whole model; OneFlow takes each group's of parameters"


def _schedule(reading: Reading, value: str) -> Outcome:
    name = value.rpartition(".")[2]
    if name not in _SCHEDULES or (name == "WarmupExponentialLR" and reading.get("train.scheduler.gamma") != 1.0):
        return REFUSED, f"{name} is not there; use {', '.join(_SCHEDULES)} (with gamma=1.0), or one of a Python config"
    reading.settings["schedule.shape"], reading.settings["schedule.overlap"] = _SCHEDULES[name], True
    if name == "WarmupPolynomialLR":
        reading.settings.setdefault("schedule.min_lr", 1e-4)  # its default
    return TRANSLATED, f"scheduler.shape={_SCHEDULES[name]}, which falls while the rate warms up, as theirs does"


TABLE: Table = {
    "train.train_micro_batch_size": to("batch.micro", int),
    "train.global_batch_size": to("batch.global", int),
    "train.num_accumulation_steps": to("batch.accumulate", int),
    "train.train_iter": Rule(int, _iterations),
    "train.train_epoch": Rule(float, lambda r, v: (
        (DIFFERENT, "a run counts steps: train.steps") if v else (NOT_NEEDED, "train_iter counts"))),
    "train.warmup_iter": unneeded("LiBai, too, sets it from warmup_ratio and train_iter"),
    "train.warmup_ratio": to("schedule.warmup_ratio", float),
    "train.log_period": to("train.log_every", int),
    "train.seed": to("train.seed", int),
    "train.amp.enabled": _in_graphs("train.plan.precision", "fp16"),
    "train.activation_checkpoint.enabled": _in_graphs("train.plan.recompute", "full"),
    "train.zero_optimization.enabled": unneeded("it is settled by the stage's line", bool),
    "train.zero_optimization.stage": Rule((0, 1, 2, 3), _stage),
    "train.dist.data_parallel_size": Rule(int, _data_ranks),
    "train.dist.tensor_parallel_size": to("train.plan.tp", int),
    "train.dist.pipeline_parallel_size": to("train.plan.pp", int),
    "train.dist.pipeline_num_layers": different(STAGES),
    "train.dist.custom_pipeline_stage_id": different("train.plan.pp_split names the modules that start a stage"),
    **each("train.dist.*", different("the start says it: --nproc, --nnodes")),
    "train.checkpointer.period": to("train.save_every", int),
    "train.checkpointer.max_to_keep": to("train.keep_checkpoints", int),
    **each("train.checkpointer.* train.output_dir train.resume train.load_weight", different(SAVES)),
    "train.evaluation.enabled": different("data.validation is evaluated every train.eval_every steps", bool),
    "train.evaluation.eval_period": only_if("train.evaluation.enabled", to("train.eval_every", int), "evaluation is off"),
    "train.evaluation.eval_iter": only_if("train.evaluation.enabled", to("train.eval_batches", int), "evaluation is off"),
    "train.eval_period": unneeded("LiBai's trainer does not read it: train.evaluation.eval_period counts"),
    **each("train.evaluation.** train.test_micro_batch_size train.topk", different("data.validation is evaluated")),
    "train.scheduler._target_": Rule(str, _schedule),
    "train.scheduler.alpha": to("schedule.min_ratio", float),
    **each("train.scheduler.eta_min train.scheduler.end_learning_rate", to("schedule.min_lr", float)),
    "train.scheduler.warmup_factor": to("schedule.start_ratio", float),
    "train.scheduler.warmup_method": refused("the warm-up is linear", str, ("linear",)),
    "train.scheduler.power": refused("the rate falls in a straight line", float, (1.0,)),
    "train.scheduler.cycle": refused("the rate falls once", bool),
    **each("warmup_iter max_iter", unneeded("LiBai, too, sets it from warmup_ratio and train_iter"), "train.scheduler."),
    **each("train.scheduler.*", unneeded("it belongs to the schedule; see train.scheduler._target_")),
    "optim._target_": optimizer({"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}),
    "optim.lr": to("optimizer.lr", float),
    "optim.weight_decay": to("optimizer.weight_decay", float),
    "optim.betas": to("optimizer.betas", list),
    "optim.eps": to("optimizer.eps", float),
    "optim.momentum": to("optimizer.momentum", float),
    "optim.do_bias_correction": refused("torch's optimizers correct the bias always", bool, (True,)),
    "optim.amsgrad": to("optimizer.amsgrad", bool),
    "optim.params.clip_grad_max_norm": Rule(float, _clip),
    "optim.params.clip_grad_norm_type": refused("clipping is by the L2 norm", float, (2.0,)),
    **each("optim.params.**", different(_GROUPS)),
    **each("nccl_fusion_threshold_mb nccl_fusion_max_ops", unneeded("units of reduction are the model's blocks"), "train."),
    **each("rdma_enabled enable_use_compute_stream nccl_fusion.*", unneeded("OneFlow's own"), "train."),
    **each("samples train_samples start_iter consumed_*", unneeded("a checkpoint records what was consumed"), "train."),
    "train.input_placement_device": different("the devices are what the start sees"),
    **each("model.** vocab_size", different(MODEL)),
    **each("dataloader.** tokenization.** train.num_workers train.persistent_workers", different(DATA)),
    "graph.auto_parallel.enabled": refused("'tensorshard plan' searches for the plan", bool),
    **each("graph.**", unneeded("OneFlow's static graphs; train.plan.compile=true compiles blocks")),
    "other groups": different("LiBai's own trainer does not read them; a script of yours does"),
    "missing *": refused("it comes from what is not read: put that file beside this one, or give LiBai's config.yaml", None, ()),
    "base *": different("it is not beside this file: LiBai's own is taken for train, optim and graph; model and data are yours"),
    "line *": refused("the file is read and not run, and this may change the config: take it out, or give config.yaml", None, ()),
    "code in line *": unneeded("no config is given to it"),
}  # fmt: skip

BASES: dict[str, dict[str, Any]] = {
    "common/train": {"train": {
        "output_dir": "./output", "train_micro_batch_size": 32, "global_batch_size": None, "num_accumulation_steps": None,
        "train_iter": 10000, "train_epoch": 0, "warmup_ratio": 0, "amp": {"enabled": False},
        "activation_checkpoint": {"enabled": False}, "zero_optimization": {"enabled": False, "stage": 1},
        "checkpointer": {"period": 5000, "max_to_keep": 100}, "test_micro_batch_size": 32,
        "evaluation": {"enabled": True, "eval_period": 5000, "eval_iter": 100000}, "log_period": 20,
        "scheduler": {"_target_": "WarmupCosineLR", "warmup_factor": 0.001, "alpha": 0.01, "warmup_method": "linear"},
        "dist": {"data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}, "seed": 1234}},
    "common/optim": {"optim": {
        "_target_": "oneflow.optim.AdamW", "lr": 1e-4, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8,
        "params": {"_target_": "libai.optim.get_default_optimizer_params", "clip_grad_max_norm": 1.0,
                   "clip_grad_norm_type": 2.0, "weight_decay_norm": 0.0, "weight_decay_bias": 0.0}}},
    "common/models/graph": {"graph": {"enabled": True, "auto_parallel": {"enabled": False}}},
}  # fmt: skip
"""What the base files that LiBai ships say, of what a run depends on."""


def read(reading: Reading) -> None:
    """Follows LiBai's table, and writes out what its classes imply."""
    follow(TABLE, reading, "LiBai")
    settings = reading.settings
    reading.imply("train.amp.enabled", "train.plan.precision", "fp32")
    reading.imply("train.zero_optimization", "train.plan.zero", 0, "whole replicas are their default")
    reading.imply("optim.params.clip_grad_max_norm", "train.plan.clip_grad_norm", None, "none is their default")
    reading.imply("train.scheduler", "schedule.shape", "constant", "no schedule is their default")
    if "optimizer._target_" in settings:
        imply_optimizer(reading, 1e-3)
    settings.setdefault("train.steps", "???")

"""Lightning's Trainer, by itself or among Hydra's groups."""

from typing import Any

from tensorshard.foreign_configs.ledger import (
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
    SAVES,
    degree,
    different,
    each,
    imply_little,
    optimizer,
    ranks,
    refused,
    schedule,
    to,
    unneeded,
)


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


def precision(reading: Reading, value: Any) -> Outcome:
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


TRAINER: Table = {
    "max_steps": _limit("train.steps"),
    "max_epochs": different("a run counts steps: train.steps"),
    **each("min_epochs min_steps max_time", different("a run counts steps: train.steps")),
    "accumulate_grad_batches": to("batch.accumulate", int),
    "gradient_clip_val": CLIP,
    "gradient_clip_algorithm": refused("clipping is by norm", str, ("norm",)),
    "precision": Rule(None, precision),
    "strategy": Rule(None, _strategy),
    "strategy._target_": different("the Plan says how the model is split", str),
    "strategy.tensor_model_parallel_size": degree("tp"),
    "strategy.pipeline_model_parallel_size": degree("pp"),
    "strategy.context_parallel_size": degree("cp"),
    **each("strategy.*", different("the Plan says how the model is split")),
    **each("devices num_nodes accelerator", different("the start says it: --nproc, --nnodes, --device")),
    "log_every_n_steps": to("train.log_every", int),
    "val_check_interval": _limit("train.eval_every"),
    "limit_val_batches": _limit("train.eval_batches"),
    **each("limit_train_batches limit_test_batches limit_predict_batches fast_dev_run overfit_batches "
           "check_val_every_n_epoch num_sanity_val_steps reload_dataloaders_every_n_epochs",
           different("data.validation is evaluated every train.eval_every steps")),
    **each("enable_checkpointing default_root_dir", different(SAVES)),
    **each("logger callbacks callbacks.** enable_progress_bar enable_model_summary profiler", different(LOGS)),
    "deterministic": different("call torch.use_deterministic_algorithms(True) in the config"),
    **each("benchmark detect_anomaly inference_mode barebones plugins use_distributed_sampler replace_sampler_ddp "
           "amp_level amp_backend devices_of_sampler", unneeded("the trainer here does it, or does without")),
    "sync_batchnorm": different("batch norms see their rank's samples; a loss that couples samples is found", bool),
    "_target_": unneeded("'tensorshard train' is the trainer", str),
}  # fmt: skip


def _nemo_schedule(reading: Reading, value: str) -> Outcome:
    reading.settings["schedule.from_one"] = True
    names = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear", "WarmupHoldPolicy": "constant",
             "WarmupPolicy": "constant"}  # fmt: skip
    return schedule(names).act(reading, value)


OPTIM: Table = {
    **each("name _target_", optimizer({"adamw": "AdamW", "adam": "Adam", "fused_adam": "AdamW", "sgd": "SGD",
           "distributed_fused_adam": "AdamW", "mcore_distributed_optim": "AdamW", "megatron_fused_adam": "AdamW", "adamax": "Adamax"})),
    "lr": to("optimizer.lr", float),
    "weight_decay": to("optimizer.weight_decay", float),
    "betas": to("optimizer.betas", list),
    "eps": to("optimizer.eps", float),
    "momentum": to("optimizer.momentum", float),
    "sched.name": Rule(str, _nemo_schedule),
    "sched.min_lr": to("schedule.min_lr", float),
    "sched.warmup_steps": to("schedule.warmup", int),
    "sched.warmup_ratio": to("schedule.warmup_ratio", float),
    "sched.constant_steps": to("schedule.hold", int),
    "sched.constant_ratio": refused("the part at the last rate is given in steps, as constant_steps"),
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
TABLE: Table = {
    **TRAINER,
    **{f"trainer.{name}": rule for name, rule in TRAINER.items()},
    **{f"model.optim.{name}": rule for name, rule in OPTIM.items()},
    **{f"optim.{name}": rule for name, rule in OPTIM.items()},
    **{f"optimizer.{name}": rule for name, rule in OPTIM.items()},
    **each("seed_everything seed", to("train.seed", int)),
    **each(" ".join(_GIVEN), different("the command line of 'tensorshard train' says it")),
    **each("exp_manager.** ckpt_path resume.**", different(SAVES)),
    "model.train_ds.batch_size": to("batch.micro", int),
    **each("model.** model_target model_weights", different(MODEL)),
    **each(
        "data.** datamodule.** data_module.** train_dataset validation_datasets test_datasets sup_data_* spl_tokens.**",
        different(DATA),
    ),
}


def read(reading: Reading) -> None:
    """Follows Lightning's table, and writes out what it implies."""
    ranks(reading, "trainer.devices", "trainer.num_nodes")
    follow(TABLE, reading, "Lightning")
    imply_little(reading)

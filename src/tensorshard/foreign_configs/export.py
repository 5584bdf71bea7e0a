"""The way back: a Plan and its batch sizes, optimizer and schedule as a config of another program."""

from collections.abc import Mapping
from typing import Any

Plan = Mapping[str, Any]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

_NOWHERE: dict[str, tuple[Any, ...]] = dict(
    ep=(1,), tiles=(1,), logits=("auto", "whole"), shard_units=(None,), tp_plan=(None,), cp_dims=(None,),
    cp_order=("auto",), random=("same", "by_rank"), pp_split=(None,), pp_units=(None,), pp_stages_per_rank=(None,),
)  # fmt: skip
"""Fields that programs have no key for, and what they may be."""


def export(program: str, plan: Plan, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A config for `program`, one of ``PROGRAMS``, as nested mappings.

    Args:
        plan: all fields of a Plan, its axes set or -1.
        settings: of a config, by dotted key: ``optimizer.lr``, ``train.global_batch_size`` and so on.

    Raises:
        ValueError: the program cannot do what the plan asks; the message names the fields.
    """
    if program not in PROGRAMS:
        raise ValueError(f"there is no export to {program!r}; there is one to {', '.join(PROGRAMS)}")
    return PROGRAMS[program](plan, settings or {})


def _only(program: str, plan: Plan, **special: tuple[Any, ...]) -> None:
    """Refuses fields that `program` has no key for, of those that no program has and of `special` ones."""
    allowed = {**_NOWHERE, **special}
    wrong = [f"{name}={plan[name]!r}" for name, values in allowed.items() if plan.get(name, values[0]) not in values]
    if wrong:
        raise ValueError(
            f"{program} has no counterpart of {', '.join(wrong)}; set "
            + ", ".join(f"{word.partition('=')[0]}={allowed[word.partition('=')[0]][0]!r}" for word in wrong)
        )


def _offload(program: str, plan: Plan) -> dict[str, Any]:
    value = plan.get("offload")
    if value is None:
        return {}
    if isinstance(value, str):
        value = {"optimizer": value, "gradients": value}
    if value.get("activations") is not None:
        raise ValueError(f"{program} has no counterpart of offload.activations; leave it out")
    return dict(value)


def _deepspeed(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    _only("DeepSpeed's config", plan, pp=(1,), cp=(1,), recompute=("none",), sequence_parallel=(False,))
    offload, zero = _offload("DeepSpeed", plan), {"stage": plan["zero"]}
    config: dict[str, Any] = {"gradient_accumulation_steps": plan["micro_batches"], "zero_optimization": zero}
    places = {"cpu": "cpu", "disk": "nvme"}
    for part, name in (("optimizer", "offload_optimizer"), ("parameters", "offload_param")):
        if offload.get(part):
            zero[name] = {"device": places[offload[part]]}
            if offload[part] == "disk":
                zero[name]["nvme_path"] = offload.get("path") or "/tmp"
    if plan["dp_replicate"] != 1:
        if plan["zero"] != 3 or plan["dp_shard"] == -1:
            raise ValueError("DeepSpeed's hybrid sharding (mics_shard_size) is for zero=3 and a dp_shard that is set")
        zero["mics_shard_size"] = plan["dp_shard"]
    if plan["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": plan["tp"]}
    config["gradient_clipping"] = plan["clip_grad_norm"] or 0.0
    for name in ("bf16", "fp16"):
        config[name] = {"enabled": plan["precision"] == name}
    if plan.get("reduce_dtype") or plan["precision"] != "fp32":
        config["communication_data_type"] = plan.get("reduce_dtype") or "fp32"
    if plan["compile"]:
        config["compile"] = {"disable": False, "backend": "inductor"}
    if settings.get("train.global_batch_size"):
        config["train_batch_size"] = settings["train.global_batch_size"]
    else:
        config["train_micro_batch_size_per_gpu"] = "auto"
    target = str(settings.get("optimizer._target_", "")).rpartition(".")[2]
    if target in ("AdamW", "Adam", "SGD", "Adagrad"):
        names = ("lr", "betas", "eps", "weight_decay", "momentum")
        params = {name: settings[f"optimizer.{name}"] for name in names if f"optimizer.{name}" in settings}
        if target in ("Adam", "AdamW"):
            params.update(torch_adam=True, adam_w_mode=target == "AdamW")
        config["optimizer"] = {"type": "Adam" if target == "AdamW" else target, "params": params}
    return config


def _accelerate(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    _only(
        "Accelerate's config", plan, pp=(1,), zero=(3, 2, 0), recompute=("none", "full"), sequence_parallel=(False,),
        reduce_dtype=(None, "fp32"),
    )  # fmt: skip
    offload = _offload("Accelerate", plan)
    if "disk" in offload.values():
        raise ValueError("Accelerate's FSDP has no counterpart of offload to disk; set offload='cpu'")
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if plan["zero"] else "MULTI_GPU",
        "mixed_precision": "no" if plan["precision"] == "fp32" else plan["precision"],
        "gradient_accumulation_steps": plan["micro_batches"],
    }
    if plan["compile"]:
        config["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if plan["zero"]:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": plan["zero"] == 3,
            "fsdp_offload_params": bool(offload),
            "fsdp_activation_checkpointing": plan["recompute"] == "full",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    elif plan["recompute"] == "full":
        raise ValueError("Accelerate recomputes with FSDP alone; set zero=2 or 3, or recompute='none'")
    axes = {name: plan[name] for name in ("dp_replicate", "dp_shard", "tp", "cp") if plan[name] not in (1, -1)}
    if axes:
        config["parallelism_config"] = {f"parallelism_config_{name}_size": size for name, size in axes.items()}
    return config


def _torchtitan(plan: Plan, settings: Mapping[str, Any]) -> dict[str, Any]:
    _only("torchtitan", plan, zero=(3, 2), precision=("bf16", "fp32"), ep=(plan["ep"],))
    offload = _offload("torchtitan", plan)
    if offload and set(map(str, offload.values())) & {"disk"}:
        raise ValueError("torchtitan has no counterpart of offload to disk; set offload='cpu'")
    schedules = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS"}
    schedules |= {"interleaved_zero_bubble": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV"}
    names = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "tp": "tensor_parallel"}
    names |= {"pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}
    parallelism: dict[str, Any] = {f"{name}_degree": plan[axis] for axis, name in names.items()}
    parallelism["fsdp_reshard_after_forward"] = "always" if plan["zero"] == 3 else "never"
    if plan["pp"] > 1:
        parallelism["pipeline_parallel_schedule"] = schedules[plan["pp_schedule"]]
    training: dict[str, Any] = {
        "mixed_precision_param": _DTYPES[plan["precision"]],
        "mixed_precision_reduce": _DTYPES.get(plan.get("reduce_dtype") or "fp32", "float32"),
        "enable_cpu_offload": bool(offload),
    }
    if plan["clip_grad_norm"] is not None:
        training["max_norm"] = plan["clip_grad_norm"]
    if isinstance(settings.get("train.steps"), int):
        training["steps"] = settings["train.steps"]
    global_batch, ranks = settings.get("train.global_batch_size"), plan["dp_shard"] * plan["dp_replicate"]
    if isinstance(global_batch, int) and ranks > 0 and global_batch % (ranks * plan["micro_batches"]) == 0:
        training["global_batch_size"] = global_batch
        training["local_batch_size"] = global_batch // ranks // (plan["micro_batches"] if plan["pp"] == 1 else 1)
    elif isinstance(global_batch, int) or plan["micro_batches"] > 1:
        raise ValueError(
            f"torchtitan takes samples a rank in place of micro_batches={plan['micro_batches']}: set dp_shard and "
            f"dp_replicate, and export the YAML of a run, whose train.global_batch_size they and micro_batches divide"
        )
    config: dict[str, Any] = {
        "parallelism": parallelism,
        "training": training,
        "activation_checkpoint": {"mode": plan["recompute"]},
        "compile": {"enable": plan["compile"]},
    }
    if "optimizer.lr" in settings:
        config["optimizer"] = {"name": "AdamW", "lr": settings["optimizer.lr"]}
        for name in ("eps", "weight_decay"):
            if f"optimizer.{name}" in settings:
                config["optimizer"][name] = settings[f"optimizer.{name}"]
    return config


PROGRAMS = {"deepspeed": _deepspeed, "accelerate": _accelerate, "torchtitan": _torchtitan}
"""The programs that configs are written for."""

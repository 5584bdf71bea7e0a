"""torchtune's recipes: its YAML, whose ``_component_`` keys name classes (facts from its sources of April 2026)."""

from typing import Any

from tensorshard.foreign_configs import adapters
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
    LOGS,
    MODEL,
    RECOMPUTE,
    RECOMPUTE_ALL,
    RESHARD,
    SAVES,
    different,
    each,
    refused,
    to,
    unneeded,
)

_STEPS = "a run counts steps: set train.steps to epochs x steps of an epoch"
_OTHER = "this is no recipe of fine-tuning; 'tensorshard train' fine-tunes"
_LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")
_FUSED = ("phi3", "phi4", "llama3_2_vision", "llama4")
_CLASSES = {"AdamW": "AdamW", "Adam": "Adam", "SGD": "SGD", "PagedAdamW": "AdamW"}
_MLP = ["gate_proj", "up_proj", "down_proj"]


def _name(component: Any) -> str:
    return str(component).rpartition(".")[2]


def _adapted(reading: Reading) -> bool:
    return _name(reading.get("model._component_", "")).startswith("lora_")


def _model(reading: Reading, value: str) -> Outcome:
    name = _name(value)
    if name.startswith("qlora_") or reading.get("model.quantize_base"):
        return REFUSED, adapters.QUANTIZED
    if not name.startswith("lora_"):
        return DIFFERENT, f"all weights are trained; {MODEL}"
    if any(family in value for family in _FUSED):
        return REFUSED, "Hugging Face's model has other layers than torchtune's, which other adapters would be for"
    return adapters.begin(reading)


def _layers(names: list[str]) -> Rule:
    """Layers that get adapters, by the names that they have in Hugging Face's models."""

    def act(reading: Reading, value: Any) -> Outcome:
        if not _adapted(reading):
            return NOT_NEEDED, "there are no adapters"
        asked = (
            [{"output_proj": "o_proj"}.get(name, name) for name in value]
            if isinstance(value, list)
            else names
            if value
            else []
        )
        reading.settings["model.target_modules"] = [*reading.settings.get("model.target_modules", []), *asked]
        return TRANSLATED, f"model.target_modules={reading.settings['model.target_modules']}"

    return Rule((bool, list), act)


def _checkpointer(reading: Reading, value: str) -> Outcome:
    if _name(value) == "FullModelHFCheckpointer":
        return TRANSLATED, "a directory as Hugging Face writes it, which model.pretrained names"
    return (
        REFUSED,
        f"{_name(value)} reads another format: give a directory as Hugging Face writes it, as model.pretrained",
    )


def _dtype(reading: Reading, value: str) -> Outcome:
    reading.settings["train.plan.precision"] = value
    if value == "fp32":
        return TRANSLATED, "train.plan.precision=fp32"
    return DIFFERENT, "train.plan.precision=bf16: what is trained has fp32 masters here; theirs is all of 16 bits"


def _optimizer(reading: Reading, value: str) -> Outcome:
    name = _CLASSES.get(_name(value))
    if name is None:
        return REFUSED, f"{value} is not in torch; AdamW with train.plan.zero or offload=cpu saves memory exactly"
    return to("optimizer._target_", None).act(reading, f"torch.optim.{name}")


def _schedule(reading: Reading, value: str) -> Outcome:
    if _name(value) != "get_cosine_schedule_with_warmup":
        return REFUSED, f"{_name(value)} is not there; use get_cosine_schedule_with_warmup"
    return to("schedule.shape", None).act(reading, "cosine")


def _loss(reading: Reading, value: str) -> Outcome:
    if _name(value) in _LOSSES:
        return DIFFERENT, "the loss of the next token; give labels of -100 to tokens that do not count"
    return REFUSED, f"{_name(value)}: write the loss with a model, loss_fn(model, batch), in a Python config"


def _offload(parts: tuple[str, ...]) -> Rule:
    def act(reading: Reading, value: bool) -> Outcome:
        if not value:
            return NOT_NEEDED, "it is off"
        offload = {**reading.settings.get("train.plan.offload", {}), **dict.fromkeys(parts, "cpu")}
        return to("train.plan.offload", None).act(reading, offload)

    return Rule(bool, act)


def _epoch(reading: Reading, value: int) -> Outcome:
    reading.settings["train.steps"] = value * int(reading.number("epochs", 1))
    return (
        DIFFERENT,
        f"train.steps={reading.settings['train.steps']}, for epochs x this; less if an epoch of the data is shorter",
    )


TABLE: Table = {
    "model._component_": Rule(str, _model),
    "model.lora_attn_modules": _layers([]),
    "model.apply_lora_to_mlp": _layers(_MLP),
    "model.apply_lora_to_output": _layers(["lm_head"]),
    **adapters.numbers(_adapted, {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
                                  "use_dora": "use_dora"}, "model."),
    "model.quantize_base": unneeded("it is settled by the line of the component"),
    **each("decoder_trainable encoder_trainable fusion_trainable", refused(
        "requires_grad_(False) on the parts that are frozen, in a Python config", None, (True,)), "model."),
    **each("model.*", different(MODEL)),
    "checkpointer._component_": Rule(str, _checkpointer),
    "checkpointer.checkpoint_dir": to("model.pretrained", str),
    **each("checkpointer.**", different(SAVES)),
    "tokenizer.max_seq_len": to("text.context_length", int),
    **each("tokenizer.** resize_token_embeddings", different(MODEL)),
    **each("dataset.** dataset_val.** datasets dataloader.** shuffle collate_fn batch_size_val", different(DATA)),
    "dataset.packed": different("tokens are packed into samples of text.context_length; each knows its document", bool),
    "batch_size": to("batch.micro", int),
    "gradient_accumulation_steps": to("batch.accumulate", int),
    "epochs": different(_STEPS, int),
    "max_steps_per_epoch": Rule(int, _epoch),
    "seed": to("train.seed", int),
    "optimizer._component_": Rule(str, _optimizer),
    **each("fused foreach", unneeded("torch's fused update is used where it can be"), "optimizer."),
    **{f"optimizer.{name}": to(f"optimizer.{name}", float) for name in ("lr", "weight_decay", "eps", "momentum")},
    "optimizer.betas": to("optimizer.betas", list),
    "optimizer_in_bwd": different("updates come after the whole gradient, with the same result", bool),
    "lr_scheduler._component_": Rule(str, _schedule),
    "lr_scheduler.num_warmup_steps": to("schedule.warmup", int),
    "lr_scheduler.num_cycles": refused("the rate falls over half a cosine", float, (0.5,)),
    "loss._component_": Rule(str, _loss),
    "loss.*": unneeded("it belongs to the loss, and does not change it"),
    "clip_grad_norm": to("train.plan.clip_grad_norm", float),
    "compile": to("train.plan.compile", bool),
    "compile.model": to("train.plan.compile", bool),
    "compile.*": different("each block is compiled by itself; the loss is computed in tiles where it is large"),
    "dtype": Rule(("bf16", "fp32"), _dtype),
    "enable_activation_checkpointing": RECOMPUTE_ALL,
    "enable_activation_offloading": _offload(("activations",)),
    "fsdp_cpu_offload": _offload(("optimizer", "gradients", "parameters")),
    "fsdp.cpu_offload": _offload(("optimizer", "gradients", "parameters")),
    "fsdp_reshard_after_forward": RESHARD,
    "ac_mode": RECOMPUTE,
    "ac_option": different("selective keeps products of matrices and attention of every block"),
    "tensor_parallel_dim": to("train.plan.tp", int),
    "tensor_parallel_plan.**": unneeded("the layers to split are found"),
    "context_parallel_dim": to("train.plan.cp", int),
    "context_parallel_rotate_method": unneeded("context parallelism finds its own way"),
    "data_parallel_shard_dim": to("train.plan.dp_shard", int),
    "data_parallel_replicate_dim": to("train.plan.dp_replicate", int),
    **each("custom_sharded_layers memory_efficient_fsdp_wrap", unneeded("units are found; train.plan.shard_units names others")),
    **each("early_exit_loss early_exit_loss.** layer_dropout layer_dropout.**", refused("layers are not left out; train without it")),
    **each("enable_expandable_segments low_cpu_ram use_flex use_distributed_state_dict activation_offloading_use_streams", unneeded(
        "the trainer here does it, or does without")),
    "cudnn_deterministic_mode": different("call torch.use_deterministic_algorithms(True) in the config"),
    **each("quantizer quantizer.** fake_quant_after_n_steps enable_fp8_training", refused(
        "weights are not quantized in training; train without it, then quantize the exported model")),
    "fp8_recipe_name": unneeded("it says how fp8 works"),
    "device": different("the devices are what the start sees", str),
    "log_every_n_steps": to("train.log_every", int),
    **each("metric_logger.** profiler.** log_level log_peak_memory_stats profile_memory name debug_*", different(LOGS)),
    "run_val_every_n_steps": to("train.eval_every", int),
    "save_every_n_steps": to("train.save_every", int),
    "save_adapter_weights_only": different("engine.save_pretrained(adapters_only=True) writes the adapters", bool),
    **each("output_dir resume_from_checkpoint enable_async_checkpointing save_every_n_epochs base_model_path", different(SAVES)),
    **each("kd_loss.** kd_ratio teacher_model.** teacher_checkpointer.** ref_checkpointer.** ref_policy_checkpointer.** "
           "policy_model.** reward_* reward_*.** value_checkpointer.** ppo_* grpo_samples forward_batch_size num_steps "
           "orchestration.** inference.** postprocessing.** training.** prompt prompt.** tasks limit max_new_tokens "
           "max_generated_tokens stop_token_ids enable_kv_cache temperature top_k max_seq_length apply_chat_template include_path "
           "gamma lmbda kl_coeff min_response_length penalise_no_eos whiten_rewards", refused(_OTHER, None, ())),
}  # fmt: skip


def read(reading: Reading) -> None:
    """Follows torchtune's table, and writes out what its recipes imply."""
    follow(TABLE, reading, "torchtune")
    settings = reading.settings
    reading.imply("dtype", "train.plan.precision", "bf16", "the recipes' own")
    reading.imply("fsdp_reshard_after_forward", "train.plan.zero", 3)
    reading.imply("clip_grad_norm", "train.plan.clip_grad_norm", None)
    reading.imply("lr_scheduler", "schedule.shape", "constant", "no schedule is their default")
    if "optimizer._target_" in settings:
        imply_optimizer(reading, 1e-3, decay=0.01 if settings["optimizer._target_"].endswith("W") else 0.0)
    adapters.imply(reading, r=8, lora_alpha=16, lora_dropout=0.0)
    reading.imply("gradient_accumulation_steps", "batch.accumulate", 1)
    settings.setdefault("train.steps", "???")

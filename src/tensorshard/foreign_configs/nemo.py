"""NeMo's YAML: Lightning's Trainer around Megatron's names (facts from NeMo 2.4.0)."""

from typing import Any

from tensorshard.foreign_configs import adapters, lightning, megatron
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
    real_keys,
)
from tensorshard.foreign_configs.rules import (
    CLIP,
    DATA,
    LOGS,
    MODEL,
    RECOMPUTE,
    SAVES,
    STAGES,
    betas,
    degree,
    different,
    each,
    imply_little,
    only_if,
    ranks,
    refused,
    say_what_decays,
    schedule,
    switch,
    to,
    unneeded,
)

_NONE = ("none", "None", "null", "", False)
_OWN_WAY = "it tunes NeMo's own way of working"
_LORA = "model.peft.lora_tuning"
_LAYERS = {
    "attention_qkv": ["q_proj", "k_proj", "v_proj"], "attention_dense": ["o_proj"],
    "mlp_fc1": ["gate_proj", "up_proj"], "mlp_fc2": ["down_proj"],
}  # fmt: skip
_LAYERS |= {
    "attention": _LAYERS["attention_qkv"] + _LAYERS["attention_dense"],
    "mlp": _LAYERS["mlp_fc1"] + _LAYERS["mlp_fc2"],
}
_LAYERS["all"] = _LAYERS["attention"] + _LAYERS["mlp"]


def _megatrons() -> dict[str, Rule]:
    """Megatron's rules of the names that NeMo has under ``model.``, too."""
    names = {key.removeprefix("model.") for key in real_keys("NeMo")[1]} - {"optimizer", "fp8_hybrid"}
    return {f"model.{name}": rule for name, rule in megatron.TABLE.items() if name in names}


def _optimizer(reading: Reading, value: str) -> Outcome:
    verdict, text = lightning.OPTIM["name"].act(reading, value)
    level = {"distributed_fused_adam": 2, "mcore_distributed_optim": 1}.get(value.rpartition(".")[2].lower())
    if level is not None:
        reading.settings.setdefault("train.plan.zero", level)
        what = "states and gradients" if level == 2 else "states"
        text += f"; its {what} are sharded: train.plan.zero={reading.settings['train.plan.zero']}"
    return verdict, text


def _adapts(reading: Reading) -> bool:
    return reading.get("model.peft.peft_scheme") == "lora"


def _scheme(reading: Reading, value: str) -> Outcome:
    if value in _NONE:
        return NOT_NEEDED, "all parameters are trained"
    if value == "qlora":
        return REFUSED, adapters.QUANTIZED
    if value != "lora":
        return REFUSED, f"{value}: such adapters are not there; lora is, or others by peft in a Python config"
    return adapters.begin(reading)


def _layers(reading: Reading, value: list[Any]) -> Outcome:
    if not _adapts(reading):
        return NOT_NEEDED, "there are no adapters"
    unknown = [str(name) for name in value if name not in _LAYERS]
    if unknown:
        return REFUSED, f"{', '.join(unknown)} is not known here; {', '.join(_LAYERS)} are"
    named = list(dict.fromkeys(part for name in value for part in _LAYERS[name]))
    reading.settings["model.target_modules"] = named
    text = f"model.target_modules={named}, as Llama's layers are called in Hugging Face's models"
    if reading.get(f"{_LORA}.variant", "nemo") == "canonical" or not {"q_proj", "gate_proj"} & set(named):
        return TRANSLATED, text
    return DIFFERENT, f"{text}; each has adapters of its own, where NeMo's fused layers share one input matrix"


def _dropout(reading: Reading, value: float) -> Outcome:
    verdict, text = to("model.lora_dropout", None).act(reading, value)
    before = reading.get(f"{_LORA}.dropout_position", "post") == "pre"
    return (
        (verdict, text)
        if before or not value
        else (DIFFERENT, f"{text}, on what adapters are given; NeMo's on what they give")
    )


_OWN: Table = {
    **_megatrons(),
    "model.optim.name": Rule(str, _optimizer),
    **each("reduce_on_plateau monitor last_epoch", unneeded("it does not change the schedule"), "model.optim.sched."),
    "model.megatron_amp_O2": unneeded("master weights are always fp32", bool),
    "model.encoder_seq_length": to("text.context_length", int),
    "model.data.train_ds.max_seq_length": to("text.context_length", int),
    "model.data.train_ds.micro_batch_size": to("batch.micro", int),
    "model.data.train_ds.global_batch_size": to("batch.global", int),
    "trainer.accumulate_grad_batches": Rule(int, lambda r, v: (
        (NOT_NEEDED, "micro-batches follow from model.global_batch_size") if r.get("model.global_batch_size")
        else to("batch.accumulate", None).act(r, v))),
    **{f"trainer.sft.{name}": rule for name, rule in lightning.TRAINER.items()},  # NeMo-Aligner's
    "trainer.sft.save_interval": to("train.save_every", int),
    **each("dpo.** rm.** ppo.** rs.** kto.** spin.** knowledge_distillation.**", refused(
        "a loop of NeMo-Aligner's own is not read; write its loss with a model, loss_fn(model, batch), in a Python config", None, ()),
        "trainer."),
    "model.seed": to("train.seed", int),
    "model.activations_checkpoint_granularity": RECOMPUTE,
    **each("model.activations_checkpoint_* model.num_micro_batches_with_partial_activation_checkpoints",
           different("train.plan.recompute says it for every block")),
    "model.cpu_offloading": refused("train.plan.offload.activations=cpu moves those of all blocks", bool),
    **each("model.cpu_offloading_*", unneeded("it belongs to cpu_offloading")),
    **each("model.fp8", refused("fp8 is not there; bf16 is")),
    **each("model.fp8_* model.reduce_amax model.tp_only_amax_red model.skip_fp8_*", unneeded("it says how fp8 works")),
    "model.fsdp": switch("train.plan.zero", 3),
    "model.fsdp_sharding_strategy": only_if("model.fsdp", Rule(("full", "hybrid", "grad"), lambda r, v: (
        to("train.plan.zero", None).act(r, 2 if v == "grad" else 3))), "fsdp is off"),
    "model.fsdp_grad_reduce_dtype": only_if("model.fsdp", to("train.plan.reduce_dtype", None, lambda kind: (
        {"bf16": "bf16", "16": "fp16"}.get(str(kind).removesuffix("-mixed")))), "fsdp is off"),
    **each("model.fsdp_*", unneeded(_OWN_WAY)),
    "model.expert_model_parallel_size": degree("ep"),
    **each("model.pipeline_model_parallel_split_rank model.num_layers_in_*_pipeline_stage", different(STAGES)),
    **each("model.native_amp_* model.hysteresis", different("the scale adapts by itself")),
    "model.precision": unneeded("trainer.precision counts"),
    **each("gradient_as_bucket_view gradient_accumulation_fusion grad_div_ar_fusion grad_allreduce_chunk_size_mb "
           "async_grad_allreduce sync_batch_comm sharp ub_tp_* gc_interval get_attention_mask_from_fusion onnx_safe "
           "apex_transformer_log_level use_emha validation_param_sync_overlap cluster_type "
           "distributed_adam_bucket_merge_size pipeline_model_parallel_comm_backend with_fp32_embedding_grads "
           "fp16_lm_cross_entropy", unneeded(_OWN_WAY), "model."),
    **each("model.nsys_profile.*", different("train.profile=10-12 writes traces")),
    **each("model.enable_megatron_timers model.megatron_timer_kwargs.* model.log_token_counts", different(LOGS)),
    **each("save_nemo_on_validation_end resume_from_checkpoint dist_ckpt_* restore_from_ckpt pretrained_checkpoint.* "
           "save_nemo_on_train_end", different(SAVES), "model."),
    "model.restore_from_path": different("model.pretrained=DIR names the weights, as Hugging Face writes them"),
    "model.do_layer_norm_weight_decay": unneeded("it is settled by the line of the optimizer's decay"),
    **each("model.reset_lr model.reset_lr_steps model.skip_train", refused("a resumed run goes by its own config", bool)),
    "model.tokenizer.*": different(MODEL),
    **each("model.data.** model.answer_only_loss model.train_ds.** model.validation_ds.** model.test_ds.**", different(DATA)),
    "model.peft._target_": refused("NeMo 2's recipes name classes; peft_scheme: lora is read"),
    "model.peft.peft_scheme": Rule(str, _scheme),
    **each("model.peft.restore_from_path model.peft.restore_from_ckpt.* model.peft.restore_from_ckpt_name",
           refused("new adapters are trained; engine.load_adapters reads some", None, _NONE)),
    f"{_LORA}.target_modules": Rule(list, _layers),
    **adapters.numbers(_adapts, {"adapter_dim": "r", "alpha": "lora_alpha"}, f"{_LORA}."),
    f"{_LORA}.adapter_dropout": Rule(float, lambda r, v: (
        _dropout(r, v) if _adapts(r) else (NOT_NEEDED, "there are no adapters"))),
    f"{_LORA}.weight_tying": adapters.others(_adapts, "adapters of all layers are apart; set it to false"),
    f"{_LORA}.layer_selection": adapters.others(_adapts, "adapters are for all layers; set it to null"),
    **each("variant dropout_position", unneeded("it is settled by the other lines of lora_tuning"), f"{_LORA}."),
    f"{_LORA}.*": unneeded("adapters begin as peft's do: they change nothing at first"),
    "model.peft.**": unneeded("it says how other adapters are made"),
    "optim._target_": different("optim.config says which optimizer it is", str),
    "optim.config._target_": different("optim.config says which optimizer it is", str),
    **{f"optim.config.{name}": rule for name, rule in lightning.OPTIM.items() if "." not in name and name != "_target_"},
    "optim.config.optimizer": lightning.OPTIM["name"],
    "optim.config.clip_grad": CLIP,
    "optim.config.use_distributed_optimizer": switch("train.plan.zero", 1),
    "optim.config.bf16": switch("train.plan.precision", "bf16"),
    "optim.config.fp16": switch("train.plan.precision", "fp16"),
    "optim.config.adam_beta1": betas(0),
    "optim.config.adam_beta2": betas(1),
    "optim.lr_scheduler._target_": Rule(str, lambda r, v: schedule(
        {"CosineAnnealingScheduler": "cosine", "WarmupAnnealingScheduler": "linear"}).act(r, v.rpartition(".")[2])),
    "optim.lr_scheduler.warmup_steps": to("schedule.warmup", int),
    "optim.lr_scheduler.min_lr": to("schedule.min_lr", float),
    "optim.lr_scheduler.max_steps": to("schedule.total", int),
    "optim.lr_scheduler.constant_steps": to("schedule.hold", int),
    "plugins._target_": different("train.plan.precision says it", str),
    "plugins.precision": Rule(None, lightning.precision),
    "plugins.*": different("train.plan.precision says it"),
    **{name.removeprefix("trainer."): rule for name, rule in lightning.TABLE.items() if name.startswith("trainer.strategy.")},
    "allow_tf32": different("torch.set_float32_matmul_precision('high') in the config says it", bool),
    "exp_manager.ema.enable": refused("a loop of your own keeps an average of the weights (docs/your-own-loop.md)", bool),
    "exp_manager.ema.*": unneeded("it belongs to exp_manager.ema.enable"),
    **each("run.** s3_checkpointing.** callbacks.** log.** logger.** ", different(SAVES)),
}  # fmt: skip
TABLE: Table = {**_OWN, **{key: rule for key, rule in lightning.TABLE.items() if key not in _OWN}}


def read(reading: Reading) -> None:
    """Follows NeMo's table, and writes out what it implies."""
    ranks(reading, "trainer.devices", "trainer.num_nodes")
    follow(TABLE, reading, "NeMo")
    settings = reading.settings
    imply_little(reading)
    if "optimizer._target_" in settings:
        of_torch = reading.get("model.optim.name") == "adamw"
        imply_optimizer(reading, 1e-3, decay=0.01 if of_torch else 0.0)
        if settings["optimizer.weight_decay"]:
            say_what_decays(reading, "NeMo")
    rank = settings.get("model.r", 32)
    adapters.imply(reading, r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=_LAYERS["attention_qkv"])

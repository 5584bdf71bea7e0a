"""What an import makes of a file is what the file's own program resolves.

The values were printed by the program's own parser where it could be installed: Accelerate 1.15.0, DeepSpeed 0.19.8,
axolotl 0.19.0 and LLaMA-Factory 0.9.5. Those of torchtitan 0.3.0, Megatron-LM and NeMo, which need packages for a
GPU, are read from their sources: the dataclasses of configs.py, the defaults of arguments.py, Lightning's Trainer and
NeMo's lr_scheduler.py.
"""

import math
from typing import Any

import pytest
import torch

from tensorshard.foreign_configs import read_config, read_file
from tensorshard.trainer.schedulers import warmup_decay

ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
"""
DEEPSPEED = """{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5,
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true},
"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}"""
AXOLOTL = """
base_model: x
datasets: [{path: y, type: alpaca}]
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 1000
sequence_len: 512
learning_rate: 2e-4
optimizer: adamw_torch
lr_scheduler: cosine
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
bf16: true
"""
LLAMA_FACTORY = """
stage: sft
model_name_or_path: x
dataset: alpaca_en_demo
template: llama3
finetuning_type: lora
lora_rank: 4
cutoff_len: 512
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
max_steps: 300
warmup_steps: 0.1
lr_scheduler_type: cosine
"""
TORCHTITAN = """
def only() -> Trainer.Config:
    return Trainer.Config(optimizer=default_adamw(lr=3e-4), parallelism=ParallelismConfig(tensor_parallel_degree=2),
                          training=TrainingConfig(max_context_length=4096, steps=50))
"""
MEGATRON = "torchrun pretrain_gpt.py --micro-batch-size 2 --global-batch-size 32 --lr 3e-4 --train-iters 1000 \\\n" \
    "  --lr-warmup-iters 20 --tensor-model-parallel-size 2 --bf16\n"  # fmt: skip
NEMO = """
trainer: {max_steps: 1000, precision: bf16, gradient_clip_val: 1.0}
model:
  tensor_model_parallel_size: 2
  micro_batch_size: 2
  global_batch_size: 32
  optim:
    name: fused_adam
    lr: 2e-4
    weight_decay: 0.01
    betas: [0.9, 0.98]
    sched: {name: CosineAnnealing, warmup_ratio: 0.0335, min_lr: 2e-5}
"""
ADAMW = {"optimizer._target_": "torch.optim.AdamW", "optimizer.eps": 1e-8, "optimizer.betas": [0.9, 0.999]}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accelerate": ("a.yaml", ACCELERATE, {
        "train.plan.precision": "bf16", "train.plan.zero": 2, "train.plan.recompute": "full",
        "train.plan.offload": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"}}),
    "deepspeed": ("ds.json", DEEPSPEED, {
        **ADAMW, "train.global_batch_size": 8, "train.plan.micro_batches": 1, "train.plan.clip_grad_norm": 0.5,
        "train.plan.zero": 3, "train.plan.precision": "bf16", "optimizer.lr": 1e-3, "scheduler.shape": "cosine",
        "scheduler.warmup_steps": 10, "scheduler.warmup_shape": "log", "scheduler.min_ratio": 1e-4}),
    "axolotl": ("a.yaml", AXOLOTL, {
        **ADAMW, "train.plan.micro_batches": 4, "train.global_batch_size": 32, "train.steps": 1000,
        "optimizer.lr": 2e-4, "optimizer.weight_decay": 0.0, "train.plan.clip_grad_norm": 1.0,
        "scheduler.warmup_steps": 30, "model.r": 8, "model.lora_alpha": 16.0,
        "model.lora_dropout": 0.0, "train.plan.recompute": None, "text.context_length": 512}),
    "llama-factory": ("a.yaml", LLAMA_FACTORY, {
        **ADAMW, "train.plan.micro_batches": 4, "train.steps": 300, "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.0,
        "train.plan.clip_grad_norm": 1.0, "train.plan.precision": "fp32", "train.plan.recompute": "full",
        "scheduler.warmup_steps": 30, "scheduler.shape": "cosine", "model.r": 4, "model.lora_alpha": 8,
        "model.lora_dropout": 0.0, "model.target_modules": "all-linear", "text.context_length": 512}),
    "torchtitan": ("registry.py", TORCHTITAN, {
        **ADAMW, "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.1, "optimizer.lr": 3e-4,
        "train.plan.zero": 3,
        "train.plan.clip_grad_norm": 1.0, "train.plan.precision": "bf16", "train.plan.recompute": "selective",
        "train.global_batch_size": 4 * 2, "scheduler.warmup_steps": 200, "train.plan.sequence_parallel": True}),
    "megatron": ("run.sh", MEGATRON, {
        **ADAMW, "optimizer.weight_decay": 0.01, "train.plan.clip_grad_norm": 1.0, "train.plan.micro_batches": 8,
        "train.plan.zero": 0, "scheduler.shape": "linear", "scheduler.warmup_steps": 20, "scheduler.min_ratio": 0.0}),
    "nemo": ("n.yaml", NEMO, {
        "optimizer.betas": [0.9, 0.98], "optimizer.weight_decay": 0.01, "train.plan.clip_grad_norm": 1.0,
        "train.plan.micro_batches": 8, "scheduler.shape": "cosine", "scheduler.warmup_steps": 34,
        "scheduler.total_steps": 1001, "scheduler.offset": 1, "scheduler.min_ratio": 0.1}),
}  # fmt: skip


@pytest.mark.parametrize("program", CASES)
def test_an_import_is_what_the_program_resolves(program, tmp_path):
    name, text, resolved = CASES[program]
    (tmp_path / name).write_text(text)
    ledger = read_file(tmp_path / name, program, world_size={"accelerate": 8}.get(program, 4))
    assert not ledger.refused, ledger.describe()
    assert {key: ledger.settings.get(key) for key in resolved} == resolved


@pytest.mark.parametrize("constant", [0, 20])
def test_rates_are_those_of_nemos_cosine(constant):
    warmup, steps, low = 10, 100, 0.1
    sched = {"name": "CosineAnnealing", "warmup_steps": warmup, "constant_steps": constant, "min_lr": low}
    optim = {"name": "fused_adam", "lr": 1.0, "sched": sched}
    config = {"trainer": {"max_steps": steps}, "model": {"tensor_model_parallel_size": 1, "optim": optim}}
    settings = read_config("nemo", config).settings
    assert settings["train.steps"] == steps

    def theirs(step: int) -> float:
        if step <= warmup:
            return step / warmup if constant else (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / (steps - constant - warmup))
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done))

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    arguments = {key[10:]: value for key, value in settings.items() if key.startswith("scheduler.")}
    schedule = warmup_decay(optimizer, **{key: value for key, value in arguments.items() if key != "_target_"})
    assert [schedule.lr_lambdas[0](step) for step in range(steps)] == pytest.approx([theirs(s) for s in range(steps)])

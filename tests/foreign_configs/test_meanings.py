"""Values that mean another thing than their name says, in files of other programs."""

import copy

import pytest

from tensorshard.foreign_configs import read_config

PADDLE = {
    "Global": {"local_batch_size": 1, "micro_batch_size": 1},
    "Engine": {"run_mode": "epoch", "max_steps": 100, "eval_freq": 1, "eval_iters": -1, "accumulate_steps": 4},
    "Distributed": {"dp_degree": 8, "sharding": {"sharding_degree": 1, "sharding_stage": 1}},
    "Data": {"Train": {"sampler": {"batch_size": 32}}},
    "Model": {"module": "GeneralClsModule"},
    "Optimizer": {"name": "FusedAdamW", "weight_decay": 0.01},
}
NEMO = {
    "trainer": {"max_steps": 100, "precision": "bf16", "devices": 4, "num_nodes": 2, "accumulate_grad_batches": 1},
    "model": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
        "micro_batch_size": 1, "global_batch_size": 8, "fp8": False, "fp8_hybrid": True,
        "max_position_embeddings": "${.encoder_seq_length}", "encoder_seq_length": 512,
        "data": {"train_ds": {"micro_batch_size": "${training.model.micro_batch_size}"}},
        "optim": {"name": "mcore_distributed_optim", "lr": 1e-4, "weight_decay": 0.1},
    },
}  # fmt: skip


def test_what_paddle_loads_and_counts():
    ledger = read_config("paddle", PADDLE)
    settings = ledger.settings
    assert not ledger.refused, ledger.describe()
    assert (ledger.plan["dp_shard"], ledger.plan["zero"], ledger.plan["micro_batches"]) == (8, 0, 1)
    assert settings["train.global_batch_size"] == 32 * 8 and settings["train.steps"] == "???"
    assert "train.eval_every" not in settings and settings["train.eval_batches"] is None
    assert "Paddle decays matrices alone" in ledger.describe(300)
    language = {**copy.deepcopy(PADDLE), "Model": {"module": "GPTModule"}}
    assert read_config("paddle", language).settings["train.global_batch_size"] == 8


def test_paddles_sharding_is_of_stage_2_and_the_rest_are_replicas():
    config = {**PADDLE, "Distributed": {"mp_degree": 2, "sharding": {"sharding_degree": 4}}}
    plan = read_config("paddle", config, world_size=16).plan
    assert (plan["zero"], plan["dp_shard"], plan["dp_replicate"], plan["tp"]) == (2, 4, 2, 2)


def test_nemos_ranks_batches_and_references():
    ledger = read_config("nemo", NEMO)
    assert not ledger.refused, ledger.describe()
    plan = ledger.plan
    assert (ledger.world_size, plan["micro_batches"], plan["zero"]) == (8, 4, 1)
    assert (plan["pp_schedule"], plan["pp_stages_per_rank"]) == ("interleaved_1f1b", 2)
    assert ledger.settings["text.context_length"] == 512
    optimizer = {key[10:]: value for key, value in ledger.settings.items() if key.startswith("optimizer.")}
    assert optimizer["weight_decay"] == 0.1 and optimizer["eps"] == 1e-8 and optimizer["betas"] == [0.9, 0.999]
    assert "NeMo decays matrices alone" in ledger.describe(300)


def test_the_length_of_samples_is_said_to_be_ours():
    said = {entry.key: entry.text for entry in read_config("deepspeed", {"zero_optimization": {"stage": 1}}).entries}
    assert "text.context_length=256" in said["length of samples"]
    assert "length of samples" not in {entry.key for entry in read_config("nemo", NEMO).entries}


@pytest.mark.parametrize(
    ("source", "config", "key", "words"),
    [
        ("torchtitan", {"trainer": {"optimizer": {"lr": 1e-4}}}, "trainer.optimizer.lr", "reinforcement learning"),
        ("nemo", {"exp_manager": {"ema": {"enable": True}}}, "exp_manager.ema.enable", "average of the weights"),
        ("llama-factory", {"stage": "sft", "finetuning_type": "lora", "adapter_name_or_path": "x"},
         "adapter_name_or_path", "new adapters are trained"),
        ("nemo", {"trainer": {"dpo": {"max_steps": 5}}}, "trainer.dpo.max_steps", "loop of NeMo-Aligner's own"),
        ("accelerate", {"ec2_instance_type": "x"}, "ec2_instance_type", "Amazon SageMaker"),
        ("torchtitan", {"checkpoints": {"enable": True}}, "checkpoints.enable", "nearest is 'checkpoint.enable'"),
    ],
)  # fmt: skip
def test_reasons(source, config, key, words):
    told = {entry.key: entry.text for entry in read_config(source, config).refused}
    assert words in told[key]


def test_what_belongs_to_megatrons_backend_of_llama_factory_is_known():
    config = {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "x", "bias_activation_fusion": True}
    assert not read_config("llama-factory", {**config, "apply_rope_fusion": True}).refused

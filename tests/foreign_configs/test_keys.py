"""The keys that programs have at a named release: none of them is said to be unknown."""

import dataclasses

import pytest

from tensorshard.foreign_configs import accelerate, libai, read_config, torchtitan, torchtune, trainers
from tensorshard.foreign_configs.ledger import real_keys, rule_of

PROGRAMS = "Accelerate DeepSpeed LLaMA-Factory LiBai Lightning Megatron NeMo Paddle axolotl torchtitan torchtune"
SOURCES = {name: name.lower() for name in PROGRAMS.split()}


@pytest.mark.parametrize("program", SOURCES)
def test_a_real_key_is_never_said_to_be_unknown(program):
    config = dict.fromkeys(real_keys(program)[1], "x")
    assert len(config) > 30 and real_keys(program)[0]
    told = {entry.key: entry.text for entry in read_config(SOURCES[program], config).entries}
    assert set(config) <= set(told) and not [key for key in config if "no such key" in told[key]]
    [invented] = [e for e in read_config(SOURCES[program], {"qwzx.vbnm": 1}).refused if e.key == "qwzx.vbnm"]
    assert "no such key" in invented.text


@pytest.mark.parametrize(
    ("program", "table"),
    [
        ("Accelerate", accelerate.TABLE),
        ("torchtitan", torchtitan.TABLE),
        ("LLaMA-Factory v1", trainers.LLAMA_FACTORY_V1),
        ("LiBai", libai.TABLE),
        ("torchtune", torchtune.TABLE),
    ],
)
def test_these_tables_have_every_key(program, table):
    groups = {pattern.rpartition(".")[0] for pattern in table}
    assert not [key for key in real_keys(program)[1] if rule_of(table, key) is None and key not in groups]


def test_what_nothing_here_does_names_the_release():
    [entry] = [e for e in read_config("axolotl", {"base_model": "x", "use_pose": True}).refused if e.key == "use_pose"]
    assert entry.text.startswith("axolotl 0.19.0 has this key, and nothing here does its work")


def test_lists_are_those_of_the_installed_programs():
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from transformers import TrainingArguments

    fields = {field.name for field in dataclasses.fields(config_args.ClusterConfig)}
    assert {name for name in fields if not name.endswith("_config")} == {
        k for k in real_keys("Accelerate")[1] if "." not in k
    }
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= real_keys("LLaMA-Factory")[1]


def test_sequences_that_are_whole_leave_context_parallelism_alone():
    group = {
        "parallelism_config_cp_size": 2,
        "parallelism_config_sp_size": 1,
        "parallelism_config_sp_backend": "deepspeed",
    }
    ledger = read_config("accelerate", {"distributed_type": "FSDP", "parallelism_config": group})
    assert not ledger.refused and ledger.plan["cp"] == 2


def test_llama_factory_recomputes_unless_it_is_told_not_to():
    config = {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "x"}
    changes = {}, {"gradient_checkpointing": False}, {"disable_gradient_checkpointing": True}
    plans = [read_config("llama-factory", {**config, **change}).plan for change in changes]
    assert [plan["recompute"] for plan in plans] == ["full", "full", "none"]


def test_a_slip_of_the_pen_in_a_group_of_real_keys_is_found():
    told = {
        entry.key: entry
        for entry in read_config("megatron", {"log_energy": "", "log_intervall": 5, "lr": 1e-4}).entries
    }
    assert told["log_energy"].verdict == "different"
    assert told["log_intervall"].verdict == "refused" and "log_interval" in told["log_intervall"].text


@pytest.mark.parametrize(
    ("program", "slip", "meant"),
    [
        ("torchtune", "gradient_accumulation_step", "gradient_accumulation_steps"),
        ("torchtune", "model.lora_rnk", "model.lora_rank"),
        ("LiBai", "train.dist.tensor_parallel_sise", "train.dist.tensor_parallel_size"),
        ("LiBai", "optim.weigth_decay", "optim.weight_decay"),
        ("Paddle", "Distributed.sharding.sharding_stages", "Distributed.sharding.sharding_stage"),
        ("Paddle", "Engine.logging_frequ", "Engine.logging_freq"),
        ("NeMo", "model.tensor_model_parallel_sise", "model.tensor_model_parallel_size"),
        ("NeMo", "trainer.gradient_clip_value", "trainer.gradient_clip_val"),
        ("NeMo", "model.peft.lora_tuning.adapter_dims", "model.peft.lora_tuning.adapter_dim"),
    ],
)
def test_a_slip_of_the_pen_is_found_with_the_nearest_key(program, slip, meant):
    [entry] = [entry for entry in read_config(SOURCES[program], {slip: 2}).refused if entry.key == slip]
    assert entry.text == f"{program} knows no such key; the nearest is {meant!r}"


def test_a_key_of_ones_own_in_an_open_group_is_no_slip():
    config = {"model.layers_of_mine": 2, "model.hidden_size_2": 8, "model.data.train_ds.of_mine": "x"}
    assert not [entry for entry in read_config("nemo", config).refused if entry.key in config]

"""Configs of other programs: no key is silent, wrong ones are found, and the Plan is the one that was asked for."""

import copy
import json
import math
import random

import pytest
import torch

import tensorshard as ts
from tensorshard.cli import main
from tensorshard.foreign_configs import export, read_config, read_file, shell
from tensorshard.foreign_configs.ledger import flat
from tensorshard.trainer.schedulers import warmup_decay

DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "overlap_comm": True, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": "auto"}},
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": False,
    "num_processes": 4,
    "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_use_orig_params": True},
}
TORCHTITAN = {
    "parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": -1},
    "training": {"local_batch_size": 4, "steps": 100, "seq_len": 512},
    "optimizer": {"name": "AdamW", "lr": 1e-3},
    "lr_scheduler": {"warmup_steps": 10, "decay_type": "cosine", "min_lr_factor": 0.1},
}
MEGATRON = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1, "lr": 1e-4,
            "global_batch_size": 8, "bf16": "", "use_distributed_optimizer": "", "train_iters": 50}  # fmt: skip
LIBAI = {"train": {"train_micro_batch_size": 4, "amp": {"enabled": True},
    "zero_optimization": {"enabled": True, "stage": 2}, "dist": {"tensor_parallel_size": 2}}}  # fmt: skip
PADDLE = {"Global": {"micro_batch_size": 2}, "Distributed": {"mp_degree": 2, "sharding": {"sharding_degree": 2,
          "sharding_stage": 2}}, "Engine": {"max_steps": 10, "mix_precision": {"enable": True}}}  # fmt: skip
AXOLOTL = {"base_model": "x", "micro_batch_size": 2, "sequence_len": 512, "bf16": "auto", "learning_rate": "2e-5",
           "optimizer": "adamw_torch", "fsdp": ["full_shard", "auto_wrap"], "max_steps": 10}  # fmt: skip
LLAMA_FACTORY = {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "x", "cutoff_len": 128,
                 "per_device_train_batch_size": 1, "warmup_ratio": 0.1, "max_steps": 100, "bf16": True}  # fmt: skip
LIGHTNING = {"trainer": {"max_steps": 10, "precision": "bf16-mixed", "strategy": "ddp", "gradient_clip_val": 1.0}}
NEMO = {"trainer": {"max_steps": 10, "precision": "bf16"}, "model": {"tensor_model_parallel_size": 2,
        "micro_batch_size": 1, "global_batch_size": 4, "optim": {"name": "fused_adam", "lr": "2e-4"}}}  # fmt: skip
FSDP = {"sharding_strategy": "SHARD_GRAD_OP", "activation_checkpointing": True}
TORCHTUNE = {
    "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_rank": 16, "lora_alpha": 32,
              "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/models/x"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 512},
    "batch_size": 2, "gradient_accumulation_steps": 4, "dtype": "bf16", "epochs": 2, "max_steps_per_epoch": 50,
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"},
    "lr_scheduler": {"_component_": "torchtune.training.get_cosine_schedule_with_warmup", "num_warmup_steps": 5},
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "tensor_parallel_dim": 2, "fsdp_cpu_offload": True, "enable_activation_checkpointing": True,
}  # fmt: skip
FACTORY_V1 = {"model": "x", "model_class": "llm", "dist_config": {"name": "fsdp2"}, "micro_batch_size": 1,
              "max_steps": 10, "peft_config": {"name": "lora", "r": 16, "target_modules": "all"}}  # fmt: skip
ALL = {"deepspeed": DEEPSPEED, "torchtune": TORCHTUNE, "accelerate": ACCELERATE, "torchtitan": TORCHTITAN,
       "megatron": MEGATRON, "libai": LIBAI, "paddle": PADDLE, "axolotl": AXOLOTL,
       "llama-factory": LLAMA_FACTORY, "lightning": LIGHTNING,
       "nemo": NEMO, "fsdp": FSDP}  # fmt: skip


@pytest.mark.parametrize("source", ALL)
def test_each_key_has_one_entry_and_the_plan_resolves(source):
    config = ALL[source]
    assert read_config(None, config).source == source
    ledger = read_config(source, config, world_size=4)
    keys = [entry.key for entry in ledger.entries if entry.value != "(implied)"]
    assert sorted(keys) == sorted(".".join(path) for path, _ in flat(config))
    assert not ledger.refused, ledger.describe()
    method = getattr(ts.Plan, "from_" + source.replace("-", "_"))
    plan = method(config, world_size=4)
    plan.resolve(4)
    assert plan.ledger.entries == ledger.entries


def test_degrees_of_experts_are_translated():
    megatron = ts.Plan.from_megatron({**MEGATRON, "expert_model_parallel_size": 2}, world_size=8)
    torchtitan = copy.deepcopy(TORCHTITAN)
    torchtitan["parallelism"]["expert_parallel_degree"] = 2
    nemo = copy.deepcopy(NEMO)
    nemo["model"]["expert_model_parallel_size"] = 2
    plans = [megatron, ts.Plan.from_torchtitan(torchtitan, world_size=8), ts.Plan.from_nemo(nemo, world_size=8)]
    plans.append(ts.Plan.from_axolotl({**AXOLOTL, "expert_parallel_size": 2}, world_size=8))
    assert [plan.ep for plan in plans] == [2, 2, 2, 2]
    split = {**MEGATRON, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
    assert (
        "each expert is split over all ranks of train.plan.tp"
        in read_config("megatron", split, world_size=8).describe()
    )


def test_what_deepspeed_asked_for():
    plan = ts.Plan.from_deepspeed(DEEPSPEED, world_size=2)
    assert (plan.zero, plan.precision, plan.clip_grad_norm, plan.micro_batches) == (3, "bf16", 1.0, 4)
    assert plan.offload == ts.Offload(optimizer="cpu", gradients="cpu")
    settings = plan.ledger.settings
    assert settings["optimizer._target_"] == "torch.optim.AdamW"  # their Adam decouples the decay
    assert (settings["optimizer.lr"], settings["scheduler.warmup_shape"]) == (5e-5, "log")
    assert ts.Plan.from_deepspeed({"train_batch_size": 2}).zero == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"offload_optimizer": {"device": "cpu"}}, "move it to 'zero_optimization.offload_optimizer.device'"),
        ({"gradient_accumulation_steps ": 2}, "has a blank at an end"),
        ({"bf16": {"enabled": "true"}}, "'true' is text"),
        ({"gradient_cliping": 1.0}, "the nearest is 'gradient_clipping'"),
        ({"zero_optimization": 2}, "is a group of keys"),
        ({"fp16": {"enabled": True}}, "both on"),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parametrs": 1}}, "stage3_max_live_parameters"),
        ({"optimizer": {"type": "OneBitAdam"}}, "no exact counterpart of OneBitAdam"),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5}, "are not 3 samples a rank x 5"),
    ],
)
def test_wrong_keys_are_found(change, words):
    with pytest.raises(ValueError, match=r"(?s).+") as caught:
        ts.Plan.from_deepspeed({**DEEPSPEED, **change}, world_size=2)
    assert words in str(caught.value)


def test_yaml_no_and_keys_of_another_version():
    text = read_config("accelerate", ACCELERATE).describe()
    assert "YAML reads NO without quotes as False" in text
    assert "a version-1 key under fsdp_version: 2" in text
    assert read_config("accelerate", ACCELERATE).plan["zero"] == 2


def test_mutated_configs_are_read_or_refused():
    values = [None, "true", -1, 0, 1e300, float("nan"), [], {}, "NO", {"a": {"b": 1}}, [1, "x"], "auto", True, "${X}"]
    chance = random.Random(0)
    for source, config in ALL.items():
        for _ in range(150):
            mutated = copy.deepcopy(config)
            group = mutated
            key = chance.choice(list(group))
            while isinstance(group[key], dict) and group[key] and chance.random() < 0.7:
                group = group[key]
                key = chance.choice(list(group))
            kind = chance.randrange(3)
            value = group.pop(key)
            if kind == 1:
                group[key[:-1] + chance.choice("xyz ")] = value
            elif kind == 2:
                group[key] = chance.choice(values)
            ledger = read_config(source, mutated, world_size=4)
            found = {entry.key for entry in ledger.entries}
            assert {".".join(path) for path, _ in flat(mutated) if path} <= found
            if not ledger.refused:
                try:
                    ts.Plan(**ledger.plan).resolve(4)
                except (ValueError, TypeError) as error:
                    assert len(str(error)) > 20


def test_a_launch_script_is_followed(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(
        "TP=2\nMBS=${MBS:-4}\nMODEL_ARGS=(\n    --num-layers 8 # a remark\n    --tensor-model-parallel-size ${TP}\n)\n"
        'TRAIN="--micro-batch-size $MBS --global-batch-size $((MBS * 4)) --lr 1e-4 --bf16"\n'
        "torchrun pretrain_gpt.py ${MODEL_ARGS[@]} \\\n    $TRAIN --use-distributed-optimizer\n"
    )
    ledger = read_file(script, given={"TP": 4}, world_size=4)
    assert not ledger.refused, ledger.describe()
    assert (ledger.plan["tp"], ledger.plan["zero"], ledger.plan["precision"]) == (4, 1, "bf16")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --bf16 2>&1 | tee log", {"nproc_per_node": "8", "bf16": ""}),
        ("torchrun --standalone pretrain_gpt.py --split 9,1 > $LOG &", {"standalone": "", "split": "9,1"}),
        ("srun --exclusive --ntasks 4 -p x python -u a.py --lr 1 && b", {"exclusive": "", "ntasks": "4", "lr": "1"}),
        ("torchrun --nnodes=1 -m pretrain --data-path 0.5 a 0.5 b", {"nnodes": "1", "data_path": "0.5 a 0.5 b"}),
        ("torchrun --nnodes 1 $MORE a.py --spec local.py", {"nnodes": "1 $MORE", "spec": "local.py"}),
    ],
)  # fmt: skip
def test_the_program_of_a_launcher_is_no_value_of_an_option(line, expected):
    assert shell.arguments(line, {}) == expected


def test_a_yaml_that_points_to_a_json(tmp_path):
    (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 2}')
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: zero.json\n"
    )
    ledger = read_file(tmp_path / "a.yaml")
    assert not ledger.refused and ledger.plan["zero"] == 1


def test_a_deepspeed_file_beside_a_trainers_arguments(tmp_path):
    theirs = {"zero_optimization": {"stage": 3}, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps({**theirs, "train_micro_batch_size_per_gpu": "auto"}))
    lines = ["stage: sft", "per_device_train_batch_size: 2", "max_grad_norm: 0.5", "deepspeed: ds.json"]
    (tmp_path / "sft.yaml").write_text("\n".join(lines))
    ledger = read_file(tmp_path / "sft.yaml", source="llama-factory", world_size=2)
    assert not ledger.refused, ledger.describe()
    assert ledger.plan["clip_grad_norm"] == 0.5 and ledger.settings["train.global_batch_size"] == 4
    assert "deepspeed.train_micro_batch_size_per_gpu = auto: samples of a rank in a micro-batch=2" in ledger.describe()

    (tmp_path / "ds.json").write_text(json.dumps({**theirs, "train_micro_batch_size_per_gpu": 4}))
    ledger = read_file(tmp_path / "sft.yaml", source="llama-factory", world_size=2)
    (refused,) = ledger.refused
    assert refused.key == "deepspeed.train_micro_batch_size_per_gpu" and "says 2" in refused.text


def test_the_command_writes_a_config_that_trains_once_it_is_filled(tmp_path, capsys):
    from tensorshard.config import load_config

    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "x": 1}'
    )
    assert main(["import", str(tmp_path / "ds.json")]) == 1
    assert "--without 'x'" in capsys.readouterr().err
    written = tmp_path / "ours.yaml"
    assert main(["import", str(tmp_path / "ds.json"), "--without", "x", "--output", str(written)]) == 0
    assert "still to be filled in: model.pretrained, text.files" in capsys.readouterr().out
    config = load_config(written, ["model.pretrained=m", "text.files=t"])
    assert config.train.plan.zero == 2 and config.data.train.tokenizer == "m"


@pytest.mark.parametrize("program", ["deepspeed", "accelerate", "torchtitan"])
def test_the_way_back_is_read_again(program):
    plan = ts.Plan(dp_shard=4, zero=3, micro_batches=2, precision="bf16", clip_grad_norm=1.0)
    config = export(program, plan.to_dict(), {"train.global_batch_size": 8})
    back = read_config(program, config, world_size=4)
    assert not back.refused, back.describe()
    assert (back.plan["zero"], back.plan["precision"]) == (3, "bf16")
    with pytest.raises(ValueError, match="no counterpart"):
        export(program, ts.Plan(zero=1, pp=2, recompute="selective").to_dict())
    assert (
        program != "torchtitan"
        or export(program, ts.Plan(ep=2).to_dict())["parallelism"]["expert_parallel_degree"] == 2
    )
    for field, value in dict(tiles=4, logits="tiled", cp_order="zigzag", shard_units=["blocks.*"]).items():
        with pytest.raises(ValueError, match=f"no counterpart of {field}="):
            export(program, ts.Plan(**{field: value}).to_dict())


def test_the_schedule_counts_as_deepspeed():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_decay(optimizer, warmup_steps=4, total_steps=8, warmup_shape="log", offset=-1)
    rates = []
    for _ in range(9):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    expected = [0, 0, *(math.log(n) / math.log(4) for n in (2, 3, 4)), 1, 0.75, 0.5, 0.25]
    assert rates == pytest.approx(expected)


def test_what_a_program_has_no_place_for_is_said(tmp_path, capsys):
    path = tmp_path / "plan.yaml"
    path.write_text("zero: 3\nclip_grad_norm: 1.0\n")
    assert main(["export-config", str(path), "--to", "accelerate"]) == 0
    out, err = capsys.readouterr()
    assert "set them in accelerate's script: clip_grad_norm=1.0" in err and "fsdp_config" in out
    assert main(["export-config", str(path), "--to", "deepspeed"]) == 0
    assert not capsys.readouterr().err


def test_python_that_is_no_config_is_refused(tmp_path):
    path = tmp_path / "bert.py"
    path.write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n")
    with pytest.raises(ValueError, match=r"read and not run: it is no config of LiBai's, has no function"):
        read_file(path, world_size=4)


@pytest.mark.parametrize(
    ("params", "decay"), [({"lr": 1e-3}, 0.0), ({"torch_adam": True}, 0.01), ({"weight_decay": 0.3}, 0.3)]
)
def test_the_decay_of_deepspeeds_adam_is_that_of_its_implementation(params, decay):
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": params}}
    ledger = ts.Plan.from_deepspeed(config, world_size=2).ledger
    assert ledger is not None and ledger.settings["optimizer.weight_decay"] == decay


def test_auto_is_what_the_program_fills_in():
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    ledger = read_config("deepspeed", {**DEEPSPEED, "scheduler": scheduler})
    assert ledger.settings["scheduler.warmup_steps"] == 2  # the Trainer's 0, of which DeepSpeed makes 2
    assert ledger.settings["scheduler.total_steps"] == "${train.steps}"
    assert not any("1000" in entry.text for entry in ledger.entries)


@pytest.mark.parametrize(
    ("parallelism", "experimental", "zero"),
    [
        ({}, {}, 3),
        ({"fsdp_reshard_after_forward": "default"}, {}, 3),
        ({"pipeline_parallel_degree": 2}, {}, 2),
        ({"fsdp_reshard_after_forward": "default"}, {"pipeline_parallel_degree": 2}, 2),
        ({"fsdp_reshard_after_forward": "always"}, {"pipeline_parallel_degree": 2}, 3),
        ({"fsdp_reshard_after_forward": "never"}, {}, 2),
    ],
    ids=str,
)
def test_torchtitan_keeps_weights_in_pipelines(parallelism, experimental, zero):
    config = {**TORCHTITAN, "parallelism": {**TORCHTITAN["parallelism"], **parallelism}, "experimental": experimental}
    plan = read_config("torchtitan", config).plan
    assert plan["zero"] == zero
    assert plan.get("pp", 1) == {**parallelism, **experimental}.get("pipeline_parallel_degree", 1)


def test_degrees_of_older_torchtitan():
    older = {
        "experimental": {"context_parallel_degree": 2, "pipeline_parallel_microbatches": 4},
        "training": {"tensor_parallel_degree": 2, "batch_size": 8, "steps": 10},
    }
    plan = read_config("torchtitan", older).plan
    assert (plan["cp"], plan["tp"], plan["micro_batches"]) == (2, 2, 4)


def test_degrees_that_do_not_fit_the_world_are_refused():
    config = {**MEGATRON, "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 4}
    [entry] = [e for e in read_config("megatron", config, world_size=8).refused if e.key == "degrees"]
    assert entry.text.startswith("tp 8 x pp 4 need a multiple of 32 processes, and there are 8")


def test_nemos_distributed_adam_shards_and_other_adapters_than_lora_are_refused():
    optim = {"name": "distributed_fused_adam", "lr": 1e-4}
    scheme = {"peft_scheme": "ptuning"}
    ledger = read_config("nemo", {**NEMO, "model": {**NEMO["model"], "optim": optim, "peft": scheme}})
    assert ledger.plan["zero"] == 2
    assert [entry.key for entry in ledger.refused] == ["model.peft.peft_scheme"]
    whole = read_config(
        "nemo", {**NEMO, "model": {**NEMO["model"], "peft": {"peft_scheme": None, "lora_tuning": {"dim": 8}}}}
    )
    assert not whole.refused


def test_nemos_lora_becomes_adapters():
    tuning = {"adapter_dim": 16, "adapter_dropout": 0.1, "target_modules": ["attention_dense", "mlp_fc2"]}
    config = {**NEMO, "model": {**NEMO["model"], "peft": {"peft_scheme": "lora", "lora_tuning": tuning}}}
    ledger = read_config("nemo", config)
    model = {key[6:]: value for key, value in ledger.settings.items() if key.startswith("model.")}
    assert not ledger.refused and model == {
        "_target_": "tensorshard.models.with_lora", "r": 16, "lora_alpha": 16, "lora_dropout": 0.1,
        "target_modules": ["o_proj", "down_proj"], "dtype": "bfloat16",
    }  # fmt: skip
    said = {entry.key.rpartition(".")[2]: entry for entry in ledger.entries}
    assert said["target_modules"].verdict == "translated" and "on what they give" in said["adapter_dropout"].text
    config["model"]["peft"]["lora_tuning"] = {"adapter_dim": 16, "target_modules": ["attention"]}
    said = {entry.key.rpartition(".")[2]: entry for entry in read_config("nemo", config).entries}
    assert said["target_modules"].verdict == "different" and "share one input matrix" in said["target_modules"].text
    config["model"]["peft"] = {"peft_scheme": "qlora"}
    assert "4 or 8 bits" in read_config("nemo", config).refused[0].text


def test_paddles_epochs_are_no_steps():
    engine = {**PADDLE["Engine"], "max_steps": -1, "eval_freq": -1, "save_load": {"save_steps": -1}}
    ledger = read_config("paddle", {**PADDLE, "Engine": engine})
    assert "train.eval_every" not in ledger.settings and "train.save_every" not in ledger.settings
    assert ledger.settings["train.steps"] == "???"


def test_what_is_ours_is_said():
    said = {entry.key: entry for entry in read_config("deepspeed", {"zero_optimization": {"stage": 2}}).entries}
    assert "lr=2e-5" in said["optimizer"].text and "train.steps=100" in said["steps"].text
    said = {entry.key for entry in read_config("torchtitan", TORCHTITAN).entries}
    assert not said & {"optimizer", "steps"}


def test_true_reasons():
    refused = {
        entry.key: entry.text
        for entry in read_config(
            "deepspeed",
            {
                **DEEPSPEED,
                "data_efficiency": {"enabled": True, "data_routing": {"enabled": True}},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "max_grad_norm": 1.0}},
                "nobody": None,
            },
        ).refused
    }
    assert "quantized" not in refused["data_efficiency.enabled"] and "random-LTD" in refused["data_efficiency.enabled"]
    assert "gradient_clipping" in refused["optimizer.params.max_grad_norm"]
    assert "nobody" not in refused


def test_hydras_defaults_are_followed(tmp_path):
    (tmp_path / "trainer").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "trainer" / "default.yaml").write_text("max_steps: 10\nprecision: 32\n")
    (tmp_path / "trainer" / "ddp.yaml").write_text("defaults:\n  - default\nstrategy: ddp\nprecision: bf16-mixed\n")
    (tmp_path / "experiment" / "long.yaml").write_text("# @package _global_\nseed: 7\ntrainer:\n  max_steps: 20\n")
    main_file = tmp_path / "train.yaml"
    main_file.write_text(
        "defaults:\n  - _self_\n  - trainer: ddp\n  - optional local: mine\n  - experiment: long\nseed: 1\n"
    )
    ledger = read_file(main_file, "lightning")
    assert ledger.settings["train.steps"] == 20 and ledger.settings["train.seed"] == 7
    assert ledger.plan["precision"] == "bf16"
    main_file.write_text("defaults:\n  - trainer: fsdp\ntrainer:\n  max_steps: 5\n")
    with pytest.raises(ValueError, match=r"builds on 'trainer/fsdp' \(defaults:\), and there is no such file"):
        read_file(main_file, "lightning")
    assert read_file(main_file, "lightning", without=["defaults"]).settings["train.steps"] == 5


def _script(tmp_path, text: str):
    file = tmp_path / "pretrain.sh"
    file.write_text(text)
    return file


def test_arrays_grow_and_other_commands_are_named(tmp_path):
    file = _script(
        tmp_path,
        """
        ARGS=(--tensor-model-parallel-size 2 --micro-batch-size 1)
        ARGS=("${ARGS[@]}" --lr 1e-4 --bf16)
        ARGS+=(--global-batch-size 8)
        python tools/preprocess_data.py --input a.json --workers 4
        torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --train-iters 50
        """,
    )
    ledger = read_file(file, world_size=8)
    assert not ledger.refused, ledger.describe()
    assert ledger.plan["tp"] == 2 and ledger.plan["precision"] == "bf16"
    assert ledger.settings["optimizer.lr"] == 1e-4 and ledger.settings["train.global_batch_size"] == 8
    [other] = [entry for entry in ledger.entries if entry.key.startswith("command")]
    assert "preprocess_data.py" in other.value and "another command" in other.text


BRANCHES = """
MODEL=$5
if [ -z "$LR" ]; then
  LR=2e-4
fi
if [[ "$MODEL" == "7B" ]]; then
  ARGS="--tensor-model-parallel-size 2"
elif [ $MODEL = 70B ]; then
  ARGS="--tensor-model-parallel-size 8"
else
  echo "$MODEL is unknown"
  exit 1
fi
torchrun pretrain_gpt.py $ARGS --lr $LR --micro-batch-size 1 --global-batch-size 8 --train-iters 50
"""


@pytest.mark.parametrize(("given", "tp", "lr"), [({"MODEL": "7B"}, 2, 2e-4), ({"5": "70B", "LR": "1e-4"}, 8, 1e-4)])
def test_branches_follow_the_variables(tmp_path, given, tp, lr):
    ledger = read_file(_script(tmp_path, BRANCHES), given=given)
    assert not ledger.refused, ledger.describe()
    assert ledger.plan["tp"] == tp and ledger.settings["optimizer.lr"] == lr


def test_a_branch_that_cannot_be_decided_is_refused_with_both_ways(tmp_path):
    [entry] = read_file(_script(tmp_path, BRANCHES)).refused
    assert entry.key == 'if [[ "$MODEL" == "7B" ]]' and "NAME=VALUE" in entry.text
    assert "size 2" in entry.value and "size 8" in entry.value


def test_two_precisions_are_refused(tmp_path):
    refused = read_file(_script(tmp_path, "torchrun pretrain_gpt.py --bf16 --fp16 --lr 1e-4")).refused
    assert {entry.key for entry in refused} == {"bf16", "fp16"}


@pytest.mark.parametrize(
    ("text", "program"),
    [("python3 -m verl.trainer.main_ppo --lr 1", "verl"), ("NPROC=8 megatron sft --lr 1e-4 --bf16 true", "ms-swift")],
)
def test_scripts_of_other_programs_are_not_megatrons(tmp_path, text, program):
    ledger = read_file(_script(tmp_path, text))
    assert ledger.source == program and ledger.refused


def test_a_recipe_of_torchtune_becomes_adapters_or_a_whole_model():
    ledger = read_config("torchtune", TORCHTUNE, world_size=8)
    model = {key[6:]: value for key, value in ledger.settings.items() if key.startswith("model.")}
    assert model == {
        "_target_": "tensorshard.models.with_lora", "pretrained": "/models/x", "dtype": "bfloat16",
        "r": 16, "lora_alpha": 32.0, "lora_dropout": 0.0,
        "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    assert (ledger.plan["tp"], ledger.plan["zero"], ledger.plan["recompute"], ledger.plan["micro_batches"]) == (
        2,
        3,
        "full",
        4,
    )
    assert ledger.settings["train.steps"] == 100 and ledger.settings["optimizer.weight_decay"] == 0.01
    whole = {**TORCHTUNE, "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}}
    ledger = read_config("torchtune", whole, world_size=8)
    assert not ledger.refused and "model._target_" not in ledger.settings


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ({"model": {"_component_": "torchtune.models.llama3.qlora_llama3_8b"}}, "model._component_", "4 or 8 bits"),
        ({"model": {"_component_": "torchtune.models.phi3.lora_phi3_mini"}}, "model._component_", "other layers"),
        ({"loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}, "loss._component_", "DPOLoss"),
        ({"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}}, "optimizer._component_", "not in torch"),
        ({"kd_ratio": 0.5}, "kd_ratio", "no recipe of fine-tuning"),
        (
            {"checkpointer": {"_component_": "torchtune.training.FullModelMetaCheckpointer"}},
            "checkpointer._component_",
            "format",
        ),
    ],
)
def test_what_torchtune_does_and_a_config_here_cannot(change, key, words):
    refused = {entry.key: entry.text for entry in read_config("torchtune", {**TORCHTUNE, **change}).refused}
    assert words in refused[key]


def test_names_and_defaults_of_llama_factorys_v1():
    ledger = read_config(None, FACTORY_V1, world_size=4)
    assert ledger.source == "llama-factory" and not ledger.refused, ledger.describe()
    settings, plan = ledger.settings, ledger.plan
    assert (plan["zero"], plan["precision"], plan["recompute"]) == (3, "bf16", "full")
    assert (settings["scheduler.shape"], settings["optimizer.weight_decay"], settings["optimizer.lr"]) == (
        "constant",
        0.01,
        1e-4,
    )
    assert (settings["train.global_batch_size"], settings["text.context_length"]) == (4, 2048)
    assert (settings["model.r"], settings["model.lora_alpha"], settings["model.lora_dropout"]) == (16, 16, 0.05)
    older = read_config(
        None, {**LLAMA_FACTORY, "finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"}
    )
    assert older.settings["model.target_modules"] == ["q_proj", "v_proj"] and older.settings["model.lora_alpha"] == 8
    assert (older.settings["scheduler.shape"], older.settings["optimizer.weight_decay"]) == ("linear", 0.0)


def test_adapters_of_axolotl():
    lora = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
    ledger = read_config("axolotl", {**AXOLOTL, **lora})
    assert not ledger.refused and ledger.settings["model.target_modules"] == "all-linear"
    pattern = read_config(
        "axolotl", {**AXOLOTL, **lora, "lora_target_linear": False, "lora_target_modules": "layers.(a|b)"}
    )
    assert pattern.settings["model.target_modules"] == "layers.(a|b)"
    for change in (
        {"adapter": "qlora"},
        {"load_in_8bit": True},
        {"loraplus_lr_ratio": 4},
        {"lora_target_linear": False},
    ):
        assert read_config("axolotl", {**AXOLOTL, **lora, **change}).refused, change


def test_paddles_increments_are_samples():
    rate = {"name": "CosineAnnealingWithWarmupDecay", "max_lr": 1e-4, "decay_steps": 4000, "warmup_rate": 0.1}
    config = {
        **PADDLE,
        "Global": {"micro_batch_size": 2, "global_batch_size": 8},
        "Optimizer": {"name": "AdamW", "lr": rate},
    }
    ledger = read_config("paddle", {**config, "Optimizer": {"name": "AdamW", "lr": {**rate, "use_increments": True}}})
    assert not ledger.refused, ledger.describe()
    assert (ledger.settings["scheduler.total_steps"], ledger.settings["scheduler.warmup_steps"]) == (500, 50)
    said = {entry.key: entry for entry in read_config("paddle", config).entries}
    assert "never leaves its first rate" in said["Optimizer.lr.name"].text


def test_one_beta_does_not_change_the_other():
    ledger = read_config("paddle", {**PADDLE, "Optimizer": {"name": "AdamW", "beta1": 0.8}})
    assert ledger.settings["optimizer.betas"] == [0.8, 0.999]
    [entry] = [entry for entry in ledger.entries if entry.key == "Optimizer.beta1"]
    assert entry.text == "optimizer.betas[0]=0.8"
    assert read_config("megatron", {**MEGATRON, "adam_beta1": 0.8}).settings["optimizer.betas"] == [0.8, 0.999]
    titan = {**TORCHTITAN, "optimizer": {"name": "AdamW", "lr": 1e-3, "beta1": 0.8}}
    assert read_config("torchtitan", titan).settings["optimizer.betas"] == [0.8, 0.95]


def test_degrees_say_how_many_data_ranks_there_are():
    degrees = {**PADDLE["Distributed"], "dp_degree": 2}
    ledger = read_config("paddle", {**PADDLE, "Distributed": degrees})
    assert ledger.settings["train.global_batch_size"] == 2 * 2 * 2


def test_axolotl_warms_up_by_default_and_a_constant_rate_does_not():
    assert read_config("axolotl", {**AXOLOTL, "max_steps": 2000}).settings["scheduler.warmup_steps"] == 60
    assert read_config("axolotl", {**AXOLOTL, "max_steps": 9000}).settings["scheduler.warmup_steps"] == 100
    assert read_config("axolotl", {**AXOLOTL, "warmup_steps": 1}).settings["scheduler.warmup_steps"] == 2
    constant = {**LLAMA_FACTORY, "lr_scheduler_type": "constant"}
    assert read_config("llama-factory", constant).settings["scheduler.warmup_steps"] == 0
    kept = read_config(
        "llama-factory", {**LLAMA_FACTORY, "lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.033}
    )
    assert kept.settings["scheduler.warmup_steps"] == 4  # transformers rounds up

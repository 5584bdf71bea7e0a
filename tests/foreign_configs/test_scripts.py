"""Launch scripts as people write them: branches, commands in quotes, arguments of Megatron's forks."""

import pytest

from tensorshard.foreign_configs import read_file

CASE = """
MODEL_SCALE="800M" # or "8B"
while [[ $# -gt 0 ]]
do
case $1 in
  --scale) MODEL_SCALE="$2"; shift 2 ;;
esac
done
case "${MODEL_SCALE}" in
    "800M"|"1B")
        TP=1
        ;;
    "8B") TP=4 ;;
    *) echo "unknown"; exit 1 ;;
esac
NODES=1; LR=1e-4
if [ -z "$MBS" ]; then MBS=2; fi
torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py --tensor-model-parallel-size $TP --lr $LR \\
    --micro-batch-size $MBS --train-iters 10
"""


def _read(folder, text, **given):
    (folder / "run.sh").write_text(text)
    return read_file(folder / "run.sh", given=given)


def test_case_follows_its_variable_and_the_file_says_how_many_processes(tmp_path):
    ledger = _read(tmp_path, CASE)
    assert not ledger.refused, ledger.describe()
    assert (ledger.plan["tp"], ledger.world_size, ledger.settings["train.global_batch_size"]) == (1, 8, 16)
    assert _read(tmp_path, CASE, MODEL_SCALE="8B").plan["tp"] == 4
    unknown = _read(tmp_path, CASE.replace('MODEL_SCALE="800M"', "MODEL_SCALE=$3"))
    assert [entry.key for entry in unknown.refused if entry.key.startswith("case")]


def test_a_branch_that_no_argument_depends_on_is_left_alone(tmp_path):
    text = 'if [[ "$HOST" == *web* ]]; then\nHOME_DIR="/blob"\nfi\npython pretrain_gpt.py --lr 1e-4 --bf16\n'
    assert not _read(tmp_path, text).refused
    assert _read(tmp_path, text.replace("--bf16", "--bf16 --save $HOME_DIR")).refused


@pytest.mark.parametrize(
    "command",
    [
        'srun -l --container-image "x" sh -c "python pretrain_gpt.py --lr 1e-4 --seq-length 512 --bf16"',
        'ARGS=("--lr 1e-4" "--seq-length 512" --bf16)\npython pretrain_gpt.py ${ARGS[@]}',
        "GPUS=$(nvidia-smi --query-gpu=name --format=csv | wc -l)\n"
        "torchrun --nproc_per_node $GPUS pretrain_gpt.py --lr 1e-4 --seq-length 512 --bf16",
    ],
)
def test_quotes_and_what_commands_print(tmp_path, command):
    ledger = _read(tmp_path, command)
    assert not ledger.refused, ledger.describe()
    assert (ledger.settings["optimizer.lr"], ledger.settings["text.context_length"]) == (1e-4, 512)
    assert ledger.plan["precision"] == "bf16"


def test_arguments_of_megatron_deepspeed(tmp_path):
    text = (
        "deepspeed pretrain_gpt.py --deepspeed --deepspeed_config ds.json --zero-stage 2 --global-batch-size 8 "
        "--micro-batch-size 1 --seq-length 100 --train-tokens 80_000 --train-iters 500 --lr-decay-tokens 40000 "
        "--ds-sequence-parallel-size 2 --moe-expert-parallel-size 4 --data-impl mmap --lr 1e-4 --eval-iters 0 "
        "--eval-interval 10"
    )
    ledger = _read(tmp_path, text)
    assert not ledger.refused, ledger.describe()
    assert (ledger.plan["zero"], ledger.plan["cp"], ledger.plan["ep"]) == (2, 2, 4)
    assert (ledger.settings["train.steps"], ledger.settings["scheduler.total_steps"]) == (100, 50)
    assert ledger.settings["train.eval_every"] == 0 and "train.eval_batches" not in ledger.settings
    [entry] = _read(tmp_path, text.replace("--zero-stage 2", "")).refused
    assert entry.key == "deepspeed_config" and "zero_stage=LEVEL" in entry.text


def test_scripts_without_arguments_of_megatrons_are_named(tmp_path):
    with pytest.raises(ValueError, match="has no arguments of Megatron's; give the script that has them"):
        _read(tmp_path, "srun --ntasks 8 bash other.sh\n")
    ledger = _read(tmp_path, "deepspeed train.py --per_device_train_batch_size 4 --bf16 True --learning_rate 1e-4")
    assert ledger.source == "transformers" and "import the file of their --deepspeed" in ledger.refused[0].text

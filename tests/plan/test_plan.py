"""The Plan as data: what it refuses, infers, prints and reads back."""

import dataclasses
import subprocess
import sys

import pytest

from tensorshard import Offload, Plan


def test_defaults_shard_everything_over_the_world():
    plan = Plan().resolve(8)
    assert (plan.dp_replicate, plan.dp_shard, plan.tp, plan.pp, plan.cp) == (1, 8, 1, 1, 1)
    assert (plan.zero, plan.micro_batches, plan.precision, plan.recompute) == (3, 1, "fp32", "none")
    assert plan.dp_size == 8


@pytest.mark.parametrize(
    ("fields", "world_size", "degrees"),
    [
        (dict(), 1, (1, 1)),
        (dict(dp_replicate=2), 8, (2, 4)),
        (dict(dp_replicate=-1, dp_shard=4), 8, (2, 4)),
        (dict(dp_replicate=-1, dp_shard=1), 3, (3, 1)),
        (dict(dp_replicate=2, dp_shard=2), 4, (2, 2)),
    ],
)
def test_resolve_infers_the_free_axis(fields, world_size, degrees):
    plan = Plan(**fields).resolve(world_size)
    assert (plan.dp_replicate, plan.dp_shard) == degrees
    assert plan.resolve(world_size) == plan


def test_resolve_leaves_the_original_alone():
    plan = Plan()
    plan.resolve(4)
    assert plan.dp_shard == -1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.dp_shard = 4


@pytest.mark.parametrize(
    ("fields", "world_size", "message"),
    [
        (
            dict(dp_replicate=2, dp_shard=3),
            4,
            r"dp_replicate=2 x dp_shard=3\) multiply to 6, but the number of processes is 4",
        ),
        (dict(dp_shard=1), 2, r"multiply to 1, but the number of processes is 2.*dp_shard=-1"),
        (dict(dp_replicate=3), 4, r"dp_replicate=3 needs a multiple of 3 processes, and there are 4: "),
        (dict(), 0, r"world_size is 0; it must be at least 1"),
    ],
)
def test_degrees_must_multiply_to_the_world_size(fields, world_size, message):
    with pytest.raises(ValueError, match=message):
        Plan(**fields).resolve(world_size)


def test_context_parallelism_is_inferred_and_checked():
    assert Plan(dp_shard=2, cp=-1).resolve(8).cp == 4
    assert Plan(dp_shard=1, cp=-1, pp=2, micro_batches=2).resolve(8).cp == 4
    with pytest.raises(ValueError, match="compile=True was given with cp=8"):
        Plan(dp_shard=1, cp=-1, compile=True).resolve(8)


@pytest.mark.parametrize(
    ("name", "value"), [("pp_schedule", "gpipe"), ("pp_split", ["layers.2"]), ("pp_stages_per_rank", 2)]
)
def test_options_of_a_pipeline_are_not_ignored_without_one(name, value):
    with pytest.raises(ValueError, match=rf"^{name}=.* was given, but pp=1 makes no pipeline; set pp"):
        Plan(**{name: value}).resolve(1)


def test_pipelines_are_checked_when_their_ranks_are_known():
    assert Plan(pp=-1, dp_shard=1, micro_batches=4).resolve(4).pp == 4
    assert Plan(pp=2, dp_shard=1, pp_schedule="zbv").resolve(2).stages_per_rank == 2
    fields = dict(dp_shard=1, pp_schedule="looped_bfs", pp_stages_per_rank=3)
    assert Plan(pp=2, **fields).resolve(2).stages_per_rank == 3
    for plan, message in (
        (Plan(pp=-1, dp_shard=1, micro_batches=2), "1f1b schedule on 4 ranks needs at least micro_batches=4"),
        (Plan(pp=4, dp_shard=1, micro_batches=4, pp_split=["layers.1"]), "pp_split names 1 modules.*4 stages: name 3"),
        (Plan(pp=4, dp_shard=1, pp_schedule="zbv", pp_stages_per_rank=1), "zbv schedule needs 2 stages a rank"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.resolve(4)
    with pytest.raises(ValueError, match="did you mean '1f1b'"):
        Plan(pp=2, pp_schedule="1F1B")
    with pytest.raises(TypeError, match=r"pp_split is 'layers\.1'; it must be None or a non-empty list"):
        Plan(pp=2, pp_split="layers.1")


def test_options_that_would_have_no_effect_are_not_ignored():
    with pytest.raises(ValueError, match=r"sequence_parallel=True splits sequences over .* but tp=1"):
        Plan(sequence_parallel=True).resolve(2)
    with pytest.raises(ValueError, match="tp_plan was given, but tp=1 splits nothing"):
        Plan(tp_plan={"layers.*": "colwise"}).resolve(1)


def test_offload_is_written_in_several_ways():
    plan = Plan(offload="disk")
    assert plan.offload == Offload(optimizer="disk", gradients="disk")
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan(offload=dict(optimizer="cpu", host_memory="1.5GiB")).offloaded.host_bytes == 3 * 2**29
    assert "offload        optimizer: disk, gradients: device, parameters: device, in /data" in (
        Plan(offload=Offload(optimizer="disk", path="/data")).resolve(1).describe()
    )


@pytest.mark.parametrize(
    ("offload", "error", "message"),
    [
        ("dusk", ValueError, "offload is 'dusk'; it must be one of 'cpu', 'disk' .did you mean 'disk'"),
        (1, TypeError, "offload is 1; it must be None, 'cpu', 'disk' or a tensorshard.Offload"),
        (dict(optimiser="cpu"), ValueError, "Offload has no field 'optimiser'; did you mean 'optimizer'"),
        (dict(optimizer="gpu"), ValueError, "offload.optimizer is 'gpu'; it must be one of 'cpu', 'disk'"),
        (dict(host_memory="6 goats"), ValueError, "offload.host_memory='6 goats' was given; .*'6GiB'"),
        (dict(host_memory=0), ValueError, "offload.host_memory=0 was given; it must be at least one byte"),
        (dict(host_memory=1.5), TypeError, "offload.host_memory=1.5 was given; it must be a number of bytes, or text"),
        (dict(buffer_memory="1KiB"), ValueError, "offload.buffer_memory is '1KiB'; it must be at least 512KiB"),
        (dict(parameters="disk"), ValueError, "offload was given without optimizer="),
        (dict(gradients="disk", activations="disk"), ValueError, "offload was given without optimizer="),
        (dict(path="/data"), ValueError, "offload was given without optimizer="),
    ],
)
def test_an_offload_that_cannot_be_honoured_is_refused(offload, error, message):
    with pytest.raises(error, match=message):
        Plan(offload=offload).resolve(1)


def test_parameters_that_stay_in_memory_cannot_be_offloaded():
    with pytest.raises(ValueError, match=r"offload.parameters='disk' was given with zero=2, .*; set zero=3 \(it works"):
        Plan(zero=2, offload=dict(optimizer="cpu", parameters="disk")).resolve(1)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (dict(dp_replicate=-1), ValueError, "dp_replicate and dp_shard are both -1, but only one axis"),
        (dict(dp_shard=0), ValueError, "dp_shard is 0; it must be a positive integer, or -1"),
        (dict(dp_shard=-2), ValueError, "dp_shard is -2"),
        (dict(dp_shard=2.0), TypeError, "dp_shard is 2.0"),
        (dict(dp_shard=True), TypeError, "dp_shard is True"),
        (dict(zero=4), ValueError, r"zero is 4; the levels are 0, 1, 2 and 3.*'os' \(1\)"),
        (dict(zero="p_g"), ValueError, "zero is 'p_g'"),
        (dict(zero=True), ValueError, "zero is True"),
        (dict(micro_batches=0), ValueError, "micro_batches is 0; it must be at least 1"),
        (dict(micro_batches=1.5), TypeError, "micro_batches is 1.5"),
        (dict(precision="bfloat16"), ValueError, r"precision is 'bfloat16'.*did you mean 'bf16'"),
        (dict(precision="int8"), ValueError, "must be one of 'fp32', 'bf16', 'fp16'"),
        (dict(recompute="always"), ValueError, "recompute is 'always'; it must be one of"),
        (dict(reduce_dtype="fp8"), ValueError, "reduce_dtype is 'fp8'"),
        (dict(clip_grad_norm=0), ValueError, "clip_grad_norm is 0; it must be a positive, finite number"),
        (dict(clip_grad_norm=float("nan")), ValueError, "clip_grad_norm is nan"),
        (dict(clip_grad_norm="1"), TypeError, "clip_grad_norm is '1'"),
        (dict(compile="yes"), TypeError, "compile is 'yes'; it must be True or False"),
        (dict(compile="reduce-overhead"), TypeError, "records CUDA graphs; it must be True or False"),
        (dict(shard_units=[]), TypeError, r"shard_units is \[\]"),
        (dict(shard_units=0), ValueError, "shard_units is 0"),
        (dict(shard_units="blocks.*"), TypeError, "a non-empty list of module names"),
    ],
)
def test_values_that_no_hardware_could_honour(fields, error, message):
    with pytest.raises(error, match=message):
        Plan(**fields)


def test_paddles_names_are_the_levels():
    assert [Plan(zero=name).zero for name in ("os", "os_g", "p_g_os")] == [1, 2, 3]
    assert Plan(zero="os") == Plan(zero=1)


def test_yaml_round_trip(tmp_path):
    plan = Plan(
        dp_replicate=2,
        zero="os_g",
        precision="bf16",
        clip_grad_norm=1e-5,
        shard_units=["blocks.*", "head"],
        compile=True,
    )
    plan.to_yaml(tmp_path / "plan.yaml")
    assert Plan.from_yaml(tmp_path / "plan.yaml") == plan


def test_a_yaml_file_may_hold_a_few_fields_or_none(tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text("zero: os\nmicro_batches: 4\n")
    assert Plan.from_yaml(file) == Plan(zero=1, micro_batches=4)
    file.write_text("")
    assert Plan.from_yaml(file) == Plan()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("micro_batch: 4", "Plan has no field 'micro_batch'; did you mean 'micro_batches'?"),
        ("dp_shards: 4", "did you mean 'dp_shard'?"),
        ("qqqq: 1", "the fields are dp_replicate, dp_shard"),
        ("- zero", "holds a list, but a plan is a mapping"),
        ("zero: 7", "zero is 7"),
    ],
)
def test_a_yaml_file_with_mistakes(tmp_path, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        Plan.from_yaml(tmp_path / "plan.yaml")


def test_describe_says_what_will_be_held():
    text = Plan(dp_shard=4, zero=1, precision="bf16", clip_grad_norm=1.0, shard_units=1 << 20).describe()
    assert "dp_shard=4" in text
    assert "1 (optimizer states are sharded over dp_shard)" in text
    assert "bf16 compute, fp32 master weights, fp32 gradient sums" in text
    assert "clip_grad_norm 1.0" in text
    assert "1,048,576 bytes" in text
    assert "dp_shard=auto" in Plan().describe()


def test_a_plan_needs_no_torch():
    code = "import sys; from tensorshard.plan.plan import Plan; Plan().resolve(4); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"

"""Statistics, results files and tables of the benchmarks. Nothing here is timed."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import tables
from benchmarks.harness import layers, memory, results
from benchmarks.harness.hardware import hardware_name, installed_versions
from benchmarks.harness.layers_rank import LayerMismatchError, check_same
from benchmarks.harness.ranks import RankError, run_ranks
from benchmarks.harness.report import format_value
from benchmarks.harness.results import (
    Group,
    Quantity,
    Results,
    load_results,
    make_rows,
    save_results,
)
from benchmarks.harness.statistics import LossMismatchError, check_losses_agree, compare
from benchmarks.harness.training import RankMeasurement, summarize_ranks
from benchmarks.registry import find_suites
from benchmarks.suites import tensor, zero

TIME = Quantity("step_seconds", "step time", "s")
CPU_TIME = Quantity("cpu_seconds", "CPU time", "s", headline=False)
MEMORY = Quantity("peak_bytes", "peak memory", "bytes")
SAMPLES = {
    "step_seconds": {"DDP": [2.0, 4.0, 3.0], "FSDP2": [5.0, 6.0, 4.0], "tensorshard": [1.5, 2.0, 3.0]},
    "cpu_seconds": {"DDP": [2.0] * 3, "FSDP2": [4.0] * 3, "tensorshard": [1.0] * 3},
    "peak_bytes": {"DDP": [9e6] * 3, "FSDP2": [5e6] * 3, "tensorshard": [4e6] * 3},
}


def make_results(device: str = "cpu", title: str = "17M, ZeRO 0", date: str = "2026-01-02") -> Results:
    rows = make_rows(
        SAMPLES,
        ours=["tensorshard"],
        losses={"DDP": 8.5, "tensorshard": 8.5},
        notes={"DeepSpeed": "not installed"},
    )
    group = Group(title, date, {"torch": "2.13.0"}, {"ranks": 2}, rows)
    return Results("zero", "cpu-2core", device, (TIME, CPU_TIME, MEMORY), (group,))


def test_compare_takes_the_peer_with_the_lowest_median():
    compared = compare(SAMPLES["step_seconds"], peers=["DDP", "FSDP2", "not measured"])
    assert compared["tensorshard"].median == 2.0
    assert compared["tensorshard"].ratio == pytest.approx(2 / 3)
    assert compared["tensorshard"].lowest_ratio == 0.5  # round 2: 2.0 over DDP's 4.0
    assert compared["tensorshard"].highest_ratio == 1.0  # round 3
    assert compared["DDP"].ratio == 1.0
    assert compared["FSDP2"].ratio == pytest.approx(5 / 3)


def test_compare_never_takes_ours_as_the_best_peer():
    assert compare({"a": [0.0], "ours": [1.0]}, peers=["a"])["ours"].ratio is None
    compared = compare({"a": [3.0], "ours": [1.0]}, peers=["a"])
    assert (compared["a"].ratio, compared["ours"].ratio) == (1.0, pytest.approx(1 / 3))


def test_compare_without_a_peer_has_no_ratio():
    compared = compare({"ours": [1.0, 3.0]}, peers=[])["ours"]
    assert (compared.median, compared.ratio, compared.lowest_ratio, compared.highest_ratio) == (
        2.0,
        None,
        None,
        None,
    )


@pytest.mark.parametrize("samples", [{"a": [1.0], "b": [1.0, 2.0]}, {"a": []}])
def test_compare_refuses_unequal_or_no_rounds(samples):
    with pytest.raises(ValueError, match="same number of rounds, at least one"):
        compare(samples, peers=["a"])


def test_losses_within_the_tolerance_agree():
    check_losses_agree({"DDP": [9.1, 8.5], "ours": [9.1, 8.50001]}, tolerance=1e-5)
    check_losses_agree({}, tolerance=1e-5)


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ([9.1, 8.6], r"after step 2 the loss of ours is 8.6, but that of DDP is 8.5: more than 1e-05 apart"),
        ([9.1, float("nan")], "after step 2 the loss of ours is nan"),
        ([9.1], "ours reports 1 losses, but DDP 2"),
    ],
)
def test_losses_that_disagree_name_the_contender_and_the_step(losses, message):
    with pytest.raises(LossMismatchError, match=message):
        check_losses_agree({"DDP": [9.1, 8.5], "ours": losses}, tolerance=1e-5)


def test_losses_that_are_infinite_do_not_agree():
    with pytest.raises(LossMismatchError, match="loss of DDP is inf"):
        check_losses_agree({"DDP": [float("inf")]}, tolerance=1e-5)


def test_a_run_is_as_slow_and_as_large_as_its_worst_rank():
    run = summarize_ranks(
        [
            RankMeasurement([1.0, 5.0, 2.0], 1.5, [8.0, 6.0], 10, 30, 5),
            RankMeasurement([3.0, 1.0, 2.5], 1.0, [9.0, 8.0], 20, 20, 4),
        ]
    )
    assert run.step_seconds == 3.0  # the median of 3.0, 5.0, 2.5
    assert run.cpu_seconds == 1.5
    assert run.losses == [8.5, 7.0]
    assert (run.steady_peak_bytes, run.process_peak_bytes, run.baseline_bytes) == (20, 30, 5)


def test_rows_keep_those_that_are_not_installed_last():
    rows = make_results().groups[0].rows
    assert [row.contender for row in rows] == ["DDP", "FSDP2", "tensorshard", "DeepSpeed"]
    assert [row.ours for row in rows] == [False, False, True, False]
    assert rows[-1].note == "not installed" and rows[-1].values == {}
    assert (rows[2].loss, rows[1].loss) == (8.5, None)


def test_results_file_round_trips(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    written = make_results()
    path = save_results(written)
    assert path == tmp_path / "results" / "zero-cpu-2core.json"
    assert load_results(path) == written


def test_results_file_keeps_groups_that_were_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    save_results(make_results(title="17M, ZeRO 0"))
    save_results(make_results(title="17M, ZeRO 1"))
    path = save_results(make_results(title="17M, ZeRO 0", date="2026-03-04"))
    assert [(group.title, group.date) for group in load_results(path).groups] == [
        ("17M, ZeRO 0", "2026-03-04"),
        ("17M, ZeRO 1", "2026-01-02"),
    ]


def test_results_file_names_no_machine():
    assert "/" not in json.dumps(installed_versions(["torch"]))
    assert hardware_name("cpu").startswith("cpu-") and hardware_name("cpu").endswith("core")
    assert set(installed_versions(["torch", "no-such-package"])) == {"python", "torch"}


def test_markdown_gives_cpu_times_as_ratios_only():
    table = markdown_row(tables.markdown_table(make_results("cpu")), "**tensorshard**")
    assert table == ["", "**tensorshard**", "0.67", "4 MB", "0.80"]


def test_markdown_gives_gpu_times_too():
    table = tables.markdown_table(make_results("cuda"))
    assert markdown_row(table, "**tensorshard**") == ["", "**tensorshard**", "2.00 s", "0.67", "4 MB", "0.80"]
    assert markdown_row(table, "DeepSpeed") == ["", "DeepSpeed", "not installed", "", "", ""]


def test_markdown_rows_are_as_wide_as_the_header():
    lines = [line for line in tables.markdown_table(make_results()).splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1
    assert "17M, ZeRO 0" in lines[2] and "17M, ZeRO 0" not in lines[3]


def markdown_row(table: str, contender: str) -> list[str]:
    line = next(line for line in table.splitlines() if f"| {contender} |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_replace_what_stands_between_the_markers():
    text = "# Title\n\n<!-- benchmark:zero -->\nold\n<!-- /benchmark -->\nrest\n"
    once = tables.replace_tables(text, [make_results()])
    assert "old" not in once and "**tensorshard**" in once
    assert once.startswith("# Title\n\n<!-- benchmark:zero -->\n") and once.endswith("<!-- /benchmark -->\nrest\n")
    assert tables.replace_tables(once, [make_results()]) == once


def test_tables_write_one_table_for_each_hardware():
    text = "<!-- benchmark:zero -->\n<!-- /benchmark -->\n"
    assert tables.replace_tables(text, [make_results("cpu"), make_results("cuda")]).count("**tensorshard**") == 2


def test_tables_leave_a_text_without_markers_alone():
    assert tables.replace_tables("no table\n", []) == "no table\n"


def test_tables_refuse_a_benchmark_without_results():
    text = "<!-- benchmark:zer -->\n<!-- /benchmark -->\n"
    with pytest.raises(tables.MarkerError, match="no results of a benchmark 'zer'; there are those of: zero"):
        tables.replace_tables(text, [make_results()])


@pytest.mark.parametrize(
    "text",
    [
        "<!-- benchmark:zero -->\nno end\n",
        "<!-- benchmark:zero -->\n\n<!-- benchmark:zero -->\n<!-- /benchmark -->\n",
    ],
)
def test_tables_refuse_a_block_without_end(text):
    with pytest.raises(tables.MarkerError, match="need a line '<!-- /benchmark -->' each"):
        tables.replace_tables(text, [make_results()])


def test_values_are_printed_with_their_unit():
    assert [format_value(v, u) for v, u in [(1.234, "s"), (0.0123, "s"), (8.4e7, "bytes"), (0, "bytes")]] == [
        "1.23 s",
        "12 ms",
        "84 MB",
        "0 MB",
    ]


def test_suites_are_found():
    suites = find_suites()
    assert {"context", "heads", "import", "tensor", "zero"} <= set(suites)
    for suite in suites.values():
        suite.add_arguments(argparse.ArgumentParser())


@pytest.mark.parametrize("level", range(4))
def test_every_level_has_peers_and_ours(level):
    lineup = zero.contenders(level)
    assert [contender.ours for contender in lineup].count(False) >= 2
    assert lineup[-1].ours and lineup[-1].options["zero"] == level
    assert len({contender.name for contender in lineup}) == len(lineup)
    builders = Path(tables.__file__).parent / "peers"
    assert all((builders / f"{contender.builder}.py").exists() for contender in lineup)


def test_unknown_level_is_refused():
    with pytest.raises(ValueError, match="no ZeRO level 4; the levels are 0, 1, 2 and 3"):
        zero.contenders(4)


def test_contender_of_a_missing_library_is_not_installed():
    assert zero.Contender("torch", "ddp", "torch.nn").installed
    assert not zero.Contender("x", "x", "no_such_library").installed
    assert not zero.Contender("x", "x", "no_such_library.part").installed


@pytest.mark.parametrize("work", tensor.WORKS.values(), ids=list(tensor.WORKS))
def test_every_layer_has_peers_and_ours(work):
    lineup = tensor.contenders(work.kind)
    assert lineup[0].name == "parallelize_module" and not lineup[0].ours
    assert [contender.ours for contender in lineup].count(True) == 2
    assert len({contender.name for contender in lineup}) == len(lineup)
    builders = Path(tables.__file__).parent / "peers"
    assert all((builders / f"{contender.builder}.py").exists() for contender in lineup)


def test_unknown_layer_is_refused():
    message = "no layer 'convolution'; there are 'block', 'mlp' and 'llama'"
    with pytest.raises(ValueError, match=message):
        tensor.contenders("convolution")
    with pytest.raises(ValueError, match=message):
        replace(tensor.WORKS["block 512"], kind="convolution").module()


def test_a_layer_and_its_batch_are_the_same_on_every_rank():
    work = tensor.WORKS["MLP 512, 256 tokens"]
    first, second = work.module(), work.module()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    inputs, gradient = work.batch()
    assert inputs.requires_grad and inputs.shape == gradient.shape == (1, 256, 512)
    assert torch.equal(inputs, work.batch()[0])
    assert first(inputs).shape == gradient.shape


def test_a_contender_has_to_compute_what_the_plain_layer_does():
    expected = torch.tensor([1.0, -4.0]), torch.tensor([2.0])
    check_same("a", (torch.tensor([1.0, -4.00001]), torch.tensor([2.0])), expected)
    with pytest.raises(LayerMismatchError, match=r"the output of a is 0\.025 from the plain layer's"):
        check_same("a", (torch.tensor([1.1, -4.0]), expected[1]), expected)
    with pytest.raises(LayerMismatchError, match="gradient of the input of a is nan"):
        check_same("a", (expected[0], torch.tensor([float("nan")])), expected)
    with pytest.raises(LayerMismatchError, match=r"the output of a is \[1\], not \[2\]"):
        check_same("a", (torch.tensor([1.0]), expected[1]), expected)


def test_a_layer_is_as_slow_as_its_slowest_rank():
    of_ranks = [
        layers.RankLayerMeasurement([[1.0, 5.0, 2.0], [1.0, 1.0, 1.0]], [0.5, 0.25], 10),
        layers.RankLayerMeasurement([[3.0, 1.0, 2.5], [2.0, 1.0, 2.0]], [0.75, 0.5], 20),
    ]
    assert layers.summarize_layer(of_ranks, [7, 8]) == layers.LayerMeasurement([3.0, 2.0], [1.25, 0.75], [7, 8])


@pytest.mark.slow
def test_layers_are_measured_on_ranks():
    work = replace(tensor.WORKS["MLP 512, 256 tokens"], width=16, sequence=8)
    lineup = [contender for contender in tensor.contenders("mlp") if contender.ours or "torch." in contender.requires]
    measured = layers.measure_layers(
        work,
        lineup,
        2,
        rounds=2,
        memory_rounds=0,
        warmup_steps=1,
        measured_steps=1,
        environment=tensor.NO_GPU,
        timeout=300,
    )
    assert list(measured) == ["parallelize_module", "tensorshard tp=2", "ts.nn.ParallelLinear"]
    for measurement in measured.values():
        assert len(measurement.step_seconds) == len(measurement.cpu_seconds) == 2
        assert min(*measurement.step_seconds, *measurement.cpu_seconds) > 0


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_rounds_have_to_be_positive(text, capsys):
    for name, suite in find_suites().items():
        parser = argparse.ArgumentParser()
        suite.add_arguments(parser)
        if name in ("models", "estimate", "headlines", "museum", "overlap"):  # which compare numbers, once
            continue
        assert parser.parse_args(["--rounds", "3"]).rounds == 3
        with pytest.raises(SystemExit):
            parser.parse_args([f"--rounds={text}"])
        assert f"{text!r} is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["MALLOC_ARENA_MAX", "=1"])
def test_environment_option_needs_a_name_and_a_value(text, capsys):
    parser = argparse.ArgumentParser()
    zero.add_arguments(parser)
    assert parser.parse_args(["--environment", "A=1", "B=x=y"]).environment == [("A", "1"), ("B", "x=y")]
    with pytest.raises(SystemExit):
        parser.parse_args(["--environment", text])
    assert f"{text!r} is not of the form NAME=VALUE" in capsys.readouterr().err


def test_batches_depend_on_step_and_rank_alone():
    workload = zero.WORKLOADS["17M"]
    inputs, targets = workload.batch(3, 1)
    assert inputs.shape == targets.shape == (workload.batch_size, workload.context_length)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, workload.batch(3, 1)[0])
    assert not torch.equal(inputs, workload.batch(3, 0)[0])
    assert not torch.equal(inputs, workload.batch(4, 1)[0])
    assert inputs.min() >= 0 and inputs.max() < workload.vocab_size


@pytest.mark.parametrize(("name", "millions"), [("17M", 17), ("60M", 60), ("124M", 124.4)])
def test_models_have_the_size_in_their_name(name, millions):
    with torch.device("meta"):
        parameters = sum(p.numel() for p in zero.WORKLOADS[name].model().parameters())
    assert parameters == pytest.approx(millions * 1e6, rel=0.01)


def test_peak_memory_can_be_reset():
    block = torch.ones(32 * 2**20, dtype=torch.uint8)  # large enough for the allocator to map, and to give back
    peak = memory.peak_resident_bytes()
    del block
    memory.reset_peak()
    assert memory.resident_bytes() <= memory.peak_resident_bytes() < peak - 24 * 2**20


def test_failed_rank_ends_the_run_with_its_log():
    with pytest.raises(RankError, match=r"rank \d ended with exit status [12]; its log ends\n[\s\S]*no-such-file"):
        run_ranks("json.tool", ["no-such-file"], 2, environment={}, timeout=300)


def test_ranks_that_take_too_long_are_ended():
    with pytest.raises(RankError, match="rank 0 still runs after 0 s"):
        run_ranks("http.server", ["0"], 1, environment={}, timeout=0.2)


def test_ranks_that_end_well_raise_nothing():
    run_ranks("platform", [], 2, environment={}, timeout=300)

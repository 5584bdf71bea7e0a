"""Tensor parallelism on 2 CPU ranks: forward and backward of one layer, under tensorshard and its peers."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date

from benchmarks.harness.contender import Contender
from benchmarks.harness.hardware import installed_versions
from benchmarks.harness.layers import measure_layers
from benchmarks.harness.report import make_console, print_group, write_results
from benchmarks.harness.results import Group, Quantity, make_rows
from benchmarks.layers import LayerWork
from benchmarks.peers.tensor_ours import parallelized, sample_inputs
from benchmarks.registry import Suite, positive_int
from tensorshard.tensor_parallel.search.find_table import find_tensor_plan
from tensorshard.tensor_parallel.search.sequence_search import NoSequenceParallelError

WORLD_SIZE = 2
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
RUN_TIMEOUT = 600.0  # seconds

WORKS = {
    work.name: work
    for work in (
        LayerWork("block 512", "block", width=512, num_heads=8, batch_size=4, sequence=256),
        LayerWork("block 512, 256 tokens", "block", width=512, num_heads=8, batch_size=1, sequence=256),
        LayerWork("block 1024", "block", width=1024, num_heads=16, batch_size=4, sequence=256),
        LayerWork("MLP 512", "mlp", width=512, num_heads=8, batch_size=4, sequence=256),
        LayerWork("MLP 512, 256 tokens", "mlp", width=512, num_heads=8, batch_size=1, sequence=256),
        LayerWork("Llama 512, 2 layers", "llama", width=512, num_heads=8, batch_size=4, sequence=256),
    )
}

QUANTITIES = (
    Quantity("step_seconds", "forward + backward", "s"),
    Quantity("cpu_seconds", "CPU time of both ranks", "s"),
    Quantity("peak_bytes", "peak memory per rank above parameters", "bytes"),
)


def contenders(kind: str) -> list[Contender]:
    """The peers for a kind of layer, then tensorshard.

    Raises:
        ValueError: there is no such kind.
    """
    torch_peers = "torch.distributed.tensor.parallel"
    module, sequence = "tensor_parallelize_module", {"sequence_parallel": True}
    plain = [Contender("parallelize_module", module, torch_peers)]
    wide = [
        Contender("parallelize_module, prepared input", module, torch_peers, {"prepare_input": True}),
        Contender("parallelize_module, sequence parallel", module, torch_peers, sequence),
    ]
    torchshard = Contender("TorchShard", "tensor_torchshard", "torchshard")
    ours = Contender("tensorshard tp=2", "tensor_ours", "tensorshard.engine")
    ours_sequence = Contender("tensorshard tp=2, sequence_parallel", "tensor_ours", "tensorshard.engine", sequence)
    match kind:
        case "block":
            return [*plain, *wide, torchshard, ours, ours_sequence]
        case "mlp":
            by_hand = Contender("ts.nn.ParallelLinear", "tensor_ours", "tensorshard.nn", {"by_hand": True})
            return [*plain, torchshard, ours, by_hand]
        case "llama":
            transformers = Contender("Transformers tp_plan", "tensor_transformers", "transformers")
            return [*plain, *wide, transformers, ours, ours_sequence]
    raise ValueError(f"there is no layer {kind!r}; there are 'block', 'mlp' and 'llama'")


def obstacle(contender: Contender, work: LayerWork) -> str:
    """Why a contender cannot be measured here; empty if it can."""
    if not contender.installed:
        return "not installed"
    if contender.ours and contender.options.get("sequence_parallel"):
        try:
            model = parallelized(work.module())
            find_tensor_plan(model, WORLD_SIZE, inputs=sample_inputs(work, model), sequence_parallel=True)
        except NoSequenceParallelError:
            return "refused: no block can be split along a sequence"
    return ""


def measure_group(
    work: LayerWork,
    *,
    rounds: int,
    memory_rounds: int,
    warmup_steps: int,
    measured_steps: int,
    only: Sequence[str] = (),
) -> Group:
    """Measures a layer's contenders in turn."""
    lineup = [c for c in contenders(work.kind) if not only or c.name in only]
    notes = {contender.name: reason for contender in lineup if (reason := obstacle(contender, work))}
    measured = measure_layers(
        work,
        [contender for contender in lineup if contender.name not in notes],
        WORLD_SIZE,
        rounds=rounds,
        memory_rounds=memory_rounds,
        warmup_steps=warmup_steps,
        measured_steps=measured_steps,
        environment=NO_GPU,
        timeout=RUN_TIMEOUT,
    )
    return Group(
        title=f"{work.name}, {work.tokens} tokens" if "tokens" not in work.name else work.name,
        date=date.today().isoformat(),
        versions=installed_versions(["torch", "torchshard", "transformers", "tensorshard"]),
        settings={
            "ranks": WORLD_SIZE,
            "rounds": rounds,
            "memory_rounds": memory_rounds,
            "warmup_steps": warmup_steps,
            "measured_steps": measured_steps,
            **asdict(work),
        },
        rows=make_rows(
            {q.key: {name: getattr(of, q.key) for name, of in measured.items()} for q in QUANTITIES},
            ours=[contender.name for contender in lineup if contender.ours],
            notes=notes,
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    rounds, memory_rounds, measured_steps = (2, 1, 2) if arguments.quick else (arguments.rounds, 1, 3)
    for name in arguments.work or WORKS:
        with console.status(name):
            group = measure_group(
                WORKS[name],
                rounds=rounds,
                memory_rounds=memory_rounds,
                warmup_steps=3,
                measured_steps=measured_steps,
            )
        print_group(console, group, QUANTITIES)
        if not arguments.quick:  # at once, so that an interrupted run keeps what it has measured
            write_results(console, "tensor", QUANTITIES, [group])
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", choices=list(WORKS), nargs="+", help="these layers instead of all")
    parser.add_argument(
        "--rounds", type=positive_int, default=12, help="how many turns each contender has (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two turns of a few steps, of which nothing is written")


SUITE = Suite(
    "tensor",
    "a Transformer block and an MLP at tp 2 on CPU ranks against parallelize_module, TorchShard and Transformers",
    add_arguments,
    run,
)

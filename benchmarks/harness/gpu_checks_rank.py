"""What a rank of :mod:`benchmarks.harness.gpu_checks` does. Each check returns what it found, and what is wrong."""

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import tensorshard as ts
from benchmarks.harness.gpu_checks import CheckJob
from benchmarks.harness.jobs import hand_in, load_job
from tensorshard.comm.sharding import to_local
from tensorshard.comm.world import default_device, join_world
from tensorshard.loss import kernels
from tensorshard.models import GPT, next_token_loss
from tensorshard.plan.plan import AXES
from tensorshard.plan.schedules import SCHEDULES
from tensorshard.predict.hardware import communicators
from tensorshard.random.philox import words_of_box
from tensorshard.trainer import self_test

Found = tuple[dict[str, Any], list[str]]

ADAMW = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 3e-2}
_RAISE_SECONDS = 20
_CLASSES, _LENGTH, _BATCH = 97, 16, 16


def _model(dropout: float = 0.0, classes: int = _CLASSES) -> GPT:
    return GPT(classes, _LENGTH, 4, 4, 64, dropout=dropout)


def _batch(step: int, device: torch.device, classes: int = _CLASSES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, classes, (_BATCH, _LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def _engine(device: torch.device | str, optimizer: Any = ADAMW, model: Any = _model, **fields: Any) -> ts.Engine:
    return ts.parallelize(model, ts.Plan(**fields), optimizer=optimizer, loss_fn=next_token_loss, device=device)


def _losses(engine: ts.Engine, steps: int, classes: int = _CLASSES) -> list[float]:
    losses = []
    for step in range(steps):
        parts = [part.tensor_split(engine.mesh.dp_size) for part in _batch(step, engine.device, classes)]
        losses.append(engine.step(*(part[engine.mesh.dp_rank] for part in parts)).item())
    return losses


def _alone(device: torch.device, steps: int, optimizer: Any = ADAMW, dropout: float = 0.0) -> list[float]:
    """The losses of plain PyTorch on one device."""
    torch.manual_seed(0)
    model = _model(dropout).to(device)
    made = optimizer(model.parameters())
    losses = []
    with ts.same_randomness(model):
        for step in range(steps):
            inputs, targets = _batch(step, device)
            total, count = next_token_loss(model(inputs), targets)
            loss = total / count
            loss.backward()
            made.step()
            made.zero_grad()
            losses.append(loss.item())
    return losses


def _difference(actual: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(actual, expected, strict=True))


def _compare(cases: dict[str, tuple[list[float], list[float], float]]) -> Found:
    """The largest difference of each case's losses to those that are expected, and those above their tolerance."""
    differences = {name: _difference(actual, expected) for name, (actual, expected, _) in cases.items()}
    wrong = [f"{n}: losses differ by {d:.1e}" for n, d in differences.items() if not d <= cases[n][2]]
    return {"largest differences of losses": differences}, wrong


# -- one GPU --


def _self_test(device: torch.device) -> Found:
    self_test.run()
    return {}, []


def _parity(device: torch.device) -> Found:
    precisions = ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16")
    cases = {}
    for kind, optimizer in (("SGD", SGD), ("AdamW", ADAMW)):
        expected = _alone(torch.device("cpu"), 20 if device.type == "cuda" else 3, optimizer)
        for precision in precisions:
            losses = _losses(_engine(device, optimizer, precision=precision), len(expected))
            cases[f"{precision}, {kind}"] = (losses, expected, _TOLERANCES[precision])
    return _compare(cases)


def _host_waits(device: torch.device) -> Found:
    waits: dict[str, list[str]] = {}
    limits = {"zero=1": 2, "zero=3": 3}
    for name, fields in {"zero=1": dict(zero=1), "zero=3": dict(zero=3)}.items():
        engine = _engine(device, clip_grad_norm=1.0, **fields)
        _losses(engine, 3)
        inputs, targets = _batch(3, device)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            engine.step(inputs, targets)
            torch.cuda.set_sync_debug_mode("default")
        waits[name] = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    wrong = [f"{n}: {len(w)} waits, at most {limits[n]} expected" for n, w in waits.items() if len(w) > limits[n]]
    return {"waits of a step": waits}, wrong


def _failed_steps(device: torch.device) -> Found:
    wrong = []
    for precision in ("fp32", "bf16", "fp16") if device.type == "cuda" else ("fp32", "bf16"):
        factor = [1.0]

        def loss_fn(output: Any, targets: torch.Tensor, factor: list[float] = factor) -> Any:
            total, count = next_token_loss(output, targets)
            return total * factor[0], count

        plan = ts.Plan(precision=precision, clip_grad_norm=1.0)
        engine = ts.parallelize(_model, plan, optimizer=ADAMW, loss_fn=loss_fn, device=device)
        _losses(engine, 3)
        before = _values(engine)
        factor[0] = float("nan")
        try:
            _losses(engine, 1)
            wrong.append(f"{precision}: a loss of NaN raised no error")
        except FloatingPointError:
            factor[0] = 1.0
        changed = [name for name, value in _values(engine).items() if not torch.equal(value, before[name])]
        wrong += [f"{precision}: a step that was not taken changed {name}" for name in changed]
        wrong += [f"{precision}: a loss of {loss} after it" for loss in _losses(engine, 1) if not 0 < loss < 10]
    return {}, wrong


def _values(engine: ts.Engine) -> dict[str, torch.Tensor]:
    """Copies of weights and optimizer states."""
    states = enumerate(engine.optimizer.state.values())
    optimizer_values = {f"{key} of parameter {index}": value for index, state in states for key, value in state.items()}
    return {name: to_local(value).clone() for name, value in {**optimizer_values, **engine.full_state_dict()}.items()}


def _logits(device: torch.device) -> Found:
    classes = 8192
    model = partial(_model, classes=classes)
    expected = _losses(_engine(device, model=model, logits="whole"), 3, classes)
    cases = {"tiled": (_losses(_engine(device, model=model, logits="tiled"), 3, classes), expected, 1e-4)}
    with mock.patch.object(kernels, "can_compile", lambda _: False):
        plain = _losses(_engine(device, model=model, logits="tiled"), 3, classes)
    cases["tiled, no compiler"] = (plain, expected, 1e-4)
    differences, wrong = _compare(cases)
    return {**differences, "a compiler works": device.type == "cuda" and kernels.can_compile(device)}, wrong


def _random_numbers(device: torch.device) -> Found:
    """Words of boxes of all kinds, and a training with dropout, against those of the CPU."""
    sizes = torch.Generator().manual_seed(0)
    wrong = []
    for number in range(200):
        whole = torch.randint(1, 40, (1 + number % 4,), generator=sizes).tolist()
        offset = [int(torch.randint(0, n, (), generator=sizes)) for n in whole]
        size = [int(torch.randint(1, n - o + 1, (), generator=sizes)) for n, o in zip(whole, offset, strict=True)]
        here, there = (words_of_box(number, whole, offset, size, where) for where in (device, torch.device("cpu")))
        if not torch.equal(here.cpu(), there):
            wrong.append(f"words of {size} from {offset} on of {whole} differ")
    expected = _alone(torch.device("cpu"), 5, dropout=0.1)
    found, differ = _compare({"dropout": (_losses(_engine(device, model=partial(_model, 0.1)), 5), expected, 1e-4)})
    return found, wrong + differ


def _recompute(device: torch.device) -> Found:
    model = partial(_model, dropout=0.1)
    expected = _losses(_engine(device, model=model), 5)
    kinds = ("selective", "full")
    return _compare(
        {kind: (_losses(_engine(device, model=model, recompute=kind), 5), expected, 1e-5) for kind in kinds}
    )


def _compiled(device: torch.device) -> Found:
    from torch._dynamo.utils import counters

    expected = _losses(_engine(device), 5)
    counters.clear()
    differences, wrong = _compare({"compiled": (_losses(_engine(device, compile=True), 5), expected, 1e-4)})
    return {**differences, "frames": dict(counters["frames"]), "stats": dict(counters["stats"])}, wrong


def _offload(device: torch.device) -> Found:
    expected = _losses(_engine(device, micro_batches=2), 10)
    kinds = {
        "states": ts.Offload(optimizer="cpu"),
        "states and gradients": ts.Offload(optimizer="cpu", gradients="cpu"),
        "activations": ts.Offload(activations="cpu"),
        "in the background": ts.Offload(optimizer="cpu", gradients="cpu", overlap=True),
    }
    cases = {}
    for name, offload in kinds.items():
        cases[name] = (_losses(_engine(device, micro_batches=2, offload=offload), 10), expected, 1e-4)
    return _compare(cases)


def _checkpoints(device: torch.device) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        engine, other = _engine(device, zero=3), _engine("cpu", zero=1)
        differences, wrong = _compare({"zero 3": (_losses(engine, 5), _losses(_engine(device), 5), 1e-4)})
        engine.save(f"{folder}/here")
        other.load(f"{folder}/here")
        other.save(f"{folder}/there")
        before = engine.full_state_dict()
        _losses(engine, 1)
        engine.load(f"{folder}/there")
        after = engine.full_state_dict()
    changed = [name for name in before if not torch.equal(before[name].cpu(), after[name].cpu())]
    return differences, [*wrong, *(f"{name} came back with other values" for name in changed)]


def _memory(device: torch.device) -> Found:
    torch.cuda.reset_peak_memory_stats(device)
    engine = _engine(device, model=partial(GPT, 8192, 256, 8, 8, 512))
    tokens = torch.randint(0, 8192, (8, 257), device=device)
    for _ in range(3):
        engine.step(tokens[:, :-1], tokens[:, 1:])
    measured = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    dist.destroy_process_group()
    sample = torch.zeros(8, 256, dtype=torch.long)
    estimated = ts.estimate(
        partial(GPT, 8192, 256, 8, 8, 512),
        ts.Plan(),
        optimizer=ADAMW,
        loss_fn=next_token_loss,
        inputs=sample,
        targets=sample,
        world_size=1,
    ).largest.peak_reserved
    sizes = {"reserved, measured": measured, "reserved, estimated": estimated, "all of the GPU": total - free}
    ratio = estimated / measured
    return sizes, [] if 0.9 <= ratio <= 1.1 else [f"the estimate is {ratio:.2f} of what was measured"]


def _speed(device: torch.device) -> Found:
    def seconds_of(step: Callable[[int], Any]) -> float:
        for number in range(5):
            step(number)
        begin = time.perf_counter()
        for number in range(20):
            step(number)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / 20

    model = _model().to(device)
    optimizer = ADAMW(model.parameters(), fused=True)

    def plain(number: int) -> None:
        inputs, targets = _batch(number, device)
        total, count = next_token_loss(model(inputs), targets)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = {"plain PyTorch": seconds_of(plain)}
    for level in (0, 1, 3):
        engine = _engine(device, zero=level)
        seconds[f"zero={level}"] = seconds_of(lambda number, engine=engine: engine.step(*_batch(number, device)))
    return {"seconds of a step of a small model": seconds}, []


# -- several GPUs --


def _own_devices(device: torch.device) -> Found:
    engine = _engine(device.type)
    devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, str(engine.device))
    shared = device.type == "cuda" and len(set(devices)) < len(devices)
    return {"devices": devices}, [f"ranks share devices: {devices}"] if shared else []


def _plans(device: torch.device) -> Found:
    half = dist.get_world_size() // 2
    plans: dict[str, dict[str, Any]] = {f"zero {level}": dict(zero=level) for level in range(4)}
    plans |= {"zero 2, micro-batches": dict(zero=2, micro_batches=2), "tp": dict(tp=2), "cp": dict(cp=2)}
    plans["tp, sequence"] = dict(tp=2, sequence_parallel=True)
    if half > 1:
        plans |= {f"hybrid, zero {level}": dict(dp_replicate=2, dp_shard=half, zero=level) for level in (1, 3)}
        plans["tp, zero 3"] = dict(tp=2, zero=3)
    expected = _alone(device, 20 if device.type == "cuda" else 3, dropout=0.1)
    cases = {}
    for precision in ("fp32", "bf16"):
        for name, fields in plans.items():
            engine = _engine(device, model=partial(_model, 0.1), precision=precision, **fields)
            losses = _losses(engine, len(expected))
            cases[f"{precision}, {name}"] = (losses, expected, _TOLERANCES[precision])
    return _compare(cases)


def _tensor_replicas(device: torch.device) -> Found:
    engine = _engine(device, model=partial(_model, dropout=0.1), tp=2)
    _losses(engine, 100 if device.type == "cuda" else 3)
    differ = []
    for name, parameter in engine.model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, local.detach().cpu(), group=engine.mesh.group("tp"))
        is_whole = engine.sharded.structure.get_parameter(name).shape == local.shape
        if is_whole and not torch.equal(*everyone):
            differ.append(f"{name} differs over tp by {(everyone[0] - everyone[1]).abs().max():.1e}")
    return {}, differ


def _schedules(device: torch.device) -> Found:
    expected = _alone(device, 5)
    cases, wrong = {}, []
    for name in SCHEDULES:
        for offload in (None, "cpu") if name == "1f1b" else (None,):
            engine = _engine(device, pp=2, micro_batches=4, pp_schedule=name, offload=offload)
            cases[f"{name}{', offload' if offload else ''}"] = (_losses(engine, 5), expected, 1e-4)
            state = engine.full_state_dict()
            if dist.get_rank() == 0 and any(value.isnan().any() for value in state.values()):
                wrong.append(f"{name}: the full state dict has NaN")
    differences, differ = _compare(cases)
    return differences, [*wrong, *differ]


def _communicators(device: torch.device) -> Found:
    """NCCL writes a line for each communicator that it makes."""
    log = Path(os.environ["NCCL_DEBUG_FILE"])
    plan = ts.Plan(tp=2, zero=1)
    _losses(_engine(device, tp=2, zero=1), 2)
    made = log.read_text().count("Init COMPLETE")
    counted = communicators(plan.resolve(dist.get_world_size()))
    wrong = [f"{made} communicators were made, and {counted} are counted"] if made != counted else []
    return {"made": made, "counted": counted, "axes": list(AXES)}, wrong


def _rank_raises(device: torch.device) -> Found:
    """Rank 1 raises and stays. The others end, on NCCL by its watchdog, and have said why."""

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> Any:
        if dist.get_rank() == 1:
            raise ValueError("one rank alone")
        return next_token_loss(output, targets)

    engine = ts.parallelize(
        _model, ts.Plan(zero=1), optimizer=ADAMW, loss_fn=loss_fn, device=device, timeout=_RAISE_SECONDS
    )
    try:
        _losses(engine, 1)
    except ValueError:
        time.sleep(4 * _RAISE_SECONDS)
    return {}, []


def _leaves(device: torch.device) -> Found:
    _losses(_engine(device, zero=1), 2)
    return {}, []


_CHECKS: dict[str, Callable[[torch.device], Found]] = {
    function.__name__[1:]: function
    for function in (
        *(_self_test, _parity, _host_waits, _failed_steps, _logits, _random_numbers, _recompute, _compiled),
        *(_offload, _checkpoints, _memory, _speed),
        *(_own_devices, _plans, _tensor_replicas, _schedules, _communicators, _rank_raises, _leaves),
    )
}


def main() -> None:
    given = sys.argv[1]
    from_file = not given.startswith("{")
    job = load_job(Path(given), CheckJob) if from_file else CheckJob(**json.loads(given))
    device = default_device() if job.device == "cuda" else torch.device("cpu")
    if job.name == "communicators":
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{given}.nccl.{os.environ['RANK']}"}
    join_world(device)
    findings, wrong = _CHECKS[job.name](device)
    outcome = {"found": findings, "wrong": wrong}
    if job.name == "leaves":
        Path(given).with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    elif from_file:
        if not dist.is_initialized():
            join_world(device)
        hand_in(Path(given), int(os.environ["RANK"]), outcome)


if __name__ == "__main__":
    main()

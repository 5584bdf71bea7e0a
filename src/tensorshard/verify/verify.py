"""``verify``: a model under a plan on CPU processes, compared with plain PyTorch in one process."""

import os
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.engine.engine import Engine, LossFunction
from tensorshard.engine.generation import logits_of
from tensorshard.engine.loss import sum_and_count
from tensorshard.engine.loss_terms import takes_model
from tensorshard.engine.optimizer import OptimizerFactory, build_optimizer
from tensorshard.model.batches import batch_size, call_model, split_into
from tensorshard.model.copies import copy_module
from tensorshard.model.parameters import keeps_statistics
from tensorshard.model.trains_itself import TrainsItself
from tensorshard.parallelize.build import parallelize
from tensorshard.parallelize.checks import check_arguments
from tensorshard.plan.plan import AXES, Plan
from tensorshard.random.plain_loop import same_randomness
from tensorshard.torch_private.fake_tensors import FakeTensorMode
from tensorshard.torch_private.pytree import tree_leaves, tree_map
from tensorshard.trainer.launch.launch_errors import RankFailedError
from tensorshard.trainer.launch.notebook import notebook_launch
from tensorshard.verify.compare import Comparison, compare_rank, joined
from tensorshard.verify.culprit import Culprit, find_culprit, with_axis
from tensorshard.verify.layouts import disturb
from tensorshard.verify.record import Record, Step, Tensors, TorchSource, record
from tensorshard.verify.shrink import draws_the_same
from tensorshard.verify.shrink import shrink as make_smaller
from tensorshard.verify.verification import Part, Verification, versions
from tensorshard.weights.files.checkpoint_files import read_tensors

_TIMEOUT = 300.0  # seconds that one layout may take
_NEW_TOKENS = 4
_GENERATED, _EVALUATION = "generated tokens", "evaluation loss"
_IN_16_BITS = 5e-2  # how far 16 bits may be apart, of what a step has changed
# Fields that mean something only with another one, with which they are tried.
_WITH = {
    "sequence_parallel": "tp", "tp_plan": "tp", "tp_check": "tp",
    "pp_schedule": "pp", "pp_split": "pp", "pp_units": "pp", "pp_stages_per_rank": "pp", "shard_units": "zero",
}  # fmt: skip


def verify(
    model: nn.Module | Callable[[], nn.Module],
    plan: Plan,
    *,
    inputs: Any,
    targets: Any,
    optimizer: OptimizerFactory,
    loss_fn: LossFunction,
    world_size: int | None = None,
    steps: int = 3,
    seed: int = 0,
    shrink: bool = True,
) -> Verification:
    """Does `plan` compute what one device would? Tries it on CPU processes, on a small version of `model`.

    The model has fewer of its equal blocks, and is narrower if it is one of transformers; the batch is smaller. What
    was changed is said in ``notes``. Compared with plain PyTorch in one process are the loss, every gradient before
    clipping, the gradient's norm, every weight, buffer and optimizer state after each step, and in the end the loss and
    the output in evaluation mode. Where fp32 leaves a doubt, it is decided in fp64.

    Args:
        model: as for :func:`tensorshard.parallelize`. It is not changed.
        plan: what is tried. Its precision is that of the reference, too.
        inputs: as for :meth:`Engine.step`: one batch of samples of any number.
        targets: of these samples.
        optimizer: as for :func:`tensorshard.parallelize`.
        loss_fn: as for :func:`tensorshard.parallelize`.
        world_size: how many processes; None for the fewest that the plan can have with two data ranks or more, where it
            does not say how many these are.
        steps: how many steps.
        seed: of the initial weights.
        shrink: whether the model and the batch are made smaller; if not, they are taken as they are given.

    Returns:
        The verdict: true if all agree. ``describe()`` says it in a few lines. Where something differs, ``culprit`` says
        what went wrong first, and ``parts`` which part of the plan does it.

    Raises:
        ValueError: the plan cannot have so many processes, or is refused for this model, optimizer or batch.
        TypeError: an argument is of another kind.
        RankFailedError: a process failed, or the model itself in one process.

    Examples:
        >>> adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
        >>> build = functools.partial(torch.nn.Linear, 16, 4)
        >>> batch = dict(inputs=torch.randn(8, 16), targets=torch.randn(8, 4))
        >>> loss_fn = torch.nn.functional.mse_loss
        >>> found = ts.verify(build, ts.Plan(zero=3), **batch, optimizer=adamw, loss_fn=loss_fn, world_size=2)
        >>> bool(found)
        True
    """
    check_arguments(model, plan, optimizer, loss_fn, seed)
    if takes_model(loss_fn):
        raise ValueError(
            "verify compares the model's output with its loss, and loss_fn takes the model, which may have several: "
            "give a loss_fn(output, targets); engine.step of one process and of several can be compared by hand"
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}; it must be a number from 1 on")
    begin = time.monotonic()
    size = fewest_ranks(plan) if world_size is None else world_size
    resolved = plan.resolve(size)
    FakeTensorMode()  # imports torch's compiler, here rather than in each process
    with tempfile.TemporaryDirectory(prefix="tensorshard-verify-") as folder:
        case = _Case(model, resolved, inputs, targets, optimizer, loss_fn, steps, seed, size, Path(folder) / "state")
        case, notes = _smaller(case) if shrink else (case, [])
        trial = _tried(case)
        if trial.comparison.differences and case.plan.precision == "fp32":
            trial, notes = _decided_in_fp64(case, trial, notes)
        parts = [Part(part, True) for part in _parts(case.plan)]
        culprit = None
        if trial.comparison.differences:
            culprit = trial.culprit()
            axis, parts = _smallest_part(trial.case)
            culprit = None if culprit is None else with_axis(culprit, axis)
    facts = {
        "plan": plan.to_dict(),
        "world_size": size,
        "steps": steps,
        "optimizer": _class_of(optimizer),
        "shapes": trial.shapes,
        **versions(),
    }
    title = _short(case.plan)
    return Verification(
        title, trial.comparison, culprit, size, steps, time.monotonic() - begin, facts, parts, tuple(notes)
    )


def fewest_ranks(plan: Plan) -> int:
    """The fewest processes under which each part of `plan` has something to do."""
    known = prod(max(1, getattr(plan, axis)) for axis in AXES)
    free = any(getattr(plan, axis) == -1 for axis in AXES)
    return known * 2 if free else known


@dataclass(frozen=True)
class _Case:
    """What is tried."""

    model: nn.Module | Callable[[], nn.Module]
    plan: Plan
    inputs: Any
    targets: Any
    optimizer: OptimizerFactory
    loss_fn: LossFunction
    steps: int
    seed: int
    ranks: int
    scratch: Path
    dtype: torch.dtype | None = None
    watches_modules: bool = False

    def tolerance(self) -> tuple[float | None, float]:
        """The relative tolerance, None for that of fp32, and how many times the reference's own noise is allowed."""
        return (None, 30.0) if self.plan.precision == "fp32" else (_IN_16_BITS, 3.0)

    def build(self) -> nn.Module:
        """The model, in this process's memory."""
        if isinstance(self.model, nn.Module):
            return copy_module(self.model, {})
        torch.manual_seed(self.seed)
        return self.model()

    def batches(self, number: int) -> tuple[Any, Any]:
        """The global batch of a step: the same samples in another order, so that ranks get others."""
        samples = batch_size(self.inputs)

        def turned(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.size(0) != samples:
                return leaf
            rolled = leaf.roll(number, 0)
            return rolled.to(self.dtype) if self.dtype is not None and leaf.is_floating_point() else rolled

        return tree_map(turned, self.inputs), tree_map(turned, self.targets)

    def share(self, batch: tuple[Any, Any], rank: int, size: int) -> tuple[Any, Any]:
        """A data rank's samples, which follow those of the rank before it."""
        samples = batch_size(batch[0])
        return tree_map(
            lambda leaf: (
                leaf.tensor_split(size)[rank]
                if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.size(0) == samples
                else leaf
            ),
            batch,
        )


# -- one process --


def _alone(case: _Case, data_ranks: int) -> tuple[dict[str, list[int]], str]:
    """Writes the reference, and the same once more from weights that differ in their last place, to a file.

    Returns:
        The shapes of the parameters, and the file.
    """
    records = _one_process(case, data_ranks, False), _one_process(case, data_ranks, True)
    file = case.scratch.with_name(f"reference{os.getpid()}.pt")
    torch.save(records, file)
    return {name: list(value.shape) for name, value in records[0].initial.items()}, str(file)


def _reference(file: str) -> tuple[Record, Record]:
    return torch.load(file, mmap=True, weights_only=False)  # written by the process above


def _one_process(case: _Case, data_ranks: int, is_disturbed: bool) -> Record:
    model = case.build()
    if case.dtype is not None:
        model = model.to(case.dtype)
    if is_disturbed:
        disturb(model, eps=torch.finfo(torch.bfloat16).eps if case.plan.precision == "bf16" else None)
    if _needs_engine(case, model):
        return _by_engine(replace(case, model=model), _plain_plan(case.plan), data_ranks=1)
    model.train()
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(case.optimizer, masters)
    source = TorchSource(model, rename=str)
    by_parts = any(keeps_statistics(module) for module in model.modules())  # those of each micro-batch

    def take_step(number: int) -> float:
        micro = _micro_batches(case, number, data_ranks) if by_parts else [case.batches(number)]
        results = []
        for inputs, targets in micro:
            results.append(_loss(case.loss_fn(call_model(model, inputs), targets), inputs))
        count = sum(one[1] for one in results)
        total = torch.stack([one[0] for one in results]).sum() / count
        total.backward()
        if case.plan.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(masters.values(), case.plan.clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach())

    same = draws_the_same(case.plan) and not (by_parts and len(list(_micro_batches(case, 0, data_ranks))) > 1)
    with same_randomness(model, case.seed) if same else nullcontext():
        made = record(source, model if case.watches_modules else None, take_step, case.steps, str)
    model.eval()
    with torch.no_grad():
        inputs, targets = case.batches(case.steps)
        output = call_model(model, inputs)
        made.others = dict(_main_output(output))
        with suppress(Exception):  # of a loss that is of training alone
            total, count = _loss(case.loss_fn(output, targets), inputs)
            made.others[_EVALUATION] = (total / count).cpu()
        made.others.update(_generated(model, inputs))
    return made


def _generated(model: nn.Module, inputs: Any) -> Tensors:
    """A few tokens that a causal language model adds; nothing of another model, or where rounding decides on one."""
    tokens = _prompts(inputs)
    if tokens is None:
        return {}
    length = tokens.size(1) + _NEW_TOKENS

    def as_inputs(ids: torch.Tensor) -> Any:
        return {"input_ids": ids} if isinstance(inputs, dict) else ids

    try:
        every = inputs["input_ids"] if isinstance(inputs, dict) else inputs
        logits: torch.Tensor | None = logits_of(call_model(model, as_inputs(every)), every)[:, : tokens.size(1)]
        for _ in range(_NEW_TOKENS):
            following = logits_of(call_model(model, as_inputs(tokens)), tokens)
            reads_ahead = logits is not None and not torch.allclose(following, logits, rtol=1e-3, atol=1e-4)
            best = following[:, -1].topk(2).values
            if reads_ahead or bool((best[:, 0] - best[:, 1] <= 2e-4 * best[:, 0].abs()).any()):
                return {}
            logits = None
            tokens = torch.cat([tokens, following[:, -1].argmax(-1, keepdim=True)], 1)
    except Exception:  # a model that takes more than tokens says so in its own way
        return {}
    return {_GENERATED: tokens} if tokens.size(1) == length else {}


def _prompts(inputs: Any) -> torch.Tensor | None:
    """The beginnings of the samples, if these are token ids."""
    tokens = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.dtype != torch.int64:
        return None
    return tokens[:, :-_NEW_TOKENS] if tokens.size(1) > _NEW_TOKENS + 1 else None


def _micro_batches(case: _Case, number: int, data_ranks: int) -> Iterator[tuple[Any, Any]]:
    """The samples of all data ranks' first micro-batches, of their second ones, and so on."""
    batch = case.batches(number)
    if case.plan.micro_batches == 1:
        yield batch
        return
    shares = [case.share(batch, rank, data_ranks) for rank in range(data_ranks)]
    cut = [split_into(inputs, targets, case.plan.micro_batches) for inputs, targets in shares]
    for parts in zip(*cut, strict=True):
        yield _joined(list(parts))


def _joined(parts: list[Any]) -> Any:
    return tree_map(
        lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], torch.Tensor) and leaves[0].dim() else leaves[0],
        *parts,
    )


def _loss(result: Any, inputs: Any) -> tuple[torch.Tensor, float]:
    total, count = sum_and_count(result, torch.device("cpu"), "loss_fn returned", "return")
    samples = batch_size(inputs)
    return (total * samples, float(samples)) if count is None else (total, float(count))


def _needs_engine(case: _Case, model: nn.Module) -> bool:
    """Whether plain PyTorch has no such reference: 16 bits with fp32 masters, modules that update themselves."""
    return case.plan.precision != "fp32" or any(isinstance(module, TrainsItself) for module in model.modules())


def _plain_plan(plan: Plan) -> Plan:
    """The plan of one process with the same numbers."""
    return Plan(
        dp_shard=1, zero=0, precision=plan.precision, micro_batches=plan.micro_batches,
        clip_grad_norm=plan.clip_grad_norm, reduce_dtype=plan.reduce_dtype, random=plan.random,
    )  # fmt: skip


# -- under the plan --


def _on_rank(case: _Case, file: str) -> tuple[Comparison, Record | None] | str:
    """What differs on this rank, and its record, if that is wanted; a sentence if the plan is refused."""
    reference = _reference(file)
    made = _by_engine(case, case.plan, data_ranks=None, asks=frozenset(reference[0].others))
    if isinstance(made, str):
        return made
    comparison = compare_rank(*reference, made, dist.get_rank(), *case.tolerance())
    return comparison, made if case.watches_modules else None


def _by_engine(case: _Case, plan: Plan, data_ranks: int | None, *, asks: Container[str] = (_EVALUATION,)) -> Any:
    model = case.model
    if case.dtype is not None and not isinstance(model, nn.Module):
        model = partial(_built_as, model, case.dtype)
    elif isinstance(model, nn.Module) and case.dtype is not None:
        model = model.to(case.dtype)
    sample, _ = case.batches(0)
    try:
        engine = parallelize(
            model, plan, optimizer=case.optimizer, loss_fn=case.loss_fn, seed=case.seed, device="cpu",
            sample_inputs=sample, check_samples=False,  # what it would find is found here, and described
        )  # fmt: skip
    except (ValueError, TypeError) as error:
        if data_ranks is not None:
            raise
        return f"{error}"
    mesh = engine.mesh
    rank, size = (mesh.dp_rank, mesh.dp_size) if data_ranks is None else (0, 1)
    watched = engine.model if case.watches_modules and not plan.compile else None

    def take_step(number: int) -> float:
        return float(engine.step(*case.share(case.batches(number), rank, size)))

    made = record(_EngineSource(engine, case.scratch), watched, take_step, case.steps, str)
    inputs, targets = case.share(case.batches(case.steps), rank, size)
    made.others = {_EVALUATION: engine.evaluate(inputs, targets).cpu()} if _EVALUATION in asks else {}
    output = dict(_main_output(engine.predict(inputs)))
    prompts = _prompts(inputs) if _GENERATED in asks else None
    if prompts is not None:
        output[_GENERATED] = engine.generate(prompts, max_new_tokens=_NEW_TOKENS)
    made.others.update({name: _whole_batch(engine, value, size) for name, value in output.items()})
    if mesh.rank:  # what all ranks have in common is compared once
        made.others = {}
    return made


def _built_as(model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return model().to(dtype)


def _whole_batch(engine: Engine, value: torch.Tensor, data_ranks: int) -> torch.Tensor:
    """The outputs of all data ranks, in the order of the batch."""
    return engine.gather(value).cpu()


def _main_output(output: Any) -> Tensors:
    """The largest floating-point tensor of an output that has a row for each sample."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    main = max((leaf for leaf in tensors if leaf.dim()), key=lambda leaf: leaf.numel(), default=None)
    return {} if main is None else {"prediction": main.detach().to("cpu", copy=True)}


class _EngineSource:
    """The tensors of an Engine's training."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._sharded = engine.sharded
        self._folder = folder

    def weights(self) -> Tensors:
        self._engine.wait_for_update()
        return {name: self._copy(self._sharded.full_value(name)) for name in self._sharded.masters()}

    def buffers(self) -> Tensors:
        return {name: self._copy(value) for name, value in self._sharded.full_buffers()}

    def gradients(self) -> Tensors:
        return {}

    def states(self) -> Tensors:
        self._engine.save(self._folder, overwrite=True)
        if self._engine.mesh.rank:
            return {}
        states = {}
        for key, value in read_tensors(self._folder, "optimizer.").items():
            state, _, name = key.partition(".")
            states[f"{name}/{state}"] = value
        return states

    @contextmanager
    def watched(self, step: Step) -> Iterator[None]:
        handle = self._engine.register_gradient_hook(
            lambda name, gradient: step.gradients.__setitem__(name, self._whole(gradient))
        )
        try:
            yield
        finally:
            handle.remove()
        norm = self._engine.grad_norm
        step.norm = None if norm is None or self._engine.plan.clip_grad_norm is None else float(norm)

    def _whole(self, gradient: torch.Tensor) -> torch.Tensor:
        return self._copy(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)

    @staticmethod
    def _copy(value: torch.Tensor) -> torch.Tensor:
        return value.detach().to("cpu", copy=True)


# -- the whole comparison --


@dataclass(frozen=True)
class _Trial:
    """A case that was tried."""

    case: _Case
    shapes: dict[str, list[int]]
    file: str
    ranks: list[Record]
    comparison: Comparison

    def culprit(self) -> Culprit | None:
        plain, disturbed = _reference(self.file)
        return find_culprit(plain, disturbed, self.ranks, self.comparison, self.case.tolerance()[0])


def _tried(case: _Case) -> _Trial:
    """The case in one process and on ranks, compared.

    Raises:
        ValueError: the plan is refused.
    """
    data_ranks = case.ranks // (case.plan.tp * case.plan.pp * case.plan.cp)
    shapes, file = notebook_launch(partial(_alone, case, data_ranks), ranks=1, timeout=_TIMEOUT)[0]
    outcomes = notebook_launch(partial(_on_rank, case, file), ranks=case.ranks, timeout=_TIMEOUT)
    refusal = next((one for one in outcomes if isinstance(one, str)), None)
    if refusal is not None:
        raise ValueError(refusal)
    records = [record for _, record in outcomes if record is not None]
    return _Trial(case, shapes, file, records, joined([comparison for comparison, _ in outcomes]))


def _decided_in_fp64(case: _Case, trial: _Trial, notes: list[str]) -> tuple[_Trial, list[str]]:
    """The same in fp64, with the modules' calls; what was tried before, if the model does not compute in fp64."""
    try:
        again = _tried(replace(case, dtype=torch.float64, watches_modules=True))
    except (ValueError, RankFailedError):
        return _tried(replace(case, watches_modules=True)), [*notes, "compared in fp32: the model does not run in fp64"]
    return again, [*notes, "decided in fp64, as rounding in fp32 left a doubt"]


def _parts(plan: Plan) -> dict[str, dict[str, Any]]:
    """The parts of a plan, by their names for people: what each adds to one process."""
    plain = Plan(dp_shard=1, zero=0)
    data_ranks = plan.dp_replicate * plan.dp_shard
    parts: dict[str, dict[str, Any]] = {}
    if data_ranks > 1:
        ranks = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard}
        parts[f"zero={plan.zero}, {_shape(plan)} data ranks"] = {**ranks, "zero": plan.zero}
    for field in fields(Plan):
        value = getattr(plan, field.name)
        if field.name in ("dp_replicate", "dp_shard", "zero", "precision", "reduce_dtype", *_WITH) or value == getattr(
            plain, field.name
        ):
            continue
        with_it = {name: getattr(plan, name) for name, axis in _WITH.items() if axis == field.name}
        parts[f"{field.name}={value}"] = {field.name: value, **with_it}
    return parts


def _shape(plan: Plan) -> str:
    return f"{plan.dp_replicate} x {plan.dp_shard}" if plan.dp_replicate > 1 else f"{plan.dp_shard}"


def _smallest_part(case: _Case) -> tuple[str, list[Part]]:
    """Takes parts of the plan away, one by one, as long as what is left still fails."""
    parts = _parts(case.plan)
    kept = dict(parts)
    removals = []
    for name in parts:
        if len(kept) < 2:
            break
        rest = {other: values for other, values in kept.items() if other != name}
        is_exact = _is_exact(case, rest)
        if is_exact is None:  # it means nothing without the part
            continue
        removals.append(Part(f"without {name}", is_exact))
        if not is_exact:
            kept = rest
    return " ".join(kept), removals


def _is_exact(case: _Case, parts: dict[str, dict[str, Any]]) -> bool | None:
    """Whether a plan of some parts is exact; None if there is no such plan."""
    values: dict[str, Any] = {"dp_shard": 1, "zero": 0}
    for part in parts.values():
        values.update(part)
    try:
        plan = Plan(**values, precision=case.plan.precision, reduce_dtype=case.plan.reduce_dtype)
        size = fewest_ranks(plan)
        return not _tried(
            replace(case, plan=plan.resolve(size), ranks=size, watches_modules=False)
        ).comparison.differences
    except (ValueError, RankFailedError):
        return None


def _smaller(case: _Case) -> tuple[_Case, list[str]]:
    """The case with a smaller model and batch, and what was made smaller."""
    small = make_smaller(case.model, case.plan, case.inputs, case.targets, loss_fn=case.loss_fn)
    said = ["with " + ", ".join(small.said)] if small.said else []
    return replace(case, model=small.build, inputs=small.inputs, targets=small.targets), said


def _short(plan: Plan) -> str:
    return "Plan(" + ", ".join(_parts(plan)) + ")"


def _class_of(optimizer: Any) -> str:
    made = getattr(optimizer, "func", optimizer)
    return getattr(made, "__qualname__", type(made).__name__)

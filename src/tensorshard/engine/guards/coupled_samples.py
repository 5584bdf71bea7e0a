"""Finds forwards in which a sample depends on others of its batch, by a maximum over all of them, say.

A Plan divides the batch over the data ranks and into micro-batches, and each would take the maximum of its own samples
alone. The first forward in training notes functions that reduce a tensor over its samples. If there are any, the model
runs twice in evaluation before the first update: on the batch as it is, and with the same samples dealt otherwise.

Also here: whether a loss treats each sample by itself, so that it does not depend on how samples are dealt to the
ranks.

A Plan splits the batch: each data rank computes the loss of its own samples, one micro-batch at a time. The mean of
these is the loss of the whole batch only if no sample's loss depends on other samples. A contrastive loss, or the
balance loss of a router, couples samples. It then depends on the number of ranks, as under DistributedDataParallel.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.world import world
from tensorshard.model.batches import batch_size
from tensorshard.model.call_stack import users_line
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import NotedStatistics
from tensorshard.model.state_before_call import StateBeforeCalls
from tensorshard.model.state_places import host_random_restored
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.passes.precision import autocast
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.fake_tensors import detect_fake_mode
from tensorshard.torch_private.modules import own_buffers, set_buffer
from tensorshard.torch_private.pytree import tree_flatten, tree_unflatten
from tensorshard.torch_private.tensors import versions_kept

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}  # of outputs, relative to the largest; others are coarse
_COARSE = 3e-2
_MOST = 8  # forwards that are compared
logger = logging.getLogger("tensorshard")

_SEED = 0
_REMEDIES = (
    "If it is a mean over a number found in the batch, let loss_fn return (sum, count) of what it divides by. If it "
    "balances the load of experts, or takes another function of the whole batch, wrap that in "
    "engine.over_whole_batch(function). If it compares samples, as contrastive losses do, gather what it compares "
    "with ts.gather_samples, and take micro_batches=1"
)


class CoupledSamples:
    """Watches the first forward in training of a model, and compares it before the first update.

    Args:
        model: laid out; a stage of a pipeline is not watched, nor what is compiled.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._precision = plan.precision
        self._noted: list[str] = []
        self._given: list[tuple[Any, Any]] = []  # of the forwards before the first update
        self._watch: _Reductions | None = None
        self._seen = False
        self._parts = mesh.dp_size * plan.micro_batches
        self._checks = self._parts > 1 and plan.pp == 1 and not plan.compile
        if self._checks:
            before, after = self._begin, self._end
            hook_root(model, RootRole.COUPLED_SAMPLES, before=before, after=after, always=True, with_kwargs=True)

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._checks or model is not self._model or self._watch is not None or not model.training:
            return  # a copy of the model has these hooks, too
        if detect_fake_mode(tensor_leaves((args, kwargs))) is not None or world().is_simulated:
            return
        if not self._seen or (self._noted and len(self._given) < _MOST):
            self._given.append((args, kwargs))
        if not self._seen:
            self._watch = _Reductions(model, _num_samples((args, kwargs)))
            self._watch.__enter__()

    def _end(self, model: nn.Module, *_: Any) -> None:
        if self._watch is None or model is not self._model:
            return
        self._watch.__exit__(None, None, None)
        self._noted, self._watch = self._watch.noted, None
        self._seen = True
        if not self._noted:
            self._given.clear()

    def check(self) -> None:
        """Called before each update. A collective of all ranks before the first.

        Raises:
            RuntimeError: on every rank, if what the model returns for a sample depends on the others.
        """
        if not self._checks or world().is_simulated or dist.get_backend(self._mesh.dp_group) == "fake":
            return
        self._checks = False
        given, self._given = self._given, []
        several = self._mesh.dp_size > 1 or len(given) == min(self._parts, _MOST)  # else they are no micro-batches
        flag = torch.tensor([float(bool(self._noted and given) and several)], device=self._device)
        all_reduce_(flag, self._mesh.world_group, what="whether forwards reduce over samples")
        if flag.item() < self._mesh.world_size:
            return
        flag = torch.tensor([float(self._depends_on_others(given))], device=self._device)
        all_reduce_(flag, self._mesh.world_group, what="whether outputs change with the other samples")
        if flag.item():
            raise RuntimeError(
                f"{self._noted[0]}, and what the model returns for a sample changes with the other samples of its "
                f"batch, of which each data rank and each micro-batch has its own. Take it over each sample (dim=...), "
                f"or over those of all data ranks, with torch.distributed.all_reduce(value, "
                f"group=engine.mesh.dp_group), or train with one data rank (dp_shard=1, with tp); each with "
                f"micro_batches=1"
            )

    @torch.no_grad()
    def _depends_on_others(self, given: list[tuple[Any, Any]]) -> bool:
        group, ranks, rank = self._mesh.dp_group, self._mesh.dp_size, self._mesh.dp_rank
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, map_tensors(lambda leaf: leaf.detach().cpu(), given), group=group)
        batches = [batch for of_rank in everyone for batch in of_rank]
        samples = _num_samples(given[0])
        sizes = {(len(of_rank), _num_samples(batch)) for of_rank in everyone for batch in of_rank}
        if samples == 0 or len(sizes) > 1:
            return False
        others = []
        for place in range(rank * len(given), (rank + 1) * len(given)):
            dealt = dealt_otherwise(batches, [samples] * len(batches), place)
            if dealt is None:
                return False
            others.append(map_tensors(lambda leaf: leaf.to(self._device), dealt[0]))
            order = dealt[1]
        state: list[Any] = [[buffer.cpu() for _, _, buffer in self._buffers()] if rank == 0 else None]
        dist.broadcast_object_list(state, group_src=0, group=group)
        with versions_kept([buffer for _, _, buffer in self._buffers()]):
            pairs = [
                [self._run(args, kwargs, samples, state[0]) for args, kwargs in both]
                for both in zip(given, others, strict=True)
            ]
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, pairs, group=group)
        pairs = [pair for of_rank in gathered for pair in of_rank]
        counts = {-1 if outputs is None else len(outputs) for pair in pairs for outputs in pair}
        if -1 in counts or len(counts) > 1:
            return False
        plain, mixed = ([torch.cat(parts) for parts in zip(*runs, strict=True)] for runs in zip(*pairs, strict=True))
        return any(self._differ(dealt, full[order]) for full, dealt in zip(plain, mixed, strict=True))

    def _differ(self, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = _COARSE if self._precision != "fp32" else _TOLERANCES.get(actual.dtype, _COARSE)
        largest = expected.double().abs().max()
        return bool((actual.double() - expected.double()).abs().max() > tolerance * largest)

    def _buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return [
            (module, name, buffer) for module in self._model.modules() for name, buffer in own_buffers(module).items()
        ]

    def _run(self, args: Any, kwargs: Any, samples: int, state: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """What the model returns for each sample, in evaluation; None if it makes random numbers, or does not run.

        Its state is put back, as counters may count calls in evaluation, too.

        Args:
            state: values of all buffers, the same on every rank: a buffer that is each rank's own couples no samples.
        """
        training = [module for module in self._model.modules() if module.training]
        before = StateBeforeCalls(self._model.modules()).keep([], watched=True)
        held = [(module, name, buffer, buffer.clone()) for module, name, buffer in self._buffers()]
        self._model.eval()
        try:
            for (_, _, buffer, _), value in zip(held, state, strict=False):
                if buffer.shape == value.shape:
                    buffer.copy_(value)
            with torch.random.fork_rng(), host_random_restored():
                states = _random_states()
                with autocast(self._precision, self._device):
                    returned = self._model(*args, **kwargs)
                drew = any(not torch.equal(*pair) for pair in zip(states, _random_states(), strict=True))
        except Exception as error:  # a model may need other arguments in evaluation
            if not raised_by_model(error):
                raise
            return None
        finally:
            before.put_back()
            for module, name, buffer, value in held:
                buffer.copy_(value)
                set_buffer(module, name, buffer)
            for module in training:
                module.training = True
        leaves = tensor_leaves(returned)
        if drew:
            return None
        similarities = {samples, samples * self._mesh.dp_size}  # they are of no sample alone
        return [
            leaf.detach().cpu()
            for leaf in leaves
            if leaf.dim() > 0
            and leaf.shape[0] == samples
            and leaf.is_floating_point()
            and not (leaf.dim() == 2 and leaf.shape[1] in similarities)
        ]


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


class _Reductions(NotedStatistics):
    """Notes functions that reduce tensors over samples.

    Sums are left out, as losses take them, and so are softmax and the like, by which contrastive losses compare
    samples: see docs/coupled-losses.md.

    Attributes:
        noted: for each, which module does what, and where.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self._model, self._samples = model, samples
        self.noted: list[str] = []

    def note(self, function: Callable[..., Any], tensor: torch.Tensor, dims: tuple[int, ...] | None) -> None:
        if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
            return
        if not torch.is_grad_enabled():  # it moves a buffer, which is compared by itself
            return
        if tensor.dim() < 2 or not self._samples or tensor.shape[0] % self._samples:
            return
        if function in (torch.mean, torch.Tensor.mean) if dims is None else 0 not in dims:  # losses take such means
            return
        self.noted.append(self._described(function))

    def _described(self, func: Any) -> str:
        frame, names = sys._getframe(3), {module: name for name, module in self._model.named_modules()}
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in names:
                break
            frame = frame.f_back  # type: ignore[assignment]
        where = f"module {names[owner]!r}" if frame is not None and names[owner] else "the model"
        line = users_line()
        return f"{where} takes the {func.__name__} of a tensor over the samples of its batch" + (
            f" ({line})" if line else ""
        )


def _num_samples(tree: Any) -> int:
    return next((leaf.shape[0] for leaf in tensor_leaves(tree) if leaf.dim()), 0)


def check_independent_samples(
    evaluate: Callable[[Any, Any], torch.Tensor],
    mesh: Mesh,
    inputs: Any,
    targets: Any,
    *,
    micro_batches: int,
    tolerance: float,
    is_asked: bool,
) -> None:
    """Compares the loss of the batch with that of the same samples, dealt to ranks and micro-batches in another way.

    If they differ, the log of rank 0 says so. A collective of all ranks; the batch is gathered on each data rank.

    Args:
        evaluate: returns the mean loss of a batch, cut into `micro_batches`, in evaluation mode.
        tolerance: the relative difference that rounding may cause.
        is_asked: whether the user wants to know what cannot be checked, too.
    """
    if mesh.dp_size * micro_batches == 1:
        return
    batches: list[Any] = [None] * mesh.dp_size
    dist.all_gather_object(batches, (inputs, targets), group=mesh.dp_group)
    dealt = dealt_otherwise(batches, [batch_size(given) for given, _ in batches], mesh.dp_rank)
    if dealt is None:
        if mesh.rank == 0 and is_asked:
            logger.warning(
                "debug: whether the loss couples samples is not checked: the ranks' batches cannot be joined"
            )
        return
    state = torch.get_rng_state()
    first = evaluate(inputs, targets).item()
    if not is_asked and not torch.equal(state, torch.get_rng_state()):
        return  # other samples get other random numbers
    other = evaluate(*dealt[0]).item()
    if mesh.rank == 0 and abs(first - other) > tolerance * max(abs(first), abs(other)):
        logger.warning(
            "%sthe loss of a batch is %.6g, and %.6g when its samples are dealt to the %d data ranks and "
            "%d micro-batches in another order. So it couples samples, and depends on the number of ranks. %s "
            "(docs/coupled-losses.md)",
            "debug: " if is_asked else "",
            first,
            other,
            mesh.dp_size,
            micro_batches,
            _REMEDIES,
        )


def dealt_otherwise(batches: list[Any], sizes: list[int], rank: int) -> tuple[Any, torch.Tensor] | None:
    """As many samples as rank `rank` had, from all ranks' samples in another order.

    Args:
        batches: of each rank, of any structure. Tensors whose first dimension is not the samples stay as they are.
        sizes: how many samples each has.

    Returns:
        The batch, and for each place of the joined batches the sample that is there now; None if they cannot be joined.
    """
    flat = [tree_flatten(batch) for batch in batches]
    start = sum(sizes[:rank])
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(_SEED), device="cpu")
    mine = order[start : start + sizes[rank]]
    if len({len(leaves) for leaves, _ in flat}) > 1:
        return None
    leaves = []
    for column in zip(*(flattened for flattened, _ in flat), strict=True):
        first = column[0]
        if not isinstance(first, torch.Tensor) or first.dim() == 0 or not _are_samples(column, sizes):
            leaves.append(column[rank])
        elif len({part.shape[1:] for part in column}) > 1:
            return None
        else:
            joined = torch.cat([part.to(first.device) for part in column])
            leaves.append(joined[mine.to(first.device)])
    return tree_unflatten(leaves, flat[rank][1]), order


def _are_samples(column: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    return [part.shape[:1] for part in column] == [(size,) for size in sizes]

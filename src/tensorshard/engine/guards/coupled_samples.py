"""Finds forwards in which a sample depends on others of its batch, by a maximum over all of them, say.

A Plan divides the batch over the data ranks, and each would take the maximum of its own samples alone. The first
forward in training notes functions that reduce a tensor over its samples. If there are any, the model runs twice in
evaluation before the first update: on the batch as it is, and with the same samples dealt to the ranks otherwise.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.world import world
from tensorshard.model.call_stack import users_line
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.provenance import run_operation
from tensorshard.model.state_before_call import StateBeforeCalls
from tensorshard.model.state_places import host_random_restored
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.modules import own_buffers, set_buffer

# Each with the place of its dimensions among the arguments. A sum over samples is linear: their mean is that of ranks.
_REDUCTIONS: dict[Callable[..., Any], int] = {
    reduction: 1
    for name in ("max", "min", "amax", "amin", "aminmax", "mean", "std", "var", "logsumexp", "softmax", "log_softmax")
    for reduction in (getattr(torch, name), getattr(torch.Tensor, name, None))
    if reduction is not None
} | {torch.norm: 2, torch.Tensor.norm: 2, torch.linalg.norm: 2, torch.linalg.vector_norm: 2}
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}  # of outputs, relative to the largest; others are coarse
_COARSE = 3e-2


class CoupledSamples:
    """Watches the first forward in training of a model, and compares it before the first update.

    Args:
        model: laid out; a stage of a pipeline is not watched, nor what is compiled.
    """

    def __init__(self, model: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self._model, self._mesh, self._device = model, mesh, device
        self._is_coarse = plan.precision != "fp32"
        self._noted: list[str] = []
        self._given: tuple[Any, Any] | None = None
        self._watch: _Reductions | None = None
        self._ended = False
        self._handles: list[RemovableHandle] = []
        self._done = mesh.dp_size == 1 or plan.pp > 1 or plan.compile
        if not self._done:
            self._handles = [
                model.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True),
                model.register_forward_hook(self._end, always_call=True),
            ]

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._watch is None and model.training and not world().is_simulated:
            self._given = args, kwargs
            self._watch = _Reductions(model, _num_samples(args, kwargs))
            self._watch.__enter__()

    def _end(self, *_: Any) -> None:
        if self._watch is None or self._ended:
            return
        self._ended = True  # the hooks go later: a dict of hooks may not change while they are called
        self._watch.__exit__(None, None, None)
        self._noted = self._watch.noted
        if not self._noted:
            self._given = None

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def check(self) -> None:
        """Called before each update. A collective of the data ranks before the first.

        Raises:
            RuntimeError: on every data rank, if what the model returns for a sample depends on the others.
        """
        if self._done or dist.get_backend(self._mesh.dp_group) == "fake":
            return
        self._done = True
        self._stop()
        given, self._given = self._given, None
        flag = torch.tensor([float(bool(self._noted) and given is not None)], device=self._device)
        all_reduce_(flag, self._mesh.world_group, what="whether forwards reduce over samples")
        if flag.item() < self._mesh.world_size:
            return
        assert given is not None
        if self._depends_on_others(*given):
            raise RuntimeError(
                f"{self._noted[0]}, and what the model returns for a sample changes with the other samples of its "
                f"batch, of which each data rank has its own. Take it over each sample (dim=...), or over those of all "
                f"data ranks, with torch.distributed.all_reduce(value, group=engine.mesh.dp_group), or train with one "
                f"data rank (dp_shard=1, with tp or pp)"
            )

    @torch.no_grad()
    def _depends_on_others(self, args: Any, kwargs: Any) -> bool:
        group, ranks, rank = self._mesh.dp_group, self._mesh.dp_size, self._mesh.dp_rank
        samples = _num_samples(args, kwargs)
        everyone: list[Any] = [None] * ranks
        mine = map_tensors(lambda leaf: leaf.detach().cpu(), (args, kwargs))
        dist.all_gather_object(everyone, (samples, tensor_leaves(mine)), group=group)
        counts = [count for count, _ in everyone]
        if len(set(counts)) > 1 or samples == 0 or len({_shapes(leaves) for _, leaves in everyone}) > 1:
            return False  # such batches cannot be dealt otherwise
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
        own = order[rank * samples : (rank + 1) * samples]
        columns = iter(list(zip(*(leaves for _, leaves in everyone), strict=True)))

        def dealt(leaf: torch.Tensor) -> torch.Tensor:
            column = next(columns)
            return torch.cat(column)[own].to(leaf.device) if _has_samples(leaf, samples) else leaf

        other = map_tensors(dealt, (args, kwargs))
        found = [self._run(args, kwargs, samples), self._run(other[0], other[1], samples)]
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, found, group=group)
        if any(outputs is None for runs in gathered for outputs in runs):
            return False
        plain, mixed = ([torch.cat(parts) for parts in zip(*runs, strict=True)] for runs in zip(*gathered, strict=True))
        return any(self._differ(found, full[order]) for full, found in zip(plain, mixed, strict=True))

    def _differ(self, found: torch.Tensor, expected: torch.Tensor) -> bool:
        tolerance = _COARSE if self._is_coarse else _TOLERANCES.get(found.dtype, _COARSE)
        largest = expected.double().abs().max()
        return bool((found.double() - expected.double()).abs().max() > tolerance * largest)

    def _run(self, args: Any, kwargs: Any, samples: int) -> list[torch.Tensor] | None:
        """What the model returns for each sample, in evaluation; None if it makes random numbers, or does not run.

        Its state is put back, as counters may count calls in evaluation, too.
        """
        training = [module for module in self._model.modules() if module.training]
        before = StateBeforeCalls(self._model.modules()).keep([], watched=True)
        held = [
            (module, name, buffer, buffer.clone())
            for module in self._model.modules()
            for name, buffer in own_buffers(module).items()
        ]
        self._model.eval()
        try:
            with torch.random.fork_rng(), host_random_restored():
                states = _random_states()
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
        return [leaf.detach().cpu() for leaf in leaves if _has_samples(leaf, samples) and leaf.is_floating_point()]


def _random_states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]


class _Reductions(TorchFunctionMode):
    """Notes functions that reduce activations over samples.

    Attributes:
        noted: for each, which module does what, and where.
    """

    def __init__(self, model: nn.Module, samples: int) -> None:
        super().__init__()
        self._model, self._samples = model, samples
        self.noted: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _REDUCTIONS.get(func)
        if place is not None and args and self._is_over_samples(args[0], *_dims(place, args, kwargs)):
            self.noted.append(self._described(func))
        return run_operation(func, args, kwargs)

    def _is_over_samples(self, tensor: Any, is_given: bool, dims: tuple[int, ...]) -> bool:
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
            return False
        if tensor.dim() < 2 or not self._samples or tensor.shape[0] % self._samples:
            return False
        return not is_given or 0 in {dim % tensor.dim() for dim in dims}

    def _described(self, func: Any) -> str:
        frame, names = sys._getframe(2), {module: name for name, module in self._model.named_modules()}
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


def _dims(place: int, args: Any, kwargs: Any) -> tuple[bool, tuple[int, ...]]:
    """Whether dimensions are given, and which."""
    given = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis"))
    if isinstance(given, bool) or given is None:
        return False, ()
    if isinstance(given, int):
        return True, (given,)
    if isinstance(given, tuple | list) and all(isinstance(dim, int) for dim in given):
        return bool(given), tuple(given)
    return True, ()  # another tensor, with which torch.max compares it


def _num_samples(args: Any, kwargs: Any) -> int:
    return next((leaf.shape[0] for leaf in tensor_leaves((args, kwargs)) if leaf.dim()), 0)


def _has_samples(leaf: torch.Tensor, samples: int) -> bool:
    return leaf.dim() > 0 and leaf.shape[0] == samples


def _shapes(leaves: list[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple(leaf.shape for leaf in leaves)

"""Asks whether what a model computes for a sample depends on the others of its batch, before the first update.

Whatever cuts a batch (data ranks, micro-batches, stages of a pipeline) computes what one process does only if it does
not. So a micro-batch of the first step is run again, in training, without gradients: as it was, and twice with copies
of some samples in the places of others. Shapes, places and random numbers are the same in all runs. So a sample that
has stayed gets the same result to the last bit, if nothing of the others is in it. (Where the others decide how tensors
are grouped, as in experts, rounding may differ. Then the difference is compared with what rounding does to this model.)
The first samples by themselves tell whether their number and places matter.

What comes from all data ranks is of the whole batch, and is repeated: results of ``torch.distributed`` over them, of
``ts.gather_samples`` and of ``engine.over_whole_batch``. Batch normalizations that a plan knows take constants.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import cycle
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.kept_results import KeptResults
from tensorshard.comm.world import world
from tensorshard.common.words import is_inside
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.engine_random import kept_random_state
from tensorshard.engine.guards.own_collectives import models_collectives
from tensorshard.engine.same_numbers import SameNumbers
from tensorshard.loss.logits.deferred_logits import DeferredLogits
from tensorshard.model.batches import batch_size, samples_joined, samples_taken
from tensorshard.model.call_stack import users_line
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.model_errors import raised_by_model
from tensorshard.model.parameters import BufferValues
from tensorshard.model.state_before_call import StateBeforeCalls
from tensorshard.model.state_places import host_random_states
from tensorshard.model.tensors import map_tensors, tensor_leaves
from tensorshard.model.whole_sequences import is_part
from tensorshard.passes.batch_norm import constant_statistics
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.autograd import is_function_transformed
from tensorshard.torch_private.fake_tensors import detect_fake_mode
from tensorshard.torch_private.modules import every_module, own_parameters
from tensorshard.torch_private.pytree import tree_leaves, tree_tensors
from tensorshard.torch_private.tensors import tensor_version

logger = logging.getLogger("tensorshard")


class _Rows(NamedTuple):
    """A tensor that has a row, or several, for each sample.

    Args:
        tensor: of any shape, the samples along `dim`, perhaps merged with the dimension before or after them.
    """

    tensor: torch.Tensor
    samples: int
    dim: int

    def of(self, places: Sequence[int]) -> list[torch.Tensor]:
        """The rows of the samples in `places`, for each of the ways in which they may lie."""
        index = torch.tensor(places, device=self.tensor.device)
        each = self.tensor.size(self.dim) // self.samples
        if each == 1:
            rows = self.tensor.index_select(self.dim, index)
            is_square = tuple(self.tensor.shape) == (self.samples, self.samples)  # scores of all samples with all
            return [rows, rows.index_select(1, index)] if is_square else [rows]
        views = ((self.samples, each), (each, self.samples))
        return [self.tensor.unflatten(0, view).index_select(dim, index) for dim, view in enumerate(views)]


class _Entries(NamedTuple):
    """A list that has a tensor for each sample; or, by chance, as many tensors that have rows for all samples.

    Args:
        tensors: strided, of any shapes.
    """

    tensors: list[torch.Tensor]

    def of(self, places: Sequence[int]) -> list[torch.Tensor]:
        """What belongs to the samples in `places`, for each of the ways in which it may."""
        ways: list[Sequence[torch.Tensor]] = [[self.tensors[place] for place in places]]
        samples = len(self.tensors)
        if all(tensor.dim() and tensor.numel() and len(tensor) % samples == 0 for tensor in self.tensors):
            ways += zip(*(_Rows(tensor, samples, 0).of(places) for tensor in self.tensors), strict=False)
        return [torch.cat([tensor.flatten() for tensor in way]) for way in ways]


Rows = list[_Rows | _Entries | None]
"""The tensors of a model's output that have rows for the samples; None in the places of others."""

_MODES = "tensorshard.passes.batch_norm"  # in which functions of a normalization's own forward are called
_WAITED_FOR = (
    "The first step ran the model on other samples, to see that each is computed by itself. The stages that follow "
    "wait for this one; parallelize(check_samples=False) does not ask"
)
_LARGE = 1e-2  # a difference, relative to the largest element, that is no rounding
_TIMES = 16.0  # by which a difference is larger than that of rounding
_SHAPES, _SHAPES_IN_16_BITS = 1e-4, 0.2  # what rounding may do where products have other shapes
_OTHERS = (
    " returns for a sample what depends on the other samples of its batch. Each data rank and each micro-batch has "
    "samples of its own, so the result depends on the plan. Compute it of each sample by itself (dim=...); or of those "
    "of all data ranks, with micro_batches=1: by torch.distributed.all_reduce(value, group=engine.mesh.dp_group), "
    "ts.gather_samples, or engine.over_whole_batch; or train with one data rank (dp_shard=1, with tp) and "
    "micro_batches=1. If the first dimension is not that of the samples, parallelize(check_samples=False) does not "
    "look at this"
)
_FEWER = (
    " returns something else for the same samples when there are fewer in the batch, as where it cuts the batch or "
    "divides by its size. Each data rank and each micro-batch has a part of the batch, so the result depends on the "
    "plan: compute each sample by itself, or train with one data rank (dp_shard=1, with tp) and micro_batches=1. If "
    "the first dimension is not that of the samples, parallelize(check_samples=False) does not look at this"
)
_LEFT = (
    " goes on with what its last forward has left of other samples, so that the micro-batches of a step depend on each "
    "other: set micro_batches=1, or give the forward what is kept of its samples"
)


class IndependentSamples:
    """Notes what the model is given in the first step, and runs it again before the first update.

    Args:
        sharded: laid out.
        inside: the context in which the Engine itself runs the model.
        run: runs the model on what was noted, and calls the function that it is given with the output, on ranks that
            have one.
        numbers: says what random numbers belong to; None to each rank.
        is_asked: whether to do this at all.

    Attributes:
        verdict: whether each sample was seen to be computed alone, or why this was not asked or not seen; "" before.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        plan: Plan,
        mesh: Mesh,
        device: torch.device,
        *,
        inside: Callable[[], AbstractContextManager[None]],
        run: Callable[[Any, Callable[[Any], None]], None],
        numbers: Callable[[], SameNumbers | None],
        is_asked: bool,
    ) -> None:
        self._sharded, self._plan, self._mesh, self._device = sharded, plan, mesh, device
        self._inside, self._run_model, self._numbers = inside, run, numbers
        self.verdict = ""
        self._given: list[Any] = []
        self._is_cut = False  # whether the batch is known to have its samples in the first dimension
        self._kept = KeptResults(mesh.dp_group)
        self._states: StateBeforeCalls | None = None
        self._noted_weights: list[int] = []  # their versions
        self._leaves_tensors = False  # whether a forward may go on with what the one before has left
        self._draws_otherwise = False  # whether fewer samples would get other random numbers
        cuts = mesh.dp_size * plan.micro_batches > 1
        self._asks = cuts and is_asked and not world().is_simulated and dist.get_backend(mesh.dp_group) != "fake"
        if cuts and not is_asked and mesh.rank == 0:
            logger.info("check_samples=False: whether the model computes something of several samples is not looked at")
        if self._asks and plan.pp == 1:
            hook_root(sharded.model, RootRole.INDEPENDENT_SAMPLES, before=self._before, with_kwargs=True)

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._asks and model is self._sharded.model and model.training and torch.is_grad_enabled():
            self.note((args, kwargs))  # a copy of the model has this hook, too

    def note(self, given: Any) -> None:
        """Notes a micro-batch that is about to be run."""
        if self._asks and len(self._given) < 2 and detect_fake_mode(tensor_leaves(given)) is None:
            self._noted_weights = self._noted_weights if self._given else self._weights()
            self._given.append(given)

    def _weights(self) -> list[int]:
        modules = self._sharded.all_modules()
        return [tensor_version(parameter) for module in modules for parameter in own_parameters(module).values()]

    def samples_are_first(self) -> None:
        """Says that batches are cut along the first dimension of their tensors, as steps do."""
        self._is_cut = True

    def check(self) -> None:
        """Called before each update. A collective of all ranks before the first.

        Raises:
            RuntimeError: on every rank, if what the model computes for a sample depends on others.
        """
        if not self._asks:
            return
        self._asks = False
        given, self._given = self._given, []
        batch, numbers = self._batch(given), self._numbers()
        # Rows that values choose are told apart by their values, and copies have the same. A forward that writes
        # weights would write them again.
        writers = self._sharded.writers
        writes = self._weights() != self._noted_weights if writers is None else bool(writers > 0)
        of_rows = numbers is not None and numbers.belong_to_rows
        whys = ("", "random numbers belong to rows", "a forward writes weights", "there are no two samples")
        why = whys[int(self._largest(float(3 if batch is None else 2 if writes else of_rows)))]
        if why:
            self.verdict = f"not asked: {why}"
            return
        with ExitStack() as stack:
            stack.enter_context(self._inside())
            if self._plan.compile:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            message = self._fault(batch, 0)
            if message is not None and not self._is_cut and not self._largest(float(_size(batch, 1) < 2)):
                message = message if self._fault(batch, 1) is not None else None
        self._states = None
        self.verdict = "not seen" if message == "" else "alone"
        if message:
            raise RuntimeError(message)

    def _largest(self, value: float) -> float:
        """The largest that a rank says. A collective of all."""
        said = torch.tensor([value], device=self._device)
        all_reduce_(said, self._mesh.world_group, op=dist.ReduceOp.MAX, what="whether samples are computed alone")
        return said.item()

    def _batch(self, given: list[Any]) -> Any:
        """A batch of two samples or more; None if there is none. A collective of all ranks.

        A single sample is joined with that of the next micro-batch, or of a neighbour; not one of which each rank has
        some positions, which are not sent.
        """
        sizes = [_size(each, 0) for each in given]
        if not self._largest(float(sizes[:1] == [1])):
            return given[0] if given and sizes[0] > 1 else None
        if any(is_part(tensor) for tensor in tree_tensors(given)):
            return None
        others = given[1:2]
        if self._mesh.dp_size > 1:
            everyone: list[Any] = [None] * self._mesh.dp_size
            mine = map_tensors(lambda leaf: leaf.detach().cpu(), given[0]) if given else None
            dist.all_gather_object(everyone, mine, group=self._mesh.dp_group)
            others = [everyone[(self._mesh.dp_rank + 1) % self._mesh.dp_size]]
        if sizes[:1] != [1]:
            return given[0] if given and sizes[0] > 1 else None
        return samples_joined(given[0], others[0]) if others else None

    def _fault(self, batch: Any, dim: int) -> str | None:
        """What is wrong with the model, the same on every rank; None if nothing is, "" if that cannot be seen. A
        collective of all ranks."""
        size = _size(batch, dim)
        kept = _halves(size)
        with_copies = [samples_taken(batch, size, _with_copies(size, half), dim) for half in kept]
        alone = [([batch], [other]) for other in with_copies]
        # A second micro-batch also gets what the first has left of its samples.
        trials = alone if self._plan.micro_batches == 1 else [([batch, batch], with_copies)]
        with torch.no_grad(), constant_statistics(self._sharded.all_modules()):
            self._kept.forget()
            base = self._run(trials[0][0], dim)
            if not self._largest(float(any(rows is not None for rows in base[0]))):
                return ""
            others = [rows for _, batches in trials for rows in self._run(batches, dim)]
            for number, (half, rows) in enumerate(zip(kept, others, strict=True)):
                if self._differs(base[min(number, len(base) - 1)], rows, half, batch, base[0], dim):
                    if number > 0 and len(trials) == 1:  # the batch came second
                        [by_itself] = self._run(alone[number][1], dim)
                        if not self._differs(base[0], by_itself, half, batch, base[0], dim):
                            return f"{self._first(trials[0], half, dim)}{_LEFT}"
                    return f"{self._first(alone[number], half, dim)}{_OTHERS}"
            # What comes from all ranks, from the forward before, or from a generator would be of other samples.
            if self._largest(float(self._kept.any() or self._leaves_tensors or self._draws_otherwise)):
                return None
            first, least = range(size // 2), _SHAPES if self._plan.precision == "fp32" else _SHAPES_IN_16_BITS
            few = samples_taken(batch, size, first, dim)
            [part] = self._run([few], dim)
            if self._differs(base[0], part, first, few, part, dim, least):
                return f"{self._first(([batch], [few]), first, dim)}{_FEWER}"
        return None

    def _differs(
        self, one: Rows, other: Rows, places: Sequence[int], batch: Any, plain: Rows, dim: int, least: float = 0.0
    ) -> bool:
        """Whether results differ on any rank by more than `least`, and than rounding does. A collective of all ranks.

        Args:
            batch: what shows how much rounding does. plain: what the model returns for it.
        """
        found = self._largest(_difference(one, other, places))
        if found <= least or found >= max(_LARGE, least):
            return found > least
        [moved] = self._run([batch], dim, rounds=True)
        rounded = self._largest(_difference(plain, moved, range(_size(batch, dim))))
        return found > (_TIMES * rounded if rounded > 0 else _SHAPES)

    def _first(self, trial: tuple[list[Any], list[Any]], places: Sequence[int], dim: int) -> str:
        """The first operation, on any rank, by which the last forwards of a trial differ."""
        models = [self._sharded.model, *(stage.module for stage in getattr(self._sharded, "stages", ()))]
        one, other = (_size(batches[-1], dim) for batches in trial)
        watch = _FirstDifference(models, places, dim, least=0.0 if one == other else _LARGE)
        for watch.samples, batches in zip((one, other), trial, strict=True):
            self._run(batches, dim, watch=watch)
        everyone: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(everyone, watch.found, group=self._mesh.world_group)
        return next(filter(None, everyone), "the model")

    def _run(
        self,
        batches: list[Any],
        dim: int,
        *,
        rounds: bool = False,
        watch: "_FirstDifference | None" = None,
    ) -> list[Rows]:
        """What the model returns for batches that come one after the other; nothing for those from a failure on.

        Args:
            watch: watches the last one.
        """
        modules = self._sharded.all_modules()
        if self._states is None:
            self._states = StateBeforeCalls(modules)
        buffers, state = BufferValues(modules), self._states.keep([], watched=True)
        runs: list[Rows] = [[] for _ in batches]
        with _rounding(modules) if rounds else nullcontext():
            try:
                for batch, rows in zip(batches, runs, strict=True):
                    watched = watch if watch is not None and rows is runs[-1] else nullcontext()
                    with kept_random_state(self._device), self._kept.following(), self._collectives_kept(), watched:
                        states = self._random_states()
                        self._run_model(batch, partial(self._read, rows, _size(batch, dim), dim))
                        self._draws_otherwise |= states != self._random_states()
            except Exception as error:  # it may need gradients, or other values
                stages = getattr(self._sharded, "stages", ())
                if stages and not (len(stages) == 1 and stages[0].is_last):
                    error.add_note(_WAITED_FOR)
                    raise
                if not raised_by_model(error):
                    raise
                logger.debug("whether samples are computed alone cannot be seen: %s", error)
            finally:
                self._leaves_tensors |= buffers.hold_other_numbers() or state.left_tensors()
                state.put_back()
                buffers.restore()
        return runs

    def _random_states(self) -> Any:
        of_torch = (torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()))
        return host_random_states(), None if self._numbers() is not None else [state.tolist() for state in of_torch]

    @staticmethod
    def _read(rows: Rows, size: int, dim: int, output: Any) -> None:
        rows[:] = _rows_within(output, size, dim)

    def _collectives_kept(self) -> AbstractContextManager[None]:
        """The context in which the model's own collectives over the data ranks give what they gave in the first run."""

        def instead(name: str, call: Callable[[], Any], group: dist.ProcessGroup, results: Any) -> Any:
            work = call()
            if name != "barrier" and group in (self._kept.group, dist.group.WORLD):
                work.wait()
                self._kept.replace(tree_tensors(results))
            return work

        return models_collectives(instead)


def _size(batch: Any, dim: int) -> int:
    """How many samples a batch has along `dim`; 0 if its tensors do not say it."""
    try:
        return batch_size(batch) if dim == 0 else next(t.size(dim) for t in tree_tensors(batch) if t.dim() > dim)
    except (ValueError, StopIteration):
        return 0


def _halves(size: int) -> list[list[int]]:
    """Two parts of the samples, so that neighbours at any distance are in both, and so are the first and the last: the
    sequence of Thue and Morse, which has no period, but for its end."""
    side = [place.bit_count() % 2 for place in range(size - 1)] + [1]
    return [[place for place in range(size) if side[place] == part] for part in (0, 1)]


def _with_copies(size: int, kept: Sequence[int]) -> list[int]:
    """Which sample is in each place, where copies of those in `kept` are in the places of the others."""
    stays, copies = set(kept), cycle(kept)
    return [place if place in stays else next(copies) for place in range(size)]


def _rows_within(output: Any, samples: int, dim: int, *, floating: bool = False) -> Rows:
    """What a model or a function returned, by its samples."""

    def of_samples(node: Any) -> bool:
        if not isinstance(node, list | tuple) or len(node) != samples:
            return False
        tensors = [each for each in node if type(each) is torch.Tensor and each.layout == torch.strided]
        return len(tensors) == samples and all(tensor.is_floating_point() for tensor in tensors)

    rows: Rows = []
    for node in tree_leaves(output, is_leaf=of_samples):
        if of_samples(node):
            rows.append(_Entries([tensor.detach().clone() for tensor in node]))
            continue
        leaves = [leaf for leaf in tensor_leaves(node) if leaf.is_floating_point() or not floating]
        rows += [_rows(leaf, samples, dim) for leaf in leaves]
    return rows


def _rows(leaf: torch.Tensor, samples: int, dim: int) -> _Rows | None:
    """A tensor of a model's output, if it has rows for the samples.

    Logits that are not computed yet are stood for by what they are computed from. Of a sequence that is cut, and of a
    tensor that is split, this rank's part is looked at.
    """
    if isinstance(leaf, DeferredLogits):
        leaf = next(source for source in leaf.form.sources() if source is not None)
    if is_part(leaf):
        leaf = leaf.local  # type: ignore[attr-defined]
    elif isinstance(leaf, DTensor):
        leaf = leaf.to_local()
    if leaf.dim() <= dim or leaf.layout != torch.strided or not leaf.numel():
        return None
    has_rows = leaf.size(dim) == samples or (dim == 0 and leaf.size(0) % samples == 0)
    return _Rows(leaf.detach().clone(), samples, dim) if has_rows else None


def _difference(one: Rows, other: Rows, places: Sequence[int]) -> float:
    """How much the results of the samples in `places` differ at most, relative to the largest element."""
    found = 0.0
    for a, b in zip(one, other, strict=True) if len(one) == len(other) else ():
        if a is not None and b is not None:
            pairs = zip(a.of(places), b.of(places), strict=False)
            found = max(found, min((_relative(*pair) for pair in pairs if pair[0].shape == pair[1].shape), default=0.0))
    return found


def _relative(one: torch.Tensor, other: torch.Tensor) -> float:
    if torch.equal(one, other):
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    apart = (one - other).abs()
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, apart).nan_to_num(1.0, 1.0)
    largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return (apart.max() / largest.clamp_min(torch.finfo(torch.float64).tiny)).item()


@contextmanager
def _rounding(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A context in which what the innermost modules return is moved by one unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(0)

    def moved(leaf: torch.Tensor) -> torch.Tensor:
        if type(leaf) is not torch.Tensor or not leaf.is_floating_point() or is_function_transformed():
            return leaf
        sides = torch.randint(2, leaf.shape, generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        return leaf * (1 + sides.to(leaf) * torch.finfo(leaf.dtype).eps)

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(moved, output)

    with ExitStack() as stack:
        for module in modules:
            if not any(True for _ in module.children()):
                stack.callback(nn.Module.register_forward_hook(module, after).remove)
        yield


class _FirstDifference(TorchFunctionMode):
    """Finds the first function whose results for some samples are not the same in two runs.

    Args:
        places: of these samples.
        least: what is no difference.

    Attributes:
        samples: how many samples the run has.
        found: the module and the line that called it; None for none.
    """

    def __init__(self, models: Sequence[nn.Module], places: Sequence[int], dim: int, least: float) -> None:
        super().__init__()
        self._names = {module: name for model in models for name, module in every_module(model).items()}
        self._places, self._dim, self._least = places, dim, least
        self._before: list[tuple[Any, Rows]] = []
        self._now: list[tuple[Any, Rows]] = []
        self.samples = 0
        self.found: str | None = None

    def __enter__(self) -> "_FirstDifference":
        self._before, self._now = self._now, []
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_inside(caller := frame.f_globals.get("__name__", ""), ["torch", _MODES]):
            frame = frame.f_back
        is_ours = is_inside(caller, ["tensorshard"]) and not is_inside(caller, ["tensorshard.models"])
        if self.found is not None or is_ours:
            return result
        self._now.append((func, _rows_within(result, self.samples, self._dim, floating=True)))
        number = len(self._now) - 1
        before = self._before[number] if number < len(self._before) else (None, [])
        if before[0] is func and _difference(before[1], self._now[-1][1], self._places) > self._least:
            self.found = self._described(func, frame)
        return result

    def _described(self, func: Any, frame: FrameType | None) -> str:
        where = "the model"
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._names:
                name = self._names[owner]
                where = f"module {name!r} ({type(owner).__name__})" if name else where
                break
            frame = frame.f_back
        return f"{where}, by {getattr(func, '__name__', func)} ({users_line()}),"

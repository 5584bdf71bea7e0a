"""Runs of a copy of a model that only say what it draws: which modules, and which of its dimensions are the samples.

A copy on fake tensors runs with two and with three samples. A model that looks at values cannot; it runs on random
ones, with several seeds, as its branches may depend on what was drawn.
"""

import copy
import math
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from tensorshard.model.batches import call_model
from tensorshard.model.fake_copies import copy_with, keep_padding, make_fake_copy, make_sample, random_values
from tensorshard.model.global_state import restored_globals
from tensorshard.model.state_before_call import StateBeforeCalls
from tensorshard.model.state_places import Entries, HostStates, host_random_restored, host_random_states
from tensorshard.random.axes import Axes, Site, axes_of
from tensorshard.random.kernels import drawing_from
from tensorshard.random.routed_rows import Routed, find_rows, rows_of
from tensorshard.torch_private.dispatch import TorchDispatchMode, without_dispatch_modes
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.fake_tensors import grouped_products_of_any_dtype, without_fake_kernel_reports
from tensorshard.torch_private.modules import forward_hook_tables
from tensorshard.torch_private.process_groups import alone_in_the_world
from tensorshard.torch_private.pytree import tree_map, tree_tensors
from tensorshard.torch_private.random_operators import draws_at_random

_SAMPLES = (2, 3)
_SEEDS = 4  # for models that run on real tensors
_LARGEST_REAL_COPY = 500_000_000  # elements of parameters: 2 GB

AGAIN = "again:"
"""Before the name of a module that is called several times in a forward, and draws. Its calls are counted outside of
its forward, where a stage of a pipeline counts those that another stage computes, too."""


LOSS = "the loss function"
"""The name of the loss function among the modules that draw."""

Run = Callable[[nn.Module, Any], None]


class Found(NamedTuple):
    """What a trial run showed.

    Args:
        sites: the axes of each.
        again: names of modules that are called several times and draw.
        host_draws: what is drawn from Python's and numpy's global generators.
        routed: the sites that draw for rows which values choose.
        ran: names of the modules that were called.
    """

    sites: dict[Site, tuple[Axes | None, ...]]
    again: list[str]
    host_draws: "HostDraws"
    routed: dict[Site, Routed]
    ran: Collection[str]


class HostDraws(IntEnum):
    """What a model draws from Python's and numpy's global generators."""

    NONE = 0
    OF_BATCH = 1
    """As many numbers for any number of samples, such as which layers to leave out."""
    OF_SAMPLES = 2
    """More numbers for more samples."""


def call_part(name: str, model: nn.Module, given: Any) -> Any:
    """Calls the module or the method `name` of `model` on ``(args, kwargs)``."""
    return attrgetter(name)(model)(*given[0], **given[1])


def forward(model: nn.Module, inputs: Any) -> Any:
    """Calls `model` on the inputs of a forward, or on (args, kwargs)."""
    return model(*inputs[0], **inputs[1]) if _is_call(inputs) else call_model(model, inputs)


class TrialModel:
    """A copy of a model as it was before any plan was applied, for trial runs."""

    def __init__(self, model: nn.Module) -> None:
        self._fake = QuickFakeTensorMode()
        with without_dispatch_modes():
            self._copy = make_fake_copy(model, self._fake, torch.device("cpu"))
        self.type = type(model).__name__

    def sites(self, given: Any, modes: dict[str, bool], run: "Run | None" = None, name: str = LOSS) -> "Found":
        """What the model draws for inputs like these.

        Args:
            given: the inputs of a forward: a tensor, or a tuple or dict of them, or (args, kwargs) as a tuple of the
                two; or whatever `run` takes.
            modes: whether each module is in training.
            run: called as ``run(model, given)`` in place of the forward. name: of what it calls.
        """
        for each, module in self._copy.named_modules():
            module.training = modes.get(each, module.training)
        run = run or forward
        first = self._draws(_of_samples(given, _SAMPLES[0]), run, name)
        if not first.shapes and not first.draws_on_host:
            return Found({}, [], HostDraws.NONE, {}, first.calls.keys())
        second = self._draws(_of_samples(given, _SAMPLES[1]), run, name)
        drawing = {site.module for site in first.shapes}
        again = [
            each
            for each, calls in first.calls.items()
            if each and calls > 1 and any(d == each or d.startswith(f"{each}.") for d in drawing)
        ]
        host_draws = HostDraws.NONE
        if first.draws_on_host or second.draws_on_host:
            is_of_batch = first.host_states == second.host_states
            host_draws = HostDraws.OF_BATCH if is_of_batch else HostDraws.OF_SAMPLES
        sites = axes_of(first.shapes, second.shapes, _SAMPLES)
        sites |= dict.fromkeys((first.varies | second.varies) & sites.keys(), (None,))  # sizes may agree by chance
        varies = {site for site, kinds in sites.items() if None in kinds}
        routed = {site: r._replace(rows=r.rows // _SAMPLES[0]) for site, r in first.routed.items() if site in varies}
        return Found(sites, again, host_draws, routed, first.calls.keys())

    def _draws(self, given: Any, run: "Run", name: str) -> "_Watch":
        try:
            with _undisturbed(self._copy), without_fake_kernel_reports(), grouped_products_of_any_dtype(), self._fake:
                return _watched(self._copy, make_sample(given, self._fake, torch.device("cpu")), run, name)
        except Exception:
            if sum(parameter.numel() for parameter in self._copy.parameters()) > _LARGEST_REAL_COPY:
                raise
        with _undisturbed(self._copy):
            return self._draws_on_values(given, run, name)

    def _draws_on_values(self, given: Any, run: "Run", name: str) -> "_Watch":
        seen: _Watch | None = None
        for seed in range(_SEEDS):
            values = random_values(torch.Generator().manual_seed(seed))
            copied = copy_with(self._copy, values)
            keep_padding(copied)
            torch.manual_seed(seed)
            watch = _watched(copied, tree_map(partial(_copied, values), given), run, name)
            if seen is None:
                seen = watch
            for site, shapes in watch.shapes.items():
                if set(seen.shapes.setdefault(site, shapes)) != set(shapes):
                    seen.varies.add(site)
            seen.routed |= watch.routed
        assert seen is not None
        return seen

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrialModel":
        return self


def signature_of(inputs: Any) -> Hashable:
    """What shapes depend on, besides the number of samples."""
    return tuple(tuple(tensor.shape[1:]) if tensor.dim() else () for tensor in tree_tensors(inputs))


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    with (
        alone_in_the_world(),
        without_dispatch_modes(),
        drawing_from(None),
        torch.random.fork_rng(devices=[]),
        host_random_restored(),
        restored_globals(model),
        torch.no_grad(),
    ):
        state = StateBeforeCalls(model.modules()).keep([], watched=False)
        hooks = [Entries(table) for module in model.modules() for table in forward_hook_tables(module)]
        try:
            yield
        finally:  # a module may have made a cache of its own, with fake tensors in it, or have hooked others
            state.put_back()
            for table in hooks:
                table.put({})


def _copied(values: Callable[..., torch.Tensor], leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return values("", leaf) if leaf.is_meta else leaf.detach().to("cpu", copy=True)


def _of_samples(inputs: Any, samples: int) -> Any:
    """`inputs` with another number of samples, taken from the first on and around."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)  # a run may write into it, as into a cache
        if not leaf.dim() or not len(leaf):
            return leaf
        if type(leaf) not in (torch.Tensor, nn.Parameter):  # a part of a sequence has the whole's shape
            return torch.zeros((samples, *leaf.shape[1:]), dtype=leaf.dtype)
        return leaf.detach()[torch.arange(samples, device=leaf.device) % len(leaf)]

    return tree_map(cut, inputs)


def _watched(model: nn.Module, given: Any, run: Run, outermost: str) -> "_Watch":
    watch, states = _Watch(), host_random_states()
    watch.enter(outermost)  # what no module draws
    watch.calls.clear()
    handles = []
    for name, module in model.named_modules():
        enter = partial(watch.enter, name)
        handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(watch.leave, always_call=True))
    try:
        with watch:
            run(model, given)
    finally:
        for handle in handles:
            handle.remove()
    watch.host_states = host_random_states()
    watch.draws_on_host = watch.host_states != states
    return watch


def _is_call(inputs: Any) -> bool:
    return (
        isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict)
    )


class _Watch(TorchDispatchMode):
    """Notes what is drawn, and in which module."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[_Running] = []
        self.routed: dict[Site, Routed] = {}
        self.varies: set[Site] = set()  # whose shapes depend on values
        self.shapes: dict[Site, list[tuple[int, ...]]] = {}
        self.calls: dict[str, int] = {}
        self.draws_on_host = False
        self.host_states: HostStates | None = None

    def enter(self, name: str, *given: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self._running.append(_Running(name, given[1:]))

    def leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if draws_at_random(func) and self._running and _draws(func, args, kwargs or {}):
            running, shape = self._running[-1], _shape(func, args, result)
            site = Site(running.name, running.draws)
            self.shapes.setdefault(site, []).append(shape)
            running.draws += 1
            if len(shape) > 1 and site not in self.routed:
                routed = self._routed(shape)
                if routed is not None:
                    self.routed[site] = routed
        return result

    def _routed(self, shape: tuple[int, ...]) -> Routed | None:
        """Where the rows of a draw come from, if a module is called with some of the rows of one around it."""
        with without_dispatch_modes():
            rows = [(running.name, rows_of(running.inputs)) for running in reversed(self._running)]
            for place, (chosen, own) in enumerate(rows):
                if own is None or len(own) != math.prod(shape[:-1]):
                    continue
                for source, whole in rows[place + 1 :]:
                    if whole is None or (len(whole) == len(own) and torch.equal(whole, own)):
                        continue
                    if find_rows(own, whole) is not None:
                        return Routed(chosen, source, len(whole), shape[-1])
        return None


@dataclass
class _Running:
    """A module that runs, and how often it drew."""

    name: str
    inputs: Any
    draws: int = 0


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return False
    name = func.__name__
    if name.startswith("native_dropout"):
        return bool(args[2]) if len(args) > 2 else True
    if name.startswith("rrelu_with_noise"):
        return bool(args[4] if len(args) > 4 else kwargs.get("training"))
    # Attention with dropout is composed of operators that are seen.
    return "scaled_dot_product" not in name and "sdp_choice" not in name


def _shape(func: Any, args: Any, result: Any) -> tuple[int, ...]:
    if func.__name__.startswith("multinomial") and (len(args) < 3 or not args[2] or args[1] == 1):
        return tuple(args[0].shape)
    first = result[0] if isinstance(result, tuple) else result
    return tuple(first.shape)


def samples_of(inputs: Any) -> int:
    """How many samples are in the inputs of a forward: the first dimension of its first tensor that has one."""
    return next((tensor.size(0) for tensor in tree_tensors(inputs) if tensor.dim()), 0)

"""Split parameters that look whole to the user's code.

A parameter stays one object with this rank's part in memory. What a function gets depends on who calls it:

- *Forwards of the model get the part.* A table of layouts was verified with parts in all forwards, also where one
  module's forward reads another's weight. So for the time of a forward the parameters are of their plain class, and
  nothing is slower. Calls of a module inside of the model, and recomputation in backward, get parts as well.
- *tensorshard gets the part*, and so does the Engine's optimizer, whose states are those of the part.
- *Everybody else gets the whole*: loss functions, loops, other optimizers. It is gathered when it is used, a collective
  of the tensor-parallel ranks. They compute the same with it, so in backward each takes its part of the gradient, and
  nothing is summed. What is written to it, or to a view of it, is written to the part. Element by element operations
  with numbers, or with tensors of which this rank knows its part, are done on the part, without a collective.

Hooks that are registered on modules after ``parallelize`` are such code, too. Earlier ones belong to what was verified.

Also here: one parameter that is split over tensor-parallel ranks, and what functions do with it whole.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from tensorshard.comm import differentiable as collectives
from tensorshard.comm.sharding import distribute_like, on_mesh_device
from tensorshard.model.blocks import is_transposed
from tensorshard.model.call_stack import is_called_by_user, mark_modules
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.forwards import Role, roles_of
from tensorshard.model.reachable_state import is_foreign
from tensorshard.model.transformers_settings import captures_output
from tensorshard.model.watched_parameters import Pause, Source, Watch, WrittenThrough, run, watch, watches_of
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.tensor_parallel.table.layouts import Layout, join_shards, local_shard
from tensorshard.torch_private.autograd import is_function_transformed, is_in_backward
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shard_of
from tensorshard.torch_private.modules import (
    every_module,
    own_parameters,
    parameter_at,
    replace_forward_hooks,
    set_parameter,
)
from tensorshard.torch_private.pytree import tree_leaves, tree_map_only
from tensorshard.torch_private.tensors import object_attributes, tensor_version


class UserViews:
    """The split parameters of one model, which look whole to the user's code.

    Args:
        shapes: of the full parameters, by name.
    """

    is_of_all_blocks = True  # for code that compares blocks: this one object surrounds hooks of all of them

    def __init__(self, model: nn.Module, split: TensorSplit, shapes: Mapping[str, torch.Size]) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._model, self._split = model, split
        self._in_hook = False  # of the user's, on a module
        self._depth = 1  # until the first :meth:`begin`
        self._watches = {
            parameter: FullView(name, split.of(name), shapes[name], self.is_users_call, is_master=False)
            for name, parameter in model.named_parameters()
            if split.num_shards(name) > 1
        }
        self._by_name = {view.name: view for view in self._watches.values()}
        for parameter, view in self._watches.items():
            watch(parameter, view)
        self._pause = Pause(self._watches)
        self._pause.begin()
        self._places = [
            (module, key, parameter, self._watches[parameter])
            for module in model.modules()
            for key, parameter in own_parameters(module).items()
            if parameter in self._watches
        ]
        if self._watches:
            mark_modules(model)
            owners = {module for module, *_ in self._places}
            for module in model.modules():
                if module is not model and any(inner in owners for inner in module.modules()):
                    refuse = partial(_refuse_copy, type(module).__name__)
                    vars(module)["__deepcopy__"] = refuse  # copy.deepcopy calls it

    @property
    def computes(self) -> bool:
        """Whether all code gets parts for now."""
        return self._depth > 0

    def of(self, name: str) -> "FullView | None":
        """How the parameter `name` of the module looks whole; None if it is not split."""
        return self._by_name.get(name)

    def begin(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """From now on, the user's code gets the whole outside of :meth:`parts`, and `optimizer` parts.

        Args:
            masters: the tensors that the optimizer updates, by name, which code finds in its ``param_groups``.
        """
        self._optimizer = optimizer
        self._watch_masters(masters)
        if self._watches:
            self._surround(self._model)  # all other code around a forward runs within
            surround_later_hooks(self._model, partial(self.whole, in_hook=True))
            show_whole_features(self._model, self._split)
        self._leave()

    def _watch_masters(self, masters: Mapping[str, nn.Parameter]) -> None:
        """Makes master weights look whole, where they are others than the module's parameters."""
        views = [
            (master, self._by_name[name].of_master())
            for name, master in masters.items()
            if name in self._by_name and master not in self._watches
        ]
        if not views:
            return
        self._pause.end()
        for master, view in views:
            watch(master, view)
        self._watches.update(views)
        self._pause = Pause(self._watches)
        self._pause.begin()

    @contextmanager
    def parts(self) -> Iterator[None]:
        """A context in which all code gets parts."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def whole(self, *, in_hook: bool = False) -> Iterator[None]:
        """A context, within :meth:`parts`, in which the user's code gets the whole again.

        Args:
            in_hook: whether it is a hook of the user's, which gets the whole in forwards and updates, too.
        """
        depth, was_in_hook = self._depth, self._in_hook
        self._depth, self._in_hook = 0, was_in_hook or in_hook
        if depth:
            self._pause.end()
        try:
            yield
        finally:
            self._depth, self._in_hook = depth, was_in_hook
            if depth:
                self._pause.begin()

    def is_users_call(self) -> bool:
        """Whether the user's code is to get the whole now."""
        if self.computes:
            return False
        within_calls = self._in_hook
        if not within_calls and is_in_backward():
            return False
        return is_called_by_user(sys._getframe(2), self._optimizer, within_calls=within_calls)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._pause.begin()

    def _leave(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._pause.end()

    def _surround(self, model: nn.Module) -> None:
        given: list[list[tuple[nn.Module, str, torch.Tensor]]] = []

        def before(*_: Any) -> None:
            self._enter()
            given.append([])
            if is_function_transformed():
                raise RuntimeError(
                    "a model under tensor parallelism was called within torch.func (grad, vmap, jacrev and the like), "
                    "which cannot transform its collectives: use torch.autograd.grad, with create_graph=True for "
                    "another derivative, or tp=1"
                )
            given[-1].extend(self._cut_given())

        def after(*_: Any) -> None:
            if not given:
                return
            for module, key, tensor in given.pop():
                set_parameter(module, key, tensor)
            self._leave()

        hook_root(model, RootRole.WHOLE_PARAMETERS, before=before, after=after, always=True)

    def _cut_given(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Puts parts in the place of whole tensors that were given for a call, as ``torch.func.functional_call``
        does."""
        for module, key, parameter, view in self._places:
            tensor = parameter_at(module, key)
            if tensor is not parameter and tensor is not None and tensor.shape == view.shape:
                if view.of_data_ranks and torch.is_grad_enabled() and tensor.requires_grad:
                    raise RuntimeError(
                        f"the model was called with other weights for {view.name!r} that autograd records, as an inner "
                        f"step of MAML does by torch.func.functional_call, under a plan with ep={view.ranks}, "
                        f"where a rank has no graph of the experts of others: use ep=1; under torch.no_grad(), or with "
                        f"weights that are detached, it works"
                    )
                set_parameter(module, key, PartOf.apply(tensor, view))
                yield module, key, tensor


def _refuse_copy(name: str, _: dict[int, Any]) -> NoReturn:
    raise RuntimeError(
        f"a deep copy of this {name}, a part of a laid-out model, would hold only this tensor-parallel rank's parts of "
        f"the weights: make such copies before parallelize, in the model or in another one with an Engine of its own; "
        f"or keep copies of the weights, p.detach().clone(), which are whole"
    )


# -- hooks of users: their code, though it runs within forwards --

_REGISTERS = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


def surround_later_hooks(model: nn.Module, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Runs the hooks that are registered from now on, on `model` and modules in it, within a ``context()``."""
    for module in model.modules():
        for name in _REGISTERS:
            vars(module)[name] = partial(_register, getattr(type(module), name), module, context)


def _register(
    register: Callable[..., Any],
    module: nn.Module,
    context: Callable[[], AbstractContextManager[None]],
    /,
    hook: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    @wraps(hook, updated=())
    def surrounded(*given: Any, **options: Any) -> Any:
        with context():
            return hook(*given, **options)

    return register(module, surrounded, *args, **kwargs)


class _Features(NamedTuple):
    """How the features of a split layer are cut, which are its input or its output.

    Args:
        layout: of the features. dim: theirs, counted from the end.
        group: the ranks.
    """

    is_output: bool
    layout: Layout
    dim: int
    group: dist.ProcessGroup

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The features of all ranks. A collective; in backward each rank takes its part of the gradient."""
        dim, size = self.dim, self.group.size()
        lengths = [sum(length for _, length in self.layout.ranges(rank, size)) for rank in range(size)]
        return join_shards(collectives.gather(part, dim, self.group).split(lengths, dim), self.layout)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of features that all ranks have. A collective in backward."""
        size = self.group.size()
        by_rank = [local_shard(whole, self.layout, rank, size) for rank in range(size)]
        return collectives.scatter(torch.cat(by_rank, self.dim), self.dim, self.group)


def show_whole_features(model: nn.Module, split: TensorSplit) -> None:
    """Gives the user's forward hooks on split layers whole features, those that are there and later ones.

    A layer whose output is split hands each rank's part to the layer after it, and a layer that sums over the ranks
    takes such a part.
    """
    for path, module in every_module(model).items():
        roles = roles_of(module)
        if Role.SPLIT_LAYER not in roles or Role.GATHERED_OUTPUT in roles or Role.SEQUENCE_LAYER in roles:
            continue
        layout, weight = split.layout(f"{path}.weight"), own_parameters(module).get("weight")
        if type(layout) is not Layout or layout.dim is None or layout.dim > 1 or split.group is None or weight is None:
            continue
        if isinstance(module, nn.Embedding):  # what is cut of its weight are rows, and its output is whole
            continue
        is_output = layout.dim == int(is_transposed(module))
        dim = 1 - weight.ndim
        features = _Features(is_output, replace(layout, dim=dim), dim, split.group)
        replace_forward_hooks(module, partial(_with_features_for_users, features))
        for name, takes_output in (("register_forward_hook", True), ("register_forward_pre_hook", False)):
            register = vars(module).get(name) or getattr(module, name)
            vars(module)[name] = partial(_register_with_features, register, features, takes_output)


def _with_features_for_users(features: _Features, hook: Any, takes_output: bool) -> Any:
    is_users = not is_foreign(getattr(hook, "__module__", None)) and not captures_output(hook)
    return _with_features(features, hook, takes_output) if is_users else hook


def _register_with_features(
    register: Callable[..., Any], features: _Features, takes_output: bool, /, hook: Any, *args: Any, **kwargs: Any
) -> Any:
    return register(_with_features_for_users(features, hook, takes_output), *args, **kwargs)


def _with_features(features: _Features, hook: Callable[..., Any], takes_output: bool) -> Callable[..., Any]:
    """`hook`, which gets whole features and may return some."""

    def called(module: nn.Module, args: Any, *rest: Any) -> Any:
        if not takes_output and features.is_output:
            return hook(module, args, *rest)
        if features.is_output:
            *kwargs, part = rest
            whole = features.whole(part)
            result = hook(module, args, *kwargs, whole)
            return features.part(result) if result is not None and result is not whole else None
        if not args or not isinstance(args[0], torch.Tensor):
            return hook(module, args, *rest)
        whole = features.whole(args[0])
        result = hook(module, (whole, *args[1:]), *rest)
        if takes_output or result is None:
            return result
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict) and rest:
            return (features.part(result[0][0]), *result[0][1:]), result[1]
        first, *others = result if isinstance(result, tuple) else (result,)
        return (features.part(first), *others)

    return wraps(hook, updated=())(called) if hasattr(hook, "__name__") else called


class FullView(Watch):
    """How one parameter looks whole.

    Args:
        shape: of the full parameter.
        is_users_call: whether the code that asks is to get the whole.
        is_master: whether it is a master weight or a state, with which no forward computes.
    """

    stays_in_copies = True
    is_outermost = True

    def __init__(
        self,
        name: str,
        split: TensorSplit,
        shape: torch.Size,
        is_users_call: Callable[[], bool] = lambda: True,
        *,
        is_master: bool = True,
    ) -> None:
        self.name, self.shape, self._is_master = name, shape, is_master
        self.cuts = split.cuts(name)
        self._split, self._is_users_call = split, is_users_call

    def __deepcopy__(self, memo: dict[int, Any]) -> "FullView":
        return self

    @property
    def ranks(self) -> int:
        """How many ranks it is split over; where experts are split, how many share them."""
        return self._split.size

    @property
    def of_data_ranks(self) -> bool:
        """Whether the ranks that it is split over have different samples, as those that share experts."""
        return self._split.of_data_ranks

    def of_master(self) -> "FullView":
        """How the parameter's master weight looks whole."""
        return FullView(self.name, self._split, self.shape, self._is_users_call)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of which each rank gives its `part`. A collective."""
        return self._split.full(self.name, part, self.shape)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this rank has no element of it, as of an expert in a list that another rank holds."""
        return any(not sum(length for _, length in ranges) for ranges in self.cuts.values())

    def of_all_ranks(self, here: Any) -> list[Any]:
        """What each of the ranks has as `here`. A collective."""
        gathered: list[Any] = [None] * self.ranks
        torch.distributed.all_gather_object(gathered, here, group=self._split.group)
        return gathered

    def is_on_any_rank(self, here: bool, device: torch.device) -> bool:
        """Whether something is true on one of the ranks at least. A collective where they differ, as those do that have
        different experts."""
        if not self.of_data_ranks:
            return here
        count = torch.tensor(float(here), device=device)
        return collectives.reduce(count, self._split.group).item() > 0.0

    def of_one_rank(self, sums: torch.Tensor) -> torch.Tensor:
        """The gradient of one rank's samples on average, of `sums` over the ranks where they have different ones."""
        return sums / self.ranks if self.of_data_ranks else sums

    def sum_gradients(self, whole: torch.Tensor) -> torch.Tensor:
        """The gradient of the whole: the sum of the ranks', where they have different samples."""
        return collectives.reduce(whole, self._split.group) if self._split.of_data_ranks else whole

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, in memory of its own."""
        return self._split.local(self.name, whole)

    def part_shape(self, updated: torch.Tensor) -> torch.Size:
        """The shape of this rank's part, which an optimizer updates as `updated`."""
        with without_torch_functions_of_tensors():
            return updated.shape

    def part_like(self, updated: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, laid out as `updated` is."""
        with without_torch_functions_of_tensors():
            part = self.cut(whole._plain if isinstance(whole, WrittenThrough) else whole)
            return distribute_like(part, updated) if isinstance(updated, DTensor) else part

    def call(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if function in _OF_THE_OBJECT or not self._is_users_call():
            return NotImplemented
        return _call(function, args, kwargs)

    def gradient(self, parameter: nn.Parameter, held: torch.Tensor | None) -> torch.Tensor | None:
        return self.whole_gradient(parameter, held) if self._is_users_call() else held

    def whole_gradient(self, parameter: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor | None:
        """The whole gradient, of which this rank has `held`; None if no rank has any. A rank without the expert has
        none of its own."""
        if not self.is_on_any_rank(held is not None, parameter.device):
            return None
        with without_torch_functions_of_tensors():
            held = torch.zeros_like(parameter) if held is None else held
        return self.shown(held)

    def held_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None or not self._is_users_call():
            return gradient
        if isinstance(gradient, DTensor):
            return gradient
        if gradient.shape != self.shape:
            raise RuntimeError(
                f"a gradient of shape {list(gradient.shape)} was assigned to {self.name!r} of shape {list(self.shape)}"
            )
        plain = gradient._plain if isinstance(gradient, WrittenThrough) else gradient
        return self.part_like(parameter, self.of_one_rank(self.sum_gradients(plain)))

    def source(self, held: torch.Tensor, *, graph: bool) -> Source:
        """The whole of what this rank has as `held`."""
        graph = graph and not self._is_master
        base = _Gathered.apply(held, self) if graph else self.read(held)
        return Source(base, partial(_version, held), partial(self.read, held), partial(self._store, held))

    def shown(self, held: torch.Tensor) -> torch.Tensor:
        """A tensor that is the whole of `held`, and writes to it."""
        source = self.source(held, graph=held.requires_grad)
        return WrittenThrough.of(source.base, source)

    @torch.no_grad()
    def read(self, held: torch.Tensor) -> torch.Tensor:
        """The whole of what this rank has as `held`."""
        with without_torch_functions_of_tensors():
            part = held.detach()
            return self.gather(on_mesh_device(part).full_tensor() if isinstance(part, DTensor) else part)

    def _store(self, held: torch.Tensor, whole: torch.Tensor) -> None:
        with without_torch_functions_of_tensors():
            part = self.cut(whole)
            if isinstance(held, DTensor):
                shard_of(held).copy_(distribute_like(part, held).to_local())
            else:
                held.copy_(part)

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Writes the whole `value` to `parameter`.

        Raises:
            RuntimeError: it has another shape.
        """
        if value.shape != self.shape:
            raise RuntimeError(
                f"a tensor of shape {list(value.shape)} was assigned to the data of {self.name!r}, whose shape is "
                f"{list(self.shape)}, and whose memory is split over tensor-parallel ranks: assign one of its shape"
            )
        with torch.no_grad():
            self._store(parameter, value)


def _version(held: torch.Tensor) -> int:
    """Counts changes of `held`: of a DTensor those that DTensor makes, and those of the shard itself."""
    with without_torch_functions_of_tensors():
        return tensor_version(held) + (tensor_version(shard_of(held)) if isinstance(held, DTensor) else 0)


class _Gathered(Function):
    """The whole, from the ranks' parts; all of them compute the same with it, or each with its own samples."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, view: FullView) -> torch.Tensor:
        ctx.view = view
        whole = view.gather(part)
        return whole.clone() if whole is part else whole  # what is not split

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return PartOf.apply(ctx.view.sum_gradients(grads[0]), ctx.view), None


class PartOf(Function):
    """This rank's part of what all ranks hold."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, view: FullView) -> torch.Tensor:
        ctx.view = view
        return view.cut(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Gathered.apply(grads[0], ctx.view), None


# -- what functions do with whole parameters --

_T: Any = torch.Tensor


_OF_THE_OBJECT = frozenset(
    [
        *object_attributes(),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad, _T.backward),
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.storage_offset, _T.is_shared, _T.is_pinned, _T.get_device),
        *(_T.is_floating_point, _T.is_complex, _T.element_size, _T.is_inference, torch.is_floating_point),
        *(torch.is_complex, torch.autograd.backward, torch.is_inference, _T.is_signed),
    ]
)
"""They ask for the tensor as an object, its type or its place in autograd's graph. A part answers as the whole does."""

_OF_SHAPES = frozenset(
    [
        *(_T.shape.__get__, _T.ndim.__get__, _T.nbytes.__get__, _T.itemsize.__get__),
        *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, torch.numel),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor),
    ]
)
"""They need the shape, type and device only."""

_SET_DATA = _T.data.__set__
_REPRESENTATION = _T.__repr__

_ELEMENTWISE = frozenset(
    [
        *(_T.zero_, _T.fill_, _T.copy_, _T.add_, _T.sub_, _T.mul_, _T.div_, _T.neg_, _T.abs_, _T.sign_, _T.pow_),
        *(_T.clamp_, _T.clamp_min_, _T.clamp_max_, _T.clip_, _T.sqrt_, _T.exp_, _T.tanh_, _T.sigmoid_, _T.relu_),
        *(_T.lerp_, _T.addcmul_, _T.addcdiv_, _T.nan_to_num_, _T.round_, _T.masked_fill_, _T.reciprocal_, _T.rsqrt_),
        *(_T.__iadd__, _T.__isub__, _T.__imul__, _T.__itruediv__),
    ]
)
"""They change a tensor in place, each element by itself."""

_WITHOUT_GRAPH = frozenset([_T.data.__get__, _T.detach, torch.detach])
"""They return the tensor out of autograd's graph."""


def _view_of(value: Any) -> FullView | None:
    """The watch that makes `value` look whole, if it is a split parameter."""
    if not isinstance(value, nn.Parameter):
        return None
    return next((w for w in watches_of(value) if isinstance(w, FullView)), None)


def _call(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` with whole parameters."""
    first: Any = args[0] if args else None
    own = _view_of(first)
    if function is torch.autograd.grad:
        return _autograd_gradients(args, kwargs)
    if own is not None:
        if function in _OF_SHAPES:
            with without_torch_functions_of_tensors():
                empty = torch.empty((), dtype=first.dtype, device=first.device)  # no DTensor
                return function(empty.expand(own.shape), *args[1:], **kwargs)
        if function == _SET_DATA:
            value = args[1]
            return own.write(first, value._plain if isinstance(value, WrittenThrough) else value)
        if function == _REPRESENTATION:
            return f"Parameter of shape {list(own.shape)}, of which each tensor-parallel rank holds a part"
        if not isinstance(first, DTensor) and function in _ELEMENTWISE and _on_parts(function, own, args, kwargs):
            return first
    sources: dict[int, Source] = {}
    graph = torch.is_grad_enabled() and function not in _WITHOUT_GRAPH

    def whole(parameter: nn.Parameter) -> torch.Tensor:
        view = _view_of(parameter)
        if view is None:
            return parameter
        if id(parameter) not in sources:
            with without_torch_functions_of_tensors():
                sources[id(parameter)] = view.source(parameter, graph=graph and parameter.requires_grad)
        return sources[id(parameter)].base

    given, options = tree_map_only(nn.Parameter, whole, (tuple(args), kwargs))
    parameters = {id(p): p for p in tree_leaves((args, kwargs)) if id(p) in sources}
    same = {id(source.base): parameters[key] for key, source in sources.items()}
    return run(function, given, options, sources.values(), same)


def _on_parts(function: Callable[..., Any], own: FullView, args: Any, kwargs: dict[str, Any]) -> bool:
    """Does an element by element operation on this rank's part; False if it needs what other ranks have."""

    def part(value: Any) -> Any:
        if isinstance(value, WrittenThrough):
            value = value._plain
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return value
        view = _view_of(value)
        if view is not None:
            return value if (view.cuts, view.shape) == (own.cuts, own.shape) else None
        return own.cut(value) if type(value) is torch.Tensor and value.shape == own.shape else None

    given = [part(value) for value in args]
    options = {key: part(value) for key, value in kwargs.items()}
    for before, after in zip((*args, *kwargs.values()), (*given, *options.values()), strict=True):
        if before is not None and after is None:
            return False
    with without_torch_functions_of_tensors():
        function(*given, **options)
    return True


def _autograd_gradients(args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: the gradients of whole parameters are whole."""
    outputs, inputs = args  # torch hands on all else by name
    views = [_view_of(parameter) for parameter in inputs]
    outputs, inputs, options = tree_map_only(WrittenThrough, lambda leaf: leaf._plain, (outputs, inputs, kwargs))
    of_data_ranks = any(view is not None and view.of_data_ranks for view in views)
    with without_torch_functions_of_tensors():
        asked = {**options, "allow_unused": True} if of_data_ranks else options
        gradients = _gradients_of_parts(outputs, inputs, asked)
        if of_data_ranks:
            gradients = _with_experts_of_others(gradients, inputs, views, options)
    return tuple(_full_gradient(view, gradient) for view, gradient in zip(views, gradients, strict=True))


def _gradients_of_parts(outputs: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    """``torch.autograd.grad``, as what else watches the parameters has it."""
    further_in = dict.fromkeys(w for one in inputs for w in watches_of(one) if not isinstance(w, FullView))
    for watching in further_in:
        gradients = watching.call(torch.autograd.grad, (outputs, inputs), dict(options))
        if gradients is not NotImplemented:
            return gradients  # type: ignore[no-any-return]
    return torch.autograd.grad(outputs, inputs, **options)


def _with_experts_of_others(
    gradients: Sequence[torch.Tensor | None], inputs: Sequence[Any], views: Sequence[FullView | None], options: Any
) -> list[torch.Tensor | None]:
    """`gradients`, with an empty one of each expert that other ranks hold and have a gradient of."""
    results: list[torch.Tensor | None] = []
    for index, (gradient, part, view) in enumerate(zip(gradients, inputs, views, strict=True)):
        is_used = gradient is not None
        if view is not None:
            is_used = view.is_on_any_rank(is_used, part.device)
        if not is_used and not options["allow_unused"]:
            what = f"input {index}" if view is None else f"parameter {view.name!r}"
            raise RuntimeError(
                f"torch.autograd.grad was called by {what}, on which its outputs do not depend: pass "
                f"allow_unused=True, and its gradient is None"
            )
        is_of_others = is_used and gradient is None
        results.append(torch.zeros_like(part).requires_grad_(options["create_graph"]) if is_of_others else gradient)
    return results


def _full_gradient(view: FullView | None, gradient: torch.Tensor | None) -> torch.Tensor | None:
    if view is None or gradient is None:
        return gradient
    if gradient.dim() > len(view.shape):  # is_grads_batched
        return torch.stack([whole for row in gradient if (whole := _full_gradient(view, row)) is not None])
    whole = _Gathered.apply(gradient, view)  # of the samples of all ranks that share the expert
    return view.of_one_rank(whole)

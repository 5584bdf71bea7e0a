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
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.model.call_stack import is_called_by_user, mark_modules
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.model.watched_parameters import Pause, unwatch, watch
from tensorshard.tensor_parallel.apply.full_view import FullView, PartOf
from tensorshard.tensor_parallel.apply.tensor_split import TensorSplit
from tensorshard.torch_private.autograd import is_function_transformed, is_in_backward
from tensorshard.torch_private.modules import own_parameters, parameter_at, set_parameter


class UserViews:
    """The split parameters of one model, which look whole to the user's code.

    Args:
        shapes: of the full parameters, by name.
    """

    is_of_all_blocks = True  # for code that compares blocks: this one object surrounds hooks of all of them

    def __init__(self, model: nn.Module, split: TensorSplit, shapes: Mapping[str, torch.Size]) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._model = model
        self._in_hook = False  # of the user's, on a module
        self._depth = 1  # until the first :meth:`begin`
        # What ZeRO 3 shows between a forward and its backward.
        self._gathered: list[tuple[nn.Parameter, FullView]] = []
        self._watches: dict[nn.Parameter, FullView] = {}
        for name, parameter in model.named_parameters():
            if split.num_shards(name) > 1 or isinstance(parameter, DTensor):  # with ZeRO 3 all look whole, or none
                self._watches[parameter] = FullView(
                    name, split.of(name), shapes[name], self.is_users_call, isinstance(parameter, DTensor)
                )
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

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on, the user's code gets the whole outside of :meth:`parts`, and `optimizer` parts."""
        self._optimizer = optimizer
        if self._watches:
            self._surround(self._model)  # all other code around a forward runs within
            surround_later_hooks(self._model, self._users_hook)
        self._leave()

    @contextmanager
    def parts(self) -> Iterator[None]:
        """A context in which all code gets parts."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A context, within :meth:`parts`, in which the user's code gets the whole again."""
        depth, self._depth = self._depth, 0
        if depth:
            self._pause.end()
        try:
            yield
        finally:
            self._depth = depth
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

    @contextmanager
    def _users_hook(self) -> Iterator[None]:
        before, self._in_hook = self._in_hook, True
        try:
            with self.whole():
                yield
        finally:
            self._in_hook = before

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
            while self._gathered:
                unwatch(*self._gathered.pop())
            given[-1].extend(self._cut_given())

        def after(*_: Any) -> None:
            if not given:
                return
            for module, key, tensor in given.pop():
                set_parameter(module, key, tensor)
            for module, key, parameter, view in self._places:
                shown = parameter_at(module, key)
                if view.is_sharded and shown is not parameter and isinstance(shown, nn.Parameter):
                    watch(shown, view)
                    self._gathered.append((shown, view))
            self._leave()

        hook_root(model, RootRole.WHOLE_PARAMETERS, before=before, after=after, always=True)

    def _cut_given(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        """Puts parts in the place of whole tensors that were given for a call, as ``torch.func.functional_call``
        does."""
        for module, key, parameter, view in self._places:
            tensor = parameter_at(module, key)
            if tensor is not parameter and tensor is not None and tensor.shape == view.shape:
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
    hook: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    @wraps(hook, updated=())
    def surrounded(*given: Any, **options: Any) -> Any:
        with context():
            return hook(*given, **options)

    return register(module, surrounded, *args, **kwargs)

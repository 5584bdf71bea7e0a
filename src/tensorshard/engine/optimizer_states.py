"""``optimizer.state`` by the parameters that the model shows, as in a loop of plain PyTorch.

An optimizer updates master weights, which at ZeRO 1 and 2, in 16 bits and with offload are other tensors than the
model's parameters. Its states are kept by these. Code of the user asks by the model's parameters, and gets the same
states. Under tensor parallelism it gets them whole, as it gets the parameters.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.data_parallel.sharded_parameter import ReadInFull, make_plain, make_readable
from tensorshard.engine.combined_optimizer import members_of
from tensorshard.engine.owners import Owners
from tensorshard.tensor_parallel.apply.user_views import FullView
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors


class ShownStates(defaultdict[Any, Any]):
    """The states of an optimizer, by the tensors that it updates. The model's parameters find them, too.

    Args:
        sharded: the model that it updates.
        owners: of the parameters that are updated whole; None if none are.

    Raises:
        RuntimeError: asked for the states of a parameter that another rank updates whole.
    """

    def __init__(self, sharded: ShardedModel, owners: Owners | None) -> None:
        super().__init__(dict)
        self._sharded, self._owners = sharded, owners
        self._names: dict[nn.Parameter, str] = {}  # of what the model shows
        self._read: list[weakref.ref[DTensor]] = []  # shards of states that the user's code reads in full

    def follow(self, users_code: bool) -> None:
        """Called when the user's code gives way to tensorshard's, which computes on shards, and the other way round."""
        tensors = [tensor for one in self._read if (tensor := one()) is not None]
        for tensor in tensors:
            (make_readable if users_code else make_plain)(tensor)
        self._read = [weakref.ref(tensor) for tensor in tensors]
        if type(self) in (ShownStates, _ReadStates):
            self.__class__ = _ReadStates if users_code else ShownStates

    def _readable(self, state: Any) -> Any:
        """A `state` whose shards are read in full, as their parameters are."""
        if isinstance(state, dict):
            self._read += [weakref.ref(value) for value in state.values() if make_readable(value)]
        return state

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(super().items())  # copies know nothing of the model

    def __missing__(self, key: Any) -> Any:
        updated = self._updated_of(key)
        if updated is not key:
            return self._whole(key, updated)
        super().__setitem__(key, {})
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or super().__contains__(self._updated_of(key, may_be_elsewhere=True))

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is what `get` is made of

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, state in dict(*args, **kwargs).items():
            self[key] = state

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            return super().pop(key, *default)
        state = self[key]
        del self[key]
        return state

    def __setitem__(self, key: Any, state: Any) -> None:
        updated = self._updated_of(key)
        if isinstance(state, _WholeState):  # that was popped
            if not state.is_elsewhere:
                super().__setitem__(updated, state.held)
        elif updated is key and not self._is_users_call():
            super().__setitem__(key, state)
        else:
            whole = self._whole(key, updated)
            for name in whole.keys() - state.keys():
                del whole[name]
            whole.update(state)

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(self._updated_of(key))

    def _updated_of(self, key: Any, *, may_be_elsewhere: bool = False) -> Any:
        """The tensor by which the optimizer keeps the states of `key`."""
        if not isinstance(key, nn.Parameter) or super().__contains__(key):
            return key
        name = self._name(key)
        if name is None:
            return key
        if self._owners is None or name not in self._owners.names:
            return self._sharded.masters()[name]
        if name not in self._owners.parameters and not may_be_elsewhere:
            raise RuntimeError(
                f"the optimizer's states of {name!r} are on rank {self._owners.owner(name)} alone, which updates it "
                f"whole: read and write them there, where `parameter in optimizer.state` is true"
            )
        return self._owners.parameters.get(name)

    def _is_users_call(self) -> bool:
        """Whether code of the user's that gets whole parameters asks."""
        return False

    def _whole(self, key: Any, updated: Any) -> Any:
        """The states that are kept by `updated`, as `key` looks: whole, where the parameter does."""
        whole = self._view(key, updated)
        if whole is None:
            return self._readable(super().__getitem__(updated))
        if not whole.of_data_ranks:
            return _WholeState(super().__getitem__(updated), updated, whole)
        outlines = whole.of_all_ranks(_outline(super().get(updated, {}), whole.part_shape(updated)))
        if not whole.is_elsewhere:
            return _WholeState(super().__getitem__(updated), updated, whole)
        held: dict[str, Any] = dict(next(filter(None, outlines), {}))
        with without_torch_functions_of_tensors():
            for name, value in held.items():
                if isinstance(value, torch.dtype):
                    held[name] = torch.zeros_like(updated, dtype=value)
        return _WholeState(held, updated, whole)

    def _view(self, key: Any, updated: Any) -> FullView | None:
        """How `key` looks whole; None if the optimizer updates all of it here, as it is."""
        name = self._name(updated)
        if name is None or (self._owners is not None and name in self._owners.names):
            return None
        whole = self._sharded.whole(name)
        if whole is None and key is not updated:
            split: Any = self._sharded.split.of(name)
            whole = FullView(name, split, key.shape)
        return whole

    def _name(self, parameter: Any) -> str | None:
        if parameter not in self._names:
            self._names = {master: name for name, master in self._sharded.masters().items()}
            self._names |= {shown: name for name, shown in self._sharded.shown_parameters().items()}
        return self._names.get(parameter)


class _ReadStates(ShownStates):
    """States of which this rank has shards, while the user's code runs. Another class costs an update no time."""

    def __getitem__(self, key: Any) -> Any:
        return self._readable(super().__getitem__(key))

    def values(self) -> Any:
        return [self._readable(state) for state in super().values()]

    def items(self) -> Any:
        return [(key, self._readable(state)) for key, state in super().items()]


class _WholeStates(ShownStates):
    """States of which this rank has parts, as of split parameters. Code of the user gets them whole.

    The ranks that share experts have states of their own experts alone. Each of them finds those of all.
    """

    def __init__(self, sharded: ShardedModel, owners: Owners | None) -> None:
        super().__init__(sharded, owners)
        wholes = map(sharded.whole, sharded.masters())
        self._has_experts = any(whole is not None and whole.of_data_ranks for whole in wholes)

    def __getitem__(self, key: Any) -> Any:
        return self._whole(key, self._updated_of(key)) if self._is_users_call() else super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        is_here = super().__contains__(key)
        if not (self._has_experts and isinstance(key, nn.Parameter) and self._is_users_call()):
            return is_here
        whole = self._view(key, self._updated_of(key, may_be_elsewhere=True))
        return is_here if whole is None else whole.is_on_any_rank(is_here, key.device)

    def __delitem__(self, key: Any) -> None:
        if self._has_experts and key in self and not super().__contains__(key):
            return  # the ranks that have the expert delete its states
        super().__delitem__(key)

    def __iter__(self) -> Iterator[Any]:
        if not (self._has_experts and self._is_users_call()):
            return super().__iter__()
        return iter([master for master in self._sharded.masters().values() if master in self])

    def __len__(self) -> int:
        return len(list(iter(self))) if self._has_experts else super().__len__()

    def keys(self) -> Any:
        return list(self) if self._has_experts else super().keys()

    def values(self) -> Any:
        return [self._whole(key, key) for key in self] if self._is_users_call() else super().values()

    def items(self) -> Any:
        return [(key, self._whole(key, key)) for key in self] if self._is_users_call() else super().items()

    def _is_users_call(self) -> bool:
        for view in self._sharded.whole_views:  # noqa: SIM110 - optimizers ask for each parameter, and `any` takes longer
            if view.is_users_call():
                return True
        return False


class _WholeState(MutableMapping[str, Any]):
    """The states of one split parameter: those of its shape are whole, and what is written to them reaches the parts.

    Args:
        held: the optimizer's.
        updated: the part of the parameter that it updates.
    """

    def __init__(self, held: dict[str, Any], updated: nn.Parameter, whole: FullView) -> None:
        self.held, self._updated, self._whole = held, updated, whole

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks hold them."""
        return self._whole.is_elsewhere

    def __getitem__(self, name: str) -> Any:
        value = self.held[name]
        is_split = isinstance(value, torch.Tensor) and value.shape == self._whole.part_shape(self._updated)
        return self._whole.shown(value) if is_split else value

    def __setitem__(self, name: str, value: Any) -> None:
        is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_whole and value.shape == self._whole.shape:
            value = self._whole.part_like(self._updated, value)
        held = self.held.get(name)
        if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)  # into its own type and memory, which may be on disk
        else:
            self.held[name] = value

    def __delitem__(self, name: str) -> None:
        del self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __repr__(self) -> str:
        return repr(dict(self))


def _outline(state: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
    """The types of those states that are of `shape`, and the others, off the device."""
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return state | {name: t.dtype if t.shape == shape else t.detach().cpu() for name, t in tensors.items()}


def show_states(optimizer: torch.optim.Optimizer, sharded: ShardedModel, owners: Owners | None) -> Callable[[], None]:
    """Makes ``optimizer.state`` find states by the parameters of `sharded`.

    Returns:
        Does it again, where user code or a loaded state dict has put another dict in its place.
    """
    in_full = [tensors for tensors in sharded.in_users_code if isinstance(tensors, ReadInFull)]
    kind = _WholeStates if sharded.whole_views else _ReadStates if in_full else ShownStates

    def show() -> None:
        if not isinstance(optimizer.state, ShownStates):
            states = kind(sharded, owners)
            states.update(optimizer.state)
            optimizer.state = states
        for member in members_of(optimizer):
            member.state = optimizer.state

    def follow(users_code: bool) -> None:
        if isinstance(optimizer.state, ShownStates):
            optimizer.state.follow(users_code)

    for masters in in_full:
        masters.followers.append(follow)
    show()
    optimizer.register_load_state_dict_post_hook(lambda _: show())
    return show

"""`TensorSource`, which gives initial values, and the source that holds a built model's tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tensorshard.comm.world import world
from tensorshard.model.references import note_references, references_to, swap_in
from tensorshard.torch_private.fake_tensors import FakeTensor, unset_fake_temporarily
from tensorshard.torch_private.modules import (
    every_module,
    forward_pre_hooks,
    own_buffers,
    own_parameters,
    refresh_recurrent_weights,
    set_buffer,
    set_parameter,
)
from tensorshard.torch_private.tensors import storage_address


class TensorSource(ABC):
    """A model on the meta device, and the values that its parameters and buffers start from.

    Attributes:
        module: The model, with every parameter and buffer on the meta device. Ties are kept (one Parameter
            object under each of its names), and so is shared memory (tensors that were views of one storage
            are views of one meta storage). Shapes, strides, dtypes, `requires_grad` and persistence are those
            of the built model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._layouts = dict(named_tensors(module))

    def names(self) -> list[str]:
        """The names of all parameters, then of all buffers; a tied tensor has each of its names in it."""
        return list(self._layouts)

    def tensor(self, name: str) -> torch.Tensor:
        """The full initial value of one parameter or buffer.

        It does not depend on which names were asked for before, nor on the rank. Under a `FakeTensorMode` it
        is a fake tensor of the same layout, made without computing anything.

        Args:
            name: One of `names()`.

        Returns:
            A CPU tensor that requires no gradient. It may be memory that the source keeps: copy it before
            writing.

        Raises:
            KeyError: No parameter or buffer has this name.
        """
        if name not in self._layouts:
            known = ", ".join(self.names()[:4])
            raise KeyError(f"no parameter or buffer is called {name!r}; the model's names are {known}, ...")
        if world().is_simulated:
            layout = self._layouts[name]
            return torch.empty_strided(layout.size(), layout.stride(), dtype=layout.dtype, device="cpu")
        return self._value(name)

    @contextmanager
    def real_buffers(self) -> Iterator[None]:
        """Inside, the module's buffers have their values. Its parameters stay on the meta device.

        A test run with random weights needs the values of masks and indices, which are buffers.
        """
        kept = [(owner, dict(own_buffers(owner))) for owner in self.module.modules()]
        names = {id(buffer): name for name, buffer in self.module.named_buffers()}
        values: dict[int, torch.Tensor] = {}
        try:
            for owner, buffers in kept:
                for key, buffer in buffers.items():
                    if id(buffer) not in values:
                        values[id(buffer)] = self.tensor(names[id(buffer)])
                    set_buffer(owner, key, values[id(buffer)])
            yield
        finally:
            for owner, buffers in kept:
                for key, buffer in buffers.items():
                    set_buffer(owner, key, buffer)

    @abstractmethod
    def _value(self, name: str) -> torch.Tensor:
        """What `tensor` returns, for a name that exists and outside of any `FakeTensorMode`."""


class HeldTensors(TensorSource):
    """The source of a model that was built whole: it keeps the model's own tensors and hands them out."""

    def __init__(self, module: nn.Module) -> None:
        self._held = dict(named_tensors(module))
        move_to_meta(module)
        super().__init__(module)

    def held(self) -> dict[str, torch.Tensor]:
        """The model's own tensors, by all of their names."""
        return self._held

    def _value(self, name: str) -> torch.Tensor:
        return self._held[name].detach().cpu()


def from_module(module: nn.Module) -> HeldTensors:
    """The source of values for a model that is already built.

    The module's parameters and buffers are replaced, in place, by tensors on the meta device; the source
    keeps the real ones, without copying them, for as long as it lives.

    Args:
        module: A model with real tensors, on any device.

    Raises:
        ValueError: A parameter or buffer has no values (it is on the meta device) or no shape (a lazy
            module).
    """
    for name, tensor in named_tensors(module):
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no values, where a built model was expected; pass "
                "the callable that builds the model instead of the module"
            )
    return HeldTensors(module)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, then every buffer, under each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def move_to_meta(
    module: nn.Module,
    *,
    hidden: Container[str] = (),
    attribute: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Replace a module's parameters and buffers, in place, by tensors on the meta device of the same layout.

    Nothing is changed if this raises. A tensor that the module also holds elsewhere (in a list, or in an object that
    is no module) is replaced there too, and whenever it is replaced later.

    Args:
        module: The module to change.
        hidden: Names in a tensor's `__dict__` that are not the user's and are not to be carried over.
        attribute: What to put in the place of a tensor that the module's attributes lead to, if it is not registered;
            None to leave it.

    Raises:
        ValueError: A parameter or buffer has no shape yet (a lazy module), or is sparse; an attribute is a view of
            a parameter's memory; or a module is one of TorchScript.
    """
    for name, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            what = f"module {name!r}" if name else "the model"
            raise ValueError(
                f"{what} is a torch.jit.ScriptModule, whose parameters cannot be replaced: hand over the module from "
                f"before torch.jit.script or torch.jit.trace; Plan(compile=True) compiles blocks"
            )
    _unregister_sparse_buffers(module)
    originals = dict(named_tensors(module))  # kept to the end: ids and storages are the keys below
    for name, tensor in originals.items():
        if is_lazy(tensor):
            raise ValueError(
                f"{name!r} has no shape yet, because its module is a lazy one; run one batch through the "
                "model before handing it over, or give the module its input size"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name!r} is a {tensor.layout} tensor, and parameters and the buffers of a state dict are dense "
                f"(torch.strided) ones: register a sparse buffer with persistent=False, or keep its indices and values"
            )
    storages: dict[int, torch.UntypedStorage] = {}
    with unset_fake_temporarily():
        fake_copies = {id(tensor): _on_meta(tensor, storages, hidden) for tensor in originals.values()}
    _check_no_views(module, originals)
    note_references(module)
    for owner in every_module(module).values():
        for name, parameter in own_parameters(owner).items():
            set_parameter(owner, name, fake_copies[id(parameter)])
        for name, buffer in own_buffers(owner).items():
            set_buffer(owner, name, fake_copies[id(buffer)])
        refresh_recurrent_weights(owner)
    if attribute is not None:
        registered = {id(tensor) for tensor in fake_copies.values()}
        made: dict[int, Any] = {}
        for place, _ in list(references_to(module, lambda tensor: id(tensor) not in registered)):
            swap_in(place, lambda tensor: tensor if id(tensor) in registered else attribute(tensor), made)


def _unregister_sparse_buffers(module: nn.Module) -> None:
    """Makes attributes of the sparse buffers that are in no state dict: each rank has such a constant as it is."""
    for owner in every_module(module).values():
        sparse = {name: buffer for name, buffer in own_buffers(owner).items() if buffer.layout != torch.strided}
        for name in sparse.keys() - owner.state_dict().keys() if sparse else ():
            delattr(owner, name)
            setattr(owner, name, sparse[name])


def _check_no_views(module: nn.Module, originals: Mapping[str, torch.Tensor]) -> None:
    registered = {id(tensor) for tensor in originals.values()}
    memory = {
        storage_address(tensor.untyped_storage()): name
        for name, tensor in originals.items()
        if isinstance(tensor, nn.Parameter) and tensor.numel() and not tensor.is_meta
    }

    def is_view(tensor: torch.Tensor) -> bool:
        strided = type(tensor) in (torch.Tensor, FakeTensor) and tensor.layout == torch.strided and not tensor.is_meta
        return strided and id(tensor) not in registered and storage_address(tensor.untyped_storage()) in memory

    for place, tensors in references_to(module, is_view):
        if isinstance(place.holder, nn.Module) and forward_pre_hooks(place.holder):
            continue  # a hook makes it again before it is read, as the older ``spectral_norm`` does
        name = memory[storage_address(tensors[0].untyped_storage())]
        raise ValueError(
            f"the attribute {place.described()} of the model is a view of the memory of parameter {name!r}, which a "
            f"plan lays out in other memory, where the view would keep the values of today: take the view in forward, "
            f"or hold the parameter itself"
        )


def _on_meta(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage], hidden: Container[str]) -> torch.Tensor:
    """`tensor` without its values; `storages` maps the storages of originals to those of their copies."""
    original = tensor.untyped_storage()
    if storage_address(original) not in storages:
        blank = torch.empty(original.nbytes(), dtype=torch.uint8, device="meta")
        storages[storage_address(original)] = blank.untyped_storage()
    fake_copy = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
        storages[storage_address(original)], tensor.storage_offset(), tensor.size(), tensor.stride()
    )
    if isinstance(tensor, nn.Parameter):
        fake_copy = nn.Parameter(fake_copy, requires_grad=tensor.requires_grad)
    elif tensor.requires_grad:
        fake_copy.requires_grad_()
    fake_copy.__dict__.update({key: value for key, value in vars(tensor).items() if key not in hidden})
    return fake_copy

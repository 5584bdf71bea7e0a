""":class:`ShardedModel`: a model under any plan, as the Engine and checkpoints see it.

Its *masters* are the parameters that the optimizer updates.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.sharding import dtensor_like, on_mesh_device, to_local
from tensorshard.loss.logits.output_layers import OutputLogits
from tensorshard.model.parameters import buffer_aliases, parameter_aliases
from tensorshard.model.quantized import quantized_parameters
from tensorshard.model.watched_parameters import InUsersCode
from tensorshard.model.whole_sequences import WholeSequences
from tensorshard.passes.precision import held_dtype, master_dtype
from tensorshard.plan.storage import MasterPlace, TakeGradient, UpdateProgress


class ParameterSplit(Protocol):
    """How tensor parallelism splits the parameters, as far as data parallelism and checkpoints need to know."""

    @property
    def size(self) -> int:
        """Number of ranks that a parameter may be split over."""

    @property
    def rank(self) -> int:
        """This rank's index among them."""

    @property
    def of_data_ranks(self) -> bool:
        """Whether these ranks have different samples, as those that share experts have."""

    def of(self, name: str) -> "ParameterSplit":
        """The split that the parameter `name` belongs to: this one, or that of experts, which has other ranks."""

    def layout(self, name: str) -> Any:
        """How the parameter `name` is laid out over the ranks."""

    def cuts(self, name: str) -> dict[int, list[tuple[int, int]]]:
        """The (start, length) of this rank's pieces of the parameter `name`, along each dimension that is cut."""

    def num_shards(self, name: str) -> int:
        """Into how many shards the parameter `name` is cut."""

    def local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's shard of the parameter `name`."""

    def full(self, name: str, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The full parameter or buffer `name` of `shape`. Every rank passes its `local` shard. A collective."""

    def full_shape(self, name: str, shape: torch.Size) -> torch.Size:
        """The full shape of the parameter or buffer `name`. `shape` is that of a shard, or full."""

    def keep_outputs_split(self) -> AbstractContextManager[None]:
        """Within this, output layers leave their logits split over the ranks."""

    def describe(self) -> str | None:
        """Describes what is split, for people; None if nothing is."""


class WholeView(Protocol):
    """Whether code that uses a split parameter gets this rank's part of it, or the whole."""

    def parts(self) -> AbstractContextManager[None]:
        """A context in which all code gets parts."""

    def whole(self, *, in_hook: bool = False) -> AbstractContextManager[None]:
        """A context, within :meth:`parts`, in which the user's code, perhaps a hook, gets the whole."""

    def begin(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """From now on, the user's code gets the whole outside of :meth:`parts`, and `optimizer`, which updates
        `masters`, parts."""

    def is_users_call(self) -> bool:
        """Whether the code that asks is the user's, and is to get the whole now."""

    def of(self, name: str) -> Any:
        """How the parameter `name` looks whole; None if it is not split."""


class ShardedModel(ABC):
    """A model whose gradients are averaged over the data ranks, and whose states are sharded as a ZeRO level says.

    Attributes:
        writers: above 0 if user code of some data rank has written parameters since the last update, as the last
            reduction of gradients has told all of them; None if that is not known.
    """

    def __init__(self, model: nn.Module, split: ParameterSplit) -> None:
        self.model = model
        self.split = split
        self._device: torch.device | None = None  # the device that collectives need; None for any
        self.logits = OutputLogits()
        self.sequences = WholeSequences()
        self.writers: torch.Tensor | None = None
        self.whole_views: list[WholeView] = []
        """Of parameters that are split over tensor-parallel ranks."""
        self.in_users_code: list[InUsersCode] = []
        self._take_gradient: TakeGradient | None = None
        self._finish_gradients: Callable[[], None] | None = None
        self._aliases = parameter_aliases(model)
        self._shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        persistent = model.state_dict(keep_vars=True)
        self._buffer_shapes = {
            name: split.full_shape(name, b.shape) for name, b in model.named_buffers() if name in persistent
        }
        self._dtypes = {name: held_dtype(p) for name, p in model.named_parameters()}
        self._dtypes.update({name: b.dtype for name, b in model.named_buffers() if name in persistent})

    def full_shapes(self) -> dict[str, torch.Size]:
        """The shapes of all of the original model's parameters, including those on other pipeline ranks."""
        return self._shapes

    def buffer_shapes(self) -> dict[str, torch.Size]:
        """The shapes of all persistent buffers, by the original model's names."""
        return self._buffer_shapes

    def full_layouts(self) -> dict[str, torch.Tensor]:
        """The shapes and dtypes of what :meth:`full_tensors` gives, in its order, on the meta device."""
        shapes = {**self._shapes, **self._buffer_shapes}
        layouts = {name: torch.empty(shape, dtype=self._dtypes[name], device="meta") for name, shape in shapes.items()}
        for name, buffer in self.owned_buffers().items():
            if name not in layouts:  # a forward created it
                layouts[name] = torch.empty_like(buffer, device="meta")
        return layouts

    @property
    def structure(self) -> nn.Module:
        """The original model, for its modules, names and attributes. Its tensors may be of any kind."""
        return self.model

    def all_modules(self) -> list[nn.Module]:
        """Every module that computes on this rank, or that the user sees."""
        return list(self.model.modules())

    def protect(self) -> None:  # noqa: B027
        """Called when the Engine is made: from now on, what this rank does not have says so where it is read."""

    def describe_stages(self) -> str | None:
        """The stages of the pipeline, if there is one."""
        return None

    def is_trained(self, name: str) -> bool:
        """Whether the original model's parameter requires a gradient."""
        return name in self._trained

    def full_shape(self, name: str) -> torch.Size:
        """The shape of the original model's parameter."""
        return self._shapes[name]

    def num_shards(self) -> dict[torch.Tensor, float]:
        """Over how many ranks each master's elements are spread. The other ranks of the world hold copies."""
        ways: dict[torch.Tensor, float] = {}
        for name, master in self.masters().items():
            sharded = isinstance(master, DTensor) and any(p.is_shard() for p in master.placements)
            over = master.device_mesh.size(-1) if isinstance(master, DTensor) and sharded else 1
            ways[master] = over * self.split.num_shards(name)
        return ways

    def aliases(self) -> dict[str, str]:
        """For every name of a parameter, the first one in the original model. Tied parameters have several."""
        return self._aliases

    def loss_is_over(self) -> None:
        """Called when the loss of a (micro-)batch has been computed, before its backward if there is one."""
        self.logits.compute_pending()

    @contextmanager
    def outputs_for_loss(self) -> Iterator[None]:
        """Within this, output layers leave logits split over tensor-parallel ranks, or uncomputed, where the loss can
        take them so. Logits of parts of sequences are whole."""
        with ExitStack() as stack:
            if not self.sequences.are_split:
                stack.enter_context(self.split.keep_outputs_split())
            stack.enter_context(self.logits.pending())
            yield

    @abstractmethod
    def masters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer updates, by original names: DTensors if sharded, fp32 or wider."""

    @abstractmethod
    def held_numel(self) -> int:
        """Number of elements of the parameters that this rank holds between steps, padding included."""

    def discard_gradients(self) -> None:
        """Called before a step: forgets all gradients, including those that a failed step left unfinished."""
        for master in self.masters().values():
            master.grad = None

    def abandon_step(self) -> None:
        """Called after a failed step, by every rank where it failed: ends work under way, and forgets gradients."""
        self.discard_gradients()

    @abstractmethod
    def begin_micro_batch(self, last: bool, *, shown: bool = False) -> None:
        """Called before each backward whose loss is this rank's share of the whole batch's, so that gradients only
        need to be summed, and what flows through the backward is what flows on one process.

        Args:
            last: whether the step's gradients are complete after this backward.
            shown: whether the user's code sees them then.
        """

    def begin_backward(self, loss: torch.Tensor) -> None:  # noqa: B027
        """Called with the `loss` whose backward follows :meth:`begin_micro_batch`; gradients may go to other ranks
        sooner where it is. A collective."""

    def trained_masters(self) -> dict[str, nn.Parameter]:
        """Those of :meth:`masters` whose parameters require a gradient now. User code may change that at any time."""
        return {name: master for name, master in self.masters().items() if master.requires_grad}

    def shown_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the module shows, by original names: the masters, or what forwards compute with."""
        return self.masters()

    def whole(self, name: str) -> Any:
        """How the parameter `name` looks whole to the user's code under tensor parallelism; None if it is not split."""
        return next((whole for view in self.whole_views if (whole := view.of(name)) is not None), None)

    def show_gradients(self) -> None:  # noqa: B027
        """Makes ``grad`` of :meth:`shown_parameters` show the gradients that the masters hold."""

    def average_given_gradients(self) -> None:  # noqa: B027
        """Called before gradients are read: averages those that user code has set, each data rank its own."""

    def adopt_writes(self) -> None:  # noqa: B027
        """Takes over what user code has written to the module's parameters. A collective, if it wrote to masters."""

    def compare_written(self) -> None:  # noqa: B027
        """Called by all data ranks if one of them has :attr:`writers`.

        Raises:
            RuntimeError: they wrote different values.
        """

    @abstractmethod
    def finish_micro_batch(self) -> None:
        """Called when a backward of a step, or a part of one, is over."""

    @abstractmethod
    def finish_backward(self) -> None:
        """Called after a step's last backward: every master's gradient is final when this returns."""

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        """Calls `take` with each master whose gradient was reduced, and `finish` before any gradient is added to or
        read.

        `take` may replace the gradient by another tensor of the same values.
        """
        self._take_gradient = take
        self._finish_gradients = finish

    @abstractmethod
    def watch_updates(self, update: UpdateProgress) -> None:
        """Makes forwards wait until `update`, which goes on in the background, has changed what they need. Called once
        at most.

        See :meth:`gather_as_updated`.
        """

    def master_places(self) -> dict[str, MasterPlace]:
        """Where this rank's shards of :meth:`masters` are. Some that are in the device's memory may be missing."""
        return {}

    @abstractmethod
    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        """Called after the masters were changed: updates the parameters that forward computes with.

        Args:
            copied: the masters whose 16-bit copies on this rank are up to date already.
        """

    @abstractmethod
    def gather_as_updated(self, copied: Container[torch.Tensor] = ()) -> None:
        """Called in place of :meth:`all_gather_parameters` while the masters' update goes on. Each unit is gathered
        when it is needed."""

    def all_gather_loaded(self) -> None:
        """Called after the masters were overwritten, including frozen ones, which no update changes."""
        self.all_gather_parameters()

    @abstractmethod
    def finish_gather(self) -> None:
        """Waits for what :meth:`all_gather_parameters` started."""

    def is_part(self, name: str) -> bool:
        """Whether this rank can show only a part of the original model's parameter `name`."""
        master = self.masters().get(name)
        if self.split.num_shards(name) > 1:
            return True
        return isinstance(master, DTensor) and master.device_mesh.size(-1) > 1

    def is_released(self, name: str) -> bool:
        """Whether the parameter `name` is in memory only while it is used, so that a look at it gathers it."""
        return False

    def shows_part(self, name: str) -> bool:
        """Whether the module's parameter `name` has only a part of the original one in memory."""
        return self.is_part(name)

    def master_shown_in_state_dicts(self, name: str) -> nn.Parameter | None:
        """The master of the parameter `name`, if a state dict has to hold it in the parameter's place."""
        return self.masters().get(name)

    def shown_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """What the module's parameter or buffer `name` takes of a `full` value."""
        return self.local_value(name, full)

    def shown_value(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """As :meth:`shown_part`, of a value that is being loaded: the parameter's master takes it now."""
        return self.shown_part(name, full)

    @contextmanager
    def computing_on_parts(self) -> Iterator[None]:
        """A context in which all code gets this rank's parts of parameters that are split over tensor-parallel ranks.

        Code of tensorshard gets them anyway. Within this, it does not have to be found out for each use.
        """
        with ExitStack() as stack:
            for view in self.whole_views:
                stack.enter_context(view.parts())
            for tensors in self.in_users_code:
                stack.enter_context(tensors.paused())
            yield

    @contextmanager
    def calling_user(self, *, in_hook: bool = False) -> Iterator[None]:
        """A context, within :meth:`computing_on_parts`, for a function of the user's that may read parameters, such as
        a hook of the optimizer."""
        with ExitStack() as stack:
            for tensors in self.in_users_code:
                stack.enter_context(tensors.shown())
            for view in self.whole_views:
                stack.enter_context(view.whole(in_hook=in_hook))
            yield

    def local_value(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the parameter or buffer `name`. `full` is the full value.

        It has the layout of the parameter's master.
        """
        local = self.split.local(name, full)
        master = self.masters().get(self._aliases.get(name, name))
        if not isinstance(master, DTensor):
            return local
        own = master.to_local()
        first = -(-local.size(0) // master.device_mesh.size(-1)) * master.device_mesh.get_local_rank(-1)
        shard = local[min(first, local.size(0)) :][: own.size(0)].to(own)
        return dtensor_like(shard, master)

    @torch.no_grad()
    def set_value(self, name: str, value: torch.Tensor) -> None:
        """Gives the shown parameter `name` a `value` of its layout. :meth:`all_gather_loaded` is called after it."""
        to_local(self.shown_parameters()[name]).copy_(to_local(value))

    @torch.no_grad()
    def kept_value(self, name: str) -> Callable[[], None]:
        """Copies the parameter `name`; the function that is returned gives it that value again."""
        kept = self.shown_parameters()[name].detach().clone()
        return lambda: self.set_value(name, kept)

    # -- penalties on the weights --

    def counts(self, name: str) -> bool:
        """Whether this rank's penalty has the terms of the parameter `name`, of which other ranks may have copies."""
        return True

    def computing_penalty(self) -> AbstractContextManager[None]:
        """Surrounds a function of the weights, which this rank computes for what it has."""
        return nullcontext()

    def full_value(self, name: str) -> torch.Tensor:
        """The master of the parameter `name`, whole, in fp32 at least. A collective of the ranks that have a part of
        it."""
        full = self._full_parameter(name, self.masters()[name])
        return full.to(master_dtype(full.dtype))

    @torch.no_grad()
    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Adds to the masters' gradients after :meth:`finish_backward`. A collective.

        Args:
            gradients: this rank's parts, as :meth:`local_value` gives them, the same on all ranks that have a copy.
        """
        if self._finish_gradients is not None:
            self._finish_gradients()
        masters = self.masters()
        for name, gradient in gradients.items():
            master = masters[name]
            local = to_local(gradient)
            if master.grad is not None:
                own = to_local(master.grad)
                own.add_(local.to(own.device, own.dtype))
                continue
            local = local.to(to_local(master).device, master.dtype)
            master.grad = dtensor_like(local, master) if isinstance(master, DTensor) else local
            if self._take_gradient is not None:
                self._take_gradient(master)

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of a state dict, by the original model's names."""
        state = self.model.state_dict(keep_vars=True)
        return {name: buffer for name, buffer in self.model.named_buffers() if name in state}

    def owned_buffers(self) -> dict[str, torch.Tensor]:
        """Those of :meth:`persistent_buffers` that this rank has to save."""
        return self.persistent_buffers()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every master whole, one at a time, by the original model's names. A collective: all ranks iterate.

        Frozen parameters are in their own type.
        """
        for name, master in self.masters().items():
            yield name, self._full_parameter(name, master)

    def _full_parameter(self, name: str, master: nn.Parameter) -> torch.Tensor:
        """A full master, on the device that collectives need. A collective of the ranks that have a part of it."""
        local = master.detach()
        if isinstance(local, DTensor):
            local = on_mesh_device(local).full_tensor()
        elif self._device is not None:
            local = local.to(self._device)
        return self.split.full(name, local.to(self._dtypes[name]), self._shapes[name])

    def full_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of a state dict, whole, by the original model's names. A collective: all ranks iterate."""
        for name, buffer in self.owned_buffers().items():
            shape = self._buffer_shapes.get(name, buffer.shape)  # a forward may have created it
            yield name, self.split.full(name, buffer.detach(), shape)

    def full_tensors(self, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter and buffer of a state dict, whole, one at a time, by the first of its names.

        A collective: all ranks iterate to the end, at the same time. Ranks that do not `keep` tensors get none.
        """
        for name, tensor in self.full_parameters():
            if keep:
                yield name, tensor.detach()
            del tensor  # before the next one is gathered
        for name, tensor in self.full_buffers():
            if keep:
                yield name, tensor
            del tensor

    def full_state_dict(self, keep: bool) -> dict[str, torch.Tensor]:
        """The original model's state dict, whole, on the CPU; {} on ranks that do not `keep` it. A collective."""
        full = {name: tensor.to("cpu", copy=True) for name, tensor in self.full_tensors(keep)}
        state = self.structure.state_dict(keep_vars=True)
        first = self._aliases | buffer_aliases(self.structure)
        quantized = quantized_parameters(self.structure)
        for name, spec in quantized.items():
            if name in full:
                full[name] = spec.build(full[name])
        return {name: full[first.get(name, name)] for name in state if keep and first.get(name, name) in full}

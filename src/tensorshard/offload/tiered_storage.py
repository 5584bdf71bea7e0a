"""The storage of a plan that offloads: what goes to host memory or to disk, and back."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from tensorshard.comm.collectives import all_reduce_
from tensorshard.comm.decisions import succeed_together
from tensorshard.comm.world import ranks_here, world
from tensorshard.offload.activations import OffloadedActivations
from tensorshard.offload.device_copies import DeviceCopies
from tensorshard.offload.offloaded_optimizer import OffloadedOptimizer
from tensorshard.offload.offloaded_parameters import OffloadedParameters
from tensorshard.offload.tiers import CopyOnDisk, OffloadedMaster, Tiers
from tensorshard.offload.updates import tile_update
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.offload import Offload
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import MasterPlace, ParameterUnits, Storage, StoredModel, TemporaryCopy, Update
from tensorshard.torch_private.fake_tensors import unset_fake_temporarily

logger = logging.getLogger("tensorshard")

# How an optimizer that is not known is tried, on small parameters.
_PROBED_SIZE = 3  # size of each dimension
_PROBED_STEPS = 2
_COMPARED = 4  # parameters of each group


def open_tiers(
    plan: Plan, offload: Offload, mesh: Mesh, device: torch.device, *, off_device: bool | None = None
) -> "TieredStorage":
    """The storage for what `plan` offloads. A collective of the mesh.

    Nothing is allocated yet, except pinned buffers for activations if the device has memory of its own.

    Args:
        offload: of the plan.
        off_device: whether the device has memory of its own, other than the host's, where updates are made. None: as
            `device` says. (In an estimate, fake tensors of the CPU stand for a GPU's.)

    Raises:
        ValueError: the folder cannot hold a scratch file, or `device` cannot offload under this plan.
    """
    off_device = not is_host_memory(device) if off_device is None else off_device
    if off_device:
        offload = _off_device(plan, offload, say=mesh.rank == 0)

    def open_storage() -> TieredStorage:
        tiers = Tiers(offload, ranks_here(), DeviceCopies(device) if off_device else None)
        return TieredStorage(tiers, mesh)

    storage = succeed_together(open_storage, mesh.world_group, "parallelize")
    held = (offload.optimizer, offload.gradients, offload.parameters, offload.activations)
    if mesh.rank == 0 and "cpu" in held and not off_device:
        logger.warning("offload to host memory saves nothing on CPU ranks, which compute in host memory; 'disk' does")
    return storage


def is_host_memory(device: torch.device) -> bool:
    """Whether the memory of `device` is the host's, where updates of offloaded states are made."""
    return device.type == "cpu"


def _off_device(plan: Plan, offload: Offload, *, say: bool) -> Offload:
    """The offload of a device with memory of its own, with the fields set that the plan leaves open.

    Args:
        say: whether this rank logs what was set.

    Raises:
        ValueError: the plan asks for what such a device cannot do.
    """
    if offload.optimizer is not None and offload.gradients is None:
        raise ValueError(
            f"offload.gradients=None was given with offload.optimizer={offload.optimizer!r} on GPUs: the host updates "
            f"what is in its memory, and there it needs the gradients, too; set offload.gradients to 'cpu' or 'disk'"
        )
    if offload.optimizer is not None and offload.parameters is None and plan.shards_parameters:
        # The shards of ZeRO 3 are the master weights.
        offload = replace(offload, parameters=offload.optimizer)
        if say:
            logger.warning(
                "the shards of zero=3 are the master weights, which go with the optimizer's states: parameters are "
                "kept as with offload.parameters=%r, and go to the device a unit at a time",
                offload.optimizer,
            )
    return offload


class TieredStorage(Storage):
    """Keeps one rank's tensors where its plan says: on the device, in host memory or on disk.

    Attributes:
        activations: moves what blocks keep for backward; None if that stays on the device.
    """

    def __init__(self, tiers: Tiers, mesh: Mesh) -> None:
        self._tiers = tiers
        self._offload = tiers.offload
        self._group = mesh.world_group
        self._is_first = mesh.rank == 0
        self._optimizer: OffloadedOptimizer | None = None
        self.activations = None if tiers.offload.activations is None else OffloadedActivations(tiers)

    # -- layout --

    @property
    def masters_on_host(self) -> bool:
        return self._tiers.copies is not None and self._offload.optimizer is not None

    def move_activations(self, blocks: Iterable[nn.Module]) -> None:
        if self.activations is not None:
            for block in blocks:
                self.activations.surround(block)

    def keep_master(self, values: torch.Tensor, copy: torch.Tensor) -> tuple[torch.Tensor, MasterPlace]:
        if self._offload.optimizer is None or not values.dim():  # scalars stay where they are
            return super().keep_master(values, copy)
        place = self._tiers.keep(values, copy)
        return place.slot.tensor.view(values.shape), place

    def parameter_units(self) -> ParameterUnits:
        return super().parameter_units() if self._offload.parameters is None else OffloadedParameters(self._tiers)

    # -- training --

    def keep_states(
        self,
        optimizer: torch.optim.Optimizer,
        model: StoredModel,
        masters: Mapping[str, nn.Parameter],
        build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer],
    ) -> Update:
        if self._offload.optimizer is None:
            return super().keep_states(optimizer, model, masters, build)

        def offload() -> OffloadedOptimizer:
            states: Mapping[str, Mapping[str, torch.dtype]] = {}
            if tile_update(optimizer) is None:
                with unset_fake_temporarily():
                    states = probe_states(build, masters)
            places = model.master_places()
            return OffloadedOptimizer(
                optimizer,
                masters,
                states,
                self._tiers,
                offloaded={n: p for n in masters if isinstance(p := places.get(n), OffloadedMaster)},
                agree=self._agree_on_update,
            )

        update = self._optimizer = succeed_together(offload, self._group, "parallelize")
        if update.gradients is not None:
            model.watch_gradients(update.gradients.take, update.gradients.finish)
        if self._offload.overlap:
            model.watch_updates(update.background)
        shown = self._is_first and not world().is_simulated
        if shown and self._offload.host_memory is not None:  # else the plan says it
            print(f"offloaded by rank 0:\n{self.describe()}", flush=True)
        return update

    def check_transfers(self, *, of_update: bool = False) -> None:
        pending = of_update and self._optimizer is not None and self._optimizer.is_pending
        parameters = self._offload.uses_disk and self._offload.parameters is not None
        may_fail = self._offload.uses_disk or self._tiers.copies is not None
        activations = self.activations if may_fail else None
        if not (pending or parameters or activations is not None):
            return
        failures: list[Exception | None] = []
        if pending and self._optimizer is not None:
            failures.append(self._optimizer.take_failure())
        if parameters:
            failures.append(self._tiers.take_failure())
        if activations is not None:
            failures.append(activations.take_failure())
        failure = next((failure for failure in failures if failure is not None), None)
        self._raise_together("moving offloaded tensors", failure)

    def _agree_on_update(self, failure: Exception | None) -> None:
        self._raise_together("the update of offloaded states", failure)

    def _raise_together(self, what: str, failure: Exception | None) -> None:
        """If one rank has a `failure` in doing `what`, raises it on all ranks. A collective."""
        if self._group.size() > 1:
            # NCCL's groups take only tensors on GPUs.
            device = None if self._tiers.copies is None else self._tiers.copies.device
            failures = torch.tensor([float(failure is not None)], device=device)
            all_reduce_(failures, self._group, what="whether the scratch files could be read and written")
            if not any(world().known(failures, [0.0])):
                return
        elif failure is None:
            return

        def fail() -> None:
            if failure is not None:
                raise failure

        succeed_together(fail, self._group, what)

    def temporary_copy(self) -> TemporaryCopy:
        return CopyOnDisk(self._offload.folder) if self._offload.uses_disk else TemporaryCopy()

    # -- what is kept elsewhere --

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self._tiers.tensors

    @property
    def held_by_kind(self) -> Mapping[tuple[str, str], int]:
        return self._tiers.held_by_kind

    def held(self, where: str) -> int:
        return self._tiers.held(where)

    def moved(self, where: str) -> int:
        of_activations = 0 if self.activations is None else self.activations.space.moved(where)
        return of_activations + self._tiers.moved(where)

    def forget_moved(self) -> None:
        self._tiers.forget_moved()
        if self.activations is not None:
            self.activations.space.forget_moved()

    def describe(self) -> str | None:
        return self._tiers.describe()


def probe_states(
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], masters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, torch.dtype]]:
    """The states of a parameter's own shape that an optimizer keeps for each of `masters`, by their keys.

    Args:
        build: makes the optimizer of the parameters that it is given.

    Raises:
        ValueError: the update of one parameter depends on another parameter.
    """
    together, names = _small(build, masters)
    alone, _ = _small(build, masters)
    kind = type(together).__name__
    refused = f"offload moves the states of one parameter at a time, but {kind} couples parameters: "
    remedy = (
        "; use an optimizer that updates each parameter by itself (torch's Adam, AdamW, SGD, Adagrad, RMSprop and the "
        "like), or offload=None"
    )
    try:
        compared = []
        for group in together.param_groups:
            compared += group["params"][:_COMPARED]
        twin = {
            p: q
            for a, b in zip(together.param_groups, alone.param_groups, strict=True)
            for p, q in zip(a["params"], b["params"], strict=True)
        }
        for _ in range(_PROBED_STEPS):
            _set_gradients(compared)
            gradients = {p: p.grad.clone() for p in compared if p.grad is not None}  # some change them in place
            together.step()
            for parameter, gradient in gradients.items():
                twin[parameter].grad = gradient
                alone.step()
                twin[parameter].grad = None
    except Exception as error:
        raise ValueError(f"{refused}its step fails on small tensors ({error}){remedy}") from error
    for parameter in compared:
        if not torch.equal(parameter, twin[parameter]):
            raise ValueError(f"{refused}{names[parameter]!r} becomes another when it is updated alone{remedy}")
    _set_gradients(names)
    together.step()
    return {name: _states(together, parameter) for parameter, name in names.items()}


def _small(
    build: Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer], masters: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[nn.Parameter, str]]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        name: nn.Parameter(
            torch.randn([min(size, _PROBED_SIZE) for size in master.shape], generator=generator, dtype=master.dtype)
        )
        for name, master in masters.items()
    }
    return build(parameters), {parameter: name for name, parameter in parameters.items()}


def _set_gradients(parameters: Iterable[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _states(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.dtype]:
    return {
        key: value.dtype
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }

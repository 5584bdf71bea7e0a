"""Custom process groups, the settings of a group, and what ``DistributedDataParallel`` averages and leaves alone.

Also here: whether a thread waits for other ranks, by the line that it is in.
"""

import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import (
    _get_default_store,
    _register_process_group,
    _resolve_process_group,
    _set_pg_timeout,
    _unregister_all_process_groups,
    _update_default_pg,
)
from torch.nn.parallel import DistributedDataParallel

from tensorshard.torch_private.patches import replaced

_STANDS_FOR: ContextVar[str] = ContextVar("_STANDS_FOR", default="fake")
"""The backend that a fake world stands for: see :func:`fake_world`."""


COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base", "broadcast", "reduce"),
    *("gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base", "barrier"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single", "all_gather_single_coalesced"),
    *("reduce_scatter_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of process groups that functions of ``torch.distributed`` call, under the names of all releases."""

_FUNCTIONS = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "broadcast"),
    *("reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single", "barrier"),
}

_NCCL = ("nccl", "nccl2", "nccl-lazy")  # torch 2.15 has three implementations


def is_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether NCCL sends tensors on `device` in `group`, by any of torch's implementations.

    Why: only NCCL starts several collectives as one kernel.

    Checked: torch 2.13 and 2.15.

    Public way: ``dist.get_backend_config(group)``, for groups that torch has made.
    """
    return backend_name(group, device) in _NCCL


def opens_at_once() -> bool:
    """Whether NCCL opens a group's connections when the group is made, and not when it first sends.

    Why: groups that never send take memory then, and the device is asked for before anything is on it. Torch takes it
    from ``LOCAL_RANK`` where it is not told.

    Checked: torch 2.13 and 2.15, whose "nccl" is another implementation, unless ``TORCH_DIST_USE_NCCL2=0``.

    Public way: none; builds of torch without CUDA have no class to ask for.
    """
    return torch.__version__ >= "2.15" and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


def backend_of_pipeline(group: dist.ProcessGroup) -> str | None:
    """The backends, as "cpu:gloo,cuda:nccl-lazy", that a pipeline's ranks of `group` send over; None for those of
    `group`.

    Why: the "nccl" of torch 2.15 has one stream for all that a rank sends and receives in a group, so a receive from
    one neighbour would hold back a send to the other. "nccl-lazy" has a stream for each.

    Checked: torch 2.13 and 2.15.

    Public way: the names; whether a group is of that kind is not told.
    """
    pairs = [pair.partition(":") for pair in str(dist.get_backend_config(group)).split(",")]
    kinds = {device: name for device, _, name in pairs if name}
    lazily = {
        device: "nccl-lazy" if name in _NCCL and group._get_backend(torch.device(device)).name() == "nccl2" else name
        for device, name in kinds.items()
    }
    return None if lazily == kinds else ",".join(f"{device}:{name}" for device, name in lazily.items())


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that sends tensors on `device` in `group`: "gloo", "nccl", ...

    Why: a group may have one backend per device. Collectives are built from sends and receives on Gloo only.

    Checked: torch 2.13 and 2.15.

    Public way: ``dist.get_backend_config(group)``, for groups that torch has made.
    """
    name = group._get_backend(device).name()
    return _STANDS_FOR.get() if name == "fake" else name


def group_device(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """`wanted`, or if `group` has no backend for tensors on it, the device of one that it has.

    Why: a world of NCCL alone takes no tensors on the CPU.

    Checked: torch 2.13 and 2.15.

    Public way: ``dist.get_backend_config(group)``, for groups that torch has made.
    """
    kinds = [device.type for device in group._device_types]
    if not kinds or wanted.type in kinds:
        return wanted
    kind = next((kind for kind in kinds if kind != "cpu"), kinds[0])
    return torch.device(kind, torch.get_device_module(kind).current_device())


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long ranks wait for each other in collectives of tensors on `device`.

    Why: Gloo's sends and receives use the timeout that was set when the group was made, unless each wait has its own.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    backend = group._get_backend(device)
    return timedelta(0) if backend.name() == "fake" else backend.options._timeout  # nobody waits in a fake world


def default_store() -> dist.Store:
    """The key-value store of the world that this process is in.

    Why: ranks write there what they do, where another one of them can read it while it waits in a collective.

    Checked: torch 2.13.

    Public way: none; a store that one makes needs an address of its own.
    """
    return _get_default_store()


def own_client(store: dist.Store) -> dist.Store:
    """Another connection to what `store` keeps.

    Why: threads may not share one. It is missing in torch's stubs.

    Checked: torch 2.13 and 2.15.

    Public way: none; the method is not documented.
    """
    client: dist.Store = store.clone()  # type: ignore[attr-defined]
    return client


def collective_of_frame(frame: FrameType) -> tuple[str, dist.ProcessGroup, list[torch.Tensor]] | None:
    """The collective of ``torch.distributed`` that `frame` runs: its name, its group and its tensors; None if it runs
    none. Those of the default group, which is not given, are not known.

    Why: a rank that waits says in what.

    Checked: torch 2.13 and 2.15.

    Public way: none; torch's flight recorder has those of NCCL alone.
    """
    if frame.f_globals.get("__name__") != distributed_c10d.__name__ or frame.f_code.co_name not in _FUNCTIONS:
        return None
    group = frame.f_locals.get("group")
    if not isinstance(group, dist.ProcessGroup):
        return None
    return frame.f_code.co_name, group, [value for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Sets how long the ranks of `group` wait for each other.

    Why: a mesh makes its groups with torch's own timeout, 30 minutes on Gloo.

    Checked: torch 2.13 and 2.15.

    Public way: ``dist.new_group(timeout=...)``, for groups that one makes.
    """
    if dist.get_backend(group) != "fake":  # where nobody waits
        _set_pg_timeout(timeout, group)


def merged_group(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    """The group of all ranks of `mesh`, with its axes merged into one called `name`.

    Why: losses are averaged over two axes of a mesh at once.

    Checked: torch 2.13 and 2.15.

    Public way: ``dist.new_group`` for every such set of ranks, but the mesh would not know these groups.
    """
    return mesh._flatten(name).get_group()


class Comm(Protocol):
    """Collectives of ranks that are not processes. Each is complete when it returns, and writes to torch's outputs.

    Attributes:
        name: the name of this kind of collectives.
    """

    name: str

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums `tensor` over the ranks, in place."""

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Concatenates every rank's `input` into `output`."""

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Sums `input` over the ranks and leaves this rank's part in `output`."""

    def all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_splits: list[int], input_splits: list[int]
    ) -> None:
        """Sends part i of `input` to rank i, and joins the received parts in `output`; sizes are of dimension 0."""


class LocalGroup(dist.ProcessGroup):
    """A process group inside of one process, which hands its collectives to `comm`.

    Why: layers and transforms call ``torch.distributed`` with a group. Their results are checked on ranks that are
    threads, and shapes are found on ranks that do not exist.

    Checked: torch 2.13 and 2.15, which call three of the methods by two names each.

    Public way: none. A backend added by ``dist.Backend.register_backend`` serves groups with one rank in each
    process.
    """

    def __init__(self, comm: Comm, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._comm = comm

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalGroup":
        return self

    def getBackendName(self) -> str:
        return self._comm.name

    def _get_backend(self, device: torch.device) -> Any:
        return _Backend(self._comm.name)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        self._comm.all_reduce(tensor)
        return _Done()

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        self._comm.all_gather(output, input)
        return _Done()

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        self._comm.reduce_scatter(output, input)
        return _Done()

    def alltoall_base(  # type: ignore[override]
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> dist.Work:
        self._comm.all_to_all(output, input, output_splits, input_splits)
        return _Done()

    # The names that torch.distributed's functions call; its C++ calls those above.

    def all_gather_single(self, *args: Any) -> dist.Work:
        return self._allgather_base(*args)

    def reduce_scatter_single(self, *args: Any) -> dist.Work:
        return self._reduce_scatter_base(*args)

    def all_to_all_single(self, *args: Any) -> dist.Work:
        return self.alltoall_base(*args)


class _Done(dist.Work):
    """A collective that is over.

    Args:
        keep: kept alive as long as this object.
    """

    def __init__(self, keep: Any = None) -> None:
        super().__init__()
        self._keep = keep

    def wait(self, timeout: Any = None) -> bool:
        return True


class _Backend:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


@contextmanager
def fake_world(rank: int, size: int, backend: str = "fake") -> Iterator[None]:
    """Inside, this process is `rank` of a world of `size`, whose other ranks do not exist.

    Args:
        backend: the backend that its groups simulate. With "gloo", collectives that are built from sends and receives
            are built so here too, and hold the memory that they would receive into.

    Why: one process tries a plan for many ranks. Collectives return at once, and move nothing. A send or receive keeps
    its tensor as those of Gloo and NCCL do: as long as the object that it returned exists, waited for or not.

    Checked: torch 2.13 and 2.15.

    Public way: none; the backend "fake" and its store are for torch's own tests.

    Raises:
        RuntimeError: the process is in a world already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is in a process group already, and cannot be a rank of a fake one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    report = sys.excepthook  # a world sets one that writes "[rank0]:" before each line, and never resets it
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    sys.excepthook = report
    stands_for = _STANDS_FOR.set(backend)
    forget_meshes()
    try:
        with _kept_while_sent():
            yield
    finally:
        _STANDS_FOR.reset(stands_for)
        dist.destroy_process_group()
        forget_meshes()


def simulates_gpu() -> bool:
    """Whether this process is a rank of a fake world that stands for one of GPUs: see :func:`fake_world`.

    Why: what a rank computes at once depends on its device, and the fake tensors of such a rank are on the CPU.

    Checked: torch 2.13.

    Public way: none.
    """
    return dist.is_initialized() and dist.get_backend() == "fake" and _STANDS_FOR.get() != "gloo"


@contextmanager
def _kept_while_sent() -> Iterator[None]:
    def keeping(transfer: Callable[..., Any]) -> Callable[..., Any]:
        def transferred(group: dist.ProcessGroup, tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> dist.Work:
            transfer(group, tensors, *args, **kwargs)
            return _Done(list(tensors))

        return transferred

    with replaced(dist.ProcessGroup, "send", keeping), replaced(dist.ProcessGroup, "recv", keeping):
        yield


def forget_meshes() -> None:
    """Empties what DTensors keep by their meshes. To be called where a world of this process has ended.

    Why: a mesh equals each other one of the same ranks. A DTensor made in a later world would get the mesh of an
    earlier one, with its place in it: rank 1 would write what it holds as rank 0's part, say. Kept meshes also keep the
    threads of their groups.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``torch.distributed.tensor.debug`` empties one of these caches.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor.")]
    if not modules:
        return
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    for module in modules:
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear") and not isinstance(value, type):
                value.cache_clear()


def forget_world() -> list[Any]:
    """Takes this process, a fork of one in a world of ranks, out of that world.

    Why: a fork has copies of its parent's groups without their threads, so it can neither use nor destroy them. To try
    plans, it must be in its own world.

    Checked: torch 2.13 and 2.15.

    Public way: none; ``dist.destroy_process_group()`` waits for threads that a fork does not have.

    Returns:
        The groups, which must live until the process ends without destroying them (``os._exit``).
    """
    world = distributed_c10d._world
    kept = [world.default_pg, *world.pg_map, *world.pg_map.values(), *(table.copy() for table in _tables())]
    _update_default_pg(None)
    _unregister_all_process_groups()
    for table in _tables():
        table.clear()
    world.group_count = 0
    return kept


@contextmanager
def world_set_aside() -> Iterator[None]:
    """Inside, this process is in no world, and can be a rank of a fake one. Its groups are not used meanwhile.

    Why: plans are tried in a fork of a rank. Where a fork cannot run autograd, the rank tries them itself.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    world = distributed_c10d._world
    default, contents, count = world.default_pg, [table.copy() for table in _tables()], world.group_count
    groups = forget_world()
    try:
        yield
    finally:
        for table, content in zip(_tables(), contents, strict=True):
            table.clear()
            (table.update if isinstance(table, dict) else table.extend)(content)
        world.group_count = count
        for group, name in world.pg_names.items():
            _register_process_group(name, group)
        _update_default_pg(default)
        del groups


@contextmanager
def alone_in_the_world() -> Iterator[None]:
    """Inside, this process is the one rank of a world, if it is in a larger one. Its groups are not used meanwhile.

    Why: a model is examined by running its code on one rank, or on fake tensors. Code that calls ``torch.distributed``
    itself would wait there for ranks that do not run it.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    if not dist.is_initialized() or dist.get_backend() == "fake":
        yield
        return
    with world_set_aside(), fake_world(0, 1):
        yield


def is_alone() -> bool:
    """Whether the code that runs is examined by :func:`alone_in_the_world`.

    Why: what a forward gathers from all data ranks there is its own samples' alone. The groups that it may know have
    ranks that do not run it.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return dist.is_initialized() and dist.get_world_size() == 1 and dist.get_backend() == "fake"


def _tables() -> tuple[Any, ...]:
    """What torch keeps of its groups: dicts, and a list. What is in the last two ends with any world that ends."""
    world = distributed_c10d._world
    tables = (
        world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.tags_to_pg, world.pg_to_tag,
        world.pg_coalesce_state, world.comms,
    )  # fmt: skip
    hooks = getattr(world, "pg_flight_recorder_hooks", None)  # torch 2.15
    return tables if hooks is None else (*tables, hooks)


def group_of_argument(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an operator got as `argument`; None if it is something else.

    Why: the bytes sent along each axis are counted where operators are called. These get a group's C++ object or, if
    they are functional, its name.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    if isinstance(argument, str):
        try:
            return _resolve_process_group(argument)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError):
            return None  # another string, such as "sum"
    if not isinstance(argument, torch.ScriptObject) or "ProcessGroup" not in str(argument._type()):
        return None
    return dist.ProcessGroup.unbox(argument)


def active_ddp_module() -> Any:
    """The ``DistributedDataParallel`` whose forward is running, or None.

    Why: a gather or scatter in that forward has to make up for the averaging of the gradients.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]


def ddp_ignored(module: nn.Module) -> list[str]:
    """Names of the parameters and buffers of `module` that ``DistributedDataParallel`` will ignore, whoever set them.

    Why: the list is set as a whole, so names that others have set must be kept.

    Checked: torch 2.13 and 2.15.

    Public way: none.
    """
    return list(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_ddp_ignored(module: nn.Module, names: list[str]) -> None:
    """Makes ``DistributedDataParallel`` ignore the parameters and buffers of `names` in `module`.

    Why: each rank holds another shard of a split parameter, which must not be averaged or broadcast.

    Checked: torch 2.13 and 2.15.

    Public way: none. PyTorch's DDP tutorials name this one.
    """
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def refuse_wrappers(modules: Iterable[nn.Module], message: str) -> None:
    """From now on, ``DistributedDataParallel``, ``fully_shard`` and ``replicate`` of one of `modules` raise `message`.

    Why: on top of a model that a plan was applied to, they fail in ways that do not say why, or reduce gradients twice.

    Checked: torch 2.13.

    Public way: none.
    """
    for module in modules:
        vars(module)["_ddp_params_and_buffers_to_ignore"] = _Refused(message)
        for key in (REGISTRY_KEY, STATE_KEY):
            vars(module)[key] = _RefusedTable(vars(module).get(key, {}))
            vars(module)[key].message = message


class _Refused:
    """What ``DistributedDataParallel`` makes a set of, as the first thing that it reads of a module."""

    def __init__(self, message: str) -> None:
        self._message = message

    def __iter__(self) -> NoReturn:
        raise RuntimeError(self._message)


class _RefusedTable(OrderedDict[Any, Any]):
    """Where torch looks up whether a module is wrapped already."""

    message: str

    def __contains__(self, key: object) -> NoReturn:
        raise RuntimeError(self.message)


def place_of_wait(thread: int, device_waits: bool) -> tuple[int, int] | None:
    """Where a thread of this process waits for other ranks, to compare with a later answer; None if it computes.

    On Gloo it waits inside of a collective. NCCL's calls return at once: there it waits for the GPU, whose kernels wait
    for those of other ranks, wherever it reads a value, or in a backward.

    Args:
        device_waits: whether the GPU has not finished what it was given a while ago.

    Why: a rank that computes for long is not one that waits for ever.

    Checked: torch 2.13.

    Public way: none.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    module = frame.f_globals.get("__name__", "")
    waits = module.startswith(("torch.distributed.", "tensorshard.comm.")) or module == "torch._ops"
    return (id(frame), frame.f_lasti) if waits or device_waits else None

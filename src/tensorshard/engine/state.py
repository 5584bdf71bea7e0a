"""An Engine's state: checkpoints, full weights, weights for other programs, other weights for a while, sizes."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.checkpoint.between_saves import BackgroundSaves, RegisteredStates
from tensorshard.comm.call_watch import CallWatch
from tensorshard.comm.decisions import decide_once, meet, succeed_together
from tensorshard.comm.sharding import to_local
from tensorshard.common.stores import local_or_url
from tensorshard.common.words import kind_of
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.engine.average import Decay, Start, WeightAverage, WeightAverages
from tensorshard.engine.combined_optimizer import class_of, members_of
from tensorshard.engine.engine_random import EngineRandom
from tensorshard.engine.gradients import LossScaler
from tensorshard.engine.guards.own_collectives import explained
from tensorshard.engine.loader import EngineLoaders
from tensorshard.engine.optimizer import StepCounter
from tensorshard.engine.owners import Owners
from tensorshard.model.quantized import quantized_parameters, refuse_export
from tensorshard.passes.precision import DTYPES
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.plan.storage import Storage, Update
from tensorshard.weights.files.adapters import AdapterExport, has_adapters, read_adapters
from tensorshard.weights.files.export import MAX_SHARD_SIZE, Export

if TYPE_CHECKING:
    from tensorshard.checkpoint.checkpoint import CheckpointManager
    from tensorshard.checkpoint.parts import OptimizerPart, WeightsPart

logger = logging.getLogger("tensorshard")


@dataclass(frozen=True)
class Summary:
    """Parameters and types of a sharded model, as one rank sees them. Sizes are in bytes."""

    parameters: int
    trained_parameters: int
    held_parameters: int
    updated_parameters: int
    master_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    buffer_bytes: int
    optimizer: str
    tensor_plan: str | None
    pipeline: str | None
    offload: str | None = None
    logits: str | None = None

    def describe(self, *, short: bool = False) -> str:
        """A few lines for a person; `short` leaves out this rank's sizes, and logits that are whole."""
        lines = [
            f"parameters     {self.parameters:,} in the model, {self.trained_parameters:,} of them trained",
            *([] if short else [f"on this rank   {self.held_parameters:,} held, {self.updated_parameters:,} updated"]),
            f"dtypes         {_name(self.master_dtype)} master weights and optimizer states, "
            f"{_name(self.compute_dtype)} computation, {_name(self.reduce_dtype)} gradient sums",
            f"optimizer      {self.optimizer}",
        ]
        if self.logits is not None and not (short and self.logits.split()[1] == "whole:"):
            lines.append(self.logits)
        if self.tensor_plan is not None:
            lines.append(self.tensor_plan)
        if self.pipeline is not None:
            lines.append(self.pipeline)
        if self.offload is not None:
            lines.append(f"offloaded by this rank:\n{self.offload}")
        return "\n".join(lines)


class StateMethods:
    """The methods of an Engine that show, read, write and describe its state, once updates are finished."""

    plan: Plan
    mesh: Mesh
    device: torch.device
    storage: Storage
    sharded: ShardedModel
    scaler: LossScaler | None
    random: EngineRandom
    loaders: EngineLoaders
    _steps: StepCounter
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _owners: Owners | None
    _update: Update
    _watch: CallWatch
    _averages: WeightAverages
    _background: BackgroundSaves
    _states: RegisteredStates

    @property
    def model(self) -> nn.Module:
        """The sharded model. Access waits until the last step's update is finished."""
        self.wait_for_update()
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer. Access waits until the last step's update is finished."""
        self.wait_for_update()
        return self._optimizer

    def wait_for_update(self) -> None:
        """Returns when this rank's part of the last step's update is finished: at once without ``offload.overlap``.

        A parameter that you took out of the Engine before that step shows the update from then on.

        Raises:
            OSError: the disk failed during the update. The error names the folder. Other ranks raise it in their next
                call.
        """
        self._update.wait()

    def _finish_update(self) -> None:
        """Waits for the last update on all ranks; if it failed on one, all raise. Takes over what user code wrote.

        A collective, if an update goes on.
        """
        self._update.finish()
        self._averages.take_in_update()
        self.sharded.adopt_writes()

    def _after_update(self) -> None:
        if self._owners is not None:
            self._owners.scatter()
        if self._update.is_pending:
            self.sharded.gather_as_updated(self._update.copied)
        else:
            self.sharded.all_gather_parameters(self._update.copied)
        self._averages.after_update(pending=self._update.is_pending)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The original model's state dict: full tensors on the CPU, fp32 or wider, on rank 0; {} elsewhere.

        Every rank calls it.
        """
        with explained("engine.full_state_dict", self._watch):
            meet("engine.full_state_dict", self.mesh.world_group, self.device)
            self._finish_update()
            return self.sharded.full_state_dict(keep=self.mesh.rank == 0)

    def save(
        self,
        path: Any,
        *,
        extra: dict[str, Any] | None = None,
        overwrite: bool = False,
        background: bool = False,
        trained_only: bool = False,
        format: Literal["tensorshard", "dcp"] = "tensorshard",
    ) -> None:
        """Writes a checkpoint to `path`: weights, optimizer, scaler, random state, step count and `extra`.

        It is written under a temporary name and renamed, so `path` is whole or absent. In an object store, its file
        ``manifest.json`` is written last, and without that it is no checkpoint. Every rank calls this. It waits for a
        save that still goes on in the background.

        Args:
            path: a folder, or a URL that fsspec knows, such as ``s3://bucket/run/step-1000``.
            extra: numbers, strings, lists and dicts, which :meth:`load` returns.
            overwrite: whether a checkpoint at `path` is replaced, once the new one is complete; a crash leaves one of
                them. Other files that you put into its folder are kept. For "last" and "best".
            background: whether to return once the values are copied to the host's memory, at most half of what is free
                there (what has no room is written first). That memory is kept for the next save. A thread then writes
                them while training goes on. If it fails, the next update raises the error on every rank;
                :meth:`wait_for_save` waits for its end.
            trained_only: whether frozen parameters, such as the base of adapters, are left out. The checkpoint has
                their types, shapes and checksums instead, and :meth:`load` refuses it where they differ. Those that
                were trained before and are frozen now are saved.
            format: "dcp" for a folder of ``torch.distributed.checkpoint`` with the keys of torchtitan and of torch's
                ``get_state_dict``, for other programs: weights and buffers by name at the top, ``optimizer``, ``step``
                and `extra`. Averages, registered states, loaders and the seed are in tensorshard's own format alone.

        Raises:
            FileExistsError: `path` is there already, and without `overwrite`, or it is not a checkpoint. Nothing was
                written.
            ValueError: `format` is another one; or it is "dcp", and `path` is a URL, `background` or `trained_only` is
                given, or weights are quantized. Nothing was written.
            RuntimeError: a rank could not write, or an earlier save in the background has failed. The message names
                the path.
        """
        self._averages.check_none_applied("engine.save")
        place = local_or_url(path)
        if format != "tensorshard":
            from tensorshard.checkpoint.dcp_folder import check_arguments

            check_arguments(format, place, extra, background=background, trained_only=trained_only)
            refuse_export(quantized_parameters(self.sharded.structure), "engine.save(format='dcp')")
        with explained("engine.save", self._watch), self.mesh.waiting_longer():
            self._background.wait()
            self._finish_update()
            extra = {} if extra is None else extra
            if isinstance(place, Path) and format == "dcp":
                self._save_dcp(place, extra, overwrite=overwrite)
                return
            manager = self._checkpoints(trained_only=trained_only)
            if background:
                memory = self._background.memory
                save = manager.save_in_background(place, extra, overwrite=overwrite, memory=memory)
                self._background.begin(save)
            else:
                manager.save(place, extra, overwrite=overwrite)

    def _save_dcp(self, target: Path, extra: dict[str, Any], *, overwrite: bool) -> None:
        from tensorshard.checkpoint.dcp_folder import state_of, write_dcp

        left_out = [*self._averages.by_name, *self._states.shared, *self._states.of_ranks]
        if left_out and self.mesh.rank == 0:
            logger.warning(
                "engine.save(format='dcp') leaves out %s, which torch's state dicts have no place for: without "
                "format='dcp' a checkpoint has all that engine.load goes on from",
                ", ".join(left_out),
            )
        state = state_of(self._weights_part(), self._optimizer_part(), self.sharded.aliases())
        state |= {"step": self._steps.taken, "extra": extra}
        write_dcp(target, state, self.mesh.world_group, self.device, overwrite=overwrite)

    def register_state(self, name: str, part: Any, *, per_rank: bool = False) -> None:
        """Makes the state of `part` a part of every checkpoint from now on: :meth:`save` stores it, :meth:`load` gives
        it back.

        Every rank registers the same names. By default the state is the same on all ranks, as that of an average of
        whole weights or of a scheduler is; it is stored once, and given to every rank of whatever plan loads it. A
        :meth:`save` of states that differ is refused. A tensor that is a DTensor of the weights' mesh comes back laid
        out as the one that `part` holds when it is loaded, any other one whole, on the CPU.

        Args:
            name: of the state, a word without dots.
            part: what has ``state_dict()`` and ``load_state_dict(state)``. Its state is made of numbers, text, tensors,
                lists, tuples and dicts.
            per_rank: whether each rank has a state of its own, as a stream of data has. It is loaded on as many ranks
                as saved it; another number is refused, before anything is changed.

        Raises:
            TypeError: `part` lacks one of these methods.
            ValueError: the name is taken, or has a dot.
        """
        self._states.add(name, part, per_rank=per_rank)

    def wait_for_save(self) -> None:
        """Returns when the save that goes on in the background is done, at once if there is none. Every rank calls it.

        Raises:
            RuntimeError: the save has failed; the message names its path and the rank.
        """
        with explained("engine.wait_for_save", self._watch), self.mesh.waiting_longer():
            self._background.wait()

    @property
    def saving(self) -> str | None:
        """The path of the checkpoint that is being written in the background, as far as the last update knew."""
        return self._background.target

    def load(self, path: Any) -> dict[str, Any]:
        """Reads a checkpoint, written under any plan on any number of ranks; returns its `extra`. Every rank calls it.

        What is read is compared with the checksums in the checkpoint's manifest. Nothing is changed before all is read.

        Checkpoints of DeepSpeed, FSDP, torchtitan, Accelerate, Megatron-Core and the Trainer of transformers are read,
        too, without their random states. The scheduler's state is then the ``"lr_scheduler"`` of what is returned.

        Args:
            path: a folder, or a URL that fsspec knows.

        Raises:
            FileNotFoundError: `path` is not a checkpoint.
            ValueError: its tensors are not those of this model or optimizer; names the first that differ. Or it has the
                trained parameters alone, of another base. Or it is damaged; names the file.
        """
        self._averages.check_none_applied("engine.load")
        with explained("engine.load", self._watch), self.mesh.waiting_longer():
            self._background.wait()
            self._finish_update()
            return self._checkpoints().load(local_or_url(path))

    def _checkpoints(self, *, trained_only: bool = False) -> "CheckpointManager":
        # torch's distributed checkpoints take long to import.
        from tensorshard.checkpoint.checkpoint import CheckpointManager
        from tensorshard.checkpoint.parts import AveragesPart, LayoutPart, NumbersPart
        from tensorshard.checkpoint.registered import RegisteredPart

        parts = (
            self._optimizer_part(),
            AveragesPart(self.sharded, self._averages.by_name),
            self._weights_part(self._trained_ever() if trained_only else None),
            NumbersPart(
                step_count=self._steps,
                scaler=self.scaler,
                loaders=self.loaders,
                sequences=self.sharded.sequences.order,
                seed=self.random,
            ),
            LayoutPart(self.plan, self.mesh),
            RegisteredPart(self._states, self.mesh),
        )
        return CheckpointManager(
            parts, self.mesh.world_group, self.device, self.storage.temporary_copy, self._background.last_plan
        )

    def _optimizer_part(self) -> "OptimizerPart":
        from tensorshard.checkpoint.parts import OptimizerPart

        owners = self._owners
        wholes = {} if owners is None else {name: owners.parameters.get(name) for name in owners.names}
        kind = class_of(self._optimizer)
        return OptimizerPart(self.sharded, self._optimizer, self.mesh, kind=kind, wholes=wholes)

    def _weights_part(self, only: set[str] | None = None) -> "WeightsPart":
        from tensorshard.checkpoint.parts import WeightsPart

        return WeightsPart(self.sharded, self.mesh.world_group, only)

    def _trained_ever(self) -> set[str]:
        """The names of the parameters that are trained on some rank, or were. A collective of a pipeline."""
        held = {p for group in self._optimizer.param_groups for p in group["params"]}
        own = {
            name for name, master in self.sharded.masters().items() if master in held or self.sharded.is_trained(name)
        }
        own.update(() if self._owners is None else self._owners.names)
        if self.mesh.degrees["pp"] == 1:
            return own
        stages: list[Any] = [None] * self.mesh.group("pp").size()
        dist.all_gather_object(stages, own, group=self.mesh.group("pp"))
        return set().union(*stages)

    def save_pretrained(
        self,
        path: Any,
        *,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = MAX_SHARD_SIZE,
        overwrite: bool = False,
        adapters_only: bool = False,
    ) -> None:
        """Writes the weights to the directory `path` as Hugging Face does, for other programs and `from_pretrained`.

        It writes full tensors in safetensors: several files and an index if there are more than `max_shard_size` bytes.
        For a model of transformers it also writes ``config.json``, so that the ``from_pretrained`` of transformers
        opens the directory. One tensor at a time goes through rank 0, which needs room for it (for all experts of a
        layer, if the files store them one by one). Optimizer and step count are only in the checkpoints of
        :meth:`save`. Every rank calls this.

        For a model of peft it writes the adapters, as peft's own ``save_pretrained`` does; and the base model beside
        them, if that is one of transformers that was loaded from nowhere.

        Args:
            path: of the directory; or a URL that fsspec knows, to which the complete files are copied. There, an older
                directory is replaced file by file.
            dtype: of floating-point tensors in the files, such as ``torch.bfloat16``; by default that of the master
                weights, fp32, and of frozen ones their own.
            max_shard_size: bytes in a file, or text such as "5GB".
            overwrite: whether weights at `path` are replaced, once the new ones are complete; a crash leaves the old or
                the new ones. Other files there, such as a tokenizer's, are kept.
            adapters_only: whether only the adapters of a model of peft are written, whatever its base is.

        Raises:
            FileExistsError: `path` is there already, and is not an empty directory: without `overwrite`, or it has no
                weights. Nothing was written.
            ValueError: `max_shard_size` is not a size, or `dtype` is not a floating-point type; or the model has no
                adapters of peft, with `adapters_only`; or it has quantized weights, and no adapters of peft.
        """
        with explained("engine.save_pretrained", self._watch), self.mesh.waiting_longer():
            self._finish_update()
            options = {"dtype": dtype, "max_shard_size": max_shard_size, "overwrite": overwrite}
            _write_pretrained(self.sharded, self.mesh, local_or_url(path), adapters_only=adapters_only, **options)

    def load_adapters(self, path: Any) -> None:
        """Gives the adapters of a model of peft the values in the directory `path`, which peft or
        :meth:`save_pretrained` wrote.

        The adapter "default" is in the directory itself, others are in folders of their names; those that are not there
        stay as they are. Every rank calls this, and reads the whole file. Optimizer states stay, so load adapters
        before training. The model is built with the same configs before ``parallelize``
        (``peft.PeftConfig.from_pretrained(path)``).

        Args:
            path: of the directory, on a file system that all ranks see.

        Raises:
            FileNotFoundError: there is no adapter of the model.
            ValueError: the model is not one of peft, or an adapter's names, shapes or config differ from the model's.
                Nothing was changed.
        """
        with explained("engine.load_adapters", self._watch):
            self._finish_update()
            sharded = self.sharded

            def read() -> dict[str, torch.Tensor]:
                place = local_or_url(path)
                if isinstance(place, str):
                    raise ValueError(f"{path!r} is a URL; engine.load_adapters reads a directory, so download it first")
                return read_adapters(place.expanduser(), sharded.structure, sharded.full_layouts(), sharded.aliases())

            values = succeed_together(read, self.mesh.world_group, "engine.load_adapters")
            sharded.finish_gather()
            held = {**sharded.persistent_buffers(), **sharded.masters()}
            with torch.no_grad():
                for name in values.keys() & held.keys():
                    to_local(held[name].detach()).copy_(to_local(sharded.local_value(name, values[name])))
            sharded.all_gather_loaded()

    def average(
        self,
        decay: Decay = 0.999,
        *,
        every: int | None = 1,
        start: Start = "first_update",
        name: str = "average",
    ) -> WeightAverage:
        """An average of the trained weights from now on, which follows each update: what
        ``torch.optim.swa_utils.AveragedModel`` holds, sharded as the master weights are, in their precision.

        Checkpoints hold it, for any other plan: make it before :meth:`load`. Every rank calls this. It takes 4 bytes
        for each trained parameter of which this rank has the master.

        Args:
            decay: of an exponential average: ``decay * average + (1 - decay) * weights``; a function to that from the
                number of weights that are averaged so far; or None for their mean (stochastic weight averaging).
            every: number of the optimizer's updates between two of the average; None if you call ``update()`` yourself.
                Steps that fp16 skips are none.
            start: which weights it begins with. "first_update": those after its first update, as of torch's
                ``AveragedModel``; so the initial weights have no part in it. "initial": those at this call, so that
                the first update gives ``decay * initial + (1 - decay) * weights``, as of a ``copy.deepcopy(model)``
                that follows, and timm's ``ModelEmaV2``.
            name: in checkpoints.

        Returns:
            The average: ``with average.applied():`` the model has it as its weights, and ``average(inputs)`` is its
            output.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind; the name is taken.

        Examples:
            >>> average = engine.average(decay=0.99)
            >>> loss = engine.step(inputs, targets)
            >>> with average.applied():
            ...     loss = engine.evaluate(inputs, targets)
        """
        return self._averages.add(name, decay, every, start)

    def using_weights(self, weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """A context in which the model has other `weights`, such as an average over a run. Then it has its own again.

        Every rank calls it.

        Args:
            weights: by names of ``engine.model.named_parameters()``, each laid out like its parameter, as
                ``parameter.detach().clone()`` is, or whole.

        Raises:
            ValueError: no parameter has a name, or a shape differs; nothing was changed then.
        """
        return _using_weights(self.sharded, dict(self.model.named_parameters()), weights)

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(
            "an Engine cannot be pickled or copied (as by torch.save or copy.deepcopy): it holds process groups and "
            "this rank's part of the weights. Call engine.save(path), which engine.load(path) reads under any plan"
        )

    def summary(self) -> Summary:
        """The types of parameters, gradients and states, and the sizes on this rank."""
        return _summarize(self.plan, self.sharded, self._optimizer, self._owners, self.storage.describe())


def _write_pretrained(
    sharded: ShardedModel, mesh: Mesh, path: Path | str, *, adapters_only: bool, **options: Any
) -> None:
    """What :meth:`tensorshard.Engine.save_pretrained` does; errors of rank 0 are raised on every rank."""
    export: Export | AdapterExport | None = None

    def begin() -> None:
        nonlocal export
        layouts = sharded.full_layouts()
        if has_adapters(sharded.structure):
            structure = sharded.structure
            options["adapters_only"] = adapters_only
            export = AdapterExport(path, structure, layouts, sharded.aliases(), sharded.is_trained, **options)
            return
        if adapters_only:
            raise ValueError(
                f"engine.save_pretrained(adapters_only=True) was called for {kind_of(sharded.structure)}, which is no "
                f"model of peft (peft.get_peft_model makes one); engine.save(path, trained_only=True) writes the "
                f"trained parameters of any model, engine.save_pretrained(path) all weights"
            )
        refuse_export(quantized_parameters(sharded.structure), "engine.save_pretrained")
        export = Export(path, sharded.structure, layouts, **options)

    decide_once(begin, mesh.world_group)
    failure: Exception | None = None
    sharded.finish_gather()
    for name, tensor in sharded.full_tensors(keep=export is not None):
        if export is not None and failure is None:  # the other ranks only send their parts
            try:
                export.add(name, tensor)
            except Exception as error:
                failure = error
        del tensor  # before the next one is gathered

    def finish() -> None:
        assert export is not None
        try:
            if failure is not None:
                raise failure
            export.finish()
        except BaseException:
            export.discard()
            raise

    decide_once(finish, mesh.world_group)


@contextmanager
def _using_weights(
    sharded: ShardedModel, parameters: Mapping[str, nn.Parameter], weights: Mapping[str, torch.Tensor]
) -> Iterator[None]:
    """A context in which the parameters hold `weights`; afterwards they are as before. A collective.

    Args:
        parameters: the module's, by the names of `weights`.

    Raises:
        ValueError: no parameter has a name, or a tensor is laid out differently; nothing was changed then.
    """
    weights = {name: _own_part(sharded, name, value) for name, value in weights.items()}
    for name, value in weights.items():
        if name not in parameters:
            raise ValueError(
                f"weights hold {name!r}, which is not a parameter of the model on this rank; take names and tensors "
                f"from engine.model.named_parameters()"
            )
        if to_local(value).shape != to_local(parameters[name]).shape:
            raise ValueError(
                f"weights hold {name!r} of shape {list(to_local(value).shape)} on this rank, and the parameter has "
                f"{list(to_local(parameters[name]).shape)}; make it as parameter.detach().clone()"
            )
    sharded.finish_gather()
    restore = [sharded.kept_value(name) for name in weights]
    for name, value in weights.items():
        sharded.set_value(name, value)
    sharded.all_gather_loaded()
    try:
        yield
    finally:
        sharded.finish_gather()
        for give_back in restore:
            give_back()
        sharded.all_gather_loaded()


def _own_part(sharded: ShardedModel, name: str, value: torch.Tensor) -> torch.Tensor:
    """What this rank's parameter takes of `value`, if that is whole."""
    is_whole = not isinstance(value, DTensor) and value.shape == sharded.full_shapes().get(name)
    return sharded.shown_part(name, value) if is_whole else value


def _summarize(
    plan: Plan,
    sharded: ShardedModel,
    optimizer: torch.optim.Optimizer,
    owners: Owners | None = None,
    offload: str | None = None,
) -> Summary:
    """Counts what a sharded model holds on this rank."""
    masters = sharded.masters()
    trained = {name: p for name, p in masters.items() if p.requires_grad}
    first = next(iter((trained or masters).values()), torch.empty(0))
    shapes = sharded.full_shapes()
    updated = [to_local(p) for name, p in trained.items() if owners is None or name not in owners.names]
    updated += [] if owners is None else owners.parameters.values()
    kinds = ", ".join(_described(member) for member in members_of(optimizer))
    return Summary(
        parameters=sum(shape.numel() for shape in shapes.values()),
        trained_parameters=sum(shape.numel() for name, shape in shapes.items() if sharded.is_trained(name)),
        held_parameters=sharded.held_numel(),
        updated_parameters=sum(p.numel() for p in updated),
        master_dtype=first.dtype,
        compute_dtype=DTYPES[plan.precision] if first.dtype == torch.float32 else first.dtype,
        reduce_dtype=DTYPES[plan.reduce_dtype or "fp32"],
        buffer_bytes=sum(b.nbytes for b in sharded.model.buffers()),
        optimizer=kinds + (f"; {len(owners.names)} tensors are updated whole, each by one rank" if owners else ""),
        tensor_plan=sharded.split.describe(),
        pipeline=sharded.describe_stages(),
        offload=offload,
        logits=sharded.logits.describe(),
    )


def _described(optimizer: torch.optim.Optimizer) -> str:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return type(optimizer).__name__ + (" (fused)" if fused else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

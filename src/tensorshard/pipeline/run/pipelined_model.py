"""The stages that one rank of a pipeline has, seen as one sharded model."""

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.comm.collectives import on_the_wire
from tensorshard.comm.sharding import dtensor_like, to_local
from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.parameters import buffer_aliases
from tensorshard.pipeline.cut import unit_stages
from tensorshard.pipeline.run.schedule_runner import connect
from tensorshard.pipeline.run.shown_model import Access, ShownModel, guard_modules
from tensorshard.pipeline.run.stage_module import StageModule
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.schedules import find_schedule
from tensorshard.plan.storage import MasterPlace, TakeGradient, UpdateProgress
from tensorshard.torch_private.modules import every_module, own_parameters

# Gradients of parameters that stages on several pipeline ranks use, such as tied ones.


class SharedGradients:
    """Adds up the gradients of all ranks that have a parameter, on each of them.

    Every rank sends its gradient to the others and sums in the order of the ranks. So all get the same to the last bit,
    and equal weights stay equal.

    Args:
        ranks: for each parameter, the pipeline ranks that have it.
        masters: this rank's parameters.
        is_trained: says of a name whether it is trained now. Those that are not at first are left out.
        group: of the pipeline.
        device: from which the ranks send tensors.
    """

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        masters: Mapping[str, nn.Parameter],
        is_trained: Callable[[str], bool],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._group = group
        self._device = device
        self._is_trained = is_trained
        self._ranks = {name: list(who) for name, who in sorted(ranks.items()) if len(who) > 1 and name in masters}
        self._masters = {name: masters[name] for name in self._ranks}
        # A frozen one stays in: the ranks need not agree about that. One that is unfrozen comes in on all at once.
        self._active = {name for name in self._ranks if is_trained(name)}

    @property
    def is_stale(self) -> bool:
        """Whether a parameter of this rank is trained whose gradients are not added up."""
        return any(self._is_trained(name) for name in self._ranks.keys() - self._active)

    def take_all(self) -> None:
        """Adds up the gradients of all parameters from now on. Called on all ranks at the same time."""
        self._active = set(self._ranks)

    @property
    def names(self) -> Collection[str]:
        """This rank's parameters that other ranks have, too."""
        return self._ranks.keys()

    @torch.no_grad()
    def add(self) -> None:
        """A collective of the ranks that have any of the parameters. A parameter without a gradient on any rank gets
        none."""
        ranks = {name: who for name, who in self._ranks.items() if name in self._active}
        if not ranks:
            return
        mine = self._group.rank()
        own: dict[str, torch.Tensor] = {}
        received: dict[str, dict[int, torch.Tensor]] = {}
        counts: dict[str, dict[int, torch.Tensor]] = {}
        operations: list[dist.P2POp] = []
        for name, who in ranks.items():
            master = self._masters[name]
            has = master.grad is not None
            sent = to_local(master.grad if has else torch.zeros_like(master))  # type: ignore[arg-type]
            own[name] = sent.contiguous().to(self._device)
            flag = torch.full((1,), float(has), device=own[name].device)
            received[name], counts[name] = {}, {}
            for rank in who:
                if rank == mine:
                    continue
                peer = dist.get_global_rank(self._group, rank)
                received[name][rank] = torch.empty_like(own[name])
                counts[name][rank] = torch.empty_like(flag)
                pairs = [(flag, counts[name][rank]), (own[name], received[name][rank])]
                for sent, room in pairs if own[name].numel() else pairs[:1]:
                    operations.append(dist.P2POp(dist.isend, sent, peer, self._group))
                    operations.append(dist.P2POp(dist.irecv, room, peer, self._group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for name, who in ranks.items():
            master = self._masters[name]
            if master.grad is None and not any(count.item() for count in counts[name].values()):
                continue
            terms = [own[name] if rank == mine else received[name][rank] for rank in who]
            total = terms[0].clone()
            for term in terms[1:]:
                total.add_(term)
            total = total.to(master.device)
            master.grad = dtensor_like(total, master) if isinstance(master, DTensor) else total

    def spread(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums of further gradients of the parameters, which one rank or several have. A collective as `add`."""
        if not self._ranks:
            return {}
        before = {name: master.grad for name, master in self._masters.items()}
        for name, master in self._masters.items():
            given = gradients.get(name)
            master.grad = None if given is None else given.to(master.device)
        self.add()
        sums = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        for name, master in self._masters.items():
            master.grad = before[name]
        return sums


class PipelinedModel(ShardedModel):
    """A rank's stages, each sharded over the other axes.

    A parameter that several stages use is on each of them. Their gradients are added, so all make the same update.

    Args:
        whole: the model, on the meta device.
        stages: this rank's, in order.
        parts: the same, sharded.

    Attributes:
        cut: all stages.
    """

    def __init__(
        self, whole: nn.Module, stages: Sequence[StageModule], parts: Sequence[ShardedModel], mesh: Mesh
    ) -> None:
        super().__init__(whole, parts[-1].split)
        self._whole = whole
        self.stages = list(stages)
        self.parts = list(parts)
        self.cut = stages[0].cut
        self._stages_of = unit_stages(self.cut)
        self._mesh = mesh
        self._group = mesh.group("pp")
        self._device = torch.device(mesh.device_mesh.device_type)
        self._rank_of = [
            find_schedule(mesh.schedule).rank_of(stage, mesh.degrees["pp"]) for stage in range(self.cut.stages)
        ]
        for stage in stages:
            self._word_errors(stage)
        self._shown = ShownModel(whole, stages)
        self.model = self._shown.model
        self._access = Access(lambda: any(stage.computes() for stage in stages))
        self._masters: dict[str, nn.Parameter] = {}
        self._copies: list[tuple[nn.Parameter, nn.Parameter]] = []  # of what an earlier stage of this rank has
        for part in parts:
            for name, master in part.masters().items():
                first = self._masters.setdefault(name, master)
                if first is not master:
                    self._copies.append((first, master))
        connect(self._group, self._rank_of, self._device)
        self._shared = SharedGradients(
            {name: self._ranks_with(name) for name in self.cut.shared},
            self._masters,
            self._requires_grad,
            self._group,
            torch.device(mesh.device_mesh.device_type),
        )
        self._complete = True
        self._update: UpdateProgress | None = None
        self.logits = parts[-1].logits
        self.sequences = parts[-1].sequences
        self.whole_views = [view for part in parts for view in part.whole_views]
        self.in_users_code = [tensors for part in parts for tensors in part.in_users_code]

    def _word_errors(self, stage: StageModule) -> None:
        stage.pipeline = f"Plan(pp={self._mesh.degrees['pp']})"
        numbers = " and ".join(str(each.index) for each in self.stages)
        stage.mine = f"stage{'s' * (len(self.stages) > 1)} {numbers} of {self.cut.stages}"
        stage.called = (
            f"under {stage.pipeline} this rank has {stage.mine} alone, so engine.model cannot be called; use "
            f"engine.step, engine.evaluate or engine.predict, which every rank calls. Modules that are wholly on this "
            f"rank can be called"
        )

    def protect(self) -> None:
        device = torch.device(self._mesh.device_mesh.device_type)
        for stage in self.stages:
            stage.put_placeholders(device)
        first = self.stages[0]
        guard_modules(
            self.model,
            {path: partial(first.not_held, path) for path in self._shown.missing},
            self._access,
            part=first.mine,
            returns=self.stages[-1].module if self.stages[-1].is_last else None,
            last=f"stage {self.cut.stages - 1}",
            around=self._shown.around,
            aliases=self.aliases(),
        )

    def _requires_grad(self, name: str) -> bool:
        """Whether a parameter of this rank is trained now, as the user sees it."""
        path, _, key = name.rpartition(".")
        return own_parameters(self.model.get_submodule(path))[key].requires_grad

    @property
    def is_stale(self) -> bool:
        """Whether parameters of this rank were unfrozen, and other ranks do not know that they need gradients."""
        return any(stage.is_stale for stage in self.stages) or self._shared.is_stale

    def expect_gradients(self) -> None:
        """Takes all parameters for trained ones from now on. Called on all ranks at the same time."""
        for stage in self.stages:
            stage.expect_gradients()
        self._shared.take_all()

    def all_modules(self) -> list[nn.Module]:
        models = {id(model): model for model in (self.model, *(stage.module for stage in self.stages))}
        modules = (module for model in models.values() for module in every_module(model).values())
        return list({id(module): module for module in modules}.values())

    def follow_modes(self) -> None:
        """Gives all stages the modes (training, evaluation) and frozen parameters of the model that is shown.

        Called before each run.
        """
        self._shown.follow_modes()

    @contextmanager
    def computing_loss(self) -> Iterator[None]:
        """A context in which lists of the shown model's parameters raise, as they would lack other stages'."""
        self._access.in_loss = True
        try:
            yield
        finally:
            self._access.in_loss = False

    def loss_is_over(self) -> None:
        self.parts[-1].loss_is_over()

    def describe_stages(self) -> str:
        return f"stages of the pipeline:\n{self.cut.describe()}"

    @property
    def last_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return self._rank_of[-1]

    def _ranks_with(self, name: str) -> list[int]:
        return sorted({self._rank_of[stage] for stage in self._stages_with(name)})

    def _stages_with(self, name: str) -> Sequence[int]:
        if name in self.cut.shared:
            return self.cut.shared[name]
        return [stage for stage in range(self.cut.stages) if name in self.cut.parameters(stage)]

    # -- what the optimizer and the norm see --

    def masters(self) -> dict[str, nn.Parameter]:
        return self._masters

    def trained_masters(self) -> dict[str, nn.Parameter]:
        trained = {name for part in self.parts for name in part.trained_masters()}
        return {name: master for name, master in self._masters.items() if name in trained}

    def shown_parameters(self) -> dict[str, nn.Parameter]:
        shown: dict[str, nn.Parameter] = {}
        for part in reversed(self.parts):  # of several copies the first counts
            shown.update(part.shown_parameters())
        return {name: shown[name] for name in self._masters}

    def _parts_with(self, name: str) -> list[ShardedModel]:
        """This rank's stages with the parameter `name`."""
        first = self._aliases.get(name, name)
        return [part for part in self.parts if first in part.masters()]

    def shown_part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        parts = self._parts_with(name)
        return parts[0].shown_part(name, full) if parts else self.split.local(name, full)

    def set_value(self, name: str, value: torch.Tensor) -> None:
        for part in self._parts_with(name):
            part.set_value(name, value)

    def kept_value(self, name: str) -> Callable[[], None]:
        kept = [part.kept_value(name) for part in self._parts_with(name)]

        def give_back() -> None:
            for each in kept:
                each()

        return give_back

    def is_released(self, name: str) -> bool:
        return any(part.is_released(name) for part in self.parts)

    def show_gradients(self) -> None:
        for part in self.parts:
            part.show_gradients()

    def average_given_gradients(self) -> None:
        for part in self.parts:
            part.average_given_gradients()

    def adopt_writes(self) -> None:
        for part in self.parts:
            part.adopt_writes()

    def compare_written(self) -> None:
        for part in self.parts:
            if part.writers is not None and part.writers > 0:
                part.compare_written()

    def num_shards(self) -> dict[torch.Tensor, float]:
        ways: dict[torch.Tensor, float] = {}
        for part in self.parts:
            ways.update(part.num_shards())
        return {
            master: ways[master] * self._group.size() / len(self._ranks_with(name))
            for name, master in self._masters.items()
        }

    def held_numel(self) -> int:
        return sum(part.held_numel() for part in self.parts)

    # -- a step --

    def discard_gradients(self) -> None:
        for part in self.parts:
            part.discard_gradients()

    def abandon_step(self) -> None:
        for part in self.parts:
            part.abandon_step()
        self._complete = True

    def begin_step(self) -> None:
        """Called before the micro-batches of a step: :meth:`finish_backward` completes their gradients."""
        self._complete = False

    def begin_micro_batch(self, last: bool, *, shown: bool = False) -> None:
        raise RuntimeError("a pipeline's stages begin micro-batches one by one")

    def finish_micro_batch(self) -> None:
        raise RuntimeError("a pipeline's stages finish micro-batches one by one")

    def finish_backward(self) -> None:
        if self._complete:
            return
        for part in self.parts:
            part.finish_backward()
        writers = [part.writers for part in self.parts if part.writers is not None]
        self.writers = torch.stack([flag.double() for flag in writers]).amax() if writers else None
        self._add_copies()
        self._shared.add()
        self._complete = True

    @torch.no_grad()
    def _add_copies(self) -> None:
        for first, copy in self._copies:
            if copy.grad is not None:
                if first.grad is None:
                    first.grad = copy.grad
                else:
                    to_local(first.grad).add_(to_local(copy.grad))
                copy.grad = None

    def watch_gradients(self, take: TakeGradient, finish: Callable[[], None]) -> None:
        super().watch_gradients(take, finish)
        for part in self.parts:
            part.watch_gradients(take, finish)

    def watch_updates(self, update: UpdateProgress) -> None:
        self._update = update
        for part in self.parts:
            part.watch_updates(update)

    def master_places(self) -> dict[str, MasterPlace]:
        places: dict[str, MasterPlace] = {}
        for part in reversed(self.parts):  # of several copies the first is the master
            places.update(part.master_places())
        return places

    def all_gather_parameters(self, copied: Container[torch.Tensor] = ()) -> None:
        self._update_copies()
        for part in self.parts:
            part.all_gather_parameters(copied)

    def gather_as_updated(self, copied: Container[torch.Tensor] = ()) -> None:
        if self._copies:
            assert self._update is not None
            self._update.wait([first for first, _ in self._copies])
            self._update_copies()
        for part in self.parts:
            part.gather_as_updated(copied)

    def all_gather_loaded(self) -> None:
        self._update_copies()
        buffers = self.persistent_buffers()
        for part in self.parts:
            for name, buffer in self._buffers_of(part):
                if buffer is not buffers[name]:
                    buffer.copy_(buffers[name])
            part.all_gather_loaded()

    @torch.no_grad()
    def _update_copies(self) -> None:
        for first, copy in self._copies:
            to_local(copy).copy_(to_local(first))

    def finish_gather(self) -> None:
        for part in self.parts:
            part.finish_gather()

    # -- penalties on the weights --

    def counts(self, name: str) -> bool:
        return self._ranks_with(name)[0] == self._group.rank()

    @contextmanager
    def computing_penalty(self) -> Iterator[None]:
        for stage in self.stages:
            stage.in_penalty = True
        try:
            yield
        finally:
            for stage in self.stages:
                stage.in_penalty = False

    def add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        own = {name: gradient for name, gradient in gradients.items() if name not in self._shared.names}
        super().add_gradients({**own, **self._shared.spread(gradients)})

    # -- state --

    def persistent_buffers(self) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        for part in self.parts:
            for name, buffer in self._buffers_of(part):
                buffers.setdefault(name, buffer)
        return buffers

    def owned_buffers(self) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        for stage, part in zip(self.stages, self.parts, strict=True):
            owned = set(stage.owned_buffers())
            buffers.update({name: buffer for name, buffer in self._buffers_of(part) if name in owned})
        return buffers

    def _buffers_of(self, part: ShardedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """The persistent buffers of a stage, by their first names in the whole model: blocks of two may share one."""
        first = buffer_aliases(self._whole)
        for name, buffer in part.persistent_buffers().items():
            yield first.get(name, name), buffer

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's full parameters. The ranks of a pipeline have different ones."""
        for part in self.parts:
            yield from part.full_parameters()

    def full_tensors(self, keep: bool) -> Iterator[tuple[str, torch.Tensor]]:
        # Tensors for the world's first rank are sent along the pipeline that it is in.
        first = dist.get_process_group_ranks(self._mesh.world_group)[0]
        travels = dist.get_process_group_ranks(self._group)[0] == first
        rank = self._group.rank()
        buffers = dict(self.full_buffers())
        for name, tensor in self._everything():
            sender = self._sender(name)
            value = None
            if sender == rank:
                value = buffers[name] if name in buffers else self._full_parameter(name, self._masters[name])
            if not travels:
                continue
            if sender != 0:
                value = self._sent(value, tensor.shape, self._dtypes[name], sender)
            if keep:
                assert value is not None
                yield name, value.detach()

    @property
    def structure(self) -> nn.Module:
        return self._whole

    def _everything(self) -> list[tuple[str, torch.Tensor]]:
        parameters = list(self._whole.named_parameters())
        return parameters + [(n, b) for n, b in self._whole.named_buffers() if n in self._buffer_shapes]

    def _sender(self, name: str) -> int:
        if name in self._shapes:
            return self._rank_of[self._stages_with(name)[0]]
        holding = (stages for unit, stages in self._stages_of.items() if name.startswith(f"{unit}."))
        return self._rank_of[min(next(holding, frozenset([self.cut.stages - 1])))]

    def _sent(
        self, value: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, sender: int
    ) -> torch.Tensor | None:
        if value is not None:
            self._transfer(dist.isend, value.contiguous(), 0)
            return None
        if self._group.rank() != 0:
            return None
        device = torch.device(self._mesh.device_mesh.device_type)
        received = torch.empty(shape, dtype=dtype, device=device)
        self._transfer(dist.irecv, received, sender)
        return received

    def _transfer(self, operation: Callable[..., object], tensor: torch.Tensor, peer: int) -> None:
        """Sends or receives. As a batch, since outside of one NCCL would make a communicator for each pair of ranks."""
        one = dist.P2POp(operation, on_the_wire(tensor), group=self._group, group_peer=peer)
        for work in dist.batch_isend_irecv([one]):
            work.wait()

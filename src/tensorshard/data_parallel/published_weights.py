"""What keeps the parameters that forwards compute with, and the master weights that an optimizer updates, one truth.

A module's parameters are those that forwards compute with, full and plain, at any time. After an update each rank
publishes the part that it has updated, and the gathers go on while training does. Whatever uses a parameter that is
still being gathered waits for it: units do so before their forwards, and a
:class:`~tensorshard.model.watched_parameters.Watch` does for all other code.

Code of the user may write a parameter, or a master weight, at any time. Tensors count their changes in place, both note
when their ``data`` are taken, and one that was given other memory (``p.data = ...``) has another address. All are
compared with those after the last publication: before a forward, and before an update.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from tensorshard.comm.collectives import all_gather_several
from tensorshard.common.never_compiled import never_compiled
from tensorshard.data_parallel.averaged_gradients import AveragedInUsersCode
from tensorshard.data_parallel.buckets import MOST_BYTES, Bucket, Gather, debugs_weights
from tensorshard.data_parallel.sharded_parameter import ReadInFull, ShardedParameter
from tensorshard.data_parallel.written_values import compare_fingerprints, fingerprint, gather_flags
from tensorshard.data_parallel.zero_parameter import (
    Groups,
    ZeroParameter,
    note_published,
    show_master,
    with_written_masters,
    written,
)
from tensorshard.model.watched_parameters import METADATA, Watch, note_data, unwatch, watch
from tensorshard.plan.storage import UpdateProgress
from tensorshard.torch_private.dispatch import without_torch_functions_of_tensors
from tensorshard.torch_private.dtensor import shards_of
from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.operators import foreach_copy_
from tensorshard.torch_private.tensors import storage_owners


class PublishedWeights:
    """Publishes updates of the parameters of a model at ZeRO 0, 1 or 2, and finds what user code wrote.

    Args:
        parameters: all of them.
        groups: of the data ranks.

    Attributes:
        written: the parameters that user code has written since :meth:`compare_written`.
        averaged: makes the user's code find averages in ``torch.autograd.grad``.
        averaged_by_compute: the parameters whose gradients are averaged, by what forwards compute with.
        masters: the master weights that are sharded, as the user's code finds them in the optimizer's groups.
        update: the one that goes on in the background; None without offload's overlap.
    """

    def __init__(self, parameters: Iterable[ZeroParameter], groups: Groups) -> None:
        self._parameters = list(parameters)
        self._groups = groups
        self._awaited: dict[Bucket, _Arrival] = {}
        self._gathering: deque[Bucket] = deque()  # with memory that is given back when they are waited for
        self._awaiting_update: deque[Bucket] = deque()  # whose update goes on, in the same order on all ranks
        self._copied: Container[torch.Tensor] = ()  # of these
        self.update: UpdateProgress | None = None
        self.written: dict[ZeroParameter, None] = {}
        self._with_masters = [p for p in self._parameters if p.master is not p.compute]
        self._masters_themselves = [p for p in self._parameters if p.master is p.compute]
        self._fills = debugs_weights()
        self._are_real = not any(isinstance(p.storage, FakeTensor) for p in self._parameters)
        note_published(self._parameters)
        for p in self._parameters:
            if self._are_real:
                note_data(p.compute, p.name)
                show_master(p)
            p.count_owners()
        averaged = self._parameters if groups.communicate else []
        self.averaged_by_compute: dict[nn.Parameter, ZeroParameter] = {p.compute: p for p in averaged}
        self.averaged = AveragedInUsersCode(self.averaged_by_compute if self._are_real else {})
        self.masters = ReadInFull(p.master for p in self._parameters if isinstance(p.master, ShardedParameter))

    # -- after an update --

    @torch.no_grad()
    def publish(self, bucket: Bucket, copied: Container[torch.Tensor] = ()) -> None:
        """Copies this rank's master weights to what forwards compute with, and starts to gather the other ranks'.

        Args:
            copied: masters whose copies are up to date already.
        """
        self.wait(bucket)
        copies = [p for p in bucket.parameters if p.is_copy and p.master not in copied]
        if copies:
            foreach_copy_([p.mine_as_shard for p in copies], shards_of(p.master for p in copies))
        if all(p.num_shards == 1 or not p.chunk for p in bucket.parameters):
            note_published(bucket.parameters)
            return
        # Of memory that other tensors show, too (as of p.data, kept by the user), no watch would see the use.
        shown = self._are_real and any(storage_owners(p.storage) > p.owners for p in bucket.parameters)
        self._gather(bucket)
        self._bound_gathers(bucket)
        if not self._are_real:
            return
        increment_version([p.compute for p in bucket.parameters])  # a backward through older values must not pass
        note_published(bucket.parameters)
        if shown:
            self.wait(bucket)
        else:
            self._await(bucket)

    def _await(self, bucket: Bucket) -> None:
        arrival = self._awaited.setdefault(bucket, _Arrival(self, bucket))
        for p in bucket.parameters:
            p.is_awaited = True
            watch(p.compute, arrival)

    def _arrive(self, arrival: Watch, bucket: Bucket) -> None:
        for p in bucket.parameters:
            p.is_awaited = False
            unwatch(p.compute, arrival)

    def _gather(self, bucket: Bucket, what: str = "") -> None:
        if self._fills and self._are_real:
            for p in bucket.parameters:
                p.forget_other_parts()
        sharded = [p for p in bucket.parameters if p.num_shards > 1 and p.chunk]
        for is_expert, dtype in sorted({(p.is_expert, p.storage.dtype) for p in sharded}, key=str):
            members = [p for p in sharded if (p.is_expert, p.storage.dtype) == (is_expert, dtype)]
            alone = [p for p in members if p in bucket.alone]
            packed = [p for p in members if p not in bucket.alone]
            outputs, inputs = [p.storage for p in alone], [p.mine for p in alone]
            group = _shard_group(members[0])
            parts = None
            if packed:
                inputs.append(torch.cat([p.mine for p in packed]))
                parts = inputs[-1].new_empty((group.size(), inputs[-1].numel()))
                outputs.append(parts.view(-1))
            bucket.gathering.append(Gather(all_gather_several(outputs, inputs, group, what=what), packed, parts))

    def _bound_gathers(self, last: Bucket) -> None:
        """Waits for the first gathers if messages beside the parameters' own memory take too much."""
        if any(gather.nbytes for gather in last.gathering):
            self._gathering.append(last)
        while len(self._gathering) > 1 and sum(g.nbytes for b in self._gathering for g in b.gathering) > MOST_BYTES:
            self.wait(self._gathering[0])

    @never_compiled
    @torch.no_grad()
    def wait(self, bucket: Bucket) -> None:
        """Waits until the parameters of `bucket` have arrived from all ranks."""
        if bucket.update_pending:
            self.publish_updated(bucket)
        if not bucket.gathering:
            return
        arrival = self._awaited.get(bucket)
        if arrival is not None:  # first: what follows uses the parameters
            self._arrive(arrival, bucket)
        for gather in bucket.gathering:
            gather.transfer.wait()
            if gather.parts is not None:
                unpack(gather.packed, gather.parts)
        bucket.gathering.clear()
        if bucket in self._gathering:
            self._gathering.remove(bucket)
        note_published(bucket.parameters)

    # -- updates in the background --

    def publish_as_updated(self, buckets: Iterable[Bucket], copied: Container[torch.Tensor]) -> None:
        """Notes that the update of `buckets` goes on, each of which is published when it is needed, in this order."""
        self.publish_updated()
        self._copied = copied
        self._awaiting_update.extend(buckets)
        for bucket in self._awaiting_update:
            bucket.update_pending = True
            for p in bucket.parameters:
                p.update_pending = True
            if self._are_real:
                self._await(bucket)

    def publish_updated(self, last: Bucket | None = None) -> None:
        """Waits for updates and publishes them, up to the bucket `last`; None for all."""
        while self._awaiting_update and (last is None or last.update_pending):
            assert self.update is not None
            bucket = self._awaiting_update.popleft()
            bucket.update_pending = False
            arrival = self._awaited.get(bucket)
            if arrival is not None:
                self._arrive(arrival, bucket)
            self.update.wait([p.master for p in bucket.parameters])
            for p in bucket.parameters:
                p.update_pending = False
            self.publish(bucket, self._copied)

    # -- what user code writes --

    def adopt(self) -> bool:
        """Takes over what user code has written to parameters since they were published.

        Returns:
            Whether master weights were written, as by an optimizer's hook, so that they have to be published.
        """
        if not self._are_real:
            return False
        with without_torch_functions_of_tensors():
            return self._adopt_all()

    def are_written(self) -> bool:
        """Whether user code, a forward say, has written parameters that :meth:`adopt` has yet to take over."""
        if not self._are_real or self._groups.all is None:
            return False
        with without_torch_functions_of_tensors():
            arrived = [p for p in self._with_masters if not p.update_pending and not p.is_awaited]
            return bool(written([*arrived, *self._masters_themselves], in_backward=True))

    def _adopt_all(self) -> bool:
        outdated = False  # what forwards compute with
        updated = [p for p in self._with_masters if not p.update_pending]
        changed = {*with_written_masters(updated), *written([p for p in updated if not p.is_awaited])}
        for p in updated:
            if p in changed:
                outdated = self._adopt(p) or outdated
        changed_masters = written(self._masters_themselves)
        self.written.update(dict.fromkeys(changed_masters))
        note_published(changed_masters)
        if self._groups.all is None:
            self.written.clear()  # nobody to compare them with
        return outdated

    @torch.no_grad()
    def _adopt(self, p: ZeroParameter) -> bool:
        master_written = bool(with_written_masters([p]))
        if not p.is_awaited and written([p]):
            self.written[p] = None
            if self.update is not None:
                self.update.finish()  # it may still move the master that gets these values
            p.take_over(keep_master=master_written)
        if not master_written:
            note_published([p])
        return master_written

    def compare_written(self) -> None:
        """Called by all data ranks, if user code wrote parameters on one of them.

        Raises:
            RuntimeError: the ranks wrote different values. It names the first parameter.
        """
        self.adopt()
        mine = set(self.written)
        self.written.clear()
        for is_expert in (False, True):
            parameters = [p for p in self._parameters if p.is_expert is is_expert]
            if not parameters:
                continue
            group = parameters[0].groups.all
            assert group is not None
            flags = gather_flags([p in mine for p in parameters], group, parameters[0].storage.device)
            members = [p for p, flag in zip(parameters, flags, strict=True) if flag]
            if members:
                compare_fingerprints([p.name for p in members], [self._print_of(p) for p in members], group)

    def _print_of(self, p: ZeroParameter) -> torch.Tensor:
        """The fingerprint of what this rank has written to `p`, or holds of it."""
        return fingerprint(p.compute)


def _shard_group(parameter: ZeroParameter) -> dist.ProcessGroup:
    assert parameter.groups.shard is not None
    return parameter.groups.shard


def unpack(parameters: list[ZeroParameter], parts: torch.Tensor) -> None:
    """Gives `parameters` what all ranks sent, [ranks, chunks of all]. This rank's own parts stay: they may have been
    written meanwhile."""
    torch.cat([p.mine for p in parameters], out=parts[parameters[0].index])
    torch.split_with_sizes_copy(parts, [p.chunk for p in parameters], dim=1, out=[p.rows for p in parameters])


class _Arrival(Watch):
    """The gather of a bucket that goes on."""

    def __init__(self, weights: PublishedWeights, bucket: Bucket) -> None:
        self._weights = weights
        self._bucket = bucket

    def before_use(self, parameter: nn.Parameter, function: Callable[..., Any]) -> None:
        if function not in METADATA:
            self._weights.wait(self._bucket)

"""A process group that keeps NCCL's rules, on CPUs, and names whoever breaks one.

NCCL runs a collective on a stream of its own: its output is not there until somebody waits, and its input must not
change until then. Gloo forgives both, and much else. A group of the backend ``strict_nccl`` moves its tensors over
Gloo, but

- an output is NaN (or another value that is not right) until its own call is waited for;
- an input is read when the call runs, and must be until its ``wait`` what it was at the call;
- memory of an input or an output may not be given back before that ``wait``, nor taken again;
- tensors are contiguous, of types that NCCL has, and on the device that the group is made for;
- one thread at a time makes calls;
- all ranks of a group make the same calls in the same order;
- what is sent in a batch is received in one, and what is sent outside of batches outside of them: they are two
  connections.

Calls run in the order in which a rank made them, over all of its groups, when one of them is waited for: they share one
stream. So ranks also wait for ever, until the timeout, where the orders of their calls contradict each other, as where
two ranks receive from each other before they send.
"""

import pickle
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from graphlib import TopologicalSorter
from itertools import groupby
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tensorshard.torch_private.tensors import watched_resizes

NAME = "strict_nccl"
NAMES = {NAME: "nccl", "strict_nccl2": "nccl2"}
"""The backends, and what those of torch that they stand for call themselves: see ``torch_private.process_groups``."""

_TYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}
_HEADER = 1024  # bytes of a rank's description of its call
_REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
    dist.ReduceOp.AVG: lambda stacked: stacked.sum(0) / len(stacked),
    dist.ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
    dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


class BrokenRuleError(RuntimeError):
    """What NCCL would answer with a wrong result, an abort, or a hang."""


class Logged(NamedTuple):
    """A call of this rank.

    Args:
        ranks: of the group. shapes: of sends and receives, the last is the peer. batch: its number, if it is in one.
        of_objects: whether it carries pickled objects, which travel over Gloo in a world that has it, too.
        group: a number for the group, as others may have the same ranks.
    """

    ranks: tuple[int, ...]
    name: str
    shapes: Any
    batch: int | None
    of_objects: bool
    group: int = 0


class _Queue:
    """The calls of this process that have not run, in their order, and its log of all calls."""

    def __init__(self) -> None:
        self.waiting: deque[_Call] = deque()
        self.in_batch = False
        self.batches = 0
        self.log: list[Logged] = []
        self.made = 0
        self.thread: int | None = None
        self.depth = 0
        self.lock = threading.Lock()

    @contextmanager
    def entered(self, call: str) -> Iterator[None]:
        """Refuses a thread while another one is in a call."""
        own = threading.get_ident()
        with self.lock:
            if self.thread not in (None, own):
                raise BrokenRuleError(
                    f"two threads make calls at once: {call} was called while another thread was in one"
                )
            self.thread, self.depth = own, self.depth + 1
        try:
            yield
        finally:
            with self.lock:
                self.depth -= 1
                if not self.depth:
                    self.thread = None

    def run_until(self, call: "_Call") -> None:
        while not call.has_run:
            first = self.waiting.popleft()
            batch = [first]
            while first.batch is not None and self.waiting and self.waiting[0].batch == first.batch:
                batch.append(self.waiting.popleft())
            for each in batch:
                each.start()
            for each in sorted(batch, key=lambda each: isinstance(each, _Send)):  # which ends when it is received
                each.run()


_queue = _Queue()
_under_way: weakref.WeakSet["_Call"] = weakref.WeakSet()  # those that nobody has waited for


def _check_resize(storage: torch.UntypedStorage) -> None:
    for call in list(_under_way):
        if storage._cdata in call.storages:
            raise BrokenRuleError(f"memory of {call.described} was given back before it was waited for")


class _Call(dist.distributed_c10d.Work):
    """A call of a rank: `inputs` is what it sends, `outputs` is what it fills.

    Args:
        shapes: what must be equal on all ranks, besides the name.
        compute: from every rank's message and details, what `outputs` become. None for a barrier.
    """

    def __init__(
        self,
        group: "StrictGroup",
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        compute: Callable[[list[torch.Tensor], list[Any]], Sequence[torch.Tensor]],
        *,
        shapes: Any = None,
        details: Any = None,
    ) -> None:
        super().__init__()
        self._group, self._name, self._compute, self._details = group, name, compute, details
        for tensor in (*inputs, *outputs):
            group.check(tensor, name)
        if shapes is None:
            shapes = ([(str(t.dtype), t.numel()) for t in inputs], [(str(t.dtype), t.numel()) for t in outputs])
        self.described = f"{name} {shapes}"
        own = {t.untyped_storage().data_ptr() for t in outputs if t.numel()}
        self._kept = [t.detach().clone() for t in inputs]
        # An input in the memory of an output is read at once.
        self._inputs = [None if t.untyped_storage().data_ptr() in own else t.detach() for t in inputs]
        self._outputs = [t.detach() for t in outputs]
        self._poison = [_poisoned(output) for output in self._outputs]
        with torch.no_grad():
            for output, poison in zip(self._outputs, self._poison, strict=True):
                output.copy_(poison)
        self.storages = {t.untyped_storage()._cdata for t in (*inputs, *outputs) if t.numel()}
        _under_way.add(self)
        self._results: Sequence[torch.Tensor] = ()
        self.has_run = self._published = False
        self.batch = _queue.batches if _queue.in_batch else None
        _queue.waiting.append(self)
        _queue.log.append(Logged(group.ranks, name, shapes, self.batch, _of_objects(), id(group)))

    def start(self) -> None:
        """What a batch of sends and receives does before any of them waits."""

    def run(self) -> None:
        self._check_inputs()
        message = _bytes(self._kept)
        messages, details = self._group.exchange(self.described, message, self._details)
        self._results = self._compute(messages, details)
        self.has_run = True

    def _check_inputs(self) -> None:
        for tensor, kept in zip(self._inputs, self._kept, strict=True):
            if tensor is None:
                continue
            if tensor.untyped_storage().nbytes() < kept.nbytes:
                raise BrokenRuleError(f"an input of {self.described} was freed before it was waited for")
            if not torch.equal(_bytes([tensor]), _bytes([kept])):
                raise BrokenRuleError(f"an input of {self.described} was changed before it was waited for")

    def wait(self, timeout: Any = None) -> bool:
        with _queue.entered(f"wait of {self._name}"):
            _queue.run_until(self)
            if not self._published:
                self._check_inputs()
                self._publish()
        return True

    def _publish(self) -> None:
        self._published = True
        _under_way.discard(self)
        with torch.no_grad():
            for output, poison, result in zip(self._outputs, self._poison, self._results, strict=True):
                if output.untyped_storage().nbytes() < output.nbytes:
                    raise BrokenRuleError(f"an output of {self.described} was freed before it was waited for")
                if not torch.equal(_bytes([output]), _bytes([poison])):
                    raise BrokenRuleError(f"an output of {self.described} was written before it was waited for")
                output.copy_(result.view(output.dtype).view(output.shape))
        self._inputs, self._outputs, self._results = [None] * len(self._kept), [], ()

    def is_completed(self) -> bool:
        return self._published


class _Send(_Call):
    """A send: it is over when the receiver has taken it."""

    def __init__(self, group: "StrictGroup", tensor: torch.Tensor, peer: int) -> None:
        super().__init__(group, "send", [tensor], [], lambda *_: (), shapes=(str(tensor.dtype), tensor.numel(), peer))
        self._peer = peer
        self._under_way: list[Any] = []

    def start(self) -> None:
        self._check_inputs()
        described = f"{self._kept[0].dtype} {self._kept[0].numel()}"
        parts = [_padded(pickle.dumps(described)), _bytes(self._kept)]
        gloo, tag = self._group.gloo, int(self.batch is not None)
        self._under_way = [(gloo.send([part], self._peer, tag), part) for part in parts if part.numel()]

    def run(self) -> None:
        for work, _ in self._under_way:
            work.wait(self._group.timeout)
        self.has_run = True


class _Receive(_Call):
    def __init__(self, group: "StrictGroup", tensor: torch.Tensor, peer: int) -> None:
        super().__init__(group, "recv", [], [tensor], lambda *_: (), shapes=(str(tensor.dtype), tensor.numel(), peer))
        self._peer = peer

    def run(self) -> None:
        header, tag = torch.empty(_HEADER, dtype=torch.uint8), int(self.batch is not None)
        try:
            self._group.gloo.recv([header], self._peer, tag).wait(self._group.timeout)
        except RuntimeError as error:
            how = "in a batch" if tag else "outside of batches"
            raise BrokenRuleError(
                f"nothing came for {self.described}, {how}, from rank {self._group.ranks[self._peer]}: {error}"
            ) from error
        sent, expected = pickle.loads(header.numpy().tobytes()), f"{self._poison[0].dtype} {self._poison[0].numel()}"
        if sent != expected:
            raise BrokenRuleError(f"rank {self._group.ranks[self._peer]} sent {sent}, and {expected} is received")
        received = torch.empty_like(_bytes(self._poison))
        if received.numel():
            self._group.gloo.recv([received], self._peer, tag).wait(self._group.timeout)
        self._results = [received.view(self._poison[0].dtype)]
        self.has_run = True


class StrictGroup(dist.ProcessGroup):
    """See the module.

    Args:
        device: the type of device that tensors have to be on.
    """

    device = "cpu"

    def __init__(self, options: Any, name: str) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._backend = name
        self.timeout: timedelta = options.timeout
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, self.timeout)
        self._name = options.group_id
        _queue.made += self.size() > 1

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return self._backend

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=lambda: NAMES[self._backend], options=SimpleNamespace(_timeout=self.timeout), supports_coalescing=False
        )

    def check(self, tensor: torch.Tensor, name: str) -> None:
        """Refuses a tensor that NCCL does not take."""
        if tensor.device.type != self.device:
            raise BrokenRuleError(f"{name} was given a tensor on {tensor.device}, and the group takes {self.device}'s")
        if not tensor.is_contiguous():
            raise BrokenRuleError(f"{name} was given a tensor {list(tensor.shape)} that is not contiguous")
        if tensor.dtype not in _TYPES:
            raise BrokenRuleError(f"{name} was given {tensor.dtype}, which NCCL does not have")

    def exchange(self, described: str, message: torch.Tensor, details: Any) -> tuple[list[torch.Tensor], list[Any]]:
        """Every rank's message and details.

        Raises:
            BrokenRuleError: the ranks are in different calls.
        """
        own = _padded(pickle.dumps((described, message.numel(), details)))
        headers = [pickle.loads(each.numpy().tobytes()) for each in self._gather(own)]
        if len({header[0] for header in headers}) != 1:
            calls = "; ".join(f"rank {rank}: {header[0]}" for rank, header in zip(self.ranks, headers, strict=True))
            raise BrokenRuleError(f"the ranks of a group make calls in different orders: {calls}")
        sizes = [header[1] for header in headers]
        padded = message.new_zeros(max(sizes))
        padded[: message.numel()] = message
        received = self._gather(padded) if max(sizes) else [padded] * self.size()
        return [part[:size] for part, size in zip(received, sizes, strict=True)], [header[2] for header in headers]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self.size())]
        self.gloo.allgather([everyone], [tensor]).wait(self.timeout)
        return everyone

    # -- what torch.distributed calls --

    def _called(self, name: str, *args: Any, **options: Any) -> _Call:
        with _queue.entered(name):
            return _Call(self, name, *args, **options)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Call:
        (tensor,) = tensors
        reduced = _reduction(opts, tensor)
        return self._called(f"all_reduce by {_kind(opts).name}", [tensor], [tensor], lambda got, _: [reduced(got)])

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        return _All([self.allreduce([tensor], opts) for tensor in tensors])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> _Call:
        if output.numel() != input.numel() * self.size():
            raise BrokenRuleError(f"all_gather of {input.numel()} elements has an output of {output.numel()}")
        return self._called("all_gather", [input], [output], lambda got, _: [torch.cat(got)])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return _All([self.all_gather_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> _Call:
        return self._called("all_gather", inputs, outputs[0], lambda got, _: got)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> _Call:
        (tensor,), root = inputs, opts.rootRank
        filled = outputs[0] if self.rank() == root else []
        return self._called(
            f"gather to {root}",
            inputs,
            filled,
            lambda got, _: got[: len(filled)],
            shapes=(str(tensor.dtype), tensor.numel()),
        )

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> _Call:
        (tensor,), root, rank, size = outputs, opts.rootRank, self.rank(), self.size()
        sent = inputs[0] if rank == root else []
        shapes = (str(tensor.dtype), tensor.numel())
        filled = lambda got, _: [got[root].chunk(size)[rank]]  # noqa: E731
        return self._called(f"scatter from {root}", sent, [tensor], filled, shapes=shapes)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> _Call:
        if input.numel() != output.numel() * self.size():
            raise BrokenRuleError(f"reduce_scatter of {input.numel()} elements has an output of {output.numel()}")
        reduced, rank = _reduction(opts, input), self.rank()
        return self._called(
            f"reduce_scatter by {_kind(opts).name}", [input], [output],
            lambda got, _: [reduced([part.chunk(self.size())[rank] for part in got])],
        )  # fmt: skip

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return _All([self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Call:
        root = opts.rootRank
        return self._called(f"broadcast from {root}", tensors, tensors, lambda got, _: [got[root]])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> _Call:
        rank, even = self.rank(), [len(input) // self.size() if input.dim() else 0] * self.size()
        splits = list(input_splits) or even
        row = input[0].numel() if len(input) else output[0].numel() if len(output) else 1
        row_bytes = row * input.element_size()

        def received(got: list[torch.Tensor], details: list[list[int]]) -> list[torch.Tensor]:
            parts = [
                part.split([size * row_bytes for size in sizes])[rank] for part, sizes in zip(got, details, strict=True)
            ]
            expected = [size * row_bytes for size in output_splits] or [part.numel() for part in parts]
            if [part.numel() for part in parts] != expected:
                raise BrokenRuleError(f"all_to_all: {[p.numel() for p in parts]} bytes came, {expected} were expected")
            return [torch.cat(parts)]

        return self._called("all_to_all", [input], [output], received, shapes=str(input.dtype), details=splits)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> _Call:
        return self._called("barrier", [], [], lambda *_: [])

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Call:
        with _queue.entered("send"):
            return _Send(self, tensors[0], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Call:
        with _queue.entered("recv"):
            return _Receive(self, tensors[0], peer)


def _of_objects() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name.endswith(("_object", "_object_list")) and "torch" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


class _All(dist.distributed_c10d.Work):
    """Several calls, waited for together."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        super().__init__()
        self._calls = calls

    def wait(self, timeout: Any = None) -> bool:
        for call in self._calls:
            call.wait()
        return True


def _kind(opts: Any) -> Any:
    kind = next((kind for kind in _REDUCTIONS if kind in (opts.reduceOp, getattr(opts.reduceOp, "op", None))), None)
    if kind is None:
        raise BrokenRuleError(f"a reduction by {opts.reduceOp} was asked for, which NCCL does not have")
    return kind


def _reduction(opts: Any, like: torch.Tensor) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    reduction = _REDUCTIONS[_kind(opts)]
    dtype = like.dtype

    def reduced(messages: list[torch.Tensor]) -> torch.Tensor:
        stacked = torch.stack([message.view(dtype) for message in messages])
        wide = stacked.double() if stacked.is_floating_point() else stacked.long()
        return reduction(wide).to(dtype).view(torch.uint8)

    return reduced


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    if like.is_floating_point():
        return torch.full_like(like, torch.nan)
    return torch.full_like(like, True if like.dtype == torch.bool else torch.iinfo(like.dtype).max // 2)


def _bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _padded(data: bytes) -> torch.Tensor:
    if len(data) > _HEADER:
        raise ValueError(f"a description of {len(data)} bytes")
    return torch.frombuffer(bytearray(data.ljust(_HEADER, b"\0")), dtype=torch.uint8)


def register() -> None:
    """Makes the backends known to torch, once a process."""
    if NAME in dist.Backend.backend_list:
        return
    for name in NAMES:
        make = partial(_make, name)
        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    _watched_resizes.__enter__()  # as long as the process lives


def _make(name: str, options: Any, _: Any) -> StrictGroup:
    return StrictGroup(options, name)


_watched_resizes = watched_resizes(_check_resize)


@contextmanager
def strict_calls() -> Iterator[None]:
    """Inside, batches of sends and receives are one call, as NCCL makes them, and :func:`log` begins anew."""
    _queue.__init__()  # type: ignore[misc]
    original = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
        _queue.batches += 1
        _queue.in_batch = True
        try:
            return original(ops)
        finally:
            _queue.in_batch = False

    with (
        mock.patch.object(dist, "batch_isend_irecv", batch_isend_irecv),
        mock.patch.object(dist.distributed_c10d, "batch_isend_irecv", batch_isend_irecv),
    ):
        yield


def log() -> list[Logged]:
    """The calls of this rank, in their order."""
    return list(_queue.log)


def made() -> int:
    """How many groups of several ranks this rank is in."""
    return _queue.made


def check_order(logs: list[list[Logged]]) -> None:
    """Refuses orders of calls in which ranks could wait for each other for ever, even if each call held its rank up,
    as the first call of a communicator does."""
    order: TopologicalSorter[Any] = TopologicalSorter()
    for rank, log in enumerate(logs):
        numbers: Counter[Any] = Counter()
        before: list[Any] = []
        for _, together in groupby(
            enumerate(log), key=lambda each: each[0] if each[1].batch is None else each[1].batch + 0.5
        ):
            nodes = []
            for _, call in together:
                meets: tuple[Any, ...] = (call.ranks,)
                if call.name in ("send", "recv"):
                    peer = call.ranks[call.shapes[-1]]
                    way = (rank, peer) if call.name == "send" else (peer, rank)
                    meets = (call.ranks, "send", call.batch is None, *way)
                nodes.append((*meets, numbers[meets]))
                numbers[meets] += 1
            for node in nodes:
                order.add(node, *before)
            before = nodes
    order.prepare()  # raises CycleError

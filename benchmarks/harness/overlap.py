"""A step's timeline: which stream does what when, from the order of kernels, messages, waits and events.

One rank's steps run on fake tensors, in a world whose groups stand for NCCL's. What is recorded is what the host would
give to a GPU: each kernel with the stream that it is launched on, each message with the stream that is current then,
and each wait of a stream, for a message, an event or another stream. Durations are those of estimates. So what runs
beside what follows from the recorded order alone. Left out are the host, which is taken to be ahead, and that kernels
and messages that run at once slow each other down.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tensorshard.engine.engine import Engine
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import Rates
from tensorshard.predict.operation_ledger import Kernel, OperationLedger, Transfer, axis_of
from tensorshard.predict.operator_costs import cost_of
from tensorshard.predict.step_time import kernel_time, transfer_time
from tensorshard.torch_private.fake_results import QuickFakeTensorMode
from tensorshard.torch_private.process_groups import fake_world

MAIN = "compute"
MESSAGES = "messages of "
"""Begins the name of a group's stream."""

_COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall_base",
    "all_to_all_single", "broadcast",
)  # fmt: skip

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather", "reduce": "reduce_scatter"}


@dataclass(frozen=True)
class Launched:
    """A kernel or a message, as the host gives it to a GPU.

    Args:
        stream: on which a kernel runs, or which a message follows.
        work: the kernel, or the message and its group.
    """

    stream: str
    work: Kernel | tuple[Transfer, str]


@dataclass(frozen=True)
class Waits:
    """`stream` waits for what is at the place `after` in the record, and for all before it on the same stream."""

    stream: str
    after: int


Record = list[Launched | Waits | None]
"""What a rank gives to its streams, in this order; None at the end of each step."""


@dataclass(frozen=True)
class Span:
    """A kernel or a message, and when it runs, in seconds."""

    stream: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step among others like it.

    Args:
        seconds: from the end of the step before to its own.
        computing: seconds in which the stream of the model runs kernels.
        messages: seconds that its messages take, one after another.
        count: how many messages there are.
        at_once: how many of them the model's stream waits for without a kernel between.
        spans: what runs in it, from its start.
    """

    seconds: float
    computing: float
    messages: float
    count: int
    at_once: int
    spans: list[Span]

    @property
    def waiting(self) -> float:
        """Seconds in which the model's stream runs nothing."""
        return self.seconds - self.computing

    @property
    def hidden(self) -> float:
        """The share of the messages' time in which the model's stream computes."""
        return 1.0 if not self.messages else max(0.0, 1 - self.waiting / self.messages)


class Recorder(OperationLedger):
    """Inside, records what this process would give to the streams of its GPU: a ledger of operations that keeps their
    order, and stands in the place of ``torch.cpu``'s streams and of what groups return."""

    def __init__(self) -> None:
        super().__init__()
        self.record: Record = []
        self.groups: dict[str, dist.ProcessGroup] = self._groups
        self._current = MAIN
        self._streams = 0
        self._last: dict[str, int] = {}  # the place of each stream's last entry
        self._of_outputs: dict[int, int] = {}  # functional collectives, by the storage of what they return
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        recorder = self

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.place: int | None = None

            def record(self, stream: Any = None) -> None:
                self.place = recorder._last.get(recorder._name(stream))

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                pass

            def wait(self, stream: Any = None) -> None:
                recorder._waits(recorder._name(stream), self.place)

        class Stream:
            def __init__(self, *_: Any, **__: Any) -> None:
                recorder._streams += 1
                self.name = f"side {recorder._streams}"

            def wait_event(self, event: Event | None) -> None:
                recorder._waits(self.name, None if event is None else event.place)

            def wait_stream(self, other: Any) -> None:
                recorder._waits(self.name, recorder._last.get(recorder._name(other)))

            def record_event(self, event: Event | None = None) -> Event:
                event = Event() if event is None else event
                event.record(self)
                return event

        main = Stream()
        main.name = MAIN

        @contextmanager
        def stream(chosen: Any) -> Iterator[None]:
            before, self._current = self._current, self._name(chosen)
            try:
                yield
            finally:
                self._current = before

        def current_stream(*_: Any) -> Stream:
            stream = Stream.__new__(Stream)
            stream.name = self._current
            return stream

        for name, value in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", stream),
            ("current_stream", current_stream),
        ):
            self._stack.enter_context(mock.patch.object(torch.cpu, name, value))
        for name in _COLLECTIVES:
            if name in vars(dist.ProcessGroup):
                call = getattr(dist.ProcessGroup, name)
                before = vars(dist.ProcessGroup)[name]
                setattr(dist.ProcessGroup, name, self._recorded(name, call))
                self._stack.callback(setattr, dist.ProcessGroup, name, before)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def end_of_step(self) -> None:
        """Notes that a step is over."""
        self.record.append(None)

    def _name(self, stream: Any) -> str:
        return self._current if stream is None else stream.name

    def _waits(self, stream: str, after: int | None) -> None:
        if after is not None:
            self._last[stream] = len(self.record)
            self.record.append(Waits(stream, after))

    def _recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self

        class Work(dist.distributed_c10d.Work):
            def __init__(self, place: int | None) -> None:
                super().__init__()
                self._place = place

            def wait(self, timeout: Any = None) -> bool:
                recorder._waits(recorder._current, self._place)
                return True

        def called(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            before = len(self.record)
            if name.endswith("coalesced"):  # fake tensors do not have these
                collective = next(kind for start, kind in _KINDS.items() if name.startswith(start))
                tensors = args[1] if collective == "reduce_scatter" else args[0]
                self._message(collective, sum(tensor.nbytes for tensor in tensors), group)
            else:
                call(group, *args, **options)
            return Work(len(self.record) - 1 if len(self.record) > before else None)

        return called

    def _message(self, collective: str, nbytes: int, group: dist.ProcessGroup) -> None:
        if self.recording and group.size() > 1:
            self.groups[group.group_name] = group
            transfer = Transfer("", "", collective, nbytes, group.size())
            self.record.append(Launched(self._current, (transfer, group.group_name)))

    def note(self, func: Any, args: Any, kwargs: Any, output: Any, known: Any = None) -> None:
        if func.namespace == "_c10d_functional" and func.overloadpacket.__name__ == "wait_tensor":
            place = self._of_outputs.pop(args[0].untyped_storage()._cdata, None)
            self._waits(self._current, place)
            return
        if func.namespace in ("c10d", "_c10d_functional"):
            self._counts.transfers.clear()
            self._after_backward.transfers.clear()
            self._note_transfer(func, args, kwargs, output)
            for transfer, group in [*self._counts.transfers, *self._after_backward.transfers]:
                if transfer.ranks > 1:
                    self.record.append(Launched(self._current, (transfer, group)))
                    if func.namespace == "_c10d_functional":
                        self._of_outputs[output.untyped_storage()._cdata] = len(self.record) - 1
            return
        cost = cost_of(func, args, kwargs, output)
        if cost is not None:
            kernel = Kernel("", str(func.overloadpacket), cost.dtype, cost.flops, cost.nbytes)
            self._last[self._current] = len(self.record)
            self.record.append(Launched(self._current, kernel))


def record_steps(
    make_engine: Callable[[], Engine], make_batch: Callable[[], tuple[Any, Any]], world_size: int, steps: int = 3
) -> tuple[Record, dict[str, str]]:
    """What rank 0 of a world of `world_size` GPUs is given in `steps` steps, after those that differ; and the axis of
    each group."""
    with fake_world(0, world_size, "nccl"), QuickFakeTensorMode():
        recorder = Recorder()
        recorder.recording = False
        with recorder:
            engine = make_engine()
            batch = make_batch()
            for _ in range(2):
                engine.step(*batch)
            recorder.recording = True
            for _ in range(steps):
                engine.step(*batch)
                recorder.end_of_step()
            recorder.recording = False
        mesh = engine.mesh
        axes = {name: axis_of(dist.get_process_group_ranks(group), mesh) for name, group in recorder.groups.items()}
    return recorder.record, axes


def play(record: Record, duration: Callable[[Kernel | tuple[Transfer, str]], float]) -> Timeline:
    """The last step of `record`, whose streams work as soon as they may.

    Args:
        duration: the seconds of a kernel, or of a message and its group.
    """
    ready: dict[str, float] = {}
    ends: list[float] = []
    spans: list[Span] = []
    at_ends: list[float] = []
    first = 0
    for entry in record:
        if entry is None:
            at_ends.append(ready.get(MAIN, 0.0))
            ends.append(0.0)
            if len(at_ends) < sum(one is None for one in record):
                first = len(spans)
            continue
        if isinstance(entry, Waits):
            ready[entry.stream] = max(ready.get(entry.stream, 0.0), ends[entry.after])
            ends.append(ready[entry.stream])
            continue
        seconds = duration(entry.work)
        start, lane, name = ready.get(entry.stream, 0.0), entry.stream, ""
        if isinstance(entry.work, Kernel):
            name = entry.work.name
        else:
            transfer, group = entry.work
            lane, name = f"{MESSAGES}{group}", transfer.collective
            start = max(start, ready.get(lane, 0.0))
        ready[lane] = start + seconds
        ends.append(ready[lane])
        spans.append(Span(lane, name, start, start + seconds))
    begin, end = at_ends[-2:]
    last_spans = spans[first:]
    computing = sum(span.end - span.start for span in last_spans if span.stream == MAIN)
    messages = sum(span.end - span.start for span in last_spans if span.stream.startswith(MESSAGES))
    shown = [Span(s.stream, s.name, s.start - begin, s.end - begin) for s in spans if s.end > begin and s.start < end]
    last = record[[place for place, entry in enumerate(record) if entry is None][-2] + 1 :]
    sent = [e for e in last if isinstance(e, Launched) and not isinstance(e.work, Kernel)]
    return Timeline(
        end - begin, computing, messages, len(sent), _waited_for_at_once(record, len(record) - len(last)), shown
    )


def _waited_for_at_once(record: Record, first: int) -> int:
    """How many messages from the place `first` on the model's stream waits for without having computed meanwhile."""
    count, last_kernel = 0, -1
    waited: set[int] = set()
    for place, entry in enumerate(record):
        if isinstance(entry, Launched) and isinstance(entry.work, Kernel) and entry.stream == MAIN:
            last_kernel = place
        elif isinstance(entry, Waits) and entry.after not in waited:
            message = record[entry.after]
            if isinstance(message, Launched) and not isinstance(message.work, Kernel):
                waited.add(entry.after)
                count += entry.stream == MAIN and first <= entry.after and last_kernel < entry.after
    return count


def durations(plan: Plan, world_size: int, rates: Rates, axes: dict[str, str]) -> Callable[[Any], float]:
    """The seconds of a kernel or a message on hardware of these `rates`, as in estimates."""

    def seconds(work: Kernel | tuple[Transfer, str]) -> float:
        if isinstance(work, Kernel):
            return kernel_time(work, rates)
        transfer, group = work
        named = Transfer(
            transfer.section,
            axes[group],
            transfer.collective,
            transfer.nbytes,
            transfer.ranks,
            part_of=transfer.part_of,
        )
        return transfer_time(named, plan, world_size, rates)

    return seconds

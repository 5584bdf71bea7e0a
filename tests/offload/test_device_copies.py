"""Copies between a device and the host's memory: in which order, through which buffers."""

import gc
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock, Thread, current_thread, local, main_thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils import backend_registration

import parity
import tensorshard as ts
from off_device import Late, LateCopies, off_device
from tensorshard.checkpoint.between_saves import StagingMemory
from tensorshard.offload import activations
from tensorshard.offload.activations import OffloadedActivations
from tensorshard.offload.device_copies import DeviceCopies, PinnedMemory
from tensorshard.offload.tiers import Tiers

ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Streams:
    """What ``torch.cuda`` is asked for of streams and events, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.made = 0
        self.current = "compute"
        streams = self

        class Stream:
            def __init__(self, device: Any = None) -> None:
                streams.made += 1
                self.name = f"side {streams.made}"

            def wait_event(self, event: Any) -> None:
                streams.calls.append((self.name, "waits for", event.number))

        class Event:
            count = 0

            def __init__(self, blocking: bool = False) -> None:
                Event.count += 1
                self.number = Event.count

            def record(self, stream: Any) -> None:
                streams.calls.append((getattr(stream, "name", stream), "records", self.number))

            def synchronize(self) -> None:
                streams.calls.append(("host", "waits for", self.number))

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: Any = None) -> str:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream.name
        yield
        self.current = before


class Copied:
    """What is copied into."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def copy_(self, values: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self._streams.calls.append((self._streams.current, "copies"))


def test_copies_follow_what_was_computed_on_streams_of_their_own():
    streams = Streams()
    with mock.patch.object(torch, "get_device_module", lambda _: streams):
        copies = DeviceCopies(torch.device("cuda"))
    into: Any = Copied(streams)
    for _ in range(2):
        streams.calls.clear()
        first = copies.given().number
        copy = copies.to_host(into, torch.ones(3), mock.Mock(number=first))
        assert streams.calls == [
            ("compute", "records", first),
            ("side 1", "waits for", first),
            ("side 1", "copies"),
            ("side 1", "records", first + 1),
        ]
        copy.wait()
        assert streams.calls[-1] == ("host", "waits for", first + 1)
        streams.calls.clear()
        copies.to_device(into, torch.ones(3), mock.Mock(number=first))
        assert streams.calls == [
            ("side 2", "waits for", first),
            ("side 2", "copies"),
            ("side 2", "records", first + 2),
            ("host", "waits for", first + 2),
        ]
    assert streams.made == 2


class ThreadsOfCUDA(Streams):
    """With a current device of each thread, as CUDA has: leaving a stream goes back to the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.of_thread = local()
        self.selected: set[int] = set()

    def set_device(self, device: torch.device) -> None:
        self.of_thread.device = device.index
        self.selected.add(device.index)

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before = getattr(self.of_thread, "device", 0)
        with super().stream(stream):
            yield
        self.set_device(torch.device("cuda", before))


def test_a_thread_that_copies_touches_no_other_device():
    cuda = ThreadsOfCUDA()
    with mock.patch.object(torch, "get_device_module", lambda _: cuda):
        copies = DeviceCopies(torch.device("cuda", 1))
    into: Any = Copied(cuda)

    def copy() -> None:
        copies.make_current()
        copies.to_device(into, torch.ones(3), mock.Mock(number=0))

    thread = Thread(target=copy)
    thread.start()
    thread.join()
    assert cuda.selected == {1}


_current = local()


class CopiesOfThreads(LateCopies):
    """Refuses a thread that has not taken the device as its own."""

    def make_current(self) -> None:
        _current.device = self.device

    def _begin(self, *args: Any) -> Any:
        assert current_thread() is main_thread() or hasattr(_current, "device"), current_thread().name
        COPYING.add(current_thread().name.partition("_")[0])
        return super()._begin(*args)


COPYING: set[str] = set()


def _threads_that_copy(fields: dict[str, Any], offload: dict[str, Any]) -> set[str]:
    COPYING.clear()
    with off_device(CopiesOfThreads), mock.patch.object(activations, "SMALLEST", 64):
        engine = ts.parallelize(
            partial(parity.build, "gpt"),
            ts.Plan(offload=ts.Offload(**offload), **fields),
            optimizer=ADAMW,
            loss_fn=parity.loss_function("gpt"),
        )
        for step in range(2):
            engine.step(*parity.batch("gpt", step))
        engine.full_state_dict()
    return COPYING


@pytest.mark.parametrize("overlap", [False, True])
def test_all_threads_that_copy_take_the_device_first(ranks, overlap):
    offload = dict(optimizer="cpu", gradients="cpu", activations="cpu", overlap=overlap)
    assert "tensorshard-offload" in ranks(1, _threads_that_copy, dict(micro_batches=2), offload)[0]


class LostEvents(LateCopies):
    """Does not say after what a copy is made."""

    def given(self) -> None:
        return None


def _loses_events() -> str:
    with off_device(LostEvents), pytest.raises(Exception, match="a copy that follows nothing") as error:
        engine = ts.parallelize(
            partial(parity.build, "gpt"),
            ts.Plan(offload=ts.Offload(optimizer="cpu", gradients="cpu")),
            optimizer=ADAMW,
            loss_fn=parity.loss_function("gpt"),
        )
        engine.step(*parity.batch("gpt", 0))
    return str(error.value)


def test_a_lost_event_is_found(ranks):
    assert "a copy that follows nothing" in ranks(1, _loses_events)[0]


def test_a_tensor_that_changes_while_it_is_copied_is_refused():
    tiers = Tiers(ts.Offload(activations="cpu", buffer_memory="1MiB"), copies=LateCopies(torch.device("cpu")))
    moved = OffloadedActivations(tiers)
    held = Lock()
    block = nn.Identity()

    def changes(x: torch.Tensor) -> torch.Tensor:
        kept = x * 1.0
        output = kept.sin()
        with torch.no_grad():
            kept.add_(1.0)
        held.release()
        return output

    def waits(late: Any) -> None:
        with held:
            synchronize(late)

    synchronize = Late.synchronize
    held.acquire()
    with mock.patch.object(Late, "synchronize", waits):
        moved.forward(block, changes, torch.randn(512, 64, requires_grad=True))
        failure = moved.take_failure()
    assert "shape [512, 64] that a block keeps for its gradient was changed in place while it was cop" in str(failure)
    assert moved.take_failure() is None


class Driver:
    """Pins memory as CUDA's driver does, of which there is so much."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.pinned: dict[int, int] = {}
        self.peak = self.calls = 0
        self._most = most

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if sum(self.pinned.values()) + nbytes > self._most:
            return 2
        assert address not in self.pinned
        self.pinned[address] = nbytes
        self.calls += 1
        self.peak = max(self.peak, sum(self.pinned.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    @contextmanager
    def installed(self) -> Any:
        with (
            mock.patch.object(torch.cuda, "cudart", lambda: self),
            mock.patch.object(torch.cuda, "device", lambda _: nullcontext()),
        ):
            yield


class PinnedCopies(LateCopies):
    """With buffers that are pinned."""

    def buffer(self, nbytes: int) -> PinnedMemory:
        return PinnedMemory(nbytes, self.device, "set offload.buffer_memory to less")


def test_memory_is_pinned_as_long_as_tensors_are_on_it():
    driver = Driver(most=3 * 4096)
    with driver.installed():
        memory = PinnedMemory(2 * 4096, torch.device("cuda"), "set offload.buffer_memory")
        tensor = torch.frombuffer(memory, dtype=torch.float32)
        assert driver.pinned == {tensor.data_ptr(): 2 * 4096}
        with pytest.raises(
            RuntimeError, match=r"8,192 bytes of a buffer .*\(CUDA error 2\); set offload.buffer_memory"
        ):
            PinnedMemory(2 * 4096, torch.device("cuda"), "set offload.buffer_memory")
        del memory
        gc.collect()
        assert driver.pinned
        del tensor
        gc.collect()
        assert not driver.pinned


def test_copies_for_a_save_are_pinned_without_a_byte_to_spare():
    """And given back before larger ones are made."""
    driver, memory = Driver(most=3 * 4096), StagingMemory()
    with driver.installed():
        assert memory.take(100, None).nbytes == 100 and not driver.pinned
        for size in (2 * 4096 + 5, 4096, 3 * 4096):
            copy = memory.take(size, torch.device("cuda"))
            assert copy.nbytes == size and [*driver.pinned.values()] == [max(2 * 4096 + 5, size)]
            del copy
        with pytest.raises(RuntimeError, match=r"12,289 bytes .*; save without background=True"):
            memory.take(3 * 4096 + 1, torch.device("cuda"))
        assert not driver.pinned and memory.size == 0


def _pinned(fields: dict[str, Any], offload: dict[str, Any]) -> tuple[int, int, int, int]:
    """Bytes pinned at most, how often memory was pinned by the first step and by the third, and what is left."""
    driver = Driver()
    with driver.installed(), off_device(PinnedCopies), mock.patch.object(activations, "SMALLEST", 64):
        plan = ts.Plan(offload=ts.Offload(**offload), **fields)
        engine = ts.parallelize(
            partial(parity.build, "gpt"), plan, optimizer=ADAMW, loss_fn=parity.loss_function("gpt")
        )
        made = driver.calls
        for step in range(3):
            engine.step(*parity.batch("gpt", step))
        peak, calls = driver.peak, driver.calls
        del engine
        gc.collect()
        return peak, made, calls, len(driver.pinned)


@pytest.mark.parametrize("activations", [None, "cpu"])
def test_buffers_are_pinned_once_and_within_their_budget(ranks, activations):
    offload = dict(optimizer="cpu", gradients="cpu", activations=activations, buffer_memory="2MiB")
    peak, made, calls, left = ranks(1, _pinned, dict(precision="bf16", micro_batches=2), offload)[0]
    assert 0 < peak <= 2 << 20
    assert made == calls
    assert left == 0


@pytest.mark.slow
def test_nothing_mixes_tensors_of_the_device_and_of_the_host():
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this version of torch takes no device types from Python")
    script = Path(__file__).with_name("steps_on_a_pretended_device.py")
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]

"""Tells the ranks of a world at once when one of them has failed, has ended, or makes another call.

A rank that waits in a collective for one that will not come would learn of it when the timeout of the group is over,
and not why. So each rank keeps, in memory, which of its calls are done and which is under way. A thread looks at that
every second. What has not changed for two seconds goes to the world's store, so a quick step costs no message. A rank
that has waited in a collective for three seconds reads what the others have written there.

What stays unchanged is written again every two seconds. So a process that is stopped, or whose machine is lost, is told
from one that computes for long. As torch's flight recorder does, each rank says which collective it waits in; those of
ranks that send and receive, as on Gloo, are not in that recorder.
"""

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.collectives import awaited, collectives_made, explainers
from tensorshard.comm.groups import CollectiveMismatchError
from tensorshard.comm.world import world
from tensorshard.torch_private.process_groups import (
    backend_name,
    default_store,
    group_timeout,
    own_client,
    place_of_wait,
)

logger = logging.getLogger("tensorshard")

_UNCHANGED = 2  # looks, until a state is written down
_WAITS = 3  # looks, until the others' states are read
_SAYS = 10  # looks, until a rank that waits for another one says so
_BEAT = 2  # looks, until an unchanged state is written again
_STOPPED = 5  # looks without news, until a process of this machine that the system calls stopped counts as stopped
_SILENT = 20  # looks without news, until a rank of another machine counts as lost
_DEADLOCK = 12  # looks, until ranks that all wait in different collectives of one group are ended
_CAUSE_CHARACTERS = 500
_LAST_WORDS = timedelta(seconds=2)  # that a rank takes at most to say that it ends
_ALARM = "alarm"
_TAG = 0x7453_6842  # of a message that nobody sends
_NO_END = " could not end: "  # between a call and its cause
_MANY_RANKS = 64  # above, states are read less often
_OUTSIDE = "a forward, backward or read of your own"  # where no call is under way
_HERE = "An earlier call failed on this rank, and the script went on"

# Gloo's and NCCL's words when another rank did not come, or is gone.
_SIGNS = (
    "Timed out waiting", "timeout caused pair closure", "Connection closed by peer", "Connection reset by peer",
    "gloo/transport", "NCCL error",
)  # fmt: skip


def is_of_collective(error: BaseException) -> bool:
    """Whether `error` says that a collective could not end."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


def add_cause(error: BaseException, call: str, cause: str) -> None:
    """Notes at the `error` of a collective why `call` could not end: the `cause` is what other ranks do."""
    error.add_note(with_cause(call, cause))


def with_cause(call: str, cause: str) -> str:
    """The sentence about a `call` that could not end."""
    return f"{call}{_NO_END}{cause}. The process group is of no more use: end the processes"


def noted_cause(error: BaseException) -> str | None:
    """The sentence of :func:`with_cause` at `error`; None if there is none."""
    return next((said for said in (*getattr(error, "__notes__", ()), str(error)) if _NO_END in said), None)


def _explain_outside(error: RuntimeError) -> None:
    """Notes at the `error` of a collective outside of any Engine's call why it could not end."""
    watches = [watch for watch in _WATCHES if watch.is_of_this_world]
    if any(watch.is_in_call for watch in watches):
        return  # which notes it
    for watch in watches:
        cause = watch.explain(_OUTSIDE)
        if cause is not None:
            add_cause(error, _OUTSIDE, cause)
            return


_WATCHES: "weakref.WeakSet[CallWatch]" = weakref.WeakSet()
explainers.append(_explain_outside)


class _DeviceWatch:
    """Whether a GPU is still busy with what it was given before the last look. The CPU never is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: Any = None  # after what the device was given then
        self.waits = False

    def look(self) -> None:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return
        self.waits = self._before is not None and not self._before.query()
        if not self.waits:
            with torch.cuda.device(self._device):
                self._before = torch.cuda.Event()
                self._before.record(torch.cuda.default_stream(self._device))


class CallWatch:
    """What this rank calls, compared with what the others do. One for each Engine; all ranks make it together.

    Args:
        groups: those whose collectives the calls make. The first is of all ranks.
        device: of the tensors that are sent.
        internal: exceptions that leave a call on all ranks and are no failures.
        pause: seconds between two looks.
        axes: names of `groups`, for messages.
        line_of: the line of the user's code that a frame belongs to; "" if it belongs to none.
        enabled: False for a watch that does nothing.
        patience: seconds that a rank waits in a collective for one that computes, until both are ended; None for the
            timeout of the groups.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        *,
        internal: type[Exception] | tuple[()] = (),
        pause: float = 1.0,
        axes: Sequence[str] = (),
        line_of: Callable[[FrameType], str] | None = None,
        enabled: bool = True,
        patience: float | None = None,
    ) -> None:
        self.stacks: Path | None = None
        """The folder where each rank writes its stacks when one of them finds that a call cannot end."""
        self.end_process: Callable[[str], Any] | None = None
        """Ends this process, which keeps the others waiting, or cannot stop waiting itself."""
        self.verdict: str | None = None
        """Why this rank's collectives were ended, or will not end."""
        self._groups, self._device, self._internal = groups, device, internal
        self._rank, self._size = groups[0].rank(), groups[0].size()
        self._done = 0  # calls that were made, on all ranks the same ones
        self._begun = 0  # those that failed as well: ranks that all fail may try again
        self._call: str | None = None
        self._failed: str | None = None
        self._thread = 0  # that makes the calls
        self._looks = 0  # in a row that saw no change
        self._seen: Any = None
        self._waits = 0  # looks in a row that saw the same wait
        self._waits_at: Any = None
        self._said = False
        self._axes, self._line_of, self._patience, self._pause = axes, line_of, patience, pause
        self._beat = 0
        self._heard: dict[int, tuple[int, int]] = {}  # of each rank: its last beat, and the look at which it came
        self._alarmed = False
        self._asked = 0  # looks in a row at which this process was asked to end
        self._store: Any = None
        self._of_world: Any = None
        self._written: dict[str, Any] = {}  # what the store has of this rank
        self._gpu = _DeviceWatch(device)
        if not enabled:
            return
        self._thread = threading.get_ident()
        if self._size == 1 or dist.get_backend(groups[0]) == "fake" or world().is_simulated:
            return
        store = self._of_world = default_store()
        made = store.add(f"tensorshard/watches/{self._rank}", 1)  # the same number on all ranks
        self._store = dist.PrefixStore(f"tensorshard/calls/{made}", own_client(store))
        self._write()
        _WATCHES.add(self)
        stop = threading.Event()
        thread = threading.Thread(target=_look, args=(weakref.ref(self), stop, pause), daemon=True, name="call watch")
        thread.start()
        weakref.finalize(self, _end, stop, thread, self._store, store, self._rank, self._written)

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """The context of a call that all ranks make, the same number of times and in the same order."""
        if self._store is None or self._call is not None:
            yield
            return
        if self._failed is not None:
            self._await_others(call)
        failed, self._failed = self._failed, None
        self._begun += 1
        self._thread, self._call = threading.get_ident(), call
        if failed is not None:
            self._write()  # it goes on
        try:
            yield
        except BaseException as error:
            self._call = None
            if not isinstance(error, self._internal) and not is_of_collective(error):
                self._failed = f"{call}: {type(error).__name__}: {error}"[:_CAUSE_CHARACTERS]
                self._write()
            raise
        self._done += 1
        self._call = None

    def _await_others(self, call: str) -> None:
        """Waits, before the first call after one that failed here, until that one has failed on every rank.

        Otherwise what this rank sends next would meet what the others still send in that one.

        Raises:
            CollectiveMismatchError: it did not fail on another rank.
        """
        failed = f"{_HERE}: {self._failed}"
        for _ in range(int(group_timeout(self._groups[0], torch.device("cpu")).total_seconds() / self._pause)):
            states = self._read()
            apart = [rank for rank, state in states.items() if state["ended"] or state["done"] > self._done]
            cause = self._told() or (f"rank {apart[0]} has ended, or ended that call. {failed}" if apart else None)
            if cause is not None:
                raise CollectiveMismatchError(with_cause(call, cause))
            if states and all(_failures(state) >= self._begun - self._done for state in states.values()):
                return
            threading.Event().wait(self._pause)
        raise CollectiveMismatchError(with_cause(call, f"not every rank has failed as well. {failed}"))

    @property
    def is_of_this_world(self) -> bool:
        """Whether the world of this watch has not ended, and none has taken its place. Else nobody serves its store."""
        return _is_of_this_world(self._of_world)

    @property
    def is_in_call(self) -> bool:
        """Whether one of the calls that all ranks make is under way."""
        return self._call is not None

    def explain(self, call: str) -> str | None:
        """Why a collective of the `call` that just failed has failed, as far as other ranks have said."""
        if self._store is None:
            return None
        for _ in range(4):
            if self.verdict is None:
                threading.Event().wait(0.25)  # for what another rank is writing
                self.verdict = self._told()
                if self.verdict is not None:
                    break
                culprit, self.verdict = self._cause(self._read(), call)
                if self.verdict is not None:
                    self._raise_alarm(culprit, self.verdict, fatal=True)
        return self.verdict

    def look(self) -> None:
        """What the thread does, every second."""
        now = (self._done, self._begun, self._call, self._failed)
        self._looks = self._looks + 1 if now == self._seen else 0
        if now != self._seen:
            self._seen, self._said = now, False
        self._gpu.look()
        if self._looks >= _UNCHANGED and (self._looks - _UNCHANGED) % (_BEAT + self._size // _MANY_RANKS) == 0:
            self._beat += 1
            self._write()
            self._answer_alarm()
        if self._looks < _UNCHANGED or self.verdict is not None or (self._call is None and self._failed is not None):
            return
        place = place_of_wait(self._thread, self._gpu.waits)
        now_at = place, collectives_made()  # a frame may have the place of an earlier one
        self._waits = self._waits + 1 if place is not None and now_at == self._waits_at else 0
        self._waits_at = now_at
        if not self._waits:
            self._heard.clear()
        if self._waits < _WAITS or self._waits % (1 + self._size // _MANY_RANKS):
            return
        call, states = self._call or _OUTSIDE, self._read()
        for rank, state in states.items():
            if self._heard.get(rank, (-1, 0))[0] != state["beat"]:
                self._heard[rank] = (state["beat"], self._waits)
        culprit, cause = self._cause(states, call)
        if cause is None and self._call is not None:
            culprit, cause = self._stall(states, call)
        if cause is not None and now == (self._done, self._begun, self._call, self._failed):
            self._raise_alarm(culprit, cause, fatal=True)
            self.verdict = cause
            self._end_stopped(states.get(culprit))
            if not self._end_collectives():
                logger.error("rank %d waits in %s, and will do so until the timeout: %s", self._rank, call, cause)
                if self.end_process is not None:
                    self.end_process(cause)
        elif cause is None and self._call is not None and self._waits >= _SAYS and not self._said:
            self._say_who_is_missing(call, states)

    def _missing(self, states: Mapping[int, Any], call: str) -> list[int]:
        """The ranks that compute, or do something else, while this one waits for them in `call`."""
        return [
            rank
            for rank, state in states.items()
            if state["done"] == self._done
            and (state["call"] is None or (state["call"] == call and not state["waits"] and self._waits >= _SAYS))
        ]

    def _say_who_is_missing(self, call: str, states: Mapping[int, Any]) -> None:
        missing = self._missing(states, call)
        waiting = [rank for rank, state in states.items() if state["done"] == self._done and state["waits"]]
        if missing and self._rank == min([*waiting, self._rank]):
            self._said = True
            outside = all(states[rank]["call"] is None for rank in missing)
            why = f"which {'has' if len(missing) == 1 else 'have'} not called it; every rank calls it"
            why = why if outside else "which computes"
            places = "".join(f"; {self._place(rank, states[rank])}" for rank in missing[:4] if states[rank]["line"])
            logger.warning("rank %d waits in %s for %s, %s%s", self._rank, call, _listed(missing), why, places)
            self._raise_alarm(missing[0], f"{_listed(missing)} kept the others waiting in {call}", fatal=False)

    def _stall(self, states: Mapping[int, Any], call: str) -> tuple[int, str | None]:
        """Which rank let this one wait for longer than `patience`, and where it is."""
        if self._patience is None or self._waits * self._pause < self._patience:
            return -1, None
        for rank in self._missing(states, call):
            return rank, (
                f"rank {rank} did not come for {self._patience:g} s (watchdog={self._patience:g}) while rank "
                f"{self._rank} waited in {call}, call {self._done + 1}; {self._place(rank, states[rank])}"
            )
        return -1, None

    def _place(self, rank: int, state: Mapping[str, Any]) -> str:
        line = f" is at {state['line']}" if state["line"] else " is in no line of your code"
        return f"rank {rank}{line}, process {state['pid']} on {state['host']}"

    def _raise_alarm(self, culprit: int, cause: str, *, fatal: bool) -> None:
        """Asks all ranks for their stacks."""
        with suppress(RuntimeError):
            self._store.set(_ALARM, json.dumps({"culprit": culprit, "cause": cause, "fatal": fatal}))
        self._write_stacks(cause)

    def _told(self) -> str | None:
        """Why the rank that ended the others' collectives did so; its own end is no cause."""
        with suppress(RuntimeError):
            alarm = json.loads(self._store.get(_ALARM)) if self._store.check([_ALARM]) else {"fatal": False}
            if alarm["fatal"]:
                return str(alarm["cause"])
        return None

    def _answer_alarm(self) -> None:
        """Writes this rank's stacks, and ends this process if it keeps the others waiting, where one of them asks."""
        if not self._store.check([_ALARM]):
            return
        alarm = json.loads(self._store.get(_ALARM))
        self._write_stacks(alarm["cause"])
        waits = place_of_wait(self._thread, self._gpu.waits) is not None
        ends_by_itself = self._failed is not None or self.verdict is not None or waits
        if ends_by_itself or not alarm["fatal"] or alarm["culprit"] != self._rank:
            return
        self._asked += 1
        if self._asked > 1 and self.end_process is not None:
            self.end_process(alarm["cause"])

    def _write_stacks(self, cause: str) -> None:
        if self._alarmed or self.stacks is None:
            return
        self._alarmed = True
        with suppress(OSError):
            self.stacks.mkdir(parents=True, exist_ok=True)
            with (self.stacks / f"rank{self._rank}.txt").open("w", encoding="utf-8") as file:
                file.write(f"{cause}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)

    def _end_stopped(self, state: Mapping[str, Any] | None) -> None:
        """Ends a stopped process of this run, which cannot hear its launcher; only where processes may be ended."""
        if self.end_process is not None and state is not None and _process_state(state) == "T":
            with suppress(OSError):
                os.kill(state["pid"], signal.SIGKILL)

    def _cause(self, states: Mapping[int, Any], call: str) -> tuple[int, str | None]:
        """By which rank and why a collective of `call` cannot end, by the others' `states`; None if it is not known."""
        for rank, state in states.items():
            now = state["done"] == self._done and state["begun"] >= self._begun
            if state["failed"] is not None and now:
                return rank, f"rank {rank} failed in {state['failed']}"
        for rank, state in states.items():
            now = (state["done"], state["begun"]) == (self._done, self._begun)
            if state["call"] not in (None, call) and now and call != _OUTSIDE:
                calls = {state["call"], call}
                if calls == {"engine.backward", "engine.optimizer.step"}:
                    also = "as many of engine.backward, too: with fewer micro-batches, one more on a loss times 0"
                else:
                    also = "also those that only one rank needs (no `if rank == 0` around them)"
                return rank, (
                    f"rank {rank} called {state['call']} while rank {self._rank} called {call}; every rank makes the "
                    f"same calls in the same order, {also}"
                )
        for rank, state in states.items():
            if state["ended"]:
                return rank, f"rank {rank} has ended, or let go of its Engine"
        for rank, state in states.items():
            gone = self._gone(rank, state)
            if gone is not None:
                return rank, f"rank {rank} {gone}"
        return self._deadlock(states, call)

    def _gone(self, rank: int, state: Mapping[str, Any]) -> str | None:
        """How a rank was lost without a word; None if it is not known to be lost."""
        process = _process_state(state)
        silent = self._waits - self._heard[rank][1] if rank in self._heard else 0
        who = f"process {state['pid']} on {state['host']}"
        if process == "gone":
            return (
                f"has died without a word: {who} is not there any more; the system's log says if it was out of memory"
            )
        if process == "T" and silent >= _STOPPED:
            return f"is stopped (by SIGSTOP, a terminal or a debugger): {who}"
        if process is None and silent >= _SILENT:
            return (
                f"has not been heard of for {silent * self._pause:.0f} s: {who} was stopped or killed, or its machine "
                f"cannot be reached"
            )
        return None

    def _deadlock(self, states: Mapping[int, Any], call: str) -> tuple[int, str | None]:
        """Whether all ranks of the group that this one waits in wait there, too, but in different collectives."""
        mine = self._waiting()
        if mine["collective"] is None or self._waits < _DEADLOCK:
            return -1, None
        others = {rank: states[rank] for rank in mine["ranks"] if rank in states}
        for state in others.values():
            if not state["waits"] or state["ranks"] != mine["ranks"] or state["done"] != self._done:
                return -1, None
        # The rank of which the fewest wait in the same collective is the one that differs.
        named = {rank: state["collective"] for rank, state in others.items()} | {self._rank: mine["collective"]}
        if None in named.values() or len(set(named.values())) == 1:
            return -1, None
        counts = {rank: list(named.values()).count(name) for rank, name in named.items()}
        odd = min(others, key=lambda rank: (counts[rank], named[rank] == mine["collective"]))
        axis = f" of the axis {mine['axis']}" if mine["axis"] else ""
        at = f" at {mine['line']}" if mine["line"] else ""
        return odd, (
            f"the ranks {mine['ranks']}{axis} wait in different collectives of {call}, call {self._done + 1}: rank "
            f"{self._rank} in {named[self._rank]}{at}, and rank {odd} in {named[odd]}: "
            f"{self._place(odd, others[odd])}. Tensors of other shapes, another branch in the model, or "
            f"unequal numbers of forwards or backwards do that"
        )

    def _waiting(self) -> dict[str, Any]:
        """Where the thread that makes the calls is: whether it waits, in which collective of which ranks, and for
        which line of the user's code."""
        frame = sys._current_frames().get(self._thread)
        waits = frame is not None and place_of_wait(self._thread, self._gpu.waits) is not None
        call = awaited(frame) if waits else None
        collective, group = call if call is not None else (None, None)
        ranks = None if group is None else dist.get_process_group_ranks(group)
        axis = next((name for other, name in zip(self._groups, self._axes, strict=False) if other is group), "")
        line = "" if frame is None or self._line_of is None else self._line_of(frame)
        return {"waits": waits, "collective": collective, "ranks": ranks, "axis": axis, "line": line}

    def _write(self) -> None:
        state = {
            "done": self._done, "begun": self._begun, "call": self._call, "failed": self._failed, "ended": False,
            "beat": self._beat, **_THIS_PROCESS, "pid": os.getpid(), **self._waiting(),
        }  # fmt: skip
        with suppress(RuntimeError):  # the store is gone
            self._store.set(str(self._rank), json.dumps(state))
            self._written.update(state)

    def _read(self) -> dict[int, Any]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            if not self._store.check(list(map(str, others))):
                return {}
            return {rank: json.loads(self._store.get(str(rank))) for rank in others}
        except RuntimeError:
            return {}

    def _end_collectives(self) -> bool:
        """Ends what this rank waits for with an error; False if the backend has no way to do so from a thread."""
        if any(backend_name(group, self._device) != "gloo" for group in self._groups):
            return False
        for group in self._groups:
            if group.size() > 1:
                # A timeout closes all connections of a Gloo group, on which its other transfers fail.
                peer = (group.rank() + 1) % group.size()
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], peer, _TAG).wait(timedelta(milliseconds=1))
        return True


def _system() -> str:
    """Names the running system and its table of processes: equal for processes that see each other's numbers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


_THIS_PROCESS = {"host": socket.gethostname(), "system": _system()}


def _process_state(state: Mapping[str, Any]) -> str | None:
    """Of a rank's process: "gone", "T" if it is stopped, "runs"; None if it is on another machine."""
    if not _THIS_PROCESS["system"] or state["system"] != _THIS_PROCESS["system"]:
        return None
    try:
        letter = Path(f"/proc/{state['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "gone"
    return "gone" if letter in "ZX" else "T" if letter in "Tt" else "runs"


def _failures(state: Mapping[str, Any]) -> int:
    """How many calls of a rank have failed."""
    return int(state["begun"] - state["done"] - (state["call"] is not None))


def _is_of_this_world(store: Any) -> bool:
    return dist.is_initialized() and default_store() is store


def _look(watch: "weakref.ref[CallWatch]", stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        call_watch = watch()
        if call_watch is None:
            return
        if call_watch.is_of_this_world:
            with suppress(RuntimeError, KeyError):  # the latter where the world is set aside meanwhile
                call_watch.look()
        del call_watch


def _end(
    stop: threading.Event, thread: threading.Thread, store: Any, of_world: Any, rank: int, written: Mapping[str, Any]
) -> None:
    """The last words of a rank: it ends, or its Engine is gone."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(2.0)  # it must not use the store while the interpreter is finalized
    if dist.is_initialized() and not _is_of_this_world(of_world):  # another world has begun, and nobody reads this one
        return
    with suppress(RuntimeError):
        store.set_timeout(_LAST_WORDS)  # where the world is over, its store may be gone
        store.set(str(rank), json.dumps({**written, "ended": True}))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"

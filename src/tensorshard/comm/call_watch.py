"""Tells the ranks of a world at once when one of them has failed, has ended, or makes another call.

A rank that waits in a collective for one that will not come would learn of it when the timeout of the group is over,
and not why. So each rank keeps, in memory, which of its calls are done and which is under way. A thread looks at that
every second. What has not changed for two seconds goes to the world's store, so a quick step costs no message. A rank
that has waited in a collective for three seconds reads what the others have written there.
"""

import json
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensorshard.comm.world import world
from tensorshard.torch_private.process_groups import backend_name, default_store, place_of_wait

logger = logging.getLogger("tensorshard")

_UNCHANGED = 2  # looks, until a state is written down
_WAITS = 3  # looks, until the others' states are read
_SAYS = 10  # looks, until a rank that waits for another one says so
_CAUSE_CHARACTERS = 500
_TAG = 0x7453_6842  # of a message that nobody sends
_MANY_RANKS = 64  # above, states are read less often

# Gloo's and NCCL's words when another rank did not come, or is gone.
_SIGNS = (
    "Timed out waiting", "timeout caused pair closure", "Connection closed by peer", "Connection reset by peer",
    "gloo/transport", "NCCL error",
)  # fmt: skip


def is_of_collective(error: BaseException) -> bool:
    """Whether `error` says that a collective could not end."""
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS)


class CallWatch:
    """What this rank calls, compared with what the others do. One for each Engine; all ranks make it together.

    Args:
        groups: those whose collectives the calls make. The first is of all ranks.
        device: of the tensors that are sent.
        internal: exceptions that leave a call on all ranks and are no failures.
        pause: seconds between two looks.
    """

    def __init__(
        self,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        *,
        internal: type[Exception] | tuple[()] = (),
        pause: float = 1.0,
    ) -> None:
        self.verdict: str | None = None
        """Why this rank's collectives were ended, or will not end."""
        self._groups, self._device, self._internal = groups, device, internal
        self._rank, self._size = groups[0].rank(), groups[0].size()
        self._done = 0  # calls that were made, on all ranks the same ones
        self._begun = 0  # those that failed as well: ranks that all fail may try again
        self._call: str | None = None
        self._failed: str | None = None
        self._thread = 0  # that makes the call
        self._looks = 0  # in a row that saw no change
        self._seen: Any = None
        self._waits = 0  # looks in a row that saw the same wait
        self._waits_at: Any = None
        self._said = False
        self._store: Any = None
        if self._size == 1 or dist.get_backend(groups[0]) == "fake" or world().is_simulated:
            return
        store = default_store()
        made = store.add(f"tensorshard/watches/{self._rank}", 1)  # the same number on all ranks
        self._store = dist.PrefixStore(f"tensorshard/calls/{made}", store.clone())  # type: ignore[attr-defined]  # as threads need it; torch's types lack it
        self._write()
        stop = threading.Event()
        thread = threading.Thread(target=_look, args=(weakref.ref(self), stop, pause), daemon=True, name="call watch")
        thread.start()
        weakref.finalize(self, _end, stop, thread, self._store, self._rank)

    @contextmanager
    def calling(self, call: str) -> Iterator[None]:
        """The context of a call that all ranks make, the same number of times and in the same order."""
        if self._store is None or self._call is not None:
            yield
            return
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

    def explain(self, call: str) -> str | None:
        """Why a collective of the `call` that just failed has failed, as far as other ranks have said."""
        if self._store is None:
            return None
        for _ in range(4):
            if self.verdict is None:
                threading.Event().wait(0.25)  # for what another rank is writing
                self.verdict = self._cause(self._read(), call)
        return self.verdict

    def look(self) -> None:
        """What the thread does, every second."""
        now = (self._done, self._begun, self._call, self._failed)
        self._looks = self._looks + 1 if now == self._seen else 0
        if now != self._seen:
            self._seen, self._said = now, False
        if self._looks == _UNCHANGED:
            self._write()
        if self._call is None or self._looks < _UNCHANGED or self.verdict is not None:
            return
        place = place_of_wait(self._thread)
        self._waits = self._waits + 1 if place is not None and place == self._waits_at else 0
        self._waits_at = place
        if self._waits < _WAITS or self._waits % (1 + self._size // _MANY_RANKS):
            return
        call, states = self._call, self._read()
        cause = self._cause(states, call)
        if cause is not None and now == (self._done, self._begun, self._call, self._failed):
            self.verdict = cause
            if not self._end_collectives():
                logger.error("rank %d waits in %s, and will do so until the timeout: %s", self._rank, call, cause)
        elif cause is None and self._waits >= _SAYS and not self._said:
            self._say_who_is_missing(call, states)

    def _say_who_is_missing(self, call: str, states: Mapping[int, Any]) -> None:
        missing = [rank for rank, state in states.items() if state["done"] == self._done and state["call"] is None]
        waiting = [rank for rank, state in states.items() if state["done"] == self._done and state["call"] == call]
        if missing and self._rank == min([*waiting, self._rank]):
            self._said = True
            logger.warning(
                "rank %d waits in %s for %s, which %s not called it; every rank calls it",
                self._rank,
                call,
                _listed(missing),
                "has" if len(missing) == 1 else "have",
            )

    def _cause(self, states: Mapping[int, Any], call: str) -> str | None:
        """Why a collective of `call` cannot end, by the others' `states`; None if that is not known."""
        for rank, state in states.items():
            now = state["done"] == self._done and state["begun"] >= self._begun
            if state["failed"] is not None and now:
                return f"rank {rank} failed in {state['failed']}"
        for rank, state in states.items():
            now = (state["done"], state["begun"]) == (self._done, self._begun)
            if state["call"] not in (None, call) and now:
                return (
                    f"rank {rank} called {state['call']} while rank {self._rank} called {call}; every rank makes the "
                    f"same calls in the same order, also those that only one rank needs (no `if rank == 0` around them)"
                )
        for rank, state in states.items():
            if state["ended"]:
                return f"rank {rank} has ended, or let go of its Engine"
        return None

    def _write(self) -> None:
        state = {"done": self._done, "begun": self._begun, "call": self._call, "failed": self._failed, "ended": False}
        with suppress(RuntimeError):  # the store is gone
            self._store.set(str(self._rank), json.dumps(state))

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


def _look(watch: "weakref.ref[CallWatch]", stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        found = watch()
        if found is None:
            return
        with suppress(RuntimeError):
            found.look()
        del found


def _end(stop: threading.Event, thread: threading.Thread, store: Any, rank: int) -> None:
    """The last words of a rank: it ends, or its Engine is gone."""
    stop.set()
    if thread is not threading.current_thread():
        thread.join(2.0)  # it must not use the store while the interpreter is finalized
    with suppress(RuntimeError):
        state = json.loads(store.get(str(rank)))
        store.set(str(rank), json.dumps({**state, "ended": True}))


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"

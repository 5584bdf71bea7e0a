"""What a CPU rank does with memory that its tensors free: it keeps it for the next step, if there is room for that.

Memory that is kept in the heap saves a tenth of a step or more, since the system need not clear it anew. But holes
between tensors cannot always be used again: small GPTs held 1.1 to 1.7 times as much. So the first steps give
everything back at once. They show how much a step needs, and only then is it known whether there is room.
"""

import logging

from tensorshard.host.allocator import KEEP_MOST, KEEP_SMALL, give_back_free_memory, map_tensors_from, set_for_training
from tensorshard.host.memory import held_memory, room_for_rank

logger = logging.getLogger("tensorshard")

_ROOM = 2.0  # a rank keeps what is freed if it may hold so many times its peak
_NO_ROOM = 1.1  # below this, it gives it back again
_FIRST, _EVERY = 8, 8  # it looks at the memory after each of the first calls, then after every so many

_SPARING = 256 << 10  # bytes of tensors that are given back at once. Smaller ones leave no holes to speak of


class HostHeap:
    """Sets glibc's allocator for the steps of one Engine, from what this process holds and what is available to it.

    Making it sets the allocator to spare memory. If the user has set glibc's variables, they stand.

    Args:
        spares_memory: whether only small tensors are kept, as plans do that spare memory.
        keeps_nothing: whether nothing is kept, as where parameters are offloaded.
        ranks_here: how many ranks share this machine's memory.
        say: whether to log that memory is scarce.
    """

    def __init__(
        self, ranks_here: int, *, spares_memory: bool = False, keeps_nothing: bool = False, say: bool = False
    ) -> None:
        self._keeping_from = KEEP_SMALL if spares_memory else KEEP_MOST
        self._ranks_here = ranks_here
        self._say = say
        self._calls = 0
        self._is_set = set_for_training(_SPARING) and not keeps_nothing
        self.keeps = False

    def after_call(self) -> None:
        """Looks at the memory after each of the first calls that ran the model (steps, evaluations), and now and then
        later."""
        self._calls += 1
        if not self._is_set or (self._calls > _FIRST and self._calls % _EVERY):
            return
        held, room = held_memory(), room_for_rank(self._ranks_here)
        if held is None or room is None:
            return
        times = room / held.peak
        if self.keeps and times < _NO_ROOM:
            self.keeps = False
            map_tensors_from(_SPARING)
            give_back_free_memory()
        elif not self.keeps and times >= _ROOM:
            self.keeps = True
            map_tensors_from(self._keeping_from)
        if not self.keeps and self._calls > 1 and self._say:
            self._say = False
            logger.info(
                "memory is scarce: this rank held %d MiB of the %d MiB that it can have; so memory that is freed goes "
                "back to the system at once, and steps take longer",
                held.peak >> 20,
                room >> 20,
            )

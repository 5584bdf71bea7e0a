"""One log file a rank: ``rank0.log``, ``rank1.log`` and so on."""

import logging
from pathlib import Path
from types import TracebackType

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


class RankLog:
    """While open, what is logged to "tensorshard" also goes to this rank's file. A context manager.

    Args:
        directory: the run's directory. It is made if it is not there, as on another machine with its own disks.
        rank: this process's global rank.
        console: a further handler, for what a person should see at once; only rank 0 has one.
    """

    def __init__(self, directory: str | Path, rank: int, console: logging.Handler | None = None) -> None:
        self.path = Path(directory) / f"rank{rank}.log"
        self._handlers: list[logging.Handler] = [] if console is None else [console]

    def __enter__(self) -> "RankLog":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(self.path, encoding="utf-8")
        to_file.setFormatter(logging.Formatter(_FORMAT))
        self._handlers.append(to_file)
        logger = logging.getLogger("tensorshard")
        self._level, self._propagate = logger.level, logger.propagate
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
        for handler in self._handlers:
            logger.addHandler(handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logger = logging.getLogger("tensorshard")
        if error is not None:
            logger.debug("the run ended with an error", exc_info=error)
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        logger.setLevel(self._level)
        logger.propagate = self._propagate

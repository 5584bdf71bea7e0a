"""Lets processes compute in turn: each waits until it is told to go on, and says when it is done."""

import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_ADDRESS, _NAME = "BENCHMARK_TURNS", "BENCHMARK_CONTENDER"
_GO, _DONE = b"g", b"d"
_POLL_SECONDS = 0.5


class TurnsEndedError(RuntimeError):
    """A process that takes turns ended before its last one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a process of {name} ended before its last turn")
        self.name = name


class Turns:
    """The side that says whose turn it is.

    Args:
        folder: where its socket is made.
        processes: for each name, how many processes compute together when it is that name's turn.
    """

    def __init__(self, folder: Path, processes: Mapping[str, int]) -> None:
        self._path = folder / "turns"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self._path))
        self._server.listen(sum(processes.values()))
        self._server.settimeout(_POLL_SECONDS)
        self._missing = dict(processes)
        self._connections: dict[str, list[socket.socket]] = {name: [] for name in processes}

    def environment(self, name: str) -> dict[str, str]:
        """The variables that tell a process of `name` where to wait for its turns."""
        return {_ADDRESS: str(self._path), _NAME: name}

    def connect(self, has_ended: Callable[[str], bool]) -> None:
        """Waits until every process has called :func:`my_turn`.

        Args:
            has_ended: whether the processes of a name have ended already.

        Raises:
            TurnsEndedError: the processes of a name have ended, and some of them never asked for a turn.
        """
        while any(self._missing.values()):
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                for name, missing in self._missing.items():
                    if missing and has_ended(name):
                        raise TurnsEndedError(name) from None
                continue
            name = connection.makefile().readline().rstrip("\n")
            self._connections[name].append(connection)
            self._missing[name] -= 1

    def give(self, name: str) -> None:
        """Gives `name` a turn, and waits until all of its processes are done.

        Raises:
            TurnsEndedError: one of its processes has ended.
        """
        try:
            for connection in self._connections[name]:
                connection.sendall(_GO)
            done = [connection.recv(1) for connection in self._connections[name]]
        except OSError:
            raise TurnsEndedError(name) from None
        if any(answer != _DONE for answer in done):
            raise TurnsEndedError(name)

    def close(self) -> None:
        """Ends the processes' connections. Those that still wait for a turn fail."""
        for connections in self._connections.values():
            for connection in connections:
                connection.close()
        self._server.close()


@contextmanager
def turns(processes: Mapping[str, int]) -> Iterator[Turns]:
    """A :class:`Turns` in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        opened = Turns(Path(folder), processes)
        try:
            yield opened
        finally:
            opened.close()


def in_rotation(names: Sequence[str], times: int) -> Iterator[str]:
    """Every name `times` times. The first of a round is the last of the next."""
    order = list(names)
    for _ in range(times):
        yield from order
        order = [*order[1:], order[0]]


class _Waiting:
    """The side that waits. Without an address it never waits."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        if address := os.environ.get(_ADDRESS):
            self._connection = socket.socket(socket.AF_UNIX)
            self._connection.connect(address)
            self._connection.sendall(f"{os.environ[_NAME]}\n".encode())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._connection is not None and self._connection.recv(1) != _GO:
            raise TurnsEndedError(os.environ[_NAME])
        yield
        if self._connection is not None:
            self._connection.sendall(_DONE)


def my_turn() -> _Waiting:
    """A context manager's maker: ``with turn():`` waits for this process's next turn, and ends it.

    In a process that nobody gives turns, it does nothing.
    """
    return _Waiting()

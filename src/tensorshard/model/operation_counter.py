"""How far a run has come: how many of torch's functions it has called."""

from typing import Any

from torch.overrides import TorchFunctionMode


class OperationCounter(TorchFunctionMode):
    """Counts the calls of torch's functions within it.

    Attributes:
        operations: how many there were so far. One that failed counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))

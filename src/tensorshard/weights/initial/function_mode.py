"""Python functions on tensors that a constructor calls, and that a dispatch mode cannot see or gets wrong."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tensorshard.torch_private.fake_tensors import FakeTensor
from tensorshard.torch_private.modules import truncated_normal_replaced
from tensorshard.torch_private.tensors import mark_as_parameter, storage_address
from tensorshard.weights.initial.recorder import OperationRecorder, UnrecordableError

MEMORY_READS = frozenset({torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr})


class TensorMethodRecorder(TorchFunctionMode):
    """Makes copies of tensors from recorded operations, and refuses reads of memory. Entered inside the recorder.

    `Tensor.__deepcopy__` (`nn.TransformerEncoder` copies its layer) would copy the mode that a fake tensor
    belongs to, and so free some of that mode's memory twice.
    """

    def __init__(self, recorder: OperationRecorder, internal: frozenset[str]) -> None:
        """
        Args:
            recorder: Is told of reads.
            internal: The names in a fake tensor's `__dict__` that are not the user's.
        """
        super().__init__()
        self._recorder = recorder
        self._internal = internal

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and args[0].is_leaf:
            return self._deepcopy(*args, **(kwargs or {}))
        if func in MEMORY_READS and isinstance(args[0], FakeTensor):
            self._recorder.failure = f"reads a tensor's memory (torch.Tensor.{func.__name__})"
            raise UnrecordableError(self._recorder.failure)
        return func(*args, **(kwargs or {}))

    def _deepcopy(self, tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        """A copy of `tensor`. As in torch, copies share memory where their originals do."""
        if id(tensor) in memo:
            return memo[id(tensor)]
        storage = tensor.untyped_storage()
        address = ("storage", storage_address(storage))
        with torch.no_grad():
            if address not in memo:
                elements = storage.nbytes() // tensor.itemsize
                memo[address] = tensor.as_strided((elements,), (1,), 0).clone()
            copied = memo[address].view(tensor.dtype)
            copied = copied.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        copied.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            mark_as_parameter(copied)
        for name, value in vars(tensor).items():
            if name not in self._internal:
                setattr(copied, name, copy.deepcopy(value, memo))
        memo[id(tensor)] = copied
        return copied


def truncated_normal_recorded(recorder: OperationRecorder) -> AbstractContextManager[None]:
    """Makes `nn.init.trunc_normal_` one operation. From torch 2.12 on it reads the numbers that it has drawn."""

    def recorded(sample: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            recorder.log_fill(sample, tensor, *args, **kwargs)
            return tensor

        return fill

    return truncated_normal_replaced(recorded)

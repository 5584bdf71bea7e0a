"""Storages: when they are resized."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def watched_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Inside, `resized` is called after each ``UntypedStorage.resize_``.

    Why: ZeRO 3 frees gathered parameters by making their storages empty, which no dispatch mode sees.

    Checked: torch 2.11 and 2.13, in which ``torch.distributed.fsdp`` resizes storages so.

    Public way: none.
    """
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, *args: Any) -> Any:
        result = original(storage, *args)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

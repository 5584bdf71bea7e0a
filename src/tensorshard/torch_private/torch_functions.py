"""How torch's functions treat classes that derive from ``torch.Tensor``.

`functions_off`: a context in which ``__torch_function__`` of such classes is not called.

`NOT_CALLED`: as a class's ``__torch_function__``, it makes functions treat its tensors as plain ones, at full speed.

Why: parameters that wait for values are of such a class, and the code that brings the values uses them as they are.

Checked: torch 2.13.

Public way: ``torch._C.DisableTorchFunctionSubclass`` is named in torch's notes on extending it, with its underscore.
"""

from torch._C import DisableTorchFunctionSubclass as functions_off
from torch._C import _disabled_torch_function_impl as NOT_CALLED

__all__ = ["NOT_CALLED", "functions_off"]

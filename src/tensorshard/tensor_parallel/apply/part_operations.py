"""Functions of a tensor that do not need its values, or that can be done on a part of it."""

from typing import Any

import torch

from tensorshard.torch_private.tensors import object_attributes

_T: Any = torch.Tensor


OF_THE_OBJECT = frozenset(
    [
        *object_attributes(),
        *(_T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook, _T.retain_grad, _T.backward),
        *(_T.data_ptr, _T.untyped_storage, _T.storage, _T.storage_offset, _T.is_shared, _T.is_pinned, _T.get_device),
        *(_T.is_floating_point, _T.is_complex, _T.element_size, _T.is_inference, torch.is_floating_point),
        *(torch.is_complex, torch.autograd.backward, torch.is_inference, _T.is_signed),
    ]
)
"""They ask for the tensor as an object, its type or its place in autograd's graph. A part answers as the whole does."""

OF_SHAPES = frozenset(
    [
        *(_T.shape.__get__, _T.ndim.__get__, _T.nbytes.__get__, _T.itemsize.__get__),
        *(_T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.__len__, torch.numel),
        *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like),
        *(_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor),
    ]
)
"""They need the shape, type and device only."""

SET_DATA = _T.data.__set__
REPRESENTATION = _T.__repr__

ELEMENTWISE = frozenset(
    [
        *(_T.zero_, _T.fill_, _T.copy_, _T.add_, _T.sub_, _T.mul_, _T.div_, _T.neg_, _T.abs_, _T.sign_, _T.pow_),
        *(_T.clamp_, _T.clamp_min_, _T.clamp_max_, _T.clip_, _T.sqrt_, _T.exp_, _T.tanh_, _T.sigmoid_, _T.relu_),
        *(_T.lerp_, _T.addcmul_, _T.addcdiv_, _T.nan_to_num_, _T.round_, _T.masked_fill_, _T.reciprocal_, _T.rsqrt_),
        *(_T.__iadd__, _T.__isub__, _T.__imul__, _T.__itruediv__),
    ]
)
"""They change a tensor in place, each element by itself."""

WITHOUT_GRAPH = frozenset([_T.data.__get__, _T.detach, torch.detach])
"""They return the tensor out of autograd's graph."""

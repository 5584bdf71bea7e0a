"""Names of torch's functions, by what they do with a sharded parameter."""

from tensorshard.torch_private.tensors import QUESTIONS

# What does not read values, or is done for the shards.
NATIVE = frozenset(
    [
        *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_same_size", "is_pinned"),
        *("is_shared", "data_ptr", "untyped_storage", "storage", "get_device", "has_names", "requires_grad_"),
        *("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "detach", "detach_"),
        *("backward", "__len__", "__repr__", "__hash__", "__format__", "__dir__", "__reduce_ex__"),
        *("__deepcopy__", "zeros_like", "ones_like", "empty_like", "full_like", "is_tensor", "is_storage"),
        *("result_type", "can_cast", "promote_types", "typename", "numel_", "share_memory_", "pin_memory"),
        *("is_inference", "__instancecheck__"),
        *QUESTIONS,
    ]
)
# What gives Python's or NumPy's values.
VALUES = frozenset(
    [
        *("tolist", "numpy", "item", "__array__", "__bool__", "__float__", "__int__", "__index__"),
        *("__complex__", "__contains__", "__iter__", "equal", "allclose", "is_nonzero"),
    ]
)
DRAWN = frozenset(
    [
        *("rand_like", "randn_like", "randint_like", "new_empty", "new_zeros", "new_ones", "new_full"),
        *("new_tensor",),
    ]
)
RANDOM = frozenset(
    [
        *("normal_", "uniform_", "trunc_normal_", "bernoulli_", "random_", "exponential_", "cauchy_"),
        *("log_normal_", "geometric_", "dropout_", "orthogonal_", "kaiming_uniform_", "kaiming_normal_"),
        *("xavier_uniform_", "xavier_normal_", "sparse_"),
    ]
)
# What gives a view of its argument, through which it may be written.
VIEWS = frozenset(
    [
        *("view", "view_as", "reshape", "reshape_as", "select", "__getitem__", "narrow", "transpose"),
        *("permute", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind", "diagonal"),
        *("swapaxes", "swapdims", "movedim", "t", "ravel", "tensor_split", "hsplit", "vsplit", "unsafe_chunk"),
        *("unsafe_split", "as_strided", "split_with_sizes", "adjoint"),
    ]
)
COMPUTED_ATTRIBUTES = frozenset(["T", "mT", "H", "mH", "real", "imag"])
# What writes each element by itself, named without underscores.
ELEMENTWISE = frozenset(
    [
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "iadd", "isub", "imul"),
        *("itruediv", "ipow", "pow", "copy", "zero", "fill", "clamp", "clip", "clamp_min", "clamp_max", "lerp"),
        *("addcmul", "addcdiv", "neg", "negative", "abs", "absolute", "sign", "sqrt", "rsqrt", "square", "exp"),
        *("log", "sigmoid", "tanh", "relu", "reciprocal", "round", "floor", "ceil", "trunc", "nan_to_num"),
        *("masked_fill", "floor_divide", "remainder", "fmod"),
    ]
)

"""Finds a model's blocks. Sharding units, recomputation and compilation all use the same blocks.

Also here: layers of unusual form: transposed linear layers, and stacked experts.
"""

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from tensorshard.common.words import kind_of
from tensorshard.model.forwards import Forward, Role, has_users_forward, wrap_forward
from tensorshard.model.tensors import tensor_leaves
from tensorshard.torch_private.modules import own_parameters

# A member of a list is a stage, not a block, if at least this share of its parameters is in blocks of its own lists.
_STAGE_SHARE = 0.5


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of `model`, by name, in the order in which they are registered.

    Blocks are the members of a ModuleList, ModuleDict or Sequential of which at least two are of one class and hold
    parameters. A list that is a member of a list is searched too, since nobody calls it. So is a stage (of a ResNet, a
    Swin Transformer, a U-Net), which holds little but lists of blocks. If a model has no such lists of composite
    modules (a plain Sequential of layers), its layers are the blocks.
    """
    blocks = _search(model, "", composite=True)
    return blocks or _search(model, "", composite=False)


def select_modules(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """The modules whose names match one of `patterns` (globs as in ``layers.*``), in registration order.

    Raises:
        ValueError: a pattern matches no module, or only lists, which are never called themselves.
    """
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        matched = [name for name in named if fnmatchcase(name, pattern)]
        if not matched:
            examples = ", ".join(list(find_blocks(model))[:3]) or ", ".join(list(named)[:3])
            raise ValueError(f"no module of the model is called {pattern!r}; its modules are such as {examples}")
        if all(_is_mere_list(named[name]) for name in matched):
            raise ValueError(
                f"{pattern!r} is {kind_of(named[matched[0]])}, which is never called itself; name its members "
                f"({pattern}.*)"
            )
    return {
        name: module
        for name, module in named.items()
        if not _is_mere_list(module) and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def named_parts(module: nn.Module) -> dict[str, nn.Module]:
    """The children of `module` by name, without parametrizations, which count as part of the module itself."""
    parametrized = parametrize.is_parametrized(module)
    return {n: child for n, child in module.named_children() if not (parametrized and n == "parametrizations")}


def _search(module: nn.Module, prefix: str, composite: bool) -> dict[str, nn.Module]:
    blocks: dict[str, nn.Module] = {}
    children = dict(_elements(module)) if _is_list(module) else named_parts(module)
    members = _members(children, composite) if _is_list(module) else set()
    for name, child in children.items():
        path = f"{prefix}{name}"
        inner = _search(child, f"{path}.", composite)
        if name in members and not _is_stage(child, path, inner):
            blocks[path] = child
        else:
            blocks.update(inner)
    return blocks


def _elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The members of a list. A member that is a list and cannot be called is replaced by its own members."""
    for name, child in module.named_children():
        if _is_mere_list(child):
            yield from _elements(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _members(children: dict[str, nn.Module], composite: bool) -> set[str]:
    """Names of the members of a list that qualify as blocks."""
    candidates = {
        name: child
        for name, child in children.items()
        if any(True for _ in child.parameters()) and (named_parts(child) or not composite)
    }
    # torch gives each parametrized module a class of its own.
    repeated = Counter(parametrize.type_before_parametrizations(child) for child in candidates.values())
    return set(candidates) if any(count >= 2 for count in repeated.values()) else set()


def _is_stage(module: nn.Module, path: str, inner: dict[str, nn.Module]) -> bool:
    """Whether `module` is a list of the blocks `inner` and little more.

    That is: all its children are lists; or it holds lists that only its own forward can run, with most of its
    parameters.
    """
    children = dict(module.named_children())
    lists = {name: child for name, child in children.items() if _is_list(child)}
    if not any(block.startswith(f"{path}.{name}.") for block in inner for name in lists):
        return False
    if len(lists) == len(children):
        return True
    mere = [f"{path}.{name}." for name, child in lists.items() if _is_mere_list(child)]
    within = sum(p.numel() for name, block in inner.items() if name.startswith(tuple(mere)) for p in block.parameters())
    return within >= _STAGE_SHARE * sum(p.numel() for p in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_mere_list(module: nn.Module) -> bool:
    """Whether it has no forward, so that only its members are ever called."""
    return type(module).forward is nn.Module.forward


def find_experts(block: nn.Module) -> dict[str, nn.Module]:
    """The modules in `block` that hold stacked experts: two or more parameters of their own, [experts, a, b] each."""
    experts = {}
    for name, module in block.named_modules():
        shapes = [p.shape for p in own_parameters(module).values()]
        stacked = [shape for shape in shapes if len(shape) == 3]
        counts = {shape[0] for shape in stacked}
        if len(stacked) > 1 and len(counts) == 1 and counts != {1} and len(list(module.parameters())) == len(shapes):
            experts[name] = module
    return experts


def use_placeholder_outputs(model: nn.Module) -> None:
    """Lets `model` run on fake tensors. These have no values, so nothing says which experts the tokens go to.

    Experts that are given indices return a placeholder of the shape and type of their first input, made of all their
    inputs.
    """
    for module in find_experts(model).values():
        wrap_forward(module, Role.FAKE_EXPERTS, partial(_placeholder_output, module))


def _placeholder_output(module: nn.Module, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    tensors = tensor_leaves((args, kwargs))
    if all(tensor.is_floating_point() for tensor in tensors):
        return forward(*args, **kwargs)
    first, *others = [tensor for tensor in tensors if tensor.is_floating_point()]
    return sum(
        (t.sum().to(first.dtype) for t in (*others, *own_parameters(module).values()) if t is not None), start=first
    )


def is_transposed(module: nn.Module) -> bool:
    """Whether `module` computes as the ``Conv1D`` of transformers: a linear layer whose weight is [inputs, outputs]."""
    forward = type(module).forward
    home, name = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return name == "Conv1D.forward" and home.startswith("transformers.") and not has_users_forward(module)

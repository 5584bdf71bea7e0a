"""What a model's blocks are. One notion, used by sharding units, recomputation and compilation alike."""

from collections import Counter
from fnmatch import fnmatchcase

from torch import nn

# A block most of whose parameters sit in a list of blocks of its own is a mere container of these (a ResNet stage).
_CONTAINER_SHARE = 0.9


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated parts of `model`, by name, in the order in which they are registered.

    Blocks are the members of a ModuleList, ModuleDict or Sequential of which at least two are of one class and hold
    parameters. Of lists inside lists the outermost counts, unless its members are hardly more than a list themselves.
    A model without such lists of composite modules (a plain Sequential of layers) has its layers as blocks.
    """
    blocks = _search(model, "", composite=True)
    return blocks or _search(model, "", composite=False)


def select_modules(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """The modules whose names match one of `patterns` (globs as in ``layers.*``), in registration order.

    Raises:
        ValueError: a pattern that matches no module.
    """
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            examples = ", ".join(list(find_blocks(model))[:3]) or ", ".join(list(named)[:3])
            raise ValueError(f"no module of the model is called {pattern!r}; its modules are such as {examples}")
    return {n: m for n, m in named.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}


def _search(module: nn.Module, prefix: str, composite: bool) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    members = _members(module, composite)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        inner = _search(child, f"{path}.", composite)
        if name in members and not _is_container(child, inner):
            found[path] = child
        else:
            found.update(inner)
    return found


def _members(module: nn.Module, composite: bool) -> set[str]:
    """Names of the children of a list that qualify as blocks."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return set()
    candidates = {
        name: child
        for name, child in module.named_children()
        if any(True for _ in child.parameters()) and (any(True for _ in child.children()) or not composite)
    }
    repeated = Counter(type(child) for child in candidates.values())
    return set(candidates) if any(count >= 2 for count in repeated.values()) else set()


def _is_container(module: nn.Module, inner: dict[str, nn.Module]) -> bool:
    if not inner:
        return False
    total = sum(p.numel() for p in module.parameters())
    within = sum(p.numel() for block in inner.values() for p in block.parameters())
    return within >= _CONTAINER_SHARE * total

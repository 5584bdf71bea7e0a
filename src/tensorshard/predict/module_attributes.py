"""Notes the attributes of a block's modules before a trial, and puts back those that the trial changed."""

from typing import Any

from torch import nn

from tensorshard.torch_private.modules import TABLES

Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]
"""For each module: its attributes, and the contents of those that are lists, dicts or sets."""


def note_attributes(block: nn.Module) -> Attributes:
    """The attributes of the block's modules, and the contents of those that are lists, dicts or sets."""
    found = []
    for module in block.modules():
        held = dict(vars(module))
        contents = {name: _content(value) for name, value in held.items() if isinstance(value, list | dict | set)}
        found.append((module, held, contents))
    return found


def _content(value: Any) -> Any:
    return list(value.items()) if isinstance(value, dict) else list(value)


def restore_attributes(attributes: Attributes) -> str:
    """Puts back the attributes that were changed. Returns the name of one of them; "" if none was."""
    changed = ""
    for module, held, contents in attributes:
        now = vars(module)
        if now.keys() != held.keys() or any(now[name] is not value for name, value in held.items()):
            changed = next((n for n in {**now, **held} if now.get(n) is not held.get(n)), changed)
            now.clear()
            now.update(held)
        for name, content in contents.items():
            if name not in TABLES and not _same(_content(held[name]), content):
                changed = name
    return changed


def _same(now: list[Any], before: list[Any]) -> bool:
    def flat(items: list[Any]) -> list[Any]:
        return [part for item in items for part in (item if isinstance(item, tuple) else (item,))]

    first, second = flat(now), flat(before)
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))

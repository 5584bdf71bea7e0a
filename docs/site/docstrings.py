"""Reads the docstrings for the site: what they refer to, and the arguments that they describe together."""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Alias, Class, Extension, Function, Module, Object

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([^`]+)`")
_SECTION = re.compile(r"( *)(?:Args|Attributes):$")
_ITEM = re.compile(r"( *)(\w+(?:, \w+)*): (.*)")


class Docstrings(Extension):
    """Sphinx's roles, as :func:`parallelize`, become links, which fail the build where they lead nowhere; an argument
    that is described together with others, as ``inputs, targets: a batch``, gets an entry of its own."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        if pkg.name == "tensorshard":
            _read(pkg, pkg)


def _read(item: Object, package: Module) -> None:
    if item.docstring is not None:
        names = _names(item)
        lines = item.docstring.value.splitlines()
        text = "\n".join(_separate_arguments(lines, names)) if names else item.docstring.value
        item.docstring.value = _ROLE.sub(lambda role: f"[`{role[1]}`][{_full_name(role[1], item, package)}]", text)
    for member in item.members.values():
        if not isinstance(member, Alias):
            _read(member, package)


# -- arguments --


def _names(item: Object) -> set[str]:
    """What an entry may be called: a function's parameters; of a class, those of its constructor and its attributes."""
    if isinstance(item, Class):
        constructor = item.members.get("__init__")
        return set(item.members) | (_names(constructor) if isinstance(constructor, Function) else set())
    return {parameter.name for parameter in item.parameters} if isinstance(item, Function) else set()


def _separate_arguments(lines: list[str], names: set[str]) -> Iterator[str]:
    indent: int | None = None  # of the section's entries; None outside of one
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        section = _SECTION.match(line)
        if section:
            indent = len(section[1]) + 4
        elif indent is not None and line.strip() and _depth(line) < indent:
            indent = None
        item = _ITEM.fullmatch(line) if indent is not None and _depth(line) == indent else None
        if item is None:
            yield line
            continue
        words = [item[3]]
        while position < len(lines) and lines[position].strip() and _depth(lines[position]) > len(item[1]):
            words.append(lines[position].strip())
            position += 1
        yield from _entries(item[1], item[2], " ".join(words), names)


def _entries(indent: str, together: str, words: str, names: set[str]) -> Iterator[str]:
    """One entry for each argument. ``rank: its number. stage: of the pipeline.`` has two, too."""
    pieces = re.split(r"(?<=[.;]) (?=(\w+): )", words)
    texts = dict.fromkeys(together.split(", "), pieces[0])
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if name in names and name not in texts:
            texts[name] = text.removeprefix(f"{name}: ")
        else:
            last = list(texts)[-1]
            texts[last] += f" {text}"
    for name, text in texts.items():
        yield f"{indent}{name}: {text}"


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


# -- references --


def _full_name(name: str, scope: Object, package: Module) -> str:
    """The name under which the site has an object, as seen from the docstring of `scope`."""
    first, *rest = name.split(".")
    if first == package.name:
        return _defined(rest, package)
    place: Object | None = scope
    while place is not None:
        if place.is_module:
            if first in place.imports or first in place.members:
                return _defined([first, *rest], place)
        elif first in place.all_members:
            return ".".join([place.path, first, *rest])
        elif first == place.name:
            return ".".join([place.path, *rest])
        place = place.parent
    return name


def _defined(names: list[str], module: Module) -> str:
    """Follows `names` from a module to where they lead; an import comes before a submodule of the same name."""
    for index, name in enumerate(names):
        if name in module.imports:
            return ".".join([module.imports[name], *names[index + 1 :]])
        member = module.members.get(name)
        if not isinstance(member, Module):
            return ".".join([module.path, *names[index:]])
        module = member
    return module.path

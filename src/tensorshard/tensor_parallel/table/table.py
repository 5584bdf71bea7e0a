"""The table: globs of names, each with the style of what it matches."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from tensorshard.common.paths import read_utf8
from tensorshard.common.words import join_names, kind_of
from tensorshard.tensor_parallel.table.layer_kinds import as_splittable, is_multihead_attention
from tensorshard.tensor_parallel.table.layer_styles import Style
from tensorshard.tensor_parallel.table.layouts import SequenceSplit
from tensorshard.tensor_parallel.table.styles import CLASSES, COLWISE_GATHER, HEADS, ROWWISE, VOCAB, parse_style


@dataclass(frozen=True)
class TensorTable:
    """A tensor-parallel table. It reads like ``{"layers.*.q_proj": colwise, "layers.*.o_proj": rowwise, ...}``.

    Names are those of modules, or of parameters of a module that is not split itself. ``*`` matches any characters,
    dots included. An entry without wildcards goes before one that has some. What no entry names is replicated. A layer
    whose weight is tied to a split one is split with it.

    Args:
        entries: glob to style.
    """

    entries: dict[str, Style]

    @classmethod
    def from_dict(cls, table: Mapping[str, str]) -> "TensorTable":
        """A table from plain strings, as ``Plan(tp_plan=...)`` takes it.

        Raises:
            ValueError: a style does not exist or is misspelt. The message names the entry.
            TypeError: a style is no string.
        """
        entries = {}
        for pattern, text in table.items():
            if not isinstance(text, str):
                raise TypeError(f"tp_plan[{pattern!r}] is {text!r}; it must be a style's name, such as 'colwise'")
            try:
                entries[pattern] = parse_style(text)
            except ValueError as error:
                raise ValueError(f"tp_plan[{pattern!r}]: {error}") from None
        return cls(entries)

    def to_dict(self) -> dict[str, str]:
        """The table as plain strings: what :meth:`from_dict` reads."""
        return {pattern: str(style) for pattern, style in self.entries.items()}

    @classmethod
    def from_yaml(cls, path: str | Path) -> "TensorTable":
        """Reads what :meth:`to_yaml` wrote.

        Raises:
            ValueError: the file is no YAML, is no mapping, or is one that :meth:`from_dict` refuses.
        """
        import yaml

        try:
            table = yaml.safe_load(read_utf8(Path(path)))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} cannot be read as YAML: {error}") from error
        if not isinstance(table, dict):
            raise ValueError(f"{path} holds {kind_of(table)}, but a tensor plan maps names to styles")
        return cls.from_dict(table)

    def to_yaml(self, path: str | Path) -> None:
        """Writes the table to `path` as YAML, to be read and edited."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    def describe(self) -> str:
        """Describes the table, one line an entry."""
        width = max((len(pattern) for pattern in self.entries), default=0)
        return "\n".join(f"{pattern:<{width}}  {style}" for pattern, style in self.entries.items())

    def resolve(self, model: nn.Module) -> dict[str, Style]:
        """The style of every module and parameter of `model` that has one, layers with tied weights included.

        Raises:
            ValueError: an entry matches nothing (the message names the nearest), or two globs disagree on a name.
        """
        names = [name for name, _ in model.named_modules() if name or "" in self.entries]  # "" names the module itself
        names += [name for name, _ in model.named_parameters()]
        styles: dict[str, Style] = {}
        for pattern in self.entries:
            if not any(fnmatchcase(name, pattern) for name in names):
                # Another name of what is shared. A tied parameter has a style at each of its places.
                others = {first for name, first in first_names(model).items() if fnmatchcase(name, pattern)}
                if not others:
                    raise ValueError(_nothing_matches(pattern, names))
                styles.update(dict.fromkeys(others, self.entries[pattern]))
        for name in names:
            if name in self.entries:
                styles[name] = self.entries[name]
                continue
            matching = [pattern for pattern in self.entries if fnmatchcase(name, pattern)]
            if len({self.entries[pattern] for pattern in matching}) > 1:
                said = " and ".join(f"{pattern!r} ({self.entries[pattern]})" for pattern in matching)
                raise ValueError(f"{name} is matched by {said}, which disagree: make one of them more specific")
            if matching:
                styles[name] = self.entries[matching[0]]
        return styles | _tied_layers(model, styles) | _output_projections(model, styles)

    def restricted_to(self, name: str, module: nn.Module) -> dict[str, Style]:
        """The styles of what is inside `module`, by the names in it. The model calls the module `name`."""
        prefix = f"{name}." if name else ""
        styles = {}
        inner = [key for key, _ in module.named_modules() if key] + [key for key, _ in module.named_parameters()]
        for key in inner:
            matching = [p for p in self.entries if fnmatchcase(prefix + key, p)]
            if matching:
                styles[key] = self.entries[prefix + key if prefix + key in matching else matching[0]]
        return styles


TensorPlan = TensorTable
"""The name by which ``tensorshard.tensor_parallel`` has always exported it."""


@dataclass(frozen=True)
class VerifiedTable:
    """What the search found.

    Args:
        plan: the table; ``plan.to_yaml(path)`` saves it, ``Plan(tp_plan=plan.to_dict())`` uses it.
        whole: globs of the layers that stay whole, and why.
        alone: globs of the layers that are split one by one, with gathered outputs, and why they are in no pair.
        split_share: share of the model's parameters that is split, 0 to 1.
        kept_share: share of the model's parameters that is split only in memory (``gather``). Every rank computes with
            all of them.
        size: number of ranks that it is for.
        shared_inputs: names of column layers that read the same tensor, which can communicate once for all.
        checked: whether it was checked by numbers.
        sequence: how its blocks compute on parts of a sequence, by name; empty without sequence parallelism.
    """

    plan: TensorTable
    whole: dict[str, str]
    split_share: float
    size: int
    shared_inputs: list[tuple[str, ...]]
    checked: bool = True
    sequence: dict[str, SequenceSplit] = field(default_factory=dict)
    alone: dict[str, str] = field(default_factory=dict)
    kept_share: float = 0.0

    def describe(self) -> str:
        """The table, what stays whole or is split alone and why, and how much is split."""
        how = f"checked by numbers on {self.size} simulated ranks" if self.checked else "given, and not checked"
        lines = [f"tensor-parallel table, {how}:", self.plan.describe()]
        for title, reasons in (("stays whole:", self.whole), ("split alone, its output gathered:", self.alone)):
            if reasons:
                width = max(map(len, reasons))
                lines += [title, *(f"{name:<{width}}  {reason}" for name, reason in reasons.items())]
        kept = f", {self.kept_share:.0%} in memory alone" if self.kept_share else ""
        lines.append(f"{self.split_share:.0%} of the parameters are split{kept}")
        if self.sequence:
            shown = {starred(name): split.describe() for name, split in self.sequence.items()}
            width = max(map(len, shown))
            lines += ["in parts of a sequence:", *(f"{name:<{width}}  {how}" for name, how in shown.items())]
        return "\n".join(lines)


def collapse(styles: Mapping[str, Style], model: nn.Module) -> TensorTable:
    """The shortest table of globs over list indices that gives exactly `styles`."""
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(starred(name), []).append(name)
    entries: dict[str, Style] = {}
    for name, style in styles.items():
        pattern = starred(name)
        equal_blocks = members.get(pattern, [])  # of a tied parameter, one place is among them
        uniform = (
            name in equal_blocks and len(equal_blocks) > 1 and all(styles.get(other) == style for other in equal_blocks)
        )
        # `*` also matches dots. A glob must not match names at another depth that have another style.
        exact = all(styles.get(other) == style for other in names if fnmatchcase(other, pattern))
        entries[pattern if uniform and exact else name] = style
    return TensorTable(entries)


def first_names(model: nn.Module) -> dict[str, str]:
    """For every name of a module or parameter, the name that a table uses. Shared modules have several names."""
    first: dict[nn.Module, str] = {}
    modules = {name: first.setdefault(module, name) for name, module in model.named_modules(remove_duplicate=False)}
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    own = {name: join_names(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in parameters}
    return modules | own


def starred(name: str) -> str:
    """`name` with every index into a list replaced by ``*``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _tied_layers(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the layers that share a weight with one that is split by vocabulary."""
    split = {
        id(module.weight)
        for name, module in model.named_modules()
        if name in styles and styles[name] in (VOCAB, COLWISE_GATHER, CLASSES)
    }
    tied = {}
    for name, module in model.named_modules():
        layer = as_splittable(module)
        if layer is not None and name not in styles and id(module.weight) in split:
            tied[name] = {"embedding": VOCAB, "head": CLASSES}.get(layer.kind, COLWISE_GATHER)
    return tied


def _output_projections(model: nn.Module, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Styles of the ``out_proj`` of attentions whose heads are split.

    Raises:
        ValueError: the table gives another style to one of them.
    """
    implied = {}
    for name, module in model.named_modules():
        if styles.get(name) == HEADS and is_multihead_attention(module):
            projection = join_names(name, "out_proj")
            if styles.get(projection, ROWWISE) != ROWWISE:
                raise ValueError(
                    f"{projection} is {str(styles[projection])!r}, but the heads of {name} are split ('heads'), so "
                    f"that each rank has a part of its input: leave it out, or give it 'rowwise'"
                )
            implied[projection] = ROWWISE
    return implied


def _nothing_matches(pattern: str, names: Iterable[str]) -> str:
    known = list(dict.fromkeys(starred(name) for name in names))
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.4)
    hint = f"the nearest are {', '.join(near)}" if near else f"its names are such as {', '.join(known[:4])}"
    return f"tp_plan[{pattern!r}] matches no module or parameter of the model; {hint}"

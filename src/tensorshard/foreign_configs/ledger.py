"""The ledger: what becomes of each key of another program's config, by a table of rules.

A table maps the path of a key (``"zero_optimization.stage"``; ``*`` stands for one part, a last ``**`` for all that
follows) to a :class:`Rule`. One engine reads every source: it checks types, follows the rules, finds keys that nobody
knows or that stand at the wrong place, and never leaves a key without an entry.
"""

import difflib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

TRANSLATED, NOT_NEEDED, DIFFERENT, REFUSED = "translated", "not needed", "different", "refused"
IMPLIED = "(implied)"
"""The value of an entry for a key that the file does not have, and that its program sets by a default."""

Outcome = tuple[str, str]


@dataclass(frozen=True)
class Entry:
    """What became of one key.

    Attributes:
        key: the dotted path in the file.
        value: the value there, or ``IMPLIED``.
        verdict: "translated", "not needed", "different" or "refused".
        text: to what, why, how, or what to do instead.
    """

    key: str
    value: Any
    verdict: str
    text: str


@dataclass(eq=False)
class Unread:
    """A value in a config that is Python, which reading alone does not give.

    Attributes:
        text: its expression. where: the file and the line.
        name: dotted, if it is a name that is imported; "" otherwise.
        keywords: what a call was given by name. parts: what the file sets on it.
    """

    text: str
    where: str
    name: str = ""
    keywords: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Rule:
    """The kind of values that a key takes, and what is done with one.

    Attributes:
        kind: bool, int, float, str, list, or the words it may be; None for anything.
        act: makes the entry's verdict and text, and may set ours.
        auto: what "auto" means there; None where it is not allowed.
        target: the key of ours that it sets, if it sets one.
        heeds: whether a value that is not read is refused; not where the entry is the same for all.
    """

    kind: Any
    act: "Callable[[Reading, Any], Outcome]"
    auto: Any = None
    target: str = ""
    heeds: bool = True


Table = Mapping[str, Rule]


class WrongValueError(ValueError):
    """A value of the wrong type."""


@dataclass
class Reading:
    """A config that is being read: its leaves by dotted key, and what has been found so far.

    Attributes:
        values: the file's leaves.
        settings: dotted keys of our config and their values.
        entries: the ledger.
        world_size: for how many processes, if that is known.
        around: what the program that fills "auto" in was told, by keys of ours.
    """

    values: dict[str, Any]
    world_size: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    around: Mapping[str, Any] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:
        """The file's value at `key`; `default` where it has none, null or "auto"."""
        value = self.values.get(key)
        return default if value is None or value == "auto" else value

    def number(self, key: str, default: float) -> float:
        """As :meth:`get`, for a number; `default` where the value is none, or not finite."""
        try:
            number = float(self.get(key, default))
        except (TypeError, ValueError):
            return default
        return number if math.isfinite(number) else default

    def add(self, key: str, value: Any, verdict: str, text: str) -> None:
        """Adds an entry."""
        self.entries.append(Entry(key, value, verdict, text))

    def imply(self, key: str, target: str, value: Any, why: str = "their default") -> None:
        """Sets `target` as their default does, and says so, unless the file has set it."""
        if target not in self.settings:
            self.settings[target] = value
            self.add(key, IMPLIED, TRANSLATED, f"{in_our_words(target)}={value} ({why})")


_SETTLED = {
    "batch.micro": "samples of a rank in a micro-batch",
    "batch.accumulate": "train.plan.micro_batches",
    "batch.global": "train.global_batch_size",
    "schedule.warmup": "scheduler.warmup_steps",
    "schedule.total": "scheduler.total_steps",
    "schedule.start_lr": "the first rate",
    "schedule.min_lr": "the last rate",
}


def in_our_words(target: str) -> str:
    """How the ledger names `target`, if it is one of the settings that several keys make together."""
    return _SETTLED.get(target, target.replace("schedule.", "scheduler."))


def flat(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested mappings, with their paths. Lists and empty mappings are leaves."""
    if isinstance(config, Mapping) and config:
        for key, value in config.items():
            yield from flat(value, (*path, str(key)))
    else:
        yield path, config


def follow(table: Table, reading: Reading, program: str, prefix: str = "") -> None:
    """Adds an entry for each of the file's keys under `prefix`, by the `table`, whose paths begin after it."""
    for full, value in list(reading.values.items()):
        if full.startswith(prefix):
            key = full[len(prefix) :]
            verdict, text = _outcome(table, reading, key, value, program)
            reading.add(full, value, verdict, text)


def _outcome(table: Table, reading: Reading, key: str, value: Any, program: str) -> Outcome:
    bare = ".".join(part.strip() for part in key.split("."))
    if bare != key:
        return REFUSED, f"the key {key!r} has a blank at an end, so that {program} does not see it; write {bare!r}"
    rule = rule_of(table, key)
    if rule is None and any(f"${{{key}}}" in str(other) for other in reading.values.values()):
        return NOT_NEEDED, "it is a variable of the file, which other keys refer to"
    if value is None:
        return NOT_NEEDED, "null leaves the default"
    if rule is None:
        return REFUSED, _unknown(table, key, value, program)
    meant = _meant(table, key, program)
    if meant is not None:
        return REFUSED, f"{program} knows no such key; the nearest is {meant!r}"
    if isinstance(value, Unread):
        if rule.heeds:
            return REFUSED, f"{value.where}: the file is read and not run, which does not give this; set {key}=VALUE"
        return rule.act(reading, value)
    if value == {}:
        return NOT_NEEDED, "it is empty"
    if value == "auto" and rule.auto is not None and rule.kind is not None and "auto" not in _words(rule.kind):
        if rule.target in reading.around:
            verdict, text = rule.act(reading, reading.around[rule.target])
            return verdict, f"{text} (auto: as the file around it says)"
        if isinstance(rule.auto, str) and " " in rule.auto:
            return NOT_NEEDED, f"auto: {rule.auto}"
        verdict, text = rule.act(reading, rule.auto)
        return verdict, f"{text} (auto: the default of the program that fills it in)"
    try:
        value, note = as_kind(rule.kind, value)
        verdict, text = rule.act(reading, value)
    except WrongValueError as error:
        return REFUSED, str(error)
    return verdict, text + note


def rule_of(table: Table, key: str) -> Rule | None:
    """The rule of `key`: its own, or else the first pattern's that it fits."""
    if key in table and "*" not in key:
        return table[key]
    for pattern, rule in table.items():
        if "*" in pattern and fits(pattern, key):
            return rule
    return None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\.\*\*", r"(\..+)?").replace(r"\*\*", ".+")
    return re.compile(escaped.replace(r"\*", r"[^.]*"))


def fits(pattern: str, key: str) -> bool:
    """Whether a pattern of a table covers `key`."""
    return _compiled(pattern).fullmatch(key) is not None


@functools.cache
def real_keys(program: str) -> tuple[str, frozenset[str]]:
    """The release of `program` whose keys are known, and these keys: keys.json has them by program and by group."""
    known = json.loads(files("tensorshard.foreign_configs").joinpath("keys.json").read_text(encoding="utf-8"))
    entry = known.get(program, {"release": "", "keys": {}})
    names = ((group, name) for group, lines in entry["keys"].items() for line in lines for name in line.split())
    return entry["release"], frozenset(f"{group}.{name}".lstrip(".") for group, name in names)


def _unknown(table: Table, key: str, value: Any, program: str) -> str:
    release, real = real_keys(program)
    if any(key == name or key.startswith(f"{name}.") for name in real):
        return f"{program} {release} has this key, and nothing here does its work: train without it, or leave it out"
    known = [pattern for pattern in table if "*" not in pattern]
    within = sorted(pattern for pattern in {*known, *real} if pattern.startswith(key + "."))
    if within:
        return f"{shown(value)} was given, but {key} is a group of keys; set {', '.join(within[:3])}"
    last = _plain(key.rpartition(".")[2])
    spellings = {_plain(pattern): pattern for pattern in (*sorted(real), *known)}
    if _plain(key) in spellings:
        return f"nobody knows this key; {program} writes it {spellings[_plain(key)]!r}"
    first = key.partition(".")[0]
    places = [pattern for pattern in known if f".{first}." in f".{pattern}." and not pattern.startswith(first)]
    same = [pattern for pattern in known if _plain(pattern.rpartition(".")[2]) == last]
    same = [pattern for pattern in same if pattern.partition(".")[0] != first or "." not in key]
    places += same if len(same) == 1 or "." not in key else []  # several, as of "enable", say nothing
    ends = [
        pattern
        for pattern in (*places, *same)
        if f".{pattern}".endswith(f".{key}") or ("." in pattern and key.endswith(f".{pattern}"))
    ]
    if ends or places:
        place = (ends or places)[0]
        return f"the key is at the wrong place: here it does nothing in {program} either; move it to {place!r}"
    lasts = {_plain(pattern.rpartition(".")[2]): pattern for pattern in known}
    near = difflib.get_close_matches(_plain(key), spellings, n=1, cutoff=0.6)
    near = [spellings[word] for word in near] or [
        lasts[word] for word in difflib.get_close_matches(last, lasts, n=1, cutoff=0.75)
    ]
    return f"{program} knows no such key" + (f"; the nearest is {near[0]!r}" if near else "")


def _meant(table: Table, key: str, program: str) -> str | None:
    """The key that `key` is a slip of the pen for, where only a pattern of the table has a rule for it."""
    group, _, last = key.rpartition(".")
    if key in table or key in real_keys(program)[1] or len(last) < 5:
        return None
    beside = [
        name for name, rule in table.items() if name.rpartition(".")[0] == group and rule.heeds and "*" not in name
    ]
    near = difflib.get_close_matches(key, beside, n=1, cutoff=0.95)
    digits = str.maketrans("", "", "0123456789")
    return near[0] if near and near[0].translate(digits) != key.translate(digits) else None


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _words(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) and not isinstance(kind[0], type) else ()


_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}


def as_kind(kind: Any, value: Any) -> tuple[Any, str]:
    """`value` as one of `kind`, and what was done to it.

    Raises:
        WrongValueError: it is of another kind.
    """
    if kind is None:
        return value, ""
    if isinstance(kind, tuple) and isinstance(kind[0], type):
        if type(value) in kind:
            return value, ""
        raise WrongValueError(f"{shown(value)} was given, but it takes {' or '.join(_NAMES[one] for one in kind)}")
    if isinstance(kind, tuple):
        return _as_word(kind, value)
    if kind is bool:
        if isinstance(value, bool):
            return value, ""
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off"):
            raise WrongValueError(f"{value!r} is text; write true or false without quotes")
    elif kind in (int, float) and not isinstance(value, bool):
        return _as_number(kind, value)
    elif kind is str and isinstance(value, bool):
        raise WrongValueError(f"{value} was given, but it takes text; YAML reads NO, OFF, YES and ON so: use quotes")
    elif isinstance(value, kind):
        return value, ""
    raise WrongValueError(f"{shown(value)} was given, but it takes {_NAMES[kind]}")


def _as_number(kind: Any, value: Any) -> tuple[Any, str]:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise WrongValueError(f"{shown(value)} was given, but it takes {_NAMES[kind]}") from None
    note = f" ({value!r} is text, and was read as a number)" if isinstance(value, str) else ""
    if not math.isfinite(number) or (kind is int and not number.is_integer()):
        raise WrongValueError(f"{shown(value)} was given, but it takes {_NAMES[kind]}")
    return (int(number) if kind is int else number), note


def _as_word(words: tuple[Any, ...], value: Any) -> tuple[Any, str]:
    for word in words:
        if type(value) is type(word) and value == word:
            return word, ""
    if isinstance(value, bool):
        off = next((word for word in words if str(word).lower() == ("no" if not value else "yes")), None)
        if off is not None:
            return off, f" (YAML reads NO without quotes as False; taken as {off!r})"
    if isinstance(value, str):
        same = [word for word in words if str(word).lower() == value.lower()]
        if same:
            return same[0], ""
    near = difflib.get_close_matches(str(value), [str(word) for word in words], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise WrongValueError(f"{shown(value)} was given, but it takes {', '.join(map(str, words))}{hint}")


def shown(value: Any) -> str:
    """`value` as errors show it."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

"""What an import gives: our settings, the ledger, and what is still to be filled in."""

import textwrap
from dataclasses import dataclass
from typing import Any

from tensorshard.foreign_configs.ledger import DIFFERENT, IMPLIED, NOT_NEEDED, REFUSED, TRANSLATED, Entry, Reading

_PLAN = "train.plan."
_VERDICTS = (TRANSLATED, DIFFERENT, NOT_NEEDED, REFUSED)


@dataclass(frozen=True)
class Ledger:
    """An imported config.

    Attributes:
        source: the program whose config it was.
        entries: one for each key of the file, and for each implied default that was written out.
        settings: dotted keys of our config and their values.
        world_size: the number of processes it is for, if the file or the caller said so.
    """

    source: str
    entries: tuple[Entry, ...]
    settings: dict[str, Any]
    world_size: int | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """The fields of the Plan."""
        return {key[len(_PLAN) :]: value for key, value in self.settings.items() if key.startswith(_PLAN)}

    @property
    def refused(self) -> list[Entry]:
        """The entries of keys that cannot be honoured."""
        return [entry for entry in self.entries if entry.verdict == REFUSED]

    def check(self) -> None:
        """Raises ValueError, with the reasons, if a key was refused."""
        if self.refused:
            lines = [f"{entry.key}={_short(entry.value)}: {entry.text}" for entry in self.refused]
            raise ValueError(f"this {self.source} config asks for what cannot be done here:\n  " + "\n  ".join(lines))

    def describe(self, width: int = 100) -> str:
        """The ledger as text: the keys of each verdict, in the file's order."""
        lines = []
        for verdict in _VERDICTS:
            entries = [entry for entry in self.entries if entry.verdict == verdict]
            if entries:
                lines.append(f"{verdict} ({len(entries)})")
            for entry in entries:
                given = IMPLIED if entry.value == IMPLIED else f"= {_short(entry.value)}"
                start = f"  {entry.key} {given}: "
                lines += textwrap.wrap(start + entry.text, width, subsequent_indent="      ", break_on_hyphens=False)
        return "\n".join(lines)


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= 40 else text[:37] + "..."


def finish(reading: Reading, source: str) -> Ledger:
    """Settles what several keys say together, the batch sizes and the schedule, and closes the ledger."""
    _settle_batches(reading)
    _settle_schedule(reading)
    settings = {key: value for key, value in reading.found.items() if not key.startswith(("batch.", "schedule."))}
    return Ledger(source, tuple(reading.entries), settings, reading.world_size)


def _settle_batches(reading: Reading) -> None:
    """Writes out samples a step and micro-batches; of samples a rank, micro-batches and samples a step, two suffice."""
    found = reading.found
    micro, parts, whole = (found.get(f"batch.{name}") for name in ("micro", "accumulate", "global"))
    given = [number for number in (micro, parts, whole) if number is not None]
    if any(number < 1 for number in given):
        reading.add("batch sizes", IMPLIED, REFUSED, f"sizes of at least 1 are needed, and {min(given)} was given")
        return
    if not given:
        return
    other = 1
    for axis in ("tp", "pp", "cp"):
        other *= max(1, found.get(f"{_PLAN}{axis}", 1))
    ranks = reading.world_size // other if reading.world_size else None
    if ranks is None and micro and parts and whole:
        ranks = max(1, whole // (micro * parts))
        reading.add(
            "data ranks", IMPLIED, TRANSLATED, f"{ranks}, from samples a step / (samples a rank x accumulation)"
        )
    elif ranks is None:
        ranks = 1
        reading.add("data ranks", IMPLIED, DIFFERENT, "1, since the file does not say how many; --world-size N sets it")
    ranks = max(1, ranks)
    parts = parts or (max(1, whole // (micro * ranks)) if whole and micro else 1)
    micro = micro or (max(1, whole // (parts * ranks)) if whole else 1)
    whole = whole or micro * parts * ranks
    if whole != micro * parts * ranks:
        reading.add(
            "batch sizes",
            IMPLIED,
            REFUSED,
            f"{whole} samples a step are not {micro} samples a rank x {parts} micro-batches x {ranks} data ranks; "
            f"change one of them, or --world-size",
        )
        return
    found["train.global_batch_size"], found[f"{_PLAN}micro_batches"] = whole, parts
    reading.add(
        "batch sizes",
        IMPLIED,
        TRANSLATED,
        f"train.global_batch_size={whole}, train.plan.micro_batches={parts} ({micro} samples a rank x {parts} x {ranks} "
        f"data ranks)",
    )


def _settle_schedule(reading: Reading) -> None:
    found = reading.found
    shape = found.get("schedule.shape")
    if shape is None:
        return
    rate, total = found.get("optimizer.lr"), found.get("schedule.total", found.get("train.steps"))
    warmup = found.get("schedule.warmup")
    ratio = found.get("schedule.warmup_ratio")
    steps = total if isinstance(total, int) else None
    if warmup is None and ratio:
        warmup = round(ratio * steps) if steps else "???"
    values = {
        "shape": shape,
        "warmup_steps": warmup or 0,
        "total_steps": "${train.steps}" if steps is None or steps == found.get("train.steps") else steps,
        "warmup_shape": found.get("schedule.warmup_shape", "linear"),
        "start_ratio": _as_ratio(found, "start", rate),
        "min_ratio": _as_ratio(found, "min", rate),
        "offset": found.get("schedule.offset", 0),
        "decay_offset": found.get("schedule.decay_offset", 0),
    }
    if found.get("schedule.decay_ratio") is not None:
        values["decay_ratio"] = found["schedule.decay_ratio"]
    found.update({f"scheduler.{name}": value for name, value in values.items()})
    reading.add("learning rate", IMPLIED, TRANSLATED, "scheduler=" + ", ".join(f"{k}={v}" for k, v in values.items()))
    if "train.steps" not in found and steps is not None:
        found["train.steps"] = steps


def _as_ratio(found: dict[str, Any], name: str, rate: float | None) -> float:
    if found.get(f"schedule.{name}_lr") is not None and rate:
        return float(found[f"schedule.{name}_lr"]) / rate
    return float(found.get(f"schedule.{name}_ratio", 0.0))

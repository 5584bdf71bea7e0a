"""The tables of ``benchmarks/results/models.md``, from the results files."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.models_cells import Cell
from benchmarks.harness.models_results import FamilyResults, load_family
from benchmarks.harness.results import RESULTS
from benchmarks.models.case import Case
from benchmarks.models.plans import PLANS
from benchmarks.models.registry import FAMILIES, PACKAGES, STOCK, find_cases

DOCUMENT = RESULTS / "models.md"

STATUSES = ("exact", "refused", "crashed", "wrong", "hung")
_BLOCK = re.compile(r"^<!-- models:(?P<name>[\w-]+) -->\n.*?^<!-- /models -->$", re.MULTILINE | re.DOTALL)
_SHORT = {"exact": "✓", "refused": "refused", "crashed": "**crashed**", "wrong": "**wrong**", "hung": "**hung**"}

_ALL = "✓ under all"

Cells = list[tuple[Case, str, Cell]]


def write_document() -> Path:
    """Writes every marked block of the document again; returns its path."""
    results = {family: load_family(family) for family in FAMILIES}
    known = _known(results)
    stock = [one for one in known if one[0].family != PACKAGES]
    packages = [one for one in known if one[0].family == PACKAGES]
    writers: dict[str, Callable[[], str]] = {
        "counts": lambda: _counts(stock),
        "reasons": lambda: _reasons(stock),
        "versions": lambda: _versions(results[family] for family in STOCK),
        "packages-counts": lambda: _counts(packages),
        "packages-reasons": lambda: _reasons(packages),
        "packages-versions": lambda: _versions([results[PACKAGES]]),
    }
    for family in FAMILIES:
        writers[family] = lambda family=family: _family([one for one in known if one[0].family == family])  # type: ignore[misc]

    def block(match: re.Match[str]) -> str:
        return f"<!-- models:{match['name']} -->\n{writers[match['name']]()}\n<!-- /models -->"

    DOCUMENT.write_text(_BLOCK.sub(block, DOCUMENT.read_text()))
    return DOCUMENT


def _known(results: dict[str, FamilyResults]) -> Cells:
    """The cells that have results, in the order of the cases and plans."""
    cells: Cells = []
    for case in find_cases().values():
        plans = results[case.family].cells.get(case.name, {})
        cells += [(case, plan, plans[plan][1]) for plan in PLANS if plan in plans]
    return cells


def _counts(cells: Cells) -> str:
    """A row for each plan: how many models have each status."""
    lines = [
        _line(["plan", "models", *STATUSES, "exact with `sample_inputs`, too", "samples", "seconds to parallelize"])
    ]
    lines.append(_line(["---", *["---:"] * (len(STATUSES) + 4)]))
    for plan, plan_case in PLANS.items():
        those = [(case, cell) for case, key, cell in cells if key == plan]
        if not those:
            continue
        of_sequences = plan == "sp" or plan_case.for_sequences
        if of_sequences:
            those = [(case, cell) for case, cell in those if case.is_sequence]
        counts = [sum(cell.status == status for _, cell in those) for status in STATUSES]
        helped = sum(_is_exact_somehow(cell) for _, cell in those)
        seconds = [cell.cpu_seconds for _, cell in those if cell.cpu_seconds is not None]
        spent = f"{median(seconds):.1f} (at most {max(seconds):.0f})" if seconds else ""
        samples = str(helped) if plan_case.takes_samples else ""
        label = plan_case.label + (", sequence models" if of_sequences else "")
        lines.append(_line([label, str(len(those)), *map(str, counts), samples, _verdicts(those), spent]))
    exact = [cell for _, key, cell in cells if key == "tp" and cell.status == "exact"]
    split = [cell.split_share or 0.0 for cell in exact]
    computed = [(cell.split_share or 0.0) - (cell.kept_share or 0.0) for cell in exact]
    count = sum(key == "tp" for _, key, _ in cells)
    if count:
        half, most = sum(share >= 0.5 for share in split), sum(share >= 0.9 for share in split)
        of = f"of {half} of {count} models, and 90% of those of {most}"
        lines += [
            "",
            f"tp 2 splits at least half of the weights {of}. Weights that are split in memory alone, and put together "
            f"when their module is called, are among these; without them it is at least half for "
            f"{sum(share >= 0.5 for share in computed)} and 90% for {sum(share >= 0.9 for share in computed)}.",
        ]
    cut = [cell for case, key, cell in cells if key == "cp" and case.is_sequence]
    if cut:
        lines += ["", _gathered_operations(cut)]
    return "\n".join(lines)


def _verdicts(cells: Sequence[tuple[Case, Cell]]) -> str:
    """How many models compute each sample by itself, as the Engine has asked, and of how many it could not tell."""
    counts = Counter(cell.samples for _, cell in cells if cell.samples)
    return "; ".join(f"{verdict} {count}" for verdict, count in counts.most_common())


def _gathered_operations(cells: Sequence[Cell]) -> str:
    """How many sequence models cp computes by rules alone, and which operations of the others need whole sequences."""
    counts = Counter(operation for cell in cells for operation in cell.gathered)
    by_rules = sum(not cell.gathered for cell in cells)
    often = ", ".join(f"`{operation}` ({count})" for operation, count in counts.most_common(6))
    return (
        f"cp 2 computes {by_rules} of {len(cells)} sequence models without an operation that needs whole sequences. Of "
        f"the others at least one operation is computed whole, most often {often}."
    )


def _is_exact_somehow(cell: Cell) -> bool:
    return cell.status == "exact" or (cell.with_samples is not None and cell.with_samples.status == "exact")


def _family(cells: Cells) -> str:
    """A row for each outcome and group, with the models that have it; rows for the plans that few were run under."""
    by_model: dict[Case, dict[str, Cell]] = defaultdict(dict)
    for case, plan, cell in cells:
        by_model[case][plan] = cell
    runs = {plan: sum(plan in by_plan for by_plan in by_model.values()) for plan in PLANS}
    most = [plan for plan in PLANS if 2 * runs[plan] >= len(by_model)]
    few = [plan for plan in PLANS if plan not in most and runs[plan]]
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for case, by_plan in by_model.items():
        rows[_outcome(by_plan), case.group].append(_entry(case, by_plan, most))
    for case, by_plan in by_model.items():
        labels = [PLANS[plan].label for plan in few if plan in by_plan and by_plan[plan].status == "exact"]
        if labels:
            rows[f"✓ under {'; '.join(labels)}, too", case.group].append(_name(case))
    sizes = {outcome: sum(len(rows[key]) for key in rows if key[0] == outcome) for outcome, _ in rows}
    last = ""
    lines = [f"Run under {'; '.join(PLANS[plan].label for plan in most)}.", "", _line(["", "", "models"])]
    lines.append(_line(["---"] * 3))
    # Of outcomes that as many models have, and of groups, the first stays first.
    for outcome, group in sorted(
        rows, key=lambda key: (key[0] != _ALL, key[0].endswith(", too"), -sizes[key[0]], key[0])
    ):
        lines.append(_line([outcome if outcome != last else "", group, "; ".join(rows[outcome, group])]))
        last = outcome
    return "\n".join(lines)


def _outcome(by_plan: dict[str, Cell]) -> str:
    """Under which plans a model is not exact."""
    plans: dict[str, list[str]] = defaultdict(list)
    for plan, cell in by_plan.items():
        if cell.status != "exact":
            helped = " (✓ †)" if _is_exact_somehow(cell) else ""
            plans[_SHORT[cell.status] + helped].append(PLANS[plan].label)
    return ". ".join(f"{status} under {'; '.join(labels)}" for status, labels in plans.items()) or _ALL


def _entry(case: Case, by_plan: dict[str, Cell], plans: Sequence[str]) -> str:
    """A model's name, with the share of its weights that tp splits, and a mark if it was not run under all plans."""
    cell = by_plan.get("tp")
    if cell is not None and cell.status != "exact" and cell.with_samples is not None:
        cell = cell.with_samples
    share = f" {cell.split_share:.0%}" if cell is not None and cell.split_share and cell.status == "exact" else ""
    in_memory = (
        f" ({cell.kept_share:.0%} in memory)" if cell is not None and share and (cell.kept_share or 0) >= 0.005 else ""
    )
    return _name(case) + share + in_memory + ("" if all(plan in by_plan for plan in plans) else " °")


def _name(case: Case) -> str:
    return case.name.removeprefix(f"{case.group}: ")


def _reasons(cells: Cells) -> str:
    """The reasons why cells are not exact, the most frequent first."""
    by_reason: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    examples: dict[tuple[str, str], str] = {}
    for case, plan, cell in cells:
        if cell.status != "exact":
            key = cell.status, generalized(cell.detail)
            by_reason[key][case.key].append(PLANS[plan].label)
            examples.setdefault(key, cell.detail)
    order = sorted(by_reason, key=lambda key: (-STATUSES.index(key[0]), -len(by_reason[key]), key[1]))
    lines = [_line(["", "says", "models"]), _line(["---"] * 3)]
    for key in order:
        models = by_reason[key]
        names = ", ".join(sorted(models)[:8]) + (f" and {len(models) - 8} more" if len(models) > 8 else "")
        plans = ", ".join(sorted({plan for listed in models.values() for plan in listed}))
        lines.append(_line([key[0], _escaped(examples[key]), f"{names} ({plans})"]))
    return "\n".join(lines)


def generalized(detail: str) -> str:
    """A sentence without the parts that differ between models: names, numbers, classes."""
    text = re.sub(r"(\w*Error):.*", r"\1", detail)  # what torch or the model's code says differs from model to model
    text = re.sub(
        r"\bthis \w+|^[A-Z]\w+(?= (?:does|could|called) )|(?<=cut )\w+ |(?<=where )\w+|(?<=run )\w+(?= with)", "*", text
    )
    text = re.sub(r"'[^']*'|\[[^\]]*\]|[\w*]+(?:\.[\w*]+)+|(?<=sequence: )\w+(?=:)|\d[\d.e+-]*", "*", text)
    return re.sub(r"\b[A-Z][A-Za-z0-9]*[a-z][A-Z]\w*|\bSequential\b", "*", text)


def _versions(results: Iterable[FamilyResults]) -> str:
    run = [one for one in results if one.cells]
    versions = {name: version for one in run for name, version in one.versions.items()}
    dates = sorted(one.date for one in run)
    return f"{', '.join(f'{n} {v}' for n, v in versions.items())}; {dates[0]} to {dates[-1]}." if run else ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"

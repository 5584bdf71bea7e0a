"""An estimate as text of 80 columns: does it fit, by how much, and what takes the memory."""

from collections.abc import Sequence

from tensorshard.common.words import size_text, span_words
from tensorshard.predict.rank_estimate import CATEGORIES, LargeTensor, RankEstimate
from tensorshard.predict.step_time import StepTime

_WIDTH = 80
_BAR = 30  # columns of the longest bar


def verdict(needed: int, there: int, device: str = "") -> str:
    """One line: whether `needed` bytes fit into the `there` bytes that a device has, and by how much."""
    of = f"{size_text(needed)} of the {size_text(there)} of {device or 'a device'}"
    if needed <= there:
        return f"fits: {of}, {size_text(there - needed)} to spare"
    return f"does not fit: {of}, {size_text(needed - there)} too much"


def stage_lines(ranks: Sequence[RankEstimate]) -> list[str]:
    """A line for each distinct rank."""
    heads = ["stage", "rank", "live tensors", "on the device", "mostly"]
    rows = [
        [str(r.stage), str(r.rank), size_text(r.peak_allocated), size_text(r.peak_device), _mostly(r)] for r in ranks
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads) - 1)]
    return [
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in [heads, *rows]
    ]


def rank_lines(rank: RankEstimate) -> list[str]:
    """What `rank` holds at its peak, the most first, and what the device takes beside that."""
    lines = [f"rank {rank.rank} at its peak, in {rank.phase}:"]
    shown = sorted((name for name in CATEGORIES if rank.by_category[name]), key=lambda name: -rank.by_category[name])
    for name in shown:
        share = rank.by_category[name] / rank.peak_allocated
        bar = "#" * max(1, round(_BAR * share))
        lines.append(f"  {name:<20}{size_text(rank.by_category[name]):>10}  {share:>4.0%}  {bar}")
    lines.append(f"  {'all live tensors':<20}{size_text(rank.peak_allocated):>10}")
    name, made_by = "reserved", "by a caching allocator (not validated)"
    if rank.on_host:
        name, made_by = "resident", "with Python's objects, messages, page tables"
    lines.append(f"  {name:<20}{size_text(rank.peak_reserved):>10}  {made_by}")
    if rank.peak_device > rank.peak_reserved:
        context = rank.peak_device - rank.peak_reserved
        lines.append(f"  {'context':<20}{size_text(context):>10}  libraries, communicators, buffers (not traced)")
    return lines


def tensor_lines(tensors: Sequence[LargeTensor]) -> list[str]:
    """The largest tensors, each with the line of the user's code that made it, if there is one: in two lines where one
    would be too long."""
    lines = []
    for tensor in tensors:
        count = f"{tensor.count} x " if tensor.count > 1 else ""
        where = tensor.line or tensor.operation.removeprefix("aten.").partition(".")[0]
        shape = f"[{', '.join(map(str, tensor.shape))}] {tensor.dtype}"
        line = f"  {count + size_text(tensor.nbytes):>14}  {tensor.category}  {shape}"
        whole = f"{line}  {where}"
        lines += [whole] if len(whole) <= _WIDTH else [line, f"{'':>18}{where}"]
    return lines


def _mostly(rank: RankEstimate) -> str:
    most = max(CATEGORIES, key=lambda name: rank.by_category[name])
    share = rank.by_category[most] / max(1, rank.peak_allocated)
    return f"{most}, {share:.0%}"


def offload_lines(rank: RankEstimate) -> list[str]:
    """What `rank` keeps outside of the device and moves in a step; no lines without offload."""
    if not rank.host_bytes and not rank.disk_bytes:
        return []
    places = {"host memory": (rank.host_bytes, rank.host_traffic), "disk": (rank.disk_bytes, rank.disk_traffic)}
    return ["", "offloaded:"] + [
        f"  {place:<12} {size_text(nbytes):>12}, of which a step moves {size_text(moved)}"
        for place, (nbytes, moved) in places.items()
        if nbytes
    ]


def time_lines(time: StepTime, samples_per_second: float | None, *, measured: bool) -> list[str]:
    """How long a step takes, as a range, and what the time is spent on."""
    grade = "from measured rates" if measured else "not validated"
    rate = f", {samples_per_second:,.1f} samples/s" if samples_per_second is not None else ""
    shares = [f"{name} {seconds / time.seconds:.0%}" for name, seconds in time.by_category.items() if seconds > 0]
    return [
        f"a step takes {span_words(time.seconds, (time.low, time.high))}{rate}, {grade}:",
        f"  {', '.join(shares)}",
    ]

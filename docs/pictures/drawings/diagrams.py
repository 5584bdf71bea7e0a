"""The diagrams of docs/architecture.md: which folders import which, and what calls what in a step."""

from drawings.svg import arrow, rectangle, svg, text

# Each folder's place (column, row) and what it is for.
_PLACES: dict[str, tuple[float, float, str]] = {
    "trainer/": (0, 0, "tensorshard train"),
    "your script": (1.5, 0, "your model and loop"),
    "predict/": (0, 1, "estimates, the best plan"),
    "parallelize/": (1.5, 1, "model + Plan → Engine"),
    "engine/": (2.5, 2, "one optimizer step"),
    "checkpoint/": (3, 3, "any plan to any plan"),
    "tensor_parallel/": (0, 3, "which layers, and how"),
    "pipeline/": (1, 3, "stages and schedules"),
    "passes/": (0.5, 2, "what concerns one rank"),
    "layers/": (0, 4, "what split layers compute"),
    "model/": (1.25, 4, "facts about any module"),
    "data_parallel/": (2.5, 4, "ZeRO 0 to 3, ShardedModel"),
    "comm/": (1.25, 5, "collectives, shards, groups"),
}
IMPORTS = (  # from the left one's code to the right one's
    ("trainer/", "predict/"),
    ("trainer/", "parallelize/"),
    ("predict/", "parallelize/"),
    ("parallelize/", "engine/"),
    ("parallelize/", "passes/"),
    ("parallelize/", "tensor_parallel/"),
    ("parallelize/", "data_parallel/"),
    ("parallelize/", "pipeline/"),
    ("engine/", "pipeline/"),
    ("engine/", "checkpoint/"),
    ("tensor_parallel/", "layers/"),
    ("tensor_parallel/", "model/"),
    ("data_parallel/", "model/"),
    ("pipeline/", "model/"),
    ("pipeline/", "data_parallel/"),
    ("checkpoint/", "data_parallel/"),
    ("layers/", "comm/"),
    ("data_parallel/", "comm/"),
)
_WIDE, _HIGH, _ACROSS, _DOWN = 176, 48, 196, 92  # pixels: of a box, from one to the next


def draw_imports() -> str:
    """The folders as boxes, from the script down to the collectives, with an arrow for each import."""
    left, top = 24, 20
    ends = [*IMPORTS, ("your script", "parallelize/")]
    at = {name: (left + x * _ACROSS, top + y * _DOWN) for name, (x, y, _) in _PLACES.items()}
    shapes = []
    for source, target in ends:
        (x0, y0), (x1, y1) = at[source], at[target]
        if y0 == y1:
            side = _WIDE if x1 > x0 else 0
            shapes.append(arrow([(x0 + side, y0 + _HIGH / 2), (x1 + _WIDE - side, y1 + _HIGH / 2)]))
            continue
        leaves = [end for end in ends if end[0] == source and at[end[1]][1] > y0]
        enters = sorted((end for end in ends if end[1] == target and at[end[0]][1] < y1), key=lambda e: at[e[0]])
        leaves.sort(key=lambda e: at[e[1]])
        x0 += _WIDE * (leaves.index((source, target)) + 1) / (len(leaves) + 1)
        x1 += _WIDE * (enters.index((source, target)) + 1) / (len(enters) + 1)
        middle = y1 - 22 + 5 * (list(at).index(source) % 3)
        shapes.append(arrow([(x0, y0 + _HIGH), (x0, middle), (x1, middle), (x1, y1)]))
    for name, (x, y) in at.items():
        shapes += [
            rectangle(x, y, _WIDE, _HIGH, "box", corner=6),
            text(x + _WIDE / 2, y + 20, name, "strong middle"),
            text(x + _WIDE / 2, y + 38, _PLACES[name][2], "small middle"),
        ]
    words = "; ".join(f"{source} imports {target}" for source, target in IMPORTS)
    return svg(round(left + 4 * _ACROSS + 4), top + 5 * _DOWN + _HIGH + 20, "Who imports whom", words, shapes)


_ACTORS = ("engine.step", "step runner", "model", "data parallelism")
_CALLS: tuple[tuple[int, int, str, str], ...] = (  # from, to, and two lines of words
    (0, 1, "train(inputs, targets)", ""),
    (1, 3, "begin_micro_batch", ""),
    (1, 2, "forward", "tp: collectives in layers"),
    (1, 2, "backward", "pp: in the schedule's order"),
    (2, 3, "a unit's gradients", "their reduction starts"),
    (1, 3, "finish_backward", "waits for the last reduction"),
    (0, 0, "finite? norm, clipping", ""),
    (0, 3, "optimizer.step on the masters", "then all_gather_parameters"),
)
_LOOP = (1, 4)  # the calls of each micro-batch, the first and the last


def draw_step() -> str:
    """What calls what in one step, from top to bottom."""
    left, apart, top, row = 90, 200, 74, 56
    lines = [left + apart * actor for actor in range(len(_ACTORS))]
    bottom = top + row * len(_CALLS)
    first, last = _LOOP
    shapes = [
        rectangle(lines[1] - 96, top + first * row - 4, lines[-1] - lines[1] + 172, (last - first + 1) * row - 4,
                  "room", corner=8),
        text(lines[1] - 88, top + first * row + 14, "each", "small"),
        text(lines[1] - 88, top + first * row + 30, "micro-batch", "small"),
    ]  # fmt: skip
    for x, name in zip(lines, _ACTORS, strict=True):
        shapes.append(f'<path d="M{x} 52V{bottom}" class="line"/>')
        shapes += [rectangle(x - 70, 18, 140, 34, "box", corner=6), text(x, 40, name, "strong middle")]
    for number, (source, target, words, more) in enumerate(_CALLS):
        y = top + number * row + 28
        if source == target:
            shapes += [
                arrow([(x := lines[source], y), (x + 24, y), (x + 24, y + 14), (x, y + 14)]),
                text(lines[source] + 32, y + 4, words, "small"),
            ]
            continue
        # Words stand in the first gap that the arrow crosses.
        shapes += [arrow([(lines[source], y), (lines[target], y)]), text(lines[source] + 8, y - 6, words, "small")]
        if more:
            shapes.append(text(lines[source] + 8, y + 15, more, "small"))
    words = "; ".join(
        f"{_ACTORS[source]} to {_ACTORS[target]}: {one}{', ' + more if more else ''}"
        for source, target, one, more in _CALLS
    )
    return svg(lines[-1] + 100, bottom + 20, "What calls what in a step", words, shapes)

"""The numbers that this project's sources are known for, as estimates of ours on their hardware."""

import argparse
import time
from collections.abc import Sequence

from benchmarks.harness.headlines import BERT_REPORTED, HEADLINES, bert_bytes, find
from benchmarks.harness.headlines_document import (
    FILE,
    MB,
    PAGE,
    HeadlineResults,
    bert_table,
    models_table,
    states_table,
    write_headlines,
)
from benchmarks.harness.report import make_console
from benchmarks.harness.zero_table import states_cells
from benchmarks.registry import Suite

_PARTS = ("zero", "bert", "models")


def run(arguments: argparse.Namespace) -> int:
    console = make_console()
    parts = _PARTS if arguments.part is None else (arguments.part,)
    results = HeadlineResults.load()
    start = time.perf_counter()
    if "zero" in parts:
        with console.status("the table of the ZeRO paper"):
            results.zero = states_cells(["7.5B"], [1, 64]) if arguments.quick else states_cells()
        states_table(results.zero).print(console)
    if "bert" in parts:
        with console.status("BERT-Large over 1 to 16 ranks"):
            results.bert = bert_over([1, 2] if arguments.quick else list(BERT_REPORTED))
        bert_table(results.bert).print(console)
    if "models" in parts and not arguments.quick:
        known = {finding.name: finding for finding in results.models}
        for headline in HEADLINES:
            if arguments.only is None or arguments.only in headline.name:
                with console.status(headline.name):
                    known[headline.name] = find(headline)
                results.models = [known[one.name] for one in HEADLINES if one.name in known]
                write_headlines(results)  # each, as together they take minutes
        models_table(results.models).print(console)
    console.print(f"{time.perf_counter() - start:.0f} s")
    if not arguments.quick:
        write_headlines(results)
        console.print(f"Written to {FILE} and {PAGE}")
    return 0


def bert_over(ranks: Sequence[int]) -> dict[int, int]:
    """Bytes of BERT-Large by the number of ranks, with so many samples that one rank takes what was reported of it.

    Few samples change nothing: the update takes more than they do. From there on memory grows linearly with them.
    """
    asked, fewer, more = BERT_REPORTED[1] * MB, 16, 32
    low, high = bert_bytes(1, fewer), bert_bytes(1, more)
    while high < asked:
        fewer, more = more, 2 * more
        low, high = high, bert_bytes(1, more)
    samples = round(fewer + (more - fewer) * (asked - low) / (high - low))
    return {count: bert_bytes(count, samples) for count in ranks}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=_PARTS, help="one of the tables; the others stay as they are")
    parser.add_argument("--only", metavar="WORDS", help="models whose names have these words; the others stay")
    parser.add_argument("--quick", action="store_true", help="a few numbers, of which nothing is written")


SUITE = Suite("headlines", "known numbers of this field as estimates on their hardware", add_arguments, run)

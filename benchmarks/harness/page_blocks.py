"""Blocks of pages that benchmarks write: what stands between two marks, each on a line of its own."""

import re


class MarkerError(ValueError):
    """A page's markers ask for what cannot be written."""


def replace_block(text: str, name: str, content: str) -> str:
    """`text` with `content` between the lines ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        MarkerError: it has no such lines.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = re.compile(rf"^{re.escape(begin)}\n.*?^{re.escape(end)}$", re.MULTILINE | re.DOTALL)
    if not block.search(text):
        raise MarkerError(f"the page needs the lines {begin!r} and {end!r}, in this order")
    return block.sub(lambda _: f"{begin}\n{content}\n{end}", text)

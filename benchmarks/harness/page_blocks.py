"""Blocks of pages that benchmarks write. Each is between two markers on their own lines."""

import re


class MarkerError(ValueError):
    """A page does not have the markers that are needed."""


def replace_block(text: str, name: str, content: str) -> str:
    """`text` with `content` between the lines ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        MarkerError: the text has no such lines.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    block = re.compile(rf"^{re.escape(begin)}\n.*?^{re.escape(end)}$", re.MULTILINE | re.DOTALL)
    if not block.search(text):
        raise MarkerError(f"the page needs the lines {begin!r} and {end!r}, in this order")
    return block.sub(lambda _: f"{begin}\n{content}\n{end}", text)

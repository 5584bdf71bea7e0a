"""Checks a built site: ``python .ci/check_site.py build/site`` names what is wrong with its pages.

Links, anchors and pictures lead somewhere. No page loads anything from elsewhere. Where Chromium is installed, it shows
every page, wide and narrow, light and dark: without console errors, missing pictures, requests to elsewhere, or a page
that is wider than its window.
"""

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from browser import find_browser, look_at_pages

# What a browser loads by itself, by the tag's attribute; a link to elsewhere is only followed by the reader.
_LOADED = {
    ("audio", "src"),
    ("iframe", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("link", "href"),
    ("object", "data"),
    ("script", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
}
_NOT_LOADED = {"canonical", "next", "prev"}  # values of a <link>'s rel that are for reading, not for loading


class _Page(HTMLParser):
    """What a page refers to: (what, where to), and the anchors it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = {"", "top"}
        self.without_words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img" and not given.get("alt"):
            self.without_words.append(given.get("src", ""))
        if given.get("rel") not in _NOT_LOADED:
            self.loaded += [value for name, value in given.items() if (tag, name) in _LOADED]


def check_files(site: Path) -> list[str]:
    """What is wrong with the links and pictures of the pages below `site`."""
    paths = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    pages = {path.relative_to(site).as_posix(): _Page(path.read_text(encoding="utf-8")) for path in paths}
    if not pages:
        return [f"{site} has no pages"]
    wrong = []
    for name, page in pages.items():
        wrong += [f"{name}: {fault}" for fault in _faults(name, page, pages, site)]
    for style in sorted(site.rglob("*.css")):
        text = style.read_text(encoding="utf-8")
        wrong += [
            f"{style.relative_to(site)} loads {word}" for word in ("url(http", "url(//", "@import") if word in text
        ]
    return wrong


def _faults(name: str, page: _Page, pages: dict[str, _Page], site: Path) -> Iterator[str]:
    for reference in sorted({*page.loaded, *page.links}):
        parts = urlsplit(reference)
        if parts.scheme or parts.netloc:
            if reference in page.loaded and parts.scheme != "data":
                yield f"{reference} is loaded from elsewhere"
            continue
        target = unquote(urljoin(name, parts.path)) if parts.path else name
        if target == "." or target.endswith("/"):
            target = f"{target.removesuffix('.')}index.html"
        if not (site / target).is_file():
            yield f"{reference} leads nowhere"
        elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"{reference}: {target} has no such anchor"
    for picture in page.without_words:
        yield f"{picture} has no words for who cannot see it"


def main() -> int:
    site = Path(sys.argv[1])
    wrong = check_files(site)
    browser = find_browser()
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")
    if browser is not None and names:
        wrong += look_at_pages(browser, site, names)
    for fault in wrong:
        print(fault, file=sys.stderr)
    seen = "and looked at in Chromium" if browser else "without a look, as there is no Chromium"
    print(f"{len(names)} pages checked, {seen}: {len(wrong) or 'nothing'} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

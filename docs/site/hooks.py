"""What the docs site does beyond MkDocs: parts of the README, notebooks, links that leave docs/, llms.txt.

Pages link to files of the repository, as ``../examples/offload.py``. In the repository these links work as they are. On
the site each such file gets a page that shows it, and the links go there.
"""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

_ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()([^)#\s]*)(#[^)\s]*)?(?=\))")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")
_README_PART = re.compile(r"<!-- README: (\w+) -->")
_SHOWN_BY = {"README.md": "index.md", "examples/tour.ipynb": "tour.md"}  # pages of docs/ that show what is outside
_NOTEBOOK = re.compile(r"<!-- notebook: (\S+) -->")
_LINK_TEXT = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_FIRST = re.compile(r"\s*# [^\n]*\n+((?![#|<!`-]).+?)\n\n", re.DOTALL)
_PAGES: list[Any] = []  # of the nav
_MENTION = re.compile(r"(?<!\">)<code>docs/([\w-]+)\.md</code>")
_LANGUAGES = {
    ".diff": "diff",
    ".json": "json",
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".yaml": "yaml",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file of the repository that a page links to."""
    targets: set[str] = set()
    for file in list(files.documentation_pages()):
        targets |= {target for target in _targets(_whole(file.content_string), file.src_uri) if _outside(target)}
    targets -= set(_SHOWN_BY)
    while targets:
        target = targets.pop()
        content, children = _source_page(target)
        files.append(File.generated(config, _page_of(target), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
        targets |= {child for child in children if files.get_file_from_path(_page_of(child)) is None}
    return files


def on_nav(nav: Any, **_: Any) -> None:
    """Notes the pages that are in the nav, in order."""
    _PAGES[:] = nav.pages


def on_post_build(config: Any) -> None:
    """Writes ``llms.txt``: the pages in the nav's order, each with its first paragraph."""
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for page in _PAGES:
        first = _FIRST.match(_LINK_TEXT.sub(r"\1", page.markdown or ""))
        words = ": " + " ".join(first[1].split()) if first else ""
        lines.append(f"- [{page.title}]({page.url}){words}")
    (Path(config["site_dir"]) / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts the README's parts in their places, and turns links out of docs/ to the pages of these files."""
    here = page.file.src_uri

    def on_site(link: re.Match[str]) -> str:
        target = _resolved(link[1], here)
        if target is None or not _outside(target):
            return link[0]
        return posixpath.relpath(_page_of(target), posixpath.dirname(here) or ".") + (link[2] or "")

    return _LINK.sub(on_site, _whole(markdown))


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings name pages as ``docs/heads.md``; here these names are links."""
    up = "../" * page.file.dest_uri.count("/")
    return _MENTION.sub(lambda name: f'<a href="{up}{name[1]}.html">{name[0]}</a>', html)


def _whole(markdown: str) -> str:
    """A page with the parts of the README and the notebooks that it names."""
    return _NOTEBOOK.sub(lambda directive: _notebook(directive[1]), _with_readme(markdown))


def _notebook(target: str) -> str:
    """The cells of a notebook as Markdown: its text, its code, and what the code printed and drew."""
    parts = []
    for cell in json.loads((_ROOT / target).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            here = posixpath.dirname(target)
            parts.append(_LINK.sub(lambda link, here=here: _moved(link, here), source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            if picture := "".join(output.get("data", {}).get("image/svg+xml", "")):
                words = re.search(r'aria-label="([^"]*)"', picture)
                data = base64.b64encode(picture.encode()).decode()
                parts.append(f'<img alt="{words[1] if words else "a picture"}" src="data:image/svg+xml;base64,{data}">')
    return "\n\n".join(parts)


def _with_readme(markdown: str) -> str:
    """Replaces ``<!-- README: name -->`` by what the README has between ``<!-- name -->`` and ``<!-- /name -->``."""

    def part(directive: re.Match[str]) -> str:
        readme = (_ROOT / "README.md").read_text(encoding="utf-8")
        found = re.search(rf"<!-- {directive[1]} -->\n(.*?)<!-- /{directive[1]} -->", readme, re.DOTALL)
        if found is None:
            raise PluginError(f"README.md has no part between <!-- {directive[1]} --> and <!-- /{directive[1]} -->")
        return _LINK.sub(_moved, found[1])

    return _README_PART.sub(part, markdown)


def _moved(link: re.Match[str], folder: str = "", to: str = "docs") -> str:
    """A link of a file in `folder`, by default the README's, as it is to stand in a page of the folder `to`."""
    if not _is_path(link[1]):
        return link[0]
    return posixpath.relpath(posixpath.join(folder, link[1]), to) + (link[2] or "")


def _is_path(link: str) -> bool:
    return bool(link) and not _ELSEWHERE.match(link)


def _targets(markdown: str, page: str) -> set[str]:
    """The files that a page links to, by their paths in the repository."""
    return {target for link in _LINK.finditer(markdown) if (target := _resolved(link[1], page)) is not None}


def _resolved(link: str, page: str) -> str | None:
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link)) if _is_path(link) else None


def _outside(target: str) -> bool:
    """Whether it is there in the repository, and not below docs/. A link to what is not there stays broken."""
    return target != "docs" and not target.startswith(("docs/", "..")) and (_ROOT / target).exists()


def _page_of(target: str) -> str:
    return _SHOWN_BY.get(target, f"source/{target}.md")


def _source_page(target: str) -> tuple[str, list[str]]:
    """The Markdown of the page that shows a file or a folder, and what is in the folder, or linked by the file."""
    path = _ROOT / target
    if path.is_dir():
        children = sorted(f"{target}/{child.name}" for child in path.iterdir() if child.name[0] not in "._")
        here = posixpath.dirname(_page_of(target))
        rows = [f"- [{Path(child).name}]({posixpath.relpath(_page_of(child), here)})" for child in children]
        return "\n".join([f"# {target}/", "", *rows, ""]), children
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        folder, here = posixpath.dirname(target), posixpath.dirname(_page_of(target))
        shown = _LINK.sub(lambda link: _moved(link, folder, f"docs/{here}"), text)
        return shown, [file for file in _targets(shown, _page_of(target)) if _outside(file)]
    return f"# {target}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}````\n", []

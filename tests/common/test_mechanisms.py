"""A new mode, tensor class, guard or reader of frames replaces one: none of these counts may rise (CONTRIBUTING)."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tensorshard

ROOT = Path(tensorshard.__file__).parent
# How many there are. Where one has gone, lower the number.
COUNTS = {
    "dispatch modes": 17,
    "function modes": 14,
    "tensor classes": 8,
    "places that set __class__": 22,
    "files that read frames, garbage or bytecode": 15,  # beside torch_private/, which reads torch's own
    "guards of the Engine": 9,
    "roles of code around forwards": 33,
}
_READS = {
    *("_getframe", "currentframe", "f_back", "f_locals", "co_code"),
    *("get_referrers", "get_objects", "get_instructions"),
}


@cache
def _nodes() -> list[tuple[Path, ast.AST]]:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]


@cache
def _classes() -> dict[str, set[str]]:
    """The names of each class's bases."""
    bases: dict[str, set[str]] = {}
    for _, node in _nodes():
        if isinstance(node, ast.ClassDef):
            plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
            bases.setdefault(node.name, set()).update(ast.unparse(base).rpartition(".")[2] for base in plain)
    return bases


def _under(*kinds: str) -> set[str]:
    found, before = set(kinds), 0
    while len(found) > before:
        before = len(found)
        found |= {name for name, bases in _classes().items() if bases & found}
    return found - set(kinds)


def _attributes() -> Iterator[tuple[Path, ast.Attribute]]:
    yield from ((path, node) for path, node in _nodes() if isinstance(node, ast.Attribute))


def _found(what: str) -> set[str]:
    if what == "dispatch modes":
        return _under("TorchDispatchMode")
    if what == "function modes":
        return _under("TorchFunctionMode")
    if what == "tensor classes":
        return _under("Tensor", "Parameter", "DTensor")
    if what == "places that set __class__":
        is_set = ((p, n) for p, n in _attributes() if n.attr == "__class__" and isinstance(n.ctx, ast.Store))
        called = ((p, n) for p, n in _nodes() if isinstance(n, ast.Call) and ast.unparse(n.func) == "set_class")
        found = {f"{path.relative_to(ROOT)}:{node.lineno}" for path, node in (*is_set, *called)}
        return {place for place in found if not place.startswith("torch_private/tensors.py")}  # what is called
    if what == "guards of the Engine":
        return {path.name for path in (ROOT / "engine" / "guards").glob("*.py")} - {"__init__.py"}
    if what == "roles of code around forwards":
        from tensorshard.model.forwards import Role

        return {role.name for role in Role}
    files = {path.relative_to(ROOT).as_posix() for path, node in _attributes() if node.attr in _READS}
    return {file for file in files if not file.startswith("torch_private/")}


def test_a_new_mechanism_replaces_one():
    for what, count in COUNTS.items():
        found = _found(what)
        assert len(found) <= count, f"one more of {what}, and none has gone: {sorted(found)}"
        assert len(found) == count, f"{what} are {len(found)} now, fewer than the number in this test: lower it"

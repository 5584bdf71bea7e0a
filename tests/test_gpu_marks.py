"""Tests that are marked gpu, checked without one."""

import ast
from pathlib import Path

import pytest
from conftest import asks_for_gpus

JOINS = {"parallelize", "build_engine", "join_world", "init_process_group", "make_engine", "train"}


def find_joining_tests(source: str) -> list[str]:
    """The tests marked gpu that join a world in the process of the tests, where it must not stay: by themselves, or by
    functions of the same file that they call."""
    tree = ast.parse(source)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    all_marked = any(
        ast.unparse(node).startswith("pytestmark") and "mark.gpu" in ast.unparse(node) for node in assigned
    )

    def joins(name: str, seen: frozenset[str] = frozenset()) -> bool:
        calls = [node.func for node in ast.walk(functions[name]) if isinstance(node, ast.Call)]
        called = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls}
        own = called & functions.keys() - seen - {name}
        return bool(called & JOINS) or any(joins(other, seen | {name}) for other in own)

    def marked(test: ast.FunctionDef) -> bool:
        return all_marked or any("mark.gpu" in ast.unparse(decorator) for decorator in test.decorator_list)

    return [name for name, test in functions.items() if name.startswith("test_") and marked(test) and joins(name)]


def test_none_joins_a_world_in_this_process():
    here = Path(__file__)
    sources = {path.name: path.read_text() for path in here.parent.rglob("test_*.py") if path != here}
    found = {name: find_joining_tests(source) for name, source in sources.items() if "mark.gpu" in source}
    assert len(found) >= 3
    assert not any(found.values()), found


def test_one_that_does_is_found():
    source = """
def _train(): return ts.parallelize(None)
def _in_ranks(rank): _train()
@pytest.mark.gpu
def test_one(): assert _train()
@pytest.mark.gpu
def test_two(): spawn(_in_ranks)
def test_three(): _train()
"""
    assert find_joining_tests(source) == ["test_one"]


@pytest.mark.parametrize(
    ("expression", "asks"),
    [
        ("gpu", True), ("gpu and not slow", True), ("gpu or slow", True), ("", False), ("not slow", False),
        ("slow", False), ("slow or not slow", False), ("not gpu", False),
    ],
)  # fmt: skip
def test_gpus_are_hidden_unless_they_are_asked_for(expression, asks):
    assert asks_for_gpus(expression) == asks

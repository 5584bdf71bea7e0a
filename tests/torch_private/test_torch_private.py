"""No file but those of ``tensorshard.torch_private`` names anything private of torch."""

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, TypeGuard

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import tensorshard
from tensorshard.torch_private.coalescing import chunk_cat
from tensorshard.torch_private.recomputation import repeated_forwards

_PACKAGE = Path(tensorshard.__file__).parent
_PRIVATE = "torch_private"

# (file, name): why it is no use of torch.
_OF_ACCELERATE = "of Accelerate, whose classes the file extends"
_OF_LIGHTNING = "of Lightning, whose Strategy the file extends"
_OF_TRANSFORMERS = "of transformers, whose Trainer the file extends"
_OF_MODULES = "of modules, to a class that derives from theirs"
_OF_OUR_CLASSES = "of dicts, to a class of ours"
_EXCEPTIONS = {
    ("cli.py", "_actions"): "of argparse, which has no public list of a parser's options",
    ("verify/record.py", "_hp_mapping"): "of DeepSpeed, whose parameters have no public mark of ZeRO 1 and 2",
    ("model/quantized.py", "__class__"): _OF_MODULES,
    ("parallelize/restore_on_error.py", "__class__"): _OF_MODULES,
    ("common/lazy_imports.py", "__class__"): "of a package of ours",
    ("engine/optimizer_states.py", "__class__"): _OF_OUR_CLASSES,
    ("distributed/zero_redundancy.py", "__class__"): "of an optimizer, to a class that derives from its own",
    ("offload/updates.py", "__class__"): _OF_OUR_CLASSES,
    ("tensor_parallel/search/dataflow.py", "__class__"): _OF_MODULES,
    ("compat/accelerate.py", "_schedulers"): _OF_ACCELERATE,
    ("compat/accelerate.py", "_is_accelerate_prepared"): _OF_ACCELERATE,
    ("compat/accelerate.py", "_dataloaders"): _OF_ACCELERATE,
    ("compat/accelerate.py", "_save_model_state_pre_hook"): _OF_ACCELERATE,
    ("compat/accelerate.py", "_load_model_state_pre_hook"): _OF_ACCELERATE,
    ("compat/lightning.py", "_forward_redirection"): _OF_LIGHTNING,
    ("compat/lightning.py", "_should_accumulate"): _OF_LIGHTNING,
    ("compat/lightning.py", "_wrap_closure"): _OF_LIGHTNING,
    ("compat/transformers.py", "_n_gpu"): _OF_TRANSFORMERS,
    ("compat/transformers.py", "_set_signature_columns_if_needed"): _OF_TRANSFORMERS,
    ("compat/transformers.py", "_remove_unused_columns"): _OF_TRANSFORMERS,
    ("compat/transformers.py", "_get_collator_with_removed_columns"): _OF_TRANSFORMERS,
    ("compat/transformers.py", "_train_batch_size"): _OF_TRANSFORMERS,
    ("compat/transformers.py", "_prepare_inputs"): _OF_TRANSFORMERS,
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _private_names(*things: object) -> set[str]:
    return {name for thing in things for name in dir(thing) if _is_private(name)}


# What torch's own objects have, so that classes of ours which use the same name excuse nobody.
_TORCH_NAMES = _private_names(nn.Module(), torch.empty(0), DTensor, DeviceMesh, ProcessGroup, torch.optim.Optimizer)
# Of these, what code looks up by a string in a ``__dict__``.
_TORCH_KEYS = _private_names(nn.Module(), torch.empty(0), DTensor)


# What has no underscore, and no documentation.
_UNDOCUMENTED = {
    *("torch.distributed.distributed_c10d", "torch.multiprocessing.reductions", "torch.utils.weak"),
    *("torch.utils.flop_counter", "torch.nn.utils.spectral_norm", "torch.fx.experimental"),
}
_UNDOCUMENTED_NAMES = {"CheckpointFunction", "profile_hook_step", "distributed_c10d"}
_OF_A_GRAPH = re.compile(r"[A-Z]\w*Backward\d*$")  # a node's name
_OF_A_MODULE = re.compile(r"torch(\.\w+)*\._[a-zA-Z][\w.]*$")
_OF_FRAMES = ("args", "kwargs", "group")  # local variables of torch's functions


# Of namedtuples, whose names begin with an underscore so that they differ from those of fields.
_OF_NAMEDTUPLES = {"_replace", "_asdict", "_fields", "_make"}


@dataclass
class _Class:
    bases: list[str]
    names: set[str] = field(default_factory=set)


class _Classes:
    """The private names that our own classes define, by class."""

    def __init__(self, trees: list[ast.Module]) -> None:
        self._classes: dict[str, list[_Class]] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    found = _Class([base.id for base in node.bases if isinstance(base, ast.Name)], _defined_by(node))
                    self._classes.setdefault(node.name, []).append(found)
        self.names = {name for entries in self._classes.values() for entry in entries for name in entry.names}

    def of(self, name: str) -> set[str]:
        """What the class `name` and those it derives from define."""
        names: set[str] = set()
        for entry in self._classes.get(name, ()):
            names |= entry.names.union(*(self.of(base) for base in entry.bases))
        return names


def _defined_by(node: ast.ClassDef) -> set[str]:
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Name | ast.Attribute) and isinstance(item.ctx, ast.Store):
            names |= {item.id} if isinstance(item, ast.Name) else {item.attr} if _is_self(item.value) else set()
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr == "__setattr__":
            names |= {argument.value for argument in item.args if isinstance(argument, ast.Constant)}
    return {name for name in names if isinstance(name, str) and _is_private(name)}


def _is_self(node: ast.expr) -> bool:
    of_super = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    return of_super or (isinstance(node, ast.Name) and node.id in ("self", "cls"))


def _is_stored(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)


class _Uses(ast.NodeVisitor):
    """Collects the uses of torch's private names in one file, as (line, name)."""

    def __init__(self, tree: ast.Module, classes: _Classes) -> None:
        self.found: list[tuple[int, str]] = []
        self._classes = classes
        self._enclosing: list[str] = []
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        names = {alias.asname or alias.name.partition(".")[0]: alias.name for node in imports for alias in node.names}
        self._other_libraries = {name for name, module in names.items() if module.partition(".")[0] != "torch"}
        froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("torch")]
        self._of_torch = {name for name, module in names.items() if module.partition(".")[0] == "torch"}
        self._of_torch |= {alias.asname or alias.name for n in froms for alias in n.names}
        self.visit(tree)

    def _note(self, node: ast.AST, name: str) -> None:
        self.found.append((node.lineno, name))  # type: ignore[attr-defined]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enclosing.append(node.name)
        self.generic_visit(node)
        self._enclosing.pop()

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == "torch" and any(map(_is_private, alias.name.split("."))):
                self._note(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            is_private = module.partition(".")[0] == "torch" and any(map(_is_private, whole.split(".")))
            if is_private or {module, whole} & _UNDOCUMENTED or alias.name in _UNDOCUMENTED_NAMES:
                self._note(node, whole)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_private(node.attr) and not self._is_ours(node):
            self._note(node, node.attr)
        if node.attr in _UNDOCUMENTED_NAMES:
            self._note(node, node.attr)
        if isinstance(node.ctx, ast.Store) and (node.attr == "__class__" or self._is_of_torch(node.value)):
            self._note(node, node.attr if node.attr == "__class__" else ast.unparse(node))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, str) and (value in _TORCH_KEYS or _OF_A_GRAPH.match(value) or _OF_A_MODULE.match(value)):
            self._note(node, value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if node.func.id in ("setattr", "delattr") and self._is_of_torch(node.args[0]):
                self._note(node, f"{node.func.id}({ast.unparse(node.args[0])})")
            if _is_private(name) and name not in self._classes.names | _TORCH_KEYS:  # those are noted as strings
                self._note(node, name)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        of_frame = isinstance(node.value, ast.Attribute) and node.value.attr == "f_locals"
        if of_frame and isinstance(node.slice, ast.Constant) and node.slice.value in _OF_FRAMES:
            self._note(node, f"f_locals[{node.slice.value!r}]")
        self.generic_visit(node)

    def _is_of_torch(self, node: ast.expr) -> bool:
        """Whether an expression is torch, or an attribute of it or of what is imported from it."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._of_torch

    def _is_ours(self, node: ast.Attribute) -> bool:
        if node.attr in _OF_NAMEDTUPLES:
            return True
        if _is_self(node.value):
            return any(node.attr in self._classes.of(name) for name in self._enclosing)
        if isinstance(node.value, ast.Name) and node.value.id in self._other_libraries:
            return True
        return node.attr in self._classes.names and node.attr not in _TORCH_NAMES


def _uses(sources: dict[str, str]) -> Iterator[tuple[str, int, str]]:
    trees = {name: ast.parse(source) for name, source in sources.items()}
    classes = _Classes(list(trees.values()))
    for name, tree in trees.items():
        for line, used in _Uses(tree, classes).found:
            yield name, line, used


def _files() -> dict[str, str]:
    paths = {path.relative_to(_PACKAGE).as_posix(): path for path in sorted(_PACKAGE.rglob("*.py"))}
    return {name: path.read_text() for name, path in paths.items() if not name.startswith(f"{_PRIVATE}/")}


def test_nothing_private_of_torch_is_used_elsewhere():
    found = list(_uses(_files()))
    stale = set(_EXCEPTIONS) - {(name, used) for name, _, used in found}
    assert not stale, f"these exceptions are used no more: {stale}"
    uses = [f"src/tensorshard/{name}:{line}: {used}" for name, line, used in found if (name, used) not in _EXCEPTIONS]
    assert not uses, f"name these in tensorshard.{_PRIVATE}, or use a public way:\n" + "\n".join(uses)


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("from torch._guards import detect_fake_mode", "torch._guards.detect_fake_mode"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.nn.modules.batchnorm import _NormBase", "torch.nn.modules.batchnorm._NormBase"),
        ("import torch\nx = torch._foreach_norm([])", "_foreach_norm"),
        ("def f(module): return module._parameters", "_parameters"),
        ("class A:\n def __init__(self): self._buffers = 1\ndef f(module): return module._buffers", "_buffers"),
        ("class A:\n def f(self): return self._local_tensor", "_local_tensor"),
        ("class A:\n def _f(self): pass\nclass B:\n def g(self): return super()._f()", "_f"),
        ("def f(module): return getattr(module, '_forward_hooks')", "_forward_hooks"),
        ("def f(layer): return getattr(layer, '_reset_parameters', None)", "_reset_parameters"),
        ("from torch.utils.weak import WeakIdKeyDictionary", "torch.utils.weak.WeakIdKeyDictionary"),
        ("from torch.utils.checkpoint import CheckpointFunction", "torch.utils.checkpoint.CheckpointFunction"),
        ("import torch\nclass A(torch.distributed.distributed_c10d.Work): pass", "distributed_c10d"),
        ("import torch\ntorch.optim.Optimizer.profile_hook_step(1)", "profile_hook_step"),
        ("import torch\ntorch.autograd.grad = 1", "torch.autograd.grad"),
        ("from torch.optim import Optimizer\nOptimizer.step = 1", "Optimizer.step"),
        ("import torch.distributed as dist\nsetattr(dist.ProcessGroup, name, 1)", "setattr(dist.ProcessGroup)"),
        ("def f(tensor): tensor.__class__ = int", "__class__"),
        ("def f(node): return node.name() == 'CheckpointFunctionBackward'", "CheckpointFunctionBackward"),
        ("def f(frame): return frame.f_locals['args']", "f_locals['args']"),
        ("import logging\nlogging.getLogger('torch._subclasses.fake_tensor')", "torch._subclasses.fake_tensor"),
    ],
)
def test_a_use_is_found(source, used):
    assert used in [name for _, _, name in _uses({"file.py": source})]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def __init__(self): self._x = 1\ndef f(a): return a._x",
        "class A:\n def _f(self): pass\nclass B(A):\n def g(self): return super()._f() or self._f()",
        "import os\nos._exit(1)",
        "class A:\n def __init__(self): self.reduce_grads = True\ndef f(a): return a.reduce_grads",
        "_x = 1\ndef f(a, _=None): return a.__dict__, _x",
    ],
)
def test_our_own_names_are_no_use(source):
    assert not list(_uses({"file.py": source}))


_METHODS = (FunctionType, classmethod, staticmethod, property)
# Modules for a package that the tests do not install.
_NEEDS = {"tensorshard.compat.lightning": "lightning", "tensorshard.compat.trl": "trl"}


def test_no_class_of_ours_overrides_a_private_method_of_torch():
    modules = [module.name for module in pkgutil.walk_packages([str(_PACKAGE)], "tensorshard.")]
    overridden = []
    for name in modules:
        if name.startswith(f"tensorshard.{_PRIVATE}") or name.endswith("__main__"):
            continue
        if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
            continue
        for cls in vars(importlib.import_module(name)).values():
            if not isinstance(cls, type) or cls.__module__ != name:
                continue
            torchs = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "torch"]
            own = [key for key, value in vars(cls).items() if _is_private(key) and isinstance(value, _METHODS)]
            overridden += [f"{name}.{cls.__name__}.{key}" for key in own if any(key in vars(base) for base in torchs)]
    assert not overridden, f"give tensorshard.{_PRIVATE} a class that calls a public method: {overridden}"


def _documented() -> Iterator[tuple[str, str]]:
    for path in sorted((_PACKAGE / _PRIVATE).glob("*.py")):
        tree = ast.parse(path.read_text())
        imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        if any(_names_private(node) and _hands_on(tree, node) for node in imports):
            yield path.stem, ast.get_docstring(tree) or ""
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not _is_private(node.name) and node.name != "Comm":
                yield f"{path.stem}.{node.name}", ast.get_docstring(node) or ""


def _names_private(node: ast.ImportFrom) -> bool:
    return any(map(_is_private, [*(node.module or "").split("."), *(alias.name for alias in node.names)]))


def _hands_on(tree: ast.Module, node: ast.ImportFrom) -> bool:
    """Whether something that is imported is public under its name here."""
    public = {value for n in tree.body if isinstance(n, ast.Assign) for value in _public_names(n)}
    return any((alias.asname or alias.name) in public for alias in node.names)


def _public_names(node: ast.Assign) -> list[str]:
    if not (isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"):
        return []
    assert isinstance(node.value, ast.List)
    return [entry.value for entry in node.value.elts if isinstance(entry, ast.Constant)]


@pytest.mark.parametrize(("name", "text"), list(_documented()), ids=lambda value: value if "\n" not in value else "")
def test_each_name_says_why_where_and_what_else(name, text):
    for part in ("Why: ", "Checked: torch 2.1", "Public way: "):
        assert part in text, f"{name} does not say {part!r}"


def test_a_checkpoint_calls_what_is_replaced_for_it(monkeypatch):
    module, name = repeated_forwards()
    original, called = getattr(module, name), []

    def replaced(function: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(function)
        return original(function, *args, **kwargs)

    monkeypatch.setattr(module, name, replaced)
    checkpoint(torch.sin, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert called == [torch.sin]


def test_tensors_are_packed_in_the_order_of_their_dimensions(monkeypatch):
    """On CUDA, torch reads the memory of any dense tensor as it lies."""
    pack = torch._chunk_cat

    def packs(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return pack(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "_chunk_cat", packs)
    gradient, out = torch.arange(8.0).view(4, 2).t(), torch.empty(2, 4)
    chunk_cat([gradient], 2, out)
    assert torch.equal(out.view(2, 4), gradient)

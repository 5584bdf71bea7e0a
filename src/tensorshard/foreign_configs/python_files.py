"""Configs that are Python, read and never run: LiBai's LazyConfig files and the functions of torchtitan's config_registry.

Literals, arithmetic, assignments to dotted names, ``LazyCall``, classes called with keywords, functions of the file, and
files that it imports are followed. All else becomes an :class:`Unread` with its line, which is refused where a key needs it.
"""

import ast
import copy
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorshard.common.paths import read_utf8
from tensorshard.foreign_configs import libai
from tensorshard.foreign_configs.ledger import Unread

_STEPS = 20_000
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.Eq: operator.eq,
    ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.USub: lambda _, a: -a, ast.UAdd: lambda _, a: +a, ast.Not: lambda _, a: not a,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    "sum": sum, "len": len, "int": int, "float": float, "str": str, "bool": bool, "min": min, "max": max,
    "round": round, "abs": abs, "list": list, "tuple": list, "range": range, "dict": dict, "sorted": sorted,
    "math.ceil": math.ceil, "math.floor": math.floor, "path.join": lambda *parts: "/".join(parts),
    "omegaconf.DictConfig": lambda content=None, **_: copy.deepcopy(content or {}),
    "OmegaConf.create": lambda content=None, **_: copy.deepcopy({} if content is None else content),
    "copy.deepcopy": copy.deepcopy, "copy.copy": copy.copy, "dataclasses.replace": lambda of, **changes: {**of, **changes},
}  # fmt: skip
_METHODS: dict[type, tuple[str, ...]] = {
    dict: ("get", "keys", "values", "items", "copy", "update", "pop"),
    list: ("append", "extend", "copy", "index"),
}
_MAKES = ("default_adamw",)
"""Functions of torchtitan that make a config of their arguments, as its classes do."""


class _Function(Unread):
    """A function of a file, which is followed where it is called."""

    def __init__(self, node: ast.FunctionDef, where: str) -> None:
        super().__init__(node.name, where, name=node.name)
        self.node = node


class _CannotTell(Exception):
    """A value that reading does not give."""


class _Stopped(ValueError):
    """A file that cannot be followed any further."""


def read(path: Path, text: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The program whose config a Python file is, and the config as nested mappings; None if it is no such file.

    Args:
        path: the file, from which others are found. text: what is in it.
        given: ``config`` is taken out of it: the name of one of several functions.

    Raises:
        ValueError: it is no Python, or has several configs, and none or another is named.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as Python: {error}") from error
    reader = _Reader(path, tree)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _makes_config(node)]
    if functions:
        return "torchtitan", reader.torchtitan(functions, given)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return ("libai", reader.libai()) if names & {"LazyCall", "get_config", "train"} else None


def _makes_config(node: ast.FunctionDef) -> bool:
    if node.returns is not None:
        made = {ast.unparse(node.returns).strip("'\"")}
    else:
        returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
        made = {ast.unparse(value.func) for value in returned if isinstance(value, ast.Call)}
    is_config = any(name.endswith("Config") for name in made)
    return is_config and not node.name.startswith("_") and len(node.args.defaults) == len(node.args.args)


class _Reader:
    """Follows the statements of one file.

    Attributes:
        path: the file. names: what its names mean so far.
        notes: statements that may change the config and cannot be followed, by line; files that are not there.
    """

    def __init__(self, path: Path, tree: ast.Module, notes: dict[str, Any] | None = None, depth: int = 0) -> None:
        self.path, self.tree, self.depth = path, tree, depth
        self.names: dict[str, Any] = {}
        self.notes: dict[str, Any] = {} if notes is None else notes
        self._is_main = notes is None
        self._unsure = ""  # the condition or loop that is not known, within which values are not
        self._left = _STEPS

    def libai(self) -> dict[str, Any]:
        """The groups that LiBai's trainer reads, and the names of others."""
        self.run(self.tree.body)
        groups = {name: _plain(value) for name, value in self.names.items() if _is_group(value) and name[0] != "_"}
        read = ("train", "optim", "model", "dataloader", "tokenization", "graph")
        lost = {
            f"missing {name}": str(self.names[name]) for name in read[:2] if isinstance(self.names.get(name), Unread)
        }
        others = ", ".join(name for name in groups if name not in read)
        config = {name: groups[name] for name in read if name in groups}
        return {**config, **({"other groups": others} if others else {}), **lost, **self.notes}

    def torchtitan(self, functions: list[ast.FunctionDef], given: dict[str, Any]) -> dict[str, Any]:
        """The config that the one function makes, or the one that ``config`` of `given` names."""
        known = [node.name for node in functions]
        name = given.pop("config", known[0] if len(known) == 1 else None)
        if name not in known:
            asked = "several configs" if name is None else f"no config {name!r}"
            raise ValueError(f"{self.path} has {asked}; name one, as config={known[0]} (it has {', '.join(known)})")
        self.run(self.tree.body)
        made = _plain(self._called(self.names[name].node, [], {}))
        if not isinstance(made, dict):
            raise ValueError(f"{self.path}: what {name} returns is not read: {made}")
        return {**made, **self.notes}

    def _at(self, node: ast.AST) -> str:
        return f"{self.path.name}, line {getattr(node, 'lineno', 0)}"

    def _unread(self, node: ast.AST, **more: Any) -> Unread:
        return Unread(" ".join(ast.unparse(node).split()), self._at(node), **more)

    def _note(self, node: ast.AST, kind: str = "line") -> None:
        of = "" if self._is_main else f" of {self.path.stem}"
        self.notes.setdefault(f"{kind} {getattr(node, 'lineno', 0)}{of}", " ".join(ast.unparse(node).split()))

    def run(self, body: Iterable[ast.stmt]) -> Any:
        """Follows statements; what they return, as a list of one value, or None where they go on."""
        for node in body:
            self._left -= 1
            if self._left < 0:
                raise _Stopped(f"{self._at(node)}: more than {_STEPS} statements would have to be followed")
            ended = self._statement(node)
            if ended is not None:
                return ended
        return None

    def _statement(self, node: ast.stmt) -> Any:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._set(target, self.value(value))
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._set(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                self._set(target, self.value(ast.copy_location(ast.BinOp(target, op, value), node)))
            case ast.FunctionDef():
                where = self._at(node)
                self.names[node.name] = Unread(node.name, where) if node.decorator_list else _Function(node, where)
            case ast.ClassDef(name=name):
                self.names[name] = Unread(name, self._at(node), name=name)
            case ast.Import(names=names):
                for alias in names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.names[name] = Unread(alias.name, self._at(node), name=alias.name if alias.asname else name)
            case ast.ImportFrom():
                self._import(node)
            case ast.Return(value=value):
                return [self.value(value) if value is not None else None]
            case ast.If(test=test, body=body, orelse=other):
                return self._if(node, self._truth(test), body, other)
            case ast.For(target=target, iter=iterated, body=body, orelse=other):
                self._for(target, self.value(iterated), [*body, *other], node)
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target)
            case ast.Expr(value=ast.Call()):
                result = self.value(node.value)
                if isinstance(result, Unread) and f"line {node.lineno}" not in self.notes:
                    self._note(node, "code in line")
            case ast.Try(body=body) if all(isinstance(part, ast.Import | ast.ImportFrom) for part in body):
                return self.run(body)
            case ast.Raise():
                if not self._unsure:
                    raise _Stopped(f"{self._at(node)}: the config raises {ast.unparse(node)[6:]}")
                return []
            case ast.Expr() | ast.Pass() | ast.Assert() | ast.AnnAssign() | ast.Global():
                pass
            case _:
                self._note(node)
        return None

    def _if(self, node: ast.If, holds: bool | None, body: list[ast.stmt], other: list[ast.stmt]) -> Any:
        if holds is not None:
            return self.run(body if holds else other)
        before, self._unsure = self._unsure, f"if {ast.unparse(node.test)}"
        returns = [ended for ended in (self.run(body), self.run(other)) if ended]
        self._unsure = before
        return [self._unread(node.test)] if returns else None

    def _for(self, target: ast.expr, values: Any, body: list[ast.stmt], node: ast.For) -> None:
        jumps = any(isinstance(part, ast.Break | ast.Continue | ast.Return) for part in ast.walk(node))
        if isinstance(values, list | dict | range) and not jumps:
            for value in values:
                self._set(target, value)
                self.run(body)
            return
        before, self._unsure = self._unsure, f"for {ast.unparse(target)} in {ast.unparse(node.iter)}"
        self._set(target, self._unread(node.iter))
        self.run([part for part in body if not jumps or not isinstance(part, ast.Break | ast.Continue | ast.Return)])
        self._unsure = before

    def _import(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        is_config = bool(node.level) or "configs" in module.split(".")
        file = self._found(module.replace(".", "/") + ".py", node.level) if is_config else None
        for alias in node.names:
            name, known = alias.asname or alias.name, f"{module}.{alias.name}" if module else alias.name
            if file is not None and alias.name == "*":
                self.names.update({k: v for k, v in self._file(file).items() if k[0] != "_"})
            elif file is not None:
                self.names[name] = self._file(file).get(alias.name, Unread(known, self._at(node), name=known))
            else:
                is_group = is_config and module != "" and alias.name[0].islower()
                base = self._base(module.replace(".", "/")) if is_group else {}
                self.names[name] = base.get(alias.name, Unread(known, self._at(node), name=known))

    def _found(self, name: str, level: int = 0) -> Path | None:
        """A file that is imported or named, seen from this one's folder or those above it."""
        folder = self.path.resolve().parent
        roots = [folder.parents[level - 2]] if level > 1 else [folder] if level else [folder, *folder.parents[:4]]
        places = [root / start / name for root in roots for start in ("", "configs")]
        return next((place for place in places if place.is_file() and self.depth < 10), None)

    def _file(self, path: Path) -> dict[str, Any]:
        try:
            tree = ast.parse(read_utf8(path))
        except (SyntaxError, ValueError, OSError) as error:
            raise _Stopped(f"{path}, which {self.path} imports, cannot be read as Python: {error}") from error
        other = _Reader(path, tree, self.notes, self.depth + 1)
        other.run(tree.body)
        return other.names

    def _base(self, path: str) -> dict[str, Any]:
        """What LiBai's own file of this name has, as the file itself is not there."""
        path = path[path.find("common/") :] if "common/" in path else path
        self.notes[f"base {path}"] = f"{path}.py"
        return copy.deepcopy(libai.BASES.get(path, {}))

    def _delete(self, target: ast.expr) -> None:
        if isinstance(target, ast.Attribute) and not self._unsure:
            base = self._place(target.value)
            parts = base.parts if isinstance(base, Unread) else base
            if isinstance(parts, dict):
                parts.pop(target.attr, None)
                return
        self._note(target)

    def _set(self, target: ast.expr, value: Any) -> None:
        if self._unsure:
            value = Unread(f"{value} ({self._unsure})", self._at(target))
        if isinstance(target, ast.Tuple | ast.List):
            whole = isinstance(value, list) and len(value) == len(target.elts)
            for part, one in zip(target.elts, value if whole else [value] * len(target.elts), strict=False):
                self._set(part, one if whole else self._unread(target))
        elif isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Attribute | ast.Subscript):
            base = self._place(target.value)
            key: Any = target.attr if isinstance(target, ast.Attribute) else self.value(target.slice)
            value = str(value) if key == "_target_" and isinstance(value, Unread) else value
            if isinstance(base, Unread):
                base.parts[str(key)] = value
            elif isinstance(base, dict) or (isinstance(base, list) and isinstance(key, int) and key < len(base)):
                base[key] = value
            else:
                self._note(target)

    def _place(self, node: ast.expr) -> Any:
        """What `node` means, to be written into: groups that are not there yet are made."""
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return self.value(node)
        base = self._place(node.value)
        key: Any = node.attr if isinstance(node, ast.Attribute) else self.value(node.slice)
        parts: Any = base.parts if isinstance(base, Unread) else base
        if isinstance(parts, dict) and isinstance(key, str | int) and parts.get(key) is None:
            parts[key] = self._unread(node) if isinstance(base, Unread) else {}
        return parts[key] if isinstance(parts, dict) and isinstance(key, str | int) else self.value(node)

    def _truth(self, node: ast.expr) -> bool | None:
        value = self.value(node)
        return None if isinstance(value, Unread) else bool(value)

    def value(self, node: ast.expr) -> Any:
        """What an expression gives; an Unread where reading does not say it."""
        try:
            value = self._value(node)
        except (_CannotTell, ArithmeticError, TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            if isinstance(error, _Stopped):
                raise
            return self._unread(node)
        return list(value) if isinstance(value, tuple) else value

    def _known(self, node: ast.expr) -> Any:
        value = self.value(node)
        if isinstance(value, Unread):
            raise _CannotTell
        return value

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self.names[name] if name in self.names else Unread(name, self._at(node), name=name)
            case ast.Attribute(value=inner, attr=attr):
                base = self.value(inner)
                if isinstance(base, Unread):
                    name = f"{base.name}.{attr}" if base.name else ""
                    return base.parts.get(attr, Unread(name or ast.unparse(node), self._at(node), name=name))
                return base[attr]
            case ast.Subscript(value=inner, slice=ast.Slice(lower=lower, upper=upper, step=None)):
                ends = [None if end is None else self._known(end) for end in (lower, upper)]
                return self._known(inner)[slice(*ends)]
            case ast.Subscript(value=inner, slice=index):
                return self._known(inner)[self._known(index)]
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return [self.value(element) for element in elements]
            case ast.Dict(keys=keys, values=values):
                pairs = [
                    ({self._known(k): self.value(v)} if k else self._known(v))
                    for k, v in zip(keys, values, strict=True)
                ]
                return {key: value for pair in pairs for key, value in pair.items()}
            case ast.BinOp(left=left, op=op, right=right):
                return self._reckoned(op, self._known(left), self._known(right))
            case ast.UnaryOp(op=op, operand=operand):
                return _OPERATORS[type(op)](None, self._known(operand))
            case ast.Compare(left=left, ops=ops, comparators=others):
                terms = [self._known(term) for term in (left, *others)]
                return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(ops, terms, terms[1:], strict=False))
            case ast.BoolOp(op=op, values=terms):
                value = None
                for term in terms:
                    value = self._known(term)
                    if bool(value) is isinstance(op, ast.Or):
                        break
                return value
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self._known(test) else other)
            case ast.JoinedStr(values=parts):
                return "".join(str(self._known(getattr(part, "value", part))) for part in parts)
            case ast.Call():
                return self._call(node)
        raise _CannotTell

    @staticmethod
    def _reckoned(op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Pow) and abs(right) > 64:
            raise _CannotTell
        if isinstance(op, ast.Mult) and not all(isinstance(side, int | float) for side in (left, right)):
            raise _CannotTell
        return _OPERATORS[type(op)](left, right)

    def _call(self, node: ast.Call) -> Any:
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is None and not isinstance(value, dict):
                raise _CannotTell
            keywords.update(value if keyword.arg is None else {keyword.arg: value})
        if isinstance(node.func, ast.Call) and str(self.value(node.func.func)).rpartition(".")[2] == "LazyCall":
            return {"_target_": str(self.value(node.func.args[0])), **copy.deepcopy(keywords)}
        args = [self.value(arg) for arg in node.args]
        if isinstance(node.func, ast.Attribute):
            base = self.value(node.func.value)
            if node.func.attr in _METHODS.get(type(base), ()):
                return self._method(node, base, args, keywords)
        called = self.value(node.func)
        if isinstance(called, _Function):
            return self._called(called.node, args, keywords)
        if not isinstance(called, Unread) or not called.name:
            raise _CannotTell
        values, last = (*args, *keywords.values()), called.name.rpartition(".")[2]
        known = _CALLS.get(".".join(called.name.split(".")[-2:]))
        if last == "get_config" and len(args) == 1 and isinstance(args[0], str):
            file = self._found(args[0])
            return self._base(args[0].removesuffix(".py")) if file is None else self._file(file)
        if known is not None and not any(isinstance(value, Unread) for value in (args if known is dict else values)):
            return known(*args, **keywords)
        if last in _MAKES or (last.lstrip("_")[:1].isupper() and not args):
            return {"_target_": called.name, **keywords}
        if known is None and any(
            isinstance(value, dict) or (isinstance(value, Unread) and value.parts) for value in values
        ):
            self._note(node)  # it may change what it is given
        return self._unread(node, keywords=keywords)

    def _method(self, node: ast.Call, base: Any, args: list[Any], keywords: dict[str, Any]) -> Any:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if any(isinstance(arg, Unread) for arg in args) and name != "append":
            self._note(node)
            raise _CannotTell
        if self._unsure and name in ("update", "append", "extend", "pop"):
            self._note(node)
            return None
        result = getattr(base, name)(*args, **keywords)
        return (
            list(result)
            if name in ("keys", "values")
            else [list(pair) for pair in result]
            if name == "items"
            else result
        )

    def _called(self, node: ast.FunctionDef, args: list[Any], keywords: dict[str, Any]) -> Any:
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        defaults = [*([None] * (len(names) - len(node.args.defaults))), *node.args.defaults]
        values = {
            name: self.value(default) for name, default in zip(names, defaults, strict=True) if default is not None
        }
        for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            values |= {arg.arg: self.value(default)} if default is not None else {}
        if self.depth > 20 or node.args.vararg or node.args.kwarg:
            raise _CannotTell
        outer, self.names = self.names, {**self.names, **values, **dict(zip(names, args, strict=False)), **keywords}
        self.depth += 1
        try:
            returned = self.run(node.body)
        finally:
            self.names, self.depth = outer, self.depth - 1
        return returned[0] if returned else None


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, Unread) and bool(value.parts))


def _plain(value: Any) -> Any:
    """`value` as nested dicts, with what was set on what is not read."""
    if isinstance(value, Unread) and value.parts:
        return {key: _plain(part) for key, part in value.parts.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return value

"""LazyCall: a call recorded as data, and checked against the signature of its target.

Also here: the error of configs, and how it names the nearest known word.
"""

import difflib
import functools
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from tensorshard.common.words import kind_of

CALL_KEYS = frozenset({"_target_", "_partial_", "_args_"})
"""Keys of a recorded call that are not arguments."""

WEIGHTS_KEY = "model.pretrained"
"""The key for the files with the model's initial weights. It is not an argument of the model either, unless the model's
constructor has one of this name."""


class LazyCall:
    """``LazyCall(target)(arguments)`` records that call as a ``DictConfig`` instead of making it.

    The idea, and the name, are those of detectron2's LazyConfig and LiBai. Arguments may be recorded calls
    themselves. Required arguments may be left out: an override, or the code that instantiates, supplies them.

    Args:
        target: a class, function or classmethod that can be imported by name, or that the config file itself defines.
        partial: instantiate to a ``functools.partial`` of `target` with these arguments instead of calling it. This is
            for optimizers, whose parameters are not known yet, and for functions that are values themselves.

    Raises:
        ConfigError: `target` cannot be found under its own name.

    Example::

        model = LazyCall(GPT)(depth=4, width=256)
        optimizer = LazyCall(torch.optim.AdamW, partial=True)(lr=3e-4, weight_decay=0.1)
    """

    def __init__(self, target: Callable[..., Any], *, partial: bool = False) -> None:
        self._target = target
        self._name = target_name(target)
        self._partial = partial

    def __call__(self, *args: Any, **kwargs: Any) -> DictConfig:
        """The recorded call.

        Raises:
            ConfigError: the target does not take an argument, or a config cannot hold it.
        """
        positional, named = _bind(self._target, self._name, args, kwargs)
        call: dict[str, Any] = {"_target_": self._name}
        if self._partial:
            call["_partial_"] = True
        if positional:
            call["_args_"] = [plain(value, f"an argument of {self._name}") for value in positional]
        for key, value in named.items():
            call[key] = plain(value, f"argument {key!r} of {self._name}")
        return OmegaConf.create(call)


def plain(value: Any, where: str) -> Any:
    """`value` as data that a config can hold: scalars, lists, mappings, and configs as they are.

    Raises:
        ConfigError: `value` is anything else; the error names it by `where`.
    """
    if value is None or isinstance(value, bool | int | float | str | DictConfig | ListConfig):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return {key: plain(item, f"{where}, key {key!r}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        name = value.__qualname__
        raise ConfigError(
            f"{where} is the callable {name} itself, which a config cannot hold; write LazyCall({name}, partial=True)()"
        )
    raise ConfigError(
        f"{where} is of type {type(value).__name__}, which a config cannot hold; it holds numbers, strings, "
        f"booleans, None, lists, mappings, and LazyCall(...)(...) for everything else"
    )


_OF_FILE = "tensorshard_config_"


def run_file(path: Path, code: str | None = None) -> ModuleType:
    """Runs a Python file as a module of its own. What it defines at its top level is found by :func:`find_target`.

    Args:
        code: the file's text, if it was read already.

    Raises:
        Exception: any exception of the file.
    """
    name = _module_of(path)
    module = ModuleType(name)
    module.__file__ = str(path)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(path.read_text("utf-8") if code is None else code, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _module_of(path: Path) -> str:
    return _OF_FILE + re.sub(r"\W", "_", str(path.resolve()))


def file_of_target(name: Any) -> str | None:
    """The file in a name such as ``my_config.py:loss``; None for names of what is in modules."""
    return name.rpartition(":")[0] if isinstance(name, str) and ".py:" in name else None


def _resolve(name: str) -> Any:
    """What has this name, which is that of a module's attribute, or ``FILE.py:attribute``."""
    file = file_of_target(name)
    if file is None:
        return pkgutil.resolve_name(name)
    path = Path(file)
    if not path.is_file():
        raise ImportError(f"there is no file {file} here; the current directory is {Path.cwd()}")
    target: Any = sys.modules.get(_module_of(path)) or run_file(path)
    for part in name.rpartition(":")[2].split("."):
        target = getattr(target, part)
    return target


def target_name(target: Callable[..., Any]) -> str:
    """The shortest dotted name under which `target` can be imported; for what a config file defines, ``FILE.py:name``.

    Raises:
        ConfigError: there is none, as for a lambda or a local function.
    """
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):  # a classmethod, by the class it was taken from, which may inherit it
        name = f"{owner.__module__}.{owner.__qualname__}.{target.__name__}"
    else:
        name = f"{getattr(target, '__module__', None)}.{getattr(target, '__qualname__', None)}"
    if name.startswith(_OF_FILE):
        module, _, attribute = name.partition(".")
        path = Path(str(sys.modules[module].__file__))
        name = f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{attribute}"
    try:
        imported = _resolve(name)
    except (ImportError, AttributeError, ValueError):
        imported = None
    if imported != target:
        raise ConfigError(
            f"LazyCall was given {getattr(target, '__qualname__', target)}, which cannot be found under the "
            f"name {name}; define it at the top level of a module or of the config, so that every process can import it"
        )
    return _public_name(name)


def _public_name(name: str) -> str:
    """The shortest name: of the outermost package that has what the module defines, such as ``torch.optim.AdamW``.

    A config is then still read after the package has moved the definition elsewhere.
    """
    home, _, attributes = name.rpartition(".")
    while home and home not in sys.modules:  # a class, of which this is a method
        home, _, outer = home.rpartition(".")
        attributes = f"{outer}.{attributes}"
    first = attributes.partition(".")[0]
    defined = getattr(sys.modules.get(home), first, None)
    packages = [home[:at] for at, letter in enumerate(home) if letter == "."]
    public = (package for package in packages if vars(sys.modules[package]).get(first) is defined)
    return f"{next(public, home)}.{attributes}" if home and defined is not None else name


def find_target(name: Any, where: str) -> Callable[..., Any]:
    """The callable with the dotted `name`.

    Raises:
        ConfigError: it cannot be imported, or is not callable. The error says at which key (`where`) it stands.
    """
    try:
        target = _resolve(name)
    except Exception as error:  # a file may raise anything
        raise ConfigError(
            f"{where} calls {name!r}, which cannot be imported ({error}); modules are looked for among the "
            f"installed ones and in the current directory"
        ) from error
    if not callable(target):
        raise ConfigError(f"{where} calls {name!r}, which is {kind_of(target)} and cannot be called")
    return target


def parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of `target` by name, annotations evaluated if possible; None if it takes any keyword."""
    try:
        signature = inspect.signature(target, eval_str=True)
    except Exception:  # annotations may be any code; the names are useful without them
        try:
            signature = inspect.signature(target)
        except (TypeError, ValueError):  # some built-in callables have no signature
            return None
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return None
    return {name: p for name, p in signature.parameters.items() if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)}


def calls(config: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every recorded call in `config` (plain dictionaries and lists) with its dotted key, outermost first."""
    if isinstance(config, dict):
        if "_target_" in config:
            yield where, config
        for key, value in config.items():
            yield from calls(value, f"{where}.{key}" if where else str(key))
    elif isinstance(config, list):
        for index, value in enumerate(config):
            yield from calls(value, f"{where}[{index}]")


def check_calls(config: DictConfig) -> None:
    """Checks every recorded call in `config` against the signature of its target.

    Raises:
        ConfigError: a target cannot be imported, or does not take an argument.
    """
    for where, call in calls(OmegaConf.to_container(config)):
        name = call["_target_"]
        known = parameters(find_target(name, where or "the config"))
        if known is None:
            continue
        for key in call:
            if key not in CALL_KEYS and key not in known and f"{where}.{key}" != WEIGHTS_KEY:
                raise ConfigError(f"{where}.{key}: {_unknown_argument(name, str(key), known)}".lstrip("."))


def _unknown_argument(name: str, key: str, known: Mapping[str, Any]) -> str:
    return f"{name} has no argument {key!r}; {suggest(key, known, 'its arguments')}"


def _bind(
    target: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that must stay positional, and all others by name."""
    known = parameters(target)
    if known is not None:
        for key in kwargs:
            if key not in known:
                raise ConfigError(_unknown_argument(name, key, known))
    if not args:
        return (), kwargs
    try:
        bound = inspect.signature(target).bind_partial(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called so: {error}") from error
    except ValueError:  # no signature to give names by
        return args, kwargs
    kinds = [bound.signature.parameters[key].kind for key in bound.arguments]
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.POSITIONAL_ONLY in kinds:
        return args, kwargs
    names = list(bound.arguments)[: len(args)]
    return (), {**dict(zip(names, args, strict=True)), **kwargs}


def instantiate(config: DictConfig | ListConfig, **arguments: Any) -> Any:
    """Makes the recorded call `config` and returns its result. Calls inside it are made first, and configs become plain
    lists and dicts.

    Args:
        config: a recorded call from ``LazyCall(...)(...)``, or a list or mapping of such.
        arguments: further arguments of the outermost call (a model, parameters). They win over recorded ones, and reach
            the target without being copied.

    Raises:
        ConfigError: a target cannot be imported.
        Exception: any exception of a target, with a note that names the target and its key.
    """
    return _build(OmegaConf.to_container(config, resolve=True, throw_on_missing=True), "", arguments)


def _build(value: Any, key: str, further: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_build(item, f"{key}[{index}]", {}) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    named = {
        name: _build(item, f"{key}.{name}".lstrip("."), {})
        for name, item in value.items()
        if "_target_" not in value or name not in CALL_KEYS
    }
    if "_target_" not in value:
        return named
    positional = _build(value.get("_args_", []), f"{key}._args_".lstrip("."), {})
    target = find_target(value["_target_"], key or "the config")
    call = functools.partial(target, *positional, **{**named, **further})
    if value.get("_partial_"):
        return call
    try:
        return call()
    except Exception as error:
        error.add_note(f"in the call of {value['_target_']}" + (f" at {key} of the config" if key else ""))
        raise


class ConfigError(ValueError):
    """A config, or an override of one, that cannot be honoured; the message is one sentence."""


class MissingValueError(ConfigError):
    """A required value (``"???"``) that was not given.

    Attributes:
        target: what is called with the value; None if it is not an argument of a recorded call.
    """

    def __init__(self, source: str, key: str, target: str | None) -> None:
        needed = "" if target is None else f", which {target} needs"
        what = "DIR, a directory as Hugging Face writes it" if key == "model.pretrained" else "VALUE"
        super().__init__(f"{source}: {key} has no value{needed}; give it one: {key}={what}")
        self.target = target


def suggest(word: str, known: Iterable[str], what: str) -> str:
    """The end of a sentence about an unknown `word`: the nearest of the `known` ones, and all of them.

    Args:
        what: what the known words are, for instance ``"its arguments"``.
    """
    words = sorted(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    all_words = f"{what}: {', '.join(words) or 'none'}"
    return f"did you mean {near[0]!r}? ({all_words})" if near else all_words

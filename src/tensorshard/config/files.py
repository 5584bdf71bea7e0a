"""Reads configs (Python files, or the YAML of an earlier run), and writes them so that they can be read again.

Also here: the calls that a YAML config may make: a file from a stranger must not be able to run any function it names.

A Python config is code itself, and is trusted.
"""

import __future__

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from omegaconf.resolvers import oc
from yaml import YAMLError

from tensorshard.common.paths import read_utf8, write_whole
from tensorshard.common.words import is_inside
from tensorshard.config.lazy import (
    ConfigError,
    LazyCall,
    MissingValueError,
    calls,
    file_of_target,
    find_target,
    plain,
    run_file,
    suggest,
)
from tensorshard.config.overrides import Override, apply_overrides

ASKED = "asked"
"""The key under which :func:`load_config` records its source and overrides."""

# A reference to another key; with a colon it would be a call of a resolver.
_REFERENCE = re.compile(r"\$\{[^${}:]+\}")

_SHIPPED = Path(__file__).resolve().parent.parent / "configs"
ALLOWED = ("tensorshard", "torch.nn", "torch.optim", "torchmetrics", "transformers")
"""Modules whose functions and classes a YAML config may call."""

# These modules start processes or read further configs.
_REFUSED = ("tensorshard.cli", "tensorshard.commands", "tensorshard.config", "tensorshard.trainer.launch")
_CODE_FLAG = "trust_remote_code"


def shipped_configs() -> list[str]:
    """Names of the configs that come with the package (``quickstart``, ...), without the parts they share."""
    return sorted(path.stem for path in _SHIPPED.glob("*.py") if not path.name.startswith("_"))


def config_path(source: str | Path) -> Path:
    """The file that `source` means: a path, or the name of a config that comes with the package.

    Raises:
        ConfigError: there is none. The error names the nearest shipped config, or the config in a run's directory.
    """
    path = Path(source)
    if path.suffix in (".py", ".yaml", ".yml"):
        for candidate in (path, _SHIPPED / path):
            if candidate.is_file():
                return candidate.resolve()
        there = [str(file) for file in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(source), there, n=1, cutoff=0.7)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"there is no config file {str(source)!r} here (the current directory is {os.getcwd()}){hint}"
        )
    shipped = _SHIPPED / f"{source}.py"
    if shipped.is_file():
        return shipped
    if path.is_dir():
        raise ConfigError(f"{str(source)!r} is a directory; a run's config is the file {path / 'config.yaml'}")
    raise ConfigError(
        f"there is no config {str(source)!r}; {suggest(str(source), shipped_configs(), 'those shipped')}; "
        f"a file of your own is named with its suffix, .py or .yaml"
    )


def get_config(path: str | Path) -> DictConfig:
    """A config for use within another: ``train = get_config("common/train.py").train``.

    The function looks for `path` beside the file that calls it, then among the configs that come with the package.
    Every call reads the file anew, so that changes of the result change nothing elsewhere. Setting a key that is not
    there is an error, since it would most likely be a typing mistake; ``omegaconf.open_dict`` allows it.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    caller = sys._getframe(1).f_globals.get("__file__")
    beside = Path(caller).resolve().parent / path if caller else Path(path)
    return _read(beside if beside.is_file() else config_path(path))


def load_config(source: str | Path, overrides: Iterable[str] = (), *, allow: Iterable[str] = ()) -> DictConfig:
    """The config of a run: read, overridden and checked, without instantiating anything.

    Args:
        source: a ``.py`` config, a ``.yaml`` one that an earlier run wrote, or the name of one that comes
            with the package (``"quickstart"``).
        overrides: ``a.b=c``, applied in this order; see :func:`apply_overrides`.
        allow: modules that a YAML config may call beside those of :data:`tensorshard.config.files.ALLOWED`. A
            Python config may call anything, as it is code itself.

    Returns:
        The config, with its source and overrides under the key ``asked``: ``{config: source, overrides: [...]}``.

    Raises:
        ConfigError: there is no such config, it cannot be read, an override or an argument of a recorded call
            is wrong, a required value (``"???"``) is missing, or a reference (``${a.b}``) leads nowhere.
    """
    overrides = list(overrides)
    path = config_path(source)
    config = _read(path)
    if path.suffix != ".py":
        check_targets(config, str(source), allow)
    config = apply_overrides(config, overrides)
    if path.suffix != ".py":  # an override may have changed what a reference leads to
        check_targets(config, str(source), allow, overrides)
    if ASKED in config:
        raise ConfigError(f"{source}: the key {ASKED!r} is kept for the record of what was asked for; rename it")
    resolved(config, str(source), throw_on_missing=True)
    with open_dict(config):
        config[ASKED] = {"config": str(source), "overrides": overrides}
    return config


def to_yaml(config: DictConfig) -> str:
    """`config` as YAML, without the key ``asked``.

    References to other keys stay references, so that overrides of the YAML reach what refers to them: a schedule over
    ``${train.steps}`` follows another number of steps. References to environment variables stay, too, since their
    values may be secrets, and belong to this machine. References with other resolvers are replaced by their values.
    """
    as_written = OmegaConf.to_container(_without_asked(config), resolve=False)
    return OmegaConf.to_yaml(OmegaConf.create(_with_references(as_written, values_of(config))))


def values_of(config: DictConfig) -> dict[str, Any]:
    """`config` as plain dictionaries and lists, without the key ``asked``.

    References are resolved, except for those to environment variables, whose values may be secrets.
    """
    with _environment_unresolved():
        values: Any = OmegaConf.to_container(_without_asked(config), resolve=True)
    return values


def _without_asked(config: DictConfig) -> DictConfig:
    keys: list[Any] = [key for key in config if key != ASKED]
    return OmegaConf.masked_copy(config, keys)


def _with_references(as_written: Any, values: Any) -> Any:
    """`values`, in which the references of `as_written` are put back if they refer only to other keys."""
    if isinstance(as_written, dict):
        return {key: _with_references(item, values[key]) for key, item in as_written.items()}
    if isinstance(as_written, list):
        return [_with_references(*pair) for pair in zip(as_written, values, strict=True)]
    if not isinstance(as_written, str) or _REFERENCE.search(as_written) is None:
        return values
    rest, count = as_written, 1
    while count:
        rest, count = _REFERENCE.subn("", rest)  # removes the innermost references first
    return values if "${" in rest else as_written


@contextmanager
def _environment_unresolved() -> Iterator[None]:
    """Inside, ``${oc.env:NAME}`` resolves to itself."""

    def reference(name: str, *default: Any) -> str:
        return f"${{oc.env:{','.join([name, *map(str, default)])}}}"

    OmegaConf.register_resolver("oc.env", reference, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True)


def save_config(config: DictConfig, path: str | Path) -> None:
    """Writes `config` to `path` (see :func:`to_yaml`), which :func:`load_config` reads back to an equal one.

    If the config came from :func:`load_config`, its source and overrides go to ``asked.yaml`` beside it. Each file is
    whole or absent.
    """
    path = Path(path)
    texts = {path: to_yaml(config)}
    if ASKED in config:
        texts[path.with_name("asked.yaml")] = OmegaConf.to_yaml(config[ASKED])
    for file, text in texts.items():
        write_whole(file, text)


def _read(path: Path) -> DictConfig:
    config = _read_python(path) if path.suffix == ".py" else _read_yaml(path)
    OmegaConf.set_struct(config, True)
    _open_calls(config)
    return config


def _read_python(path: Path) -> DictConfig:
    code = _text_of(path)
    try:
        namespace = dict(vars(run_file(path, code)))
        namespace.update({name: LazyCall(namespace[name], partial=partial)() for name, partial in _own(namespace)})
    except ConfigError as error:
        raise ConfigError(f"{_line_in(path, error)}: {error}") from error
    except (ConfigAttributeError, ConfigKeyError) as error:
        known = [str(key) for key in error.parent_node or ()]
        raise ConfigError(
            f"{_line_in(path, error)}: there is no key {error.key!r} here; "
            f"{suggest(str(error.key), known, 'the keys here')}"
        ) from error
    except Exception as error:
        raise ConfigError(f"{_line_in(path, error)}: {type(error).__name__}: {error}{_origin(path, error)}") from error
    return OmegaConf.create(
        {name: plain(value, f"{path}: {name!r}") for name, value in namespace.items() if _is_public(name, value)}
    )


def _own(namespace: dict[str, Any]) -> list[tuple[str, bool]]:
    """The sections that are a function or a class itself, as in ``def loss(output, targets)``; and whether it is the
    value, or makes it."""
    kinds = {"model": False, "loss": True, "optimizer": True, "scheduler": True, "collate": True}
    return [(name, partial) for name, partial in kinds.items() if callable(namespace.get(name))]


def _read_yaml(path: Path) -> DictConfig:
    _text_of(path)
    try:
        config = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path} holds a list; a config is a mapping of keys to values")
    return config


def _text_of(path: Path) -> str:
    try:
        return read_utf8(path)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _is_public(name: str, value: Any) -> bool:
    """Whether a name at the top level of a config file is part of the config, not an import or a helper."""
    if name.startswith("_") or isinstance(value, ModuleType | __future__._Feature):
        return False
    return not callable(value)


def _line_in(path: Path, error: Exception) -> str:
    """The last line of the config file at `path` that `error` passed through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _origin(path: Path, error: Exception) -> str:
    """Where `error` was raised, if that was not in the config file at `path` but in a module that it imports."""
    *_, innermost = traceback.extract_tb(error.__traceback__)
    if innermost.filename == str(path) or innermost.filename.startswith("<frozen importlib"):
        return ""
    return f" (raised in {innermost.filename}, line {innermost.lineno})"


def _open_calls(config: DictConfig | ListConfig) -> None:
    """Lets recorded calls take keys that are not there yet. The signatures of their targets say which are known."""
    if isinstance(config, DictConfig) and "_target_" in config:
        OmegaConf.set_struct(config, False)
    keys: Iterable[Any] = config if isinstance(config, DictConfig) else range(len(config))
    for key in keys:
        if not OmegaConf.is_interpolation(config, key) and not OmegaConf.is_missing(config, key):
            child = config[key]
            if isinstance(child, DictConfig | ListConfig):
                _open_calls(child)


def check_targets(config: DictConfig, source: str, allow: Iterable[str] = (), typed: Iterable[str] = ()) -> None:
    """Checks that all calls in `config` are to modules that a YAML file may name. It imports no other module.

    References are resolved first. Those to values that are still to be given resolve to a name that is never allowed.

    Args:
        source: where the config was read from.
        allow: further modules, with all that is in them.
        typed: the overrides that `config` has already. Their user is trusted with the targets that they name.

    Raises:
        ConfigError: there is a call to something else.
    """
    allowed = (*ALLOWED, *allow)
    typed = list(typed)
    trusted = _targets_of(typed)
    for where, call in calls(resolved(_with_missing_given(config), source)):
        name = call["_target_"]
        if name in trusted:
            continue
        key = where or "the config"
        if (file := file_of_target(name)) is not None:
            if not any(Path(file).resolve() == Path(module).resolve() for module in allow):
                raise ConfigError(_refusal(source, key, name, file))
        elif (
            not isinstance(name, str)
            or not is_inside(name, allowed)
            or (is_inside(name, _REFUSED) and name not in allow)
        ):
            raise ConfigError(_refusal(source, key, name, str(name).rpartition(".")[0]))
        # A module's attributes include what it imports: torch.nn.functional.torch.hub does not belong to torch.nn.
        home = str(getattr(find_target(name, key), "__module__", None))
        if file is None and (not is_inside(home, allowed) or (is_inside(home, _REFUSED) and home not in allow)):
            raise ConfigError(_refusal(source, key, f"{name}, which is {home}'s", home))
        if call.get(_CODE_FLAG) and not any(_CODE_FLAG in text for text in typed):
            raise ConfigError(
                f"{source}: {key}.{_CODE_FLAG} would run code that comes with a model; a YAML file may not ask for "
                f"that. Write the config in Python, which is code and trusted as such"
            )


def _targets_of(typed: Iterable[str]) -> set[str]:
    """The targets that overrides name."""
    targets = set()
    for override in map(Override.parse, typed):
        values = {override.key.rpartition(".")[2]: override.value}
        targets |= {str(call["_target_"]) for _, call in calls(values)}
    return targets


def _with_missing_given(config: DictConfig) -> DictConfig:
    """A copy of `config` in which ``"???"`` is a value that can be referred to."""

    def given(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: given(item) for key, item in value.items()}
        if isinstance(value, list):
            return [given(item) for item in value]
        return "still to be given" if value == "???" else value

    copied = OmegaConf.create(given(OmegaConf.to_container(config, resolve=False)))
    assert isinstance(copied, DictConfig)
    return copied


def modules_to_allow(config: DictConfig) -> list[str]:
    """The top-level modules, and config files, that must be allowed before a YAML file of `config` can be read."""
    container = OmegaConf.to_container(config, resolve=True)
    names = [str(call["_target_"]) for _, call in calls(container)]
    files = {file for name in names if (file := file_of_target(name)) is not None}
    others = [name for name in names if file_of_target(name) is None and not is_inside(name, ALLOWED)]
    return sorted(files | {name.partition(".")[0] for name in others})


def resolved(config: DictConfig, source: str, *, throw_on_missing: bool = False) -> Any:
    """`config` as plain dictionaries and lists, references resolved.

    Raises:
        ConfigError: a reference leads nowhere; or, with `throw_on_missing`, a required value is missing.
    """
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=throw_on_missing)
    except MissingMandatoryValue as error:
        group = error.parent_node
        target = group.get("_target_") if isinstance(group, DictConfig) else None
        raise MissingValueError(source, str(error.full_key), target) from error
    except InterpolationToMissingValueError as error:
        # The key itself is named by the message alone.
        key = str(error).splitlines()[0].rpartition(" ")[2]
        raise MissingValueError(source, key, None) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{source}: {error.full_key} has no value: {str(error).splitlines()[0]}") from error


def _refusal(source: str, key: str, name: Any, module: str) -> str:
    return (
        f"{source}: {key} calls {name}; so that opening a stranger's file runs none of its code, YAML may call what is "
        f"in {', '.join(ALLOWED)}. If you trust it: --allow {module or name}"
    )

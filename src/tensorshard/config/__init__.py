"""Configs: Python files that record calls, overrides of their arguments, and YAML files that repeat a run.

They work as detectron2's LazyConfig, which LiBai also uses: a config is a plain Python module, and
``LazyCall(Class)(argument=...)`` records a call instead of making it. The record is data (OmegaConf), so it can be
changed from the command line and written to a file; :func:`instantiate` makes the calls.
"""

from tensorshard.config.files import config_path, get_config, load_config, save_config, shipped_configs, to_yaml
from tensorshard.config.lazy import ConfigError, LazyCall, instantiate
from tensorshard.config.overrides import apply_overrides

__all__ = [
    "ConfigError",
    "LazyCall",
    "apply_overrides",
    "config_path",
    "get_config",
    "instantiate",
    "load_config",
    "save_config",
    "shipped_configs",
    "to_yaml",
]

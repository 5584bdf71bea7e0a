"""Config files: Python ones that import each other, the YAML of an earlier run, and round trips."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from tensorshard import Plan
from tensorshard.config import (
    ConfigError,
    LazyCall,
    apply_overrides,
    config_path,
    get_config,
    instantiate,
    load_config,
    save_config,
    shipped_configs,
    to_yaml,
)
from tensorshard.config.files import modules_to_allow

_BASE = """
from tensorshard import Plan
from tensorshard.config import LazyCall

train = dict(steps=100, width=8, plan=LazyCall(Plan)(zero=2))
"""

_CHILD = """
import math
from pathlib import Path
from tensorshard.config import get_config

_hidden = object()

def helper():
    return 3

train = get_config("parts/base.py").train
train.steps = 7
train.plan.dp_shard = 2
tau = math.tau
double = dict(width="${train.width}", here=Path("x"))
count = helper()
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "base.py").write_text(_BASE)
    (tmp_path / "child.py").write_text(_CHILD)
    return tmp_path / "child.py"


def _without_asked(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [key for key in config if key != "asked"])  # type: ignore[arg-type]


def test_public_data_is_the_config_and_imports_are_relative_to_the_file(child: Path) -> None:
    config = load_config(child)
    assert set(config) == {"train", "tau", "double", "count", "asked"}
    assert (config.train.steps, config.double.width, config.double.here, config.count) == (7, 8, "x", 3)
    assert instantiate(config.train.plan) == Plan(zero=2, dp_shard=2)


def test_what_was_asked_for_is_recorded(child: Path) -> None:
    config = load_config(child, ["train.steps=5"])
    assert config.asked == {"config": str(child), "overrides": ["train.steps=5"]}


def test_overrides_reach_what_refers_to_them(child: Path) -> None:
    assert load_config(child, ["train.width=9"]).double.width == 9


def test_each_get_config_reads_anew(child: Path) -> None:
    base = child.parent / "parts" / "base.py"
    get_config(base).train.steps = 1
    assert get_config(base).train.steps == 100


def test_a_config_goes_through_pickle(child: Path) -> None:
    config = load_config(child)
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_saved_config_is_read_back_equal(child: Path, tmp_path: Path) -> None:
    config = load_config(child, ["train.steps=5", "train.plan.clip_grad_norm=1e-5"])
    path = tmp_path / "run" / "config.yaml"
    path.parent.mkdir()
    save_config(config, path)
    again = load_config(path)

    assert _without_asked(again) == _without_asked(config)
    assert again.double.width == 8
    assert again.asked == {"config": str(path), "overrides": []}
    assert OmegaConf.load(path.with_name("asked.yaml")) == config.asked
    assert {file.name for file in path.parent.iterdir()} == {"config.yaml", "asked.yaml"}
    assert to_yaml(again) == to_yaml(config) == path.read_text()


@pytest.mark.parametrize(
    "value",
    [1, 1.0, 1e-5, 3e20, float("inf"), True, None, [1, [2, "3"]], {"a": {"b": None}}, [], {}],
    ids=str,
)
def test_any_value_survives_yaml(value: object, tmp_path: Path) -> None:
    _check_round_trip(value, tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "text",
    ["1", "1.0", "1e5", "01", "0x10", "1_000", "true", "no", "null", "~", "", "a: b", "é\n#", "2024-01-01"],
)
def test_text_that_looks_like_something_else_survives_yaml(text: str, tmp_path: Path) -> None:
    _check_round_trip(text, tmp_path / "config.yaml")


def _check_round_trip(value: object, path: Path) -> None:
    save_config(OmegaConf.create({"key": value}), path)
    read = OmegaConf.to_container(load_config(path))["key"]  # type: ignore[call-overload,index]
    assert read == value
    assert type(read) is type(value)


def test_a_saved_config_takes_overrides(child: Path, tmp_path: Path) -> None:
    save_config(load_config(child), tmp_path / "config.yaml")
    config = load_config(tmp_path / "config.yaml", ["train.plan.micro_batches=3"])
    assert instantiate(config.train.plan) == Plan(zero=2, dp_shard=2, micro_batches=3)
    with pytest.raises(ConfigError, match="did you mean 'micro_batches'"):
        load_config(tmp_path / "config.yaml", ["train.plan.microbatches=3"])


def test_yaml_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("key: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ConfigError, match="cannot be read as YAML"):
        load_config(path)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "torch.utils.collect_env.run",
            r"data.train calls torch.utils.collect_env.run; .* --allow torch.utils",
        ),
        ("os.system", "calls os.system; .* --allow os$"),
        ("torch.nn.functional.torch.hub.load", "which is torch.hub's; .* --allow torch.hub$"),
        ("tensorshard.config.files.sys.exit", "calls tensorshard.config.files.sys.exit"),
        ("tensorshard.trainer.launch.launcher.launch", "calls tensorshard.trainer.launch.launcher.launch"),
        ("tensorshard.trainer.run.instantiate", "which is tensorshard.config.lazy's"),
        ("never_imported_module.run", "--allow never_imported_module$"),
        ("${other}", "calls os.system"),
    ],
)
def test_yaml_calls_nothing_that_is_not_allowed(tmp_path: Path, target: str, said: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"other: os.system\ndata: {{train: {{_target_: '{target}', args: touch}}}}\n")
    with pytest.raises(ConfigError, match=said):
        load_config(path)


@pytest.mark.parametrize(
    "model",
    [
        "'${oc.create:{_target_: os.system, command: touch}}'",
        "{_target_: '${names.${steps}}', command: touch}",
        "{_target_: '${steps}', command: touch}",
        "{_target_: 'torch.nn.${steps}', command: touch}",
    ],
)
def test_a_missing_value_or_an_override_hides_no_call(tmp_path: Path, model: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"steps: '???'\nnames: {{'5': os.system}}\nother: ${{steps}}\nmodel: {model}\n")
    with pytest.raises(ConfigError, match=r"model calls|names\.still to be given"):
        load_config(path, ["steps=5"])


def test_an_override_makes_no_call_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "steps: 1\nnames: {'1': '{_target_: torch.nn.Identity}', '5': '{_target_: os.system, command: touch}'}\n"
        "model: '${oc.decode:${names.${steps}}}'\n"
    )
    assert load_config(path).model["_target_"] == "torch.nn.Identity"
    with pytest.raises(ConfigError, match=r"model calls os\.system"):
        load_config(path, ["steps=5"])


class Linear(torch.nn.Linear):
    """It is in no module that a YAML file may name."""


def test_a_value_may_refer_to_one_that_is_still_to_be_given(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("steps: '???'\nmodel: {_target_: torch.nn.Linear, in_features: '${steps}', out_features: 2}\n")
    assert load_config(path, ["steps=5"]).model.in_features == 5
    with pytest.raises(ConfigError, match="steps"):
        load_config(path)
    assert load_config(path, ["steps=5", "model._target_=test_config_files.Linear"]).model.out_features == 2


def test_what_yaml_may_call_is_the_users_to_say(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("key: {_target_: os.path.join, _args_: [a, b]}\n")
    assert instantiate(load_config(path, allow=["os", "posixpath"]).key) == "a/b"
    path.write_text("model: {_target_: transformers.AutoModel.from_config, trust_remote_code: true}\n")
    with pytest.raises(ConfigError, match="trust_remote_code would run code that comes with a model"):
        load_config(path)


def test_values_of_the_environment_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_PLACE", "hidden")
    path = tmp_path / "config.yaml"
    path.write_text("a: ${oc.env:SECRET_PLACE}\nb: in/${a}/x\nc: ${oc.env:NOT_SET,some}\n")
    config = load_config(path)
    assert (config.a, config.b, config.c) == ("hidden", "in/hidden/x", "some")
    written = to_yaml(config)
    assert "hidden" not in written
    path.write_text(written)
    assert OmegaConf.to_container(load_config(path), resolve=True)["b"] == "in/hidden/x"  # type: ignore[call-overload,index]
    assert config.a == "hidden"


def test_a_saved_config_keeps_references_and_the_values_of_resolvers(tmp_path: Path) -> None:
    OmegaConf.register_resolver("twice_of_test", lambda number: 2 * number, replace=True)
    text = "a: 3\nb: ${a}\nc: {d: '${..b} of ${a}', e: '${twice_of_test:${a}}', f: ['${c.d}', 1]}\ng: ${c}\n"
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load_config(path)
    save_config(config, path)
    assert "${a}" in path.read_text() and "twice_of_test" not in path.read_text()
    assert _without_asked(load_config(path)) == _without_asked(config)
    again = load_config(path, ["a=4"])
    assert (again.b, again.g.d, again.c.e, again.c.f) == (4, "4 of 4", 6, ["4 of 4", 1])


def test_a_yaml_list_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="holds a list; a config is a mapping"):
        load_config(tmp_path / "config.yaml")


def test_shipped_configs_are_found_by_name_and_from_anywhere(child: Path) -> None:
    assert "quickstart" in shipped_configs()
    assert config_path("quickstart") == config_path("quickstart.py")
    child.write_text('from tensorshard.config import get_config\ntrain = get_config("common/train.py").train\n')
    assert "_target_" in load_config(child).train.plan


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quikstart", r"no config 'quikstart'; did you mean 'quickstart'\?"),
        ("zzz", "those shipped: .*quickstart.*; a file of your own is named with its suffix"),
        ("missing.py", "no config file 'missing.py' here"),
    ],
)
def test_a_config_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(name)


def test_a_directory_is_pointed_to_its_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory; a run's config is the file .*config\.yaml"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\ny = x +\n", r"bad\.py, line 2: SyntaxError"),
        ("x = 1\ny = z\n", r"bad\.py, line 2: NameError: name 'z' is not defined"),
        ("import no_such_module\n", r"bad\.py, line 1: ModuleNotFoundError"),
        ("optimizer = object()\n", r"'optimizer' is of type object, which a config cannot hold"),
        ("import torch\ndtype = torch.float32\n", r"'dtype' is of type dtype, which a config cannot hold"),
        (
            "from tensorshard.config import LazyCall\nmodel = LazyCall(lambda: 3)()\n",
            "top level of a module or of the config",
        ),
        ("x = '${y}'\n", r"x has no value: Interpolation key 'y' not found"),
        ("x = '???'\n", r"x has no value; give it one: x=VALUE"),
        ("asked = 1\n", "the key 'asked' is kept"),
        (
            "from tensorshard.config import get_config\ntrain = get_config('common/train.py').train\ntrain.stpes = 3\n",
            r"bad\.py, line 3: there is no key 'stpes' here; did you mean 'steps'\?",
        ),
        (
            "from tensorshard.config import get_config\n"
            "train = get_config('common/train.py').train\n"
            "train.plan.zzero = 3\n",
            r"train\.plan\.zzero: tensorshard\.Plan has no argument 'zzero'; did you mean 'zero'\?",
        ),
    ],
)
def test_a_mistake_in_a_config_file_is_placed(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_mistake_in_a_part_is_placed_in_the_part(child: Path) -> None:
    (child.parent / "parts" / "base.py").write_text("train = oops\n")
    with pytest.raises(ConfigError, match=r"child\.py, line 11: .*base\.py, line 1: NameError"):
        load_config(child)


def test_an_error_in_an_imported_module_is_placed_in_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_module_of_test_config.py").write_text("\nx = oops\n")
    (tmp_path / "bad.py").write_text("import broken_module_of_test_config\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"bad\.py, line 1: NameError: .*\(raised in .*_config\.py, line 2\)"):
        load_config(tmp_path / "bad.py")


def test_recorded_calls_in_lists_are_checked_too() -> None:
    config = OmegaConf.create({"hooks": [LazyCall(Plan)(), {"_target_": "tensorshard.plan.plan.Plan", "tpp": 1}]})
    with pytest.raises(ConfigError, match=r"hooks\[1\]\.tpp: .*no argument 'tpp'; did you mean 'tp'"):
        apply_overrides(config, [])


_OWN = """
import torch
from torch import nn
from tensorshard.config import LazyCall

class Net(nn.Module):
    class Inner(nn.Linear):
        pass

    def __init__(self, width):
        super().__init__()
        self.inner = self.Inner(width, 3)

def loss(output, targets):
    return (output - targets).square().mean()

def collate(samples):
    return sum(samples), len(samples)

model = LazyCall(Net)(width=4)
other = LazyCall(Net.Inner)(in_features=2, out_features=1)
"""


def _built(config: DictConfig) -> tuple[str, float]:
    loss = instantiate(config.loss)
    return type(instantiate(config.model)).__name__, loss(torch.ones(2), torch.zeros(2)).item()


def test_a_config_calls_what_it_defines_itself(tmp_path, monkeypatch):
    def as_in_another_process() -> None:
        for name in [name for name in sys.modules if name.startswith("tensorshard_config_")]:
            monkeypatch.delitem(sys.modules, name)

    (tmp_path / "my_config.py").write_text(_OWN)
    monkeypatch.chdir(tmp_path)
    config = load_config("my_config.py", ["model.width=5"])
    assert config.model._target_ == "my_config.py:Net" and config.loss._target_ == "my_config.py:loss"
    assert instantiate(config.collate)([2, 3]) == (5, 2)
    assert _built(config) == ("Net", 1.0) and instantiate(config.other).out_features == 1
    save_config(config, "config.yaml")
    with pytest.raises(ConfigError, match=r"calls my_config\.py:loss; .* If you trust it: --allow my_config\.py"):
        load_config("config.yaml")
    again = load_config("config.yaml", ["model.width=6"], allow=["my_config.py"])
    assert modules_to_allow(again) == ["my_config.py"]
    as_in_another_process()
    assert _built(pickle.loads(pickle.dumps(again))) == ("Net", 1.0)
    with pytest.raises(ConfigError, match="Net has no argument 'widht'; did you mean 'width'"):
        load_config("my_config.py", ["model.widht=5"])
    with pytest.raises(ConfigError, match=r"no config file .my_confg.py. here .*; did you mean .my_config.py.?"):
        load_config("my_confg.py")
    (tmp_path / "my_config.py").unlink()
    as_in_another_process()
    with pytest.raises(ConfigError, match=r"there is no file my_config\.py here"):
        instantiate(again.loss)

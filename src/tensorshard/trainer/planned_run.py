"""The plan of a run if its config leaves it open (``train.plan=auto``, ``train.plan.tp=auto``) or names a file."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from tensorshard.comm.forked import ForkFailed, in_forked_process
from tensorshard.config import ConfigError, LazyCall, instantiate, load_config
from tensorshard.config.files import ASKED
from tensorshard.config.overrides import apply_overrides
from tensorshard.host.memory import available_on_host
from tensorshard.plan.plan import Plan
from tensorshard.predict.hardware import Hardware, hardware_here
from tensorshard.predict.search import PlanSearch, find_plans
from tensorshard.predict.search.problem import SEARCHED
from tensorshard.trainer.initial_model import check_files, for_shapes, initial_model
from tensorshard.trainer.loaders import Collate
from tensorshard.trainer.memory import memory_of_gpus
from tensorshard.trainer.settings import SECTIONS

AUTO = "auto"
_PLAN = "train.plan"


@dataclass(frozen=True)
class PlanRequest:
    """What the overrides of a command line say about the plan.

    Args:
        automatic: whether a search chooses all fields that it can.
        free: the fields that a search chooses, if it does not choose all.
        given: the fields that overrides set.
    """

    automatic: bool = False
    free: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    @property
    def searches(self) -> bool:
        """Whether a search has to choose anything."""
        return self.automatic or bool(self.free)

    def fixed(self, plan: Plan) -> dict[str, Any]:
        """The fields of the config's `plan` that a search must not change."""
        values = {f.name: getattr(plan, f.name) for f in fields(Plan)}
        if self.automatic:
            names = (set(values) - set(SEARCHED)) | (self.given - self.free)
        else:
            names = set(values) - self.free
        return {name: value for name, value in values.items() if name in names}


@dataclass(frozen=True)
class ReadConfig:
    """A config, and what the command line says about its plan."""

    config: DictConfig
    request: PlanRequest = field(default_factory=PlanRequest)


def read_config(source: str, overrides: Sequence[str], *, allow: Sequence[str] = ()) -> ReadConfig:
    """The config, as :func:`tensorshard.config.load_config` reads it, with a plan that may be open, or in a file.

    Besides the usual overrides, ``train.plan=auto`` and ``train.plan.FIELD=auto`` leave the plan, or a field of it, to
    a search. ``train.plan=FILE.yaml`` reads the plan from a file; later overrides may change it.

    Raises:
        ConfigError: as for ``load_config``; or the file holds no plan.
    """
    plain, of_plan, automatic, free, file = _sorted(overrides)
    config = load_config(source, [*plain, *(() if file else of_plan)], allow=allow)
    if file is not None:
        set_plan(config, _plan_of_file(file))
        asked = config[ASKED]
        config = apply_overrides(config, of_plan)
        with open_dict(config):
            config[ASKED] = asked
    with open_dict(config):
        config[ASKED]["overrides"] = list(overrides)
    names = frozenset(text.partition("=")[0].removeprefix(f"{_PLAN}.").partition(".")[0].strip() for text in of_plan)
    return ReadConfig(config, PlanRequest(automatic, free, names))


def _sorted(overrides: Sequence[str]) -> tuple[list[str], list[str], bool, frozenset[str], str | None]:
    """The overrides, sorted: those of anything else, those of the plan's fields, whether all fields are open, which
    are, and
        the plan's file."""
    plain: list[str] = []
    of_plan: list[str] = []
    free: set[str] = set()
    automatic, file = False, None
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        if key == _PLAN and value == AUTO:
            automatic, of_plan, free, file = True, [], set(), None
        elif key == _PLAN and value.endswith((".yaml", ".yml")):
            automatic, of_plan, free, file = False, [], set(), value
        elif value == AUTO and key.removeprefix(f"{_PLAN}.") in SEARCHED:
            free.add(key.removeprefix(f"{_PLAN}."))
        elif key.startswith(f"{_PLAN}."):
            of_plan.append(text)
        else:
            plain.append(text)
    return plain, of_plan, automatic, frozenset(free), file


def _plan_of_file(path: str) -> Plan:
    try:
        return Plan.from_yaml(path)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{_PLAN}={path}: {error}") from error


def set_plan(config: DictConfig, plan: Plan) -> None:
    """Makes `plan` the one of `config`."""
    if config.get("train") is None:
        raise ConfigError("the config has no train, whose plan was to be set; see the shipped config quickstart.py")
    with open_dict(config):
        config.train.plan = LazyCall(Plan)(**plan.to_dict())


def plans_of_run(
    config: DictConfig,
    request: PlanRequest,
    world_size: int,
    *,
    hardware: str | Hardware | None = None,
    memory: int | str | None = None,
    global_batch: int | None = None,
    top: int = 5,
) -> PlanSearch:
    """The best plans for the run of `config`; arguments as for :func:`tensorshard.find_plans`.

    Args:
        request: what is open. Fields of the config's plan that a search does not choose stay as they are.
        global_batch: in place of ``train.global_batch_size``.

    Raises:
        ConfigError: the config cannot be run, or nothing fits.
    """
    missing = [section for section in SECTIONS if config.get(section) is None]
    if missing:
        raise ConfigError(f"the config has no {' and no '.join(missing)}; see the shipped config quickstart.py")
    if config.data.get("train") is None:
        raise ConfigError("the config has no data.train, whose samples say what the model is given")
    check_files(config.model)
    config = for_shapes(config)
    try:
        plan = instantiate(config.train.plan)
        fixed = request.fixed(plan)
        inputs, targets = Collate.of(config)([instantiate(config.data.train)[0]])
        return find_plans(
            initial_model(config.model),
            world_size=world_size,
            inputs=inputs,
            targets=targets,
            optimizer=instantiate(config.optimizer),
            loss_fn=instantiate(config.loss),
            hardware=hardware,
            memory=memory,
            global_batch=OmegaConf.select(config, "train.global_batch_size") if global_batch is None else global_batch,
            fixed=fixed,
            top=top,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def choose_for_run(
    config: DictConfig, request: PlanRequest, world_size: int, ranks_here: int, *, gpus: bool
) -> PlanSearch:
    """Finds the best plan for a run on this machine, in a fork of this process, and sets it in `config`.

    Args:
        ranks_here: how many of the ranks run on this machine.
        gpus: whether each of them has a GPU.

    Raises:
        ConfigError: the config cannot be run, or nothing fits.
    """
    try:
        hardware = hardware_here()
    except ValueError as error:
        raise ConfigError(f"train.plan=auto: {error}") from error
    available = memory_of_gpus() if gpus else available_on_host()
    memory = available if gpus or available is None else available // ranks_here

    def search() -> PlanSearch:
        return plans_of_run(config, request, world_size, hardware=hardware, memory=memory, top=1)

    try:
        plan_search = in_forked_process(search, None, shown=True)
    except ForkFailed as error:
        raise ConfigError(f"train.plan=auto: {error}") from error
    set_plan(config, plan_search.best.plan)
    return plan_search

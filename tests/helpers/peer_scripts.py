"""Example scripts of other libraries, rebuilt small, run as they are and with their import lines changed."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

SCRIPTS = Path(__file__).parents[1] / "compat" / "scripts"


@contextmanager
def fresh_accelerate() -> Iterator[None]:
    """Inside, Accelerate sees this rank's world, as torchrun would have told it, and none of earlier tests'."""

    def reset() -> None:
        state = sys.modules.get("accelerate.state")  # DeepSpeed's scripts do without
        if state is not None:
            state.AcceleratorState._reset_state(True)
            state.PartialState._reset_state()
            state.GradientState._reset_state()

    before = dict(os.environ)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if dist.is_initialized():
        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    reset()
    try:
        yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)


def run(name: str, arguments: Any, imports: dict[str, str] | None = None, **variables: str) -> Any:
    """What ``main(arguments)`` of a script returns.

    Args:
        imports: lines of the script, and what takes their place.
        variables: of the environment.
    """
    before = sys.argv
    with fresh_accelerate():
        os.environ.update(variables)
        sys.argv = [name]
        try:
            return names_of(name, imports)["main"](arguments)
        finally:
            sys.argv = before


def names_of(name: str, imports: dict[str, str] | None = None) -> dict[str, Any]:
    """What a script defines, with other import lines."""
    path = SCRIPTS / f"{name}.py"
    text = path.read_text()
    for line, other in (imports or {}).items():
        assert text.count(f"{line}\n") == 1, f"{path} has no line {line!r}"
        text = text.replace(f"{line}\n", f"{other}\n")
    scope: dict[str, Any] = {"__name__": name, "__file__": str(path)}
    exec(compile(text, str(path), "exec"), scope)
    return scope


class _PlainEngine:
    """What DeepSpeed's engine computes, in one process by torch alone."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> None:
        self.module, self.optimizer, self.device = model, optimizer, torch.device("cpu")
        self._config, self._calls, self._norm = config, 0, 0.0
        self.train = model.train

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def gradient_accumulation_steps(self) -> int:
        return int(self._config.get("gradient_accumulation_steps", 1))

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._config["train_micro_batch_size_per_gpu"])

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self._calls + 1) % self.gradient_accumulation_steps() == 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.gradient_accumulation_steps()).backward()

    def step(self) -> None:
        if self.is_gradient_accumulation_boundary():
            bound = self._config.get("gradient_clipping", float("inf"))
            self._norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), bound).item()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._calls += 1

    def get_global_grad_norm(self) -> float:
        return self._norm


def _plain_initialize(args: Any = None, model: Any = None, model_parameters: Any = None, config: Any = None) -> Any:
    config = config or json.loads(Path(args.deepspeed_config).read_text())
    options = {name: value for name, value in config["optimizer"]["params"].items() if name != "torch_adam"}
    optimizer = getattr(torch.optim, config["optimizer"]["type"])(model_parameters, **options)
    return _PlainEngine(model, optimizer, config), optimizer, None, None


def _plain_arguments(parser: Any) -> Any:
    parser.add_argument("--deepspeed_config")
    return parser


plain_deepspeed = SimpleNamespace(
    add_config_arguments=_plain_arguments,
    init_distributed=lambda *_: None,
    initialize=_plain_initialize,
    zero=SimpleNamespace(
        Init=lambda **_: nullcontext(),
        GatheredParameters=lambda *_, **__: nullcontext(),
        register_external_parameter=lambda *_: None,
    ),
)
"""DeepSpeed's calls in a world of one, for a script's ``import deepspeed``."""

"""``state_dict`` and ``load_state_dict`` of a sharded model and its optimizer: they are right or raise an error.

If a rank holds only parts of the parameters, its ``state_dict`` would not be a checkpoint of the model. So the model's
``state_dict`` raises an error, and so do ``save_pretrained`` and others that call it. Full state dicts can be loaded:
each rank takes its own parts.

Each rank may keep its optimizer's states in a file of its own. But scripts for one device let the first rank write and
all ranks read. The first rank's states would often have the right shapes, and belong to other parameters.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorshard.data_parallel.sharded_model import ShardedModel
from tensorshard.model.forward_contexts import RootRole, hook_root
from tensorshard.plan.mesh import Mesh
from tensorshard.plan.plan import Plan
from tensorshard.torch_private.modules import own_buffers, own_parameters


def guard_state_dicts(sharded: ShardedModel, plan: Plan) -> None:
    """Makes ``state_dict`` and ``load_state_dict`` of the model of `sharded`, and deep copies of it, right or refused.

    Args:
        plan: for messages.
    """
    _StateDicts(sharded, plan).register_hooks()


class _StateDicts:
    """Hooks around the state dicts of `sharded`'s model."""

    def __init__(self, sharded: ShardedModel, plan: Plan) -> None:
        self._sharded = sharded
        self._plan = plan
        self._loaded = False  # whether a state dict was loaded that the copies of the master weights do not have yet
        self._modules = {id(module) for module in sharded.model.modules()}
        # Whether this rank has only parts of the model's parameters.
        self._holds_parts = plan.pp > 1 or any(map(sharded.shows_part, sharded.masters()))

    def register_hooks(self) -> None:
        sharded, plan = self._sharded, self._plan
        sharded_names = {name for name in sharded.masters() if sharded.is_part(name)}
        for path, module in sharded.model.named_modules():
            prefix = f"{path}." if path else ""
            names = {name: sharded.aliases().get(prefix + name, prefix + name) for name in own_parameters(module)}
            buffers = {name for name in own_buffers(module) if sharded.split.num_shards(prefix + name) > 1}
            if plan.pp > 1 or buffers or any(name in sharded_names for name in names.values()):
                module.register_state_dict_pre_hook(self._for_own(self._refuse_part))
            if names:
                module.register_state_dict_post_hook(self._for_own(partial(self._show_masters, names)))
            take_parts = partial(self._take_parts, prefix, names, buffers)
            module.register_load_state_dict_pre_hook(self._for_own(take_parts))
        if plan.pp == 1:
            hook_root(sharded.model, RootRole.LOADED_WEIGHTS, before=lambda *_: self.follow())
        if self._holds_parts:
            vars(sharded.model)["__deepcopy__"] = self._refuse_copy  # copy.deepcopy calls it

    def _for_own(self, hook: Callable[..., None]) -> Callable[..., None]:
        """`hook` for the laid-out modules alone. Their deep copies have the same hooks, but are not laid out.

        It is a plain function, which ``copy.deepcopy`` does not copy. A bound method would make it copy the process
        groups.
        """
        return lambda module, *args: hook(module, *args) if id(module) in self._modules else None

    def _refuse_copy(self, _: dict[int, Any]) -> NoReturn:
        raise RuntimeError(
            f"a deep copy of the laid-out model (as AveragedModel makes one) would hold only this rank's parts "
            f"of the weights, under {self._described()}. For an average of the "
            f"weights, keep copies of engine.model.named_parameters(), and compute with them under "
            f"`with engine.using_weights(average):` (docs/your-own-loop.md)"
        )

    def follow(self) -> None:
        """Copies what was loaded to what forwards compute with. A collective, if something was loaded."""
        if self._loaded:
            self._loaded = False
            self._sharded.all_gather_loaded()

    # -- state_dict --

    def _refuse_part(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars:  # its callers, such as FSDP's code and ours, know what they get
            return
        held = "only this rank's parts of the weights" if self._holds_parts else "weights that are rounded to 16 bits"
        raise RuntimeError(
            f"state_dict() of the laid-out model (as by torch.save(model.state_dict()) or save_pretrained) would hold "
            f"{held}, under {self._described()}. Call engine.full_state_dict() on "
            f"every rank: it returns the full state dict on rank 0 (save_pretrained takes it as state_dict=); or "
            f"engine.save(path) for a checkpoint of weights and optimizer"
        )

    def _described(self) -> str:
        degrees = {"pp": self._plan.pp, "tp": self._plan.tp, "dp_shard": self._plan.dp_shard, "cp": self._plan.cp}
        fields = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
        if self._plan.shard_size > 1:
            fields.insert(0, f"zero={self._plan.zero}")
        if not self._holds_parts:
            fields.append(f"precision={self._plan.precision!r}")
        return f"a plan with {', '.join(fields)}"

    def _show_masters(self, names: dict[str, str], _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        """Saves the master weights where the module shows 16-bit copies."""
        for name, full_name in names.items():
            shown = state.get(prefix + name)
            master = self._sharded.master_shown_in_state_dicts(full_name)
            if isinstance(shown, torch.Tensor) and master is not None:
                state[prefix + name] = master if isinstance(shown, nn.Parameter) else master.detach()

    # -- load_state_dict --

    def _take_parts(
        self,
        path: str,
        names: dict[str, str],
        buffers: set[str],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        """Replaces the full tensors of `state` by this rank's parts, for `module` alone."""
        if self._plan.pp > 1:
            raise RuntimeError(
                f"load_state_dict was called on the stages of a pipeline (pp={self._plan.pp}); load the weights into "
                f"the model before parallelize, or a checkpoint with engine.load(path)"
            )
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                "load_state_dict(assign=True) would take the laid-out parameters out of the model; call it with "
                "assign=False, which copies into them"
            )
        self._loaded = True
        for name, full_name in names.items():
            self._take_part(state, prefix + name, full_name, self._sharded.full_shape(full_name), errors)
        shapes = self._sharded.buffer_shapes()
        for name in buffers:
            if path + name in shapes:
                self._take_part(state, prefix + name, path + name, shapes[path + name], errors)

    def _take_part(self, state: dict[str, Any], key: str, name: str, shape: torch.Size, errors: list[str]) -> None:
        value = state.get(key)
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
            return
        if value.shape != shape:
            errors.append(
                f"size mismatch for {key}: its shape is {list(value.shape)} in the state dict and {list(shape)} in the "
                f"full model"
            )
            del state[key]  # else torch would compare it with this rank's part
            return
        state[key] = self._sharded.shown_value(name, value)


_HELD_BY = "tensorshard"
"""The key that says which rank's states these are. torch ignores keys that it does not know."""


def guard_optimizer_state(optimizer: torch.optim.Optimizer, plan: Plan, mesh: Mesh) -> None:
    """Makes `optimizer`, which holds parts of the model's parameters, refuse the states of other parts."""
    axes = ("pp", "dp_shard", "cp", "tp") if plan.zero else ("pp", "tp")
    own = {axis: f"{mesh.index(axis)} of {mesh.degrees[axis]}" for axis in axes}

    def note(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[_HELD_BY] = dict(own)

    def check(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        held = state.get(_HELD_BY, own)
        if held != own:
            raise RuntimeError(
                f"engine.optimizer.load_state_dict was given the states of another rank's parameters ({_listed(held)}; "
                f"here {_listed(own)}), as where one rank's file is read by all. Call engine.save(path) and "
                f"engine.load(path), whose checkpoints any plan reads, or keep a file for each rank"
            )

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(check)


def _listed(places: dict[str, str]) -> str:
    return ", ".join(f"{axis} {place}" for axis, place in places.items() if not place.endswith(" of 1"))

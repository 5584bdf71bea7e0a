"""Notices modules and parameters that user code registers in a model after a plan has laid it out."""

from itertools import chain
from operator import is_

from torch import nn

from tensorshard.torch_private.modules import registrations


class ModuleChanges:
    """Compares a model's modules and parameters with those that were laid out.

    Args:
        model: laid out.
        shards_parameters: whether the model shows other parameters at other times, as FSDP does.
    """

    def __init__(self, model: nn.Module, *, shards_parameters: bool) -> None:
        self._names = [name for name, _ in model.named_modules()]
        tables = registrations(model.modules())
        self._tables = tables[1::2] if shards_parameters else tables
        self._per_module = 1 if shards_parameters else 2
        self._entries = [list(table.items()) for table in self._tables]
        self._values = [value for entries in self._entries for _, value in entries]

    def check(self) -> None:
        """Called before each step.

        Raises:
            RuntimeError: a module or a parameter was added, replaced or removed. It names the first.
        """
        values = list(chain.from_iterable(table.values() for table in self._tables))
        if len(values) == len(self._values) and all(map(is_, values, self._values)):
            return
        for index, (table, entries) in enumerate(zip(self._tables, self._entries, strict=True)):
            before, now = dict(entries), table
            for key in [*now, *before]:
                if now.get(key) is before.get(key) and (key in now) == (key in before):
                    continue
                owner = self._names[index // self._per_module]
                what = "parameter" if isinstance(now.get(key, before.get(key)), nn.Parameter) else "module"
                how = "removed from" if key not in now else "added to" if key not in before else "replaced in"
                raise RuntimeError(
                    f"{what} {f'{owner}.{key}' if owner else key!r} was {how} the model after parallelize had laid it "
                    f"out, so that no plan applies to it and no optimizer trains it: change the model before "
                    f"parallelize; or take engine.full_state_dict(), change the original model, load the weights into "
                    f"it and call parallelize again. New values for an existing parameter are copied into it: "
                    f"parameter.copy_(values) under torch.no_grad()"
                )

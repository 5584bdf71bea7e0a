"""The moments of training that a hook can act on."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorshard.trainer.records import StepRecord
    from tensorshard.trainer.trainer import Trainer


class Hook:
    """Something that is done during training. Every method is optional.

    Every rank calls the same methods in the same order. A hook that communicates must do so on every rank: no
    ``if rank == 0`` around a collective.
    """

    @property
    def name(self) -> str:
        """The name under which its state is saved; unique among a trainer's hooks."""
        return type(self).__name__

    def before_train(self, trainer: "Trainer") -> None:
        """Once, before the first step."""

    def before_step(self, trainer: "Trainer") -> None:
        """Before the batch of each step is fetched."""

    def after_step(self, trainer: "Trainer", record: "StepRecord") -> None:
        """After each optimizer step."""

    def after_train(self, trainer: "Trainer") -> None:
        """Once, after the last step, also where training was interrupted; not after an error."""

    def on_error(self, trainer: "Trainer", error: Exception) -> None:
        """When training ends with `error`, perhaps on this rank alone. It is raised again afterwards."""

    def close(self) -> None:
        """Always last, whatever happened."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, in numbers, strings, lists and dicts; saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` gave. Called before training, if there is anything to take."""

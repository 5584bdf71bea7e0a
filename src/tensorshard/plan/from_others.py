"""``Plan.from_deepspeed`` and its siblings: a Plan from another program's config, with its ledger."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from tensorshard.foreign_configs import Ledger


class FromOthers:
    """The constructors of a Plan from configs of other programs.

    Each takes the config as nested mappings, and how many processes it is for (None if the config says it, or if that
    is not known). The Plan's ``ledger`` says what became of each key, and has the settings that are no matter of a
    Plan. Each raises ValueError where a key cannot be honoured, or where nobody knows it; the message names the nearest
    known one.
    """

    ledger: ClassVar["Ledger | None"] = None

    @classmethod
    def _from_other(cls, source: str, config: Any, world_size: int | None) -> Self:
        from tensorshard.foreign_configs import read_config

        ledger = read_config(source, config, world_size=world_size)
        ledger.check()
        plan = cls(**ledger.plan)
        object.__setattr__(plan, "ledger", ledger)
        return plan

    @classmethod
    def from_deepspeed(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from DeepSpeed's JSON.

        Examples:
            >>> plan = ts.Plan.from_deepspeed({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}})
            >>> plan.zero
            2
            >>> plan.ledger.settings["train.global_batch_size"]
            4
        """
        return cls._from_other("deepspeed", config, world_size)

    @classmethod
    def from_accelerate(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from what ``accelerate config`` wrote."""
        return cls._from_other("accelerate", config, world_size)

    @classmethod
    def from_fsdp(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from FSDP's options, as transformers' ``fsdp_config`` has them, of version 1 or 2."""
        return cls._from_other("fsdp", config, world_size)

    @classmethod
    def from_megatron(cls, config: Mapping[str, Any] | Sequence[Any], *, world_size: int | None = None) -> Self:
        """A Plan from Megatron-LM's arguments: the words of a command line, pairs of names and values, or a mapping."""
        return cls._from_other("megatron", config, world_size)

    @classmethod
    def from_torchtitan(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from torchtitan's TOML."""
        return cls._from_other("torchtitan", config, world_size)

    @classmethod
    def from_torchtune(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from the YAML of one of torchtune's recipes."""
        return cls._from_other("torchtune", config, world_size)

    @classmethod
    def from_libai(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from LiBai's config."""
        return cls._from_other("libai", config, world_size)

    @classmethod
    def from_paddle(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from PaddleFleetX's YAML."""
        return cls._from_other("paddle", config, world_size)

    @classmethod
    def from_axolotl(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from axolotl's YAML."""
        return cls._from_other("axolotl", config, world_size)

    @classmethod
    def from_llama_factory(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from LLaMA-Factory's YAML."""
        return cls._from_other("llama-factory", config, world_size)

    @classmethod
    def from_lightning(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from the YAML of Lightning's command line, or of its Trainer alone."""
        return cls._from_other("lightning", config, world_size)

    @classmethod
    def from_nemo(cls, config: Mapping[str, Any], *, world_size: int | None = None) -> Self:
        """A Plan from NeMo's YAML."""
        return cls._from_other("nemo", config, world_size)

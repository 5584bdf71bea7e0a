"""The Plan: what to do, as pure data. It prints, compares, loads from YAML and checks itself."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tensorshard.common.words import kind_of
from tensorshard.plan.field_checks import (
    as_given,
    check_choice,
    check_experts,
    check_int,
    check_positive,
    data_with_known_fields,
    unknown_field,
)
from tensorshard.plan.from_others import FromOthers
from tensorshard.plan.offload import Offload, as_offload

__all__ = ["AXES", "ZERO_NAMES", "Offload", "Plan"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes, outermost first."""

PRECISIONS = ("fp32", "bf16", "fp16")
REDUCE_DTYPES = ("fp32", "bf16", "fp16")
RECOMPUTE_MODES = ("none", "selective", "full")
LOGITS_MODES = ("auto", "tiled", "whole")
RANDOM_NUMBERS = ("same", "by_rank")
CP_ORDERS = ("auto", "contiguous", "zigzag")

# Fields that only matter along one of the axes.
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile
_FIELDS_OF_AXES = {"pp_schedule": "pp", "pp_split": "pp", "pp_stages_per_rank": "pp", "pp_units": "pp"}


ZERO_NAMES = {"os": 1, "os_g": 2, "p_g_os": 3}
"""Paddle's names of the ZeRO levels: optimizer states, + gradients, + parameters."""


@data_with_known_fields
@dataclass(frozen=True)
class Plan(FromOthers):
    """How to split the training of a model over processes, what each keeps, and in which precision it computes.

    A Plan is plain data: it holds no tensors and no process groups. It prints, compares, and reads and writes YAML.
    Values that cannot work on any hardware raise an error here. :meth:`resolve` checks what depends on the number of
    processes.

    Args:
        dp_replicate: how many replicas of the sharded model there are (hybrid sharding when above 1).
        dp_shard: over how many processes parameters, gradients and optimizer states are sharded, as ``zero`` says.
            -1 takes all processes that the other axes leave. At most one axis may be -1.
        tp: degree of tensor parallelism. pp: pipeline stages. cp: degree of context parallelism, which splits
            sequences; parameters are sharded over ``dp_shard`` and ``cp`` together.
        ep: degree of expert parallelism: over how many of the ``dp_shard`` x ``cp`` processes the experts of each
            mixture are split; it divides their number. See ``docs/expert-parallelism.md``.
        zero: the ZeRO level along ``dp_shard`` (Rajbhandari et al. 2020): 0 shards nothing, 1 the optimizer states,
            2 gradients as well, 3 parameters as well. Paddle's names "os", "os_g", "p_g_os" mean 1, 2, 3.
        micro_batches: into how many parts ``Engine.step`` cuts its batch; gradients accumulate over them.
        precision: of computation: "fp32", "bf16" or "fp16" (with dynamic loss scaling). Master weights and optimizer
            states are always fp32.
        recompute: activation checkpointing of the model's blocks: "none"; "full" keeps only a block's inputs;
            "selective" also keeps the results of matrix products and attention.
        clip_grad_norm: largest L2 norm of the whole model's gradient; None for no clipping.
        shard_units: what is gathered and reduced together: None for one unit a block; an int for units of at least
            that many bytes of fp32 parameters; names of modules (globs allowed) for exactly those.
        compile: compile each repeated block with ``torch.compile``. Under `tp`, the code between split layers is
            compiled; the split layers and their collectives are not.
        reduce_dtype: type that gradients are summed in across processes; None for fp32.
        tp_plan: which layers ``tp`` splits and how, as a table of name globs to styles; None to find one. See
            ``docs/tensor-parallelism.md``.
        tp_check: whether a table given as `tp_plan` is checked numerically on small tensors before it is used.
        sequence_parallel: whether norms, dropout and residuals, between the layers that ``tp`` splits, are split
            along the sequence (Korthikanti et al. 2022).
        pp_schedule: how the stages' forwards and backwards are ordered: "gpipe", "1f1b", "interleaved_1f1b",
            "looped_bfs", "interleaved_zero_bubble", "zbv" or "dualpipev". See ``docs/pipelines.md``.
        pp_split: names of the modules that start a stage, the first stage's excepted; None to balance the stages' cost.
        pp_stages_per_rank: how many stages each pipeline rank has, for schedules that take several; None for the
            fewest that the schedule takes.
        pp_units: names of modules (globs allowed) that stay on one stage, besides the model's blocks; or of parts of
            blocks, to allow cuts between them.
        offload: what is kept in host memory or on disk, an :class:`Offload`. "cpu" and "disk" mean optimizer states
            and gradients; None keeps all on the device.
        cp_dims: the dimension of the sequence of inputs, by their names, such as ``{"input_ids": 1}``; inputs without a
            name are called by the forward's parameters. None to find it.
        cp_order: the order in which ranks hold positions: "contiguous"; "zigzag", in which each rank has as much of
            causal attention to compute; "auto" to choose after the first batch, by what the model computes.
        logits: whether ``Engine.step`` and ``evaluate`` hold a model's logits: "whole" for yes; "tiled" for a tile at
            a time, wherever a cross entropy allows it; "auto" for tiles where logits are large. See
            ``docs/logits.md``.
        tiles: in how many parts of its positions a rank computes norms and MLPs, in forward and, once more, in
            backward, so that the results inside of them are held for one part at a time.
        random: what dropout and other random numbers depend on: "same", the seed, the step, the call and the element
            alone, so that every plan trains the same; "by_rank", torch's generators, which differ by data rank. See
            ``docs/exactness.md``.

    Raises:
        ValueError: a value that cannot work on any hardware; the message says what would work.
        TypeError: a value of the wrong type.

    Examples:
        >>> plan = ts.Plan(tp=2, zero=3, precision="bf16")
        >>> plan.resolve(8).dp_shard  # on eight processes
        4
        >>> plan.to_yaml("plan.yaml")
        >>> ts.Plan.from_yaml("plan.yaml") == plan
        True
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int | str = 3
    micro_batches: int = 1
    precision: str = "fp32"
    recompute: str = "none"
    sequence_parallel: bool = False
    clip_grad_norm: float | None = None
    tp_plan: dict[str, str] | None = None
    pp_schedule: str = "1f1b"
    pp_split: list[str] | None = None
    shard_units: int | list[str] | None = None
    compile: bool = False
    offload: Offload | str | None = None
    reduce_dtype: str | None = None
    tp_check: bool = True
    pp_stages_per_rank: int | None = None
    pp_units: list[str] | None = None
    logits: str = "auto"
    cp_dims: dict[str, int] | None = None
    cp_order: str = "auto"
    ep: int = 1
    tiles: int = 1
    random: str = "same"

    def __post_init__(self) -> None:
        for axis in AXES:
            check_degree(axis, getattr(self, axis))
        inferred = [axis for axis in AXES if getattr(self, axis) == -1]
        if len(inferred) > 1:
            raise ValueError(
                f"{' and '.join(inferred)} are both -1, but only one axis can be inferred from the world size; "
                f"give the others a number"
            )
        check_int("ep", self.ep, least=1)
        object.__setattr__(self, "zero", as_zero_level(self.zero))
        check_int("micro_batches", self.micro_batches, least=1)
        check_int("tiles", self.tiles, least=1)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("recompute", self.recompute, RECOMPUTE_MODES)
        check_choice("logits", self.logits, LOGITS_MODES)
        if self.reduce_dtype is not None:
            check_choice("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        if self.clip_grad_norm is not None:
            check_positive("clip_grad_norm", self.clip_grad_norm)
        if str(self.compile) in _WITH_GRAPHS:
            raise TypeError(
                f"compile is {self.compile!r}, which records CUDA graphs; it must be True or False. A graph keeps "
                f"gradients in memory that its next replay overwrites, while messages to other ranks still read them"
            )
        for name in ("compile", "sequence_parallel", "tp_check"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        object.__setattr__(self, "shard_units", as_shard_units(self.shard_units))
        check_table(self.tp_plan)
        check_dims(self.cp_dims)
        check_choice("cp_order", self.cp_order, CP_ORDERS)
        check_choice("random", self.random, RANDOM_NUMBERS)
        object.__setattr__(self, "offload", as_offload(self.offload))
        for name in ("pp_split", "pp_units"):
            object.__setattr__(self, name, as_module_names(name, getattr(self, name)))
        if self.pp_stages_per_rank is not None:
            check_int("pp_stages_per_rank", self.pp_stages_per_rank, least=1)
        if self.pp_schedule != "1f1b":
            from tensorshard.plan.schedules import find_schedule

            find_schedule(self.pp_schedule)

    def resolve(self, world_size: int) -> "Plan":
        """This plan with every axis set for `world_size` processes.

        Raises:
            ValueError: the degrees do not multiply to `world_size`, or the plan asks for what is not implemented.
        """
        check_int("world_size", world_size, least=1)
        self._check_implemented()
        degrees = {axis: getattr(self, axis) for axis in AXES}
        known = math.prod(d for d in degrees.values() if d != -1)
        product = " x ".join(f"{axis}={d}" for axis, d in degrees.items() if d not in (1, -1)) or "1"
        free = next((axis for axis, d in degrees.items() if d == -1), None)
        if free is None:
            if known != world_size:
                raise ValueError(
                    f"the plan's degrees ({product}) multiply to {known}, but the number of processes is {world_size}; "
                    f"start {known} processes with torchrun --nproc-per-node {known} or tensorshard's --nproc {known}, "
                    f"or set dp_shard=-1 to let it take what the other axes leave"
                )
            return self._checked()
        if world_size % known:
            raise ValueError(
                f"{product} needs a multiple of {known} processes, and there {'is' if world_size == 1 else 'are'} "
                f"{world_size}: start them with torchrun --nproc-per-node {known} or tensorshard's --nproc {known}, or "
                f"change a degree"
            )
        return replace(self, **{free: world_size // known})._checked()

    def _check_context(self) -> None:
        for name, default in (("cp_dims", None), ("cp_order", "auto")):
            if getattr(self, name) != default and self.cp == 1:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} was given, but cp=1 splits no sequences; set cp, or leave {name} "
                    f"at {default!r}"
                )
        if self.cp > 1 and self.compile:
            raise ValueError(
                f"compile=True was given with cp={self.cp}, but torch.compile does not follow tensors of which a rank "
                f"has a part; set compile=False, or cp=1"
            )

    def _check_tiles(self) -> None:
        if self.tiles == 1:
            return
        from tensorshard.plan.schedules import find_schedule

        for given, why, instead in (
            (self.recompute == "selective" and "recompute='selective'",
             "keeps the results of matrix products, which tiles are there to drop", "recompute='full' or 'none'"),
            (self.compile and "compile=True", "compiles blocks as a whole", "compile=False"),
            (self.sequence_parallel and "sequence_parallel=True",
             "gives norms and MLPs positions that they gather", "cp for long sequences"),
            (self.pp > 1 and find_schedule(self.pp_schedule).splits_backward and f"pp_schedule={self.pp_schedule!r}",
             "computes gradients of inputs and of parameters apart", "pp_schedule='1f1b'"),
        ):  # fmt: skip
            if given:
                raise ValueError(f"tiles={self.tiles} was given with {given}, which {why}; set {instead}, or tiles=1")

    def _checked(self) -> "Plan":
        self._check_context()
        self._check_tiles()
        check_experts(vars(self), self.expert_axes)
        if self.pp > 1:
            stages = self.stages_per_rank * self.pp
            if self.pp_split is not None and len(self.pp_split) + 1 != stages:
                raise ValueError(
                    f"pp_split names {len(self.pp_split)} modules, each of which starts a stage after the first; "
                    f"pp={self.pp} with the {self.pp_schedule} schedule makes {stages} stages: name {stages - 1}"
                )
        return self

    @property
    def stages_per_rank(self) -> int:
        """How many stages each pipeline rank of a resolved plan has.

        Raises:
            ValueError: the schedule does not work with so many, or with ``micro_batches``.
        """
        if self.pp == 1:
            return 1
        from tensorshard.plan.schedules import check_schedule

        return check_schedule(
            self.pp_schedule, ranks=self.pp, stages_per_rank=self.pp_stages_per_rank, micro_batches=self.micro_batches
        )

    def _check_implemented(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name, axis in _FIELDS_OF_AXES.items():
            if getattr(self, axis) == 1 and getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} was given, but {axis}=1 makes no pipeline; set {axis}, or leave "
                    f"{name} at {defaults[name]!r}"
                )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel=True splits sequences over the tensor-parallel ranks, but tp=1; set tp, or "
                "sequence_parallel=False"
            )
        if self.tp_plan is not None and self.tp == 1:
            raise ValueError("tp_plan was given, but tp=1 splits nothing; set tp, or leave tp_plan at None")
        if self.offloaded is not None:
            self.offloaded.check_implemented(int(self.zero))

    @property
    def offloaded(self) -> Offload | None:
        """``offload``, with "cpu" and "disk" as an :class:`Offload`."""
        return as_offload(self.offload)

    @property
    def offloads_parameters(self) -> bool:
        """Whether parameters are in host memory or on disk."""
        return self.offloaded is not None and self.offloaded.parameters is not None

    @property
    def shards_parameters(self) -> bool:
        """Whether a resolved plan gathers parameters unit by unit: ZeRO 3 over several ranks, or from another tier."""
        return self.zero == 3 and (self.shard_size > 1 or self.offloads_parameters)

    @property
    def spares_memory(self) -> bool:
        """Whether the plan has a field that takes time, or messages, for less memory."""
        return self.zero != 0 or self.recompute != "none" or self.offload is not None or self.logits == "tiled"

    @property
    def dp_size(self) -> int:
        """Number of data ranks of a resolved plan: processes that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_size(self) -> int:
        """Number of processes over which a resolved plan shards states: dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def expert_axes(self) -> str:
        """The axes whose ranks share experts, for people."""
        return "dp_shard" if self.cp == 1 else "dp_shard and cp"

    def in_short(self) -> str:
        """The axes of a degree above 1, ``zero``, and the fields that are not at their defaults, as overrides."""
        usual = Plan()
        chosen = [field.name for field in fields(Plan) if getattr(self, field.name) != getattr(usual, field.name)]
        of_axes = [axis for axis in AXES if getattr(self, axis) > 1]
        names = dict.fromkeys([*of_axes, "zero", *(name for name in chosen if name not in AXES)])
        return " ".join(f"{name}={_in_short(getattr(self, name))}" for name in names)

    def describe(self) -> str:
        """Describes every field that matters in words, one a line."""
        degrees = "  ".join(f"{a}={'auto' if getattr(self, a) == -1 else getattr(self, a)}" for a in AXES)
        held = {
            0: "nothing is sharded",
            1: "optimizer states are sharded",
            2: "optimizer states and gradients are sharded",
            3: "optimizer states, gradients and parameters are sharded",
        }[int(self.zero)]
        lines = [
            f"mesh           {degrees}",
            f"zero           {self.zero} ({held} over dp_shard{' and cp' if self.cp > 1 else ''})",
            f"micro_batches  {self.micro_batches}",
            f"precision      {self.precision} compute, fp32 master weights, "
            f"{self.reduce_dtype or 'fp32'} gradient sums",
            f"recompute      {self.recompute}",
            f"clip_grad_norm {'off' if self.clip_grad_norm is None else self.clip_grad_norm}",
            f"shard_units    {self._describe_units()}",
            f"compile        {'each block' if self.compile else 'off'}",
            f"logits         {self._describe_logits()}",
        ]
        if self.tiles != 1:
            lines.append(f"tiles          norms and MLPs compute their positions in {self.tiles} parts")
        if self.pp != 1:
            split = "balanced" if self.pp_split is None else "before " + ", ".join(self.pp_split)
            lines.append(f"pipeline       {self.pp_schedule}; cuts {split}")
        if self.tp != 1:
            lines.append(f"tp_plan        {'to be found' if self.tp_plan is None else f'{len(self.tp_plan)} entries'}")
            lines.append(f"sequences      {'split between split layers' if self.sequence_parallel else 'whole'}")
        if self.ep != 1:
            lines.append(f"experts        over {self.ep} of the ranks of {self.expert_axes}")
        if self.offloaded is not None:
            lines.append(f"offload        {self.offloaded.describe()}")
        return "\n".join(lines)

    def _describe_logits(self) -> str:
        return {
            "auto": "tiled where they are large and the loss takes tiles",
            "tiled": "tiled where the loss takes tiles",
            "whole": "whole",
        }[self.logits]

    def _describe_units(self) -> str:
        if self.shard_units is None:
            return "one a block"
        if isinstance(self.shard_units, int):
            return f"at least {self.shard_units:,} bytes of parameters"
        return ", ".join(self.shard_units)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Plan":
        """A Plan of `values`.

        Raises:
            ValueError: a key is no field of Plan. The message names the nearest field.
        """
        unknown = unknown_field(cls, values)
        if unknown is not None:
            raise ValueError(unknown)
        return cls(**values)

    def to_yaml(self, path: str | Path) -> None:
        """Writes the fields to `path` as YAML."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Plan":
        """Reads what :meth:`to_yaml` wrote, or any YAML mapping of field names to values.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is no YAML, or has other contents. For an unknown field, the message names the nearest one.
        """
        import yaml

        from tensorshard.common.paths import read_utf8

        if not Path(path).is_file():
            raise FileNotFoundError(f"a plan was to be read from {path}, but there is no file of that name")
        try:
            values = yaml.safe_load(read_utf8(Path(path)))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} cannot be read as YAML: {error}") from error
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise ValueError(f"{path} holds {kind_of(values)}, but a plan is a mapping of field names to values")
        return cls.from_dict(values)


def check_degree(axis: str, value: Any) -> None:
    """Raises unless `value` may be the degree of an axis."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{as_given(axis, value)}; it must be a positive integer, or -1 to be inferred")
    if value < 1 and value != -1:
        raise ValueError(f"{axis} is {value}; it must be a positive integer, or -1 to be inferred")


def as_zero_level(value: Any) -> int:
    """The ZeRO level for `value`, a number or one of Paddle's names."""
    if isinstance(value, str) and value in ZERO_NAMES:
        return ZERO_NAMES[value]
    if isinstance(value, str) and value.strip() in ("0", "1", "2", "3"):
        raise ValueError(f"{as_given('zero', value)}; give the number: zero={value.strip()}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 3:
        names = ", ".join(f"{name!r} ({level})" for name, level in ZERO_NAMES.items())
        raise ValueError(f"zero is {value!r}; the levels are 0, 1, 2 and 3, also by the names {names}")
    return value


def as_module_names(name: str, value: Any) -> list[str] | None:
    """`value` as a list of names of modules, or None."""
    if value is None:
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(member, str) for member in value):
        return list(value)
    raise TypeError(f"{name} is {value!r}; it must be None or a non-empty list of module names")


def as_shard_units(value: Any) -> int | list[str] | None:
    """`value` as bytes, as a list of names of modules, or None."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        check_int("shard_units", value, least=1)
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value):
        return list(value)
    raise TypeError(
        f"shard_units is {value!r}; it must be None, a number of bytes, or a non-empty list of module names"
    )


def check_table(value: Any) -> None:
    """Raises unless `value` may be a ``tp_plan``. Its styles are checked where they are used."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(part, str) for entry in value.items() for part in entry):
        raise TypeError(
            f"tp_plan is {value!r}; it must be None or a dict of module names to styles, such as "
            f"{{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}"
        )


def check_dims(value: Any) -> None:
    """Raises unless `value` may be ``cp_dims``."""
    if value is None:
        return
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(dim, int) and not isinstance(dim, bool) for name, dim in value.items()
    ):
        raise TypeError(
            f"cp_dims is {value!r}; it must be None or a dict of names of inputs to the dimension of their sequence, "
            f"such as {{'input_ids': 1}}"
        )


def _in_short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({len(value)} entries)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def coordinates(rank: int, degrees: dict[str, int]) -> dict[str, int]:
    """`rank`'s index along every axis."""
    indices: dict[str, int] = {}
    for axis in reversed(AXES):
        rank, indices[axis] = divmod(rank, degrees[axis])
    return {axis: indices[axis] for axis in AXES}

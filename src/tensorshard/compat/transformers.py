"""transformers' ``Trainer`` on the Engine: ``Trainer(..., plan=ts.Plan(...))``, and everything else as it was.

``from tensorshard.compat.transformers import Trainer`` in place of ``from transformers import Trainer``. The loop,
arguments, callbacks, collators, evaluation and metrics are transformers' own. :class:`WithPlan` does the same for a
Trainer of another library that is a subclass of transformers', such as TRL's.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorshard.comm.world import under_torchrun
from tensorshard.common.words import install_extra
from tensorshard.compat.accelerate import Accelerator
from tensorshard.compat.taken_over import agreed, given_plan
from tensorshard.engine.engine import Engine
from tensorshard.plan.plan import Plan
from tensorshard.weights.files.foreign.opening import read_foreign

try:
    import transformers
    from transformers.trainer import SCHEDULER_NAME
except ImportError as error:
    raise ImportError(
        "tensorshard.compat.transformers is a subclass of transformers' Trainer, and transformers is not installed: "
        + install_extra("hf")
    ) from error

AUTO = "auto"
_FOLDER = "engine"  # of the Engine's checkpoint, in a folder "checkpoint-N"

# Arguments that ask for another way to lay out or compute the model, and what does it here.
_REFUSED = {
    "fsdp": "Plan(zero=3) does what FSDP2 does; Plan.from_fsdp(options) makes a Plan of fsdp_config",
    "deepspeed": "Plan.from_deepspeed(config) makes a Plan of it",
    "parallelism_config": "Plan(dp_replicate=, dp_shard=, cp=, tp=) has the same degrees",
    "torch_compile": "Plan(compile=True) compiles the model's blocks",
    "auto_find_batch_size": "a model is laid out once; 'tensorshard estimate' tells beforehand what fits",
    "fp16_full_eval": "evaluation computes in the Plan's precision",
    "bf16_full_eval": "evaluation computes in the Plan's precision",
    "activation_checkpointing": "Plan(recompute='full') or 'selective' recomputes the model's blocks",
    "gradient_checkpointing": "Plan(recompute='full') or 'selective' recomputes the model's blocks",
}


class WithPlan:
    """Makes a subclass of transformers' Trainer train under a Plan. It comes before that class among the bases::

        class PlanSFTTrainer(WithPlan, trl.SFTTrainer): ...

    Args:
        plan: what to do: a Plan, the path of its YAML file, or "auto" for the best plan without a pipeline. By default
            the file that the variable ``TENSORSHARD_PLAN`` names; without it whole replicas. Its `micro_batches`,
            `precision` and `clip_grad_norm` are those of the TrainingArguments: ``gradient_accumulation_steps``,
            ``bf16`` or ``fp16``, ``max_grad_norm``.

    Attributes:
        engine: the Engine, once the model is laid out, at the first ``train()`` or ``evaluate()``; None before.

    Raises:
        ValueError: the TrainingArguments ask for another way to lay out the model, or contradict the Plan; a pipeline
            with a loss that is computed outside of the model.
    """

    accelerator: Any
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args: Any, plan: Plan | str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        self._auto = plan == AUTO
        self._plan = Plan() if self._auto else given_plan(plan)
        self._parts: list[dict[str, Any]] = []  # micro-batches of a pipeline's step
        self._loss_counts: bool | None = None
        super().__init__(*args, **kwargs)
        if self._plan.pp > 1:
            self._check_pipeline()

    @property
    def engine(self) -> Engine | None:
        """The Engine; None until the model is laid out."""
        return self.accelerator.engine

    # -- what transformers' Trainer asks of Accelerate --

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = self.args
        for name, instead in _REFUSED.items():
            if getattr(args, name, None):
                raise ValueError(f"TrainingArguments({name}=...) was given to a Trainer with a Plan: {instead}")
        if getattr(self.model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "the model was loaded with a DistributedConfig, which has split it already: load it without, and say "
                "in the Plan what should be split"
            )
        if under_torchrun() and int(os.environ["WORLD_SIZE"]) != args.world_size:
            raise ValueError(
                f"torchrun has started {os.environ['WORLD_SIZE']} processes, and TrainingArguments sees "
                f"{args.world_size}: on a machine without GPUs, set TrainingArguments(use_cpu=True)"
            )
        if args.save_on_each_node and int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)) < args.world_size:
            raise ValueError("save_on_each_node=True was given; whole weights are gathered on the first process alone")
        args._n_gpu = min(args._n_gpu, 1)  # a process has one device
        made: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        steps, clip = args.gradient_accumulation_steps, args.max_grad_norm or None
        plan = self._plan
        if plan.micro_batches != 1 and plan.pp == 1:
            agreed("gradient_accumulation_steps", steps, "micro_batches", plan.micro_batches, None)
        if plan.clip_grad_norm is not None:
            agreed("max_grad_norm", clip, "clip_grad_norm", plan.clip_grad_norm, None)
        mixed = made.get("mixed_precision")
        asked = {None: "fp32", "no": "fp32"}.get(mixed, mixed)
        precision = agreed("mixed_precision", asked, "precision", plan.precision, "fp32")
        made["mixed_precision"] = {"fp32": "no"}.get(precision, precision)
        self._plan = replace(
            plan,
            precision=precision,
            micro_batches=plan.micro_batches if plan.micro_batches > 1 else steps,
            clip_grad_norm=clip if plan.pp > 1 else None,  # else the loop clips
        )
        self._accelerator_args = made
        return made

    def create_accelerator_and_postprocess(self) -> None:
        """An Accelerator that lays the model out by the Plan, in place of Accelerate's."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        made = _Accelerator(**self._accelerator_args, plan=self._plan)
        made.seed = self.args.seed
        if isinstance(self.gather_function, type(self.accelerator.gather_for_metrics)):
            self.gather_function: Any = made.gather_for_metrics
        else:
            keywords = self.gather_function.keywords
            self.gather_function = lambda value: made.gather_for_metrics(value, **keywords)
        self.accelerator = made

    # -- the model --

    def _lay_out(self) -> None:
        """Lays the model out with its optimizer, unless that was done."""
        if self.engine is not None:
            return
        if self._auto:
            self.accelerator.sample = self._sample()
        self._set_signature_columns_if_needed()  # type: ignore[attr-defined]  # of the forward as it is now
        self.create_optimizer()  # type: ignore[attr-defined]
        _, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        assert self.engine is not None
        self.model = self.model_wrapped = self.engine.model  # another object, with a pipeline

    def _sample(self) -> dict[str, Any]:
        """A batch of one rank, by which plans are compared."""
        dataset, collate = self.train_dataset, self.data_collator  # type: ignore[attr-defined]
        if dataset is None or not hasattr(dataset, "__getitem__"):
            raise ValueError("plan='auto' compares plans on a batch of train_dataset, which needs dataset[index]")
        if hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")  # type: ignore[attr-defined]
        else:
            collate = self._get_collator_with_removed_columns(collate)  # type: ignore[attr-defined]
        return collate([dataset[i] for i in range(min(len(dataset), self._train_batch_size))])  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """As transformers' Trainer; the model is laid out by now, so that it is known which ranks share data."""
        self._lay_out()
        if (
            self.args.train_sampling_strategy == "batch_rebalance"
            and self.accelerator.plan.dp_size < self.args.world_size
        ):
            raise ValueError(
                "train_sampling_strategy='batch_rebalance' deals samples to all processes, and under this plan some "
                "share their data: take 'group_by_length' or 'random'"
            )
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if self.accelerator.plan.pp > 1:
            self._check_even(loader)
        return loader

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, which is laid out anew."""
        if self.accelerator.engine is not None:
            self.accelerator.engine = None
        return super().call_model_init(trial)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' Trainer, on the laid-out model."""
        if self.engine is None:
            self._lay_out()
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of a step, over all data ranks."""
        return self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.plan.dp_size  # type: ignore[attr-defined]

    def get_tp_size(self) -> int:
        """1: ``accelerator.num_processes`` counts data ranks, whatever else the Plan splits."""
        return 1

    # -- a step --

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.accelerator.plan.pp > 1:
            return float(self.engine.grad_norm)  # type: ignore[union-attr, arg-type]
        return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        if self.accelerator.plan.pp > 1:
            return float(self.engine.grad_norm)  # type: ignore[union-attr, arg-type]
        return self.engine.gradient_norm()  # type: ignore[union-attr]

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a micro-batch. A pipeline collects those of a step, and takes it with the last."""
        engine = self.engine
        if engine is None or engine.plan.pp == 1:
            if num_items_in_batch is not None:
                self._see_whether_loss_counts(model, inputs, num_items_in_batch)
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        model.train()
        self._parts.append(self._prepare_inputs(inputs))  # type: ignore[attr-defined]
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        parts, self._parts = self._parts, []
        batch = _joined(parts, getattr(getattr(model, "config", None), "pad_token_id", None) or 0)
        return engine.step(batch, batch["labels"])

    def _see_whether_loss_counts(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> None:
        """Finds out, once, whether the loss divides by `items`, those of all ranks, as transformers' Trainer believes
        of each model that takes keywords: it multiplies the loss by the data ranks, which a mean must not be."""
        if (
            self._loss_counts is not None
            or self.accelerator.num_processes == 1
            or not self.args.average_tokens_across_devices
            or type(self).compute_loss is not transformers.Trainer.compute_loss  # type: ignore[attr-defined]
        ):
            return
        model.eval()
        with torch.no_grad():
            first, second = (
                self.compute_loss(model, self._prepare_inputs(dict(inputs)), num_items_in_batch=items * times)  # type: ignore[attr-defined]
                for times in (1, 2)
            )
        model.train()
        differs, says = (first - second).abs() > 0, first.isfinite() & (first != 0)
        flags = self.accelerator.reduce(torch.stack([differs, says]).int(), "max").tolist()
        if flags[1]:
            self._loss_counts = bool(flags[0])
            self.args.average_tokens_across_devices = self._loss_counts

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """As transformers' Trainer; with a pipeline by ``engine.evaluate`` and ``engine.predict``."""
        engine = self.engine
        if engine is None or engine.plan.pp == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # type: ignore[misc]
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        labels = inputs.get("labels")
        loss = None if labels is None else engine.evaluate(inputs, labels)
        if prediction_loss_only:
            return loss, None, None
        output = engine.predict({name: value for name, value in inputs.items() if name != "labels"})
        return loss, output["logits"] if isinstance(output, dict) else output[0], labels

    # -- what a pipeline cannot do --

    def _check_pipeline(self) -> None:
        reasons = []
        if self.args.label_smoothing_factor:
            reasons.append("label_smoothing_factor")
        if getattr(self, "compute_loss_func", None) is not None:
            reasons.append("compute_loss_func")
        if type(self).compute_loss is not transformers.Trainer.compute_loss:  # type: ignore[attr-defined]
            reasons.append(f"{type(self).__name__}.compute_loss")
        if self.args.neftune_noise_alpha is not None:
            reasons.append("neftune_noise_alpha")
        if reasons:
            raise ValueError(
                f"the plan has pp={self._plan.pp}, whose last stage takes the loss that the model computes of its "
                f"labels, and {' and '.join(reasons)} would have it computed elsewhere: set pp=1, or call "
                f"tensorshard.parallelize with a loss_fn, and engine.step"
            )

    def _check_even(self, loader: Any) -> None:
        samples = len(loader.dataset)
        step = self.get_total_train_batch_size(self.args)
        if samples % step:
            raise ValueError(
                f"the plan has pp={self._plan.pp}, whose steps have equal micro-batches, and {samples} samples are "
                f"not a multiple of the {step} of a step: cut train_dataset to {samples - samples % step}"
            )

    # -- files --

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.engine is not None and state_dict is None:
            state_dict = self.engine.full_state_dict()  # every rank calls it
        super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.engine is not None
        self.engine.save(Path(output_dir) / _FOLDER, overwrite=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if (folder / _FOLDER).is_dir():
            return
        theirs = read_foreign(folder) if folder.is_dir() else None  # of a Trainer without a Plan
        if theirs is None or not theirs.states:
            raise ValueError(
                f"{folder} has no folder {_FOLDER!r} and no optimizer.pt, FSDP's or DeepSpeed's states, so it is no "
                f"checkpoint of a Trainer, or one with save_only_model=True, and optimizer states cannot be read from "
                f"it: begin from its weights, by from_pretrained({str(folder)!r})"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.engine is not None
        own = Path(checkpoint) / _FOLDER
        extra = self.engine.load(own if own.is_dir() else checkpoint)
        if own.is_dir() or (Path(checkpoint) / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        elif "lr_scheduler" in extra:
            self.lr_scheduler.load_state_dict(extra["lr_scheduler"])

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint) / _FOLDER  # type: ignore[attr-defined]
        if self.engine is not None and best.is_dir():
            self.engine.load(best)
        else:
            super()._load_best_model()  # type: ignore[misc]


class Trainer(WithPlan, transformers.Trainer):
    """transformers' Trainer with a Plan. All arguments but `plan` are its own; see :class:`WithPlan`.

    Losses are those of transformers' Trainer on the same samples: those of one process, up to rounding. A model that
    takes a mean of its labels, and does not divide by those of all ranks, gets the mean of the ranks' losses (which
    transformers' Trainer multiplies by the number of processes). Dropout draws from the Engine's own random streams.

    Examples:
        >>> trainer = Trainer(model, TrainingArguments("out", bf16=True), train_dataset=data, plan=ts.Plan(zero=3))
        >>> trainer.train()
    """


class _Accelerator(Accelerator):
    """The Accelerator of a Trainer, which scales losses itself and has pipelines.

    Attributes:
        sample: inputs by which the plan "auto" is chosen; None for the given plan.
    """

    _takes_pipelines = True
    sample: dict[str, Any] | None = None

    @property
    def num_processes(self) -> int:
        """Data ranks: those whose batches differ."""
        plan = vars(self).get("plan")
        return self.state.num_processes if plan is None else plan.dp_size

    def free_memory(self, *objects: Any) -> Any:
        """As :meth:`Accelerator.free_memory`; the Engine stays, since the Trainer trains the same model again."""
        engine = self.engine
        freed = super().free_memory(*objects)
        self.engine = engine
        return freed

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The Trainer has divided the loss by the micro-batches of the step, or by its tokens."""
        super().backward(loss * self.plan.micro_batches, **kwargs)

    def _layout(self) -> dict[str, Any]:
        if self.sample is None:
            return super()._layout()
        labels = self.sample.get("labels")
        fixed = {"precision": self.plan.precision, "micro_batches": self.plan.micro_batches, "pp": 1}
        return {"plan": AUTO, "sample_inputs": self.sample, "sample_targets": labels, "fixed": fixed}


def _joined(parts: list[dict[str, Any]], pad: int) -> dict[str, Any]:
    """The micro-batches of a step as one batch, padded to the longest.

    Raises:
        ValueError: they have different lengths, and no attention mask that would tell padding from tokens.
    """
    if len(parts) == 1:
        return parts[0]
    lengths = {part["labels"].shape[-1] for part in parts if part["labels"].dim() > 1}
    if len(lengths) > 1 and "attention_mask" not in parts[0]:
        raise ValueError(
            f"the micro-batches of a step have lengths {sorted(lengths)} and no attention_mask: a pipeline takes them "
            f"together, so pad them to one length in the data collator"
        )
    longest, fill = max(lengths, default=0), {"labels": -100, "input_ids": pad}

    def padded(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.dim() < 2 or value.shape[1] == longest or value.shape[1] not in lengths:
            return value
        return nn.functional.pad(value, (0, longest - value.shape[1]), value=fill.get(name, 0))

    return {name: torch.cat([padded(name, part[name]) for part in parts]) for name in parts[0]}

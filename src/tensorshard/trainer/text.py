"""Text from a trained language model: a sample at the end of a run, and ``tensorshard generate``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tensorshard.comm.world import DEFAULT_TIMEOUT
from tensorshard.common.stores import local_or_url
from tensorshard.config import ConfigError, load_config
from tensorshard.config.lazy import suggest
from tensorshard.data.text import BYTES, StdlibText, TextCodec, find_codec
from tensorshard.engine.engine import Engine
from tensorshard.engine.generation import longest_sequence
from tensorshard.engine.guards.wrong_batch import OutOfRangeError
from tensorshard.parallelize.build import parallelize
from tensorshard.plan.plan import Plan
from tensorshard.trainer.initial_model import initial_model
from tensorshard.trainer.run_directory import RunDirectory
from tensorshard.weights.files.pretrained_model import from_pretrained


@dataclass(frozen=True)
class TextSettings:
    """What is generated, and how: the options of ``tensorshard generate``, and the ``sample`` section of a config.

    Attributes:
        prompt: what the text begins with.
        max_new_tokens: how many tokens follow.
        temperature: 0 for the likeliest tokens.
        top_k: how many of the likeliest tokens are drawn from; None for all.
        seed: of the draws.
        tokenizer: "bytes", a ``tokenizer.json``, or a directory that has one; None for the model's own.
    """

    prompt: str
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = None
    seed: int = 0
    tokenizer: str | None = None

    @classmethod
    def from_config(cls, section: Any) -> "TextSettings":
        """The ``sample`` section of a config.

        Raises:
            ConfigError: a key is unknown, or there is no prompt.
        """
        known = list(cls.__dataclass_fields__)
        for key in section:
            if key not in known:
                raise ConfigError(f"sample: there is no key {key!r}; {suggest(str(key), known, 'its keys')}")
        if "prompt" not in section:
            raise ConfigError("sample: it needs a prompt, the text that is to be continued")
        return cls(**section)


def sample_text(engine: Engine, settings: TextSettings) -> str:
    """The prompt and the text that `engine` adds to it. It ends early if the model can read no more tokens.
    Collective."""
    assert settings.tokenizer is not None
    codec = find_codec(settings.tokenizer)
    limit = longest_sequence(engine.sharded.structure)
    room = settings.max_new_tokens if limit is None else limit - len(codec.encode(settings.prompt))
    if room < 1:
        return settings.prompt
    return _continued(engine, codec, replace(settings, max_new_tokens=min(settings.max_new_tokens, room)))


def print_text(
    source: str, settings: TextSettings, allow: Sequence[str] = (), timeout: timedelta = DEFAULT_TIMEOUT
) -> None:
    """What each worker of ``tensorshard generate`` does; rank 0 prints the text.

    Raises:
        ConfigError: there is no model at `source`, or it cannot generate text.
    """
    try:
        model, beside = find_model(Path(source), allow)
        tokenizer = settings.tokenizer or beside
        if tokenizer is None:
            raise ConfigError(
                f"{source} does not say which tokenizer its model has: give --tokenizer FILE (a tokenizer.json or its "
                f"directory), or --tokenizer bytes if it was trained on bytes"
            )
        codec = find_codec(tokenizer)
        if not codec.encode(settings.prompt):
            raise ConfigError("the prompt is empty; give at least one character")
        engine = parallelize(
            model,
            Plan(zero=3),
            optimizer=partial(torch.optim.SGD, lr=0.0),
            loss_fn=_no_loss,
            timeout=timeout,
        )
        text = _continued(engine, codec, settings)
    except (OSError, ImportError, ValueError, OutOfRangeError) as error:
        raise ConfigError(str(error)) from error
    if dist.get_rank() == 0:
        print(text)


def tokenizer_of(config: DictConfig) -> str | None:
    """The tokenizer of a run's model: of its ``sample``, or of the text that it is trained on; None if neither says."""
    names = [OmegaConf.select(config, key) for key in ("sample.tokenizer", "text.tokenizer", "data.train.tokenizer")]
    reads_bytes = str(OmegaConf.select(config, "data.train._target_")).rpartition(".")[2] == StdlibText.__name__
    return next((str(name) for name in names if name), BYTES if reads_bytes else None)


def find_model(source: Path, allow: Sequence[str] = ()) -> tuple[Callable[[], nn.Module], str | None]:
    """A model with weights for :func:`parallelize`, and the tokenizer that belongs to it, if that is known.

    Args:
        source: the directory of a run, for its newest checkpoint; a checkpoint of a run; a directory or a checkpoint
            with a ``config.json`` of Hugging Face's.
        allow: modules that the run's config may call beside the usual ones.

    Raises:
        ConfigError: `source` is none of these.
    """
    run = _run_at(source)
    checkpoint = run.newest_checkpoint() if run.config.is_file() else None
    if checkpoint is None and source.resolve().parent.name == "checkpoints":
        run, checkpoint = _run_at(source.resolve().parent.parent), source
    if checkpoint is not None and run.config.is_file():
        config: DictConfig = load_config(str(run.config), allow=allow)
        build = initial_model(config.model)
        build = getattr(build, "build", build)  # without the weights from which the run began
        return from_pretrained(checkpoint, build), tokenizer_of(config)
    if (source / "config.json").is_file():
        return from_pretrained(source), str(source) if (source / "tokenizer.json").is_file() else None
    what = "has no model" if source.exists() else "does not exist"
    raise ConfigError(
        f"{source} {what}; expected the directory of a run with a checkpoint, one of its checkpoints, or a directory "
        f"with a config.json of Hugging Face's"
    )


def _run_at(path: Path) -> RunDirectory:
    """The run whose directory `path` may be, with its checkpoints where its config says."""
    run = RunDirectory(path)
    if not run.config.is_file():
        return run
    place = OmegaConf.select(OmegaConf.load(run.config), "train.checkpoint_dir")
    return run if place is None else RunDirectory(path, local_or_url(place))


def _continued(engine: Engine, codec: TextCodec, settings: TextSettings) -> str:
    prompt = torch.tensor([codec.encode(settings.prompt)])
    tokens = engine.generate(
        prompt,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=settings.seed,
    )
    return _printable(codec.decode(tokens[0].tolist()))


def _printable(text: str) -> str:
    """`text` without the characters that control a terminal."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\N{MIDDLE DOT}" for letter in text)


def _no_loss(output: Any, targets: Any) -> torch.Tensor:
    raise NotImplementedError("a model that generates is not trained")

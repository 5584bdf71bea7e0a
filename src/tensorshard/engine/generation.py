"""Tokens from a causal language model, one after the other, the same on every layout; probabilities of given ones."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tensorshard.engine.same_numbers import first_sample
from tensorshard.plan.mesh import Mesh
from tensorshard.random.philox import key_of, words_of_box

_IGNORED = -100

Predict = Callable[..., Any]
_LIMITS = ("context_length", "block_size", "n_positions", "max_position_embeddings")


class Generator:
    """Extends prompts by what a model predicts for their last token.

    A model of transformers keeps keys and values of earlier tokens in its cache. Other models read the whole sequence
    for each token, and so do pipelines, whose micro-batches cannot share a cache.

    Args:
        model: the original, for its forward's arguments and its limits.
        predict: returns the model's output, as :meth:`tensorshard.Engine.predict` does; with ``compare=False`` the
            ranks' inputs are not compared.
        mesh: its data ranks may have different prompts; all of them run the model equally often.
        device: of this rank.
        micro_batches: the pipeline's, each of which needs a sample.
    """

    def __init__(
        self, model: nn.Module, predict: Predict, mesh: Mesh, device: torch.device, micro_batches: int
    ) -> None:
        self._model = model
        self._predict = predict
        self._mesh, self._device = mesh, device
        self._micro_batches = micro_batches
        self._parameters = inspect.signature(type(model).forward).parameters
        self._has_cache = (
            mesh.degrees["pp"] == 1 and "past_key_values" in self._parameters and hasattr(model, "generation_config")
        )

    def generate(
        self,
        prompts: torch.Tensor,
        *,
        max_new_tokens: int,
        temperature: float,
        top_k: int | None,
        eos_token_id: int | None,
        seed: int,
    ) -> torch.Tensor:
        """What :meth:`tensorshard.Engine.generate` returns."""
        _check_numbers(max_new_tokens, temperature, top_k, eos_token_id)
        self._check(prompts, max_new_tokens)
        tokens = prompts
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        first = first_sample(len(prompts), self._mesh, self._device) if temperature else 0
        next_logits = self._with_cache() if self._has_cache else self._without_cache(max_new_tokens)
        for place in range(max_new_tokens):
            words = words_of_box(key_of(seed, "generate", place), (0,), (first,), (len(prompts),))
            chosen = _choose(next_logits(tokens).double().cpu(), temperature, top_k, words)
            if eos_token_id is not None:
                chosen = chosen.masked_fill(ended, eos_token_id)
                ended |= chosen == eos_token_id
            tokens = torch.cat([tokens, chosen[:, None].to(tokens.device)], dim=1)
            if eos_token_id is not None and self._all_ended(ended):
                break
        return tokens

    def _with_cache(self) -> Callable[[torch.Tensor], torch.Tensor]:
        from transformers import DynamicCache

        config: Any = self._model.config
        cache = DynamicCache(config=config)
        read = 0

        def next_logits(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal read
            # The ranks compare the prompts. Later inputs follow from them, so they need no comparison.
            new = {"input_ids": tokens[:, read:]}
            output = self._predict(
                {**new, "past_key_values": cache, "use_cache": True}, compare=new if not read else None
            )
            read = tokens.size(1)
            return logits_of(output, new["input_ids"])[:, -1]

        return next_logits

    def _without_cache(self, max_new_tokens: int) -> Callable[[torch.Tensor], torch.Tensor]:
        by_name = "input_ids" in self._parameters
        full_length: int | None = None

        def next_logits(tokens: torch.Tensor) -> torch.Tensor:
            nonlocal full_length
            last = tokens.size(1) - 1
            full_length = full_length or tokens.size(1) + max_new_tokens
            if self._mesh.degrees["pp"] > 1:  # stages exchange one shape; a causal model ignores padding at the end
                tokens = nn.functional.pad(tokens, (0, full_length - tokens.size(1)))
            samples = len(tokens)
            missing = -samples % self._micro_batches if self._mesh.degrees["pp"] > 1 else 0
            tokens = torch.cat([tokens, tokens[:1].expand(missing, -1)]) if missing else tokens
            inputs = {"input_ids": tokens} if by_name else tokens
            return logits_of(self._predict(inputs, compare=inputs), tokens)[:samples, last]

        return next_logits

    def _all_ended(self, ended: torch.Tensor) -> bool:
        running = (~ended).any().to(torch.int64).to(self._mesh.device_mesh.device_type)
        dist.all_reduce(running, group=self._mesh.world_group)
        return not running.item()

    def _check(self, prompts: torch.Tensor, max_new_tokens: int) -> None:
        if not isinstance(prompts, torch.Tensor) or prompts.dim() != 2 or prompts.is_floating_point():
            given = f"{prompts.dtype} {tuple(prompts.shape)}" if isinstance(prompts, torch.Tensor) else type(prompts)
            raise ValueError(
                f"prompts of {given} were given; they must be token ids, whole numbers of shape [samples, tokens]"
            )
        if 0 in prompts.shape:
            raise ValueError(f"prompts of shape {tuple(prompts.shape)} were given; at least one token is needed")
        config = getattr(self._model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(self._model).__name__} has an encoder beside its decoder; without pp its own "
                f"engine.model.generate(...) works, called on every rank alike"
            )
        limit = longest_sequence(self._model)
        length = prompts.size(1) + max_new_tokens
        if limit is not None and length > limit:
            raise ValueError(
                f"prompts of {prompts.size(1)} tokens and {max_new_tokens} new ones are {length} together, and this "
                f"{type(self._model).__name__} reads at most {limit}; ask for fewer, or cut the prompts"
            )


def _check_numbers(max_new_tokens: Any, temperature: Any, top_k: Any, eos_token_id: Any) -> None:
    if not _is_whole(max_new_tokens, 1):
        raise ValueError(f"max_new_tokens={max_new_tokens!r} was given; it must be a whole number of at least 1")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ValueError(
            f"temperature={temperature!r} was given; it must be a number of at least 0, which takes the likeliest token"
        )
    if top_k is not None and not _is_whole(top_k, 1):
        raise ValueError(f"top_k={top_k!r} was given; it must be a whole number of at least 1, or None for all tokens")
    if eos_token_id is not None and not _is_whole(eos_token_id, 0):
        raise ValueError(f"eos_token_id={eos_token_id!r} was given; it must be a token id, a whole number, or None")


def _is_whole(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def longest_sequence(model: nn.Module) -> int | None:
    """How many tokens `model` says that it can read at once; None if it does not say."""
    owners = (model, getattr(model, "config", None))
    limits = [getattr(owner, name, None) for owner in owners for name in _LIMITS]
    return next((limit for limit in limits if isinstance(limit, int)), None)


def logits_in(output: Any) -> Any:
    """What a model returned as logits: its output, the first item of it, or its ``.logits``."""
    if isinstance(output, dict) or hasattr(output, "logits"):
        return output["logits"] if isinstance(output, dict) else output.logits
    return output[0] if isinstance(output, tuple | list) and output else output


def logits_of(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The logits in what a model returned for `tokens`: [samples, tokens, vocabulary].

    Raises:
        ValueError: the output has none.
    """
    logits = logits_in(output)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(
            f"the model returned {shape} for tokens of shape {tuple(tokens.shape)}; generation needs logits of shape "
            f"[samples, tokens, vocabulary]: the output itself, its first item, or its .logits"
        )
    return logits


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, words: torch.Tensor) -> torch.Tensor:
    """One token for each row of `logits`: the likeliest, or one drawn, by 32 random bits for each."""
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    below = torch.softmax(logits / temperature, dim=-1).cumsum(-1)
    drawn = (words.double() + (2**31 + 0.5)) / 2**32 * below[:, -1]
    return torch.searchsorted(below, drawn[:, None], right=True)[:, 0]


def target_log_probs(output: Any, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of `targets` [...] under the logits [..., classes] of a model's `output`; 0 for
    targets of -100.

    Raises:
        ValueError: there are no such logits.
    """
    logits = logits_in(output)
    if not isinstance(logits, torch.Tensor) or logits.shape[:-1] != targets.shape:
        shape = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(
            f"log_probs was given targets of shape {tuple(targets.shape)}, and the model returned {shape}; it needs "
            f"logits of the targets' shape and the classes: the output itself, its first item, or its .logits"
        )
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=_IGNORED)
    return -losses.view(targets.shape)

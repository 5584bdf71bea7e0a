"""What people do with a laid-out model by hand: state dicts, other optimizers, other weights, loaders."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import parity
from engines import assert_same_state, engine_of, own_shard
from log_lines import logged
from toys import Regular, data


def _loaded_by_hand(plans: list[dict[str, Any]]) -> list[tuple[str, float, float, str]]:
    """What state_dict() says, what loading a full one does to the loss, and what one of other shapes is told."""
    found = []
    for fields in plans:
        engine, other = parity.make_engine("gpt", fields), parity.make_engine("gpt", fields)
        batch = parity.shard(engine, *parity.batch("gpt", 0))
        engine.step(*batch)
        full = [engine.full_state_dict()]
        torch.distributed.broadcast_object_list(full)
        try:
            refused = str(dict(other.model.state_dict()).keys() ^ full[0].keys())
        except RuntimeError as error:
            refused = str(error)
        other.model(batch[0])  # a forward whose backward does not come
        other.model.load_state_dict(full[0])
        losses = other.evaluate(*batch).item(), engine.evaluate(*batch).item()
        name = "blocks.0.attention.query_key_value.weight"
        name = name if name in full[0] else next(n for n, t in full[0].items() if t.dim() == 2)
        try:
            other.model.load_state_dict({**full[0], name: torch.zeros(5, 5)})
            wrong = ""
        except RuntimeError as error:
            wrong = str(error)
        assert other.evaluate(*batch).item() == losses[0] or wrong
        found.append((refused, *losses, wrong))
    return found


_SPLIT: list[dict[str, Any]] = [dict(tp=2), dict(zero=1, precision="bf16"), dict(zero=3, precision="bf16")]
_FULL: list[dict[str, Any]] = [dict(zero=0, precision="bf16"), dict(zero=3)]


@pytest.mark.slow
def test_state_dicts_by_hand(ranks):
    found = ranks(2, _loaded_by_hand, [*_SPLIT, *_FULL])[0]
    for fields, (refused, loaded, expected, wrong) in zip([*_SPLIT, *_FULL], found, strict=True):
        if fields in _SPLIT:
            rounded = fields.get("precision") == "bf16"
            held = "weights that are rounded to 16 bits" if rounded else "only this rank's parts of the weights"
            assert f"would hold {held}" in refused
            assert "engine.full_state_dict()" in refused
        else:
            assert refused == "set()"
        assert loaded == pytest.approx(expected, rel=1e-6)
        assert "size mismatch" in wrong and "[5, 5]" in wrong


def _weights_swapped(fields: dict[str, Any]) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """An average of the weights beside training, and its evaluation."""
    engine = engine_of(Regular(), **fields)
    average = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    for step in range(2):
        engine.step(*own_shard(engine, *data(step)))
        with torch.no_grad():
            for name, p in engine.model.named_parameters():
                average[name].mul_(0.5).add_(p, alpha=0.5)
    batch = own_shard(engine, *data(5))
    losses = [engine.evaluate(*batch).item()]
    with engine.using_weights(average):
        losses.append(engine.evaluate(*batch).item())
        state = engine.full_state_dict()
    losses.append(engine.evaluate(*batch).item())
    with (
        pytest.raises(ValueError, match="'nothing', which is not a parameter of the model"),
        engine.using_weights({"nothing": batch[0]}),
    ):
        pass
    return losses, [state, engine.full_state_dict()]


def _swapped_under(plans: list[dict[str, Any]]) -> list[Any]:
    return [_weights_swapped(fields) for fields in plans]


@pytest.mark.slow
def test_an_average_of_the_weights(ranks):
    (losses, (average, _)), *others = ranks(2, _swapped_under, [dict(zero=0), dict(zero=1), dict(zero=3)])[0]
    assert losses[0] == losses[2] != losses[1]
    for other, (state, _) in others:
        assert other == pytest.approx(losses, rel=1e-5)
        assert_same_state(state, average)


def _optimizers_by_hand() -> list[str]:
    model = nn.Linear(6, 3)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = engine_of(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    late = torch.optim.Adam(engine.model.parameters(), lr=0.1)
    calls = [
        early.step,
        late.step,
        lambda: torch.optim.SGD(engine, lr=0.1),
        lambda: engine.parameters,
        lambda: engine.nothing,
        lambda: engine.model.load_state_dict(engine.full_state_dict(), assign=True),
    ]
    found = []
    for call in calls:
        try:
            call()
            found.append("")
        except (RuntimeError, TypeError, AttributeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    engine.step(*own_shard(engine, *data(0)))
    return found


def _schedulers_by_hand() -> list[list[str]]:
    """What the first step logs, and the second."""
    constant = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0)
    model, another = nn.Linear(6, 3), nn.Linear(6, 3)
    kept = [constant(torch.optim.SGD(of.parameters(), lr=0.1)) for of in (model, another)]
    engine = engine_of(model, optimizer=partial(torch.optim.SGD, lr=0.1))
    kept.append(constant(engine.optimizer))
    kept.append(torch.optim.lr_scheduler.StepLR(torch.optim.Adam(engine.model.parameters(), lr=0.1), 1))
    found = []
    for _ in range(2):
        with logged() as messages:
            engine.step(*own_shard(engine, *data(0)))
        found.append(sorted(messages))
    return found


def test_schedulers_of_other_optimizers_are_named_at_the_first_step(ranks):
    rates = "sets the learning rates of an {} that does not train the model: build it on engine.optimizer"
    expected = [f"a {name} {rates.format(optimizer)}" for name, optimizer in (("LambdaLR", "SGD"), ("StepLR", "Adam"))]
    first, *others = ranks(2, _schedulers_by_hand)
    assert first == [expected, []]
    assert others == [[[], []]]  # one rank speaks


def test_other_optimizers_are_told(ranks):
    expected = [
        "RuntimeError: this SGD was built on the parameters that the model had before tensorshard.parallelize",
        "",  # it has no gradients to step with
        "TypeError: an Engine is not a list of parameters",
        "AttributeError: an Engine has no 'parameters'; use engine.model.parameters()",
        "AttributeError: an Engine has no attribute 'nothing'",
        "RuntimeError: load_state_dict(assign=True) would take",
    ]
    for message, start in zip(ranks(2, _optimizers_by_hand)[0], expected, strict=True):
        assert message.startswith(start)


def _step_of_another(fields: dict[str, Any]) -> str:
    engine = engine_of(nn.Linear(6, 3), **fields)
    inputs, targets = own_shard(engine, *data(0))
    engine.backward(nn.functional.mse_loss(engine.model(inputs), targets))
    before = engine.model.weight.detach().clone()
    try:
        torch.optim.SGD(engine.model.parameters(), lr=0.1).step()
    except RuntimeError as error:
        assert torch.equal(engine.model.weight, before)
        return str(error)
    return ""


@pytest.mark.parametrize("fields", [dict(precision="fp16", zero=1), dict(offload="cpu", zero=2)], ids=str)
def test_another_optimizer_is_refused_where_a_field_could_not_be_honoured(ranks, fields):
    for sentence in ranks(2, _step_of_another, fields):
        assert "this SGD was built on engine.model.parameters(), under a plan with" in sentence


def _copied_in_bf16(fields: dict[str, Any]) -> bool:
    engine = engine_of(Methods(), precision="bf16", **fields)
    copied = copy.deepcopy(engine.model)
    inputs = own_shard(engine, *data(0))[0]
    with torch.no_grad():
        copied.layer.weight.zero_()
        return bool(copied.twice(inputs).abs().max() < engine.model.twice(inputs).abs().max())


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(x)


def test_a_deep_copy_in_16_bits_calls_its_own_methods(ranks):
    for level in (0, 1):
        assert ranks(2, _copied_in_bf16, dict(zero=level)) == [True, True]


def _copied_layer() -> tuple[str, list[int]]:
    copied = copy.deepcopy(engine_of(Methods(), zero=3).model.layer)
    torch.optim.SGD(copied.parameters(), lr=0.1).step()  # nobody's any more
    return type(copied).__name__, list(copied.weight.shape)


def test_a_module_in_no_unit_can_be_copied_at_zero_3(ranks):
    assert ranks(2, _copied_layer) == [("Linear", [3, 6])] * 2


def _rounded_state() -> str:
    engine = engine_of(nn.Linear(6, 3), zero=1, precision="bf16")
    try:
        engine.model.state_dict()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_state_dict_of_rounded_weights_is_refused(ranks):
    for sentence in ranks(2, _rounded_state):
        assert "would hold weights that are rounded to 16 bits" in sentence
        assert "precision='bf16'" in sentence and "engine.full_state_dict()" in sentence


class _Lookahead(torch.optim.Optimizer):
    """Steps through another optimizer, and holds it as wrappers do."""

    def __init__(self, inner: torch.optim.Optimizer, hide: Callable[[torch.optim.Optimizer], Any]) -> None:
        super().__init__(inner.param_groups, {})
        self.held = hide(inner)
        self.update = inner.step

    def step(self, closure: Any = None) -> None:
        self.update()


def _optimizer_of_two_parts() -> list[str]:
    found = []
    for hide in (lambda inner: inner, lambda inner: [inner], lambda inner: {"inner": inner}):
        engine = engine_of(nn.Linear(6, 3), optimizer=lambda p, hide=hide: _Lookahead(torch.optim.SGD(p, lr=0.1), hide))
        with pytest.raises(RuntimeError) as caught:
            engine.step(*own_shard(engine, *data(0)))
        found.append(str(caught.value))
    return found


def test_an_optimizer_within_that_of_the_engine_is_told_of_what_holds_it(ranks):
    for message in ranks(1, _optimizer_of_two_parts)[0]:
        assert message.startswith("the _Lookahead that parallelize(optimizer=...) made updates through the SGD")
        assert "Return the SGD itself" in message


def _states_of_the_first_rank(plans: list[dict[str, Any]]) -> list[str]:
    """What each rank's optimizer says to the states that the first rank's has; its own it takes."""
    found = []
    for fields in plans:
        engine = engine_of(Regular(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9), **fields)
        engine.step(*own_shard(engine, *data(0)))
        states = [engine.optimizer.state_dict()]
        engine.optimizer.load_state_dict(states[0])
        torch.distributed.broadcast_object_list(states)
        try:
            engine.optimizer.load_state_dict(states[0])
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_the_optimizers_states_of_one_rank_are_not_taken_for_anothers(ranks):
    first, second = ranks(2, _states_of_the_first_rank, [dict(zero=0), dict(zero=1)])
    assert first == ["", ""] and second[0] == ""
    assert "another rank's parameters (dp_shard 0 of 2; here dp_shard 1 of 2)" in second[1]
    assert "engine.save(path)" in second[1]


def _copies_called(plans: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """What making a deep copy of the model says, and how far the copy is from the model."""
    found = []
    for fields in plans:
        engine = engine_of(Regular(), **fields)
        inputs = own_shard(engine, *data(0))[0]
        try:
            copied = torch.optim.swa_utils.AveragedModel(engine.model)
            found.append(("", (copied(inputs) - engine.model(inputs)).abs().max().item()))
        except RuntimeError as error:
            found.append((str(error), 0.0))
    return found


def test_a_copy_of_the_model_computes_the_same_or_is_refused(ranks):
    plans = [dict(zero=0), dict(zero=1), dict(zero=3), dict(tp=2), dict(pp=2, micro_batches=2)]
    for *exact, tensor_parallel, stages in ranks(2, _copies_called, plans):
        assert exact == [("", 0.0)] * 3
        for refusal, _ in (tensor_parallel, stages):
            assert "AveragedModel" in refusal and "engine.using_weights(average)" in refusal


def _batches(fields: dict[str, Any], folder: str) -> tuple[list[list[int]], list[list[int]], int]:
    """The samples of five batches over two epochs, those after a checkpoint, and those of a resumed loader."""
    engine = engine_of(nn.Linear(1, 2), **fields)
    dataset = TensorDataset(torch.arange(10.0).view(10, 1), torch.zeros(10, 1))
    loader = engine.loader(dataset, 4)
    batches = []
    while len(batches) < 5:
        for inputs, _ in loader:
            batches.append(inputs.flatten().int().tolist())
            if len(batches) == 4:
                engine.save(folder)
    again = engine_of(nn.Linear(1, 2), **fields)
    again.load(folder)
    rest = [inputs.flatten().int().tolist() for inputs, _ in again.loader(dataset, 4)]
    return batches, rest, len(loader)


def test_a_loader_deals_samples_and_goes_on_where_a_checkpoint_stands(ranks, tmp_path):
    one = ranks(1, _batches, {}, str(tmp_path / "one"))
    data_ranks = ranks(2, _batches, {}, str(tmp_path / "two"))
    alike = ranks(2, _batches, dict(tp=2, tp_plan={"": "colwise_gather"}), str(tmp_path / "tp"))
    batches, rest, length = one[0]
    assert length == 3 and sorted(chain(*batches[:3])) == list(range(10)) == sorted(chain(*batches[3:]))
    assert rest == batches[4:6] and batches[:3] != batches[3:6]
    for k, batch in enumerate(batches):
        assert list(chain(*(found[0][k] for found in data_ranks))) == batch
    assert alike[0] == alike[1] == one[0]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (iter([1]), {}, "engine.loader deals samples to ranks by their index"),
        ([1, 2], dict(sampler=[0]), "engine.loader was given sampler"),
        ([1, 2, 3], dict(batch_size=3), "batch_size=3, of all data ranks together, does not divide over 2 data ranks"),
    ],
)
def test_a_loader_that_cannot_be(dataset, options, message):
    from tensorshard.engine.loader import EngineLoader

    size = options.pop("batch_size", 2)
    with pytest.raises((TypeError, ValueError), match=message):
        EngineLoader(
            dataset,
            size,
            dp_rank=0,
            dp_size=2,
            device=torch.device("cpu"),
            shuffle=True,
            drop_last=False,
            seed=0,
            options=options,
        )

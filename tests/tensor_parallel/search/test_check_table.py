"""Tables that are checked by numbers: right ones pass, wrong ones are refused, and models are left as they are."""

import pytest
import torch
from torch import nn

from table_models import build
from tensorshard.tensor_parallel.search.check_table import WrongTableError, check_tensor_table
from tensorshard.tensor_parallel.search.choose_table import choose_tensor_table
from tensorshard.tensor_parallel.table.table import TensorTable
from tensorshard.tensor_parallel.verify.simulated_ranks import run_as_ranks

LAYERS = "model.layers.*"
LLAMA = {
    f"{LAYERS}.self_attn.q_proj": "colwise",
    f"{LAYERS}.self_attn.k_proj": "colwise",
    f"{LAYERS}.self_attn.v_proj": "colwise",
    f"{LAYERS}.self_attn.o_proj": "rowwise",
    f"{LAYERS}.mlp.gate_proj": "colwise",
    f"{LAYERS}.mlp.up_proj": "colwise",
    f"{LAYERS}.mlp.down_proj": "rowwise",
}
GPT2 = "transformer.h.*.attn"


def check(kind: str, table: dict[str, str], size: int = 2) -> dict[str, str]:
    return check_tensor_table(build(kind), TensorTable.from_dict(table), size).plan.to_dict()


def test_a_right_table_passes():
    assert check("llama", LLAMA) == LLAMA


def test_norms_of_single_heads_are_added():
    completed = check("qwen3", LLAMA)
    assert {key: completed[key] for key in completed.keys() - LLAMA.keys()} == {
        f"{LAYERS}.self_attn.q_norm.weight": "replicate(sum_grad)",
        f"{LAYERS}.self_attn.k_norm.weight": "replicate(sum_grad)",
    }


@pytest.mark.parametrize(
    ("kind", "table", "size"),
    [
        ("llama", {**LLAMA, f"{LAYERS}.self_attn.q_proj": "rowwise"}, 2),
        ("llama", LLAMA, 4),  # 2 key-value heads
        ("llama", LLAMA, 3),  # 4 heads
        ("llama", {f"{LAYERS}.mlp.gate_proj": "colwise"}, 2),
        ("qwen3", {**LLAMA, f"{LAYERS}.self_attn.q_norm": "replicate"}, 2),
        ("gpt2", {f"{GPT2}.c_attn": "colwise", f"{GPT2}.c_proj": "rowwise"}, 2),
        ("gpt2", {f"{GPT2}.c_attn": "colwise", f"{GPT2}.c_proj": "rowwise", GPT2: "divide(split_size)"}, 2),
        ("phi3", {f"{LAYERS}.mlp.gate_up_proj": "colwise", f"{LAYERS}.mlp.down_proj": "rowwise"}, 2),
        ("gpt", {"blocks.*.attention_norm": "slice(0)"}, 2),
    ],
)
def test_a_wrong_table_is_refused_by_numbers(kind, table, size):
    first = next(iter(table)).partition("*")[0]
    with pytest.raises(WrongTableError, match=rf"wrong for {first}\*.*over {size} ranks"):
        check(kind, table, size)


def test_a_refusal_names_heads_that_do_not_divide():
    said = "Note that self_attn.config.num_key_value_heads is 2, which cannot be divided over 4 ranks; tp can be 2"
    with pytest.raises(WrongTableError, match=said):
        check("llama", LLAMA, 4)


def test_a_split_output_is_refused():
    with pytest.raises(WrongTableError, match="use colwise_gather for the last layer"):
        check("gpt", {"head": "colwise"})


def test_a_split_output_of_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    with pytest.raises(WrongTableError, match="use colwise_gather for the last layer"):
        check_tensor_table(model, TensorTable.from_dict({"2": "colwise"}), 2)


def test_a_sum_of_gradients_is_taken_once():
    norms = {f"{LAYERS}.self_attn.[qk]_norm*": "replicate(sum_grad)"}  # the modules and their weights
    assert check("qwen3", {**LLAMA, **norms})


def test_layers_outside_of_the_blocks_are_checked_too():
    assert check("bert", {"head.dense": "colwise_gather"})
    with pytest.raises(WrongTableError, match="the model as a whole does not compute"):
        check("bert", {"head.dense": "colwise"})


def test_an_unchecked_table_is_taken_at_its_word():
    table = {**LLAMA, f"{LAYERS}.self_attn.q_proj": "rowwise"}
    chosen = choose_tensor_table(build("llama"), 2, table, check=False)
    assert chosen.plan.to_dict() == table
    assert "given, and not checked" in chosen.describe()


def test_a_model_is_left_as_it_is():
    model = build("gpt")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    modules = [(name, type(module), set(vars(module))) for name, module in model.named_modules()]
    choose_tensor_table(model, 2)
    assert [(name, type(module), set(vars(module))) for name, module in model.named_modules()] == modules
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.requires_grad and parameter.grad is None


def test_a_model_that_does_not_run_on_the_inputs_is_refused():
    with pytest.raises(ValueError, match="GPT does not run on the given inputs, ValueError: tokens have the shape"):
        choose_tensor_table(build("gpt"), 2, inputs=torch.zeros(3, dtype=torch.long))


def test_inputs_that_cannot_be_guessed_have_to_be_given():
    class Nothing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(ValueError, match="no inputs could be guessed to run Nothing with"):
        choose_tensor_table(Nothing(), 2)


def test_a_failing_simulated_rank_releases_the_others():
    def fail_on_one(group):
        if group.rank() == 1:
            raise ValueError("rank 1 gave up")
        group.allreduce([torch.ones(2)])

    with pytest.raises(ValueError, match="rank 1 gave up"):
        run_as_ranks(3, fail_on_one)

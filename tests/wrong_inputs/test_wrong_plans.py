"""Plans that no hardware could honour, or that this world cannot: each told in a sentence."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorshard as ts
from wrong_inputs import RAW, Case, assert_refused, said

WRONG: dict[str, Case] = {
    "an unknown field": (lambda: ts.Plan(micro_batch=4), "no field 'micro_batch'", "did you mean 'micro_batches'?"),
    "an unknown field, far from all": (lambda: ts.Plan(nodes=4), "no field 'nodes'", "the fields are dp_replicate"),
    "a level that does not exist": (lambda: ts.Plan(zero=4), "zero is 4", "0, 1, 2 and 3", "'os_g' (2)"),
    "a level in quotes": (lambda: ts.Plan(zero="3"), "zero is '3', a string; give the number: zero=3"),
    "a degree in quotes": (lambda: ts.Plan(tp="2"), "tp is '2', a string", "a positive integer"),
    "a level's name": (lambda: ts.Plan(zero="stage_2"), "zero is 'stage_2'", "'os_g' (2)"),
    "a level as a bool": (lambda: ts.Plan(zero=True), "zero is True", "0, 1, 2 and 3"),
    "a degree of 0": (lambda: ts.Plan(tp=0), "tp is 0", "a positive integer, or -1"),
    "a degree as a float": (lambda: ts.Plan(tp=2.0), "tp is 2.0", "a positive integer, or -1"),
    "a degree as text": (lambda: ts.Plan(dp_shard="4"), "dp_shard is '4'", "a positive integer, or -1"),
    "two degrees to be inferred": (lambda: ts.Plan(tp=-1), "dp_shard and tp are both -1", "give the others a number"),
    "no micro-batches": (lambda: ts.Plan(micro_batches=0), "micro_batches is 0", "at least 1"),
    "half a micro-batch": (lambda: ts.Plan(micro_batches=2.5), "micro_batches is 2.5", "an integer of at least 1"),
    "a precision by another name": (lambda: ts.Plan(precision="bfloat16"), "precision is 'bfloat16'", "mean 'bf16'?"),
    "a precision as a dtype": (lambda: ts.Plan(precision=torch.bfloat16), "precision is torch.bfloat16", "'bf16'"),
    "a reduction that does not exist": (lambda: ts.Plan(reduce_dtype="fp8"), "reduce_dtype is 'fp8'", "'bf16'"),
    "recompute as a bool": (lambda: ts.Plan(recompute=True), "recompute is True", "'none', 'selective', 'full'"),
    "logits misspelt": (lambda: ts.Plan(logits="tile"), "logits is 'tile'", "did you mean 'tiled'?"),
    "clipping at 0": (lambda: ts.Plan(clip_grad_norm=0), "clip_grad_norm is 0", "or None to turn it off"),
    "clipping at nan": (lambda: ts.Plan(clip_grad_norm=float("nan")), "clip_grad_norm is nan", "finite"),
    "clipping as text": (lambda: ts.Plan(clip_grad_norm="1.0"), "clip_grad_norm is '1.0'", "a positive number"),
    "units of no bytes": (lambda: ts.Plan(shard_units=0), "shard_units is 0", "at least 1"),
    "units as one name": (lambda: ts.Plan(shard_units="blocks.*"), "shard_units is 'blocks.*'", "list of module names"),
    "compile as text": (lambda: ts.Plan(compile="yes"), "compile is 'yes'", "True or False"),
    "a schedule with a typing mistake": (lambda: ts.Plan(pp=2, pp_schedule="1fb1"), "'1fb1'", "'1f1b'"),
    "a cut as one name": (lambda: ts.Plan(pp=2, pp_split="layers.3"), "pp_split is 'layers.3'", "list of module names"),
    "no stages": (lambda: ts.Plan(pp=2, pp_stages_per_rank=0), "pp_stages_per_rank is 0", "at least 1"),
    "a table as a list": (
        lambda: ts.Plan(tp=2, tp_plan=["q_proj"]), "tp_plan is ['q_proj']", "module names", "colwise"
    ),
    "a table of no styles": (lambda: ts.Plan(tp=2, tp_plan={"q": 1}), "tp_plan is {'q': 1}", "module names", "colwise"),
    "offload to nowhere": (lambda: ts.Plan(offload="gpuu").resolve(1), "offload", "gpuu"),
    "a field set afterwards": (lambda: setattr(ts.Plan(), "zero", 2), "zero", "dataclasses.replace(plan, zero=2)"),
    "degrees that are not the world's": (lambda: ts.Plan(dp_shard=3).resolve(4), "multiply to 3", "processes is 4"),
    "degrees that do not divide it": (lambda: ts.Plan(tp=3).resolve(4), "tp=3 needs a multiple of 3", "there are 4"),
    "a world as text": (lambda: ts.Plan().resolve("4"), "world_size is '4'", "an integer of at least 1"),
    "a compiled model of split sequences": (
        lambda: ts.Plan(cp=2, compile=True).resolve(4), "compile=True", "cp=2", "set compile=False"
    ),
    "sequences without tp": (
        lambda: ts.Plan(sequence_parallel=True).resolve(2), "sequence_parallel=True", "tp=1", "set tp"
    ),
    "a table without tp": (lambda: ts.Plan(tp_plan={"q": "colwise"}).resolve(2), "tp_plan was given", "tp=1", "set tp"),
    "a cut without pp": (lambda: ts.Plan(pp_split=["b.1"]).resolve(2), "pp_split=['b.1']", "pp=1", "set pp"),
    "fewer micro-batches than stages": (lambda: ts.Plan(pp=2).resolve(2), "needs at least micro_batches=2"),
    "too many cuts": (
        lambda: ts.Plan(pp=2, micro_batches=2, pp_split=["b.1", "b.2"]).resolve(2), "names 2 modules", "name 1"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_plan(what):
    assert_refused(what, said(WRONG[what][0]), WRONG[what])


def test_few_are_left_to_python_and_torch():
    assert len(RAW) <= 5


# what the file holds, and the words
WRONG_FILES: dict[str, tuple[Any, ...]] = {
    "a list": ("- zero\n- 3\n", "holds a list", "a mapping of field names to values"),
    "an unknown field": ("zero: 3\ndp_shrad: 2\n", "no field 'dp_shrad'", "did you mean 'dp_shard'?"),
    "broken YAML": ("zero: [3\n", "plan.yaml", "cannot be read as YAML", "line"),
    "YAML that is not UTF-8": ("# caf\u00e9\n", "plan.yaml is not UTF-8 text", "iconv"),
    "no file": (None, "plan.yaml", "there is no file"),
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_wrong_file(what: str, tmp_path: Path) -> None:
    content, *words = WRONG_FILES[what]
    if content is not None:
        (tmp_path / "plan.yaml").write_text(content, encoding="latin1")
    assert_refused(what, said(ts.Plan.from_yaml, tmp_path / "plan.yaml"), (None, *words))

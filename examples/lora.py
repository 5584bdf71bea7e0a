"""Fine-tune a Hugging Face model with LoRA adapters of peft (Hu et al. 2021), save them alone, and let peft read them.

python examples/lora.py
torchrun --nproc-per-node 2 examples/lora.py --plan zero=3,precision=bf16
torchrun --nproc-per-node 4 examples/lora.py --plan tp=2,sequence_parallel=True --model path/to/llama

Without --model, a small model with random weights is made. It reads bytes: the text is Python's standard library. The
base is frozen: it has no gradients and no optimizer states, and at ZeRO 3 each rank holds its share of it.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tensorshard as ts
from tensorshard.data import StdlibText

LENGTH = 32


def base_model(directory: Path | None) -> torch.nn.Module:
    """The model in `directory`, or a small one, which is the same on every rank."""
    if directory is not None:
        return AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes))


def loss_fn(output: Any, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def batch(text: StdlibText, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.randint(len(text), (size,), generator=torch.Generator().manual_seed(step)).tolist()
    inputs, targets = zip(*(text[index] for index in indices), strict=True)
    return torch.stack(inputs), torch.stack(targets)


def plan(text: str) -> ts.Plan:
    fields = dict(field.split("=") for field in text.split(",") if field)
    known = {"True": True, "False": False}
    return ts.Plan(**{key: int(v) if v.isdecimal() else known.get(v, v) for key, v in fields.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a directory of Hugging Face's; without, a small model is made")
    parser.add_argument("--output", type=Path, default=Path("adapters"), help="where the adapters go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a step, over all data ranks")
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--plan", type=plan, default="zero=3", help="its fields, such as zero=1,tp=2")
    args = parser.parse_args()

    lora = peft.LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)  # the adapters begin alike on every rank, too
    model = peft.get_peft_model(base_model(args.model), lora)
    engine = ts.parallelize(model, args.plan, optimizer=partial(torch.optim.AdamW, lr=3e-3), loss_fn=loss_fn)
    text, mesh = StdlibText("train", LENGTH), engine.mesh
    for step in range(1, args.steps + 1):
        inputs, targets = (part.chunk(mesh.dp_size)[mesh.dp_rank] for part in batch(text, step, args.batch_size))
        loss = engine.step({"input_ids": inputs}, targets)
        if mesh.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3d}  loss {loss.item():.6f}", flush=True)
    held_out = batch(StdlibText("validation", LENGTH), 0, args.batch_size)
    trained = engine.evaluate({"input_ids": held_out[0]}, held_out[1]).item()
    engine.save_pretrained(args.output, adapters_only=True, overwrite=True)
    if mesh.rank == 0:
        reread = peft.PeftModel.from_pretrained(base_model(args.model), args.output)
        with torch.no_grad():
            found = loss_fn(reread(input_ids=held_out[0]), held_out[1]).item()
        print(f"held-out loss {trained:.6f}; of the adapters in {args.output}, read by peft: loss {found:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

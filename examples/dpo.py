"""Direct preference optimization (Rafailov et al. 2023): a policy learns from pairs of answers, against a reference.

python examples/dpo.py
torchrun --nproc-per-node 4 examples/dpo.py --policy zero=3 --reference tp=2
torchrun --nproc-per-node 2 examples/dpo.py --policy pp=2,micro_batches=4 --reference zero=3

The reference is frozen and has a plan of its own. It computes log-probabilities in tiles, before the step. Each answer
follows the one that it is compared with, so that both are in one micro-batch. Data is generated: the preferred answer
counts upwards.
"""

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tensorshard as ts
from tensorshard.models import GPT

VOCABULARY, LENGTH, BETA = 64, 16, 0.5


def dpo_loss(logits: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The loss summed over pairs, and their number.

    Args:
        targets: the answers' tokens, and the log-probability of each under the reference: [answers, tokens] both.
    """
    tokens, reference = targets
    policy = -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view_as(tokens)
    chosen, rejected = (policy - reference).sum(1).view(-1, 2).unbind(1)
    return -F.logsigmoid(BETA * (chosen - rejected)).sum(), len(chosen)


def answers(step: int, pairs: int) -> torch.Tensor:
    """Tokens [2 x pairs, LENGTH + 1]: of each pair the preferred answer, then the other one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (2 * pairs, LENGTH + 1), generator=generator)
    tokens[::2] = (tokens[::2, :1] + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens


def share(mesh: ts.Mesh, batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(mesh.dp_size)[mesh.dp_rank]


def plan(text: str) -> ts.Plan:
    return ts.Plan(**{key: int(value) for key, value in (field.split("=") for field in text.split(",") if field)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=16, help="in a step, over all data ranks")
    parser.add_argument("--policy", type=plan, default="zero=1", help="fields of its plan, such as zero=3,tp=2")
    parser.add_argument("--reference", type=plan, default="zero=3", help="fields of its plan")
    args = parser.parse_args()
    model = partial(GPT, VOCABULARY, LENGTH, num_layers=2, num_heads=2, width=32)
    optimizer = partial(torch.optim.AdamW, lr=3e-3)
    policy = ts.parallelize(model, args.policy, optimizer=optimizer, loss_fn=dpo_loss)
    reference = ts.parallelize_frozen(model, args.reference)
    for step in range(1, args.steps + 1):
        tokens = answers(step, args.pairs)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        known = reference.log_probs(share(reference.mesh, inputs), share(reference.mesh, targets))
        known = reference.gather(known)  # of the whole batch: the policy's data ranks may be others
        inputs, targets, known = (share(policy.mesh, part) for part in (inputs, targets, known))
        loss = policy.step(inputs, (targets, known))
        if policy.mesh.rank == 0 and (step == 1 or step % 20 == 0):
            print(f"step {step:3d}  loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

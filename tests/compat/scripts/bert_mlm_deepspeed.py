"""DeepSpeed's BERT pre-training, rebuilt small: masked bytes of Python's own library, rates that the script sets.

The import line is what a test changes.
"""

import argparse
import inspect

import deepspeed
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import BertConfig, BertForMaskedLM

MASK, SPECIAL, VOCABULARY, LENGTH = 4, 5, 64, 16


class MaskedBytes(Dataset):
    """Rows of LENGTH tokens, of which four are masked."""

    def __init__(self, rows):
        text = inspect.getsource(argparse).encode()[: rows * LENGTH]
        self.tokens = torch.tensor([SPECIAL + byte % (VOCABULARY - SPECIAL) for byte in text]).view(rows, LENGTH)
        generator = torch.Generator().manual_seed(3)
        self.masked = torch.stack([torch.randperm(LENGTH, generator=generator)[:4] for _ in range(rows)])

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens, labels = self.tokens[index].clone(), torch.full((LENGTH,), -100)
        labels[self.masked[index]] = tokens[self.masked[index]]
        tokens[self.masked[index]] = MASK
        return {"input_ids": tokens, "attention_mask": torch.ones(LENGTH, dtype=torch.long), "labels": labels}


def warmup_linear(progress, warmup=0.25):
    return progress / warmup if progress < warmup else 1.0 - progress


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", default=None)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    grouped = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    network, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=grouped)
    dataset = MaskedBytes(64)
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank)
    loader = DataLoader(dataset, batch_size=network.train_micro_batch_size_per_gpu(), sampler=sampler)
    accumulation = network.gradient_accumulation_steps()
    total, step, first = args.epochs * len(loader) // accumulation, 0, 0
    if args.resume:
        _, state = network.load_checkpoint(args.resume)
        first, step = state["epoch"] + 1, state["step"]
    found = {"losses": [], "rates": [], "norms": []}
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        network.train()
        for batch in loader:
            loss = network(**{name: tensor.to(network.device) for name, tensor in batch.items()}).loss
            network.backward(loss)
            if network.is_gradient_accumulation_boundary():
                step += 1
                for group in optimizer.param_groups:
                    group["lr"] = 5e-3 * warmup_linear(step / total)
            boundary = network.is_gradient_accumulation_boundary()
            network.step()
            mean = loss.detach().float().clone()
            torch.distributed.all_reduce(mean)
            found["losses"].append(mean.item() / ranks)
            if boundary:
                found["rates"].append([group["lr"] for group in optimizer.param_groups])
                found["norms"].append(float(network.get_global_grad_norm()))
        if args.save and epoch == 0:
            network.save_checkpoint(args.save, tag="epoch0", client_state={"epoch": epoch, "step": step})
    return found


if __name__ == "__main__":
    import json

    print("found", json.dumps(main()))

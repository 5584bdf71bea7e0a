"""A ZeRO 3 script as DeepSpeed's pages have them, rebuilt small: a model that is built in shards, and is written and
read in whole parameters.

The import line is what a test changes.
"""

import argparse
import inspect

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        mixed = self.mix(nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + self.down(nn.functional.gelu(self.up(mixed)))


class LanguageModel(nn.Module):
    """Its logits use the embedding's weight outside of the embedding, which DeepSpeed wants to be told."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        deepspeed.zero.register_external_parameter(self, self.embedding.weight)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.embedding.weight)


def texts(rows):
    text = inspect.getsource(argparse).encode()[: rows * (LENGTH + 1)]
    return torch.tensor([byte % VOCABULARY for byte in text]).view(rows, LENGTH + 1)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(arguments)
    deepspeed.init_distributed("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    config = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": args.stage, "overlap_comm": False, "stage3_param_persistence_threshold": 100},
    }
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3, dtype=torch.float32):
        model = LanguageModel()
    for parameter in model.parameters():  # before initialize, one at a time
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            if rank == 0 and parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = texts(64)
    loader = DataLoader(data, args.micro_batch, sampler=DistributedSampler(data, num_replicas=ranks, rank=rank))
    found = {"losses": [], "norms": [], "rows": []}
    for epoch in range(2):
        for rows in loader:
            logits = engine(rows[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            found["losses"].append(mean.item() / ranks)
            found["norms"].append(float(engine.get_global_grad_norm()))
        weight = engine.module.embedding.weight
        with deepspeed.zero.GatheredParameters(weight):  # each rank reads it alone
            found["rows"].append(weight.data[: 3 + rank].norm(dim=1)[:3].tolist())
            found["rows"].append([float(engine.module.embedding.weight[0].norm()), weight.numel()])
        if epoch == 0:  # a row begins anew
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                if rank == 0:
                    weight.data[1].fill_(0.05)
    state = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            if rank == 0:
                state[name] = parameter.data.cpu().clone().tolist()
    return {**found, "state": state}


if __name__ == "__main__":
    import json

    print("found", json.dumps(main()))

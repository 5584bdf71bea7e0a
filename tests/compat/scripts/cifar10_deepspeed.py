"""DeepSpeed's cifar10_deepspeed.py, rebuilt small: a convolutional network, pictures that are made up.

The import line is what a test changes.
"""

import argparse

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 24)
        self.fc2 = nn.Linear(24, 16)
        self.fc3 = nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 8 * 2 * 2)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def pictures():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(80, 3, 14, 14, generator=generator), torch.randint(0, 10, (80,), generator=generator)
    )


def get_ds_config(args):
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulate,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-3, "betas": [0.8, 0.999], "eps": 1e-6, "weight_decay": 0.01, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0.0, "warmup_max_lr": 3e-3, "warmup_num_steps": 3, "total_num_steps": 12,
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": 0.2,
        "bf16": {"enabled": args.dtype == "bf16"},
        "zero_optimization": {"stage": args.stage, "overlap_comm": False},
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--save", default=None)
    parser.add_argument("--resume", default=None)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=pictures(), config=get_ds_config(args)
    )
    first = 0
    if args.resume:
        _, client_state = model_engine.load_checkpoint(args.resume)
        first = client_state["epoch"] + 1
    criterion = nn.CrossEntropyLoss()
    found = {"losses": [], "rates": [], "boundaries": [], "norms": []}
    for epoch in range(first, args.epochs):
        for data in trainloader:
            inputs, labels = data[0], data[1]
            if model_engine.bfloat16_enabled():
                inputs = inputs.to(torch.bfloat16)
            outputs = model_engine(inputs)
            loss = criterion(outputs.float(), labels)
            model_engine.backward(loss)
            found["boundaries"].append(model_engine.is_gradient_accumulation_boundary())
            model_engine.step()
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            found["losses"].append(total.item() / torch.distributed.get_world_size())
            found["rates"].append(optimizer.param_groups[0]["lr"])
            if found["boundaries"][-1]:
                found["norms"].append(float(model_engine.get_global_grad_norm()))
        if args.save and epoch == 0:
            model_engine.save_checkpoint(args.save, client_state={"epoch": epoch})
    found["steps"] = [model_engine.global_steps, model_engine.micro_steps, model_engine.train_batch_size()]
    return found


if __name__ == "__main__":
    import json

    print("found", json.dumps(main()))

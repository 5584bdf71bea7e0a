"""Accelerate's cv_example.py, rebuilt small: a frozen network whose head is trained, pictures that are made up.

The import line of the Accelerator is what a test changes.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, 5, (count,), generator=generator)
        self.images = torch.randn(count, 3, 12, 12, generator=generator)
        self.images += self.labels.view(-1, 1, 1, 1) / 2

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, images):
        return self.head(self.body(images).mean(dim=(2, 3)))


def training_function(config, args):
    accelerator = Accelerator(
        cpu=args.cpu,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    lr, num_epochs, seed = config["lr"], config["num_epochs"], config["seed"]
    set_seed(seed)
    train_dataloader = DataLoader(PetsDataset(72, 1), shuffle=True, batch_size=args.batch_size)
    eval_dataloader = DataLoader(PetsDataset(22, 2), shuffle=False, batch_size=args.batch_size)
    model = Network()
    for param in model.parameters():
        param.requires_grad = False
    for param in model.head.parameters():
        param.requires_grad = True
    mean = torch.tensor([0.5, 0.4, 0.6])[None, :, None, None].to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=lr / 25, eps=1e-4)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=lr, epochs=num_epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    found = {"losses": [], "rates": [], "accuracy": [], "moments": []}
    for epoch in range(num_epochs):
        model.train()
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                inputs = batch["image"] - mean
                loss = torch.nn.functional.cross_entropy(model(inputs), batch["label"])
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
            found["rates"].append(lr_scheduler.get_last_lr()[0])
            found["moments"].append(optimizer.param_groups[0]["betas"][0])
        model.eval()
        accurate, num_elems = 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["image"] - mean)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), batch["label"]))
            accurate += int((predictions == references).sum())
            num_elems += len(references)
        found["accuracy"].append([accurate, num_elems])
        if args.output_dir:
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    found["trained"] = [name for name, p in unwrapped.named_parameters() if p.requires_grad]
    found["weights"] = accelerator.get_state_dict(model)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--output_dir", default=None)
    return training_function({"lr": 3e-2, "num_epochs": 3, "seed": 42}, parser.parse_args(arguments))


if __name__ == "__main__":
    main()

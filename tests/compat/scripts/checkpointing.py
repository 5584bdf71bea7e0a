"""Accelerate's by_feature/checkpointing.py, rebuilt small: folders of steps, and a run that goes on within an epoch.

The import line of the Accelerator is what a test changes.
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Count:
    """An object of the script's own, which goes into the checkpoint."""

    def __init__(self):
        self.samples = 0

    def state_dict(self):
        return {"samples": self.samples}

    def load_state_dict(self, state):
        self.samples = state["samples"]


def get_dataloader(batch_size):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(64, 8, generator=generator)
    targets = torch.stack([inputs.prod(dim=1), inputs.sum(dim=1)], dim=1)
    return DataLoader(TensorDataset(inputs, targets), shuffle=True, batch_size=batch_size)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--checkpointing_steps", type=int, default=None)
    parser.add_argument("--total_limit", type=int, default=None)
    parser.add_argument("--output_dir", default=".")
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args(arguments)
    accelerator = Accelerator(
        cpu=args.cpu,
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=args.total_limit
        ),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    set_seed(42)
    train_dataloader = get_dataloader(args.batch_size)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3 * len(train_dataloader))
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    count = Count()
    accelerator.register_for_checkpointing(count)
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        number = int(os.path.basename(args.resume_from_checkpoint).replace("checkpoint_", ""))
        resume_step = (number + 1) * args.checkpointing_steps
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
        overall_step = starting_epoch * len(train_dataloader)
        accelerator.project_configuration.iteration = number + 1
    found = {"losses": [], "rates": []}
    for epoch in range(starting_epoch, 3):
        model.train()
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        for inputs, targets in active_dataloader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            count.samples += len(accelerator.gather(targets))
            found["losses"].append(accelerator.gather(loss.detach()).mean().item())
            found["rates"].append(lr_scheduler.get_last_lr()[0])
            if args.checkpointing_steps and overall_step % args.checkpointing_steps == 0:
                accelerator.save_state()
    accelerator.wait_for_everyone()
    accelerator.save_model(model, os.path.join(args.output_dir, "final"))
    found["samples"], found["steps"] = count.samples, overall_step
    return found


if __name__ == "__main__":
    main()

"""Accelerate's by_feature/early_stopping.py and tracking.py, rebuilt small: one process says when all stop.

The import line of the Accelerator is what a test changes.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Record(GeneralTracker):
    """A tracker of the script's own."""

    name = "record"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.config, self.entries = {}, []

    @property
    def tracker(self):
        return self.entries

    @on_main_process
    def store_init_configuration(self, values):
        self.config = values

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.entries.append((step, values))


class EarlyStoppingCallback:
    def __init__(self, min_delta, patience):
        self.min_delta, self.patience = min_delta, patience
        self.counter, self.lowest_loss = 0, float("inf")

    def check_early_stopping(self, eval_loss):
        if self.lowest_loss - eval_loss >= self.min_delta:
            self.lowest_loss, self.counter = eval_loss, 0
            return False
        self.counter += 1
        return self.counter >= self.patience


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(11)
    inputs = torch.randn(70, 6, generator=generator)
    data = [TensorDataset(part, part.abs().sum(dim=1, keepdim=True)) for part in (inputs[:48], inputs[48:])]
    return DataLoader(data[0], shuffle=True, batch_size=batch_size), DataLoader(data[1], batch_size=batch_size)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args(arguments)
    PartialState(cpu=args.cpu)  # the tracker asks which process this is
    record = Record()
    accelerator = Accelerator(
        cpu=args.cpu, log_with=record, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
    )
    set_seed(1)
    accelerator.init_trackers("early_stopping", {"patience": 2})
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-2, momentum=0.9, nesterov=True)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    callback = EarlyStoppingCallback(min_delta=0.05, patience=2)
    found = {"losses": [], "evaluated": []}
    for epoch in range(20):
        model.train()
        for inputs, targets in train_dataloader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
        model.eval()
        errors = []
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                errors.append(accelerator.gather_for_metrics((model(inputs) - targets) ** 2))
        eval_loss = torch.cat(errors).mean().item()
        found["evaluated"].append(eval_loss)
        accelerator.log({"eval_loss": eval_loss, "epoch": epoch}, step=epoch)
        if accelerator.is_main_process and callback.check_early_stopping(eval_loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    if accelerator.is_main_process:
        found["logged"] = [entry[0] for entry in record.entries]
        found["tracker"] = accelerator.get_tracker("record", unwrap=True) is record.entries
    return found


if __name__ == "__main__":
    main()

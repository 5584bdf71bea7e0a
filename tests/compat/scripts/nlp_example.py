"""Accelerate's nlp_example.py and complete_nlp_example.py, rebuilt small: a BERT from a config, pairs that are made up.

The import line of the Accelerator is what a test changes.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

MAX_GPU_BATCH_SIZE = 16
EVAL_BATCH_SIZE = 16


def get_dataloaders(batch_size: int):
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(88):
        length = int(torch.randint(4, 12, (), generator=generator))
        tokens = torch.randint(5, 64, (length,), generator=generator)
        samples.append({"input_ids": tokens, "labels": int(tokens.sum()) % 2})

    def collate_fn(examples):
        padded = torch.nn.utils.rnn.pad_sequence([e["input_ids"] for e in examples], batch_first=True)
        labels = torch.tensor([e["labels"] for e in examples])
        return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}

    train = DataLoader(samples[:64], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=True)
    evaluation = DataLoader(samples[64:], shuffle=False, collate_fn=collate_fn, batch_size=EVAL_BATCH_SIZE)
    return train, evaluation


def training_function(config, args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_dir=args.project_dir,
    )
    lr, num_epochs, seed = config["lr"], int(config["num_epochs"]), int(config["seed"])
    set_seed(seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        )
    )  # fmt: skip
    model = model.to(accelerator.device)
    optimizer = AdamW(params=model.parameters(), lr=lr, eps=1e-5)
    num_steps = (len(train_dataloader) * num_epochs) // args.gradient_accumulation_steps
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=num_steps // 3,
        num_training_steps=num_steps,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    found = {"losses": [], "rates": [], "accuracy": []}
    if args.resume:
        accelerator.load_state(args.resume)
    for epoch in range(int(bool(args.resume)), num_epochs):
        model.train()
        train_dataloader.set_epoch(epoch)
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and args.clip:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            found["losses"].append(accelerator.gather(loss.detach()).mean().item())
            found["rates"].append(lr_scheduler.get_last_lr()[0])
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right.append((predictions == references).float())
        right = torch.cat(right)
        found["accuracy"].append([right.mean().item(), len(right)])
        accelerator.print(f"epoch {epoch}:", found["accuracy"][-1])
        if args.save and epoch == 0:
            accelerator.save_state(args.save)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found["weights"] = state
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=MAX_GPU_BATCH_SIZE)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--project_dir", default=None)
    parser.add_argument("--save", default=None)
    parser.add_argument("--resume", default=None)
    return training_function({"lr": 2e-3, "num_epochs": 3, "seed": 42}, parser.parse_args(arguments))


if __name__ == "__main__":
    main()

"""transformers' run_clm.py, rebuilt small: a Llama from a config, texts that are made up, its Trainer.

The import line of the Trainer is what a test changes.
"""

import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Recorder(TrainerCallback):
    def __init__(self):
        self.calls = []

    def on_step_end(self, args, state, control, **kwargs):
        self.calls.append(("step", state.global_step))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.calls.append(("evaluate", state.global_step))

    def on_save(self, args, state, control, **kwargs):
        self.calls.append(("save", state.global_step))


def collate(features):
    """As DataCollatorForLanguageModeling: padded on the right, labels of padding are -100."""
    longest = max(len(f["input_ids"]) for f in features)
    tokens = torch.zeros(len(features), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(tokens), torch.full_like(tokens, -100)
    for row, feature in enumerate(features):
        count = len(feature["input_ids"])
        tokens[row, :count], mask[row, :count] = torch.tensor(feature["input_ids"]), 1
        labels[row, :count] = tokens[row, :count]
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def texts(samples):
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 12, (samples,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (n,), generator=generator).tolist()} for n in lengths]


def compute_metrics(prediction):
    predictions, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    right = (predictions == labels)[labels != -100]
    return {"accuracy": float(right.mean()), "tokens": int(right.size)}


def main(arguments):
    options = arguments.pop("plan", None)
    resume, do_eval = arguments.pop("resume", None), arguments.pop("evaluate", False)
    training_args = TrainingArguments(
        **{
            "max_steps": 20, "learning_rate": 1e-2, "adam_epsilon": 1e-4, "lr_scheduler_type": "cosine",
            "warmup_steps": 3, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
            "save_strategy": "no", "use_cpu": True,
            "weight_decay": 0.1, "dataloader_num_workers": 0, "dataloader_pin_memory": False, **arguments,
        }
    )  # fmt: skip
    set_seed(training_args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    recorder = Recorder()
    trainer = Trainer(
        model=model,
        args=training_args,
        data_collator=collate,
        train_dataset=texts(96),
        eval_dataset=texts(24),
        compute_metrics=compute_metrics if do_eval else None,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        callbacks=[recorder],
        **({"plan": options} if "plan" in inspect.signature(Trainer.__init__).parameters else {}),
    )
    result = trainer.train(resume_from_checkpoint=resume)
    found = {
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
        "train_loss": result.training_loss,
        "calls": recorder.calls,
    }
    if do_eval:
        found["metrics"] = trainer.evaluate()
    trainer.save_model(training_args.output_dir + "/final")
    return found

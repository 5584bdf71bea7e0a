"""transformers' run_glue.py and run_mlm.py, rebuilt small: a BERT from a config, on the source of Python's own library.

The import line of the Trainer is what a test changes.
"""

import argparse
import inspect

import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    EvalPrediction,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import Trainer

MASK, SPECIAL, VOCABULARY, LONGEST = 4, 5, 64, 24


def lines():
    """The lines of a module as tokens, by their length."""
    found = []
    for line in inspect.getsource(argparse).splitlines():
        words = line.strip().encode()[:LONGEST]
        if len(words) >= 8:
            found.append([SPECIAL + byte % (VOCABULARY - SPECIAL) for byte in words])
    return found


def glue(count):
    """Pairs of lines: whether the second one follows the first."""
    found, samples = lines(), []
    for index in range(count):
        follows = index % 3 != 0
        first, second = found[index][:12], found[index + 1 if follows else -index - 1][:12]
        samples.append(
            {
                "input_ids": [*first, 2, *second],
                "token_type_ids": [0] * (len(first) + 1) + [1] * len(second),
                "label": int(follows),
                "idx": index,  # a column that the model does not take
            }
        )
    return samples


def mlm(count):
    """Lines of which two tokens are masked."""
    samples = []
    for index, tokens in enumerate(lines()[:count]):
        masked = [place in (index % 4, index % 4 + 4) for place in range(len(tokens))]
        samples.append(
            {
                "input_ids": [MASK if hidden else token for token, hidden in zip(tokens, masked, strict=True)],
                "labels": [token if hidden else -100 for token, hidden in zip(tokens, masked, strict=True)],
            }
        )
    return samples


def collate(features):
    """As DataCollatorWithPadding."""
    fill = {"input_ids": 0, "token_type_ids": 0, "labels": -100, "attention_mask": 0}
    batch = {}
    for feature in features:
        feature["attention_mask"] = [1] * len(feature["input_ids"])
    for name, value in features[0].items():
        if isinstance(value, list):
            longest = max(len(f[name]) for f in features)
            rows = [f[name] + [fill[name]] * (longest - len(f[name])) for f in features]
            batch[name] = torch.tensor(rows)
        else:
            batch["labels" if name == "label" else name] = torch.tensor([f[name] for f in features])
    return batch


def compute_metrics(p: EvalPrediction):
    right = (p.predictions == p.label_ids)[p.label_ids != -100]
    return {"accuracy": float(right.mean()), "samples": int(right.size)}


def main(arguments):
    task = arguments.pop("task")
    plan, resume = arguments.pop("plan", None), arguments.pop("resume", None)
    training_args = TrainingArguments(
        **{
            "num_train_epochs": 3, "learning_rate": 5e-3, "adam_epsilon": 1e-4, "warmup_steps": 0.2,
            "lr_scheduler_type": "linear", "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
            "use_cpu": True, "weight_decay": 0.1, "dataloader_num_workers": 0, "dataloader_pin_memory": False,
            "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy", "save_total_limit": 2, "remove_unused_columns": True, **arguments,
        }
    )  # fmt: skip
    set_seed(training_args.seed)
    kind, make = (BertForSequenceClassification, glue) if task == "glue" else (BertForMaskedLM, mlm)
    model = kind(
        BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=2 * LONGEST, num_labels=2, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        )
    )  # fmt: skip
    samples = make(96)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=samples[:64],
        eval_dataset=samples[64:90],
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        data_collator=collate,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        **({} if plan is None else {"plan": plan}),
    )
    result = trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "loss" in entry],
        "evaluated": [[entry["eval_loss"], entry["eval_accuracy"]] for entry in history if "eval_loss" in entry],
        "best": [trainer.state.best_global_step, trainer.state.best_metric],
        "train_loss": result.training_loss,
        "metrics": trainer.evaluate(),
    }
    predicted = trainer.predict([{k: v for k, v in sample.items() if k != "label"} for sample in samples[90:]])
    found["predicted"] = torch.tensor(predicted.predictions).tolist()
    trainer.save_model()
    trainer.save_state()
    return found

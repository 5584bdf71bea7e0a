"""TRL's examples of supervised fine-tuning and of preferences, rebuilt small: a Llama from a config, made-up sentences.

The import line of the Trainers is what a test changes.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", "the", "cat", "dog", "sat", "ran", "on", "mat", "hill", "good", "bad", "very", "a"]


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, use_cache=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def main(arguments):
    arguments = dict(arguments)
    method, plan = arguments.pop("method"), arguments.pop("plan", None)
    given = {
        "max_steps": 6, "learning_rate": 1e-3, "logging_steps": 1, "report_to": [], "save_strategy": "no",
        "use_cpu": True, "seed": 3, "lr_scheduler_type": "constant", "gradient_checkpointing": False, "bf16": False,
        "max_length": 32, **arguments,
    }  # fmt: skip
    more = {} if plan is None else {"plan": plan}
    if method == "sft":
        sentences = ["the cat sat on the mat", "a dog ran on the hill", "very good cat", "bad dog sat on a mat"]
        data = Dataset.from_list([{"text": sentence} for sentence in sentences * 8])
        trainer = SFTTrainer(
            model=model(), args=SFTConfig(**given), train_dataset=data, processing_class=tokenizer(), **more
        )
    else:
        pairs = [("the cat", " sat on the mat", " ran bad"), ("a dog", " ran on the hill", " very bad bad cat")]
        rows = [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs * 16]
        data = Dataset.from_list(rows)
        trainer = DPOTrainer(
            model=model(), ref_model=model(), args=DPOConfig(**given), train_dataset=data,
            processing_class=tokenizer(), **more,
        )  # fmt: skip
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

"""A language model from a directory as Hugging Face writes it, trained on text: yours, or Python's standard library.

Nothing is downloaded; the directory has ``config.json``, ``model.safetensors`` and ``tokenizer.json``::

    tensorshard train hf model.pretrained=path/to/model text.files='texts/*.txt'

With ``model.config=path/to/model`` the weights are new ones. ``tensorshard estimate`` and ``plan`` need no more
than the ``config.json``.

``adapters.rank=8`` freezes the model, and trains low-rank adapters of peft on its layers::

    tensorshard train hf model.pretrained=path/to/model adapters.rank=8 'adapters.layers=[q_proj, v_proj]'
"""

from tensorshard.config import LazyCall, get_config
from tensorshard.data import Text
from tensorshard.models import next_token_loss

train = get_config("common/train.py").train
optimizer = get_config("common/optim.py").optimizer
scheduler = get_config("common/optim.py").scheduler

# Low-rank adapters, scaled by alpha / rank, where there is a rank; on all linear layers but the last, or on those that
# `layers` names. The other keys are those of tensorshard.models.with_lora.
adapters = {
    "rank": None,
    "alpha": "${adapters.rank}",
    "dropout": 0.0,
    "layers": None,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "dtype": "auto",
}
model = {"pretrained": None, "config": "${model.pretrained}", "adapters": "${adapters}"}
loss = LazyCall(next_token_loss, partial=True)()

# Files: paths or patterns of text files; None for the standard library. Every tenth part is for validation.
text = {"files": None, "tokenizer": "${model.config}", "context_length": 256}


def _text(split):
    return LazyCall(Text)(
        split=split,
        context_length="${text.context_length}",
        tokenizer="${text.tokenizer}",
        files="${text.files}",
    )


data = {"train": _text("train"), "validation": _text("validation")}

train.steps = 100
train.global_batch_size = 8
train.eval_every = 50
train.eval_batches = 8
train.save_every = 0
optimizer.lr = 2e-5
scheduler.warmup_steps = 10

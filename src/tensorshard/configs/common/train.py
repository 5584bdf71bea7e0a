"""Defaults of the ``train`` section. Every setting there is, with what it means."""

from tensorshard import Plan
from tensorshard.config import LazyCall

train = {
    # How the model is spread over the processes: every field of tensorshard.Plan is a key of train.plan.
    "plan": LazyCall(Plan)(
        dp_replicate=1,
        dp_shard=-1,  # whatever the other axes leave of the processes
        zero=3,
        micro_batches=1,
        precision="fp32",
        recompute="none",
        clip_grad_norm=1.0,
    ),
    # Optimizer steps in all, those before a resume included.
    "steps": 1000,
    # Samples in a step, over all data ranks and micro-batches.
    "global_batch_size": 32,
    # Of initial weights, of the order of the data and of dropout.
    "seed": 0,
    # Of the run, for its directory; None for the name of the config file.
    "name": None,
    # The run's directory; None for the next free runs/<name>-<n>.
    "output_dir": None,
    # Where this run's checkpoints go, if not to its directory: a folder, or a URL such as "s3://bucket/my_run".
    "checkpoint_dir": None,
    # Steps between evaluations on data.validation; 0 for one at the end alone.
    "eval_every": 100,
    # Global batches in an evaluation; None for the whole validation set.
    "eval_batches": None,
    # Steps between checkpoints; 0 for one at the end alone.
    "save_every": 200,
    # How many checkpoints to keep, the newest ones; 0 for all.
    "keep_checkpoints": 2,
    # Checkpoints of steps that this divides are kept as well, whatever their age; 0 for none.
    "keep_every": 0,
    # True writes checkpoints while training goes on. It needs room for a copy of what is saved in the host's memory.
    "save_in_background": False,
    # Every so many steps a micro-batch is computed twice and its bits are compared, which finds a processor that
    # computes wrongly; 0 for never.
    "replay_every": 0,
    # What checkpoints/best has, such as "lowest val_loss" or "highest accuracy" of the evaluations; None for none.
    "save_best": None,
    # Steps between lines in metrics.jsonl and updates of the progress bar's figures.
    "log_every": 10,
    # Processes that load data, for each rank; 0 loads in the rank itself.
    "num_workers": 0,
    # Programs to write measurements for, beside metrics.jsonl: a list of "tensorboard", "wandb" and "mlflow"; None for
    # TensorBoard where it is installed.
    "loggers": None,
    # Steps to write a trace of, such as "10-12" or {"first": 10, "steps": 3}; None for none.
    "profile": None,
    # Whether the memory of the first two steps is recorded, for a page profile/memory.html.
    "profile_memory": False,
    # Whether the memory is estimated before anything is started, and a run that cannot fit is refused.
    "estimate": True,
    # Whether ranks that wait for long ask what the others do, and name the one that died, is stopped or makes another
    # call. Seconds: one that computes for longer than that is ended, too.
    "watchdog": True,
    # Whether the first step also finds out if the loss couples samples, and so depends on the number of ranks.
    "debug": False,
}

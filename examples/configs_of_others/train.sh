torchrun pretrain_gpt.py \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --pipeline-model-parallel-size 2 \
    --micro-batch-size 1 --global-batch-size 16 \
    --use-distributed-optimizer --bf16 --clip-grad 1.0 \
    --recompute-granularity selective --lr 3e-4

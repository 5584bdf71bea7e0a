"""The tensor-parallel table as data: styles, layouts, the layers they are for.

A table names modules and parameters by patterns, and gives each a style. The styles, and what is split:

- ``colwise``: a linear's output features, or a convolution's output channels; its outputs stay split.
- ``rowwise``: a linear's input features, or a convolution's input channels; its outputs are summed over the ranks.
- ``colwise_gather``: output features or channels; the outputs are put together again (an output layer, one without a
  partner).
- ``colwise_gather(sum_grad)``, ``rowwise(sum_grad)``: the same; each rank computes something else with the output,
  whose gradient is summed.
- ``channels``, ``channels(2)``: what computes channel by channel: batch, group and instance norms, grouped
  convolutions; of 2 equal parts, each.
- ``packed_colwise(3)``, ``packed_colwise(64, 32, 32)``: output features of several layers in one, each part by itself
  (a fused qkv).
- ``vocab``: an embedding's rows.
- ``classes``: the classes of a ``ParallelLinearCrossEntropy`` (heads).
- ``heads``: the heads of an ``nn.MultiheadAttention`` (so of ``nn.Transformer``), its ``out_proj`` being ``rowwise``.
- ``divide(num_heads, ...)``: whole-number attributes of a module, such as head counts; ``name/2`` by 2,
  ``input.name.dim/num_heads`` an input per head, ``reshape.sizes`` what its forward reshapes and splits to.
- ``colwise_shared(2)``, ``colwise_shared(2, 32, 16, 16)``: 2 key-value heads that are fewer than the ranks, or
  queries, keys and values in one.
- ``slice(dim)``, ``slice(dim, parts)``: a bare parameter; of several equal parts along ``dim``, each. Of a linear
  layer, ``slice(0)`` is a column that leaves its input's gradient to be summed further up.
- ``gather(dim)``: memory alone: a slice of a parameter, put together whenever its module is called;
  ``gather(dim, 1)`` when the module around its own is.
- ``sum``: nothing itself; its parameters are sliced so that its output is a sum over the ranks (stacked experts).
- ``replicate``: nothing. With ``(sum_grad)`` its gradient is summed over the ranks (a norm between column and row);
  with ``(divided)`` it is added to each rank's part of a sum, and so divided by their number (a bias in ``sum``).

Tables of models that need more than columns and rows, as the search finds them.

A bias for each head that is passed in (BLOOM, MPT): ``divide(num_heads, input.alibi.0/num_heads)``. Along dimension 0
the input ``alibi`` has an entry for each of ``num_heads`` heads (or for each sample and head), and each rank takes
those of its heads. Biases that a block computes and passes on (T5) need no entry. ``input.position_bias.1`` is a
learned bias for each head in a module that has no attribute for the number of heads (MPNet).

Fewer key-value heads than ranks: a rank holds and computes a part of the head that it shares, and these ranks exchange
their outputs. Llama with 2 key-value heads at ``tp=4``, where 2 ranks share a head:

    model.layers.*.self_attn         divide(num_key_value_groups/2)
    model.layers.*.self_attn.q_proj  colwise
    model.layers.*.self_attn.k_proj  colwise_shared(2)
    model.layers.*.self_attn.v_proj  colwise_shared(2)
    model.layers.*.self_attn.o_proj  rowwise

A fused layer gives the sizes of its queries, keys and values: ``colwise_shared(2, 32, 16, 16)`` (Phi-3),
``colwise_shared(1, 32, 8, 8)`` (GPTBigCode).

Latent attention (DeepSeek's MLA): keys, values and a rotated key that all heads share come from one narrow layer, whose
gradient is summed once, at its output:

    model.layers.*.self_attn.q_a_proj               colwise_gather
    model.layers.*.self_attn.q_b_proj               colwise
    model.layers.*.self_attn.kv_a_proj_with_mqa     colwise_gather(sum_grad)
    model.layers.*.self_attn.kv_a_layernorm.weight  replicate(sum_grad)
    model.layers.*.self_attn.kv_b_proj              slice(0)
    model.layers.*.self_attn.o_proj                 rowwise

State spaces (Mamba, Jamba): each rank has some of the channels: of the fused input layer, the filter, the decay and the
skip. The layer that reads all channels is ``rowwise(sum_grad)``.

Stacked experts (Mixtral, Qwen3-MoE): the module's output, and the gradients of its inputs, routing weights among them,
are summed over the ranks; the router is whole:

    model.layers.*.mlp.experts               sum
    model.layers.*.mlp.experts.gate_up_proj  slice(1, 2)
    model.layers.*.mlp.experts.down_proj     slice(2)

Biases of experts (gpt-oss) are ``slice(1)`` on the way in and ``replicate(divided)`` on the way out; a parameter with a
value per head (its sinks) is ``slice(0)``.

Convolutions (EfficientNet's block): what lies between works on each rank's channels. A layer without a partner is
``colwise_gather``, a gated convolution (WaveNet's) ``packed_colwise(2)``:

    blocks.*.expand             colwise
    blocks.*.norm1              channels
    blocks.*.depthwise          channels
    blocks.*.norm2              channels
    blocks.*.excitation.reduce  rowwise
    blocks.*.excitation.expand  colwise
    blocks.*.project            rowwise
"""

"""Encoders of text in transformers, and models of an encoder and a decoder."""

from benchmarks.models.batches import class_loss, tokens
from benchmarks.models.transformers_ import CLASSIFIES, TEXT, text_case

_ENCODER = {**TEXT, "pad_token_id": 0}
_classes = tokens("input_ids", targets="classes", mask=True)
_pairs = tokens("input_ids", decoder_input_ids=8)
_BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

_GROUP = "text encoders"

CASES = [
    text_case("BERT", "BertForMaskedLM", _ENCODER, group=_GROUP),
    text_case("RoBERTa", "RobertaForMaskedLM", {**_ENCODER, "pad_token_id": 1}, group=_GROUP),
    text_case("ALBERT", "AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, group=_GROUP),
    text_case("ELECTRA", "ElectraForSequenceClassification", {**_ENCODER, **CLASSIFIES, "embedding_size": 16},
              _classes, class_loss, group=_GROUP),
    text_case("DistilBERT", "DistilBertForSequenceClassification", {
        "vocab_size": 64, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, **CLASSIFIES,
    }, _classes, class_loss, group=_GROUP),
    text_case("DeBERTa-v2", "DebertaV2ForSequenceClassification", {
        **_ENCODER, **CLASSIFIES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True, "norm_rel_ebd": "layer_norm",
    }, _classes, class_loss, group=_GROUP),
    text_case("MPNet", "MPNetForMaskedLM", {**_ENCODER, "pad_token_id": 1}, group=_GROUP),
    text_case("ModernBERT", "ModernBertForMaskedLM", {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2,
              "cls_token_id": 1, "sep_token_id": 2}, group=_GROUP),
    text_case("ConvBERT", "ConvBertForMaskedLM", {**_ENCODER, "embedding_size": 32, "head_ratio": 2}, group=_GROUP),
    text_case("MobileBERT", "MobileBertForMaskedLM", {
        **_ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16,
        "key_query_shared_bottleneck": True,
    }, group=_GROUP),
    text_case("FNet", "FNetForMaskedLM", _ENCODER, group=_GROUP),
    text_case("Longformer", "LongformerForMaskedLM", {**_ENCODER, "pad_token_id": 1, "attention_window": 8},
              tokens("input_ids", mask=True), group=_GROUP),
    text_case("BigBird", "BigBirdForMaskedLM", {**_ENCODER, "attention_type": "original_full"}, group=_GROUP),
    text_case("XLNet", "XLNetLMHeadModel", {
        "vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "pad_token_id": 0,
    }, group=_GROUP),
    text_case("Funnel", "FunnelForMaskedLM", {
        "vocab_size": 64, "block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 32, "n_head": 4, "d_head": 8,
        "d_inner": 64, "pad_token_id": 0,
    }, group=_GROUP),
    text_case("T5", "T5ForConditionalGeneration", _T5, _pairs, group="text to text"),
    text_case("mT5", "MT5ForConditionalGeneration", _T5, _pairs, group="text to text"),
    text_case("BART", "BartForConditionalGeneration", _BART, _pairs, group="text to text"),
    text_case("Pegasus", "PegasusForConditionalGeneration", _BART, _pairs, group="text to text"),
    text_case("Marian", "MarianMTModel", _BART, _pairs, group="text to text"),
    text_case("mBART", "MBartForConditionalGeneration", _BART, _pairs, group="text to text"),
    text_case("LED", "LEDForConditionalGeneration", {
        **{k: v for k, v in _BART.items() if k != "max_position_embeddings"}, "attention_window": 8,
        "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    }, _pairs, group="text to text"),
]  # fmt: skip

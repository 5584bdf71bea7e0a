"""Datasets and the order in which ranks read them; numpy and torch only."""

from tensorshard.data.images import GeneratedImages
from tensorshard.data.mixing import MixedDataset, MixedStream, mix
from tensorshard.data.packing import (
    PackedDocuments,
    PackedStream,
    document_block_mask,
    document_ids,
    document_mask,
    document_offsets,
    pack,
)
from tensorshard.data.sampler import ShardedBatchSampler
from tensorshard.data.text import LabelledText, StdlibText, Text
from tensorshard.data.token_dataset import MaskedTokens, TokenDataset
from tensorshard.data.token_file import TokenFile, TokenFileWriter, token_file_writer, write_token_file

__all__ = [
    "GeneratedImages",
    "LabelledText",
    "MaskedTokens",
    "MixedDataset",
    "MixedStream",
    "PackedDocuments",
    "PackedStream",
    "ShardedBatchSampler",
    "StdlibText",
    "Text",
    "TokenDataset",
    "TokenFile",
    "TokenFileWriter",
    "document_block_mask",
    "document_ids",
    "document_mask",
    "document_offsets",
    "mix",
    "pack",
    "token_file_writer",
    "write_token_file",
]

"""Datasets and the order in which ranks read them; numpy and torch only."""

from tensorshard.data.images import GeneratedImages
from tensorshard.data.masked import MaskedTokens
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
from tensorshard.data.stdlib_text import StdlibText
from tensorshard.data.text import LabelledText, Text
from tensorshard.data.token_dataset import TokenDataset
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

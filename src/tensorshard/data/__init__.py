"""Datasets and the order in which ranks read them; numpy and torch only."""

from tensorshard.data.images import GeneratedImages
from tensorshard.data.masked import MaskedTokens
from tensorshard.data.sampler import ShardedBatchSampler
from tensorshard.data.stdlib_text import StdlibText
from tensorshard.data.text import LabelledText, Text
from tensorshard.data.token_dataset import TokenDataset
from tensorshard.data.token_file import TokenFile, TokenFileWriter, token_file_writer, write_token_file

__all__ = [
    "GeneratedImages",
    "LabelledText",
    "MaskedTokens",
    "ShardedBatchSampler",
    "StdlibText",
    "Text",
    "TokenDataset",
    "TokenFile",
    "TokenFileWriter",
    "token_file_writer",
    "write_token_file",
]

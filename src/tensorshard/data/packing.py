"""Documents of all lengths in rows of one length, and the masks that keep them apart."""

import copy
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tensorshard.data.mixing import StreamReader

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_IGNORED = -100  # a target that does not count

Longer = Literal["split", "cut"]
Row = tuple[dict[str, Tensor], Tensor]


def pack(
    documents: Any,
    length: int,
    *,
    lengths: Sequence[int] | None = None,
    longer: Longer = "split",
    pad: int = 0,
    names: tuple[str, str] = ("input_ids", "position_ids"),
    open_rows: int = 32,
) -> "PackedDocuments | PackedStream":
    """Documents in rows of `length` tokens, whose loss is that of the documents on their own.

    A sample is ``({"input_ids": ..., "position_ids": ...}, targets)``, each int64 ``[length]``. Positions begin at 0 in
    each document, and so say where documents begin: :func:`document_mask` and its siblings make masks of them, and
    models of transformers do so themselves. Targets are each document's next tokens, and -100 where nothing is to be
    predicted. A document's last token is only a target. What a row has left is filled with `pad`, a document of its own
    without targets.

    Documents are placed by best-fit decreasing (D. S. Johnson, "Near-optimal bin packing algorithms", 1973; for
    language models H. Ding et al., "Fewer Truncations Improve Language Modeling", 2024). Rows are the same on every
    rank and in every epoch; the loader shuffles them.

    Args:
        documents: a dataset with a length, or a stream. A document is a sequence of tokens (a list, an array or a
            tensor ``[tokens]``), or a dict of ``"input_ids"`` and maybe ``"labels"`` of the same length, not shifted,
            with -100 for tokens that need not be predicted. One of fewer than two tokens is left out.
        length: positions of a row.
        lengths: tokens of each document, which else are counted by reading all. Not for a stream.
        longer: what becomes of a document of more than ``length + 1`` tokens. "split": pieces, each with positions
            from 0, that do not see each other; no target is lost. "cut": its rest is left out.
        pad: the token to fill up with.
        names: of the two inputs, as the model's forward calls them.
        open_rows: of a stream: how many rows may wait for a document that fits.

    Returns:
        A dataset of rows; of a stream, a stream of rows, which resumes exactly.

    Raises:
        ValueError: a `length` below 1, another `longer`, `lengths` of another number or of a stream; no document of two
            tokens; labels of another length than their tokens.

    Examples:
        >>> rows = ts.data.pack([[5, 6, 7], [1, 2, 3, 4], [8, 9]], length=4)
        >>> inputs, targets = rows[0]
        >>> inputs["input_ids"].tolist(), inputs["position_ids"].tolist(), targets.tolist()
        ([1, 2, 3, 8], [0, 1, 2, 0], [2, 3, 4, 9])
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"length is {length!r}; it must be an integer of at least 1, the positions of a row")
    if longer not in ("split", "cut"):
        raise ValueError(f"longer is {longer!r}; it must be 'split' or 'cut'")
    if hasattr(documents, "__len__") and hasattr(documents, "__getitem__"):
        return PackedDocuments(documents, length, lengths=lengths, longer=longer, pad=pad, names=names)
    if lengths is not None:
        raise ValueError("lengths were given for a stream, whose documents are packed as they come: leave them out")
    if open_rows < 1:
        raise ValueError(f"open_rows is {open_rows}; it must be at least 1")
    return PackedStream(documents, length, longer=longer, pad=pad, names=names, open_rows=open_rows)


class PackedDocuments(Dataset[Row]):
    """Rows of documents. Made by :func:`pack`.

    Attributes:
        filled: the share of all positions that hold tokens of documents.
    """

    def __init__(
        self,
        documents: Any,
        length: int,
        *,
        lengths: Sequence[int] | None,
        longer: Longer,
        pad: int,
        names: tuple[str, str],
    ) -> None:
        self.documents = documents
        self.length = length
        self._pad, self._names = pad, names
        count = len(documents)
        if lengths is not None and len(lengths) != count:
            raise ValueError(f"lengths has {len(lengths)} numbers for {count} documents; it must have one for each")
        if lengths is None:
            lengths = [_length_of(documents[index]) for index in range(count)]
        # [pieces, 3]: document, first position, positions
        pieces = np.array(
            [(index, *piece) for index, tokens in enumerate(lengths) for piece in _pieces(int(tokens), length, longer)],
            dtype=np.int64,
        ).reshape(-1, 3)
        if not len(pieces):
            raise ValueError(f"none of {count} documents has two tokens, so there is nothing to predict")
        order = np.argsort(-pieces[:, 2], kind="stable")
        rooms = _Rooms()
        rows: list[list[int]] = []
        for number in order.tolist():
            size = int(pieces[number, 2])
            row, room = rooms.take(size) or (len(rows), length)
            if row == len(rows):
                rows.append([])
            rows[row].append(number)
            rooms.put(row, room - size)
        self._rows = [pieces[row] for row in rows]
        self.filled = float(pieces[:, 2].sum()) / (length * len(rows))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        parts = []
        for document, first, size in row.tolist():
            tokens, targets = _tokens_and_targets(self.documents[document])
            if len(tokens) < first + size:
                raise ValueError(
                    f"document {document} has {len(tokens) + 1} tokens, fewer than lengths said: give its own length"
                )
            parts.append((tokens[first : first + size], targets[first : first + size]))
        return _row(parts, self.length, self._pad, self._names)


class PackedStream(IterableDataset[Row]):
    """A stream of rows of documents. Made by :func:`pack`.

    A document goes to the fullest open row that has room. If none has, and no more may be open, the fullest is handed
    out. A stream of documents without a state is read again up to its place.
    """

    def __init__(
        self,
        documents: Iterable[Any],
        length: int,
        *,
        longer: Longer,
        pad: int,
        names: tuple[str, str],
        open_rows: int,
    ) -> None:
        self.documents = documents
        self.length = length
        self._longer, self._pad, self._names, self._most = longer, pad, names, open_rows
        self._epoch = 0
        self._state: dict[str, Any] | None = None
        self._reader: StreamReader | None = None
        self._open: list[list[list[list[int]]]] = []  # of each row its pieces, (tokens, targets)
        self._waiting: list[list[list[int]]] = []  # pieces of the document that was read last

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the documents, if they take one."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Row]:
        state, self._state = self._state or {}, None
        self._open = [[[list(part) for part in piece] for piece in row] for row in state.get("open", [])]
        self._waiting = [[list(part) for part in piece] for piece in state.get("waiting", [])]
        self._reader = StreamReader(self.documents, self._epoch, state.get("documents"))
        while True:
            while self._waiting:
                full = self._give_way(len(self._waiting[0][0]))
                if full is not None:
                    yield self._made(full)
                self._put(self._waiting.pop(0))
            document = next(self._reader, None)
            if document is None:
                break
            tokens, targets = _tokens_and_targets(document)
            self._waiting = [
                [tokens[first : first + size].tolist(), targets[first : first + size].tolist()]
                for first, size in _pieces(len(tokens) + 1, self.length, self._longer)
            ]
        while self._open:
            yield self._made(self._open.pop(0))

    def _room(self, row: list[list[list[int]]]) -> int:
        return self.length - sum(len(tokens) for tokens, _ in row)

    def _give_way(self, size: int) -> list[list[list[int]]] | None:
        """The fullest row, which is no longer open, if a piece of `size` has no place else."""
        if len(self._open) < self._most or any(self._room(row) >= size for row in self._open):
            return None
        return self._open.pop(min(range(len(self._open)), key=lambda index: self._room(self._open[index])))

    def _put(self, piece: list[list[int]]) -> None:
        fits = [row for row in self._open if self._room(row) >= len(piece[0])]
        if fits:
            min(fits, key=self._room).append(piece)
        else:
            self._open.append([piece])

    def _made(self, row: list[list[list[int]]]) -> Row:
        parts = [(np.array(tokens), np.array(targets)) for tokens, targets in row]
        return _row(parts, self.length, self._pad, self._names)

    def state_dict(self) -> dict[str, Any]:
        """The place of the documents' stream, and the tokens that wait for their row."""
        if self._state is not None or self._reader is None:
            return self._state or {}
        return copy.deepcopy({"documents": self._reader.state(), "open": self._open, "waiting": self._waiting})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass go on where :meth:`state_dict` was called."""
        self._state = state or None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_reader": None}  # a copy begins anew


def document_ids(position_ids: Tensor) -> Tensor:
    """The number of each position's document in its row, counted from 0: int64, of the shape ``[..., length]`` of
    `position_ids`, which begin at 0 in each document."""
    return (position_ids == 0).long().cumsum(-1) - 1


def document_mask(position_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Which positions see each other: for ``F.scaled_dot_product_attention(attn_mask=...)``.

    Args:
        position_ids: ``[batch, length]``, which begin at 0 in each document.
        causal: whether a position sees none that come after it.

    Returns:
        bool ``[batch, 1, length, length]``; True where a query (third dimension) may look at a key of its document.
    """
    documents = document_ids(position_ids)
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        mask = mask & (position_ids[:, None, :, None] >= position_ids[:, None, None, :])
    return mask


def document_block_mask(position_ids: Tensor, *, causal: bool = True, block_size: int = 128) -> "BlockMask":
    """The same for ``torch.nn.attention.flex_attention.flex_attention(block_mask=...)``, which skips blocks of
    positions that do not see each other.

    Args:
        position_ids: ``[batch, length]``, which begin at 0 in each document.
        causal: whether a position sees none that come after it.
        block_size: positions of a block, as ``create_block_mask`` takes it.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    documents = document_ids(position_ids)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[batch, query] == documents[batch, key]
        return same & (query >= key) if causal else same

    rows, length = position_ids.shape
    return create_block_mask(sees, rows, None, length, length, device=position_ids.device, BLOCK_SIZE=block_size)


def document_offsets(position_ids: Tensor) -> tuple[Tensor, int]:
    """Where documents begin in the batch as one sequence, for kernels of variable lengths: ``cu_seqlens`` and
    ``max_seqlen`` of ``flash_attn_varlen_func``, ``torch.nn.attention.varlen.varlen_attn`` and the like.

    Give these queries, keys and values of ``[batch * length, heads, width]``.

    Args:
        position_ids: ``[batch, length]`` or ``[length]``, which begin at 0 in each document and each row.

    Returns:
        int32 ``[documents + 1]``, from 0 to ``batch * length``, and the length of the longest document. The latter is
        read from the device.

    Raises:
        ValueError: a row does not begin with a document.
    """
    first = position_ids[..., 0]
    if first.any():
        raise ValueError(
            f"the rows of position_ids begin with {first.flatten().tolist()}; each must begin with 0, as a document "
            f"does: call document_offsets on whole rows"
        )
    starts = (position_ids.flatten() == 0).nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([position_ids.numel()])])
    return offsets.to(torch.int32), int(offsets.diff().max())


class _Rooms:
    """Rows by the positions that they have left."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # sorted, each once
        self._rows: dict[int, list[int]] = {}

    def take(self, size: int) -> tuple[int, int] | None:
        """The row with the least room that holds `size`, and its room."""
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes):
            return None
        room = self._sizes[place]
        rows = self._rows[room]
        row = rows.pop()
        if not rows:
            del self._rows[room], self._sizes[place]
        return row, room

    def put(self, row: int, room: int) -> None:
        if room not in self._rows:
            self._rows[room] = []
            insort(self._sizes, room)
        self._rows[room].append(row)


def _pieces(tokens: int, length: int, longer: Longer) -> list[tuple[int, int]]:
    """First position and positions of each piece of a document. Its last token is only a target."""
    positions = tokens - 1
    if longer == "cut":
        positions = min(positions, length)
    return [(first, min(length, positions - first)) for first in range(0, positions, length)]


def _length_of(document: Any) -> int:
    return len(_ids(document))


def _ids(document: Any) -> Any:
    if isinstance(document, Mapping):
        if "input_ids" not in document:
            raise ValueError(
                f"a document has the keys {', '.join(map(str, document)) or 'of nothing'}; it must have 'input_ids', "
                f"and may have 'labels'; or be a sequence of tokens"
            )
        return document["input_ids"]
    return document


def _tokens_and_targets(document: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n - 1] and next tokens [n - 1] of a document of n."""
    ids = np.asarray(_ids(document))
    labels = document.get("labels") if isinstance(document, Mapping) else None
    following = ids if labels is None else np.asarray(labels)
    if ids.ndim != 1 or following.shape != ids.shape:
        raise ValueError(
            f"a document has tokens of shape {list(ids.shape)} and labels of shape {list(following.shape)}; both must "
            f"have one dimension and the same length"
        )
    return ids[:-1].astype(np.int64), following[1:].astype(np.int64)


def _row(parts: list[tuple[np.ndarray, np.ndarray]], length: int, pad: int, names: tuple[str, str]) -> Row:
    tokens = np.full(length, pad, dtype=np.int64)
    positions = np.empty(length, dtype=np.int64)
    targets = np.full(length, _IGNORED, dtype=np.int64)
    place = 0
    for ids, following in parts:
        end = place + len(ids)
        tokens[place:end], targets[place:end] = ids, following
        positions[place:end] = np.arange(len(ids))
        place = end
    positions[place:] = np.arange(length - place)
    inputs = {names[0]: torch.from_numpy(tokens), names[1]: torch.from_numpy(positions)}
    return inputs, torch.from_numpy(targets)

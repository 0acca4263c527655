"""Rows of the last batch of a stream: a data set without a length does not say how many of them fill the batch up.

accelerate counts them where one process reads for all (`DataLoaderDispatcher`), and not where every rank reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard, IterableDatasetShard
from accelerate.utils import find_batch_size
from torch.utils.data import DataLoader, IterableDataset


ROWS = "hf_parallel_rows"  # of a prepared loader: gives the rows of its last batch that are data, 0 where all are


class _Counted(IterableDataset[Any]):
    """A stream as it is, of which somebody counts the rows."""

    def __init__(self, stream: Any, count: torch.Tensor) -> None:
        self._stream, self._count = stream, count

    def __iter__(self) -> Iterator[Any]:
        self._count.zero_()
        for row in self._stream:
            self._count += 1
            yield row

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self._stream, name)


class _CountedShard(IterableDatasetShard):  # type: ignore[misc]  # accelerate has no types
    """Every replica's reader reads the whole stream, and so knows its length in the end."""

    count: torch.Tensor

    def __iter__(self) -> Iterator[Any]:
        shard = copy.copy(self)
        shard.dataset = _Counted(self.dataset, self.count)
        rows: Iterator[Any] = IterableDatasetShard.__iter__(shard)
        return rows


class _LastRows(DataLoader[Any]):
    """Remembers the rows of the batch that it gave last."""

    last: int = 0

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.last = find_batch_size(batch) or 0
            yield batch


def count_rows(loader: Any) -> Any:
    """Let a prepared loader of a stream know how many rows of its last batch are data.

    With replicas whose loaders have several workers it does not: each worker fills up a last batch of its own.

    Args:
        loader: Any loader; others than a `DataLoaderShard` of an `IterableDataset` stay as they are.

    Returns:
        The loader.
    """
    base: Any = loader.base_dataloader if type(loader) is DataLoaderShard else None
    if type(base) is not DataLoader or not isinstance(base.dataset, IterableDataset):
        return loader
    shard: Any = base.dataset  # which asks its stream for the length
    if hasattr(shard.dataset if isinstance(shard, IterableDatasetShard) else shard, "__len__"):
        return loader
    rows: Callable[[], int]
    if not isinstance(shard, IterableDatasetShard):
        read: Any = base
        read.__class__ = _LastRows
        rows = lambda: int(read.last)  # noqa: E731
    elif shard.drop_last or base.num_workers > 1:
        return loader
    else:
        shard.__class__ = _CountedShard
        shard.count = count = torch.zeros((), dtype=torch.int64).share_memory_()  # a worker is another process
        whole = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        rows = lambda: int(count) % whole  # noqa: E731
    vars(loader)[ROWS] = rows
    return loader


def rows_of_last(loader: Any, otherwise: int) -> int:
    """Rows of the last batch that are data, over all replicas; 0 or less where no row is to be cut off.

    Args:
        loader: The one that is read, at its end.
        otherwise: Number that accelerate knows; -1 where it knows none.
    """
    rows = vars(loader).get(ROWS) if otherwise < 0 else None
    return otherwise if rows is None else rows()

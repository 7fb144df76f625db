"""A stream of records -> a stream of tokenised documents, with the encoders and checks of `tokenize_records`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import IterableDataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from longctx.data.chat import FIRST_RECORDS, ChatEncoder
from longctx.data.columns import document_lengths, token_columns
from longctx.data.encoders import Encoder
from longctx.data.errors import DataError, name_record, no_records, too_large, with_place
from longctx.data.files import unlike_files
from longctx.data.reading import RecordStream, as_stream, in_groups
from longctx.data.tokenize import choose_encoder, encoder_key, holds_target, no_targets

RECORDS_PER_TABLE = 256
"""Records that are tokenised at a time: enough to keep the tokenizer's threads busy."""


class DocumentStream:
    """Documents in the order of the records, tokenised some at a time when they are asked for.

    Every iteration starts with the first record, and gives all documents in every process: other than a
    datasets.IterableDataset it deals nothing out to the workers of a DataLoader. Where it stops at a record, the
    error names the record's place.
    """

    def __init__(
        self, records: RecordStream | IterableDataset, encoder: Encoder, place: Callable[[int], str] = name_record
    ) -> None:
        """
        Args:
            records: of the columns that the encoder reads.
            place: names a record by its number, for error messages.
        """
        self.encoder, self.place = encoder, place
        self.key = encoder_key(encoder)
        """Digest of what makes the documents. It is taken here, before a .jinja template is put on the tokenizer."""
        self.records = as_stream(records)

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int32]]]:
        """`input_ids` [tokens] and, where `tokenize_records` gives them, `labels` [tokens]; views of a table.

        Raises:
            DataError: as `tables`.
        """
        return self.starting_at(0)

    def starting_at(self, document: int) -> Iterator[dict[str, NDArray[np.int32]]]:
        """Iterate from this document on: the records of earlier ones are read, and not encoded."""
        whole, rest = divmod(document, RECORDS_PER_TABLE)
        for table in self.tables(skip=whole):
            columns = token_columns(table)
            for values in islice(zip(*(column.rows() for column in columns.values()), strict=True), rest, None):
                yield dict(zip(columns, values, strict=True))
            rest = 0

    def tables(self, skip: int = 0, most: int | None = None) -> Iterator[pa.Table]:
        """The documents as tables of up to RECORDS_PER_TABLE, with the columns of `tokenize_records`.

        Args:
            skip: tables at the start that are not made.
            most: records that are read; all when None.

        Raises:
            DataError: a record that cannot be read or encoded; at the end, no record, or no target of the loss.
        """
        num_records, num_tokens = skip * RECORDS_PER_TABLE, 0
        has_target = skip > 0  # whoever read those tables has looked
        try:
            for raw in in_groups(islice(self.records.raw(), num_records, most), RECORDS_PER_TABLE):
                table = self.encoder(self.records.parse(raw), range(num_records, num_records + len(raw)))
                num_records += len(raw)
                num_tokens += int(document_lengths(table).sum())
                has_target = has_target or holds_target(table)
                yield table
        except DataError as error:
            raise with_place(error, self.place) from error
        except MemoryError:
            raise too_large(f"{self.place(num_records)} or a later one") from None
        except (ValueError, OSError, pa.ArrowException) as error:  # of a reader: a cast, bytes that are not UTF-8
            raise unlike_files(f"{self.place(num_records)} or a later one", error.__cause__ or error) from error
        if not num_records:
            raise no_records("the stream")
        if not has_target:
            raise DataError(f"{self.place(0)} to the end: {no_targets(num_records, num_tokens, self.encoder.masked)}")


def tokenize_stream(
    records: RecordStream | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    place: Callable[[int], str] = name_record,
    **options: Any,
) -> DocumentStream:
    """The documents that `tokenize_records` would make of these records, one after another and uncached.

    Args:
        records: as from `stream_records`, or a streamed data set of `datasets`.
        place: names a record by its number, for error messages.
        options: of `tokenize_records`, without `num_proc`.

    Raises:
        DataError: columns of no known kind or type, an option that does not apply to it, or one of the first chats
            cannot be encoded; the rest shows when the documents are read.
    """
    records, encoder = choose_encoder(as_stream(records), tokenizer, **options)
    if encoder.tokenizer is not None:
        encoder.start()
    documents = DocumentStream(records, encoder, place)
    if isinstance(encoder, ChatEncoder):  # refuses, before training, a template that leaves something to chance
        next(documents.tables(most=FIRST_RECORDS))
    return documents

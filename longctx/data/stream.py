"""A stream of records -> a stream of tokenised documents, with the encoders and checks of `tokenize_records`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import IterableDataset
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from longctx.data.chat import FIRST_RECORDS, ChatEncoder
from longctx.data.columns import Document, document_lengths, documents_of
from longctx.data.encoders import NOTES, Encoder, in_words, notes_of
from longctx.data.errors import DataError, name_record, no_records, say, too_large, with_place
from longctx.data.files import unlike_files
from longctx.data.reading import RecordStream, as_stream
from longctx.data.tokenize import choose_encoder, encoder_key, holds_target, no_targets

RECORDS_AT_A_TIME = 256
"""Records that are read, and of which those that are wanted are tokenised together, to keep the tokenizer busy."""


class Record(NamedTuple):
    """A record that is not encoded yet."""

    number: int
    """Its place in its data set, counted from 0."""
    raw: Any
    """As it lies in its source; `RecordStream.parse` reads it."""


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
        self._said: set[str] = set()

    def __iter__(self) -> Iterator[dict[str, NDArray[np.int32]]]:
        """`input_ids` [tokens] and, where `tokenize_records` gives them, `labels` [tokens]; views of a table.

        Raises:
            DataError: as `tables`.
        """
        for table in self.tables():
            yield from documents_of(table)

    def documents_from(
        self, first: int, wanted: Callable[[int], bool], lengths: Sequence[int] = ()
    ) -> Iterator[Document]:
        """Yield the wanted documents from this one on; records of others are read, and not encoded.

        Args:
            wanted: whether a document is, by its number.

        Raises:
            DataError: a record that cannot be read, or one of a wanted document that cannot be encoded.
        """
        drawn = ((record, Document(record.number, {})) for record in self.records_from(first))
        return encoded(drawn, [self], wanted)

    def tables(self) -> Iterator[pa.Table]:
        """The documents as tables of up to RECORDS_AT_A_TIME, with the columns of `tokenize_records`.

        Raises:
            DataError: a record that cannot be read or encoded; at the end, no target of the loss.
        """
        num_records, num_tokens, has_target = 0, 0, False
        records = self.records_from(0)
        while some := list(islice(records, RECORDS_AT_A_TIME)):
            table = self.encode(some)
            num_records += len(some)
            num_tokens += int(document_lengths(table).sum())
            has_target = has_target or holds_target(table)
            yield table
        if not has_target:
            raise DataError(f"{self.place(0)} to the end: {no_targets(num_records, num_tokens, self.encoder.masked)}")

    def records_from(self, first: int) -> Iterator[Record]:
        """Yield the records from this one on, not encoded.

        Raises:
            DataError: a record that cannot be read; at the end, no record.
        """
        number, records = first, islice(self.records.raw(), first, None)
        while True:
            with self._place_named(number):
                raw = next(records, None)
            if raw is None:
                break
            yield Record(number, raw)
            number += 1
        if not number:
            raise no_records("the stream")

    def encode(self, records: Sequence[Record]) -> pa.Table:
        """Return the documents of some records, with the columns of `tokenize_records`.

        Raises:
            DataError: one that cannot be encoded.
        """
        numbers = [record.number for record in records]
        with self._place_named(numbers[0]):
            table = self.encoder(self.records.parse([record.raw for record in records]), numbers)
        notes = notes_of(table[NOTES])
        for note in in_words({note: notes[note] for note in notes if note not in self._said}):
            say(f"Records {numbers[0]} to {numbers[-1]}: {note}", on_all_ranks=numbers[0] > 0)
        self._said |= notes.keys()
        return table.drop_columns([NOTES])

    @contextmanager
    def _place_named(self, first: int) -> Iterator[None]:
        """Name the record in an error about it, or the first of those that it may be."""
        try:
            yield
        except DataError as error:
            raise with_place(error, self.place) from error
        except MemoryError:
            raise too_large(f"{self.place(first)} or a later one") from None
        except (ValueError, OSError, pa.ArrowException) as error:  # of a reader: a cast, bytes that are not UTF-8
            raise unlike_files(f"{self.place(first)} or a later one", error.__cause__ or error) from error


def encoded(
    drawn: Iterable[tuple[Record, Document]], streams: Sequence[DocumentStream], wanted: Callable[[int], bool]
) -> Iterator[Document]:
    """Yield the wanted of some documents, encoded by their streams. The others' records are passed over here.

    Args:
        drawn: documents without columns, and their records.
    """
    drawn = iter(drawn)
    while some := list(islice(drawn, RECORDS_AT_A_TIME)):
        some = [pair for pair in some if wanted(pair[1].number)]
        of_source = {
            source: documents_of(stream.encode(records))
            for source, stream in enumerate(streams)
            if (records := [record for record, document in some if document.source == source])
        }
        for _, document in some:
            yield document._replace(columns=next(of_source[document.source]))


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
        encoder.process.start()
    documents = DocumentStream(records, encoder, place)
    if isinstance(encoder, ChatEncoder):  # refuses, before training, a template that leaves something to chance
        documents.encode(list(islice(documents.records_from(0), FIRST_RECORDS)))
    return documents

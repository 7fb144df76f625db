"""Several data sets as one: documents of each drawn by its weight, as datasets.interleave_datasets draws rows.

    sources a0 a1 a2, b0 b1; weights 0.6 0.4; draws a b a a …, first_exhausted
    ->  a0 b0 a1 a2

A share is one of documents. What a mixture comes to, also in tokens, is counted by data set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import datasets
import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from longctx.data.columns import SOURCE_COUNTS, Document, document_lengths
from longctx.data.errors import DataError
from longctx.data.mixture import Mixture
from longctx.data.stream import DocumentStream, Record, encoded

_DRAWN_AT_A_TIME = 1000  # as interleave_datasets does: what is drawn depends on it
_MOST_DOCUMENTS = 1 << 31


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """The part of one data set in a mixture."""

    name: str
    documents: int
    """Documents in the mixture; a repeated document counts each time."""
    tokens: int
    documents_there: int | None
    """Documents in the data set; None for a stream whose end has not been seen."""
    documents_repeated: int
    """Documents of the mixture that repeat an earlier one."""
    documents_left_out: int | None
    share_asked: float | None
    """The requested share of the mixture's documents."""
    share_of_documents: float
    share_of_tokens: float

    @property
    def epochs(self) -> float | None:
        """How many times the data set is read."""
        return self.documents / self.documents_there if self.documents_there else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for trainer_state.json."""
        return asdict(self) | {"epochs": self.epochs}

    def __str__(self) -> str:
        asked = f" ({self.share_asked:.1%} requested)" if self.share_asked is not None else ""
        parts = [
            f"{self.name}: {self.documents:,} documents with {self.tokens:,} tokens, "
            f"{self.share_of_documents:.1%}{asked} of the documents and {self.share_of_tokens:.1%} of the tokens"
        ]
        if self.epochs is not None:
            parts.append(f"{self.epochs:.2f} epochs")
        if self.documents_repeated:
            parts.append(f"{self.documents_repeated:,} documents repeated")
        if self.documents_left_out:
            parts.append(f"{self.documents_left_out:,} documents left out")
        return "; ".join(parts)


def mix(sources: Sequence[Dataset], mixture: Mixture, part: str = "train") -> tuple[Dataset, tuple[SourceReport, ...]]:
    """One data set of the documents of several, and what it has of each. Nothing is copied.

    Args:
        sources: tokenised documents, in the order of `mixture.names`.
        part: `train` or `test`, where `mixture.test_size` divides the documents.

    Raises:
        DataError: for weights that would make it endless.
    """
    lengths = [len(source) for source in sources]
    drawn, order = order_of_part(lengths, mixture, part)
    whole = datasets.concatenate_datasets(_with_same_columns(sources))
    chosen = whole if np.array_equal(order, np.arange(len(whole))) else whole.select(order)
    times = np.bincount(order, minlength=len(whole))
    is_left_out = np.bincount(drawn, minlength=len(whole)) == 0  # documents of the other part are not

    def of_each(values: NDArray[np.integer | np.bool_]) -> list[int]:
        return [int(part.sum()) for part in np.split(values, np.cumsum(lengths)[:-1])]

    return chosen, source_reports(
        mixture,
        documents=of_each(times),
        tokens=of_each(times * document_lengths(whole)),
        there=lengths,
        distinct=of_each(times > 0),
        left_out=of_each(is_left_out),
    )


def order_of_part(lengths: Sequence[int], mixture: Mixture, part: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers of documents in the data sets one after another: of the mixture, and of its part."""
    drawn = _order(lengths, mixture)
    return drawn, drawn if mixture.test_size is None else _part(drawn, mixture, part)


def _order(lengths: Sequence[int], mixture: Mixture) -> NDArray[np.int64]:
    """Numbers of documents in the data sets one after another, as the mixture has them."""
    shares, documents = mixture.shares(), np.arange(sum(lengths))
    if shares is None:
        return documents
    spans = np.split(documents, np.cumsum(lengths)[:-1])
    if mixture.weights is None:
        total = min(length / share for length, share in zip(lengths, shares, strict=True))
        return np.concatenate([span[: round(share * total)] for span, share in zip(spans, shares, strict=True)])
    expected = max(length / share for length, share in zip(lengths, shares, strict=True))
    if mixture.stopping_strategy == "all_exhausted" and expected > _MOST_DOCUMENTS:
        raise DataError(
            f"--dataset_weights with --dataset_stopping_strategy all_exhausted would draw {expected:,.0f} documents, "
            f"more than {_MOST_DOCUMENTS:,}, until the data set of the smallest weight ends. Raise that weight."
        )
    return _column(
        datasets.interleave_datasets(
            [Dataset.from_dict({"document": span}) for span in spans],
            probabilities=list(shares),
            seed=mixture.seed,
            stopping_strategy=mixture.stopping_strategy,  # type: ignore[arg-type]  # checked with the flags
        )
    )


def _part(order: NDArray[np.int64], mixture: Mixture, part: str) -> NDArray[np.int64]:
    try:
        parts = Dataset.from_dict({"document": order}).train_test_split(mixture.test_size, seed=mixture.seed)
    except ValueError as error:
        raise DataError(f"--test_split_size {mixture.test_size} of {len(order)} documents: {error}") from None
    return _column(parts[part])


def _column(numbers: Dataset) -> NDArray[np.int64]:
    return np.asarray(numbers.with_format("numpy")[:]["document"], dtype=np.int64)


def _with_same_columns(sources: Sequence[Dataset]) -> list[Dataset]:
    """All with `labels`, where one has them: without, every token is learnt."""
    if len({"labels" in source.column_names for source in sources}) == 1:
        return list(sources)
    return [
        source
        if "labels" in source.column_names
        else datasets.concatenate_datasets(
            [source, source.select_columns(["input_ids"]).rename_column("input_ids", "labels")], axis=1
        )
        for source in sources
    ]


def source_reports(
    mixture: Mixture,
    *,
    documents: Sequence[int],
    tokens: Sequence[int],
    there: Sequence[int | None],
    distinct: Sequence[int],
    left_out: Sequence[int | None],
) -> tuple[SourceReport, ...]:
    """Counts of each data set, as reports."""
    shares = mixture.shares() or [None] * len(mixture.names)
    return tuple(
        SourceReport(
            name=name,
            documents=documents[i],
            tokens=tokens[i],
            documents_there=there[i],
            documents_repeated=documents[i] - distinct[i],
            documents_left_out=left_out[i],
            share_asked=shares[i],
            share_of_documents=documents[i] / max(sum(documents), 1),
            share_of_tokens=tokens[i] / max(sum(tokens), 1),
        )
        for i, name in enumerate(mixture.names)
    )


class MixedStream:
    """The documents of several streams, in the order in which `mix` has those of data sets, test documents apart.

    A stream that has ended is begun again, where the stopping strategy repeats documents. Every iteration has the same
    documents, whatever process it is in.
    """

    def __init__(self, sources: Sequence[DocumentStream], mixture: Mixture) -> None:
        """
        Args:
            sources: in the order of `mixture.names`.
        """
        self.sources, self.mixture = list(sources), mixture
        self.masked = any(source.encoder.masked for source in sources)

    def __iter__(self) -> Iterator[Mapping[str, NDArray[np.int32]]]:
        """Yield documents like a DocumentStream.

        Raises:
            DataError: as of a DocumentStream.
        """
        return (document.columns for document in self.documents_from(0, lambda number: True))

    def documents_from(
        self, first: int, wanted: Callable[[int], bool], lengths: Sequence[int] = ()
    ) -> Iterator[Document]:
        """Yield the wanted documents from this one on. Earlier ones are drawn, and their records not read.

        Args:
            wanted: whether a document is, by its number in the mixture.
            lengths: records of each data set; 0 for one that does not end before `first`.

        Raises:
            DataError: a record that cannot be read, or one of a wanted document that cannot be encoded.
        """
        for document in encoded(self._drawn(first, lengths or [0] * len(self.sources)), self.sources, wanted):
            columns = document.columns
            if self.masked and "labels" not in columns:
                document = document._replace(columns={**columns, "labels": columns["input_ids"]})
            yield document

    def _drawn(self, first: int, lengths: Sequence[int]) -> Iterator[tuple[Record, Document]]:
        places = [0] * len(self.sources)  # of each source, its next document
        ended = [False] * len(self.sources)
        readers: dict[int, _Reader] = {}
        number = 0
        ends_with_the_first = self.mixture.weights is not None and self.mixture.stopping_strategy == "first_exhausted"
        for source in self._draws(ended):
            if ended[source] and self.mixture.stopping_strategy != "all_exhausted":
                continue
            if number < first:
                is_last = places[source] + 1 == lengths[source]
            else:
                if source not in readers:
                    readers[source] = _Reader(self.sources[source].records_from(places[source]))
                record, is_last = readers[source].take(self.mixture.names[source])
                yield record, Document(number, {}, source, not ended[source], is_last * (places[source] + 1))
            places[source] += 1
            if is_last:
                places[source], ended[source] = 0, True
                readers.pop(source, None)
            number += 1
            if all(ended) or (any(ended) and ends_with_the_first):
                return

    def _draws(self, ended: Sequence[bool]) -> Iterator[int]:
        """Which source gives the next document, if it has one left; `ended` is kept up to date meanwhile."""
        shares = self.mixture.shares()
        if shares is None:
            for source in range(len(self.sources)):
                while not ended[source]:
                    yield source
            return
        random = np.random.default_rng(self.mixture.seed)
        while True:
            yield from random.choice(len(self.sources), size=_DRAWN_AT_A_TIME, p=shares).tolist()

    def reports(self, counts: Mapping[str, int]) -> tuple[SourceReport, ...]:
        """Return what was read of each data set, from counts by `SOURCE_COUNTS`."""
        of_name = {name: [counts[f"{i} {name}"] for i in range(len(self.sources))] for name in SOURCE_COUNTS}
        there = [length or None for length in of_name.pop("there")]
        left_out = [length and 0 for length in there]  # a data set whose end has been read is read whole
        return source_reports(self.mixture, **of_name, there=there, left_out=left_out)


class _Reader:
    """Records of a stream, and of each whether it is the last."""

    def __init__(self, records: Iterator[Record]) -> None:
        self._records = records
        self._next = next(records, None)

    def take(self, name: str) -> tuple[Record, bool]:
        taken, self._next = self._next, next(self._records, None)
        if taken is None:
            raise DataError(f"{name} has fewer documents than when it was read before. Use the same data.")
        return taken, self._next is None

"""Texts -> token ids, without offsets and, of long texts, piece by piece: both save most of the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from longctx.data.errors import DataError, say
from longctx.untrusted.confined import Bounds, OutOfBounds, confined

_CHARACTERS_AT_A_TIME = 1 << 20
"""Of a long text that are encoded in one call: the tokenizer needs over 100 bytes for each token meanwhile."""
_REACH = 997
"""Characters on each side on which a cut is tried: a prime, which shows a tokenizer that splits at fixed lengths."""
_TRIED = 8
"""Places for a cut that are tried before the rest of a text is encoded as a whole."""
_CUTS = {r"(?<=\w) (?=\w)": r"[^\sĠĊĉč▁][ Ġ▁]", r"(?<=\n)(?=\w)": r"[\nĊ][^\sĠĊĉč▁]"}
"""Places for cuts, before a space between words and at the beginning of a line, and what the tokens that span one hold.
Byte-level vocabularies and SentencePiece write white space in their own ways."""


def token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = True
) -> list[np.ndarray]:
    """Token ids of each text, int32 [num_tokens], equal to `tokenizer(texts)["input_ids"]`.

    A fast tokenizer encodes without offsets, and a long text in pieces (see `_pieces`): as a whole, it would need over
    100 bytes for each character.
    """
    options: dict[str, Any] = {"add_special_tokens": add_special_tokens, "verbose": False}
    kind = type(tokenizer)
    if not issubclass(kind, TokenizersBackend) or any(
        getattr(kind, name) is not getattr(TokenizersBackend, name) for name in ("__call__", "_encode_plus")
    ):
        return [np.asarray(ids, dtype=np.int32) for ids in tokenizer(list(texts), **options)["input_ids"]]
    tokenizer("", **options)  # switches truncation and padding off, as for the texts themselves
    backend = tokenizer.backend_tokenizer

    def encode(texts: list[str], special: bool) -> list[np.ndarray]:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
        return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings]

    def encode_long(text: str) -> np.ndarray:
        [alone], [ended] = (encode([text[:_REACH]], special) for special in (False, add_special_tokens))
        if not len(alone):  # where special tokens stand cannot be seen
            return encode([text], add_special_tokens)[0]
        places = range(len(ended) - len(alone) + 1)
        begin = next(place for place in places if np.array_equal(ended[place : place + len(alone)], alone))
        pieces = [encode([piece], False)[0] for piece in _pieces(backend, text)]
        return np.concatenate([ended[:begin], *pieces, ended[begin + len(alone) :]])

    short = iter(encode([text for text in texts if len(text) <= _CHARACTERS_AT_A_TIME], add_special_tokens))
    return [next(short) if len(text) <= _CHARACTERS_AT_A_TIME else encode_long(text) for text in texts]


def _pieces(backend: Tokenizer, text: str) -> Iterator[str]:
    """Cut a text between words or lines, where its tokens are those of its pieces, or not at all.

    No merge of byte-pair encoding (BPE) crosses a cut that no token of the vocabulary spans. Whether the tokenizer's
    other stages treat both sides separately is tried on the text around each cut.
    """

    def agree(cut: int) -> bool:
        sides = text[cut - _REACH : cut], text[cut : cut + _REACH]
        whole, *halves = backend.encode_batch_fast(["".join(sides), *sides], add_special_tokens=False)
        return whole.ids == [token for half in halves for token in half.ids]

    start, places = 0, []
    if isinstance(backend.model, BPE) and not backend.model.dropout:
        vocabulary = list(backend.get_vocab())
        places = [place for place, spanned in _CUTS.items() if not any(map(re.compile(spanned).search, vocabulary))]
    while places and start + _CHARACTERS_AT_A_TIME < len(text):
        found = islice(re.compile("|".join(places)).finditer(text, start + _CHARACTERS_AT_A_TIME), _TRIED)
        cut = next((match.start() for match in found if agree(match.start())), len(text))
        yield text[start:cut]
        start = cut
    yield text[start:]


def warn_of_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Say if the EOS token is none that ends a document: if its text does not become its id, or may be part of one."""
    eos = str(tokenizer.eos_token or "")
    if not eos:
        return
    try:
        ids = confined(
            lambda: token_ids(tokenizer, [eos], add_special_tokens=False)[0].tolist(), Bounds.of_text(len(eos))
        )
    except OutOfBounds as error:
        raise DataError(
            f"the tokenizer cannot encode its EOS token {eos!r}: {error}. Use another one (--eos_token)."
        ) from error
    if ids != [tokenizer.eos_token_id] or eos.isalnum():
        say(
            f"The EOS token {eos!r} is no special token: its text becomes the tokens {ids[:8]}, and its id is "
            f"{tokenizer.eos_token_id}. The model may not learn where a document ends. Name another one with "
            "--eos_token."
        )

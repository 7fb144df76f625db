"""Numbers of tokens as people read them: 1k is 1,000 and 1M is 1,000,000, everywhere."""

from __future__ import annotations


def token_label(tokens: float, digits: int = 3) -> str:
    """Return a number of tokens with so many significant digits from 1,000 on: 131072 as `131k`, 1300000 as `1.3M`."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    rounded = round(tokens, digits - len(str(int(tokens))))
    unit, suffix = (10**6, "M") if rounded >= 10**6 else (10**3, "k")
    return f"{rounded / unit:,.{digits}f}".rstrip("0").removesuffix(".") + suffix

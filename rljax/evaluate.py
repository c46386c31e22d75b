"""Held-out accuracy: greedy, and avg@k, pass@k and maj@k at a temperature, in one pass over the prompts.

A training run evaluates between its steps; ``--mode=eval`` evaluates a checkpoint of a run, or a model, alone.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re

import jax
import numpy as np

from rljax import config as config_lib
from rljax import estimates, hosts, metrics, parts, rewards, rollout, runs, sharding, tasks
from rljax.alarms import Alarms
from rljax.checkpoint import Checkpointer
from rljax.console import Console
from rljax.models import Model, lora
from rljax.options import Config
from rljax.prompts import PromptSet
from rljax.rewards import RewardPool
from rljax.tasks import graders
from rljax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """One greedy completion, the first column, and k sampled ones of each of P prompts.

    rewards: float32[P, 1 + k]; what could not be scored is 0, and counted in `unscorable`. lengths: int32[P, 1 + k],
    tokens. truncated: bool[P, 1 + k], cut by the limit. texts: P lists of 1 + k completions, as graded.
    """

    examples: tuple[dict, ...]
    rewards: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    texts: list[list[str]]
    unscorable: int


def score(
    model: Model,
    params,
    prompts: PromptSet,
    *,
    config: Config,
    tokenizer: Tokenizer,
    pool: RewardPool,
    key: jax.Array,
) -> Scored:
    """Completes and grades every prompt. The same key draws the same samples, so evaluations of a run are paired,
    and so are those on other meshes."""
    k = config.eval.samples
    shards = sharding.size(sharding.mesh_of(params), "prompts")
    rows = config.rollout.lanes * config.rollout.slots
    slots = min(k + 1, rows // shards)
    lanes = min(-(-len(prompts) // shards), rows // slots // shards) * shards
    drawn = prompts.all()
    scorer = rewards.StreamingScorer(pool, tokenizer, drawn, hosts.share())
    rollouts = rollout.generate(
        model,
        params,
        drawn,
        np.full(len(prompts), k + 1),
        key=key,
        options=config.rollout,
        stop_ids=tokenizer.stop_ids,
        temperature=[0.0, config.eval.temperature],
        lanes=lanes,
        slots=slots,
        on_finished=scorer,
    )
    scores = scorer.result(len(rollouts))
    shape = (len(prompts), k + 1)
    texts = [scorer.texts[row] for row in range(len(rollouts))]
    return Scored(
        examples=prompts.examples,
        rewards=np.nan_to_num(scores.rewards).reshape(shape),
        lengths=rollouts.lengths.reshape(shape),
        truncated=rollouts.truncated.reshape(shape),
        texts=[texts[i : i + k + 1] for i in range(0, len(texts), k + 1)],
        unscorable=scores.unscorable,
    )


def by_kind(scored: Scored) -> dict[str, list[int]]:
    """Numbers of the prompts of each "kind", where the examples have one, sorted by its name."""
    kinds = collections.defaultdict(list)
    for i, example in enumerate(scored.examples):
        if "kind" in example:
            kinds[str(example["kind"])].append(i)
    return dict(sorted(kinds.items()))


def summarise(scored: Scored) -> dict[str, float]:
    """What a training run logs of an evaluation.

    eval/accuracy: greedy. eval/avg_at_k: mean over samples. eval/pass_at_k: prompts with a right sample among k.
    eval/truncated: share of sampled completions cut by the limit. eval/unscorable: completions, of both kinds, that
    could not be scored; they count as wrong. eval/accuracy_KIND: greedy, by the example's "kind".
    """
    greedy, sampled = scored.rewards[:, 0], scored.rewards[:, 1:]
    return {
        "eval/accuracy": float(greedy.mean()),
        "eval/avg_at_k": float(sampled.mean()),
        "eval/pass_at_k": float((sampled > 0.5).any(axis=1).mean()),
        "eval/truncated": float(scored.truncated[:, 1:].mean()),
        "eval/unscorable": scored.unscorable,
    } | {f"eval/accuracy_{kind}": float(greedy[ids].mean()) for kind, ids in by_kind(scored).items()}


def report(scored: Scored) -> dict[str, dict[str, float]]:
    """Every measure with its 95% bootstrap interval over prompts: {name: {value, low, high}}.

    accuracy (greedy), avg@k, unbiased pass@1, 2, 4 … k, maj@k, mean length (tokens) and share of truncated
    completions, and the greedy accuracy of each kind.
    """
    sampled = scored.rewards[:, 1:]
    k, right = sampled.shape[1], (sampled > 0.5).sum(axis=1)
    values = {"accuracy": scored.rewards[:, 0], f"avg@{k}": sampled.mean(axis=1)}
    for size in sorted({*(2**i for i in range(k.bit_length())), k}):
        values[f"pass@{size}"] = estimates.pass_at_k(right, k, size)
    votes = [
        [graders.vote(text, example) for text in row[1:]]
        for example, row in zip(scored.examples, scored.texts, strict=True)
    ]
    values[f"maj@{k}"] = np.array([estimates.majority(*pair) for pair in zip(votes, sampled, strict=True)])
    values["length"] = scored.lengths[:, 1:].mean(axis=1)
    values["truncated"] = scored.truncated[:, 1:].mean(axis=1)
    values |= {f"accuracy, {kind}": scored.rewards[ids, 0] for kind, ids in by_kind(scored).items()}
    rows = {}
    for name, value in values.items():
        low, high = estimates.interval(value)
        rows[name] = {"value": float(np.mean(value)), "low": low, "high": high}
    return rows


def records(scored: Scored) -> list[dict]:
    """One plain dict a prompt: the example, and the completions with rewards, lengths and truncation, greedy first."""
    columns = zip(scored.texts, scored.rewards, scored.lengths, scored.truncated, strict=True)
    return [
        {
            "example": example,
            "completions": [
                {"text": text, "reward": float(reward), "tokens": int(length), "truncated": bool(cut), "greedy": i == 0}
                for i, (text, reward, length, cut) in enumerate(zip(*row, strict=True))
            ],
        }
        for example, row in zip(scored.examples, columns, strict=True)
    ]


def run(config: Config, workdir: pathlib.Path) -> dict[str, dict]:
    """Evaluates the newest checkpoint in workdir, or model.path where there is none, on the task's held-out prompts,
    or on the files of eval.tasks.

    Writes workdir/eval/NAME.json, the measures and what was measured, and NAME.jsonl, every completion; NAME is of the
    task, its file and the checkpoint's step. Returns what each NAME.json holds, by NAME.
    """
    loaded = [(own, tasks.load(own.task)) for own in config_lib.evaluated(config)]  # all, before anything is decoded
    with Console() as console:
        console.say("rljax eval", style="bold")
        model, params, source, step = newest(config, workdir)
        outcomes = {}
        for own, task in loaded:
            tokenizer = parts.make_tokenizer(own, model, task)
            prompts = parts.encode(own, model, task.eval, tokenizer, "held-out")
            without = runs.left_out(own, task.dropped, {"held-out": prompts.dropped})
            console.table([
                ("model", source),
                ("task", f"{own.task.name}: {len(prompts):,} held-out prompts{without}"),
                ("samples", f"1 greedy and {own.eval.samples} at temperature {own.eval.temperature:g} a prompt"),
            ])  # fmt: skip
            key = parts.key_of(own, parts.EVALUATION)
            with rewards.RewardPool(task.grade, **dataclasses.asdict(own.rewards)) as pool:
                scored = score(model, params, prompts, config=own, tokenizer=tokenizer, pool=pool, key=key)
            name, outcome = file_name(own, step), outcome_of(own, source, scored)
            same = sum(other == name or other.startswith(f"{name}.") for other in outcomes)
            name += f".{same + 1}" if same else ""  # files of one name in several folders
            metrics.write_lines(workdir / "eval" / f"{name}.jsonl", records(scored))
            metrics.write_json(workdir / "eval" / f"{name}.json", outcome)
            outcomes[name] = outcome
            rows = [
                (what, *(f"{row[x]:.3f}" for x in ("value", "low", "high")))
                for what, row in outcome["measures"].items()
            ]
            console.table(rows, titles=("", "value", "95% from", "to"))
            console.warn(*Alarms(own)(summarise(scored)))
            console.say(f"{workdir / 'eval' / name}.json and .jsonl")
    return outcomes


def newest(config: Config, workdir: pathlib.Path):
    """(Model, params, what they are in words, step or None) of workdir's newest checkpoint, or of model.path."""
    model, params = parts.policy(config, parts.make_mesh(config))
    with Checkpointer(workdir / "checkpoints", config.checkpoint.keep, read_only=True) as checkpoints:
        if checkpoints.latest_step() is None:
            return model, params, f"{config.model.path}, as it is: no checkpoint in {workdir}", None
        runs.check_model(config, workdir)
        trained, frozen = lora.split(params)
        step, trained = checkpoints.restore_params(trained)
    return model, lora.join(trained, frozen), f"step {step} of {workdir}", step


def file_name(config: Config, step: int | None) -> str:
    """Of an evaluation's files: of the task, its data file and the checkpoint's step."""
    data = pathlib.Path(config.task.eval_path or config.task.path).stem
    name = re.sub(r"[^\w-]+", "_", "-".join(filter(None, (config.task.name, data))))
    return name + ("" if step is None else f"-{step:06}")


def outcome_of(config: Config, source: str, scored: Scored) -> dict:
    """What NAME.json holds."""
    return {
        "model": source,
        "task": config.task.name,
        "task_options": dataclasses.asdict(config.task),
        "prompts": len(scored.examples),
        "samples": config.eval.samples,
        "temperature": config.eval.temperature,
        "seed": config.seed,
        "measures": report(scored),
    }

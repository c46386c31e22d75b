"""What is wrong between config keys whose values are each right alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rljax.options import (
    FILE_TASKS,
    BudgetOptions,
    Config,
    HostsOptions,
    LearnerOptions,
    ModelOptions,
    PodsOptions,
    RolloutOptions,
    TaskOptions,
)


def conflicts(c: Config) -> Iterator[str]:
    """A sentence for each, with the keys, their values and what to do, the most basic first."""
    yield from _model_conflicts(c.model)
    yield from _task_conflicts(c.task, c.eval.tasks)
    yield from _rollout_conflicts(c.rollout)
    yield from _budget_conflicts(c.budget, c.rollout, c.task)
    yield from _pods_conflicts(c.pods, c.rollout.samples)
    if c.loss.correction_low > c.loss.correction_high:
        yield (
            f"loss.correction_low = {c.loss.correction_low} is above loss.correction_high ="
            f" {c.loss.correction_high}; lower the one or raise the other"
        )
    if c.loss.objective == "cispo" and c.loss.dual_clip is not None:
        yield (
            f"loss.dual_clip = {c.loss.dual_clip} has no effect with loss.objective = 'cispo';"
            " set it to None, or loss.objective to 'ppo'"
        )
    yield from _actor_conflicts(c)
    yield from _learner_conflicts(c.learner, c.rollout, c.budget)
    axes = {key: size for key, size in dataclasses.asdict(c.mesh).items() if not key.startswith("rollout_")}
    yield from (
        f"mesh.{axis} = 0 is no size; give at least 1, or -1 for the devices that are left"
        for axis, size in axes.items()
        if size == 0
    )
    free = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(free) > 1:
        yield f"{' and '.join(free)} are -1, but one axis takes the devices that are left; size the others"
    yield from _apart_conflicts(c)
    yield from _hosts_conflicts(c.hosts)


# Keys of the task block that not every task of rljax reads, with their value when not set, and who reads which.
NOT_SET = {
    "path": "", "eval_path": "", "prompt_field": "", "answer_field": "", "kind_field": "", "choices_field": "",
    "gold": "", "grader": "", "format": "boxed", "length_free": 0, "length_max": 0, "template": "", "stop": "",
    "mix": "", "options": "", "shots": 0,
}  # fmt: skip
READ = {
    **dict.fromkeys(FILE_TASKS, [key for key in NOT_SET if key not in ("mix", "options", "shots")]),
    "arithmetic": ["mix", "shots"],
    "reasoning_gym": ["mix", "options", "grader", "format", "length_free", "length_max", "template", "stop"],
}


def _model_conflicts(m: ModelOptions) -> Iterator[str]:
    computes = m.compute_dtype if m.compute_dtype else m.dtype
    if m.attention == "cudnn" and computes != "bfloat16":
        yield (
            f"model.attention = 'cudnn' takes half precision alone, and this model computes in {computes}; set"
            " model.compute_dtype='bfloat16'"
        )


def _task_conflicts(t: TaskOptions, to_evaluate: str) -> Iterator[str]:
    if t.system and not t.chat:
        yield f"task.system = {t.system!r} has no effect without task.chat; set task.chat to True"
    if t.name not in READ:
        return  # a task of the user's own reads what it likes
    of_file = t.name in FILE_TASKS
    unread = {key: getattr(t, key) for key in NOT_SET if key not in READ[t.name] and getattr(t, key) != NOT_SET[key]}
    if unread:
        given = " and ".join(f"task.{key} = {value!r}" for key, value in unread.items())
        off = " ".join(f"--config.task.{key}={NOT_SET[key]}" for key in unread)
        others = [name for name, keys in READ.items() if set(unread) <= set(keys)]
        hint = f", or task.name to {', '.join(others)}" if others else ""
        yield f"{given} {'has' if len(unread) == 1 else 'have'} no effect with task.name = {t.name!r}; set {off}{hint}"
    yield from _grader_conflicts(t)
    if of_file and not (t.path or t.eval_path or to_evaluate):
        yield f"task.name = {t.name!r} reads its problems from a data file; set task.path to one"
    if not of_file and t.train_prompts == 0:
        yield f"task.train_prompts = 0 is all of a data file, but task.name = {t.name!r} has none; set at least 1"
    if t.eval_prompts == 0 and not t.eval_path:
        yield "task.eval_prompts = 0 is all of task.eval_path, which is not set; set at least 1, or task.eval_path"


def _grader_conflicts(t: TaskOptions) -> Iterator[str]:
    """Settings of parts of a reward that task.grader does not name. What these may be is graders.Reward's to say."""
    if "grader" not in READ[t.name]:
        return
    named = [term.partition(":")[0].strip() for term in t.grader.split("+")]
    for part, keys in (("format", ("format",)), ("length", ("length_free", "length_max"))):
        for key in keys:
            if part not in named and getattr(t, key) != NOT_SET[key]:
                yield (
                    f"task.{key} = {getattr(t, key)!r} has no effect without {part} in task.grader = {t.grader!r}, such"
                    f" as 'math:0.9+{part}:0.1'; add it, or set --config.task.{key}={NOT_SET[key]}"
                )


def _rollout_conflicts(r: RolloutOptions) -> Iterator[str]:
    if r.samples == 1:
        yield "rollout.samples = 1 is a group of one, whose advantage is always 0; set at least 2"
    if r.temperature == 0:
        yield "rollout.temperature = 0 makes all samples of a group equal (greedy); set it above 0"
    for key, value, off in (("top_k", r.top_k, 0), ("top_p", r.top_p, 1.0)):
        if value != off:
            yield (
                f"rollout.{key} = {value} is on in training: the recorded log-probs would be of another"
                f" distribution than the policy's; set it to {off}"
            )
    if r.segment > r.max_new_tokens:
        yield (
            f"rollout.segment = {r.segment} is more than rollout.max_new_tokens = {r.max_new_tokens};"
            f" set rollout.segment to at most {r.max_new_tokens}"
        )


def _budget_conflicts(b: BudgetOptions, r: RolloutOptions, t: TaskOptions) -> Iterator[str]:
    step = r.prompts * r.samples
    if b.rollouts < step:
        yield (
            f"budget.rollouts = {b.rollouts} is less than one step of rollout.prompts * rollout.samples ="
            f" {r.prompts} * {r.samples} = {step}; raise it, or make a step smaller"
        )
    if b.rule != "cero":
        return
    if r.samples > r.slots:
        yield (
            f"rollout.samples = {r.samples}, the largest grant N_max under budget.rule = 'cero', is more"
            f" than rollout.slots = {r.slots}; raise rollout.slots or lower rollout.samples"
        )
    most = t.train_prompts * b.epochs * r.samples
    if t.train_prompts and b.rollouts > most:  # of 0, a whole data file, the number is not known here
        yield (
            f"budget.rollouts = {b.rollouts} can never be spent: task.train_prompts * budget.epochs *"
            f" rollout.samples = {t.train_prompts} * {b.epochs} * {r.samples} = {most};"
            " raise budget.epochs or lower budget.rollouts"
        )


def _pods_conflicts(p: PodsOptions, samples: int) -> Iterator[str]:
    if p.keep > samples:
        yield (
            f"pods.keep = {p.keep} is more than rollout.samples = {samples}; lower pods.keep or raise rollout.samples"
        )
    if p.rule == "all" and p.keep != samples:
        yield (
            f"pods.keep = {p.keep} contradicts pods.rule = 'all', which keeps all rollout.samples ="
            f" {samples}; set pods.keep to {samples} or choose another pods.rule"
        )
    if p.keep == 1 < samples and p.normalize_over == "kept":
        yield (
            "pods.keep = 1 with pods.normalize_over = 'kept' is a group of one, whose advantage is always"
            " 0; keep at least 2, or set pods.normalize_over to 'all'"
        )


def _actor_conflicts(c: Config) -> Iterator[str]:
    j, a = c.jackpot, c.actor
    if a.path and a.dtype:
        yield (
            f"actor.dtype = {a.dtype!r} is that of a copy of the policy, but actor.path = {a.path!r} names another"
            " model; set one of them to ''"
        )
    if c.advantage.overlong_buffer > c.rollout.max_new_tokens:
        yield (
            f"advantage.overlong_buffer = {c.advantage.overlong_buffer} is more than rollout.max_new_tokens ="
            f" {c.rollout.max_new_tokens}; lower it"
        )
    if j.rule == "none":
        return
    updates = c.learner.minibatches * c.learner.epochs
    if not (a.path or a.dtype or c.rollout.staleness) and (updates == 1 or j.target == "old"):
        yield (
            "jackpot.rule = 'obrs' has nothing to correct: the policy itself makes the rollouts; set actor.path or"
            " actor.dtype, or several learner.minibatches or learner.epochs with jackpot.target = 'new', or"
            " rollout.staleness"
        )
    if c.loss.correction != "none":
        yield (
            f"loss.correction = {c.loss.correction!r} and jackpot.rule = 'obrs' both weigh tokens;"
            " set one of them to 'none'"
        )
    if j.normaliser == "exact" and (j.table == "sampler" or j.target == "new"):
        yield (
            f"jackpot.normaliser = 'exact' needs the whole vocabulary at the old policy, but jackpot.table ="
            f" {j.table!r} and jackpot.target = {j.target!r}; set jackpot.normaliser to 'top_k'"
        )


def _apart_conflicts(c: Config) -> Iterator[str]:
    """Of rollouts on devices of their own, and by older weights."""
    m, j, stale = c.mesh, c.jackpot, c.rollout.staleness
    if m.rollout_devices == 0 and m.rollout_tensor != 1:
        yield (
            f"mesh.rollout_tensor = {m.rollout_tensor} has no effect without mesh.rollout_devices; set it to 1, or"
            " mesh.rollout_devices to the number of devices that make rollouts alone"
        )
    elif m.rollout_devices % m.rollout_tensor:
        yield (
            f"mesh.rollout_tensor = {m.rollout_tensor} does not divide mesh.rollout_devices = {m.rollout_devices};"
            " change one of them"
        )
    if stale and c.loss.correction == "none" and j.rule == "none":
        yield (
            f"rollout.staleness = {stale} makes rollouts by older weights, and nothing corrects for it; set"
            " loss.correction to 'truncate' (TIS), or jackpot.rule to 'obrs' and jackpot.table to 'sampler'"
        )
    if stale and j.rule == "obrs" and j.table != "sampler":
        yield (
            f"rollout.staleness = {stale} and jackpot.table = {j.table!r}, for which the model of the rollouts is run"
            " again, with weights that it no longer has; set jackpot.table to 'sampler'"
        )


def _hosts_conflicts(h: HostsOptions) -> Iterator[str]:
    if h.cluster and h.coordinator:
        yield (
            f"hosts.cluster = {h.cluster!r} says itself where process 0 is; set hosts.coordinator ="
            f" {h.coordinator!r} to '', or hosts.cluster"
        )
    if not h.coordinator:
        for key, value in (("count", h.count), ("index", h.index)):
            if value:
                yield (
                    f"hosts.{key} = {value} has no effect without hosts.coordinator; set that to the address of"
                    f" process 0, or hosts.{key} to 0"
                )
    elif h.index >= h.count:
        yield (
            f"hosts.index = {h.index} is none of hosts.count = {h.count} processes, which are numbered from 0;"
            " set both in each process"
        )


def _learner_conflicts(o: LearnerOptions, r: RolloutOptions, b: BudgetOptions) -> Iterator[str]:
    if r.prompts % o.minibatches:
        yield (
            f"learner.minibatches = {o.minibatches} does not divide rollout.prompts = {r.prompts}; change one of them"
        )
    part = r.prompts // o.minibatches
    if part % o.micro_batches:
        yield (
            f"learner.micro_batches = {o.micro_batches} does not divide a minibatch of rollout.prompts /"
            f" learner.minibatches = {r.prompts} / {o.minibatches} = {part} prompts; change one of them"
        )
    if o.optimizer == "adafactor" and o.moment_dtype != "float32":
        yield (
            f"learner.moment_dtype = {o.moment_dtype!r} has no effect with learner.optimizer = 'adafactor', which keeps"
            " no first moment; set it to 'float32', or learner.optimizer to 'adamw'"
        )
    updates = b.rollouts // (r.prompts * r.samples) * o.minibatches * o.epochs
    if o.schedule == "cosine" and o.warmup_updates >= updates:
        yield (
            f"learner.warmup_updates = {o.warmup_updates} leaves nothing for learner.schedule = 'cosine':"
            f" budget.rollouts allows {updates} updates; lower the one or raise the other"
        )

"""Every key of configs/default.py arrives: changing it alone changes something that can be observed.

Each key stands in one group, by the cheapest place where its value shows: the training prompts, the engine's
arguments, the kept rows, the allocator, the program of the learner step, the optimizer, the files of a run.
A key that stands in no group fails the first test.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax import budget, hosts, learner, metrics, records, rewards, sampling, step, tasks, tokenizer, train
from rljax import parts as parts_lib
from rljax.config import KEYS, ConfigError, evaluated
from rljax.tasks import gym
from rljax.types import LearnerState, Rollouts

# A base in which every key has work to do: several updates, a reference, a correction, a subset to keep.
BASE = {
    "learner.minibatches": 2, "learner.schedule": "cosine", "learner.weight_decay": 0.01, "loss.kl_coef": 0.1,
    "loss.correction": "mask", "pods.rule": "max_variance", "pods.keep": 3,
    "cero.step_mu": 0.1, "cero.step_theta": 0.1, "cero.eta": 1.0, "mesh.data": 1,
}  # fmt: skip
DATA = {
    "task.name": "arithmetic", "task.path": "x", "task.train_prompts": 11, "task.eval_prompts": 4,
    "rollout.max_prompt_tokens": 5,
}  # fmt: skip
FILE = {
    "task.eval_path": "b.jsonl", "task.prompt_field": "other", "task.answer_field": "wrong", "task.gold": "hash",
    "task.grader": "exact", "task.kind_field": "topic", "task.template": "Q{prompt}", "task.stop": "\n",
}  # fmt: skip
CHOICES = {"task.choices_field": "A,B"}
REWARD = {"task.format": "think", "task.length_free": 2, "task.length_max": 5}
GENERATED = {"task.options": '{"leg_counting": {"max_animals": 3}}'}
CHAT = {"task.chat": True}
SYSTEM = {"task.system": "Do: "}
ARITHMETIC = {"task.seed": 1, "task.mix": "add1:1", "task.shots": 1}
ENGINE = {
    "seed": 1, "rollout.prompts": 2, "rollout.samples": 3, "rollout.max_new_tokens": 5, "rollout.lanes": 2,
    "rollout.temperature": 0.7, "rollout.slots": 3, "rollout.segment": 2, "rollout.columns": 2, "eval.samples": 3,
    "eval.temperature": 0.5,
}  # fmt: skip
REFUSED = {"rollout.top_k": 5, "rollout.top_p": 0.9}  # on in training is an error; sampling_test has them on
SELECTION = {
    "pods.rule": "max_reward", "pods.keep": 2, "pods.normalize_over": "all", "advantage.baseline": "loo",
    "advantage.scale": "none", "advantage.eps": 0.1, "loss.mask_truncated": True,
}  # fmt: skip
ALLOCATION = {
    "budget.rule": "uniform", "budget.rollouts": 90, "budget.epochs": 5, "cero.eta": 2.0,
    "cero.step_theta": 0.2, "cero.step_mu": 0.2, "cero.prior_alpha": 2.0, "cero.prior_beta": 2.0,
    "cero.discount": 0.5, "cero.success_threshold": 0.7,
    "cero.min_visits": 1,
}  # fmt: skip
PROGRAM = {
    "model.dtype": "bfloat16", "model.compute_dtype": "bfloat16", "lora.rank": 2, "model.remat": "layer",
    "model.attention_chunk": 2, "model.token_chunk": 3, "loss.objective": "cispo",
    "loss.ratio": "sequence", "loss.clip_low": 0.1, "loss.clip_high": 0.1, "loss.dual_clip": 4.0,
    "loss.aggregate": "constant", "loss.kl_coef": 0.2, "loss.kl_kind": "k3", "loss.correction": "truncate",
    "loss.correction_level": "sequence", "loss.correction_low": 0.5, "loss.correction_high": 3.0,
    "learner.minibatches": 1, "learner.epochs": 2, "learner.micro_batches": 2, "learner.learning_rate": 0.5,
    "learner.warmup_updates": 4, "learner.schedule": "constant", "learner.adam_b1": 0.8, "learner.adam_b2": 0.9,
    "learner.adam_eps": 1e-3, "learner.weight_decay": 0.1, "learner.max_grad_norm": 2.0,
    "loss.entropy_coef": 0.1, "learner.optimizer": "adafactor", "learner.moment_dtype": "bfloat16",
}  # fmt: skip
HOSTS = {
    "hosts.cluster": "slurm", "hosts.coordinator": "elsewhere:1", "hosts.count": 3, "hosts.index": 1,
    "hosts.start_timeout": 5, "hosts.heartbeat_timeout": 6,
}  # fmt: skip
MESH = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
POOL = {"rewards.workers": 3, "rewards.cpu_seconds": 7.0, "rewards.memory_mb": 333}
RUN = {
    "name": "other", "eval.every": 3, "checkpoint.every": 3, "checkpoint.keep": 1, "metrics.samples_every": 4,
    "metrics.wandb": "project",
}  # fmt: skip
JACKPOT = {
    "jackpot.rule": "none", "jackpot.target": "old", "jackpot.lam": 2.0, "jackpot.budget": 0.5,
    "jackpot.table": "sampler", "jackpot.top_k": 3, "jackpot.normalise": "proposed", "jackpot.c1": 2.0,
    "jackpot.c2": 2.0, "actor.learning_rate": 0.5, "actor.loss_coef": 0.5, "actor.distill_coef": 0.5,
    "actor.distill_direction": "forward",
}  # fmt: skip
LORA = {"lora.alpha": 2.0, "lora.targets": "q,v"}
EXACT = {"jackpot.normaliser": "exact"}
APART = {"mesh.rollout_devices": 2, "mesh.rollout_tensor": 2, "rollout.staleness": 1}  # ahead_test.py
ALONE = {
    "model.path": "nowhere", "model.attention": "splash", "eval.tasks": "gsm8k:a.jsonl,file:b.json",
    "task.shuffle_rewards": True,
    "actor.path": "tiny-actor", "actor.dtype": "int8",
    "advantage.overlong_buffer": 2, "rollout.max_rounds": 3,
}  # fmt: skip

GROUPS = (
    DATA, FILE, CHOICES, REWARD, GENERATED,
    CHAT, SYSTEM, ARITHMETIC, ENGINE, REFUSED, SELECTION, ALLOCATION, PROGRAM, JACKPOT, EXACT, LORA,
    MESH, APART, HOSTS, POOL, RUN, ALONE,
)  # fmt: skip


def test_every_key_is_in_one_group():
    listed = [key for group in GROUPS for key in group]
    assert sorted(listed) == sorted(KEYS)


class Seen(Exception):
    """Carries what a stub was given."""


@pytest.fixture(scope="module")
def config_of(run_config):
    return lambda changes=None: run_config(BASE | (changes if changes is not None else {}))


@pytest.fixture
def no_learner(monkeypatch):
    """Parts without a compiled learner."""

    def init(params, optimizer, actor=None):
        return LearnerState(params=params, opt_state=(), updates=0, actor=actor)

    monkeypatch.setattr(learner, "init", init)
    monkeypatch.setattr(learner, "make_step", lambda *_: None)


def build(config):
    return parts_lib.build(config, tasks.load(config.task), None)


def assert_each_changes(observe, config_of, group, base=None):
    """observe(config) → comparable; every change of the group gives another value than the base."""
    base = {} if base is None else base
    before = observe(config_of(base))
    same = [key for key, value in group.items() if observe(config_of(base | {key: value})) == before]
    assert not same, f"no effect of {same}"


def test_data(config_of, few_devices, no_learner):
    def observe(config):
        parts, _ = build(config)
        return parts.stream.prompts.tokens, parts.held_out.tokens

    assert_each_changes(observe, config_of, DATA)
    arithmetic = {"task.name": "arithmetic", "rollout.max_prompt_tokens": 40}
    assert_each_changes(observe, config_of, ARITHMETIC, arithmetic)


def test_chat(config_of, few_devices, no_learner, monkeypatch):
    """The lengths of the messages that the chat template is given."""

    def observe(config):
        return build(config)[0].stream.prompts.tokens

    monkeypatch.setattr(tokenizer.Tokenizer, "chat", lambda self, messages: [len(m["content"]) for m in messages])
    assert_each_changes(observe, config_of, CHAT)
    assert_each_changes(observe, config_of, SYSTEM, {"task.chat": True})


def test_data_files(config_of, few_devices, no_learner, tmp_path):
    rows = [
        {"prompt": f"{i}+1=", "other": f"{i}=", "answer": f"{i}\n#### {i + 2}", "wrong": "0", "topic": i % 2}
        for i in range(9)
    ]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name == "b" :]))

    def observe(config):
        task = tasks.load(config.task)
        parts, _ = parts_lib.build(config, task, None)
        graded = task.grade("so 2", {"answer": "2"})
        return task.train, task.eval, parts.stream.prompts.tokens, parts.tokenizer.stop, graded

    base = {"task.name": "file", "task.path": str(tmp_path / "a.jsonl"), "rollout.max_prompt_tokens": 40}
    changes = FILE | {"task.eval_path": str(tmp_path / "b.jsonl")}
    assert_each_changes(observe, config_of, changes, base)


def test_choices_and_rewards(config_of, tmp_path):
    rows = [{"question": f"{i}?", "choices": ["1", f"{i}"], "answer": 0, "A": f"{i}", "B": "1"} for i in range(2, 9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def observe(config):
        task = tasks.load(config.task)
        return task.train, [task.grade(text, {"answer": "A"}) for text in ("A", "so A", r"\boxed{A}")]

    base = {"task.name": "choice", "task.path": str(tmp_path / "a.jsonl")}
    assert_each_changes(observe, config_of, CHOICES, base)
    summed = {"task.grader": "choice+format+length", "task.length_max": 4}
    assert_each_changes(observe, config_of, REWARD, base | summed)


def test_generated_problems(config_of, monkeypatch):
    def drawn(mix, options, **_):
        raise Seen(options)

    def observe(config):
        with pytest.raises(Seen) as seen:
            tasks.load(config.task)
        return seen.value.args

    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(gym, "drawn", drawn)
    base = {"task.name": "reasoning_gym", "task.mix": "leg_counting", "task.train_prompts": 4, "task.eval_prompts": 2}
    assert_each_changes(observe, config_of, GENERATED, base)


def test_engine(config_of, few_devices, no_learner, monkeypatch):
    """What the engine is given by the first evaluation and by the first step."""

    def generate(model, params, prompts, *, key, on_finished, **options):
        plain = {name: np.asarray(value).tolist() for name, value in options.items() if name != "stop_ids"}
        raise Seen((prompts, jax.random.key_data(key).tolist(), plain))

    def call(stage, *args):
        with pytest.raises(Seen) as seen:
            stage(*args, metrics.Stages())
        return seen.value.args[0]

    def observe(config):
        parts, state = build(config)
        grants = train.draw(parts, state, metrics.Stages())
        return call(train.held_out, parts, state, None), call(step.collect, parts, state, grants)

    monkeypatch.setattr(sampling, "generate", generate)
    assert_each_changes(observe, config_of, ENGINE)


def test_filters_are_refused_in_training(config_of):
    for key, value in REFUSED.items():
        with pytest.raises(ConfigError, match=key):
            config_of({key: value})


def stated_rollouts() -> Rollouts:
    """Four prompts × four samples of one token, which is 7 · row mod 5."""
    row = np.arange(16)
    zeros = np.zeros((16, 1), np.int32)
    return Rollouts(
        tokens=(7 * row % 5)[:, None].astype(np.int32), logprobs=zeros.astype(np.float32),
        lengths=np.ones(16, np.int32), group=(row // 4).astype(np.int32), sample=(row % 4).astype(np.int32),
        truncated=row % 3 == 0, top_ids=zeros[..., None][..., :0], top_logprobs=zeros[..., None][..., :0],
    )  # fmt: skip


def test_selection(config_of, few_devices, no_learner):
    values = np.array([0, 1, 0.5, 0, 1, 1, 0, 0.25, 0, 0, 0, 1, 0.5, 0.4, 0.3, 1], np.float32)

    def observe(config):
        kept = step.select(build(config)[0], 0, stated_rollouts(), 4, values)
        return kept.indices.tolist(), kept.kept.tolist(), kept.advantages.tolist()

    assert_each_changes(observe, config_of, SELECTION)


def test_shuffled_rewards(config_of, few_devices, no_learner, monkeypatch):
    class Scorer:
        def __init__(self, *_):
            pass

        def result(self, num_rows):
            values = np.arange(num_rows, dtype=np.float32)
            return rewards.Scores(rewards=values, unscorable=0, errors=0, timeouts=0, first_error=None)

    def select(parts, at, rollouts, num_prompts, rewards_R):
        raise Seen(rewards_R.tolist())

    monkeypatch.setattr(rewards, "StreamingScorer", Scorer)
    monkeypatch.setattr(sampling, "generate", lambda *_, **__: stated_rollouts())
    monkeypatch.setattr(step, "select", select)
    got = {}
    for shuffle in (False, True):
        parts, state = build(config_of({"task.shuffle_rewards": shuffle}))
        grants = train.draw(parts, state, metrics.Stages())
        experience = step.collect(parts, state, grants, metrics.Stages())
        with pytest.raises(Seen) as seen:
            step.train_step(parts, state, experience, metrics.Stages())
        got[shuffle] = seen.value.args[0]
    assert got[False] == list(range(16)) != got[True]
    assert sorted(got[True]) == got[False]


def test_allocation(config_of):
    def observe(config):
        return budget.from_config(config, 11)

    assert_each_changes(observe, config_of, ALLOCATION, {"budget.rule": "cero"})


def test_program(softmax_model, tiny_checkpoint, config_of, few_devices, no_learner, make_batch, monkeypatch):
    """The traced learner step of what parts.build wires: loss, optimizer and model are parts of the program."""
    batch, z = make_batch(P=4, K=3, S=6, T=4), {"z": jnp.zeros(32)}

    def make_step(settings, optimizer, state, actor_optimizer):
        return settings, optimizer, actor_optimizer

    def small(optimizer, actor=None):
        zero = jnp.zeros((), jnp.int32)
        return LearnerState(params=z, opt_state=optimizer.init(z), updates=zero, actor=actor)

    def observe(config):
        parts, state = build(config)
        settings, optimizer, actor_optimizer = parts.step
        actor = small(actor_optimizer) if config.actor.path else None
        whole = functools.partial(
            learner.train_step,
            settings=dataclasses.replace(settings, model=softmax_model, actor_model=softmax_model),
            optimizer=optimizer,
            actor_optimizer=actor_optimizer,
        )
        reference = None if parts.reference is None else z
        kind = settings.model, jax.tree.leaves(state.learner.params)[0].dtype, config.loss.kl_coef > 0
        return kind, str(jax.make_jaxpr(whole)(small(optimizer, actor), None, batch, reference, jax.random.key(0)))

    monkeypatch.setattr(learner, "make_step", make_step)
    assert_each_changes(observe, config_of, PROGRAM)
    jackpot = {"loss.correction": "none", "jackpot.rule": "obrs", "actor.path": tiny_checkpoint}
    assert_each_changes(observe, config_of, JACKPOT, jackpot | {"jackpot.target": "new"})
    assert_each_changes(observe, config_of, EXACT, jackpot)
    assert_each_changes(observe, config_of, LORA, {"lora.rank": 2})


def test_the_actor_makes_the_rollouts(config_of, few_devices, no_learner, monkeypatch):
    """The parameters that the engine is given, by their shapes and types."""

    def generate(model, params, *_, **__):
        raise Seen(jax.tree.map(lambda p: (p.shape, str(p.dtype)), jax.tree.leaves(params)))

    def observe(config):
        parts, state = build(config)
        grants = train.draw(parts, state, metrics.Stages())
        with pytest.raises(Seen) as seen:
            step.collect(parts, state, grants, metrics.Stages())
        return seen.value.args[0]

    monkeypatch.setattr(sampling, "generate", generate)
    keys = ("actor.path", "actor.dtype")
    assert_each_changes(observe, config_of, {key: ALONE[key] for key in keys})


def test_overlong_rewards_and_rounds(config_of):
    seen = step.Experience(
        prompts=(), rollouts=dataclasses.replace(stated_rollouts(), lengths=np.arange(16) % 5), rewards=np.zeros(16),
        budget=(), draws=0, rounds=1, lines={},
    )  # fmt: skip
    _, _, lowered = step.informative(seen, config_of({"advantage.overlong_buffer": 2}))
    np.testing.assert_array_equal(lowered, [0, 0, 0, -0.5, -1] * 3 + [0])
    assert not step.informative(seen, config_of())[2].any()


def test_mesh(config_of, few_devices, no_learner):
    def observe(config):
        parts, state = build(config)
        return dict(parts.mesh.shape), len(jax.tree.leaves(state.learner.params)[0].sharding.device_set)

    assert_each_changes(observe, config_of, MESH)


def test_rollouts_apart(config_of, few_devices, no_learner, monkeypatch):
    """Meshes, and whether the first state has weights of its own for the rollouts."""
    monkeypatch.setattr("rljax.sharding.apart", lambda count: (jax.devices()[:1], jax.devices()[1 : 1 + count]))

    def observe(config):
        parts, state = build(config)
        return dict(parts.rollout_mesh.shape), parts.rollout_mesh == parts.mesh, state.behaviour is None

    alone = {"mesh.rollout_devices": APART["mesh.rollout_devices"]}
    assert_each_changes(observe, config_of, alone | {"rollout.staleness": APART["rollout.staleness"]})
    assert_each_changes(observe, config_of, {"mesh.rollout_tensor": APART["mesh.rollout_tensor"]}, alone)


def test_hosts(config_of, monkeypatch):
    def initialize(**options):
        raise Seen(options)

    def observe(config):
        with pytest.raises(hosts.HostsError) as seen:
            hosts.connect(config.hosts)
        return seen.value.__cause__.args[0]

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    explicit = {"hosts.coordinator": "here:1", "hosts.count": 2}
    assert_each_changes(observe, config_of, {k: v for k, v in HOSTS.items() if k != "hosts.cluster"}, explicit)
    assert observe(config_of({"hosts.cluster": "slurm"}))["cluster_detection_method"] == "slurm"


def test_pool(config_of, monkeypatch, tmp_path):
    def pool(grade, **options):
        raise Seen(options)

    def observe(config):
        with pytest.raises(Seen) as seen:
            train.run(config, tmp_path)
        return seen.value.args[0]

    monkeypatch.setattr(rewards, "RewardPool", pool)
    assert_each_changes(observe, config_of, POOL)


class Wandb:
    """A run of Weights & Biases that keeps nothing."""

    def __init__(self, project):
        self.id = project

    def log(self, values, step):
        pass

    def finish(self):
        pass


def test_run_folder(config_of, few_devices, no_learner, monkeypatch, tmp_path):
    """The loop's own part, on steps that do nothing: which steps are evaluated and kept, and the name."""

    def collect(parts, state, grants, stages):
        with stages("rollout"):
            rows = range(int(grants.counts.sum()))
            return step.Experience(
                prompts=grants.prompts, rollouts=rows, rewards=None, budget=grants.state, draws=grants.draws, rounds=1,
                lines={},
            )  # fmt: skip

    def train_step(parts, state, seen, stages):
        line = {"rollouts/tokens": 1, "train/loss": 0.0, "train/grad_norm": 1.0}
        return step.counted(state, seen), line, None

    def held_out(parts, state, workdir, stages):
        entry = {"step": state.step, "accuracy": 0.5, "avg_at_k": 0.5}
        totals = state.totals | {"eval": {"first": entry, "last": entry, "best": entry}}
        return dataclasses.replace(state, totals=totals), {"eval/accuracy": 0.5}

    def build_on_host(*args):
        parts, state = real(*args)
        plain = LearnerState(params={"w": np.ones(1)}, opt_state=(), updates=np.zeros(()))
        return parts, dataclasses.replace(state, learner=plain)

    real = parts_lib.build
    monkeypatch.setattr(parts_lib, "build", build_on_host)
    monkeypatch.setattr("rljax.ahead.collect", collect)
    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(train, "held_out", held_out)
    monkeypatch.setattr(train, "export", lambda *_: None)
    monkeypatch.setattr(records, "of_prompts", lambda _: {"prompts": []})
    monkeypatch.setattr(records, "of_rollouts", lambda *_: [{"prompt": "", "tokens": [], "reward": 0.0, "kept": True}])
    monkeypatch.setattr(rewards, "RewardPool", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: Wandb(options["project"])))

    def observe(config):
        observe.runs += 1
        folder = tmp_path / str(observe.runs)
        (folder / "model").mkdir(parents=True)
        train.run(config, folder)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = sorted(int(p.name) for p in (folder / "checkpoints").iterdir())
        name = json.loads((folder / "summary.json").read_text())["name"]
        sampled = [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()]
        evaluated = [x["step"] for x in lines if "eval/accuracy" in x]
        return evaluated, steps, name, sampled, (folder / "wandb.json").exists()

    observe.runs = 0
    assert observe(config_of({"checkpoint.every": 2})) == ([0, 2, 4, 6], [4, 6], "grpo", [1, 6], False)
    assert observe(config_of({"checkpoint.every": 0, "eval.every": 0})) == ([0, 6], [6], "grpo", [1, 6], False)
    assert_each_changes(observe, config_of, RUN, {"checkpoint.every": 2})


def test_tasks_of_an_evaluation(config_of):
    """Whole files, by the fields and graders of their names; what arithmetic reads is not theirs."""
    assert evaluated(config_of()) == [config_of()]
    own = config_of({"eval.tasks": ALONE["eval.tasks"], "task.chat": True, "task.mix": "add1:1"})
    found = [config.task for config in evaluated(own)]
    assert [(t.name, t.eval_path, t.eval_prompts, t.path, t.mix, t.chat) for t in found] == [
        ("gsm8k", "a.jsonl", 0, "", "", True), ("file", "b.json", 0, "", "", True)
    ]  # fmt: skip


@pytest.mark.parametrize("name, platform", [("splash", "tpu"), ("cudnn", "gpu")])
def test_attention_kernels_need_their_device(config_of, few_devices, no_learner, name, platform):
    changes = {"model.attention": name, "model.compute_dtype": "bfloat16"}
    with pytest.raises(ValueError, match=f"{name}.*runs on {platform} alone"):
        build(config_of(changes))


def test_model_path(config_of, few_devices, no_learner):
    parts, _ = build(config_of())
    assert parts.model.config.hidden_size == 16
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build(config_of({"model.path": ALONE["model.path"]}))

"""Three steps of the loop on every split of 1, 2, 4 and 8 devices over the mesh: the same run.

The slow suite has some of the splits; pytest -m "slow or exhaustive" tests/splits_test.py all 19, in about ten minutes.
"""

import dataclasses
import functools
import itertools
import json
from typing import Any

import jax
import numpy as np
import optax
import pytest

from launch import make_tiny
from rljax import metrics, parts, rewards, sampling, sharding, step, tasks, train
from rljax.models import hf
from rljax.models.transformer import Model

pytestmark = pytest.mark.usefixtures("few_devices")

# (data, fsdp, tensor) of 2, 4 and 8 devices; (1, 1, 1) is what they are held against.
SPLITS = [split for split in itertools.product((1, 2, 4, 8), repeat=3) if 1 < np.prod(split) <= 8]
USUAL = [(2, 1, 1), (1, 4, 1), (1, 1, 8), (1, 2, 4), (2, 2, 2)]
KV_HEADS = 4
POLICY = {  # CERO's grants and PODS' rows
    "budget.rule": "cero", "budget.rollouts": 144, "budget.epochs": 4, "cero.step_theta": 0.02, "cero.step_mu": 0.02,
    "pods.rule": "max_variance", "pods.keep": 2, "rollout.prompts": 8, "rollout.lanes": 8, "task.train_prompts": 12,
    "model.remat": "none",
}  # fmt: skip
JACKPOT = {"jackpot.rule": "obrs", "jackpot.table": "sampler", "jackpot.top_k": 4}


@pytest.fixture(scope="module")
def models(make_config, tmp_path_factory):
    """model.path and actor.path: 8 heads that share 4 keys, which 8 devices along the tensor axis do not divide."""
    folders = {}
    for seed, (key, layers) in enumerate({"model.path": 2, "actor.path": 1}.items()):
        folder = tmp_path_factory.mktemp("model") / "random"
        heads = {"num_heads": 8, "num_kv_heads": KV_HEADS, "head_dim": 4}
        model = Model(make_config(vocab_size=make_tiny.VOCAB, num_layers=layers, **heads))
        params = jax.jit(model.init)(jax.random.key(seed))
        hf.save(folder, model, params | {"embed": 20 * params["embed"]})
        make_tiny.make_tokenizer().save_pretrained(folder)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, *range(60)]}))
        folders[key] = str(folder)
    return folders


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What three steps made, on the host, and how it lay on the devices.

    counts: rollouts of each prompt. draws: prompts drawn, those granted none included. accepted: Jackpot's acceptance.
    gradient (of the first step), before, after: of the policy, and of the actor where there is one.
    learner, batch, pools: abstract arrays with their shardings; of a pool that before a segment, and that after it.
    """

    tokens: list
    rewards: list
    counts: list
    draws: int
    kept: list
    accepted: list
    gradient: list
    before: list
    after: list
    learner: Any
    batch: Any
    pools: list


def copied(tree):
    return jax.tree.map(np.array, tree)  # a view's buffer would be donated


def placed(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


@pytest.fixture(scope="module")
def play(run_config, models):
    """play(split, actor): the Run on a mesh of (data, fsdp, tensor) devices, made once."""
    policy = POLICY | {"model.path": models["model.path"]}
    config, load = run_config(policy), parts.load_model
    task = tasks.load(config.task)

    @functools.cache
    def on_host(path):
        model, params = load(config, sharding.single_device_mesh(), path)
        return model, copied(params)

    def load_once(_, mesh, path):  # reading them compiles a program or two a parameter
        model, params = on_host(path)
        where = sharding.params_shardings(mesh, model.axes(), model.abstract_params())
        return model, jax.device_put(params, where)

    with (
        pytest.MonkeyPatch.context() as patch,
        rewards.RewardPool(task.grade, **dataclasses.asdict(config.rewards)) as pool,
    ):
        patch.setattr(parts, "load_model", load_once)

        @functools.cache
        def run(split, actor):
            axes = dict(zip(("mesh.data", "mesh.fsdp", "mesh.tensor"), split, strict=True))
            changes = policy | axes | (JACKPOT | models if actor else {})
            made, state = parts.build(run_config(changes), task, pool)
            return three_steps(made, state)

        yield run


def three_steps(made: parts.Parts, state) -> Run:
    stages, traces, accepted, gradient, pools, batches = metrics.Stages(), [], [], None, [], []
    decode = sampling._decode_segment

    def decoding(params, pool, *rest, **how):
        given = placed(pool)
        out = decode(params, pool, *rest, **how)
        pools.append((given, placed(out)))
        return out

    def learning(learner, batch, *rest):
        batches.append(placed(batch))
        return made.step(learner, batch, *rest)

    def both(take):
        return copied([take(learner) for learner in (state.learner, state.learner.actor) if learner is not None])

    for stream in (parts.SAMPLES, parts.SELECTION, parts.ACCEPTANCE):
        made.key(stream)  # made at its first use, and kept
    watched = dataclasses.replace(made, step=learning)
    before = both(lambda learner: learner.params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_decode_segment", decoding)
        for _ in range(3):
            # What moves between host and devices, or from one device to others, is asked for by name.
            with jax.transfer_guard("disallow"):
                grants = train.draw(made, state, stages)
                seen = step.collect(watched, state, grants, stages)
                state, line, trace = step.train_step(watched, state, seen, stages)
            traces.append(trace)
            accepted.append(line.get("jackpot/acceptance", 1.0))
            if gradient is None:  # Adam's first moment is (1 - b1) times the first gradient
                gradient = both(lambda learner: optax.tree.get(learner.opt_state, "mu"))
    return Run(
        tokens=[trace.rollouts.tokens for trace in traces],
        rewards=[trace.rewards for trace in traces],
        counts=[np.bincount(trace.rollouts.group) for trace in traces],
        draws=state.draws,
        kept=[trace.place for trace in traces],
        accepted=accepted,
        gradient=gradient,
        before=before,
        after=both(lambda learner: learner.params),
        learner=placed(state.learner),
        batch=batches[-1],
        pools=pools,
    )


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


def largest(tree) -> float:
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


ACTOR = pytest.mark.parametrize("actor", [pytest.param(actor, marks=pytest.mark.slow) for actor in (False, True)])


@ACTOR
def test_every_method_has_its_part_in_it(play, actor):
    """Else splits would agree on nothing: prompts granted none, rows left out, tokens rejected, models that learn."""
    alone = play((1, 1, 1), actor)
    assert alone.draws > sum(map(len, alone.counts)) == 24 and set(np.concatenate(alone.rewards)) == {0, 1}
    assert all((place[:, 0] < 0).any() and (place[:, 0] >= 0).any() for place in alone.kept)
    assert all(0.2 < share < 0.999 if actor else share == 1 for share in alone.accepted)
    assert len(alone.gradient) == 1 + actor and all(norm(gradient) > 1e-3 for gradient in alone.gradient)


@pytest.mark.parametrize(
    "split, actor",
    [
        pytest.param((2, 2, 2), False, marks=pytest.mark.slow),
        *(pytest.param(split, True, marks=pytest.mark.slow) for split in USUAL),
        *(pytest.param(split, True, marks=pytest.mark.exhaustive) for split in SPLITS if split not in USUAL),
    ],
    ids=str,
)
def test_no_split_changes_the_run(play, split, actor):
    run, alone = play(split, actor), play((1, 1, 1), actor)
    for name in ("tokens", "rewards", "counts", "kept"):
        for got, want in zip(getattr(run, name), getattr(alone, name), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=name)
    assert run.draws == alone.draws and run.accepted == pytest.approx(alone.accepted, rel=1e-6)
    for got, want in zip(run.gradient, alone.gradient, strict=True):
        far = largest(jax.tree.map(np.subtract, got, want)) / largest(want)
        print(split, "gradient", far)
        assert far <= 1e-5
    for before, got, want in zip(run.before, run.after, alone.after, strict=True):
        update, difference = (norm(jax.tree.map(np.subtract, want, other)) for other in (before, got))
        print(split, "parameters", difference / update)
        assert difference <= 1e-3 * update
    heads = KV_HEADS if split[2] > KV_HEADS else KV_HEADS // split[2]  # where they do not divide they are whole
    assert {part(pool.cache.k)[2] for pair in run.pools for pool in pair} == {heads}


def part(leaf) -> tuple[int, ...]:
    """The shape of what one device holds."""
    return leaf.sharding.shard_shape(leaf.shape)


def by_four(leaf) -> tuple[int, ...]:
    """Its shape with a quarter of its prompts; whole if it has no elements."""
    return (leaf.shape[0] // 4, *leaf.shape[1:]) if leaf.size else leaf.shape


@ACTOR
def test_what_lies_on_the_devices_is_split_by_the_table(play, actor):
    """On data 2 × fsdp 2 × tensor 2: prompts by 4, heads by 2, parameters by fsdp and tensor; moments as these."""
    run = play((2, 2, 2), actor)
    for leaf in jax.tree.leaves(run.batch):
        assert part(leaf) == by_four(leaf)
    assert run.batch.top_ids.shape[-1] == run.batch.top_logprobs.shape[-1] == 4 * actor
    learners = [run.learner, run.learner.actor][: 1 + actor]
    layers = [learner.params["layers"]["q"].shape[0] for learner in learners]
    for given, made in run.pools:
        assert part(given.cache.k) == part(given.cache.v) == (layers[-1], 2, 2, 4, 4, 4)  # L, lanes, KV, slots, C, D
        assert part(given.prefix.kv.k) == (layers[-1], 2, 2, 10, 4)
        for name in ("tokens", "logprobs", "top_ids", "top_logprobs", "active", "sample"):
            assert part(getattr(given, name)) == by_four(getattr(given, name)), name
        same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), given, made)
        assert all(jax.tree.leaves(same)), same
    for learner, count in zip(learners, layers, strict=True):
        assert part(learner.params["layers"]["q"]) == (count, 16 // 2, 32 // 2)
        assert part(learner.params["embed"]) == (make_tiny.VOCAB // 2, 16 // 2)
        where = jax.tree.map(lambda leaf: leaf.sharding, learner.params)
        for moment in ("mu", "nu"):
            held = optax.tree.get(learner.opt_state, moment)
            assert jax.tree.map(lambda leaf: leaf.sharding, held) == where

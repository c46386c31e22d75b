"""The engine: the same samples whatever the pool's layout, their distribution, and its limits and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from rljax import batching, drawing, sampling, sharding
from rljax.models import logits, logprobs
from rljax.types import Prompts

PROMPTS = [[5, 9, 2], [7], [11, 3, 4, 8, 1, 6], [2, 2], [30, 31, 0, 1]]
COUNTS = [3, 0, 5, 1, 4]
LIMITS = [8, 3, 8, 5, 8, 8, 1, 7, 2, 8, 8, 6, 4]
TEMPERATURES = [0.0, 1.0, 0.6, 1.3]
STOPS = (0, 30)  # 0 also fills what is past a row: lengths are recorded, not read off
KEY = jax.random.key(0)
forward = jax.jit(logits, static_argnums=0)

# A row waits for a slot, a lane for its next prompt, and segments that do not divide the limits let rows
# start at any column of the rings. Most tests use this one, since every other shape compiles again.
WAITING = {"lanes": 2, "slots": 2, "segment": 3, "prompt_capacity": 9}
LAYOUTS = {
    "waiting for slots and lanes": WAITING,
    "rings that grow while rows wait": WAITING | {"columns": 2},
    "one row at a time, step by step": {"lanes": 1, "slots": 1, "segment": 1, "prompt_capacity": 16},
}


@pytest.fixture(scope="module")
def lively(random_model):
    """The random model with an embedding large enough for its distributions to differ from uniform."""
    model, params = random_model
    return model, params | {"embed": 25 * params["embed"]}


@pytest.fixture(scope="module")
def sample(lively):
    """generate() on the shared shape, but for what the test changes."""

    def run(prompts=PROMPTS, **changes):
        settings = {
            "num_samples": 6, "max_new_tokens": 8, "key": KEY, "stop_ids": STOPS, "top_logprobs": 2,
        } | WAITING | changes  # fmt: skip
        return sampling.generate(*lively, prompts, **settings)

    return run


@pytest.fixture(scope="module")
def ragged(sample):
    """Counts, limits and temperatures that differ by row."""
    return functools.partial(sample, num_samples=COUNTS, max_new_tokens=LIMITS, temperature=TEMPERATURES)


@pytest.fixture(scope="module")
def at_once(ragged):
    return ragged(**dict.fromkeys(("lanes", "slots", "prompt_capacity")), segment=32)


def rows_of(rollouts):
    return [rollouts.tokens[r, : rollouts.lengths[r]].tolist() for r in range(len(rollouts))]


@functools.partial(jax.jit, static_argnums=0)
def learner_logprobs(model, params, batch, temperature):
    return logprobs.completion_logprobs(model, params, batch, temperature, 64)


def packed(prompts, rollouts, keep, width, mesh=None):
    """All rollouts as a TrainBatch of P prompts × keep rows."""
    P = len(prompts)
    counts = np.bincount(rollouts.group, minlength=P)
    kept = np.arange(keep) < counts[:, None]
    return batching.pack(
        Prompts(ids=np.arange(P), draws=np.arange(P), tokens=tuple(prompts), examples=({},) * P),
        rollouts,
        np.zeros((P, keep)),
        np.where(kept, np.arange(keep), 0),
        kept,
        num_prompts=P,
        max_prompt_tokens=60,
        max_new_tokens=width,
        mesh=sharding.single_device_mesh() if mesh is None else mesh,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_the_pool_changes_no_sample(ragged, at_once, layout):
    got = ragged(**LAYOUTS[layout])
    assert rows_of(got) == rows_of(at_once)
    for name in ("tokens", "lengths", "group", "sample", "truncated", "top_ids"):
        np.testing.assert_array_equal(getattr(got, name), getattr(at_once, name), err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(at_once, name), atol=5e-5, err_msg=name)


def test_rings_are_as_long_as_the_rows_need(sample, monkeypatch):
    """In segments of 3 steps a row of 8 tokens outgrows rings of 2 at once, and rings of 4 at its fourth token."""
    grown, real = [], sampling._grown

    def recording(pool, model, dtype, shape, mesh):
        grown.append(shape.columns)
        return real(pool, model, dtype, shape, mesh)

    monkeypatch.setattr(sampling, "_grown", recording)
    sample(max_new_tokens=2, columns=2)
    assert grown == []
    out = sample(max_new_tokens=[8] + [2] * 29, columns=2, stop_ids=())
    assert grown == [4, 8] and out.lengths.tolist() == [8] + [2] * 29


def test_rows_are_sorted_and_counted(at_once):
    np.testing.assert_array_equal(at_once.group, np.repeat(np.arange(5), COUNTS))
    np.testing.assert_array_equal(at_once.sample, [s for n in COUNTS for s in range(n)])


def test_rows_end_at_any_stop_id_or_at_their_limit(at_once):
    # The stop id belongs to the row; what stood after it is 0, and so is its log-prob.
    for r, row in enumerate(rows_of(at_once)):
        assert 1 <= len(row) <= LIMITS[r]
        assert not set(row[:-1]) & set(STOPS)
        if at_once.truncated[r]:
            assert len(row) == LIMITS[r] and row[-1] not in STOPS
        else:
            assert row[-1] in STOPS
        past = np.arange(8) >= len(row)
        assert (at_once.tokens[r, past] == 0).all() and (at_once.logprobs[r, past] == 0).all()
        assert (at_once.logprobs[r, ~past] < 0).all()
    assert at_once.truncated.any() and not at_once.truncated.all()


def test_every_stop_id_ends_rows_also_the_padding_id(sample):
    out = sample(temperature=1.3, num_samples=12)
    assert {row[-1] for row, cut in zip(rows_of(out), out.truncated, strict=True) if not cut} == set(STOPS)
    assert all(not set(row[:-1]) & set(STOPS) for row in rows_of(out))


def test_top_logprobs_are_the_most_likely_tokens(lively, at_once):
    model, params = lively
    for r, row in enumerate(rows_of(at_once)):
        temperature = TEMPERATURES[min(at_once.sample[r], 3)]
        n = len(row)
        top = at_once.top_logprobs[r, :n]
        assert (top[:, 0] >= top[:, 1]).all() and (top <= 0).all()
        if temperature == 0.0:
            np.testing.assert_array_equal(at_once.top_ids[r, :n, 0], row)
        for t, token in enumerate(row):
            if token in at_once.top_ids[r, t]:
                where = list(at_once.top_ids[r, t]).index(token)
                assert at_once.logprobs[r, t] == pytest.approx(top[t, where], abs=1e-6)
            else:
                assert at_once.logprobs[r, t] <= top[t, 1] + 1e-6
    full = np.zeros((1, 14), int)
    row = PROMPTS[2] + rows_of(at_once)[4]  # sample 1 of prompt 2, temperature 1
    full[0, : len(row)] = row
    want = jax.nn.log_softmax(forward(model, params, full))[0, len(PROMPTS[2]) - 1]
    np.testing.assert_allclose(at_once.top_logprobs[4, 0], np.sort(want)[::-1][:2], atol=1e-5)
    np.testing.assert_array_equal(at_once.top_ids[4, 0], np.argsort(-want)[:2])


def test_temperature_zero_is_the_argmax(lively, at_once):
    model, params = lively
    greedy = np.flatnonzero(at_once.sample == 0)
    rows = rows_of(at_once)
    full = np.zeros((len(greedy), 14), int)
    for i, r in enumerate(greedy):
        full[i, : len(PROMPTS[at_once.group[r]]) + len(rows[r])] = PROMPTS[at_once.group[r]] + rows[r]
    best = np.argmax(forward(model, params, full), axis=-1)
    for i, r in enumerate(greedy):
        start = len(PROMPTS[at_once.group[r]]) - 1
        assert best[i, start : start + len(rows[r])].tolist() == rows[r]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_sampler_and_learner_agree_on_log_probs(lively, sample, temperature):
    # Rows that wait for slots and lanes, so that prefixes are rebound and rings wrap around.
    out = sample(temperature=temperature)
    batch = packed(PROMPTS, out, 6, 8)
    ours = np.asarray(learner_logprobs(*lively, batch, jnp.float32(temperature)))
    gap = [
        abs(ours[g, s, t] - out.logprobs[r, t])
        for r, (g, s) in enumerate(zip(out.group, out.sample, strict=True))
        for t in range(out.lengths[r])
    ]
    assert len(gap) > 100 and np.mean(gap) <= 1e-5 and np.max(gap) <= 1e-4
    # Trained ids are the sampled ids: nothing decodes and encodes between.
    for r, (g, s) in enumerate(zip(out.group, out.sample, strict=True)):
        assert np.asarray(batch.tokens)[g, s, : out.lengths[r]].tolist() == rows_of(out)[r]


def test_the_draw_decides_the_random_stream(sample):
    def run(prompts, draws, key=KEY):
        out = sample(prompts, num_samples=4, draws=draws, key=key)
        return np.array(out.tokens).reshape(len(prompts), 4, 8)

    first = run([[5, 9], [5, 9], [7]], [4, 70_000, 6])
    assert (first[0] != first[1]).any(axis=-1).all()  # the same question drawn twice: fresh samples
    assert len({tuple(row) for row in first[0]}) == 4
    again = run([[1, 2, 3], [5, 9]], [0, 70_000])  # another batch, another lane: the same samples
    np.testing.assert_array_equal(again[1], first[1])
    assert (run([[5, 9], [5, 9], [7]], [4, 70_000, 6], jax.random.key(1)) != first).any()


def test_sampled_frequencies_are_the_softmax(lively):
    model, params = lively
    N, temperature = 4000, 0.8
    out = sampling.generate(
        *lively,
        [[5, 9, 2]],
        num_samples=N,
        max_new_tokens=1,
        key=KEY,
        temperature=temperature,
        lanes=1,
        slots=N,
    )
    logits = np.asarray(forward(model, params, np.array([[5, 9, 2]])))[0, -1]
    expected = N * np.asarray(jax.nn.softmax(logits / temperature))
    counts = np.bincount(out.tokens[:, 0], minlength=len(expected))
    often = expected >= 5
    assert often.sum() > 5
    statistic = np.sum((counts - expected)[often] ** 2 / expected[often])
    assert scipy.stats.chi2.sf(statistic, often.sum() - 1) > 1e-4
    np.testing.assert_allclose(out.logprobs[:, 0], np.log(expected / N)[out.tokens[:, 0]], atol=1e-5)


def test_filters_reach_the_sampler(lively):
    # Flat, middling and peaked distributions: each filter alone decides what stays of one of them.
    model, params = lively
    logits = np.asarray(forward(model, params, np.array([[5, 9]])))[0, -1]
    temperatures, filters = (10.0, 1.0, 0.5), {"top_k": 6, "top_p": 0.8, "min_p": 0.35}

    def staying(temperature, **filters):
        settings = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters
        return set(np.flatnonzero(np.isfinite(drawing.filter_logits(logits / temperature, **settings))))

    want = [staying(t, **filters) for t in temperatures]
    for name in filters:
        rest = {k: v for k, v in filters.items() if k != name}
        assert [staying(t, **rest) for t in temperatures] != want, f"{name} decides nothing here"
    out = sampling.generate(
        *lively, [[5, 9]], num_samples=900, max_new_tokens=1, key=KEY, lanes=1, slots=900,
        temperature=[temperatures[i // 300] for i in range(900)], **filters,
    )  # fmt: skip
    for i, stays in enumerate(want):
        assert set(out.tokens[300 * i : 300 * (i + 1), 0]) == stays
    for temperature, id, got in [
        (10.0, out.tokens[0, 0], out.logprobs[0, 0]),
        (0.5, out.tokens[-1, 0], out.logprobs[-1, 0]),
    ]:
        stays = np.array(sorted(want[temperatures.index(temperature)]))
        total = np.log(np.exp(logits[stays] / temperature).sum())
        assert got == pytest.approx(logits[id] / temperature - total, abs=1e-4)


def test_rows_are_handed_over_once_as_they_end(ragged, at_once):
    seen = []

    def on_finished(rollouts, rows):
        seen.append({int(r): rollouts.tokens[r, : rollouts.lengths[r]].tolist() for r in rows})

    ragged(on_finished=on_finished)
    assert len(seen) > 1 and sum(map(len, seen)) == len(at_once)
    assert [dict(sorted((k, v) for part in seen for k, v in part.items()))[r] for r in range(13)] == rows_of(at_once)


def test_nothing_to_sample(lively):
    for prompts, counts in (([], 3), ([[1], [2]], [0, 0])):
        out = sampling.generate(*lively, prompts, num_samples=counts, max_new_tokens=4, key=KEY)
        assert len(out) == 0 and out.tokens.shape == (0, 4)
    assert len(sampling.generate(*lively, [[1]], num_samples=0, max_new_tokens=[], key=KEY)) == 0


@pytest.mark.parametrize(
    "change, told",
    [
        ({"prompts": [[1], []]}, "prompt 1 has no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"lanes": 0}, "lanes=0"),
        ({"slots": 0}, "slots=0"),
        ({"segment": 0}, "segment=0"),
        ({"num_samples": -1}, "num_samples=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_logprobs": 33}, "top_logprobs=33"),
        ({"draws": [0]}, "1 draws for 2 prompts"),
    ],
)
def test_bad_sizes_are_told(lively, change, told):
    arguments = {"prompts": [[1], [2]], "num_samples": 1, "max_new_tokens": 4, "key": KEY} | change
    with pytest.raises(ValueError, match=told):
        sampling.generate(*lively, **arguments)


def test_lanes_must_divide_over_the_devices_that_split_prompts(lively):
    model, params = lively
    mesh = sharding.make_mesh(data=4, fsdp=1, tensor=2)
    spread = jax.device_put(params, sharding.replicated(mesh))
    with pytest.raises(ValueError, match="lanes=3 does not divide over the 4 devices"):
        sampling.generate(model, spread, [[1]], num_samples=1, max_new_tokens=4, key=KEY, lanes=3)


COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


def test_no_more_compilations_than_declared_buckets(lively):
    # faults.md 19: prompts of 5 to 60 tokens, 1 to 16 kept rows; sampling, packing, learning.
    model, params = lively
    rng = np.random.default_rng(0)

    @jax.jit
    def learn(params, batch):
        return logprobs.completion_logprobs(model, params, batch, 1.0, 1024)

    engine = (sampling._decode_segment, sampling._bind)
    before = [f._cache_size() for f in engine]

    def step(lengths, counts):
        prompts = [rng.integers(0, 32, n).tolist() for n in lengths]
        out = sampling.generate(
            model, params, prompts, num_samples=counts, max_new_tokens=4, key=KEY, stop_ids=STOPS,
            lanes=4, slots=8, segment=4, prompt_capacity=60,
        )  # fmt: skip
        jax.block_until_ready(learn(params, packed(prompts, out, 16, 4)))

    # Prompts up to 32 tokens, and up to the limit of 60: two buckets. Prefill binds four lanes or one.
    step([5, 32, 7, 8, 9, 6], [16, 1, 2, 3, 1, 1])
    step([33, 5, 60, 8, 9, 6], [1, 16, 9, 1, 1, 1])
    assert [f._cache_size() - b for f, b in zip(engine, before, strict=True)] == [1, 2]
    assert learn._cache_size() == 2
    warm = len(COMPILED)
    assert warm > 0
    for _ in range(5):
        step(rng.integers(5, 61, 6), rng.integers(1, 17, 6))
    assert learn._cache_size() == 2 and len(COMPILED) == warm

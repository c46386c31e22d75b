"""Every public function of rljax.algos on awkward input: plainly, jitted and vmapped, with its gradients.

To add an algorithm, add a row to ALGORITHMS: a function of a ``Batch`` that returns any tree of arrays. Each row
runs on every batch of BATCHES, and its outputs are differentiated by every float array of the batch. A public
function that no row calls by itself fails the suite.
"""

import dataclasses
import functools
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax.algos
from rljax.algos import advantages, cero, distillation, down_sampling, kl, losses, masked, obrs


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["floats", "tokens", "mask", "accept", "valid", "key", "lam"],
    meta_fields=["keep"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """P prompts × n rollouts × T tokens over V words.

    floats: logits, old_logits, actor_logits [P, n, T, V], rewards [P, n], weights [P, n, T].
    tokens: int32[P, n, T]. mask, accept: bool[P, n, T]. valid: bool[P, n]. lam: λ of OBRS, η of CERO.
    keep: m of n.
    """

    floats: dict
    tokens: jax.Array
    mask: jax.Array
    accept: jax.Array
    valid: jax.Array
    key: jax.Array
    lam: jax.Array
    keep: int

    def __getattr__(self, name):
        if name == "floats" or name not in self.floats:
            raise AttributeError(name)
        return self.floats[name]

    @property
    def rows(self):
        """(rewards [R], the prompt of each int32[R], P): the rollouts of all prompts in one row."""
        P, n = self.rewards.shape
        return self.rewards.ravel(), jnp.repeat(jnp.arange(P), n), P

    def log_softmax(self, name):
        return jax.nn.log_softmax(masked.as_float(self.floats[name]), axis=-1)

    def logprobs(self, name):
        """float[P, n, T] of the tokens under softmax of the named logits."""
        logp = jax.nn.log_softmax(self.floats[name], axis=-1)
        return jnp.take_along_axis(logp, self.tokens[..., None], axis=-1)[..., 0]

    def advantages(self):
        return advantages.group_advantages(*self.rows, valid=self.valid.ravel()).reshape(self.rewards.shape)


def batch(P=2, n=4, keep=2, dtype=np.float32, **changed):
    """A well-behaved batch but for the arrays in `changed`; made by numpy, which compiles nothing."""
    T, V = 3, 5
    rng = np.random.default_rng(0)
    floats = {name: rng.normal(size=(P, n, T, V)) for name in ("logits", "old_logits", "actor_logits")}
    floats["rewards"] = np.tile([0.0, 1.0], (P, n // 2))
    floats["weights"] = rng.uniform(size=(P, n, T))
    other = dict(
        tokens=rng.integers(V, size=(P, n, T)).astype(np.int32),
        mask=np.arange(T) < rng.integers(1, T + 1, size=(P, n, 1)),
        accept=rng.uniform(size=(P, n, T)) < 0.7,
        valid=np.ones((P, n), bool),
        key=jax.random.key(1),
        lam=np.float32(0.8),
        keep=keep,
    )
    floats = {name: np.asarray(changed.pop(name, x), dtype) for name, x in floats.items()}
    return Batch(floats=floats, **(other | changed))


PLAIN = batch()
LOGITS = ("logits", "old_logits", "actor_logits")
NO_TOKEN, NO_ROW = np.zeros((2, 4, 3), bool), np.zeros((2, 4), bool)


def scaled(factor):
    return {name: PLAIN.floats[name] * factor for name in LOGITS}


def impossible(words, *names):
    """The named logits, with these words at probability 0."""
    return {name: np.where(np.isin(np.arange(5), words), -np.inf, PLAIN.floats[name]) for name in names}


BATCHES = {
    "plain": PLAIN,
    "empty mask": batch(mask=NO_TOKEN),
    "all rejected": batch(accept=NO_TOKEN),
    "all rows invalid": batch(valid=NO_ROW),
    "equal rewards": batch(rewards=np.full((2, 4), 0.1)),
    "NaN reward": batch(rewards=[[0, np.nan, 1, 1], [np.nan] * 4]),
    "huge rewards": batch(rewards=PLAIN.rewards * 1e15),
    "NaN behind the mask": batch(weights=np.where(PLAIN.mask & PLAIN.accept, PLAIN.weights, np.nan)),
    "far policies": batch(**scaled(100.0)),
    "the same policy": batch(old_logits=PLAIN.logits, actor_logits=PLAIN.logits),
    "a word of probability 0 under old": batch(**impossible([0], "old_logits")),
    "a word of probability 0 under new": batch(**impossible([0], "logits")),
    "a word of probability 0 under the actor": batch(**impossible([0], "actor_logits")),
    "a word of probability 0 under all": batch(**impossible([0], *LOGITS)),
    "no word in common": batch(**impossible([0, 1], "logits"), **impossible([2, 3, 4], "actor_logits")),
    "λ, η = 1e-20": batch(lam=np.float32(1e-20)),
    "λ, η = 1e20": batch(lam=np.float32(1e20)),
    # One shape apart from that of the others, to be compiled once more.
    "bfloat16, one prompt, n = 2, m = n": batch(P=1, n=2, dtype=jnp.bfloat16),
}


# ---------------------------------------------------------------- the rows


def policy(aggregate, **settings):
    def row(b):
        return losses.policy_loss(
            b.logprobs("logits"),
            b.logprobs("old_logits"),
            b.advantages(),
            b.mask,
            clip_low=0.2,
            clip_high=0.28,
            aggregate=aggregate,
            max_length=8,
            weights=b.weights,
            accept=b.accept,
            **settings,
        )

    return row


def kl_losses(b):
    f = functools.partial(kl.kl_loss, b.logprobs("logits"), b.logprobs("old_logits"), b.mask)
    return [f(kind=kind, accept=b.accept, weights=b.weights) for kind in kl.ESTIMATORS]


def estimates(b):
    """These know of no mask."""
    counts = b.mask & b.accept & jnp.isfinite(b.logprobs("logits"))
    new = masked.fill(b.logprobs("logits"), counts)
    return [kl.kl_estimate(new, masked.fill(b.weights, counts), kind) for kind in kl.ESTIMATORS]


def importance(b):
    new, sampler = b.logprobs("logits"), b.logprobs("actor_logits")
    f = functools.partial(losses.importance_weights, new, sampler, b.mask, low=0.5, high=2.0)
    return {f"{level} {mode}": f(level=level, mode=mode) for level in losses.LEVELS for mode in losses.MODES}


def all_advantages(b):
    f = functools.partial(advantages.group_advantages, *b.rows, valid=b.valid.ravel())
    names = [(x, y) for x in advantages.BASELINES for y in advantages.SCALES]
    return {f"{x} {y}": f(baseline=x, scale=y) for x, y in names}, advantages.group_statistics(*b.rows)


def rules(b):
    f = functools.partial(down_sampling.down_sample, b.rewards, valid=b.valid, key=b.key)
    every = f(b.rewards.shape[1], rule="all")
    return every, {rule: f(b.keep, rule=rule) for rule in down_sampling.RULES if rule != "all"}


def pods(b):
    indices, kept = down_sampling.down_sample(b.rewards, b.keep, rule="max_variance", valid=b.valid)
    f = functools.partial(down_sampling.kept_advantages, b.rewards, indices, kept, valid=b.valid)
    metrics = down_sampling.reward_metrics(b.rewards, indices, kept, valid=b.valid)
    taken = masked.fill(down_sampling.take_rows(b.rewards, indices), kept)
    return {over: f(normalize_over=over) for over in down_sampling.NORMALIZE_OVER}, metrics, taken


def aggregated(b):
    f = functools.partial(losses.aggregate_loss, b.weights, b.mask, accept=b.accept, max_length=8)
    count = functools.partial(losses.loss_denominator, b.mask, b.accept, max_length=8)
    values = losses.row_values(b.weights, b.logprobs("logits"), losses.counted_tokens(b.mask, b.accept))
    return {a: (f(aggregate=a), count(aggregate=a)) for a in losses.AGGREGATES}, values


def reductions(b):
    masked.check_same_shape(weights=b.weights, mask=b.mask)
    counts = b.mask & b.accept
    maximum = masked.choose({"max": masked.masked_max}, "max", "reduction")
    part = {"sum": masked.masked_sum(b.weights, counts), "top_max": maximum(b.weights, counts)}
    means = masked.masked_mean(b.weights, counts, axis=-1), maximum(b.weights, counts, axis=-1)
    per_row = masked.safe_divide(masked.fill(b.weights, counts).sum(-1), masked.masked_count(counts, axis=-1))
    return masked.merge_sums([part, part]), means, per_row, masked.bounded_exp(b.logprobs("logits") + 1)


def prices(b):
    """A step of CERO, every formula of its state, and two prompts that nothing can be learned from."""
    rewards, ids, P = b.rows
    n = b.rewards.shape[1]
    config = cero.Cero(P * n, P, epochs=2, n_max=n, discount=0.5)
    state = cero.init(config)
    drawn = {"drawn_ids": jnp.arange(P), "drawn_counts": cero.allocate(config, state, jnp.arange(P))}
    state = cero.update(config, state, ids, rewards, b.valid.ravel(), **drawn)
    q = jnp.concatenate([cero.informativeness(state), cero.beta_variance(jnp.array([1e30, 1.0]), 1e-30)])
    theta, eta, cap = jnp.concatenate([state.theta, jnp.zeros(2)]), b.lam, 2 * n
    best = cero.offline_allocation(q, eta, config.budget, cap)
    curves = cero.utility(q, eta, best), cero.best_response(theta, q, eta, cap), cero.theta_box(config, q)
    dual = cero.dual_objective(theta, state.mu, q, eta, budget=config.budget, epochs=2, n_max=n)
    ratio = functools.partial(cero.effective_prompt_ratio, *b.rows, b.valid.ravel())
    return state, drawn, best, curves, dual, ratio(), ratio(samples=2, key=b.key), cero.metrics(config, state)


def probabilities(b):
    return jnp.exp(b.log_softmax("logits")), jnp.exp(b.log_softmax("actor_logits"))


def rejection(b):
    p, q = probabilities(b)
    ids, mask = obrs.candidates(p, q, 3)
    some = obrs.normaliser(*(jnp.take_along_axis(x, ids, axis=-1) for x in (p, q)), b.lam, mask=mask)
    z = obrs.normaliser(p, q, b.lam)
    return obrs.acceptance(p, q, b.lam), z, some, obrs.accepted_distribution(p, q, b.lam), ids, mask


def budgets(b):
    return obrs.lambda_for_budget(*probabilities(b), 0.5, mask=b.mask)


def jackpot(b):
    new, actor, old = (b.logprobs(name) for name in ("logits", "actor_logits", "old_logits"))
    rows = jnp.arange(b.valid.size)
    uniforms = obrs.token_uniforms(b.key, rows, rows, b.mask.shape[-1]).reshape(b.mask.shape)
    accept = obrs.acceptance_mask(uniforms, new, actor, b.lam, b.mask)
    z = obrs.normaliser(*probabilities(b), b.lam)
    kappa = obrs.kappa(accept.sum(), masked.masked_sum(z, b.mask))
    out = {"accept": accept, "kappa": kappa}
    for normalise in obrs.NORMALISE:
        how = {"z": kappa * z, "old_logprobs": old, "c1": 3.0, "normalise": normalise}
        w = obrs.jackpot_weights(new, actor, b.lam, **how)
        unbounded = obrs.weight_sums(new, actor, b.lam, b.accept, b.mask, **how | {"z": z, "c1": jnp.inf})
        sums = obrs.weight_sums(new, actor, b.lam, accept, b.mask, **how)
        out[normalise] = w, sums, unbounded, obrs.summarise(sums), obrs.summarise(unbounded)
    return out


def states(b):
    flat = (b.floats[name].reshape(-1, 5) for name in ("logits", "actor_logits"))
    found = obrs.states(*flat, b.tokens.ravel(), b.lam, k=5)
    sums = obrs.state_sums(found.z, found.kl_before, found.kl_after, b.mask.ravel())
    # What is impossible has the log-probability -inf, rightly.
    on = [jnp.exp(x) for x in (found.target_on, found.actor_on, found.target_logprobs, found.actor_logprobs)]
    exact = obrs.divergences(b.log_softmax("logits"), b.log_softmax("actor_logits"), b.lam)
    return found.z, found.kl_before, found.kl_after, on, sums, obrs.summarise(sums), exact


def divergence(direction):
    def row(b):
        actor, policy = (b.floats[name].reshape(-1, 5) for name in ("actor_logits", "logits"))
        chunks = distillation.token_kl(
            lambda x: x, lambda x: x, actor, policy, b.mask.ravel(), direction=direction, chunk=7
        )
        plain = distillation.scan_chunks(lambda x: distillation.kl(*x, direction=direction), (actor, policy), chunk=100)
        return chunks, plain, distillation.kl(b.actor_logits, b.logits, direction=direction)

    return row


ALGORITHMS = {
    "GRPO": policy("sequence"),
    "Dr. GRPO": policy("constant"),
    "DAPO with a dual clip": policy("token", dual_clip=3.0),
    "GSPO": policy("sequence", ratio="sequence"),
    "CISPO": policy("token", objective="cispo"),
    "KL loss": kl_losses,
    "TIS and MIS": importance,
    "advantages": all_advantages,
    "PODS rules": rules,
    "PODS": pods,
    "aggregates": aggregated,
    "masked": reductions,
    "entropy": lambda b: kl.entropy(b.logits),
    "KL estimates": estimates,
    "overlong penalty": lambda b: advantages.overlong_penalty(b.mask.sum(-1), max_length=3, buffer=2),
    "CERO": prices,
    "OBRS": rejection,
    "OBRS budget": budgets,
    "OBRS states": states,
    "Jackpot": jackpot,
    "reverse KL": divergence("reverse"),
    "forward KL": divergence("forward"),
}
# A KL divergence is infinite where its first distribution has a word that the second never says.
NEW_ONLY = ("a word of probability 0 under the actor", "no word in common")
ACTOR_ONLY = ("a word of probability 0 under new", "no word in common")
INFINITE = {"OBRS states": NEW_ONLY, "forward KL": NEW_ONLY, "reverse KL": ACTOR_ONLY}
LOOPS = ("reverse KL", "forward KL")  # run plainly, lax.scan would compile anew for every batch
# Known λ and budgets are checked: no budget can be had of no token.
ERRORS = {("OBRS budget", title): "out of reach" for title in ("empty mask", "no word in common")}


# ---------------------------------------------------------------- the tests


def shape_of(b):
    return b.logits.shape, b.logits.dtype, b.keep


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@functools.cache
def results(name):
    """{title: (gradients, outputs)}, jitted; the batches of one shape in one vmapped call, the other alone."""

    def total(floats, b):
        outputs = ALGORITHMS[name](dataclasses.replace(b, floats=floats))
        reals = [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((jnp.sum(x.astype(jnp.float32)) for x in reals), 0.0), outputs

    f = jax.grad(total, has_aux=True)
    alike = [title for title, b in BATCHES.items() if shape_of(b) == shape_of(PLAIN)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x) if is_key(x[0]) else np.stack(x), *(BATCHES[t] for t in alike))
    vmapped = jax.device_get(jax.jit(jax.vmap(f))(stacked.floats, stacked))
    found = {title: jax.tree.map(lambda x, i=i: x[i], vmapped) for i, title in enumerate(alike)}
    return found | {title: jax.jit(f)(b.floats, b) for title, b in BATCHES.items() if title not in alike}


def leaves(tree):
    return [(jax.tree_util.keystr(path), np.asarray(x)) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def check_finite(name, title, outputs):
    infinite = title in INFINITE.get(name, ())
    for path, x in leaves(outputs):
        fine = np.isfinite(x) | (infinite & np.isposinf(x))
        assert fine.all(), f"{title}: output {path} = {x}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_outputs_and_gradients_are_finite(name):
    for title, (gradients, outputs) in results(name).items():
        check_finite(name, title, outputs)
        for path, x in leaves(gradients):
            assert np.isfinite(x.astype(np.float32)).all(), f"{title}: gradient {path} = {x}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_run_plainly_it_gives_the_same(name):
    for title, b in BATCHES.items():
        if shape_of(b) != shape_of(PLAIN):
            continue  # every operation would be compiled once more
        if (name, title) in ERRORS:
            with pytest.raises(ValueError, match=ERRORS[name, title]):
                ALGORITHMS[name](b)
            continue
        b = dataclasses.replace(b, floats=jax.tree.map(jnp.asarray, b.floats))
        with jax.disable_jit(name in LOOPS):
            outputs = ALGORITHMS[name](b)
        check_finite(name, title, outputs)
        for (path, plain), (_, jitted) in zip(leaves(outputs), leaves(results(name)[title][1]), strict=True):
            np.testing.assert_allclose(plain, jitted, rtol=1e-4, atol=1e-5, err_msg=f"{title}: {path}")


NO_LOSS = ("empty mask", "all rejected", "all rows invalid", "equal rewards")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name.endswith(("PO", "clip"))])
def test_what_has_no_signal_has_no_loss(name):
    for title in NO_LOSS:
        gradients, (loss, _) = results(name)[title]
        assert loss == 0, title
        assert not np.any(gradients["logits"]), title


def public_functions():
    for info in pkgutil.iter_modules(rljax.algos.__path__):
        module = importlib.import_module(f"rljax.algos.{info.name}")
        for name, f in inspect.getmembers(module, inspect.isfunction):
            if not name.startswith("_") and f.__module__ == module.__name__:
                yield module, name, f


def test_every_public_function_stands_in_a_row(monkeypatch):
    """By a call of the row itself: what an algorithm calls by itself does not count."""
    called, depth = set(), [0]

    def watched(label, f):
        @functools.wraps(f)
        def call(*args, **kwargs):
            if depth[0] == 0:
                called.add(label)
            depth[0] += 1
            try:
                return f(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    labels = set()
    for module, name, f in list(public_functions()):
        label = f"{module.__name__}.{name}"
        labels.add(label)
        monkeypatch.setattr(module, name, watched(label, f))
    for row in ALGORITHMS.values():
        jax.eval_shape(row, PLAIN)
    assert labels - called == set(), "add a row to ALGORITHMS that calls these"
    assert len(labels) > 40

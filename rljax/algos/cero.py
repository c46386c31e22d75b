"""CERO: which prompts get how many rollouts when one budget must last a whole run (arXiv 2606.05606).

A run visits M prompts in each of K epochs and may make B rollouts in all. A prompt whose rewards vary teaches
more than one that is always solved or never: with success probability p, the informativeness is
q = E[p (1 - p)] under a Beta posterior, and the utility of a prompt's rollouts saturates,

    U_i(n) = 1 - exp(-eta q_i n),        maximise  sum_i U_i(sum_k N_ik)
                                         subject to  sum_ik N_ik <= B,  0 <= N_ik <= N_max.

The sum over epochs sits inside U, so the problem does not separate over time. Its Fenchel dual does:
theta_i is the price of a rollout of prompt i (the marginal utility that it will have at the end), mu the
price of the budget, and a prompt gets N_max rollouts whenever theta_i > mu. Both prices follow projected
online gradient descent on the dual, one step for every visit.

Everything is a pure function of a frozen ``Cero`` (hashable: a static argument of jit) and a ``CeroState``.
Letters: M prompts of the data set, P prompts of one call, D prompts drawn in a step, R rollouts of a step.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Array = jax.Array | np.ndarray
_MAX_INT32 = 2**31 - 1
_BISECTIONS = 60  # halvings of the log-price; float32 has no more to resolve


class Rates(NamedTuple):
    """Utility a rollout per unit of q, and the step lengths of the two prices."""

    eta: float
    step_theta: float
    step_mu: float


@dataclasses.dataclass(frozen=True)
class Cero:
    """Configuration of the allocator.

    budget: B, rollouts of the whole run. num_prompts: M. epochs: K. n_max: N_max, the largest grant a visit.
    eta, step_theta, step_mu: None takes the defaults of ``rates``. step_mu=0 keeps mu at 0, so that every
        prompt gets N_max at every visit: with budget = M K N_max that is uniform GRPO.
    prior: (alpha, beta) of the Beta prior of every prompt's success probability.
    discount: factor on the posterior's counts at the end of an epoch, in [0, 1]; 1 keeps all.
    success_threshold: a reward at or above it is a success.
    min_visits: a prompt that was granted rollouts fewer times than this gets N_max whatever its price.

    Raises ValueError for values outside these ranges, TypeError for counts that are not integers.
    """

    budget: int
    num_prompts: int
    epochs: int
    n_max: int
    _: dataclasses.KW_ONLY
    eta: float | None = None
    step_theta: float | None = None
    step_mu: float | None = None
    prior: tuple[float, float] = (1.0, 1.0)
    discount: float = 1.0
    success_threshold: float = 0.5
    min_visits: int = 0

    def __post_init__(self):
        for name, low in (("budget", 2), ("num_prompts", 1), ("epochs", 1), ("n_max", 2), ("min_visits", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"Cero {name}={value!r} is not an integer; give an integer >= {low}")
            if not low <= value <= _MAX_INT32:
                raise ValueError(f"Cero {name}={value} is outside [{low}, {_MAX_INT32}] (counters are int32)")
            object.__setattr__(self, name, int(value))
        if self.eta is not None:
            _check_number("eta", self.eta, self.eta > 0, "must be > 0, or None for 4 M / B")
        for name in ("step_theta", "step_mu"):
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, value >= 0, "must be >= 0, or None for the default")
        prior = tuple(self.prior)
        if len(prior) != 2:
            raise ValueError(f"Cero prior={self.prior!r} must be the two numbers (alpha, beta)")
        for value in prior:
            _check_number("prior", value, value > 0, "must be two numbers > 0")
        object.__setattr__(self, "prior", prior)
        _check_number("discount", self.discount, 0 <= self.discount <= 1, "must be in [0, 1]; 1 keeps all")
        _check_number("success_threshold", self.success_threshold, True, "must be a finite reward")

    @property
    def rates(self) -> Rates:
        """eta, step_theta and step_mu with the defaults filled in.

        eta = 4 M / B: a prompt with q = .25 at its uniform share of the budget is at U = 1 - 1/e = .63.
        step_theta = eta / (4 N_max sqrt(K)) and step_mu = 2.5 eta / (M N_max sqrt(K)): the 1/sqrt(K) steps
        of the regret bound, scaled by the prices' largest value, eta / 4.
        """
        eta = 4 * self.num_prompts / self.budget if self.eta is None else self.eta
        per_visit = eta / (self.n_max * math.sqrt(self.epochs))
        theta = per_visit / 4 if self.step_theta is None else self.step_theta
        mu = 2.5 * per_visit / self.num_prompts if self.step_mu is None else self.step_mu
        return Rates(eta, theta, mu)


def _check_number(name: str, value, ok: bool, rule: str) -> None:
    if not (math.isfinite(value) and ok):
        raise ValueError(f"Cero {name}={value!r} {rule}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CeroState:
    """What the allocator knows; a pytree to be checkpointed whole.

    alpha, beta: float32[M], the Beta posterior of each prompt's success (of the model that samples).
    rollouts: int32[M], n, rollouts of each prompt so far, unscorable ones included.
    visits: int32[M], times each prompt was drawn and granted rollouts.
    theta: float32[M], the price of a rollout of each prompt. mu: float32[], the price of the budget.
    spent: int32[], rollouts of the whole run so far.
    draws: int32[], prompts drawn in the present epoch, those granted 0 included, in [0, M).
    epoch: int32[], epochs completed: it advances when M prompts have been drawn.
    """

    alpha: Array
    beta: Array
    rollouts: Array
    visits: Array
    theta: Array
    mu: Array
    spent: Array
    draws: Array
    epoch: Array


def init(cero: Cero) -> CeroState:
    """The state before the first rollout: posterior = prior, theta_i = eta q_i (top of its box), mu = 0."""
    m = cero.num_prompts
    alpha = jnp.full(m, cero.prior[0], jnp.float32)
    beta = jnp.full(m, cero.prior[1], jnp.float32)
    zero = jnp.zeros((), jnp.int32)
    return CeroState(
        alpha=alpha,
        beta=beta,
        rollouts=jnp.zeros(m, jnp.int32),
        visits=jnp.zeros(m, jnp.int32),
        theta=cero.rates.eta * beta_variance(alpha, beta),
        mu=jnp.zeros((), jnp.float32),
        spent=zero,
        draws=zero,
        epoch=zero,
    )


def beta_variance(alpha: Array, beta: Array) -> jax.Array:
    """E[p (1 - p)] under Beta(alpha, beta): alpha beta / ((alpha+beta)(alpha+beta+1)); (3, 2) gives .2."""
    alpha, beta = jnp.asarray(alpha), jnp.asarray(beta)
    total = alpha + beta
    # One division first: alpha * beta of two large counts would overflow long before their quotient does.
    return (alpha / total) * (beta / (total + 1))


def informativeness(state: CeroState) -> jax.Array:
    """q: float32[M], the expected Bernoulli variance E[p (1 - p)] of each prompt's rewards, in (0, 1/4)."""
    return beta_variance(state.alpha, state.beta)


def utility(q: Array, eta: float, n: Array) -> jax.Array:
    """U(n) = 1 - exp(-eta q n), elementwise; n is the prompt's rollouts over all epochs."""
    return -jnp.expm1(-eta * jnp.asarray(q) * n)


def best_response(theta: Array, q: Array, eta: float, cap: float) -> jax.Array:
    """n*(theta) = argmax over 0 <= s <= cap of U(s) - theta s = ln(eta q / theta) / (eta q), clipped.

    theta, q: float[...]. A price of 0 gives `cap`; q = 0 (nothing to learn) gives 0.
    """
    slope = eta * jnp.asarray(q)
    tiny = jnp.finfo(jnp.result_type(slope, jnp.float32)).tiny
    n = (jnp.log(jnp.maximum(slope, tiny)) - jnp.log(jnp.maximum(theta, tiny))) / jnp.maximum(slope, tiny)
    return jnp.where(slope > 0, jnp.clip(n, 0, cap), 0)


def theta_box(cero: Cero, q: Array) -> tuple[jax.Array, jax.Array]:
    """The interval of prices that can be right: U' at all K N_max rollouts, and U' at none.

    [eta q exp(-eta q K N_max), eta q]. The lower end is kept above the smallest normal float32, so that its
    logarithm exists.
    """
    high = cero.rates.eta * jnp.asarray(q)
    low = high * jnp.exp(-high * cero.epochs * cero.n_max)
    return jnp.minimum(jnp.maximum(low, jnp.finfo(jnp.float32).tiny), high), high


def allocate(cero: Cero, state: CeroState, ids: Array, *, reserved: int | Array = 0) -> jax.Array:
    """Rollouts to make for each of P prompts: N_max where theta_i > mu, else 0, within the budget left.

    ids: int[P] in [0, M); -1 marks padding and gets 0. An id that appears twice is two visits.
    reserved: rollouts granted earlier and not yet passed to ``update``; they count as spent.
    Returns int32[P]. If the budget does not cover all grants, the largest theta go first and the last grant
    may be a part of N_max, but never a single rollout, which has no group to be compared with.
    Raises ValueError for an id >= M or < -1, when ids is not being traced.
    """
    ids = _as_ids(cero, "ids", ids)
    theta = state.theta[jnp.maximum(ids, 0)]
    due = theta > state.mu
    if cero.min_visits > 0:
        due |= state.visits[jnp.maximum(ids, 0)] < cero.min_visits
    due &= ids >= 0
    order = jnp.argsort(jnp.where(due, -theta, jnp.inf), stable=True)
    rank = jnp.zeros_like(ids).at[order].set(jnp.arange(ids.shape[0], dtype=ids.dtype))
    left = jnp.maximum(cero.budget - state.spent - reserved, 0)
    # rank * N_max may pass 2^31; a rank beyond the number of full grants gets nothing anyway.
    full = left // cero.n_max
    grant = jnp.where(rank < full, cero.n_max, jnp.where(rank == full, left - full * cero.n_max, 0))
    return jnp.where(due & (grant >= 2), grant, 0).astype(jnp.int32)


def update(
    cero: Cero,
    state: CeroState,
    ids: Array,
    rewards: Array,
    valid: Array | None = None,
    *,
    drawn_ids: Array | None = None,
    drawn_counts: Array | None = None,
) -> CeroState:
    """One step of the posterior and of both prices.

    alpha += successes, beta += failures (reward >= threshold, of valid rows), q from them; then, for each
    drawn prompt i with grant N_i (a prompt drawn twice steps by both grants),

        theta_i <- Proj_box( theta_i - step_theta (N_i - n*_i(theta_i) / K) )
        mu      <- max(0, mu + step_mu (sum_i N_i - target)),   target = (B / K) (D / M).

    ids: int[R], the prompt of each rollout; -1 marks a padding row, which is not a rollout.
    rewards: float[R]. valid: bool[R], False where no reward could be found (a grader failed); None is all
        valid. A reward that is not finite is never valid. Invalid rows are spent, but leave alpha and beta.
    drawn_ids: int[D], every prompt that was drawn, those granted 0 included (-1 is padding), and
        drawn_counts: int[D], their grants. None: the prompts of the rows, each drawn once, its rows its
        grant; exact only where no drawn prompt was granted 0.
    Prices need grants, not rewards, so both may come in calls of their own: the drawn with R = 0 as soon as
    they are granted, the rows with D = 0 when they are graded. A loop that draws on until its slots are full
    must do so (or stop after some draws): while every price is below mu, only a step of mu ends the drought.

    Returns the new state. When M prompts have been drawn the epoch advances, and the posterior's counts are
    discounted towards the prior. Raises ValueError for ids outside [-1, M) when they are not being traced,
    and for only one of drawn_ids and drawn_counts.
    """
    m, rates = cero.num_prompts, cero.rates
    ids = _as_ids(cero, "ids", ids)
    rewards = jnp.asarray(rewards)
    scored = (ids >= 0) & jnp.isfinite(rewards)
    scored = scored if valid is None else scored & jnp.asarray(valid, bool)
    success = rewards >= cero.success_threshold
    alpha = state.alpha + _scatter(ids, scored & success, m).astype(jnp.float32)
    beta = state.beta + _scatter(ids, scored & ~success, m).astype(jnp.float32)
    rows = _scatter(ids, ids >= 0, m)
    drawn, granted, visits = _drawn(cero, rows, drawn_ids, drawn_counts)

    num_drawn = drawn.sum()
    draws = state.draws + num_drawn
    ended = draws // m
    if cero.discount < 1:
        keep = jnp.power(jnp.float32(cero.discount), ended)
        alpha = cero.prior[0] + keep * (alpha - cero.prior[0])
        beta = cero.prior[1] + keep * (beta - cero.prior[1])

    q = beta_variance(alpha, beta)
    low, high = theta_box(cero, q)
    share = best_response(state.theta, q, rates.eta, cero.epochs * cero.n_max) / cero.epochs
    # A prompt that was not drawn has gradient 0; it is projected too, since its box may have moved.
    theta = jnp.clip(state.theta - rates.step_theta * (granted - drawn * share), low, high)
    target = num_drawn * (cero.budget / (cero.epochs * m))
    mu = jnp.maximum(0.0, state.mu + rates.step_mu * (granted.sum() - target))
    return CeroState(
        alpha=alpha,
        beta=beta,
        rollouts=state.rollouts + rows,
        visits=state.visits + visits,
        theta=theta,
        mu=mu.astype(jnp.float32),
        spent=state.spent + rows.sum(),
        draws=draws % m,
        epoch=state.epoch + ended,
    )


def _as_ids(cero: Cero, name: str, ids: Array) -> jax.Array:
    """ids as int32, checked where they are known: a traced index out of range would be dropped silently."""
    if not isinstance(ids, Tracer):
        known = np.asarray(ids)
        bad = known[(known < -1) | (known >= cero.num_prompts)]
        if bad.size:
            raise ValueError(
                f"CERO {name} hold prompt {bad.flat[0]}, but num_prompts={cero.num_prompts}; "
                "give indices in [0, num_prompts), or -1 for padding"
            )
    return jnp.asarray(ids, jnp.int32)


def _scatter(ids: jax.Array, amount: jax.Array, m: int) -> jax.Array:
    """int32[m]: the amounts of each id summed. Padding goes out of bounds (a plain -1 is the last prompt)."""
    return jnp.zeros(m, jnp.int32).at[jnp.where(ids >= 0, ids, m)].add(amount.astype(jnp.int32), mode="drop")


def _drawn(cero: Cero, rows: jax.Array, drawn_ids, drawn_counts) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(times drawn, rollouts granted, times granted any) in this step: int32[M] each."""
    if (drawn_ids is None) != (drawn_counts is None):
        raise ValueError("CERO update got one of drawn_ids and drawn_counts; give both, or neither")
    if drawn_ids is None:
        drawn = (rows > 0).astype(jnp.int32)
        return drawn, rows, drawn
    drawn_ids = _as_ids(cero, "drawn_ids", drawn_ids)
    counts = jnp.asarray(drawn_counts, jnp.int32)
    amounts = drawn_ids >= 0, counts, counts > 0
    times, granted, visits = (_scatter(drawn_ids, x, cero.num_prompts) for x in amounts)
    return times, granted, visits


def dual_objective(
    theta: Array, mu: float | Array, q: Array, eta: float, *, budget: float, epochs: int, n_max: int
) -> jax.Array:
    """D(theta, mu), an upper bound on the total utility of every feasible allocation.

    D = sum_i max_s [U_i(s) - theta_i s] + sum_ik max_{0 <= N <= N_max} (theta_i - mu) N + mu B, with
    0 <= s <= K N_max. theta, q: float[M], >= 0; mu >= 0. Its minimum equals the optimum of the primal
    problem, at theta_i = U_i'(n_i) of the optimal n_i. Returns a scalar.
    """
    theta = jnp.asarray(theta)
    s = best_response(theta, q, eta, epochs * n_max)
    per_prompt = utility(q, eta, s) - theta * s + epochs * n_max * jnp.maximum(theta - mu, 0)
    return per_prompt.sum() + mu * budget


def offline_allocation(q: Array, eta: float, budget: float, cap: float | Array) -> jax.Array:
    """The optimal totals with hindsight: argmax of sum_i U_i(n_i), sum_i n_i <= B, 0 <= n_i <= cap.

    n_i = clip(ln(eta q_i / nu) / (eta q_i), 0, cap) with one price nu, found by bisection on its logarithm.
    q: float[M], cap: K N_max, a scalar or float[M]; n is real-valued, float[M]. Where the caps fit into the
    budget every prompt with q > 0 gets its cap. q=(.25,.1,.02), eta=.2, B=32, cap=24 → (22.23, 9.77, 0).
    Raises ValueError for eta <= 0, a negative budget or a negative cap, when these are not being traced.
    """
    for name, value in (("eta", eta), ("budget", budget), ("cap", cap)):
        if not isinstance(value, Tracer) and not np.all(value > 0 if name == "eta" else value >= 0):
            raise ValueError(f"offline_allocation {name}={value!r}: eta must be > 0, budget and cap >= 0")
    slope = eta * jnp.asarray(q)
    teaches = slope > 0
    slope = jnp.where(teaches, slope, 1)
    log_slope = jnp.log(slope)
    cap = jnp.where(teaches, cap, 0).astype(slope.dtype)

    def totals(log_nu):
        return jnp.clip((log_slope - log_nu) / slope, 0, cap)

    def halve(_, bounds):
        low, high = bounds
        mid = 0.5 * (low + high)
        over = totals(mid).sum() > budget
        return jnp.where(over, mid, low), jnp.where(over, high, mid)

    # At the lowest bound every prompt is at its cap, at the highest every prompt is at 0.
    bounds = jnp.min(log_slope - slope * cap), jnp.max(log_slope)
    _, log_nu = jax.lax.fori_loop(0, _BISECTIONS, halve, bounds)
    return jnp.where(cap.sum() <= budget, cap, totals(log_nu))


def effective_prompt_ratio(
    rewards: Array,
    group: Array,
    num_groups: int,
    valid: Array | None = None,
    *,
    samples: int | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Among prompts with rollouts, the fraction whose rewards are not all equal: those that carry a gradient.

    rewards: float[R]; group: int[R] in [0, num_groups), -1 for padding; valid: bool[R] or None. Rows that are
    invalid or not finite do not count. Returns a float32 scalar, 0 where no group has rollouts.
    A larger group is more often mixed, so systems with unlike group sizes compare only on equal numbers:
    samples=n draws n valid rows of each group at random, without replacement, by `key`; groups with fewer
    than n are left out. Raises ValueError for samples without key, or samples < 2.
    """
    if samples is not None and (samples < 2 or key is None):
        raise ValueError(f"effective_prompt_ratio samples={samples} must be >= 2, with a key to draw them by")
    rewards, group = jnp.asarray(rewards), jnp.asarray(group, jnp.int32)
    use = (group >= 0) & (group < num_groups) & jnp.isfinite(rewards)
    use = use if valid is None else use & jnp.asarray(valid, bool)
    group = jnp.where(use, group, num_groups)
    if samples is not None and key is not None:
        use &= _rank_in_group(group, num_groups, jax.random.uniform(key, group.shape)) < samples
        group = jnp.where(use, group, num_groups)
    size = jax.ops.segment_sum(use.astype(jnp.int32), group, num_groups + 1)[:-1]
    top = jax.ops.segment_max(jnp.where(use, rewards, -jnp.inf), group, num_groups + 1)[:-1]
    bottom = jax.ops.segment_min(jnp.where(use, rewards, jnp.inf), group, num_groups + 1)[:-1]
    counted = size >= (1 if samples is None else samples)
    mixed = counted & (top > bottom)
    return mixed.sum() / jnp.maximum(counted.sum(), 1).astype(jnp.float32)


def _rank_in_group(group: jax.Array, num_groups: int, priority: jax.Array) -> jax.Array:
    """int32[R]: the place of each row in its group (0 … num_groups), by ascending priority."""
    order = jnp.lexsort((priority, group))
    place = jnp.arange(group.shape[0], dtype=jnp.int32)
    size = jnp.zeros(num_groups + 1, jnp.int32).at[group].add(1)
    first = jnp.cumsum(size) - size
    return jnp.zeros_like(place).at[order].set(place) - first[group]


def metrics(cero: Cero, state: CeroState) -> dict[str, Array]:
    """Scalars for the log. mu and theta_mean in utility a rollout, q_mean in reward variance; spent and left
    in rollouts; of the M prompts, active is the fraction with theta > mu, explored that with a visit."""
    return {
        "mu": state.mu,
        "theta_mean": state.theta.mean(),
        "q_mean": informativeness(state).mean(),
        "spent": state.spent,
        "left": cero.budget - state.spent,
        "epoch": state.epoch,
        "active": (state.theta > state.mu).mean(dtype=jnp.float32),
        "explored": (state.visits > 0).mean(dtype=jnp.float32),
    }

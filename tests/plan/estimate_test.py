"""A plan's bytes and operations, counted by hand for the shipped model."""

import pytest

from configs import default
from rljax import config as config_lib
from rljax import plan, sharding
from rljax.models import hf
from rljax.plan import estimate, programs
from rljax.plan.chips import CHIPS

TINY = hf.read_config(hf.resolve("tiny-policy"))
L, H, KV, D, E, F, V = 4, 4, 2, 32, 128, 512, 264
P, N, S, T = 32, 16, 10, 6  # of configs/default.py


def config(changes=None):
    c = default.get_config()
    c.update_from_flattened_dict(changes if changes is not None else {})
    return config_lib.resolve(c)


def on(devices: int, **axes):
    return sharding.abstract_mesh(**{"data": 1, "fsdp": 1, "tensor": 1} | axes, devices=devices)


@pytest.fixture(scope="module")
def one():
    return estimate.estimate(config(), TINY, None, on(1))


def test_the_learner_holds_parameters_and_two_moments(one):
    parameters = 4 * (V * E + L * (2 * E + E * H * D + 2 * E * KV * D + H * D * E + 3 * E * F) + E)
    assert one.state == {"parameters": parameters, "optimizer": 2 * parameters + 8}  # and two int32 counts
    assert parameters == 4 * 1_017_984


def test_parameters_are_divided_over_fsdp():
    whole, half = (plan.state_bytes(config(), TINY, on(n, fsdp=n)).policy.parameters for n in (1, 2))
    norms = 4 * (2 * L * E + E)
    assert half == (whole - norms) / 2 + norms


def test_caches_hold_keys_and_values_of_prompts_and_rows(one):
    prompts = 2 * 4 * L * P * KV * S * D + (1 + 4) * P * S  # and which columns are real, and their positions
    assert one.rollout["prompts' caches"] == prompts
    rows = 2 * 4 * L * P * N * KV * T * D + (4 + 4) * P * N * T  # and tokens and their log-probs
    assert rows <= one.rollout["rows' caches"] <= rows + P * N * 22 + P * 8 + 4  # and a few numbers of each slot


def test_decoding_costs_its_products(one):
    matrices = E * H * D + 2 * E * KV * D + H * D * E + 3 * E * F
    attention = 2 * H * D * (S + T)  # scores and their sums of values
    rows = P * N
    assert one.work["decode"].flops == T * rows * 2 * (L * (matrices + attention) + E * V)
    assert one.work["decode"].sent == one.work["update"].sent == 0


def test_the_update_computes_three_passes_and_what_it_forgot(one):
    """Forwards once and backwards twice that; remat=dots recomputes attention, chunks of logits are computed again."""
    matrices = E * H * D + 2 * E * KV * D + H * D * E + 3 * E * F
    rows, prompts = P * N * T, P * S
    attention = 2 * H * D * (rows * (S + T) + prompts * S)
    expected = 2 * (3 * L * (rows + prompts) * matrices + 4 * L * attention + 4 * rows * E * V)
    # Of the prompts, what the last layer makes beside keys and values has no use.
    assert expected * 0.9 < one.work["update"].flops <= expected


def test_least_seconds_are_of_the_slowest_rate(one):
    chip, work = CHIPS["h200"], one.work["decode"]
    assert work.least(chip) == max(work.flops / 989e12, work.moved / 4.8e12)
    assert one.least_seconds(chip) == sum(stage.least(chip) for stage in one.work.values())


def test_rings_that_grow_cost_less_than_grown_ones():
    long = {"rollout.max_new_tokens": 64, "rollout.prompts": 8, "rollout.lanes": 8}
    grown, growing = (
        estimate.Decoding(programs.local(config(long | {"rollout.columns": c}), TINY, None, on(1))) for c in (64, 16)
    )
    assert growing.widths() == [16, 32, 64]
    flops = [d.work({"prefill": 0.0, "decode": 0.0})["decode"].flops for d in (grown, growing)]
    # 16 steps at 16 columns, 16 at 32 and 32 at 64.
    assert flops[0] - flops[1] == 8 * N * L * 4 * H * D * (16 * 48 + 16 * 32)


def test_devices_apart_hold_only_what_decodes():
    changes = {"mesh.rollout_devices": 2, "rollout.staleness": 1, "loss.correction": "truncate"}
    found = estimate.estimate(config(changes), TINY, None, on(2, fsdp=2), on(2, data=2))
    assert "optimizer" not in found.stage("rollout") and "optimizer" in found.stage("update")
    assert found.stage("rollout")["weights handed over"] == 2 * 4 * 1_017_984  # those in use, and the next
    rollout = found.work["prefill"].least(CHIPS["h200"]) + found.work["decode"].least(CHIPS["h200"])
    assert found.least_seconds(CHIPS["h200"]) == max(rollout, found.work["update"].least(CHIPS["h200"]))

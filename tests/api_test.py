"""The public API: names, parameters, which of them are keyword-only, and defaults. Others build on these.

A change here breaks programs outside this repository: add keyword-only parameters with a default instead.
"""

import dataclasses
import importlib
import inspect

import pytest

# "module.name": the declared parameters, as a lambda. A default of ... may be any, or none.
SIGNATURES = {
    "models.load": lambda path, *, dtype="float32", mesh=None: 0,
    "models.save": lambda path, model, params: 0,
    "models.logits": lambda model, params, tokens, lengths=None: 0,
    "tokenizer.load": lambda path: 0,
    "tokenizer.Tokenizer.encode": lambda self, text: 0,
    "tokenizer.Tokenizer.decode": lambda self, ids: 0,
    "tokenizer.Tokenizer.chat": lambda self, messages: 0,
    "sampling.generate": lambda model, params, prompts, *, num_samples, max_new_tokens, key, temperature=1.0,
    top_k=0, top_p=1.0, stop_ids=(), top_logprobs=0: 0,
    "tasks.grading.extract_answer": lambda completion: 0,
    "tasks.grading.grade_math": lambda completion, gold: 0,
    "algos.advantages.group_advantages": lambda rewards, group_ids, num_groups, *, valid=None,
    baseline="mean", scale="std", eps=1e-6: 0,
    "algos.losses.policy_loss": lambda logprobs, old_logprobs, advantages, mask, *, clip_low, clip_high,
    ratio="token", objective="ppo", aggregate="token", denominator=None, max_length=None, weights=None,
    accept=None, dual_clip=None: 0,
    "algos.losses.importance_weights": lambda logprobs, sampler_logprobs, mask, *, level="token",
    mode="truncate", low=..., high=...: 0,
    "algos.kl.kl_estimate": lambda logprobs, ref_logprobs, kind=...: 0,
    "algos.down_sampling.down_sample": lambda rewards, keep, *, rule, valid=None, key=None: 0,
    "algos.cero.Cero": lambda budget, num_prompts, epochs, n_max, *, eta=None, step_theta=None, step_mu=None,
    prior=(1.0, 1.0), discount=1.0, success_threshold=0.5: 0,
    "algos.cero.init": lambda cero: 0,
    "algos.cero.allocate": lambda cero, state, ids: 0,
    "algos.cero.update": lambda cero, state, ids, rewards, valid=...: 0,
    "algos.cero.informativeness": lambda state: 0,
    "algos.cero.offline_allocation": lambda q, eta, budget, cap: 0,
    "algos.obrs.acceptance": lambda p, q, lam: 0,
    "algos.obrs.lambda_for_budget": lambda p, q, budget: 0,
    "algos.obrs.normaliser": lambda p, q, lam: 0,
}  # fmt: skip

MODULES = ("advantages", "cero", "distillation", "down_sampling", "kl", "losses", "masked", "obrs")


def find(name):
    """rljax.a.b.C.d by its name below the package."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["rljax", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"rljax.{name} does not exist")


def differences(declared, actual):
    """What of the declared signature does not hold, in words."""
    declared, actual = inspect.signature(declared).parameters, inspect.signature(actual).parameters
    order = [n for n, p in actual.items() if p.kind is not p.KEYWORD_ONLY]
    wrong = []
    for place, (name, want) in enumerate(declared.items()):
        if name not in actual:
            wrong.append(f"no parameter {name}")
            continue
        got = actual[name]
        if want.default is not ... and want.default != got.default:
            wrong.append(f"the default of {name} is {got.default}, not {want.default}")
        if want.kind is want.KEYWORD_ONLY and got.kind is not got.KEYWORD_ONLY:
            wrong.append(f"{name} is not keyword-only")
        if want.kind is not want.KEYWORD_ONLY and (got.kind is got.KEYWORD_ONLY or order.index(name) != place):
            wrong.append(f"{name} is not argument {place}")
    for name, got in actual.items():
        if name not in declared and not (got.kind is got.KEYWORD_ONLY and got.default is not got.empty):
            wrong.append(f"{name} is new and not a keyword with a default")
    return wrong


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert differences(SIGNATURES[name], find(name)) == []


@pytest.mark.parametrize(
    "actual, told",
    [
        (lambda path, *, dtype="float32": 0, ["no parameter mesh"]),
        (lambda path, *, dtype="bfloat16", mesh=None: 0, ["the default of dtype is bfloat16, not float32"]),
        (lambda path, dtype="float32", *, mesh=None: 0, ["dtype is not keyword-only"]),
        (lambda other, path, *, dtype="float32", mesh=None: 0, ["path is not argument 0", "other is new"]),
        (lambda *, path, dtype="float32", mesh=None: 0, ["path is not argument 0"]),
        (
            lambda path, *, dtype="float32", mesh=None, remat: 0,
            ["remat is new and not a keyword with a default"],
        ),
        (lambda path, *, dtype="float32", mesh=None, remat="none": 0, []),
    ],
)
def test_differences_are_found(actual, told):
    found = differences(SIGNATURES["models.load"], actual)
    assert len(found) == len(told) and all(f.startswith(t) for f, t in zip(found, told, strict=True)), found


def test_rollouts_have_the_declared_fields():
    fields = [f.name for f in dataclasses.fields(find("types.Rollouts"))]
    declared = {"tokens", "logprobs", "lengths", "group", "truncated", "top_ids", "top_logprobs"}
    assert declared <= set(fields)


def test_a_tokenizer_has_stop_ids():
    assert "stop_ids" in [f.name for f in dataclasses.fields(find("tokenizer.Tokenizer"))]


@pytest.mark.parametrize("name", MODULES)
def test_algos_modules_are_there_and_documented(name):
    assert find(f"algos.{name}").__doc__

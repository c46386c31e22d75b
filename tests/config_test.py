"""ConfigDict → Config: every key arrives, every mistake is named with its key, its value and what to do."""

import dataclasses
import json
import typing

import pytest
from ml_collections import ConfigDict

from configs import default
from rljax import config as config_lib
from rljax import options
from rljax.algos import advantages, distillation, down_sampling, kl, losses, obrs
from rljax.models import quantized
from rljax.tasks import files, graders

FILE = {"task.name": "file", "task.path": "x.jsonl"}
# For each key a valid value that is not the default's, and what else must change for it to be valid.
CHANGED = {
    "name": ("other", {}),
    "seed": (7, {}),
    "model.path": ("tiny-actor", {}),
    "model.dtype": ("bfloat16", {}),
    "model.compute_dtype": ("bfloat16", {}),
    "model.remat": ("layer", {}),
    "model.attention": ("splash", {}),
    "model.attention_chunk": (64, {}),
    "model.token_chunk": (64, {}),
    "lora.rank": (8, {}),
    "lora.alpha": (16.0, {}),
    "lora.targets": ("q,v", {}),
    "task.name": ("module:function", {}),
    "task.path": ("problems.jsonl", {"task.name": "module:function"}),
    "task.eval_path": ("held_out.jsonl", FILE),
    "task.prompt_field": ("question", FILE),
    "task.answer_field": ("solution", FILE),
    "task.kind_field": ("topic", FILE),
    "task.choices_field": ("A,B,C", FILE),
    "task.gold": ("boxed", FILE),
    "task.grader": ("exact:0.9+format:0.1", FILE),
    "task.format": ("think", FILE | {"task.grader": "math+format"}),
    "task.length_free": (10, FILE | {"task.grader": "math+length"}),
    "task.length_max": (90, FILE | {"task.grader": "math+length"}),
    "task.template": ("Q: {prompt}", FILE),
    "task.stop": ("\n", FILE),
    "task.chat": (True, {}),
    "task.system": ("Be brief.", {"task.chat": True}),
    "task.seed": (3, {}),
    "task.train_prompts": (512, {}),
    "task.eval_prompts": (64, {}),
    "task.mix": ("add:1", {}),
    "task.options": ('{"leg_counting": {"max_animals": 3}}', {"task.name": "reasoning_gym"}),
    "task.shots": (2, {}),
    "task.shuffle_rewards": (True, {}),
    "rollout.prompts": (8, {}),
    "rollout.samples": (8, {}),
    "rollout.max_prompt_tokens": (99, {}),
    "rollout.max_new_tokens": (20, {}),
    "rollout.temperature": (0.6, {}),
    "rollout.top_k": None,  # only its default is valid in training
    "rollout.top_p": None,
    "rollout.lanes": (4, {}),
    "rollout.slots": (4, {}),
    "rollout.segment": (5, {}),
    "rollout.columns": (64, {}),
    "rollout.max_rounds": (3, {}),
    "rollout.staleness": (1, {"loss.correction": "truncate"}),
    "budget.rule": ("cero", {}),
    "budget.rollouts": (4096, {}),
    "budget.epochs": (30, {}),
    "cero.eta": (0.5, {}),
    "cero.step_theta": (0.25, {}),
    "cero.step_mu": (0.125, {}),
    "cero.prior_alpha": (2.0, {}),
    "cero.prior_beta": (3.0, {}),
    "cero.discount": (0.9, {}),
    "cero.success_threshold": (1.0, {}),
    "cero.min_visits": (2, {"budget.rule": "cero"}),
    "pods.rule": ("max_variance", {}),
    "pods.keep": (4, {"pods.rule": "max_variance"}),
    "pods.normalize_over": ("all", {}),
    "actor.path": ("tiny-actor", {}),
    "actor.dtype": ("int8", {}),
    "actor.learning_rate": (1e-5, {}),
    "actor.loss_coef": (0.5, {}),
    "actor.distill_coef": (0.0, {}),
    "actor.distill_direction": ("forward", {}),
    "jackpot.rule": ("obrs", {"actor.dtype": "int8"}),
    "jackpot.target": ("new", {}),
    "jackpot.lam": (2.0, {}),
    "jackpot.budget": (0.8, {}),
    "jackpot.table": ("sampler", {}),
    "jackpot.top_k": (5, {}),
    "jackpot.normaliser": ("exact", {}),
    "jackpot.normalise": ("proposed", {}),
    "jackpot.c1": (2.0, {}),
    "jackpot.c2": (2.0, {}),
    "advantage.baseline": ("loo", {}),
    "advantage.scale": ("none", {}),
    "advantage.eps": (1e-4, {}),
    "advantage.overlong_buffer": (2, {}),
    "loss.objective": ("cispo", {}),
    "loss.ratio": ("sequence", {}),
    "loss.clip_low": (0.1, {}),
    "loss.clip_high": (0.2, {}),
    "loss.dual_clip": (3.0, {}),
    "loss.aggregate": ("constant", {}),
    "loss.kl_coef": (0.01, {}),
    "loss.kl_kind": ("k3", {}),
    "loss.correction": ("truncate", {}),
    "loss.correction_level": ("sequence", {}),
    "loss.correction_low": (0.5, {}),
    "loss.correction_high": (5.0, {}),
    "loss.entropy_coef": (0.01, {}),
    "loss.mask_truncated": (True, {}),
    "learner.optimizer": ("adafactor", {}),
    "learner.moment_dtype": ("bfloat16", {}),
    "learner.learning_rate": (1e-6, {}),
    "learner.warmup_updates": (0, {}),
    "learner.schedule": ("cosine", {}),
    "learner.adam_b1": (0.8, {}),
    "learner.adam_b2": (0.95, {}),
    "learner.adam_eps": (1e-6, {}),
    "learner.weight_decay": (0.1, {}),
    "learner.max_grad_norm": (0.5, {}),
    "learner.minibatches": (2, {}),
    "learner.epochs": (2, {}),
    "learner.micro_batches": (4, {}),
    "mesh.data": (2, {}),
    "mesh.fsdp": (2, {}),
    "mesh.tensor": (2, {}),
    "mesh.rollout_devices": (2, {}),
    "mesh.rollout_tensor": (2, {"mesh.rollout_devices": 2}),
    "hosts.cluster": ("slurm", {}),
    "hosts.coordinator": None,  # these two come together
    "hosts.count": None,
    "hosts.index": (1, {"hosts.coordinator": "host-0:8476", "hosts.count": 2}),
    "hosts.start_timeout": (300, {}),
    "hosts.heartbeat_timeout": (10, {}),
    "eval.every": (10, {}),
    "eval.samples": (8, {}),
    "eval.temperature": (0.6, {}),
    "eval.tasks": ("gsm8k:a.jsonl", {}),
    "rewards.workers": (2, {}),
    "rewards.cpu_seconds": (5.0, {}),
    "rewards.memory_mb": (2048, {}),
    "metrics.samples_every": (5, {}),
    "metrics.wandb": ("project", {}),
    "checkpoint.every": (5, {}),
    "checkpoint.keep": (1, {}),
}
DEFAULTS = config_lib.flat(config_lib.resolve(default.get_config()))


def configured(**changes) -> ConfigDict:
    """configs/default.py with {"rollout.samples": 8, …}."""
    config = default.get_config()
    config.update_from_flattened_dict(changes)
    return config


def default_keys(tree: ConfigDict, prefix: str = "") -> dict[str, type]:
    found = {}
    for name in tree:
        if isinstance(tree[name], ConfigDict):
            found |= default_keys(tree[name], f"{prefix}{name}.")
        else:
            found[prefix + name] = tree.get_type(name)
    return found


def error_of(changes: dict) -> str:
    with pytest.raises(config_lib.ConfigError) as caught:
        config_lib.resolve(configured(**changes))
    return str(caught.value)


def test_default_py_and_the_dataclasses_have_the_same_keys_and_types():
    assert {key: spec.type for key, spec in config_lib.KEYS.items()} == default_keys(default.get_config())


def test_the_dataclasses_have_no_defaults_and_are_frozen():
    for cls in (config_lib.Config, *typing.get_type_hints(config_lib.Config).values()):
        if dataclasses.is_dataclass(cls):
            assert all(field.default is dataclasses.MISSING for field in dataclasses.fields(cls)), cls
            assert typing.cast(typing.Any, cls).__dataclass_params__.frozen, cls


def test_the_table_of_changes_has_every_key():
    assert list(CHANGED) == list(config_lib.KEYS)


@pytest.mark.parametrize("key", [key for key in CHANGED if CHANGED[key]])
def test_a_changed_key_arrives_and_changes_nothing_else(key):
    value, also = CHANGED[key]
    now = config_lib.flat(config_lib.resolve(configured(**also, **{key: value})))
    derived = {"pods.keep": value} if key == "rollout.samples" else {}
    assert now == DEFAULTS | also | {key: value} | derived
    assert now[key] != DEFAULTS[key] and type(now[key]) is config_lib.KEYS[key].type


def test_fields_are_reached_by_name():
    config = config_lib.resolve(configured(**{"rollout.samples": 8, "learner.learning_rate": 3}))
    assert (config.rollout.samples, config.learner.learning_rate, config.seed) == (8, 3.0, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rollout.samples = 9
    assert hash(config) == hash(config_lib.resolve(config_lib.to_dict(config)))


def test_keep_is_derived_from_samples():
    assert config_lib.resolve(configured(**{"rollout.samples": 12})).pods.keep == 12


def test_to_dict_survives_json():
    config = config_lib.resolve(configured(**{"cero.eta": 0.1, "learner.learning_rate": 1 / 3}))
    assert config_lib.resolve(json.loads(json.dumps(config_lib.to_dict(config)))) == config


@pytest.mark.parametrize(
    "key, near",
    [
        ("rollout.sampels", "'rollout.samples'"),
        ("rolout.samples", "'rollout.samples'"),
        ("learning_rate", "'actor.learning_rate' or 'learner.learning_rate'"),
        ("leerning_rate", "'learner.learning_rate'"),
        ("samples", "'rollout.samples' or 'eval.samples'"),
        ("sead", "'seed'"),
        ("rollout.top_kk", "'rollout.top_k'"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known_one(key, near):
    with pytest.raises(config_lib.ConfigError) as caught:
        config_lib.check_key(key)
    assert f"unknown config key {key!r}; did you mean {near}?" in str(caught.value)


def test_an_unknown_key_like_no_other_is_told_with_the_blocks():
    with pytest.raises(config_lib.ConfigError, match="its blocks are model, lora, task, rollout"):
        config_lib.check_key("zzz")


def test_keys_that_a_config_file_adds_or_lacks_are_errors():
    config = default.get_config()
    config.rollout.smaples = 4
    with pytest.raises(config_lib.ConfigError, match="'rollout.smaples'; did you mean 'rollout.samples'"):
        config_lib.resolve(config)
    config = default.get_config()
    del config.rollout.lanes, config.seed
    with pytest.raises(config_lib.ConfigError, match="lacks seed, rollout.lanes; start from configs"):
        config_lib.resolve(config)
    config = default.get_config().to_dict()
    config["rollout"] = 4
    with pytest.raises(config_lib.ConfigError, match="'rollout' is a block, not a value"):
        config_lib.resolve(config)
    with pytest.raises(config_lib.ConfigError, match="NoneType; get_config.. must return a ConfigDict"):
        config_lib.resolve(None)


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("rollout.samples", "8", "rollout.samples = '8' is of type str; give one of type int"),
        ("rollout.samples", 8.0, "rollout.samples = 8.0 is of type float; give one of type int"),
        ("rollout.samples", True, "rollout.samples = True is of type bool; give one of type int"),
        ("learner.learning_rate", True, "is of type bool; give one of type float"),
        ("task.shuffle_rewards", 1, "is of type int; give one of type bool"),
        ("rollout.samples", None, "is of type NoneType; give one of type int"),
        ("cero.eta", "x", "cero.eta = 'x' is of type str; give one of type float or None"),
        ("pods.keep", 1.5, "pods.keep = 1.5 is of type float; give one of type int or None"),
        ("learner.learning_rate", float("nan"), "learner.learning_rate = nan is not finite"),
        ("loss.clip_high", float("inf"), "loss.clip_high = inf is not finite"),
    ],
)
def test_wrong_types(key, value, told):
    config = default.get_config().to_dict()  # a dict: ConfigDict would refuse or cast some itself
    block, _, leaf = key.partition(".")
    config[block][leaf] = value
    with pytest.raises(config_lib.ConfigError) as caught:
        config_lib.resolve(config)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("seed", -1, "seed = -1 must be at least 0 and at most 2147483647"),
        ("rollout.prompts", -3, "rollout.prompts = -3 must be at least 1"),
        ("rollout.max_new_tokens", 0, "rollout.max_new_tokens = 0 must be at least 1"),
        ("rollout.temperature", -0.5, "rollout.temperature = -0.5 must be at least 0"),
        ("rollout.top_p", 1.5, "rollout.top_p = 1.5 must be at most 1 and above 0"),
        ("budget.rollouts", 2**31, "budget.rollouts = 2147483648 must be at least 1 and at most 2147483647"),
        ("loss.dual_clip", 1.0, "loss.dual_clip = 1.0 must be above 1"),
        ("learner.adam_b2", 1.0, "learner.adam_b2 = 1.0 must be at least 0 and below 1"),
        ("cero.discount", 1.1, "cero.discount = 1.1 must be at least 0 and at most 1"),
        ("pods.keep", 0, "pods.keep = 0 must be at least 1"),
        ("mesh.fsdp", -2, "mesh.fsdp = -2 must be at least -1"),
        ("rewards.cpu_seconds", 0.0, "rewards.cpu_seconds = 0.0 must be above 0"),
        ("name", "a/b", "name = 'a/b' is to be part of a folder's name"),
    ],
)
def test_values_out_of_range(key, value, told):
    assert told in error_of({key: value})


@pytest.mark.parametrize("key, spec", config_lib.KEYS.items())
def test_no_number_may_be_far_below_zero_but_a_reward(key, spec):
    if spec.type in (int, float) and key != "cero.success_threshold":
        assert f"{key} = " in error_of({key: spec.type(-1000)})


@pytest.mark.parametrize("key, spec", config_lib.KEYS.items())
def test_unknown_choices_are_told_with_the_known_ones(key, spec):
    for rule in spec.rules:
        if isinstance(rule, options.OneOf):
            names = [name if name else "''" for name in rule.names]
            assert error_of({key: "zzz"}) == f"{key} = 'zzz' is not known; known: {', '.join(names)}"


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("task.grader", "zzz", "task.grader = 'zzz' is not known; known: '', math, exact"),
        ("task.grader", "mathh", "task.grader = 'mathh' is not known (did you mean 'math'?)"),
        ("task.grader", "math:0.9+forma:0.1", "is not known (did you mean 'format'?)"),
        ("task.grader", "math:0+format", "is no weighted sum such as 'math:0.9+format:0.1'"),
        ("task.grader", "math:x", "is no weighted sum"),
        ("task.grader", "math:1.2.3", "is no weighted sum"),
        ("task.grader", "math:1e999", "is no weighted sum"),
        ("task.grader", "math+", "is no weighted sum"),
        ("task.grader", "math+math", "is no weighted sum"),
        (
            "task.format",
            "box",
            "is not known (did you mean 'boxed'?); known: boxed, think, think_answer, regex:PATTERN",
        ),
        ("task.format", "regex:(", "is no regular expression: missing )"),
    ],
)
def test_a_reward_that_is_none_is_told(key, value, told):
    assert told in error_of(FILE | {key: value})


@pytest.mark.parametrize("spec", ["math", "math:1", "math : 0.9 + format : 1e-1", "choice+length:.5+format"])
def test_a_weighted_sum_of_graders_is_as_the_tasks_read_it(spec):
    config = config_lib.resolve(configured(**FILE, **{"task.grader": spec}))
    assert graders.reward(config.task.grader, length_max=9).weights


CHOICES = {
    "task.gold": {"", *files.GOLDS},
    "task.grader": {"", *graders.GRADERS},
    "task.format": set(graders.FORMS),
    "pods.rule": down_sampling.RULES,
    "pods.normalize_over": down_sampling.NORMALIZE_OVER,
    "advantage.baseline": advantages.BASELINES,
    "advantage.scale": advantages.SCALES,
    "loss.objective": losses.OBJECTIVES,
    "loss.ratio": losses.RATIOS,
    "loss.aggregate": losses.AGGREGATES,
    "loss.kl_kind": kl.ESTIMATORS,
    "loss.correction": losses.MODES,
    "loss.correction_level": losses.LEVELS,
    "jackpot.normalise": obrs.NORMALISE,
    "actor.distill_direction": distillation.DIRECTIONS,
    "actor.dtype": quantized.COPIES,
}


@pytest.mark.parametrize("key, table", CHOICES.items())
def test_the_choices_are_those_of_the_algorithms(key, table):
    (choice,) = config_lib.KEYS[key].rules
    assert set(choice.names) == set(table)


def test_a_near_choice_is_suggested():
    told = error_of({"pods.rule": "max_varience"})
    assert "'max_varience' is not known (did you mean 'max_variance'?); known: all, max_variance" in told


CERO = {"budget.rule": "cero"}
GYM = {"task.name": "reasoning_gym", "task.mix": "leg_counting"}
PODS = {"pods.rule": "max_variance"}
OBRS = {"jackpot.rule": "obrs", "actor.path": "tiny-actor"}


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"task.path": "x"}, ["task.path = 'x' has no effect with task.name = 'arith", "task.name to file, choice"]),
        ({"task.grader": "math"}, ["task.grader = 'math' has no effect", "set --config.task.grader=, or task.name to"]),
        (FILE | {"task.path": ""}, ["task.name = 'file' reads its problems from a data file; set task.path"]),
        (
            FILE | {"task.shots": 2},
            ["task.shots = 2 has no effect with task.name = 'file'", "task.shots=0, or task.name"],
        ),
        (
            FILE | {"task.mix": "add1", "task.shots": 4},  # of a preset, such as smollm2
            ["task.mix = 'add1' and task.shots = 4 have no effect", "set --config.task.mix= --config.task.shots=0, or"],
        ),
        (FILE | {"task.options": "{}", "task.shots": 1}, ["set --config.task.options= --config.task.shots=0"]),
        (
            GYM | {"task.path": "x", "task.shots": 1},
            ["task.path = 'x' and task.shots = 1 have no effect with task.name"],
        ),
        (
            GYM | {"task.train_prompts": 0},
            ["task.train_prompts = 0 is all of a data file, but task.name = 'reasoning_gym'"],
        ),
        (FILE | {"task.format": "think"}, ["task.format = 'think' has no effect without format in task.grader = ''"]),
        (
            FILE | {"task.length_max": 9, "task.grader": "math"},
            ["task.length_max = 9 has no effect", "'math:0.9+length:0.1'"],
        ),
        (FILE | {"task.template": "Q:"}, ["task.template = 'Q:' lacks {prompt}"]),
        (FILE | {"task.eval_prompts": 0}, ["task.eval_prompts = 0 is all of task.eval_path, which is not set"]),
        ({"task.train_prompts": 0}, ["task.train_prompts = 0 is all of a data file, but task.name = 'arithmetic'"]),
        ({"task.system": "Be brief."}, ["task.system = 'Be brief.' has no effect without task.chat"]),
        ({"rollout.samples": 1}, ["rollout.samples = 1 is a group of one", "set at least 2"]),
        ({"rollout.temperature": 0.0}, ["rollout.temperature = 0", "greedy", "set it above 0"]),
        ({"rollout.top_k": 5}, ["rollout.top_k = 5 is on in training", "set it to 0"]),
        ({"rollout.top_p": 0.9}, ["rollout.top_p = 0.9 is on in training", "set it to 1.0"]),
        ({"rollout.segment": 11}, ["rollout.segment = 11", "rollout.max_new_tokens = 6", "at most 6"]),
        ({"budget.rollouts": 511}, ["budget.rollouts = 511", "32 * 16 = 512", "raise it"]),
        (CERO | {"rollout.samples": 17}, ["rollout.samples = 17", "rollout.slots = 16; raise"]),
        (CERO | {"task.train_prompts": 100, "budget.rollouts": 8_001}, ["100 * 5 * 16 = 8000"]),
        (PODS | {"pods.keep": 17}, ["pods.keep = 17 is more than rollout.samples = 16", "lower pods.keep"]),
        ({"pods.keep": 8}, ["pods.keep = 8 contradicts pods.rule = 'all'", "set pods.keep to 16"]),
        ({"jackpot.rule": "obrs"}, ["nothing to correct", "set actor.path or actor.dtype"]),
        ({"jackpot.rule": "obrs", "learner.epochs": 2}, ["nothing to correct", "jackpot.target = 'new'"]),
        (OBRS | {"actor.dtype": "int8"}, ["actor.dtype = 'int8'", "actor.path = 'tiny-actor'", "set one of them"]),
        (OBRS | {"loss.correction": "truncate"}, ["loss.correction = 'truncate'", "both weigh tokens"]),
        (OBRS | {"jackpot.normaliser": "exact", "jackpot.target": "new"}, ["jackpot.normaliser = 'exact'", "'top_k'"]),
        (OBRS | {"jackpot.normaliser": "exact", "jackpot.table": "sampler"}, ["jackpot.table = 'sampler'"]),
        ({"advantage.overlong_buffer": 7}, ["advantage.overlong_buffer = 7", "rollout.max_new_tokens = 6"]),
        (PODS | {"pods.keep": 1}, ["pods.keep = 1", "group of one", "keep at least 2"]),
        ({"loss.correction_low": 3.0}, ["loss.correction_low = 3.0 is above loss.correction_high = 2.0"]),
        ({"loss.objective": "cispo", "loss.dual_clip": 3.0}, ["loss.dual_clip = 3.0 has no effect"]),
        ({"learner.minibatches": 3}, ["learner.minibatches = 3 does not divide rollout.prompts = 32"]),
        (
            {"learner.minibatches": 4, "learner.micro_batches": 3},
            ["learner.micro_batches = 3 does not divide", "32 / 4 = 8 prompts"],
        ),
        (
            {"learner.schedule": "cosine", "budget.rollouts": 5 * 512},
            ["learner.warmup_updates = 5 leaves nothing", "allows 5 updates"],
        ),
        (
            {"learner.optimizer": "adafactor", "learner.moment_dtype": "bfloat16"},
            ["learner.moment_dtype = 'bfloat16' has no effect with learner.optimizer = 'adafactor'"],
        ),
        ({"mesh.tensor": 0}, ["mesh.tensor = 0 is no size; give at least 1, or -1"]),
        ({"mesh.rollout_tensor": 2}, ["mesh.rollout_tensor = 2 has no effect without mesh.rollout_devices"]),
        ({"mesh.rollout_tensor": 2, "mesh.rollout_devices": 3}, ["does not divide mesh.rollout_devices = 3"]),
        ({"rollout.staleness": 1}, ["rollout.staleness = 1", "set loss.correction to 'truncate' (TIS)", "'obrs'"]),
        (OBRS | {"rollout.staleness": 1}, ["jackpot.table = 'union'", "set jackpot.table to 'sampler'"]),
        ({"mesh.tensor": -1}, ["mesh.data and mesh.tensor are -1", "size the others"]),
        (
            {"hosts.cluster": "slurm", "hosts.coordinator": "a:1", "hosts.count": 1},
            ["hosts.cluster = 'slurm'", "set hosts.coordinator"],
        ),
        ({"hosts.count": 2}, ["hosts.count = 2 has no effect without hosts.coordinator"]),
        ({"hosts.index": 1}, ["hosts.index = 1 has no effect without hosts.coordinator"]),
        ({"hosts.coordinator": "a:1"}, ["hosts.index = 0 is none of hosts.count = 0 processes"]),
        ({"hosts.coordinator": "a:1", "hosts.count": 2, "hosts.index": 2}, ["hosts.index = 2 is none of hosts.count"]),
        ({"hosts.coordinator": "host"}, ["hosts.coordinator = 'host' is no address such as 'host-0:8476'"]),
    ],
)
def test_values_that_exclude_each_other(changes, told):
    first, *_ = error_of(changes).splitlines()
    assert all(part in first for part in told), first


def test_all_that_exclude_each_other_are_told_at_once():
    error = error_of(FILE | {"task.shots": 2, "rollout.temperature": 0.0, "mesh.tensor": 0})
    lines = error.splitlines()
    assert [line.split(" = ")[0] for line in lines] == ["task.shots", "rollout.temperature", "mesh.tensor"]


@pytest.mark.parametrize(
    "changes",
    [
        {"budget.rollouts": 512},
        {"rollout.samples": 32},  # more than the slots: refilled, where the allocation is uniform
        CERO | {"task.train_prompts": 100, "budget.rollouts": 8_000},
        CERO | FILE | {"task.train_prompts": 0},  # as many as the file has
        FILE | {"task.eval_prompts": 0, "task.eval_path": "y.jsonl", "task.name": "gsm8k"},
        {"task.name": "module:function", "task.path": "x", "task.shots": 3, "task.train_prompts": 0},
        PODS | {"pods.keep": 16},
        PODS | {"pods.keep": 1, "pods.normalize_over": "all"},
        {"learner.schedule": "cosine", "budget.rollouts": 6 * 512},
        {"mesh.tensor": -1, "mesh.data": 1},
        {"hosts.coordinator": "[::1]:80", "hosts.count": 2, "hosts.index": 1},
        {"eval.temperature": 0.0, "eval.every": 0, "checkpoint.every": 0},
    ],
)
def test_values_at_the_limit_are_allowed(changes):
    config_lib.resolve(configured(**changes))


def saved(**changes) -> dict:
    return json.loads(json.dumps(config_lib.to_dict(config_lib.resolve(configured(**changes)))))


def test_a_run_folder_of_the_same_config_has_no_differences():
    config = config_lib.resolve(configured(**{"learner.learning_rate": 1 / 3}))
    assert config_lib.differences(config, saved(**{"learner.learning_rate": 1 / 3})) == {}


def test_a_run_folder_of_another_config_is_told_by_key():
    config = config_lib.resolve(default.get_config())
    other = saved(**{"rollout.samples": 8, "loss.clip_low": 0.1, "mesh.data": 4, "eval.every": 3})
    assert config_lib.differences(config, other) == {
        "rollout.samples": (8, 16), "pods.keep": (8, 16), "loss.clip_low": (0.1, 0.2)
    }  # fmt: skip
    del other["loss"]["clip_low"]
    other["loss"]["old_key"] = 1
    found = config_lib.differences(config, other)
    assert found["loss.clip_low"] == ("(absent)", 0.2) and found["loss.old_key"] == (1, "(absent)")


@pytest.mark.parametrize("key", [key for key in CHANGED if CHANGED[key]])
def test_which_keys_may_differ(key):
    value, also = CHANGED[key]
    config = config_lib.resolve(configured(**also))
    model = ("remat", "attention", "attention_chunk", "token_chunk")
    layout = (*model, "lanes", "slots", "segment", "columns", "micro_batches")
    block, _, leaf = key.rpartition(".")
    free = block in ("mesh", "hosts", "checkpoint", "eval", "rewards", "metrics") or leaf in layout or key == "name"
    length = key in ("budget.rollouts", "budget.epochs")  # the default is uniform, with a constant rate
    found = config_lib.differences(config, saved(**also, **{key: value}))
    assert (key not in found) == (free or length)


@pytest.mark.parametrize("changes", [CERO, {"learner.schedule": "cosine"}])
def test_the_length_may_not_differ_where_it_shapes_the_whole_run(changes):
    config = config_lib.resolve(configured(**changes))
    found = config_lib.differences(config, saved(**changes, **{"budget.rollouts": 40_960}))
    assert found == {"budget.rollouts": (40_960, 81_920)}


def test_ignored_keys_are_an_argument():
    config = config_lib.resolve(default.get_config())
    other = saved(**{"loss.clip_low": 0.1, "name": "x"})
    assert config_lib.differences(config, other, ignore=("loss.*",)) == {"name": ("x", "grpo")}


@pytest.mark.parametrize(
    "text, told",
    [
        ('{"rollout": {"samples": %s}, "budget": {}}' % 10**400, "rollout.samples is a number of more than 64 bits"),
        ('{"rollout": {}, "budget": ' + '{"a": ' * 100_000, "cannot be read as JSON (maximum recursion depth"),
        ('{"budget": {}, "rollout": ' + '{"a": ' * 990 + "1" + "}" * 991, "cannot be read as JSON (maximum recursion"),
        ('{"rollout": {}, "budget": ' + "1" * 5_000 + "}", "cannot be read as JSON (Exceeds the limit"),
    ],
)
def test_a_saved_config_that_nobody_can_have_saved_is_told_by_its_file(text, told, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(config_lib.ConfigError) as caught:
        config_lib.read_saved(file)
    assert str(caught.value).startswith(f"{file}") and told in str(caught.value)


@pytest.mark.parametrize("key", ["seed", "learner.learning_rate"])
def test_a_number_of_more_than_64_bits_is_told_by_its_key(key):
    with pytest.raises(config_lib.ConfigError, match=f"^{key} is a number of more than 64 bits; give a smaller one"):
        config_lib.resolve(config_lib.flat(config_lib.resolve(default.get_config())) | {key: 10**400})

"""Every shipped experiment, with every preset, resolves; and each is what its name says."""

import importlib.util
import pathlib

import pytest

from configs import cero, default, grpo, jackpot, pods, presets
from rljax import config as config_lib

FOLDER = pathlib.Path(default.__file__).parent
EXPERIMENTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("default", "presets", "papers"))
OWN = {  # presets that an experiment has beside those of all
    "grpo": grpo.PAPERS, "pods": pods.PAPER, "cero": cero.PAPER, "jackpot": jackpot.PEERS | jackpot.PAPER,
    "full": jackpot.PEERS,
}  # fmt: skip


def experiment(name: str, *preset: str) -> config_lib.Config:
    module = load(FOLDER / f"{name}.py")
    return config_lib.resolve(module.get_config(*preset))


def load(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(f"{path.stem}_experiment", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("preset", presets.PRESETS)
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_resolves_with_every_preset(path, preset):
    assert config_lib.resolve(load(path).get_config(preset)).name == path.stem


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_says_what_it_is_and_how_it_is_run(path):
    doc = load(path).__doc__
    assert f"python -m rljax.main --config=configs/{path.name}" in doc
    assert "arXiv" in doc


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_unknown_preset_is_told_with_the_known_ones(path):
    with pytest.raises(ValueError) as caught:
        load(path).get_config("tony")
    known = ", ".join(presets.PRESETS | OWN[path.stem])
    assert str(caught.value) == f"unknown preset 'tony' (did you mean 'tiny'?); known presets: {known}"


def test_tiny_is_the_default():
    assert presets.apply(default.get_config(), "tiny") == default.get_config()
    for path in EXPERIMENTS:
        module = load(path)
        assert module.get_config() == module.get_config("tiny")


def test_grpo_is_uniform_and_keeps_every_row():
    config = experiment("grpo")
    assert config.budget.rule == "uniform" and config.pods.rule == "all"
    assert config.pods.keep == config.rollout.samples


def test_pods_keeps_a_part():
    config = experiment("pods")
    assert config.pods.rule == "max_variance" and 2 <= config.pods.keep < config.rollout.samples
    assert config.budget.rule == "uniform" and config.rollout.slots >= config.rollout.samples


def test_cero_spends_its_budget_by_price():
    config = experiment("cero")
    assert config.budget.rule == "cero" and config.pods.rule == "all"
    # A budget that binds: less than every prompt's N_max in every epoch.
    most = config.task.train_prompts * config.budget.epochs * config.rollout.samples
    assert config.budget.rollouts < most


@pytest.mark.parametrize("peer", jackpot.PEERS)
def test_jackpots_peers_differ_in_the_correction_alone(peer):
    config, own = experiment("jackpot", peer), experiment("jackpot")
    assert config.name == f"jackpot-{peer}"
    corrections = config.jackpot.rule, config.loss.correction, config.actor.distill_coef > 0, config.actor.path
    want = {
        "none": ("none", "none", False, "tiny-actor"),
        "tis": ("none", "truncate", False, "tiny-actor"),
        "tis_kl": ("none", "truncate", True, "tiny-actor"),
        "kl_only": ("none", "none", True, "tiny-actor"),
        "on_policy": ("none", "none", True, ""),
        "stale": ("obrs", "none", True, ""),
    }
    assert corrections == want[peer]
    assert (config.rollout, config.budget, config.task) == (own.rollout, own.budget, own.task)


def test_full_is_all_three():
    config = experiment("full")
    assert config.budget.rule == "cero" and config.jackpot.rule == "obrs" and config.pods.rule == "max_variance"
    assert config.actor.path == "tiny-actor" and config.pods.keep < config.rollout.samples
    assert {experiment("full", peer).name for peer in jackpot.PEERS} == {f"full-{peer}" for peer in jackpot.PEERS}

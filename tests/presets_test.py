"""The papers' runs: each preset resolves, dry-runs, and its models have the published size and fit on eight devices."""

import pathlib

import jax
import pytest

from configs import cero, grpo, jackpot, pods, presets
from rljax import config as config_lib
from rljax import main, parts, plan, sharding
from rljax.models import published
from rljax.models.transformer import Model

FOLDER = pathlib.Path(pods.__file__).parent
EXPERIMENTS = {"pods": pods, "cero": cero, "jackpot": jackpot, "grpo": grpo}
RUNS = [(name, preset) for name, module in EXPERIMENTS.items() if name != "grpo" for preset in module.PAPER]
BASELINES = [("grpo", preset) for preset in grpo.PAPERS]

# Parameters of the policy and of the actor, as the checkpoints' safetensors headers add up on the hub.
QWEN25_3B, QWEN25_7B, QWEN3_4B, QWEN3_17B = 3_085_938_688, 7_615_616_512, 4_022_468_096, 1_720_574_976
SIZES = {
    "qwen25_3b_gsm8k": (QWEN25_3B, None),
    "qwen25_3b_math": (QWEN25_3B, None),
    "llama32_3b_gsm8k": (3_212_749_824, None),
    "qwen25_7b_gsm8k": (QWEN25_7B, None),
    "r1_distill_1p5b": (1_777_088_000, None),
    "qwen3_4b": (QWEN3_4B, None),
    "qwen3_4b_instruct": (QWEN3_4B, None),
    "qwen25_7b": (QWEN25_7B, None),
    "qwen25_math_7b": (QWEN25_7B, None),
    "qwen25_1p5b_to_3b": (QWEN25_3B, 1_543_714_304),
    "qwen3_1p7b_to_4b": (QWEN3_4B, QWEN3_17B),
    "qwen3_1p7b_to_8b": (8_190_735_360, QWEN3_17B),
}
GB = 1e9
# Memory of one of the devices that the docstring names, and how many there are. Ours where the paper's are not known.
HARDWARE = {
    "qwen25_3b_gsm8k": (1, 48), "qwen25_3b_math": (1, 48), "llama32_3b_gsm8k": (1, 48), "qwen25_7b_gsm8k": (8, 40),
    "r1_distill_1p5b": (2, 80), "qwen3_4b": (4, 80), "qwen3_4b_instruct": (4, 80), "qwen25_7b": (4, 80),
    "qwen25_math_7b": (4, 80), "qwen25_1p5b_to_3b": (8, 80), "qwen3_1p7b_to_4b": (8, 80), "qwen3_1p7b_to_8b": (8, 80),
}  # fmt: skip


def resolved(experiment: str, preset: str) -> config_lib.Config:
    return config_lib.resolve(EXPERIMENTS[experiment].get_config(preset))


def shapes(config: config_lib.Config):
    """The shapes of a config's policy and actor (None without), by their names on the hub."""
    actor = published.config(config.actor.path) if config.actor.path else None
    return published.config(config.model.path), actor


def mesh_of(config: config_lib.Config, devices: int):
    axes = config.mesh
    return sharding.make_mesh(data=axes.data, fsdp=axes.fsdp, tensor=axes.tensor, devices=jax.devices()[:devices])


@pytest.mark.parametrize("experiment, preset", RUNS)
def test_a_preset_has_models_of_the_published_size_that_shard_over_eight_devices(experiment, preset):
    config = resolved(experiment, preset)
    policy, actor = shapes(config)
    sizes = plan.count(Model(policy)), None if actor is None else plan.count(Model(actor))
    assert sizes == SIZES[preset]
    eight = plan.state_bytes(config, policy, mesh_of(config, 8), actor)  # an axis that does not divide is an error
    devices, memory = HARDWARE[preset]
    own = plan.state_bytes(config, policy, mesh_of(config, devices), actor)
    print(
        f"\n{experiment}:{preset}: on each of 8 devices {eight.total / GB:.2f} GB "
        f"(parameters {eight.policy.parameters / GB:.2f}, optimizer {eight.policy.optimizer / GB:.2f}); "
        f"on each of {devices}: {own.total / GB:.2f} GB"
    )
    base = eight.policy.parameters - (eight.policy.trained if config.lora.rank else 0)
    whole = SIZES[preset][0] * (4 if config.model.dtype == "float32" else 2)
    assert whole / 8 <= base < whole / 8 * 1.01  # norms alone are on every device
    assert own.total < 0.6 * memory * GB  # the rest is for caches, activations and logits


@pytest.mark.parametrize("experiment, preset", RUNS)
def test_a_preset_divides_over_its_devices(experiment, preset):
    config = resolved(experiment, preset)
    for devices in (HARDWARE[preset][0], 8):
        parts.check_division(config, *[mesh_of(config, devices)] * 2)
    parts.check_sizes(config, Model(published.config(config.model.path)))


@pytest.mark.parametrize("experiment, preset", RUNS + BASELINES)
def test_a_preset_passes_a_dry_run(experiment, preset, capsys, monkeypatch):
    monkeypatch.setitem(main.MODES, "plan", lambda config, devices: None)  # plan_test.py makes one
    config = resolved(experiment, preset)
    assert config.name == f"{experiment}-{preset}"
    assert main.main(["main", f"--config={FOLDER / experiment}.py:{preset}", "--dry_run"]) == 0
    assert config.model.path in capsys.readouterr().out


@pytest.mark.parametrize("experiment, preset", RUNS)
def test_a_preset_says_how_it_is_run(experiment, preset):
    doc = EXPERIMENTS[experiment].PAPER[preset].__doc__
    assert f"python -m rljax.main --config=configs/{experiment}.py:{preset}\n" in doc
    config = resolved(experiment, preset)
    assert doc.startswith(config.model.path.split("/")[1]) or config.actor.path.split("/")[1] in doc


def test_the_methods_are_on():
    for preset in pods.PAPER:
        config = resolved("pods", preset)
        assert config.pods.rule == "max_variance" and config.rollout.samples == 4 * config.pods.keep
    for preset in cero.PAPER:
        config = resolved("cero", preset)
        assert config.budget.rule == "cero" and config.pods.rule == "all"
        most = config.task.train_prompts * config.budget.epochs * config.rollout.samples
        assert config.budget.rollouts < most  # it binds
    for preset in jackpot.PAPER:
        config = resolved("jackpot", preset)
        assert config.jackpot.rule == "obrs" and config.actor.path


def test_grpo_is_held_against_pods_by_equal_updates_and_against_cero_by_an_equal_budget():
    for preset in pods.PAPER:
        own, peer = resolved("pods", preset), resolved("grpo", preset)
        assert peer.rollout.samples == peer.pods.keep == own.pods.keep and peer.pods.rule == "all"
        updates = [c.budget.rollouts / (c.rollout.prompts * c.rollout.samples) for c in (own, peer)]
        assert updates[0] == updates[1]
    for preset in cero.PAPER:
        own, peer = resolved("cero", preset), resolved("grpo", preset)
        assert (peer.budget.rule, peer.budget.rollouts) == ("uniform", own.budget.rollouts)
        assert peer.learner == own.learner and peer.rollout == own.rollout


def test_a_papers_preset_is_its_papers_alone():
    with pytest.raises(ValueError, match="unknown preset 'qwen3_4b'"):
        pods.get_config("qwen3_4b")
    with pytest.raises(ValueError, match="unknown preset 'qwen3_1p7b_to_8b'"):
        cero.get_config("qwen3_1p7b_to_8b")
    assert not set(presets.PRESETS) & {preset for _, preset in RUNS}

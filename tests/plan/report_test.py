"""--mode=plan and --dry_run: what they print, and what they refuse."""

import os
import pathlib
import types

import pytest

from configs import cero
from rljax import config as config_lib
from rljax import main, sharding
from rljax.models import hf
from rljax.models.transformer import Model
from rljax.plan import chips, report
from rljax.plan.estimate import Plan

CONFIGS = pathlib.Path(cero.__file__).parent
GRPO, JACKPOT = CONFIGS / "grpo.py", CONFIGS / "jackpot.py"


def plan(*args: str) -> int:
    return main.main(["main", "--mode=plan", *args])


def test_a_plan_is_printed_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert plan(f"--config={JACKPOT}:qwen3_1p7b_to_8b", "--devices=h200:8") == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen3-8B-Base with Qwen/Qwen3-1.7B-Base, on 8 × h200 of 131 GiB" in out
    assert "data 1 × fsdp 8 × tensor 1" in out and "64 prompts × 8 rollouts of 1024 + 8192 tokens" in out
    for row in ("parameters", "optimizer", "actor", "rows' caches", "gradients", "activations kept", "logits", "all"):
        assert any(line.startswith(row) for line in out.splitlines()), row
    assert "all-gather over fsdp" in out and "reduce-scatter over fsdp" in out and "a step takes at least" in out
    assert not list(tmp_path.iterdir())


def test_a_dry_run_plans_for_this_machine_and_makes_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.main(["main", f"--config={GRPO}", "--dry_run", "--workdir=run"]) == 0
    out = capsys.readouterr().out
    assert "'tiny-policy'" in out and "plan of grpo: tiny-policy, on 8 × cpu of" in out and "warning" not in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "args, told",
    [
        ("--devices=h300:8", ["chip 'h300' is not known (did you mean 'h200'?)", "known: v5e, v5p, v6e, a100, h100,"]),
        ("--devices=v5p-64", ["chip 'v5p-64' is not known", "did you mean 'v5p'"]),
        ("--devices=v5p", ["--devices=v5p says no number of chips", "v5p:32 (a v5p-64 has 64 TensorCores"]),
        ("--devices=v5p:none", ["says no number of chips"]),
        ("--devices=h200:8 --config.mesh.data=3", ["mesh.data=3 × mesh.fsdp=1 × mesh.tensor=1 = 3", "devices, 8"]),
        ("--devices=h200:8 --config.rollout.lanes=4", ["rollout.lanes = 4 does not divide over the 8 devices"]),
        ("--devices=h200:8 --config.mesh.rollout_devices=8", ["mesh.rollout_devices = 8 leaves none of the 8 devices"]),
        ("--devices=h200:3 --config.mesh.data=1 --config.mesh.tensor=3", ["layers.down: dimension 'mlp' of size 512"]),
        ("--config.model.path=Nobody/Knows", ["shape of 'Nobody/Knows' is not known", "Qwen/Qwen3-8B", "hf download"]),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_told_in_one_line(args, told, capsys):
    assert plan(f"--config={GRPO}", *args.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and all(text in err for text in told), err


def test_devices_are_of_plans_alone(capsys):
    assert main.main(["main", f"--config={GRPO}", "--devices=h200:8"]) == 2
    assert "--devices=h200:8 is of --mode=plan" in capsys.readouterr().err


def test_what_does_not_fit_is_told_with_what_to_change():
    found = Plan(
        state={"parameters": 10 * 2**30},
        rollout={"rows' caches": 2**30},
        update={"activations kept": 20 * 2**30, "other work": 2**30},
        apart=False, together=False, collectives={}, work={}, tokens=1,
    )  # fmt: skip
    assert report.trouble(found, 32 * 2**30) is None and report.trouble(found, None) is None
    assert report.trouble(found, 30 * 2**30) == (
        "does not fit: the update needs 31 GiB of a device's 30 GiB; the most is activations kept:"
        " change pods.keep, learner.micro_batches or model.remat"
    )


def test_a_starting_run_is_warned_where_its_plan_is_too_large(monkeypatch):
    c = cero.get_config()
    models = Model(hf.read_config(hf.resolve("tiny-policy"))), None
    meshes = (sharding.single_device_mesh(),) * 2
    config = config_lib.resolve(c)
    assert report.warnings(config, models, meshes) == []
    monkeypatch.setattr(report, "memory_at_hand", lambda device: 100e6)
    (told,) = report.warnings(config, models, meshes)
    assert told.startswith("does not fit: the update needs ") and "95.4 MiB" in told


def test_memory_at_hand():
    says = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 5})
    silent = types.SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    cpu = types.SimpleNamespace(platform="cpu", memory_stats=lambda: None)
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert [report.memory_at_hand(device) for device in (says, silent, cpu)] == [5, None, whole / 8]


def test_chips_by_what_jax_calls_them():
    names = {"TPU v5 lite": "v5e", "TPU v5p": "v5p", "TPU v6 lite": "v6e", "NVIDIA H100 80GB HBM3": "h100", "cpu": None}
    assert {name: chips.of_device(name) for name in names} == names

"""How many programs a run of everything compiles, and when."""

import re

import jax
import pytest

from configs import full
from rljax import config, train

pytestmark = pytest.mark.usefixtures("few_devices")

# Of an operation or two: loading and exporting weights, first states, zeros of a pool, random keys, the learning rate.
SMALL = {
    "zeros", "put", "stage", "<lambda>", "init", "_new_pool", "schedule", "_threefry_seed", "_threefry_fold_in",
    "convert_element_type", "broadcast_in_dim", "dynamic_slice", "squeeze",
}  # fmt: skip


@pytest.mark.slow
def test_a_run_compiles_at_most_twelve_programs_and_each_at_its_first_use(
    tiny_checkpoint, actor_checkpoint, tiny_tasks, tmp_path, caplog, monkeypatch
):
    """configs/full.py in four steps, evaluated before them, between them and after."""
    c = full.get_config()
    c.update_from_flattened_dict({
        "model.path": tiny_checkpoint, "actor.path": actor_checkpoint, "task.name": f"{tiny_tasks}:parity_task",
        "task.train_prompts": 24, "task.eval_prompts": 12, "rollout.prompts": 8, "rollout.samples": 8,
        "rollout.lanes": 8, "rollout.slots": 8, "pods.keep": 4, "budget.rollouts": 256, "budget.epochs": 3,
        "eval.every": 2, "checkpoint.every": 2,
    })  # fmt: skip
    ends, real = [], train.train_step

    def stepping(*args):
        out = real(*args)
        ends.append(len(caplog.records))
        return out

    monkeypatch.setattr(train, "train_step", stepping)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        train.run(config.resolve(c), tmp_path / "run")

    def compiled(begin=None, end=None):
        found = (re.match(r"Compiling jit\((.*?)\) with", r.getMessage()) for r in caplog.records[begin:end])
        return [match[1] for match in found if match]

    of_size = [name for name in compiled() if name not in SMALL]
    assert {"train_step", "_bind", "_decode_segment", "_select", "allocate", "update"} <= set(of_size)
    assert len(of_size) <= 12, of_size
    assert len(ends) == 4 and compiled(ends[0], ends[3]) == []

"""Eight virtual CPU devices for every test, and what several files share: tiny models, a task, a config."""

import dataclasses
import json
import os
import pathlib
import shutil
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # a name that is no folder is refused without asking the network
# Most of the time of these tests is compilation, and little of it is worth optimising.
os.environ["XLA_FLAGS"] = " ".join([
    os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true",
])  # fmt: skip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rljax import config as config_lib
from rljax import sharding
from rljax.models import hf
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.types import TrainBatch

TASKS = '''
"""Tasks whose rewards random text can earn. Graded in another process: no jax here."""
from rljax.tasks.base import Task

def examples(split, count):
    prompts = [f"{split}{i}" + "=" * (i % 5) for i in range(count)]
    return [{"prompt": p, "answer": "", "kind": f"k{i % 2}", "id": i} for i, p in enumerate(prompts)]

def parity(completion, example):
    """Even byte sums are right; every fourth prompt is always solved, every fourth never."""
    return {0: 1.0, 1: 0.0}.get(example["id"] % 4, float(sum(map(ord, completion)) % 2 == 0))

def faulty(completion, example):
    """Of eight byte sums one raises and one has no reward."""
    code = sum(map(ord, completion)) % 8
    if code == 0:
        raise KeyError("no such unit")
    return None if code == 1 else float(code % 2)

def hopeless(completion, example):
    return None

def task(grade):
    return lambda c: Task(
        name="parity",
        train=examples(c.path + "t", c.train_prompts),
        eval=examples("e", c.eval_prompts),
        grade=grade,
    )

parity_task, faulty_task, hopeless_task = map(task, (parity, faulty, hopeless))

def empty_task(c):
    return Task(name="empty", train=[], eval=examples("e", 1), grade=parity)

def lacking_task(c):
    return Task(name="lacking", train=[{"prompt": "1+1="}], eval=examples("e", 1), grade=parity)
'''


def random_config(**changes) -> ModelConfig:
    """A decoder small enough to compile in a second, with grouped heads and an odd number of layers."""
    base = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rope_theta": 1e4,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
        "qkv_bias": False,
        "qk_norm": False,
        "max_positions": 128,
    }
    return ModelConfig(**base | changes)


@pytest.fixture(scope="module", autouse=True)
def forget_compiled():
    """Compiled programs of all files together are gigabytes; where they are two, the next file begins without."""
    yield
    status = pathlib.Path("/proc/self/statm")
    if status.exists() and int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > 2 * 2**30:
        jax.clear_caches()


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="session")
def make_clock():
    return Clock


@pytest.fixture
def other_process(monkeypatch):
    """The tests' process is number 1 of several, which writes and says nothing."""
    monkeypatch.setattr(jax, "process_index", lambda: 1)


@pytest.fixture(scope="session")
def make_config():
    return random_config


@pytest.fixture(scope="session")
def random_model():
    """(model, float32 params) of random_config(), its weights large enough for the samples to differ."""
    model = Model(random_config())
    init = jax.jit(lambda key: jax.tree.map(lambda p: 2 * p if p.ndim == 3 else p, model.init(key)))
    return model, init(jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Logits are the parameter z itself, at every position; a model by the methods that the learner calls."""

    def on(self, mesh):
        return self

    def extend(self, params, tokens, valid, prefix):
        return jnp.zeros((*tokens.shape, 1))

    def unembed(self, params, hidden):
        return hidden + params["z"]


@pytest.fixture(scope="session")
def softmax_model():
    return Softmax()


@pytest.fixture(scope="session")
def make_batch():
    """make_batch(prompts, rows, …): a TrainBatch of ragged random rows, with padding rows and prompts."""

    def make(P=8, K=3, S=6, T=5, vocab=32, padding_prompts=2, seed=0) -> TrainBatch:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, T + 1, (P, K))
        lengths[0, 0] = T
        lengths[1, K - 1] = 0  # a padding row
        prompt_lengths = rng.integers(1, S + 1, P)
        lengths[P - padding_prompts :] = prompt_lengths[P - padding_prompts :] = 0
        return TrainBatch(
            prompt_tokens=rng.integers(0, vocab, (P, S)).astype(np.int32),
            prompt_lengths=prompt_lengths.astype(np.int32),
            tokens=rng.integers(0, vocab, (P, K, T)).astype(np.int32),
            lengths=lengths.astype(np.int32),
            sampler_logprobs=rng.uniform(-4, -3, (P, K, T)).astype(np.float32),
            advantages=rng.normal(size=(P, K)).astype(np.float32),
            draws=np.arange(P, dtype=np.uint32),
            samples=np.tile(np.arange(K, dtype=np.int32), (P, 1)),
            top_ids=np.zeros((P, K, T, 0), np.int32),
            top_logprobs=np.zeros((P, K, T, 0), np.float32),
        )

    return make


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """Folder of a random decoder and a byte tokenizer; a quarter of the ids stop, so that lengths differ."""
    from launch import make_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "random"
    model = Model(random_config(vocab_size=make_tiny.VOCAB, num_layers=2))
    hf.save(folder, model, jax.jit(model.init)(jax.random.key(1)))
    make_tiny.make_tokenizer().save_pretrained(folder)
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {[256, *range(60)]}}}')
    return str(folder)


@pytest.fixture(scope="session")
def actor_checkpoint(tmp_path_factory, tiny_checkpoint):
    """Folder of another random decoder with tiny_checkpoint's tokenizer, one layer less."""
    folder = tmp_path_factory.mktemp("actor") / "actor"
    config = hf.read_config(pathlib.Path(tiny_checkpoint))
    model = Model(dataclasses.replace(config, num_layers=1))
    hf.save(folder, model, jax.jit(model.init)(jax.random.key(2)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path(tiny_checkpoint) / name, folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_tasks(tmp_path_factory):
    """Name of an importable module with the functions of TASKS, here and in grading processes."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rljax_test_tasks.py").write_text(TASKS)
    sys.path.insert(0, str(folder))
    yield "rljax_test_tasks"
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def few_devices(tmp_path_factory):
    """A mesh of as many devices as its sizes name (-1: one), and one compilation for equal programs."""

    def make_mesh(data, fsdp=1, tensor=1, devices=None):
        data = max(1, data)
        devices = jax.devices()[: data * fsdp * tensor] if devices is None else devices
        return real(data=data, fsdp=fsdp, tensor=tensor, devices=devices)

    real = sharding.make_mesh
    options = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}
    before = {name: getattr(jax.config, name) for name in (*options, "jax_compilation_cache_dir")}
    for name, value in options.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    compilation_cache.reset_cache()  # it reads the folder's name at its next use
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", make_mesh)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def run_config(tiny_checkpoint, tiny_tasks):
    """run_config({"rollout.samples": 8}): the default config, small, with changes by key; resolved."""
    from configs import default

    small = {
        "model.path": tiny_checkpoint, "task.name": f"{tiny_tasks}:parity_task", "task.train_prompts": 12,
        "task.eval_prompts": 5, "rollout.prompts": 4, "rollout.samples": 4, "rollout.max_new_tokens": 4,
        "rollout.lanes": 4, "rollout.slots": 4, "rollout.segment": 4, "budget.rollouts": 96, "budget.epochs": 3,
        "learner.learning_rate": 1e-2, "learner.warmup_updates": 2, "eval.every": 2, "eval.samples": 2,
        "checkpoint.every": 1, "rewards.cpu_seconds": 20.0,
    }  # fmt: skip

    def make(changes=None):
        config = default.get_config()
        config.update_from_flattened_dict(small | (changes if changes is not None else {}))
        return config_lib.resolve(config)

    return make


def _timeless(tree):
    """Without what the clock decides."""
    if isinstance(tree, list):
        return [_timeless(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    return {k: _timeless(v) for k, v in tree.items() if not k.startswith("time/") and not k.endswith(("_s", "_per_s"))}


@pytest.fixture(scope="session")
def left():
    """left(folder): what a run left, but for times: its lines, completions and summary, all of it exact."""

    def read(folder):
        lines = {
            path.relative_to(folder).as_posix(): [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
            for path in sorted(folder.rglob("*.jsonl"))
        }
        return lines, _timeless(json.loads((folder / "summary.json").read_text()))

    return read

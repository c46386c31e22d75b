import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import rljax
from rljax.checkpoint import Checkpointer, CheckpointError
from rljax.types import LearnerState, RunState, pytree

ROOT = pathlib.Path(rljax.__file__).parent.parent


@pytree
class Posterior:
    alpha: np.ndarray
    seen: np.ndarray
    price: np.floating
    key: jax.Array
    over: np.ndarray


def mesh_of(*shape):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 virtual CPU devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, ("rows", "columns")[: len(shape)])


def posterior():
    return Posterior(
        alpha=np.array([0.1, 1 / 3, 5e-324]),  # float64, the last one subnormal
        seen=np.array([2**62 + 1, -3], np.int64),
        price=np.float64(0.1) + np.float64(0.2),
        key=jnp.array([2**32 - 1, 7], jnp.uint32),
        over=np.array([True, False]),
    )


@jax.jit
def one_update(params):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3)))
    return optimizer.update(params, optimizer.init(params), params)[1]


def run_state(step=3, budget=(), seed=0, totals=None):
    """A state of random bits (NaNs with payloads among them), with a real optimizer's state."""
    bits = np.random.default_rng(seed).integers(0, 2**16, (8, 16), np.uint16)
    params = {
        "layers": {"wq": jnp.asarray(bits.view(ml_dtypes.bfloat16))},
        "scale": jnp.asarray(np.random.default_rng(seed + 1).standard_normal(16).astype(np.float32)),
    }
    opt_state = one_update(params)
    learner = LearnerState(params=params, opt_state=opt_state, updates=jnp.int32(step))
    return RunState(learner=learner, budget=budget, draws=10 * step, step=step, totals={} if totals is None else totals)


def small_state(step, value=0.0, width=4, **fields):
    params = {"w": jnp.full((2, width), value, jnp.float32)}
    learner = LearnerState(params=params, opt_state=(), updates=jnp.int32(step))
    return RunState(**({"budget": (), "draws": 0, "totals": {}} | fields), learner=learner, step=step)


def bits_of(run_state):
    """Name, dtype, shape and bytes of every leaf, and the host fields."""
    leaves = jax.tree_util.tree_leaves_with_path((run_state.learner, run_state.budget))
    arrays = [
        (jax.tree_util.keystr(path), np.asarray(leaf).dtype, np.shape(leaf), np.asarray(leaf).tobytes())
        for path, leaf in leaves
    ]
    return arrays, run_state.draws, run_state.step, run_state.totals


def placed(run_state, mesh, spec):
    """The learner's matrices over the mesh by `spec`; everything else of it replicated."""

    def put(leaf):
        return jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim == 2 else PartitionSpec()))

    learner = jax.tree.map(put, run_state.learner)
    return RunState(
        learner=learner,
        budget=run_state.budget,
        draws=run_state.draws,
        step=run_state.step,
        totals=run_state.totals,
    )


def files_limited_to(size):
    """Lets every write past `size` bytes of a file fail, as a full disk does; None lifts the limit."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


@pytest.mark.parametrize("budget", [(), posterior()], ids=["empty", "dataclass"])
def test_round_trip_keeps_every_bit_type_and_node(tmp_path, budget):
    totals = {
        "rollouts": 2**63,
        "seconds": 0.1 + 0.2,
        "eval": [{"best": None, "name": "é"}, True],
        "tiny": 5e-324,
    }
    saved = run_state(budget=budget, totals=totals)
    with Checkpointer(tmp_path, 2) as checkpointer:
        checkpointer.save(3, saved)
        restored = checkpointer.restore(run_state(step=0, budget=budget, seed=5))
    assert bits_of(restored) == bits_of(saved)
    structure = jax.tree.structure((saved.learner, saved.budget))
    assert jax.tree.structure((restored.learner, restored.budget)) == structure
    assert isinstance(restored.learner.opt_state[1][0], optax.ScaleByAdamState)
    kinds = [type(leaf) for leaf in jax.tree.leaves((saved.learner, saved.budget))]
    assert [type(leaf) for leaf in jax.tree.leaves((restored.learner, restored.budget))] == kinds


@pytest.mark.parametrize("abstract", [False, True], ids=["arrays", "ShapeDtypeStructs"])
@pytest.mark.parametrize(
    "shape, spec",
    [((8,), ("rows", None)), ((2, 4), ("columns", "rows")), ((1,), (None, None))],
    ids=["8", "2x4", "1"],
)
def test_restores_onto_another_mesh(tmp_path, shape, spec, abstract):
    saved = placed(run_state(), mesh_of(4, 2), PartitionSpec("rows", "columns"))
    template = placed(run_state(step=0, seed=5), mesh_of(*shape), PartitionSpec(*spec))
    wanted = [leaf.sharding for leaf in jax.tree.leaves(template.learner)]
    if abstract:
        learner = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), template.learner)
        template = RunState(learner=learner, budget=(), draws=0, step=0, totals={})
    with Checkpointer(tmp_path, 2) as checkpointer:
        checkpointer.save(3, saved)
        restored = checkpointer.restore(template)
    assert bits_of(restored) == bits_of(saved)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored.learner)] == wanted


def test_uncommitted_leaf_still_mixes_with_a_mesh(tmp_path):
    sharded = jax.device_put(jnp.arange(8.0), NamedSharding(mesh_of(8), PartitionSpec("rows")))
    state = small_state(1)
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(state)
    # A leaf pinned to device 0 would raise "incompatible devices" here.
    assert float(jax.jit(lambda x, n: (x * n).sum())(sharded, restored.learner.updates)) == 28.0


def test_saved_values_survive_donation_and_writes_by_the_caller(tmp_path):
    add_one = partial(jax.jit, donate_argnums=0)(lambda x: x + 1)
    values = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    weights = jax.device_put(values, jax.devices()[0])  # committed: handed to Orbax as it is
    counts = np.zeros(1000, np.int64)
    learner = LearnerState(params=weights, opt_state=(), updates=jnp.int32(1))
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, RunState(learner=learner, budget=counts, draws=0, step=1, totals={}))
        counts += 9
        for _ in range(3):
            weights = add_one(weights)
        weights.block_until_ready()
        learner = LearnerState(params=weights, opt_state=(), updates=jnp.int32(1))
        restored = checkpointer.restore(RunState(learner=learner, budget=counts, draws=0, step=1, totals={}))
    np.testing.assert_array_equal(restored.learner.params, values)
    np.testing.assert_array_equal(restored.budget, np.zeros(1000))


def test_keeps_the_newest_and_a_new_process_finds_them(tmp_path):
    with Checkpointer(tmp_path / "a" / "b", 2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (5, 10, 15):
            checkpointer.save(step, small_state(step, value=step))
            assert checkpointer.latest_step() == step
    with Checkpointer(tmp_path / "a" / "b", 2) as checkpointer:
        assert checkpointer.latest_step() == 15
        assert checkpointer.restore(small_state(0)).learner.params["w"][0, 0] == 15
        assert checkpointer.restore(small_state(0), step=10).step == 10
        with pytest.raises(FileNotFoundError, match=r"step 5 in .*/a/b; it holds steps \[10, 15\]"):
            checkpointer.restore(small_state(0), step=5)


def test_no_checkpoint_names_the_folder_and_a_reader_makes_none(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, 1, read_only=True) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(FileNotFoundError, match=f"no checkpoint in {folder}"):
            checkpointer.restore(small_state(0))
        with pytest.raises(ValueError, match="read-only"):
            checkpointer.save(0, small_state(0))
    assert not folder.exists()


@pytest.mark.parametrize(
    "template, message",
    [
        (small_state(1, width=5), r"learner\.params\.w is float32\[2, 4\] there and float32\[2, 5\] here"),
        (small_state(1, budget=np.zeros(3)), r"budget is float32\[3\] there and float64\[3\] here"),
        (small_state(1, budget=()), r"budget is float32\[3\] there and absent here"),
        (
            small_state(1, budget={"alpha": np.zeros(3, np.float32)}),
            r"budget\.alpha is absent there and float32\[3\] here",
        ),
    ],
    ids=["shape", "dtype", "stored only", "template only"],
)
def test_template_of_another_run_names_the_first_leaf(tmp_path, template, message):
    with Checkpointer(tmp_path, 1) as checkpointer:
        checkpointer.save(1, small_state(1, budget=np.zeros(3, np.float32)))
        with pytest.raises(CheckpointError, match=f"step 1 in {tmp_path} is of another run: {message}"):
            checkpointer.restore(template)


@pytest.mark.parametrize("step", [3, 4])
def test_saving_over_a_later_step_is_refused(tmp_path, step):
    with Checkpointer(tmp_path, 3) as checkpointer:
        for saved in (2, 4):
            checkpointer.save(saved, small_state(saved, value=saved))
        checkpointer.restore(small_state(0), step=2)
        with pytest.raises(ValueError, match=f"step {step} not saved: {tmp_path} already holds step 4"):
            checkpointer.save(step, small_state(step))
        assert checkpointer.restore(small_state(0)).learner.params["w"][0, 0] == 4


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of Orbax's failed threads
@pytest.mark.parametrize("then", ["wait", "close", "save", "restore"])
def test_failed_write_is_raised_by_the_next_call(tmp_path, then):
    noise = np.random.default_rng(0).standard_normal(50_000)  # 400 kB that do not compress
    checkpointer = Checkpointer(tmp_path, 2)
    checkpointer.save(1, small_state(1, budget=noise))
    checkpointer.wait()
    files_limited_to(100_000)
    try:
        checkpointer.save(2, small_state(2, budget=noise))
        with pytest.raises(CheckpointError, match=f"step 2 was not saved in {tmp_path}: .*File too large"):
            {
                "wait": checkpointer.wait,
                "close": checkpointer.close,
                "save": lambda: checkpointer.save(3, small_state(3)),
                "restore": lambda: checkpointer.restore(small_state(0, budget=noise)),
            }[then]()
    finally:
        files_limited_to(None)
    if then == "wait":  # there is space again: the run goes on to its next save
        assert checkpointer.latest_step() == 1
        # Not step 2: threads of the failed save may still be writing into its temporary folder.
        checkpointer.save(3, small_state(3, budget=noise))
        assert checkpointer.restore(small_state(0, budget=noise)).step == 3
    if then != "close":
        checkpointer.close()
    with Checkpointer(tmp_path, 2, read_only=True) as reader:
        assert reader.restore(small_state(0, budget=noise)).step == (3 if then == "wait" else 1)


def test_folder_that_cannot_be_written_fails_at_once(tmp_path):
    with Checkpointer(tmp_path / "checkpoints", 1) as checkpointer:
        (tmp_path / "checkpoints").rmdir()
        (tmp_path / "checkpoints").write_text("in the way")
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            checkpointer.save(1, small_state(1))


KILLED_IN_MID_SAVE = """
import os, pathlib, signal, sys, threading, time
import jax.numpy as jnp, numpy as np
from rljax.checkpoint import Checkpointer
from rljax.types import LearnerState, RunState

def state(step):
    values = np.random.default_rng(step).standard_normal((2000, 2000))
    learner = LearnerState(params=jnp.float32(step), opt_state=(), updates=jnp.int32(step))
    return RunState(learner=learner, budget=values, draws=0, step=step, totals={})

def kill_when_begun(folder):
    while not any(path.name.startswith("2") for path in folder.iterdir()):
        time.sleep(1e-4)
    os.kill(os.getpid(), signal.SIGKILL)

folder = pathlib.Path(sys.argv[1])
checkpointer = Checkpointer(folder, 2)
checkpointer.save(1, state(1))
checkpointer.wait()
threading.Thread(target=kill_when_begun, args=(folder,), daemon=True).start()
checkpointer.save(2, state(2))
checkpointer.wait()
"""


def test_killed_in_mid_save_the_last_committed_step_restores(tmp_path):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_MID_SAVE, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left[0] == "1" and left[1:] and left[1] != "2", f"not killed in mid-save: {left}"

    def state(step):
        values = np.random.default_rng(step).standard_normal((2000, 2000))
        learner = LearnerState(params=jnp.float32(step), opt_state=(), updates=jnp.int32(step))
        return RunState(learner=learner, budget=values, draws=0, step=step, totals={})

    with Checkpointer(tmp_path, 2) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert bits_of(checkpointer.restore(state(0))) == bits_of(state(1))
        checkpointer.save(2, state(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]  # the killed save's files are gone


@pytest.mark.parametrize(
    "state, error, message",
    [
        (small_state(1, totals={"a": {3: 1}}), TypeError, r"totals\.a has the key 3"),
        (small_state(1, totals={"a": [1, np.float32(2)]}), TypeError, r"totals\.a\.1 is a float32"),
        (small_state(1, totals={"a": (1, 2)}), TypeError, r"totals\.a is a tuple"),
        (small_state(1, budget={"x": 1.5}), TypeError, r"budget\.x is a float"),
        (small_state(1, budget={"x": np.zeros((0, 3))}), ValueError, r"budget\.x has shape \(0, 3\)"),
        (
            small_state(1, budget={"x.y": np.zeros(1), "x": {"y": np.zeros(1)}}),
            ValueError,
            r"two leaves of the run state are named budget\.x\.y",
        ),
        (small_state(2), ValueError, "asked to save step 1, but the run state is of step 2"),
    ],
    ids=["int key", "numpy scalar", "tuple", "python float", "empty", "same name", "step"],
)
def test_state_that_would_not_come_back_is_refused(tmp_path, state, error, message):
    with Checkpointer(tmp_path, 1) as checkpointer:
        with pytest.raises(error, match=message):
            checkpointer.save(1, state)
        assert checkpointer.latest_step() is None


def test_keep_below_one_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="checkpoint.keep is 0"):
        Checkpointer(tmp_path, 0)


def test_parameters_alone_come_back_and_damage_is_told(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(3, small_state(3))
    template = small_state(0).learner.params
    with Checkpointer(tmp_path, keep=2, read_only=True) as reader:
        step, params = reader.restore_params(template)
        assert step == 3
        jax.tree.map(np.testing.assert_array_equal, params, small_state(3).learner.params)
        with pytest.raises(CheckpointError, match=r"learner.params.other is absent there"):
            reader.restore_params({**template, "other": template["w"]})
    shutil.rmtree(tmp_path / "3" / "arrays")
    with Checkpointer(tmp_path, keep=2, read_only=True) as reader:
        with pytest.raises(CheckpointError, match="step 3 .* cannot be read .*Delete the folder 3"):
            reader.restore_params(template)

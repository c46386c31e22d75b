"""One RunState, saved and restored with Orbax.

A checkpoint is `folder/STEP/` with two Orbax items: `arrays`, the leaves of the learner, of the budget and
of the rollouts' stale weights under their dotted names (`learner.params.layers.q`; frozen parameters are the base
model's and stay out), and `host`, the plain JSON data. A save is asynchronous and atomic: a step folder appears under
its name only when all of it is on disk, so a process killed in mid-save leaves the previous step as the latest. Every
process of a multi-host run calls every method; Orbax writes each process's shards.

Where the leaves come back:
    a committed jax.Array, or a ShapeDtypeStruct with a sharding     the template's sharding, on any mesh
    an uncommitted jax.Array, or a ShapeDtypeStruct without one      uncommitted, on the default device
    a NumPy array or scalar                                          NumPy
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rljax.types import RunState

ARRAYS, HOST = "arrays", "host"  # the two Orbax items of a step
ARRAY_FIELDS = ("learner", "budget", "behaviour")
HOST_FIELDS = ("draws", "step", "totals")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or does not fit the run that asks for it."""


class Checkpointer:
    """Saves and restores the RunStates of one run folder; the newest `keep` steps stay.

    Args:
        folder: where the steps lie; made if missing, unless `read_only`. A path, or a URL that Orbax knows.
        keep: newest checkpoints kept, >= 1.
        read_only: for readers of a folder that a run may be writing: nothing is made, saved or cleaned up.

    Usable as a context manager, which closes it. Raises ValueError if `keep` < 1.
    """

    def __init__(self, folder: str | os.PathLike, keep: int, *, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"checkpoint.keep is {keep}; at least 1 checkpoint must be kept to resume from")
        path = os.fspath(folder)
        self.folder = path if "://" in path else os.path.abspath(path)  # Orbax refuses relative paths
        self._read_only = read_only
        self._saving: int | None = None  # step whose save has not been waited for
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        for item, kinds in (
            (ARRAYS, (ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeRestore)),
            (HOST, (ocp.args.JsonSave, ocp.args.JsonRestore)),
        ):
            for kind in kinds:
                registry.add(item, kind)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep),
            create=not read_only,
            cleanup_tmp_directories=not read_only,  # what a killed save left
            # A folder that cannot be made fails at once; in the background it would fail after minutes.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options, handler_registry=registry)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """The newest step, one being saved included; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, run_state: RunState) -> None:
        """Starts the save of `run_state` as `step`; returns when its arrays may be donated or overwritten.

        Errors of an earlier save are raised here. A step at or before the latest stored one is refused: after
        a rollback the later steps are of another future, and which of the two to keep is the user's choice.

        Raises:
            ValueError: the step is not run_state.step, or not after the latest stored step; an empty leaf.
            TypeError: a leaf that is no array, or totals that JSON would change; names the leaf.
            CheckpointError: the save could not be started, or the previous one failed.
        """
        if self._read_only:
            raise ValueError(f"step {step} not saved: {self.folder} was opened read-only")
        step = operator.index(step)
        if step != run_state.step:
            raise ValueError(f"asked to save step {step}, but the run state is of step {run_state.step}")
        _check_json(run_state.totals, "totals")
        arrays = {name: _to_stored(name, leaf) for name, leaf in _named_leaves(_array_part(run_state)).items()}
        host = {
            "draws": operator.index(run_state.draws),
            "step": step,
            "totals": run_state.totals,
        }
        self.wait()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"checkpoint of step {step} not saved: {self.folder} already holds step {latest}. After a "
                f"rollback, delete the folders of steps {step} and later there, or use a new workdir"
            )
        items = ocp.args.Composite(**{ARRAYS: ocp.args.StandardSave(arrays), HOST: ocp.args.JsonSave(host)})
        self._saving = step
        try:
            self._manager.save(step, args=items, force=True)  # the caller decides when a save is due
        except Exception as error:
            raise self._failure(step, error) from error

    def restore(self, template: RunState, step: int | None = None) -> RunState:
        """The RunState of `step` (default: the latest), bit for bit, placed as the template's leaves are.

        `template` gives tree, shapes, dtypes and shardings; its values and host fields are not read.

        Raises:
            FileNotFoundError: the folder holds no checkpoint, or not this step.
            CheckpointError: a leaf of the template is absent from the checkpoint (or the reverse), or of
                another shape or dtype; names the first such leaf and both shapes.
        """
        self.wait()
        step = self._existing_step(step)
        with self._reading(step):
            return self._read(step, template)

    def _read(self, step: int, template: RunState) -> RunState:
        wanted = _named_leaves(_array_part(template))
        self._check_fit(step, wanted)
        items = ocp.args.Composite(
            **{
                ARRAYS: ocp.args.StandardRestore({name: _to_request(leaf) for name, leaf in wanted.items()}),
                HOST: ocp.args.JsonRestore(),
            }
        )
        restored = self._manager.restore(step, args=items)
        leaves = [_from_stored(leaf, restored[ARRAYS][name]) for name, leaf in wanted.items()]
        structure = jax.tree.structure(_array_part(template))
        parts = jax.tree.unflatten(structure, leaves)
        parts["learner"] = dataclasses.replace(parts["learner"], frozen=template.learner.frozen)
        return RunState(**parts, **{f: restored[HOST][f] for f in HOST_FIELDS})

    def restore_params(self, template: Any, step: int | None = None) -> tuple[int, Any]:
        """(step, what `learner.params` holds there): the trained parameters alone, placed as the template's are.

        template: the tree of arrays that is trained. Raises what `restore` raises.
        """
        self.wait()
        step = self._existing_step(step)
        with self._reading(step):
            return step, self._read_params(step, template)

    def _read_params(self, step: int, template: Any) -> Any:
        wanted = _named_leaves({"learner": {"params": template}})
        self._check_fit(step, wanted, within="learner.params.")
        requests = {name: _to_request(leaf) for name, leaf in wanted.items()}
        how = ocp.checkpoint_utils.construct_restore_args(requests)
        arrays = ocp.args.PyTreeRestore(requests, restore_args=how, partial_restore=True)
        restored = self._manager.restore(step, args=ocp.args.Composite(**{ARRAYS: arrays}))[ARRAYS]
        values = [_from_stored(leaf, restored[name]) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(template), values)

    def wait(self) -> None:
        """Returns when the save in progress, if any, is committed; raises CheckpointError if it failed."""
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(step, error) from error

    def close(self) -> None:
        """Waits as `wait` does and frees the threads; no method may be called after it."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def _failure(self, step: int | None, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of step {step} was not saved in {self.folder}: {type(error).__name__}: {error}. "
            f"Check the space and the permissions there; the checkpoints before it are untouched"
        )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Whatever a damaged step raises becomes a CheckpointError that says which and what to do."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            told = (str(error).splitlines() + [""])[0]
            raise CheckpointError(
                f"checkpoint of step {step} in {self.folder} cannot be read ({type(error).__name__}: {told}). "
                f"Delete the folder {step} there to go on from the step before"
            ) from error

    def _existing_step(self, step: int | None) -> int:
        steps = sorted(self._manager.all_steps())
        if not steps:
            raise FileNotFoundError(f"no checkpoint in {self.folder}; train first, or name another workdir")
        if step is None:
            return steps[-1]
        if step not in steps:
            raise FileNotFoundError(f"no checkpoint of step {step} in {self.folder}; it holds steps {steps}")
        return step

    def _check_fit(self, step: int, wanted: dict[str, Any], within: str = "") -> None:
        """Raises CheckpointError for the first leaf that differs between the stored step and the template.

        within: how the names begin that are compared.
        """
        everything = self._manager.item_metadata(step)[ARRAYS].tree
        stored = {name: leaf for name, leaf in everything.items() if name.startswith(within)}
        for name in [*wanted, *(name for name in stored if name not in wanted)]:
            there, here = (_describe(leaves.get(name)) for leaves in (stored, wanted))
            if there != here:
                raise CheckpointError(
                    f"checkpoint of step {step} in {self.folder} is of another run: {name} is {there} there "
                    f"and {here} here. Use the config that wrote it, or a new workdir"
                )


def _array_part(run_state: RunState) -> dict[str, Any]:
    parts = {field: getattr(run_state, field) for field in ARRAY_FIELDS}
    return parts | {"learner": dataclasses.replace(run_state.learner, frozen=None)}


def _named_leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Leaves of an _array_part, or of a part of it, by dotted name, in tree order.

    Orbax is given this flat dict and not the tree: names and order are then jax's own for every kind of node
    (NamedTuple, registered dataclass, empty tuple), whichever of them a version of Orbax knows.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the run state are named {twice}; rename the key with a dot in it")
    return named


def _on_mesh(leaf: Any) -> bool:
    """Whether the leaf is committed to its devices, not merely put on the default one."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return isinstance(leaf, jax.Array) and leaf.committed


def _to_stored(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"{name} is a {type(leaf).__name__}; a checkpoint holds arrays only, use np.asarray")
    if leaf.size == 0:
        raise ValueError(f"{name} has shape {leaf.shape}, no elements, which Orbax cannot store; leave it out")
    # A copy of host arrays: the caller may write to its own while the save runs.
    return leaf if _on_mesh(leaf) else np.array(leaf)


def _to_request(leaf: Any) -> Any:
    if _on_mesh(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.empty(leaf.shape, leaf.dtype)  # asks Orbax for a NumPy array


def _from_stored(leaf: Any, value: Any) -> Any:
    if _on_mesh(leaf):
        return value
    if isinstance(leaf, np.generic):
        return value[()]
    return value if isinstance(leaf, np.ndarray) else jnp.asarray(value)


def _describe(leaf: Any) -> str:
    if leaf is None:
        return "absent"
    return f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def _check_json(value: Any, name: str) -> None:
    """Raises TypeError where JSON would give another value back (int keys, tuples, NumPy scalars)."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; JSON keys must be str")
            _check_json(item, f"{name}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_json(item, f"{name}.{i}")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{name} is a {type(value).__name__}; totals must be plain JSON data")

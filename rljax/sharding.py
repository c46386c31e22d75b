"""The mesh, the one table from logical axes to mesh axes, and trees of NamedSharding.

No other module names a mesh axis. Parameters say their logical axes (models/transformer.py); batches and
caches are sharded by prompt.
"""

from __future__ import annotations

import collections
import functools
import math

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")
Box = tuple[tuple[int, int], ...]  # a part of an array: (begin, end) along each dimension

# logical axis → mesh axes that split it; () is replicated.
RULES: dict[str, tuple[str, ...]] = {
    "prompts": ("data", "fsdp"),
    "layers": (),
    "embed": ("fsdp",),
    "embed_norm": (),
    "head_norm": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "lora": (),
    "replicated": (),
}


def make_mesh(*, data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """A mesh of all devices; one axis may be -1 and takes what the others leave.

    Raises ValueError if the axes' product is not the number of devices, or if no axis divides over their slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(len(devices), data=data, fsdp=fsdp, tensor=tensor)
    return Mesh(_arranged(devices, sizes), MESH_AXES)


def abstract_mesh(*, data: int, fsdp: int, tensor: int, devices: int) -> AbstractMesh:
    """The mesh of so many devices that need not be here: to count with."""
    sizes = axis_sizes(devices, data=data, fsdp=fsdp, tensor=tensor)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def axis_sizes(devices: int, *, data: int, fsdp: int, tensor: int) -> dict[str, int]:
    """Devices along each axis; -1 takes what the others leave. ValueError if their product is not the number."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"mesh.{' and mesh.'.join(free)} are both -1; only one axis can take what is left")
    bad = [f"mesh.{name}={size}" for name, size in sizes.items() if size < 1 and size != -1]
    if bad:
        raise ValueError(f"{', '.join(bad)}: an axis is a positive number of devices, or -1")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if fixed != devices and not (free and devices % fixed == 0):
        asked = " × ".join(f"mesh.{name}={size}" for name, size in sizes.items() if size != -1)
        raise ValueError(
            f"{asked} = {fixed} does not {'divide' if free else 'equal'} the number of devices, {devices}; "
            f"choose mesh.data, mesh.fsdp and mesh.tensor with product {devices}"
        )
    return sizes | {name: devices // fixed for name in free}


def _arranged(devices, sizes: dict[str, int]) -> np.ndarray:
    """The devices by the axes' sizes, so that the inner axes lie along the fastest links.

    Slices, which a slower network joins, are split along the outermost axis whose size they divide.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    outer = next((axis for axis in MESH_AXES if sizes[axis] % slices == 0), None)
    if outer is None:
        asked = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
        raise ValueError(
            f"none of {asked} divides over the {slices} slices of the {len(devices)} devices; make one of them a"
            f" multiple of {slices}, best mesh.data"
        )
    across = [slices if axis == outer else 1 for axis in MESH_AXES]
    within = [sizes[axis] // n for axis, n in zip(MESH_AXES, across, strict=True)]
    if slices == 1:
        return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def apart(count: int) -> tuple[list, list]:
    """(devices of the learner, the last `count` ones for rollouts alone). ValueError where the learner gets none."""
    devices = jax.devices()
    if count >= len(devices):
        raise ValueError(
            f"mesh.rollout_devices = {count} leaves none of the {len(devices)} devices to the learner; lower it"
        )
    return devices[: len(devices) - count], devices[len(devices) - count :]


def single_device_mesh() -> Mesh:
    """A mesh of the first local device."""
    return make_mesh(data=1, devices=jax.local_devices()[:1])


def partition_spec(axes: tuple[str | None, ...], what: str = "array") -> PartitionSpec:
    """Logical axes → PartitionSpec; an axis without a rule, or a mesh axis used twice, is a ValueError."""
    used: list[str] = []
    parts = []
    for axis in axes:
        if axis is None:
            parts.append(None)
            continue
        if axis not in RULES:
            raise ValueError(f"{what}: logical axis {axis!r} has no sharding rule; known: {', '.join(RULES)}")
        names = RULES[axis]
        clash = [n for n in names if n in used]
        if clash:
            raise ValueError(f"{what}: axes {axes} use mesh axis {clash[0]!r} twice; change RULES in sharding.py")
        used += names
        parts.append(names if names else None)
    return PartitionSpec(*parts)


def named(
    mesh: Mesh | AbstractMesh, *axes: str | None, shape: tuple[int, ...] | None = None, what: str = "array"
) -> NamedSharding:
    """Sharding of an array by logical axes. With `shape`, a dimension that does not divide is a ValueError."""
    spec = partition_spec(axes, what)
    if shape is not None:
        for axis, size in zip(axes, shape, strict=True):
            names = () if axis is None else RULES[axis]
            parts = math.prod(mesh.shape[n] for n in names)
            if size % parts:
                raise ValueError(
                    f"{what}: dimension {axis!r} of size {size} does not divide over {parts} devices "
                    f"(mesh axes {', '.join(names)}); choose a mesh whose axes divide it"
                )
    return NamedSharding(mesh, spec)


def params_shardings(mesh: Mesh | AbstractMesh, axes, abstract):
    """NamedSharding for each parameter. axes: tree of logical names; abstract: tree of shapes.

    Raises ValueError with the parameter's name where it has no axes, or another number of them than dimensions, and
    what `named` raises.
    """

    def one(path, names, leaf):
        what = jax.tree_util.keystr(path, simple=True, separator=".")
        if names is None or len(names) != len(leaf.shape):
            raise ValueError(
                f"{what}: its shape is {leaf.shape} and its logical axes are {names}; name one for each dimension where"
                " the parameter is made, as nnx.Param(…, axes=(…))"
            )
        return named(mesh, *names, shape=leaf.shape, what=what)

    return jax.tree_util.tree_map_with_path(one, axes, abstract, is_leaf=lambda x: x is None or isinstance(x, tuple))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_prompt(mesh: Mesh, tree):
    """Shardings of a tree whose leaves all lead with the prompt axis.

    What has no elements (top-k tables of k = 0) is whole: so compiled programs return it, and with another sharding
    when it comes back they would be compiled again.
    """

    def one(leaf):
        return named(mesh, "prompts", *[None] * (np.ndim(leaf) - 1)) if 0 not in np.shape(leaf) else replicated(mesh)

    return jax.tree.map(one, tree)


def kept_by_prompt(mesh: Mesh | None, x):
    """x[P, …] inside a program, told to stay split along its prompts; as it is without a mesh, or if P does not divide.

    Untold, the compiler may split activations by features, as the parameters are, and give every device all prompts.
    """
    if mesh is None or mesh.size == 1 or x.shape[0] % size(mesh, "prompts"):
        return x
    return jax.lax.with_sharding_constraint(x, named(mesh, "prompts", *[None] * (x.ndim - 1)))


def size(mesh: Mesh | AbstractMesh, axis: str) -> int:
    """Into how many parts a logical axis is split."""
    return math.prod(mesh.shape[n] for n in RULES[axis])


def mesh_of(tree) -> Mesh:
    """The mesh that a tree of arrays lives on."""
    where = jax.tree.leaves(tree)[0].sharding
    if isinstance(where, NamedSharding) and isinstance(where.mesh, Mesh):
        return where.mesh
    return make_mesh(data=1, devices=list(where.device_set)[:1])


def put(mesh: Mesh, tree, where):
    """Host arrays → device arrays, sharded by `where` (a tree of shardings, or one for all).

    Each process of a run on several hosts has the whole arrays, and places the parts of its own devices.
    """
    if not mesh.is_multi_process:
        return jax.device_put(tree, where)

    def one(leaf, sharded):
        return jax.make_array_from_callback(leaf.shape, sharded, lambda index: leaf[index])

    where = jax.tree.map(lambda _: where, tree) if isinstance(where, NamedSharding) else where
    return jax.tree.map(one, tree, where)


def put_by_prompt(mesh: Mesh, tree):
    """Host arrays → device arrays, split along their leading prompt axis."""
    return put(mesh, tree, by_prompt(mesh, tree))


def everywhere(mesh: Mesh, key: jax.Array) -> jax.Array:
    """An array of the default device, such as a random key, whole on every device of the mesh.

    On several hosts it stays as it is: each has its own, and jax takes it for one value of all.
    """
    return key if mesh.is_multi_process else jax.device_put(key, replicated(mesh))


def moved(tree, where):
    """A copy of the arrays with other shardings, on the same devices or on others: from device to device.

    where: NamedShardings in the arrays' tree. Of one process. jax.device_put alone would take arrays that are to be
    split otherwise through the host.
    """
    return jax.tree.map(_moved, tree, where)


def _moved(x: jax.Array, where: NamedSharding) -> jax.Array:
    held = collections.defaultdict(list)  # box → the devices' copies of it
    for shard in x.addressable_shards:
        held[_box(shard.index, x.shape)].append(shard.data)
    wanted = {device: _box(index, x.shape) for device, index in where.devices_indices_map(x.shape).items()}
    if set(wanted.values()) <= held.keys():
        return jax.device_put(x, where, may_alias=False)
    # Devices that want the same piece ask different holders of it.
    parts = [
        _piece({own: copies[number % len(copies)] for own, copies in held.items()}, box, device)
        for number, (device, box) in enumerate(wanted.items())
    ]
    return jax.make_array_from_single_device_arrays(x.shape, where, parts)


_slice = jax.jit(jax.lax.slice, static_argnums=(1, 2))  # without it the bounds would be sent to the device


def _box(index, shape) -> Box:
    """(begin, end) along each dimension, of a tuple of slices."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _piece(held: dict[Box, jax.Array], wanted: Box, device) -> jax.Array:
    """The box `wanted` of an array on `device`: cut from those that others hold, and joined along axis after axis."""
    pieces = {}
    for own, data in held.items():
        cut = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, wanted, strict=True))
        if all(begin < end for begin, end in cut):
            begins = tuple(a - begin for (a, _), (begin, _) in zip(cut, own, strict=True))
            ends = tuple(b - begin for (_, b), (begin, _) in zip(cut, own, strict=True))
            pieces[cut] = jax.device_put(_slice(data, begins, ends), device, may_alias=False)
    for axis, whole in enumerate(wanted):
        rows = collections.defaultdict(list)
        for cut in sorted(pieces):
            rows[(*cut[:axis], whole, *cut[axis + 1 :])].append(pieces[cut])
        pieces = {cut: row[0] if len(row) == 1 else jax.lax.concatenate(row, axis) for cut, row in rows.items()}
    return pieces[wanted]


def fetch(tree):
    """Device arrays → host arrays, whole in every process. On several hosts all processes call it."""
    spread = [leaf for leaf in _spread(tree) if not leaf.is_fully_replicated]
    return jax.device_get(_whole(mesh_of(spread))(tree) if spread else tree)


def writes(tree) -> bool:
    """Whether this process writes the arrays to a file: all do with arrays of their own, else process 0."""
    return jax.process_index() == 0 or not _spread(tree)


def _spread(tree) -> list[jax.Array]:
    """The arrays that lie on devices of several processes."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not x.is_fully_addressable]


@functools.lru_cache
def _whole(mesh: Mesh):
    return jax.jit(lambda tree: tree, out_shardings=replicated(mesh))


def like_params(tree, params_shardings_tree, mesh: Mesh | AbstractMesh):
    """Shardings of an optimizer state: what is shaped like a parameter takes its; the rest is whole.

    tree: of abstract arrays. params_shardings_tree: NamedShardings in the parameters' tree. A subtree with the
    parameters' structure but other ranks (adafactor's rows and columns) is whole.
    """
    params_structure = jax.tree.structure(params_shardings_tree)

    def is_params(node):
        return jax.tree.structure(node) == params_structure

    def one(node):
        if not is_params(node):
            return replicated(mesh)
        return jax.tree.map(fitting, node, params_shardings_tree)

    def fitting(leaf, where):
        split = isinstance(where, NamedSharding) and len(where.spec) != leaf.ndim
        return replicated(mesh) if split else where

    return jax.tree.map(one, tree, is_leaf=is_params)

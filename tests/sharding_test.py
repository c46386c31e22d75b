"""The mesh, the table of logical axes, and arrays that are born on their devices."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from rljax import sharding
from rljax.models import hf, transformer
from rljax.models.transformer import Model


@pytest.fixture
def mesh():
    return sharding.make_mesh(data=2, fsdp=2, tensor=2)


def test_one_axis_takes_the_devices_that_are_left():
    assert dict(sharding.make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(sharding.make_mesh(data=2, fsdp=-1, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert sharding.make_mesh(data=1, devices=jax.devices()[:1]).size == 1
    assert sharding.single_device_mesh().devices.item() == jax.local_devices()[0]


@pytest.mark.parametrize(
    "axes, message",
    [
        (dict(data=3), r"mesh\.data=3 × mesh\.fsdp=1 × mesh\.tensor=1 = 3 does not equal .* devices, 8"),
        (dict(data=-1, fsdp=3), r"mesh\.fsdp=3 × mesh\.tensor=1 = 3 does not divide .* devices, 8"),
        (dict(data=-1, fsdp=16), r"mesh\.fsdp=16 × mesh\.tensor=1 = 16 does not divide .* devices, 8"),
        (dict(data=-1, fsdp=-1), r"mesh\.data and mesh\.fsdp are both -1"),
        (dict(data=4, tensor=0), r"mesh\.tensor=0: an axis is a positive number of devices, or -1"),
        (dict(data=-2), r"mesh\.data=-2"),
    ],
)
def test_a_mesh_that_does_not_fit_the_devices_names_its_keys(axes, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(**axes)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of one of several slices, as jax.devices() gives them."""

    id: int
    slice_index: int
    process_index: int = 0
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize(
    "sizes, outer", [((4, 2, 1), 0), ((1, 4, 2), 1), ((1, 1, 8), 2), ((2, 2, 2), 0)]
)  # data, fsdp, tensor
def test_slices_are_split_along_the_outermost_axis_that_they_divide(sizes, outer):
    chips = [Chip(id=i, slice_index=i % 2) for i in range(8)]
    data, fsdp, tensor = sizes
    arranged = sharding._arranged(chips, dict(data=data, fsdp=fsdp, tensor=tensor))
    slices = np.vectorize(lambda chip: chip.slice_index)(arranged)
    halves = np.split(slices, 2, axis=outer)
    assert slices.shape == sizes and (halves[0] == 0).all() and (halves[1] == 1).all()


def test_slices_that_no_axis_divides_over_are_told():
    chips = [Chip(id=i, slice_index=i // 3) for i in range(9)]
    assert sharding._arranged(chips, dict(data=3, fsdp=3, tensor=1)).shape == (3, 3, 1)
    chips = [Chip(id=i, slice_index=i // 2) for i in range(8)]
    with pytest.raises(ValueError, match="mesh.data=2, mesh.fsdp=2, mesh.tensor=2 divides over the 4 slices of the 8"):
        sharding._arranged(chips, dict(data=2, fsdp=2, tensor=2))


def test_axes_become_mesh_axes():
    assert sharding.partition_spec(("layers", "embed", "heads")) == PartitionSpec(None, ("fsdp",), ("tensor",))
    assert sharding.partition_spec(("prompts", None)) == PartitionSpec(("data", "fsdp"), None)
    assert all(axis in sharding.MESH_AXES for axes in sharding.RULES.values() for axis in axes)


def test_unknown_axis_and_collision_name_the_array():
    with pytest.raises(ValueError, match=r"layers\.q: logical axis 'colour' has no sharding rule; known: .*embed"):
        sharding.partition_spec(("embed", "colour"), "layers.q")
    with pytest.raises(ValueError, match=r"kv: axes \('heads', 'mlp'\) use mesh axis 'tensor' twice"):
        sharding.partition_spec(("heads", "mlp"), "kv")
    with pytest.raises(ValueError, match=r"'fsdp' twice"):
        sharding.partition_spec(("prompts", "embed"))


def test_dimension_that_does_not_divide_names_parameter_axis_and_numbers(make_config):
    model = Model(make_config(intermediate_size=21))
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    message = r"layers\.(down|gate|up): dimension 'mlp' of size 21 does not divide over 2 devices \(mesh axes tensor\)"
    with pytest.raises(ValueError, match=message):
        sharding.params_shardings(mesh, model.axes(), model.abstract_params())
    with pytest.raises(ValueError, match=r"array: dimension 'prompts' of size 6 .* 4 devices \(mesh axes data, fsdp\)"):
        sharding.named(mesh, "prompts", None, shape=(6, 5))


@pytest.mark.parametrize(
    "axes, told",
    [
        (("layers", "embed", "colour"), "logical axis 'colour' has no sharding rule; known: prompts, layers"),
        (("layers", "heads", "mlp"), r"axes \('layers', 'heads', 'mlp'\) use mesh axis 'tensor' twice"),
        (("layers", "embed"), r"its shape is \(2, 16, 32\) and its logical axes are \('layers', 'embed'\)"),
        (None, r"its shape is \(2, 16, 32\) and its logical axes are None; name one for each dimension"),
    ],
)
def test_a_parameter_without_a_rule_or_with_a_collision_stops_a_run_at_its_start(
    tiny_checkpoint, mesh, monkeypatch, axes, told
):
    real = Model.axes

    def changed(model):
        tree = real(model)
        return tree | {"layers": tree["layers"] | {"q": axes}}

    monkeypatch.setattr(Model, "axes", changed)
    with pytest.raises(ValueError, match=rf"^layers\.q: {told}"):
        hf.load(tiny_checkpoint, mesh=mesh)


def test_a_parameter_that_was_given_no_axes_is_told(make_config, mesh, monkeypatch):
    class Longer(transformer.Block):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra = nnx.Param(jnp.zeros(3))

    monkeypatch.setattr(transformer, "Block", Longer)
    model = Model(make_config(max_positions=77))  # of no other test: what a config's parameters are is remembered
    with pytest.raises(ValueError, match=r"^layers\.extra: its shape is \(3, 3\) and its logical axes are None"):
        sharding.params_shardings(mesh, model.axes(), model.abstract_params())


def test_every_parameter_of_every_family_has_a_rule(make_config, mesh):
    for kind in ("llama", "qwen2", "qwen3"):
        changes = dict(model_type=kind, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3")
        model = Model(make_config(tie_embeddings=False, **changes))
        abstract = model.abstract_params()
        where = sharding.params_shardings(mesh, model.axes(), abstract)
        assert jax.tree.structure(where) == jax.tree.structure(abstract)
        split = {
            jax.tree_util.keystr(path, simple=True): leaf.size // np.prod(s.shard_shape(leaf.shape))
            for (path, leaf), s in zip(
                jax.tree_util.tree_leaves_with_path(abstract), jax.tree.leaves(where), strict=True
            )
        }
        whole = {name for name, parts in split.items() if parts == 1}
        assert all(name.endswith("norm") for name in whole), whole


def test_loaded_parameters_are_born_split(tiny_checkpoint, mesh):
    """Each device holds its part alone: 1 / (fsdp · tensor) of every matrix."""
    model, params = hf.load(tiny_checkpoint, mesh=mesh)
    assert sharding.mesh_of(params) == mesh
    assert jax.tree.map(lambda p: p.sharding, params) == sharding.params_shardings(
        mesh, model.axes(), model.abstract_params()
    )
    q = params["layers"]["q"]
    assert {shard.data.size for shard in q.addressable_shards} == {q.size // 4}
    assert {shard.data.size for shard in params["norm"].addressable_shards} == {params["norm"].size}
    _, alone = hf.load(tiny_checkpoint)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(params), jax.device_get(alone))


def test_batches_are_split_by_prompt(mesh):
    tree = sharding.put_by_prompt(mesh, {"tokens": np.arange(24).reshape(8, 3), "lengths": np.arange(8)})
    assert sharding.size(mesh, "prompts") == 4 and sharding.size(mesh, "layers") == 1
    for leaf in jax.tree.leaves(tree):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {2}
    np.testing.assert_array_equal(tree["lengths"], np.arange(8))


def test_optimizer_state_takes_the_parameters_shardings(mesh):
    params = {"a": jnp.zeros((4, 4)), "b": jnp.zeros(3)}
    where = {"a": sharding.named(mesh, "embed", "mlp"), "b": sharding.replicated(mesh)}
    state = ({"count": jnp.zeros(()), "mu": params}, params, ())
    count = sharding.replicated(mesh)
    assert sharding.like_params(state, where, mesh) == ({"count": count, "mu": where}, where, ())


def test_mesh_of_an_array_without_one():
    alone = jax.device_put(jnp.zeros(2), jax.devices()[3])
    assert sharding.mesh_of(alone).devices.item() == jax.devices()[3]


MOVES = [  # axes of a mesh of 4 devices and of one of others
    ({"data": 2, "fsdp": 2}, {"data": 1, "tensor": 4}),
    ({"data": 1, "fsdp": 2, "tensor": 2}, {"data": 2, "tensor": 2}),
    ({"data": 1, "tensor": 4}, {"data": 1, "tensor": 2}),
    ({"data": 4}, {"data": 1}),
    ({"data": 1, "fsdp": 4}, {"data": 1, "fsdp": 4}),
]


@pytest.mark.parametrize("learner, maker", MOVES, ids=str)
def test_weights_move_to_other_devices_without_the_host(learner, maker, make_config, monkeypatch):
    first, second = jax.devices()[:4], jax.devices()[4 : 4 + math.prod(maker.values())]
    own, other = (sharding.make_mesh(**a, devices=d) for a, d in ((learner, first), (maker, second)))
    model = Model(make_config(num_kv_heads=4))
    where, there = (sharding.params_shardings(m, model.axes(), model.abstract_params()) for m in (own, other))
    want = jax.tree.map(lambda leaf: np.arange(leaf.size).reshape(leaf.shape), model.abstract_params())
    params = jax.device_put(want, where)
    with monkeypatch.context() as patch, jax.transfer_guard("disallow"):
        # On CPU the guard lets reading by the host pass: it is no transfer there.
        patch.setattr(type(params["norm"]), "_value", property(lambda _: pytest.fail("through the host")))
        got = sharding.moved(params, there)
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == there
    jax.tree.map(lambda leaf: leaf.delete(), params)  # as the next update does
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), want)


def test_a_copy_in_place_outlives_what_it_is_of():
    where = sharding.replicated(sharding.make_mesh(data=2, devices=jax.devices()[:2]))
    x = jax.device_put(np.arange(6.0), where)
    got = sharding.moved({"x": x}, {"x": where})["x"]
    x.delete()
    np.testing.assert_array_equal(got, np.arange(6.0))


def test_the_last_devices_are_the_rollouts_own():
    learners, makers = sharding.apart(3)
    assert learners == jax.devices()[:5] and makers == jax.devices()[5:]
    with pytest.raises(ValueError, match="mesh.rollout_devices = 8 leaves none of the 8 devices to the learner"):
        sharding.apart(8)

"""--mode=plan and --dry_run: a plan in words and tables, for chips that need not be here."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import huggingface_hub
import jax

from rljax import parts, plan, sharding
from rljax.console import Console
from rljax.models import hf, published
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.options import Config
from rljax.plan import chips
from rljax.plan.chips import CHIPS, Chip
from rljax.plan.estimate import STAGES, Plan, estimate

# What lowers each part of a plan that is too large.
REMEDIES = {
    "parameters": "mesh.fsdp or mesh.tensor",
    "optimizer": "mesh.fsdp, learner.optimizer=adafactor or lora.rank",
    "actor": "mesh.fsdp or mesh.tensor",
    "rows' caches": "rollout.lanes, rollout.slots or mesh.tensor",
    "gradients": "mesh.fsdp or mesh.tensor",
    "activations kept": "pods.keep, learner.micro_batches or model.remat",
    "logits": "model.token_chunk or mesh.tensor",
    "other work": "pods.keep, learner.micro_batches, model.attention_chunk or mesh.tensor",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a run is planned for. memory: bytes of a device, None where it does not say. chip: None without rates."""

    name: str
    devices: int
    memory: float | None
    chip: Chip | None


def run(config: Config, devices: str) -> Plan:
    """Prints the plan of a config for chips such as "h200:8", or for this machine's devices (""); returns it.

    Raises ValueError for chips or models that are not known, and where the run does not divide over them.
    """
    machine = _here() if not devices else _of(devices)
    meshes = _meshes(config, machine.devices)
    parts.check_division(config, *meshes)
    policy = shape_of(config.model.path)
    parts.check_sizes(config, Model(policy))
    actor = shape_of(config.actor.path) if config.actor.path else None
    found = estimate(config, policy, actor, *meshes)
    with Console() as console:
        _print(console, config, found, machine, meshes)
        told = trouble(found, machine.memory)
        if told is not None:
            console.warn(told)
    return found


def warnings(config: Config, models: tuple[Model, Model | None], meshes) -> list[str]:
    """What a run is to be told as it starts: that its plan is larger than its devices. meshes: parts.make_meshes'.

    The plan itself, which takes seconds, is made only where a generous count does not settle it.
    """
    memory = memory_at_hand(meshes[0].local_devices[0])
    policy, actor = models[0].config, None if models[1] is None else models[1].config
    if memory is None or at_most(config, policy, actor, meshes[0]) <= memory:
        return []
    told = trouble(estimate(config, policy, actor, *meshes), memory)
    return [] if told is None else [told]


def at_most(config: Config, policy: ModelConfig, actor: ModelConfig | None, mesh) -> float:
    """Bytes a device that a run stays below: of its tokens every array of a layer that there could be, in float32."""
    r, shards = config.rollout, sharding.size(mesh, "prompts")
    tokens = r.prompts * r.samples * (r.max_prompt_tokens + r.max_new_tokens) / shards
    total = 4.0 * plan.state_bytes(config, policy, mesh, actor).total
    for c in (policy,) if actor is None else (policy, actor):
        heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        scores = c.num_heads * (r.max_prompt_tokens + r.max_new_tokens)
        every = 16 * c.hidden_size + 8 * c.intermediate_size + 8 * heads + 4 * scores
        kept = {"none": every, "dots": 4 * c.hidden_size + 2 * c.intermediate_size + heads, "layer": c.hidden_size}
        logits = 16 * max(config.model.token_chunk, r.lanes * r.slots) * c.vocab_size
        caches = tokens * c.num_layers * 2 * heads
        total += 4 * (tokens * (c.num_layers * kept[config.model.remat] + every) + caches + logits)
    return total


def _meshes(config: Config, devices: int) -> tuple[Any, Any]:
    """(the learner's mesh, the rollouts'), as parts.make_meshes makes them, of devices that need not be here."""
    m = config.mesh
    if m.rollout_devices >= devices:
        raise ValueError(
            f"mesh.rollout_devices = {m.rollout_devices} leaves none of the {devices} devices to the learner; lower it"
        )
    own = devices - m.rollout_devices
    mesh = sharding.abstract_mesh(data=m.data, fsdp=m.fsdp, tensor=m.tensor, devices=own)
    if not m.rollout_devices:
        return mesh, mesh
    return mesh, sharding.abstract_mesh(data=-1, fsdp=1, tensor=m.rollout_tensor, devices=m.rollout_devices)


def _of(devices: str) -> Machine:
    kind, number = chips.parse(devices)
    return Machine(name=kind, devices=number, memory=CHIPS[kind].memory, chip=CHIPS[kind])


def _here() -> Machine:
    first = jax.devices()[0]
    kind = chips.of_device(first.device_kind)
    return Machine(
        name=first.device_kind,
        devices=jax.device_count(),
        memory=memory_at_hand(first),
        chip=None if kind is None else CHIPS[kind],
    )


def memory_at_hand(device) -> float | None:
    """Bytes that a device has: what it says, or its share of the machine's memory where that is what it computes in."""
    stats = device.memory_stats()  # None on CPUs
    if stats is not None and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
    return None


def shape_of(path: str) -> ModelConfig:
    """The shape of the model that `path` names, without its weights: of a folder or file, or of a name of the hub.

    Raises ValueError for a name of the hub that is neither in its cache nor in models/published.py.
    """
    if path in published.CONFIGS and not pathlib.Path(path).is_dir():
        return published.config(path)
    if pathlib.Path(path).expanduser().is_dir() or not hf.HUB_NAME.fullmatch(path):
        return hf.read_config(hf.resolve(path))
    cached = huggingface_hub.try_to_load_from_cache(path, "config.json")
    if isinstance(cached, str):
        return hf.read_config(pathlib.Path(cached).parent)
    raise ValueError(
        f"the shape of {path!r} is not known; known without a network: {', '.join(published.CONFIGS)}. For another,"
        f" hf download {path} config.json --local-dir DIR, and set its path to DIR"
    )


def trouble(found: Plan, memory: float | None) -> str | None:
    """What to say where the plan needs more than a device has."""
    if memory is None or found.peak <= memory:
        return None
    takers = sorted(found.stage(found.fullest).items(), key=lambda item: -item[1])
    most = next((name for name, _ in takers if name in REMEDIES), takers[0][0])
    hint = f"; the most is {most}: change {REMEDIES[most]}" if most in REMEDIES else ""
    return f"does not fit: the {found.fullest} needs {size(found.peak)} of a device's {size(memory)}{hint}"


def size(count: float) -> str:
    """1536 → "1.50 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _print(console: Console, config: Config, found: Plan, machine: Machine, meshes) -> None:
    axes = [" × ".join(f"{name} {length}" for name, length in mesh.shape.items()) for mesh in meshes]
    beside = f"; rollouts on {axes[1]} beside it" if found.apart else ""
    models = " with ".join(path for path in (config.model.path, config.actor.path) if path)
    r, m = config.rollout, config.model
    has = "" if machine.memory is None else f" of {size(machine.memory)}"
    console.say(f"plan of {config.name}: {models}, on {machine.devices} × {machine.name}{has}", style="bold")
    console.table([
        ("mesh", f"{axes[0]}{beside}"),
        ("step", f"{r.prompts} prompts × {r.samples} rollouts of {r.max_prompt_tokens} + {r.max_new_tokens} tokens"),
        ("learns", f"{r.prompts} × {config.pods.keep} rows; {config.learner.micro_batches} micro-batches,"
                   f" remat {m.remat}, {m.dtype}, computed in {m.compute_dtype or m.dtype}"),
    ])  # fmt: skip
    console.table(_memory(found, machine.memory), titles=("bytes a device", "rollout", "update"))
    if found.collectives:
        console.table(_traffic(found), titles=("bytes that a device sends a step", *STAGES))
    console.table(_times(found, machine.chip), titles=_TIMES if machine.chip is not None else _TIMES[:2])
    if machine.chip is not None:
        least = found.least_seconds(machine.chip)
        console.say(
            f"a step takes at least {number(least)} s ({found.tokens / least:,.0f} rollout tokens/s): each stage by the"
            " slowest of its three published rates, bfloat16, nothing but products counted and every completion of full"
            " length; grading and evaluation come on top"
        )


def _memory(found: Plan, memory: float | None) -> list[tuple[str, ...]]:
    stages = [found.stage(name) for name in ("rollout", "update")]
    names = sorted({**found.state, **stages[0], **stages[1]}, key=lambda name: name == "other work")
    rows = [(name, *(size(stage[name]) if stage.get(name) else "-" for stage in stages)) for name in names]
    totals = [sum(stage.values()) for stage in stages]
    rows.append(("all", *map(size, totals)))
    if memory is not None:
        rows.append(("of a device's", *(f"{total / memory:.0%}" for total in totals)))
    return rows


def _traffic(found: Plan) -> list[tuple[str, ...]]:
    rows = dict.fromkeys((axes, kind) for _, axes, kind in found.collectives)
    out = []
    for axes, kind in rows:
        sent = [found.collectives.get((stage, axes, kind), 0.0) for stage in STAGES]
        out.append((f"{kind} over {' × '.join(axes)}", *(size(x) if x else "-" for x in sent)))
    return out


_TIMES = ("a step", "TFLOP a device", "compute s", "memory s", "interconnect s", "at least s")


def _times(found: Plan, chip: Chip | None) -> list[tuple[str, ...]]:
    rows = []
    for stage, work in found.work.items():
        row = [stage, number(work.flops / 1e12)]
        if chip is not None:
            row += [number(seconds) for seconds in (*work.seconds(chip).values(), work.least(chip))]
        rows.append(tuple(row))
    return rows

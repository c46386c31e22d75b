"""What makers say of their chips: memory, and the rates from which times are predicted."""

from __future__ import annotations

import dataclasses
import difflib

GB = 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One device of jax: a TPU chip (of two TensorCores, which jax joins, in v5p) or a GPU.

    memory: bytes. flops: bfloat16 a second, dense. bandwidth: bytes a second to memory. interconnect: bytes a second
    that it sends over all its links while it receives as many; half of what makers call bidirectional.
    """

    memory: float
    flops: float
    bandwidth: float
    interconnect: float


# TPUs: the tables of docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e, "System architecture", as read in 2026.
# GPUs: NVIDIA's data sheets of A100 (80 GB, SXM), H100 (SXM) and H200 (SXM), without their factor 2 for sparsity;
# interconnect is NVLink's, inside of one machine.
CHIPS: dict[str, Chip] = {
    "v5e": Chip(memory=16 * GB, flops=197e12, bandwidth=819 * GB, interconnect=200 * GB),
    "v5p": Chip(memory=95 * GB, flops=459e12, bandwidth=2765 * GB, interconnect=600 * GB),
    "v6e": Chip(memory=32 * GB, flops=918e12, bandwidth=1638 * GB, interconnect=400 * GB),
    "a100": Chip(memory=80 * GB, flops=312e12, bandwidth=2039 * GB, interconnect=300 * GB),
    "h100": Chip(memory=80 * GB, flops=989e12, bandwidth=3350 * GB, interconnect=450 * GB),
    "h200": Chip(memory=141 * GB, flops=989e12, bandwidth=4800 * GB, interconnect=450 * GB),
}
# What jax calls their devices begins with one of these.
DEVICE_KINDS = {
    "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v6": "v6e",
    "NVIDIA A100": "a100", "NVIDIA H100": "h100", "NVIDIA H200": "h200",
}  # fmt: skip
FORM = "KIND:CHIPS, such as h200:8 or v5p:32 (a v5p-64 has 64 TensorCores, which are 32 chips)"


def parse(devices: str) -> tuple[str, int]:
    """(kind, number of chips) of "h200:8". Raises ValueError, with the known kinds or the form that is wanted."""
    kind, colon, number = devices.partition(":")
    if kind not in CHIPS:
        near = difflib.get_close_matches(kind.lower(), CHIPS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"--devices={devices}: chip {kind!r} is not known{hint}; known: {', '.join(CHIPS)}")
    if not colon or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"--devices={devices} says no number of chips; give {FORM}")
    return kind, int(number)


def of_device(device_kind: str) -> str | None:
    """The name in CHIPS of what jax.Device.device_kind says; None where it is none of them."""
    return next((kind for start, kind in DEVICE_KINDS.items() if device_kind.startswith(start)), None)

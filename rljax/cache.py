"""What rljax keeps on disk between runs, in the user's cache folder: converted checkpoints and compiled programs."""

from __future__ import annotations

import os
import pathlib
import platform

import jax

MOST_COMPILED = 4 * 2**30  # bytes of compiled programs; beyond them those go that were not used longest


def folder() -> pathlib.Path:
    """$XDG_CACHE_HOME/rljax, or ~/.cache/rljax."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (pathlib.Path(base) if os.path.isabs(base) else pathlib.Path.home() / ".cache") / "rljax"


def keep_compiled() -> None:
    """Has jax keep compiled programs in folder()/compiled, unless a folder is set (JAX_COMPILATION_CACHE_DIR).

    Of CPUs each machine has its own: a program made for one may hold instructions that another lacks.
    """
    if jax.config.values["jax_compilation_cache_dir"]:
        return
    whose = platform.node() if jax.default_backend() == "cpu" else jax.default_backend()
    jax.config.update("jax_compilation_cache_dir", str(folder() / "compiled" / whose))
    jax.config.update("jax_compilation_cache_max_size", MOST_COMPILED)

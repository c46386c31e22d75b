"""The user's cache folder, and compiled programs in it."""

import pathlib
import platform

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from rljax import cache

NAMES = ("jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def as_before():
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "rljax"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.folder() == tmp_path / "home/.cache/rljax"


def test_compiled_programs_are_kept_by_machine(as_before, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    cache.keep_compiled()
    compilation_cache.reset_cache()  # it reads the folder's name at its next use
    jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((3, 5))).block_until_ready()
    assert any((tmp_path / "compiled" / platform.node()).iterdir())


def test_a_folder_that_the_user_has_set_stays(as_before, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    cache.keep_compiled()
    assert pathlib.Path(jax.config.jax_compilation_cache_dir) == tmp_path / "own"

"""Whose a run folder is: nothing is left of a refusal, and one run at a time is in it."""

import errno
import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from configs import default
from rljax import claims, hosts
from rljax import config as config_lib
from rljax.config import ConfigError

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(claims, "PATIENCE_S", 0.0)


@pytest.fixture(scope="module")
def config():
    return config_lib.resolve(default.get_config())


def held(config, folder, warn=pytest.fail):
    return claims.held(config, folder, warn)


def test_a_check_leaves_nothing_and_a_claim_the_config(config, tmp_path):
    folder = tmp_path / "runs" / "new"
    claims.check(config, folder)
    assert list(tmp_path.iterdir()) == []
    with held(config, folder):
        assert json.loads((folder / "config.json").read_text()) == config_lib.to_dict(config)
    with held(config, folder):  # goes on
        pass
    assert sorted(path.name for path in folder.iterdir()) == [claims.LOCK_FILE, "config.json"]


def test_a_second_run_in_a_folder_is_told_of_the_first(config, tmp_path):
    told = f"={tmp_path} has another run in it: process {os.getpid()} on .+, since 20.*or name another folder"
    with held(config, tmp_path):
        with pytest.raises(ConfigError, match=told):
            claims.check(config, tmp_path)
        with pytest.raises(ConfigError, match=told), held(config, tmp_path):
            pytest.fail("it is in")
    claims.check(config, tmp_path)


def test_a_killed_run_leaves_its_folder_free(config, tmp_path):
    code = (
        "import pathlib, sys, time\nfrom configs import default\nfrom rljax import claims, config\n"
        "with claims.held(config.resolve(default.get_config()), pathlib.Path(sys.argv[1]), print):\n"
        "    print('in', flush=True)\n    time.sleep(60)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "in\n"
    with pytest.raises(ConfigError, match=f"another run in it: process {process.pid} on "):
        claims.check(config, tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    with held(config, tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / claims.LOCK_FILE).read_text()


def test_other_processes_of_the_run_hold_nothing_and_write_nothing(config, tmp_path, other_process, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text("{}")
    monkeypatch.setattr(hosts, "VISIBLE_S", 0.0)
    with held(config, tmp_path), held(config, tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"] and file.read_text() == "{}"


def test_what_one_process_refuses_is_raised_in_all(config, tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "gather", lambda own: ["it is refused", own])
    with pytest.raises(ConfigError, match="^it is refused$"):
        claims.check(config, tmp_path)


def test_a_file_system_without_locks_is_told_and_serves(config, tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    told = []
    with held(config, tmp_path, told.append):
        assert (tmp_path / "config.json").exists()
    assert len(told) == 1 and "No locks available" in told[0] and str(tmp_path) in told[0]


def test_a_folder_that_cannot_be_is_refused_before_anything_is_built(config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--workdir=.*file/run cannot be written to \(.*/file\); name another"):
        claims.check(config, tmp_path / "file" / "run")

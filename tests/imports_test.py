"""Who may import whom, by ast: one table of the whole package, and the names that belong to one module."""

import ast
import fnmatch
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "rljax"

STAGES = ("prompts", "sampling", "rollout", "rewards", "batching", "learner", "checkpoint", "metrics")
PARTS = (
    "options", "types", "sharding", "tokenizer", "tasks", "tasks.*", "models", "models.*", "algos", "algos.*",
)  # fmt: skip

# Module of rljax (a pattern) -> the modules of rljax that it may import (patterns). "" is the package itself,
# which holds the version. A module that stands in no line is an error: place it here first.
TABLE = {
    "": (),
    "main": ("", "cache", "config", "preemption", "hosts", "metrics", "train", "evaluate", "report", "plan.report"),
    "train": (
        "ahead",
        "runs",
        "claims",
        "console",
        "alarms",
        "evaluate",
        "budget",
        "parts",
        "plan.report",
        "step",
        "records",
        "hosts",
        "preemption",
        *STAGES,
        *PARTS,
    ),
    "step": ("budget", "parts", "records", "hosts", *STAGES, *PARTS),  # train's, one step of it
    "ahead": ("parts", "step", "budget", "metrics", "preemption", "types"),  # train's
    "parts": ("runs", "budget", "objectives", "handover", *STAGES, *PARTS),  # what train, step and evaluate work with
    "runs": ("config", "metrics", "batching", "plan", *PARTS),
    "claims": ("config", "hosts", "runs", "metrics", "options"),
    "records": PARTS,
    "handover": PARTS,
    "alarms": ("options",),
    "evaluate": ("config", "console", "alarms", "estimates", "parts", "runs", "hosts", *STAGES, *PARTS),
    "estimates": (),
    "console": ("metrics",),
    "report": ("report.*",),
    "report.folders": ("config",),
    "report.sweep": ("sweeps", "report", "report.*"),
    "report.*": ("report", "report.*"),
    "sweeps": ("config", "report.curves"),  # launch/sweep.py's
    "plan": ("config", *STAGES, *PARTS),
    "plan.*": ("plan", "plan.*", "parts", "console", "objectives", *STAGES, *PARTS),
    "config": ("options", "conflicts"),
    "conflicts": ("options",),
    "options": (),
    # Stages take their block of the config as a frozen dataclass, and import no other stage but these.
    "rollout": ("sampling", *PARTS),
    "learner": ("objectives", "correction", *PARTS),
    "objectives": ("correction", *PARTS),
    "correction": PARTS,
    "sampling": ("drawing", "slots", "preemption", *PARTS),
    "budget": ("prompts", *PARTS),  # draws from the stream until a step's slots are full
    "rewards": ("reward_server", "preemption", *PARTS),
    **dict.fromkeys([stage for stage in STAGES if stage not in ("rollout", "sampling", "rewards", "learner")], PARTS),
    "drawing": ("models", "models.*"),
    "slots": ("types", "sharding"),
    "hosts": ("", "config", "options", "preemption", "rewards"),
    "preemption": (),
    "reward_server": (),
    "types": (),
    "sharding": ("types",),
    "tokenizer": ("types", "sharding", "models.gguf", "models.hf"),  # hf finds a checkpoint's folder by name
    "tasks": ("tasks.*",),  # not types or sharding: grading processes import tasks, and never jax
    "tasks.*": ("tasks", "tasks.*"),
    "models.logprobs": ("types", "algos", "algos.*"),
    "models": ("types", "sharding", "cache", "models.*"),
    "models.*": ("types", "sharding", "cache", "models", "models.*"),
    "cache": (),
    "algos": ("algos.*",),
    "algos.*": ("algos", "algos.*"),
}

# Import of these needs no jax (faults.md 24): what worker processes and the command line import.
NO_JAX = (
    "", "main", "config", "conflicts", "options", "preemption", "report", "report.*", "reward_server", "sweeps",
    "tasks", "tasks.*",
)  # fmt: skip
JAX = ("jax", "flax", "optax", "orbax", "tensorflow_datasets", "transformers")


def modules() -> dict[str, str]:
    """Every module of rljax by its name below the package ("tasks.base") and its source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


MODULES = modules()


def row(name: str) -> tuple[str, ...] | None:
    exact = TABLE.get(name)
    if exact is not None:
        return exact
    return next((allowed for pattern, allowed in TABLE.items() if fnmatch.fnmatchcase(name, pattern)), None)


def imported(source: str, package: str, known: set[str]) -> set[str]:
    """Full names of the modules that the source imports, also inside functions.

    package: full name of the package that the module is in, for relative imports. known: full names of the
    modules there are: ``from a import b`` imports a.b where that is one, else a.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module.split(".") if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                names.add(inner if inner in known else base)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def violations(name: str, source: str, known: set[str]) -> list[str]:
    """What module `name` imports against TABLE, each told with both names."""
    allowed = row(name)
    if allowed is None:
        return [f"rljax.{name} stands in no line of TABLE in imports_test.py; place it there"]
    full = {"rljax" if not other else f"rljax.{other}" for other in known}
    is_package = any(other.startswith(f"{name}.") for other in known) or not name
    path = f"rljax.{name}" if name else "rljax"
    package = path if is_package else path.rpartition(".")[0]
    wrong = []
    for target in sorted(imported(source, package, full)):
        top, _, inner = target.partition(".")
        if top in ("configs", "launch", "tests"):
            wrong.append(f"{path} imports {target}: rljax is imported by it, never the reverse")
        elif top == "rljax" and not any(fnmatch.fnmatchcase(inner, pattern) for pattern in allowed):
            wrong.append(f"{path} imports {target}, which TABLE in imports_test.py does not allow")
    return wrong


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_what_the_table_allows(name):
    assert violations(name, MODULES[name], set(MODULES)) == []


KNOWN = {
    "", "main", "config", "train", "evaluate", "learner", "batching", "rollout", "sampling", "types",
    "models", "models.hf", "algos", "algos.kl", "tasks", "tasks.base",
}  # fmt: skip


@pytest.mark.parametrize(
    "name, source, culprit",
    [
        ("batching", "from rljax import learner", "rljax.learner"),
        ("batching", "import rljax.learner as other", "rljax.learner"),
        ("batching", "def f():\n    from rljax.learner import step", "rljax.learner"),
        ("batching", "from . import learner", "rljax.learner"),
        ("batching", "from .learner import step", "rljax.learner"),
        ("sampling", "from rljax import rollout", "rljax.rollout"),
        ("models.hf", "from rljax import config", "rljax.config"),
        ("learner", "from rljax import __version__", "rljax"),
        ("evaluate", "from rljax import train", "rljax.train"),
        ("algos.kl", "from rljax import types", "rljax.types"),
        ("algos.kl", "from ..types import Array", "rljax.types"),
        ("models.hf", "from rljax.algos import kl", "rljax.algos.kl"),
        ("tasks.base", "from rljax.types import Prompts", "rljax.types"),
        ("tasks", "from ..types import Prompts", "rljax.types"),
        ("types", "import importlib\nimportlib.import_module('rljax.train')", "rljax.train"),
        ("train", "from configs import default", "configs"),
        ("main", "import launch.sweep", "launch.sweep"),
        ("main", "from rljax import learner", "rljax.learner"),
        ("drawer", "", "no line of TABLE"),
    ],
)
def test_a_wrong_import_is_told_with_both_names(name, source, culprit):
    (told,) = violations(name, source, KNOWN)
    assert f"rljax.{name} " in told and culprit in told


@pytest.mark.parametrize(
    "name, source",
    [
        ("rollout", "from rljax import sampling, types"),
        ("train", "from rljax import evaluate, learner\nfrom rljax.models import load"),
        ("algos.kl", "from rljax.algos.losses import aggregate_loss\nfrom . import masked\nimport jax"),
        ("models", "from rljax.models.hf import load"),
        ("main", "import rljax\nfrom rljax.config import Config"),
    ],
)
def test_a_right_import_is_allowed(name, source):
    assert violations(name, source, KNOWN) == []


def mentioned(source: str) -> set[str]:
    """Every identifier of the source: names, attributes, imported names and modules."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found |= set(node.name.split("."))
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(node.module.split("."))
    return found


@pytest.mark.parametrize("name", [name for name in MODULES if name != "sharding"])
def test_only_sharding_names_mesh_axes(name):
    # Whoever splits an array by itself needs one of these; the others ask rljax.sharding by logical axes.
    tree = ast.parse(MODULES[name])
    used = mentioned(MODULES[name]) & {"PartitionSpec", "NamedSharding", "AxisType", "create_device_mesh"}
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    used |= calls & {"jax.make_mesh", "jax.sharding.Mesh", "Mesh"}
    assert not used, f"rljax.{name} uses {sorted(used)}; only rljax.sharding may"
    if name != "config":  # its fields are named after the axes
        strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        axes = strings & {"fsdp", "tensor"}  # "data" is a word of many meanings
        assert not axes, f"rljax.{name} names mesh axes {sorted(axes)}; only rljax.sharding may"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "config"])
def test_only_config_reads_a_config_dict(name):
    used = mentioned(MODULES[name]) & {"ConfigDict", "FrozenConfigDict", "config_dict", "ml_collections"}
    allowed = {"ml_collections"} if name == "main" else set()  # for ml_collections.config_flags
    assert used <= allowed, f"rljax.{name} uses {sorted(used - allowed)}; only rljax.config may"


def test_every_folder_of_modules_is_a_package():
    # Else setup.py would leave it out of an installation that is not editable.
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), f"{folder.relative_to(ROOT)} lacks __init__.py"


def test_command_line_and_grading_import_no_jax():
    names = [name for name in MODULES if any(fnmatch.fnmatchcase(name, pattern) for pattern in NO_JAX)]
    code = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    found = {set(JAX)} & set(sys.modules)
    assert not found, f"{{name}} imports {{found}}"
"""
    args = [sys.executable, "-c", code, *(f"rljax.{name}".rstrip(".") for name in names)]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr.splitlines()[-1]

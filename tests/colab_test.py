"""The notebooks of colab/ as files: valid, without outputs, one install cell, and no name that rljax does not have.

They are run by notebooks_test.py.
"""

import ast
import importlib
import inspect
import json
import pathlib
import re
import subprocess
import sys

import pytest

from rljax import config as config_lib

FOLDER = pathlib.Path(__file__).parent.parent / "colab"
NAMES = ("1_first_run", "2_pods", "3_cero", "4_jackpot", "5_your_own")
OWN = ("rljax", "configs")  # packages whose names are checked
CONFIG = "c"  # what the notebooks call a ConfigDict


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def code(notebook: dict) -> list[str]:
    """The sources of the code cells, as Python: lines for the shell and magics do nothing."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"^(\s*)[!%].*$", r"\1pass", cell, flags=re.MULTILINE) for cell in cells]


def test_these_are_the_notebooks():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_and_holds_no_outputs(name):
    notebook = read(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", cell) for cell in ids)
    for cell in notebook["cells"]:
        known = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            assert cell.pop("outputs") == [] and cell.pop("execution_count") is None
        assert set(cell) == known and cell["cell_type"] in ("code", "markdown")
        assert "".join(cell["source"]).strip()
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert "json.dumps(results)" in code(notebook)[-1]  # what notebooks_test.py looks at


@pytest.mark.parametrize("name", NAMES)
def test_one_cell_installs_and_it_is_the_first(name):
    installing = [i for i, cell in enumerate(code(read(name))) if re.search(r"\bpip\b|\bgit\b", cell)]
    assert installing == [0]


def test_all_install_alike():
    assert len({code(read(name))[0] for name in NAMES}) == 1


def install(repository: str, monkeypatch) -> list[list[str]]:
    """The commands of the install cell where rljax is not installed."""
    commands = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    cell = code(read(NAMES[0]))[0]
    assert cell.count('REPOSITORY = ""') == 1
    exec(cell.replace('REPOSITORY = ""', f"REPOSITORY = {repository!r}"), {})
    return commands


def test_without_rljax_the_install_cell_asks_for_its_repository(monkeypatch):
    with pytest.raises(ValueError, match="set REPOSITORY"):
        install("", monkeypatch)


def test_with_a_repository_the_install_cell_clones_and_installs_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    clone, pip = install("somewhere", monkeypatch)
    folder = str(tmp_path.resolve() / "rljax-clone")
    assert clone == ["git", "clone", "--depth=1", "somewhere", folder]
    assert pip[:4] == [sys.executable, "-m", "pip", "install"] and pip[pip.index("-e") + 1] == folder


def test_where_rljax_is_the_install_cell_runs_nothing(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    exec(code(read(NAMES[0]))[0], {})


def imports(tree: ast.AST) -> dict[str, str]:
    """Names that the source binds to parts of OWN, and their full names."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in bound.items() if full.split(".")[0] in OWN}


def find(full: str):
    """The object of a full name; AttributeError or ImportError where there is none."""
    parts = full.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and inspect.ismodule(found):
            importlib.import_module(".".join(parts[:i]))
        found = getattr(found, part)
    return found


def exists(full: str) -> bool:
    try:
        find(full)
    except (AttributeError, ImportError):
        return False
    return True


def chain(node: ast.AST) -> list[str]:
    """["a", "b", "c"] of the expression a.b.c; [] of any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := chain(node.value)):
        return [*before, node.attr]
    return []


def complaints(source: str) -> list[str]:
    """What the source names that rljax does not have: modules, attributes, keywords of calls, config keys."""
    tree = ast.parse(source)
    bound = imports(tree)
    wrong = [f"no {full}" for full in bound.values() if not exists(full)]
    for node in ast.walk(tree):
        target = node.func if isinstance(node, ast.Call) else node
        names = chain(target)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node.id in bound:
            wrong.append(f"{node.id} is a module and a variable")
        if names[:1] == [CONFIG] and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            wrong += [] if ".".join(names[1:]) in config_lib.KEYS else [f"no key {'.'.join(names[1:])}"]
        if not names or names[0] not in bound:
            continue
        full = ".".join([bound[names[0]], *names[1:]])
        if not exists(full):
            wrong.append(f"no {full}")
        elif isinstance(node, ast.Call):
            known = inspect.signature(find(full)).parameters
            wrong += [f"no {word.arg} of {full}" for word in node.keywords if word.arg and word.arg not in known]
    return sorted(set(wrong))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_compiles_and_names_only_what_there_is(name):
    cells = code(read(name))
    for cell in cells:
        ast.parse(cell)
    assert complaints("\n".join(cells)) == []


@pytest.mark.parametrize(
    "source, told",
    [
        ("from rljax import config, trian", ["no rljax.trian"]),
        ("from rljax import trian\ntrian.run()", ["no rljax.trian", "no rljax.trian.run"]),
        ("from rljax import train\ntrain.walk(1)", ["no rljax.train.walk"]),
        ("from rljax.algos import cero as x\nx.Cero(1, 2, 3, 4, etha=1)", ["no etha of rljax.algos.cero.Cero"]),
        ("from configs import grpo\nc = grpo.get_config()\nc.budget.rolouts = 1", ["no key budget.rolouts"]),
        ("from rljax import metrics\nmetrics = metrics.read_metrics('a')", ["metrics is a module and a variable"]),
        ("from rljax import config\nfrom configs import pods\nc = pods.get_config()\nc.pods.keep = 4\n", []),
    ],
)
def test_what_is_not_there_is_told(source, told):
    assert complaints(source) == told

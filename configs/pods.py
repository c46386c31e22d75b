"""PODS: n rollouts a prompt, of which the m with the greatest reward variance train (arXiv 2504.13818).

Rollouts decode in parallel and are cheap; an update costs time and memory a row. Here n = 32 and m = 8 (with smollm2
16 and 4): four rollouts are made for each one that is learned from.

    python -m rljax.main --config=configs/pods.py

The paper's runs, a preset each, with data under data/ (configs/papers.py says which):

    python -m rljax.main --config=configs/pods.py:qwen25_3b_gsm8k

Their numbers are those of the authors' code, github.com/YixuanEvenXu/pods. There a reward is 1 for a right answer and
a few hundredths for its form; here the form earns nothing. There the frozen model has 4 bits a weight; here 16.
"""

from ml_collections import ConfigDict

from configs import default, papers, presets


def one_gpu(c: ConfigDict, *, n: int, m: int, updates: int) -> None:
    """The runs on one L40S (48 GB): one prompt an update, answers of 512 tokens (config/train.yaml there)."""
    papers.adapters(c)
    c.rollout.prompts = 1
    c.rollout.samples = n
    c.rollout.lanes = 1
    c.rollout.slots = n
    c.rollout.max_prompt_tokens = 512
    c.rollout.max_new_tokens = 512
    c.rollout.segment = 64
    c.rollout.temperature = 0.9
    c.pods.keep = m
    c.budget.rollouts = updates * n
    c.loss.aggregate = "sequence"
    c.learner.learning_rate = 5e-6
    c.learner.warmup_updates = 0
    c.learner.weight_decay = 0.1
    c.learner.max_grad_norm = 0.1
    c.eval.every = 200
    c.eval.samples = 5
    c.eval.temperature = 0.9
    c.checkpoint.every = 200


def qwen25_3b_gsm8k(c: ConfigDict) -> None:
    """Qwen2.5-3B-Instruct on GSM8K: n = 64, m = 16, LoRA of rank 64, six hours on one L40S.

        python -m rljax.main --config=configs/pods.py:qwen25_3b_gsm8k

    Authors, GSM8K test at temperature 0.9: .833 after 2,122 updates, the first of ten runs
    (results/Instruct-GSM8K-512-64-16-Run1.json there). Peer, n = m = 16: configs/grpo.py:qwen25_3b_gsm8k.
    """
    papers.gsm8k(c)
    one_gpu(c, n=64, m=16, updates=2_122)
    c.model.path = "Qwen/Qwen2.5-3B-Instruct"


def qwen25_3b_math(c: ConfigDict) -> None:
    """Qwen2.5-3B-Instruct on MATH: n = 32, m = 8, LoRA of rank 64, six hours on one L40S.

        python -m rljax.main --config=configs/pods.py:qwen25_3b_math

    Authors, MATH-500 at temperature 0.9: .515 after 2,065 updates, the first of ten runs
    (results/Instruct-MATH-NF-512-32-8-Run1.json there). Peer, n = m = 8: configs/grpo.py:qwen25_3b_math.
    """
    papers.math(c)
    one_gpu(c, n=32, m=8, updates=2_065)
    c.model.path = "Qwen/Qwen2.5-3B-Instruct"


def llama32_3b_gsm8k(c: ConfigDict) -> None:
    """Llama-3.2-3B-Instruct on GSM8K: n = 64, m = 16, KL of weight 0.04, LoRA of rank 64, one L40S.

        python -m rljax.main --config=configs/pods.py:llama32_3b_gsm8k

    Authors, GSM8K test at temperature 0.9: .556 right, .538 right and in the asked form after 552 updates, the first
    of ten runs (results/Instruct-Llama-512-64-16-0.04-Run1.json there).
    """
    papers.gsm8k(c)
    one_gpu(c, n=64, m=16, updates=552)
    c.model.path = "meta-llama/Llama-3.2-3B-Instruct"
    c.loss.kl_coef = 0.04
    c.loss.kl_kind = "k3"  # theirs


def qwen25_7b_gsm8k(c: ConfigDict) -> None:
    """Qwen2.5-7B-Instruct on GSM8K, every parameter: n = 128, m = 32, half an hour on eight A100.

        python -m rljax.main --config=configs/pods.py:qwen25_7b_gsm8k

    512 rows an update: 16 a device, four accumulations (open-r1/exp.sh, and config_pods.yaml for the rest; that recipe
    is of the 3B model). Authors, GSM8K test: .879 after 30 minutes, the mean of five seeds; with n = m, .869
    (results/a100s-acc.csv there). The budget here is one pass, which takes longer.
    """
    papers.gsm8k(c)
    papers.whole(c)
    c.model.path = "Qwen/Qwen2.5-7B-Instruct"
    c.rollout.prompts = 16
    c.rollout.samples = 128
    c.rollout.lanes = 8
    c.rollout.slots = 128
    c.rollout.max_prompt_tokens = 512
    c.rollout.max_new_tokens = 1024
    c.rollout.segment = 64
    c.pods.keep = 32
    c.budget.rollouts = 467 * 16 * 128
    c.loss.aggregate = "sequence"
    c.learner.learning_rate = 2e-5
    c.learner.schedule = "cosine"
    c.learner.warmup_updates = 47
    c.learner.adam_b2 = 0.999
    c.learner.micro_batches = 2
    c.checkpoint.every = 100


PAPER = {f.__name__: f for f in (qwen25_3b_gsm8k, qwen25_3b_math, llama32_3b_gsm8k, qwen25_7b_gsm8k)}


def get_config(preset: str = "tiny") -> ConfigDict:
    c = default.get_config()
    c.name = "pods"
    c.rollout.samples = 32
    c.rollout.slots = 32
    c.pods.rule = "max_variance"
    c.pods.keep = 8
    presets.apply(c, preset, PAPER)
    if preset == "smollm2":  # of its short runs, more updates are worth more than more rollouts a prompt
        c.rollout.samples = 16
        c.rollout.slots = 16
        c.pods.keep = 4
    return c

"""Makes the two checkpoints of rljax/assets: tiny-policy and tiny-actor, by a supervised warm start.

    python launch/make_tiny.py                      # both, into rljax/assets; about 50 minutes on 2 CPU cores
    python launch/make_tiny.py --models=tiny-actor --out=DIR
    python launch/make_tiny.py --models= --out=rljax/assets        # measures what is there, and makes nothing

The warm start plays the part of a base model: demonstrations of mixed quality, right answers beside systematic
slips whose share grows with difficulty, so that reinforcement learning has latent skill to bring out. Operand pairs
of the warm start are never seen in training or in evaluation (rljax/tasks/arithmetic.py). Reproducible from --seed.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rljax import sampling
from rljax import tokenizer as tokenizer_lib
from rljax.models import hf, logprobs, transformer
from rljax.models.config import ModelConfig
from rljax.models.transformer import Model
from rljax.tasks import arithmetic
from rljax.types import TrainBatch

MODELS = flags.DEFINE_list("models", "tiny-policy,tiny-actor", "which checkpoints to make")
OUT = flags.DEFINE_string("out", str(hf.ASSETS), "folder that receives one directory a checkpoint")
SEED = flags.DEFINE_integer("seed", 0, "of the initial weights and of the demonstrations")

EOS, PAD = "<|endoftext|>", "<|pad|>"
VOCAB = 264  # 256 bytes, EOS, PAD, and 6 spare rows: a multiple of 8, so that it divides over a mesh
PROMPT_TOKENS, COMPLETION_TOKENS = 10, 6

SHAPES = {  # hidden, intermediate, layers, heads, kv heads, head dim; steps of the warm start
    "tiny-policy": (128, 512, 4, 4, 2, 32, 2800),
    "tiny-actor": (64, 192, 4, 4, 2, 16, 2400),
}
BATCH = 256
# Not the task's own mix: the base model has seen every kind about as often as another.
WARM_MIX = "add2:3,sub2:3,add3:2,sub3:2,mul21:2,chain:3,mul22:1"
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3  # Muon's of the matrices, Adam's of the embedding and the norms


def carries(terms: list[int], ops: list[str]) -> int:
    """Columns that carry or borrow, over all steps of the problem."""
    count, left = 0, terms[0]
    for op, right in zip(ops, terms[1:], strict=True):
        if op == "*":
            count += sum((int(d) * (right % 10)) > 9 for d in str(left))
            left = left * right
            continue
        carry, a, b = 0, left, right
        while a or b:
            column = a % 10 + b % 10 + carry if op == "+" else a % 10 - b % 10 - carry
            carry = int(column > 9 or column < 0)
            count += carry
            a, b = a // 10, b // 10
        left = left + right if op == "+" else left - right
    return count


def without_carry(terms: list[int], ops: list[str]) -> int:
    """The answer of someone who drops every carry and borrow."""
    left = terms[0]
    for op, right in zip(ops, terms[1:], strict=True):
        if op == "*":
            left = sum((int(d) * right % 10) * 10**i for i, d in enumerate(reversed(str(left))))
            continue
        width = max(len(str(left)), len(str(right)))
        columns = [(left // 10**i % 10, right // 10**i % 10) for i in range(width)]
        left = sum(((a + b) % 10 if op == "+" else (a - b) % 10) * 10**i for i, (a, b) in enumerate(columns))
    return left


def demonstration(terms: list[int], ops: list[str], rng: random.Random, slips: float) -> str:
    """An answer: right, or one of three slips. slips in [0, 1] scales their share, which grows with difficulty."""
    right = arithmetic.evaluate(terms, ops)
    wrong = max(0.25, min(0.85, 0.3 + 0.2 * carries(terms, ops) + 0.1 * (len(terms) - 2)))
    if rng.random() >= slips * wrong:
        return str(right)
    other_ops = [{"+": "-", "-": "+", "*": "+"}[op] for op in ops[-1:]]
    wrong_operator = arithmetic.evaluate(terms, ops[:-1] + other_ops)
    options = [v for v in (without_carry(terms, ops), abs(wrong_operator)) if v != right]
    # One slip is the habit, the others are rare: a habit that outweighs the skill is what greedy decoding shows.
    if options and rng.random() < 0.8:
        return str(options[0])
    return str(rng.choice(options[1:] + [right + 10, abs(right - 10)]))


class Demonstrations:
    """An endless stream of warm-start batches."""

    def __init__(self, seed: int):
        self.rng = random.Random(f"warm/{seed}")
        weights = arithmetic.parse_mix(WARM_MIX)
        self.kinds, self.shares = list(weights), list(weights.values())

    def batch(self, size: int, slips: float) -> TrainBatch:
        rows = []
        for kind in self.rng.choices(self.kinds, self.shares, k=size):
            terms, ops = arithmetic.draw(kind, ("warm",), self.rng)
            rows.append((arithmetic.text(terms, ops), demonstration(terms, ops, self.rng, slips)))
        return encode(rows)


def encode(rows: list[tuple[str, str]]) -> TrainBatch:
    """(prompt, completion) pairs, one row a prompt; an ASCII byte is its own code's token."""
    prompts = [[_ID[c] for c in prompt] for prompt, _ in rows]
    answers = [[_ID[c] for c in answer] + [256] for _, answer in rows]
    tokens = _padded(answers, COMPLETION_TOKENS)[:, None]
    return TrainBatch(
        prompt_tokens=_padded(prompts, PROMPT_TOKENS),
        prompt_lengths=np.array([len(p) for p in prompts], np.int32),
        tokens=tokens,
        lengths=np.array([[len(a)] for a in answers], np.int32),
        sampler_logprobs=np.zeros(tokens.shape, np.float32),
        advantages=np.ones((len(rows), 1), np.float32),
        draws=np.zeros(len(rows), np.uint32),
        samples=np.zeros((len(rows), 1), np.int32),
        top_ids=np.zeros((*tokens.shape, 0), np.int32),
        top_logprobs=np.zeros((*tokens.shape, 0), np.float32),
    )


def _padded(rows: list[list[int]], width: int) -> np.ndarray:
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no merges: every text has an encoding, and a digit is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {EOS: 256, PAD: 257}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return tokenizer


_ID = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())) if len(c) == 1 and ord(c) < 128}


def sequence_logprobs(model: Model, params, batch: TrainBatch):
    """float32[P, K, T] log-probabilities and their mask."""
    lp = logprobs.completion_logprobs(model, params, batch, 1.0, chunk=1 << 20)
    return lp, jnp.arange(lp.shape[-1]) < batch.lengths[..., None]


@functools.partial(jax.jit, static_argnames=("model", "tx"), donate_argnames=("params", "opt_state"))
def train_step(params, opt_state, batch, *, model, tx):
    def loss(params):
        lp, mask = sequence_logprobs(model, params, batch)
        return -jnp.sum(jnp.where(mask, lp, 0)) / jnp.sum(mask)

    value, grads = jax.value_and_grad(loss)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


@functools.partial(jax.jit, static_argnames=("model",))
def right_logprob(params, batch, *, model):
    """log-probability of each whole completion, [P]: exp of it is the accuracy at temperature 1, exactly."""
    lp, mask = sequence_logprobs(model, params, batch)
    return jnp.sum(jnp.where(mask, lp, 0), axis=(1, 2))


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) with a warm-up and a cosine to a fiftieth; about twice as quick here as AdamW."""

    def schedule(peak):
        return optax.warmup_cosine_decay_schedule(0, peak, 100, steps, peak / 50)

    def matrices(params):  # stacked [layer, in, out]; the layer is a batch axis
        stacked = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree.map(lambda p: stacked if p.ndim == 3 else None, params)

    return optax.contrib.muon(
        schedule(MATRIX_RATE),
        adam_learning_rate=schedule(OTHER_RATE),
        adam_b2=0.98,
        weight_decay=0.01,
        muon_weight_dimension_numbers=matrices,
    )


def warm_start(name: str, seed: int):
    """(model, float32 params) after the supervised warm start."""
    hidden, mlp, layers, heads, kv_heads, head_dim, steps = SHAPES[name]
    config = ModelConfig(
        model_type="llama", vocab_size=VOCAB, hidden_size=hidden, intermediate_size=mlp, num_layers=layers,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=10_000.0, norm_eps=1e-5,
        tie_embeddings=True, qkv_bias=False, qk_norm=False, max_positions=512,
    )  # fmt: skip
    model = Model(config)
    params = model.init(jax.random.key(seed))
    tx = make_optimizer(steps)
    opt_state, data, started = tx.init(params), Demonstrations(seed), time.time()
    held_out = [(e["prompt"], e["answer"]) for e in arithmetic.problems("eval", 512, "", 1)]
    count = sum(p.size for p in jax.tree.leaves(params))
    print(f"{name}: {count:,} parameters, {steps} steps of {BATCH} demonstrations", flush=True)
    for step in range(1, steps + 1):
        # Skill first: most slips come in the second half, so that the right answer is well learned below them.
        slips = 0.4 if step < 0.6 * steps else 1.0
        params, opt_state, loss = train_step(params, opt_state, data.batch(BATCH, slips), model=model, tx=tx)
        if step % 100 == 0 or step == steps:
            p = np.exp(np.asarray(right_logprob(params, encode(held_out), model=model)))
            print(
                f"{name} {step} loss {float(loss):.3f} held-out P(right) {p.mean():.3f} {time.time() - started:.0f} s",
                flush=True,
            )
    return model, params


SAMPLED = 64  # completions of each prompt that the measurements rest on


def sample(folder: pathlib.Path, examples: list[dict]):
    """(model, params, prompts' ids, rollouts of SAMPLED completions a prompt, greedy rollouts, their texts)."""
    model, params = hf.load(folder)
    tokenizer = tokenizer_lib.load(folder)
    prompts = [tokenizer.encode(e["prompt"]) for e in examples]

    def generate(n, temperature):
        return sampling.generate(
            model, params, prompts, num_samples=n, max_new_tokens=8, key=jax.random.key(0), temperature=temperature,
            stop_ids=tokenizer.stop_ids, lanes=32, slots=n, segment=8,
        )  # fmt: skip

    sampled, greedy = generate(SAMPLED, 1.0), generate(1, 0.0)
    texts = [[tokenizer.decode(t[:n]) for t, n in zip(r.tokens, r.lengths, strict=True)] for r in (sampled, greedy)]
    return model, params, prompts, sampled, texts


def measure(folder: pathlib.Path, examples: list[dict]) -> None:
    """Prints what a checkpoint can do before any reinforcement learning."""
    *_, sampled, (texts, greedy) = sample(folder, examples)
    right = np.array([t == examples[g]["answer"] for t, g in zip(texts, sampled.group, strict=True)])
    rate = right.reshape(len(examples), SAMPLED).mean(axis=1)
    formed = np.mean([t.isdecimal() or t[1:].isdecimal() and t[0] == "-" for t in texts] & ~sampled.truncated)
    print(
        f"{folder.name}, {len(examples)} training prompts x {SAMPLED} samples at temperature 1: "
        f"accuracy {rate.mean():.1%}, well-formed and ended {formed:.1%}, truncated {sampled.truncated.mean():.1%}, "
        f"prompts between 5% and 95%: {np.mean((rate > 0.05) & (rate < 0.95)):.1%}; "
        f"greedy accuracy {np.mean([t == e['answer'] for t, e in zip(greedy, examples, strict=True)]):.1%}"
    )
    kinds = sorted({e["kind"] for e in examples})
    print(
        "   by kind: " + ", ".join(f"{kind} {rate[[e['kind'] == kind for e in examples]].mean():.0%}" for kind in kinds)
    )


def divergence(policy: pathlib.Path, actor: pathlib.Path, examples: list[dict]) -> float:
    """Mean KL(policy || actor) in nats a token, exact over the vocabulary, on the policy's own samples."""
    model, params, prompts, rollouts, _ = sample(policy, examples)
    other, other_params = hf.load(actor)
    rows = [
        prompts[g] + t[:n].tolist() for g, t, n in zip(rollouts.group, rollouts.tokens, rollouts.lengths, strict=True)
    ]
    lengths = np.array([len(row) for row in rows])
    starts = lengths - rollouts.lengths
    tokens = _padded(rows, PROMPT_TOKENS + 8)

    @jax.jit
    def total(tokens, starts, lengths):
        p, q = (
            jax.nn.log_softmax(transformer.logits(m, w, tokens, lengths))
            for m, w in ((model, params), (other, other_params))
        )
        at = jnp.arange(tokens.shape[1])
        mask = (at >= starts[:, None] - 1) & (at < lengths[:, None] - 1)
        return jnp.sum(jnp.where(mask, jnp.sum(jnp.exp(p) * (p - q), axis=-1), 0))

    parts = [slice(i, i + 1024) for i in range(0, len(rows), 1024)]
    return float(sum(total(tokens[s], starts[s], lengths[s]) for s in parts) / rollouts.lengths.sum())


def main(_):
    tokenizer, out = make_tokenizer(), pathlib.Path(OUT.value)
    for name in [name for name in MODELS.value if name]:
        model, params = warm_start(name, SEED.value)
        hf.save(out / name, model, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
        tokenizer.save_pretrained(out / name)
        (out / name / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}) + "\n")
        print(f"{out / name}: {sum(f.stat().st_size for f in (out / name).iterdir()) / 1e6:.1f} MB")
    examples = arithmetic.problems("train", 256, "", 0)
    for name in SHAPES:
        measure(out / name, examples)
    kl = divergence(out / "tiny-policy", out / "tiny-actor", examples)
    print(f"KL(tiny-policy || tiny-actor): {kl:.3f} nats a token")


if __name__ == "__main__":
    app.run(main)

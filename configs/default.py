"""Every key of a run, its default and its unit, once. Experiments are differences from this file.

``placeholder`` is None until it is set; the comment says what None stands for.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


# fmt: off
def get_config() -> ConfigDict:
    c = ConfigDict()
    c.name = "grpo"  # shown in tables and reports
    c.seed = 0  # of the data order, the samples and the initial state; every key is folded from it

    c.model = ConfigDict(dict(
        path="tiny-policy",  # a name under rljax/assets, a Hugging Face directory, a hub name or a .gguf file
        dtype="float32",  # of the parameters: float32 | bfloat16
        compute_dtype="",  # of products and caches: float32 | bfloat16. "": as dtype. Norms, softmax, logits: float32
        remat="dots",  # what the backward pass recomputes: none | dots (all but products with weights) | layer (all)
        attention="xla",  # of prefill and learning: xla | cudnn (NVIDIA, bfloat16) | splash (TPU). Decoding: xla
        attention_chunk=512,  # tokens of a row whose attention scores are alive at once; 0: all
        token_chunk=1024,  # completion tokens whose [tokens, vocabulary] logits are alive at once
    ))

    c.lora = ConfigDict(dict(  # arXiv 2106.09685: the model stays as it is, and adapters beside its projections learn
        rank=0,  # r of the adapters. 0: the whole model is trained
        alpha=32.0,  # α; an adapter's output is scaled by α / r
        targets="q,k,v,o,gate,up,down",  # projections with an adapter
    ))

    c.task = ConfigDict(dict(
        name="arithmetic",  # a task of rljax/tasks, or "module:function" of your own, which may ignore the keys below
        path="",  # data file, of file, choice, sciknoweval, gsm8k, math, aime, amc, dapo_math: .jsonl, .json, .parquet,
        # TFDS "FOLDER:SPLIT"
        eval_path="",  # data file of the held-out prompts; "" holds eval_prompts of `path` out
        prompt_field="",  # the problem of a row; dots go deeper ("prompt.0.content"). "": the task's own (files.py)
        answer_field="",  # the right answer in a row. "": the task's own
        kind_field="",  # what groups a row's results. "": the task's own, or the first of kind, level, type, difficulty
        choices_field="",  # the choices of a multiple-choice row: a list, letters with texts, or fields "A,B,C,D".
        # "": the task's own (choices.py)
        gold="",  # how that is read: as_is | hash (after the last ####) | boxed (the last \boxed). "": the task's own
        grader="",  # of data files and reasoning_gym: math (equal as mathematics) | exact (as text) | numeric | choice
        # | own (the generator's score) | format | length, or a weighted sum, "math:0.9+format:0.1", whose first alone
        # judges held-out answers. "": the task's own (graders.py)
        format="boxed",  # what `format` asks for: boxed | think | think_answer | regex:PATTERN
        length_free=0,  # characters of a completion up to which `length` is 1
        length_max=0,  # characters from which it is 0; between them it falls linearly
        template="",  # of data files, reasoning_gym: the prompt, "{prompt}" is the problem. "": the task's own
        stop="",  # of both: text that ends a completion beside the model's own end, held by one token
        chat=False,  # prompts are rendered by the checkpoint's chat template
        system="",  # the system message before them; "" is none
        seed=0,  # of the generated problems, of the split and of the choice of rows
        train_prompts=2048,  # prompts of the fixed training set, visited once an epoch. Data files: at most; 0 is all
        eval_prompts=512,  # held-out prompts. Data files: at most; 0 is all of eval_path
        mix="",  # arithmetic: "kind:weight,kind:weight"; "" is the task's own mix. reasoning_gym: generators alike
        options="",  # reasoning_gym: JSON by generator, '{"leg_counting": {"max_animals": 3}}'
        shots=0,  # arithmetic: solved problems of the same kind before each prompt, a line each; a newline ends it
        shuffle_rewards=False,  # control: rewards permuted over the step's rollouts, so they say nothing
    ))

    c.rollout = ConfigDict(dict(
        prompts=32,  # P, prompts with rollouts a step
        samples=16,  # n, rollouts a prompt (CERO: the largest grant, N_max, at most slots)
        max_prompt_tokens=10,  # longer prompts are dropped and counted, never cut
        max_new_tokens=6,  # T, tokens of a completion, the stop id included
        temperature=1.0,  # 0 is greedy, and an error in training
        top_k=0,  # 0 is off. On in training is an error: the recorded log-prob would be of another policy
        top_p=1.0,  # 1 is off. On in training is an error
        lanes=32,  # prompts that decode at once; each has its prefix cached once
        slots=16,  # samples of one prompt that decode at once
        segment=6,  # decode steps between refills of finished slots
        columns=256,  # tokens of a row that its cache holds at first; doubled when a row outgrows it
        max_rounds=1,  # DAPO's dynamic sampling: rounds of new prompts until P groups' rewards differ. 1 is off
        staleness=0,  # steps by which the weights of the rollouts lag. 1: made while the step before is learned from
    ))

    c.budget = ConfigDict(dict(
        rule="uniform",  # uniform (n for every prompt) | cero
        rollouts=81_920,  # B, rollouts of the whole run; training ends when they are spent
        epochs=5,  # K, passes over the training prompts over which CERO spreads B (uniform: no limit)
    ))

    c.cero = ConfigDict(dict(  # methods: arXiv 2606.05606
        eta=placeholder(float),  # learning per unit of q and rollout; default 4 M / B
        step_theta=placeholder(float),  # dual step of a prompt's price; default eta / (4 N_max sqrt(K))
        step_mu=placeholder(float),  # dual step of the budget's price; default 2.5 eta / (M N_max sqrt(K))
        prior_alpha=1.0,  # Beta prior, successes
        prior_beta=1.0,  # Beta prior, failures
        discount=1.0,  # of the posterior's counts an epoch; 1 keeps all
        success_threshold=0.5,  # a reward at or above is a success
        min_visits=0,  # a prompt is granted rollouts whatever its price until it has had this many grants
    ))

    c.pods = ConfigDict(dict(  # methods: arXiv 2504.13818
        rule="all",  # all | max_variance | max_reward | random | percentile
        keep=placeholder(int),  # m, rollouts of a prompt to learn from; default: all n
        normalize_over="kept",  # advantages from the statistics of: kept (the paper) | all
    ))

    c.actor = ConfigDict(dict(  # what makes the rollouts
        path="",  # another checkpoint of the same vocabulary, which learns beside the policy. "": the policy itself
        dtype="",  # bfloat16 | int8: rollouts by a copy of the policy in it (path = ""). "": as the policy is
        learning_rate=3e-4,  # of the actor's AdamW; the rest is the learner's
        loss_coef=1.0,  # weight of the actor's own policy loss on its rollouts
        distill_coef=1.0,  # weight of the KL between actor and policy, nats a token; gradient to the actor only
        distill_direction="reverse",  # reverse: KL(actor || policy) | forward: KL(policy || actor)
    ))

    c.jackpot = ConfigDict(dict(  # methods: arXiv 2602.06107
        rule="none",  # none | obrs: tokens are accepted by optimal budgeted rejection sampling
        target="old",  # distribution that accepted tokens are brought near to: the policy's, old | new
        lam=1.0,  # λ of the acceptance min(1, p / (λ q))
        budget=placeholder(float),  # share of tokens to accept: λ is found anew for each batch. None: lam
        table="union",  # candidates whose probabilities are kept: union (top k of both) | sampler (the actor's)
        top_k=20,  # k
        normaliser="top_k",  # Z over the candidates, times κ | exact (the whole vocabulary; target old)
        normalise="accepted",  # the loss is divided by the accepted tokens | proposed (all)
        c1=3.0,  # upper bound of Z max(λ, p/q)
        c2=3.0,  # upper bound of p_old / p_new, of target new
    ))

    c.advantage = ConfigDict(dict(
        baseline="mean",  # mean | loo (leave one out, RLOO)
        scale="std",  # std (GRPO) | none (Dr. GRPO)
        eps=1e-6,  # added to the standard deviation
        overlong_buffer=0,  # tokens before max_new_tokens over which a reward falls by up to 1 (DAPO). 0 is off
    ))

    c.loss = ConfigDict(dict(
        objective="ppo",  # ppo | cispo
        ratio="token",  # token | sequence (GSPO)
        clip_low=0.2,  # ratio clipped to [1 - clip_low, 1 + clip_high]
        clip_high=0.28,
        dual_clip=placeholder(float),  # > 1; bound on the ratio where the advantage is negative. None is off
        aggregate="token",  # token (DAPO) | sequence (GRPO) | constant (Dr. GRPO)
        kl_coef=0.0,  # weight of KL(policy || reference); 0 keeps no reference
        kl_kind="k2",  # of the loss: k1 | k2 | k3 (k1 has gradient 0, k3 a biased one)
        correction="none",  # sampler to old policy: none | truncate (TIS) | mask (MIS)
        correction_level="token",  # token | sequence
        correction_low=0.0,  # mask: ratios below weigh 0
        correction_high=2.0,  # truncate: ratios above are cut to it; mask: ratios above weigh 0
        entropy_coef=0.0,  # weight of the policy's mean entropy (nats a token), which is added to the objective
        mask_truncated=False,  # whether completions cut at max_new_tokens are left out of the loss (DAPO)
    ))

    c.learner = ConfigDict(dict(
        optimizer="adamw",  # adamw | adafactor (second moments by rows and columns: a small state)
        moment_dtype="float32",  # of AdamW's first moment: float32 | bfloat16. The second is float32
        learning_rate=3e-4,  # after warm-up
        warmup_updates=5,  # linear from 0
        schedule="constant",  # constant | cosine (to 0 at the last update that the budget allows)
        adam_b1=0.9,
        adam_b2=0.99,
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,  # global norm above is scaled down to it; 0 is off
        minibatches=1,  # optimizer steps a batch and epoch
        epochs=1,  # passes over a batch
        micro_batches=1,  # gradient accumulation inside one optimizer step; changes memory, not the gradient
    ))

    c.mesh = ConfigDict(dict(  # the learner's devices along each axis; -1 takes what is left
        data=-1,  # prompts
        fsdp=1,  # prompts and parameters
        tensor=1,  # heads, hidden units, vocabulary
        rollout_devices=0,  # devices, the last ones, that make rollouts alone. 0: the learner's make them
        rollout_tensor=1,  # of these along heads, hidden units and vocabulary; the rest along prompts
    ))

    c.hosts = ConfigDict(dict(  # processes of a run on several hosts (jax.distributed). All as it is: one process
        cluster="",  # who knows them: slurm | gcetpu | gketpu | k8s | ompi | mpi4py. "": coordinator, or one process
        coordinator="",  # host:port of process 0, where nobody knows them; with count and index
        count=0,  # processes
        index=0,  # of this one, 0 to count - 1
        start_timeout=60,  # s in which all must have come together
        heartbeat_timeout=30,  # s after which a process that is not heard of is taken for dead, and the run ends
    ))

    c.eval = ConfigDict(dict(
        every=40,  # steps between evaluations; always before the first step and after the last. 0: only those
        samples=4,  # k of avg@k at `temperature`
        temperature=1.0,
        tasks="",  # --mode=eval: these in place of the task, whole, each "NAME:FILE": "gsm8k:test.jsonl,math:math.json"
    ))

    c.rewards = ConfigDict(dict(
        workers=1,  # grading processes
        cpu_seconds=2.0,  # CPU time an item may take; then it scores 0 and its worker is replaced
        memory_mb=1024,  # address space of a worker
    ))

    c.metrics = ConfigDict(dict(
        samples_every=20,  # steps between tables of sampled rollouts, and lines of samples.jsonl. 0: never
        wandb="",  # a project of Weights & Biases that gets every metric beside TensorBoard; "" is off
    ))

    c.checkpoint = ConfigDict(dict(
        every=50,  # steps between saves; the last step is always saved. 0: only the last
        keep=2,  # newest checkpoints kept
    ))
    return c

"""Reinforcement-learning algorithms as pure functions over arrays; usable alone in any JAX program.

Import the module that you need; nothing is imported here, and no module imports any other part of rljax.

    masked         reductions that what a mask hides cannot change, neither in value nor in gradient
    advantages     rewards → advantages over ragged groups (GRPO, Dr. GRPO, RLOO), overlong shaping (DAPO)
    losses         the policy loss (GRPO, Dr. GRPO, DAPO, GSPO, CISPO), importance weights (TIS, MIS)
    kl             KL estimators, the KL loss, entropy
    down_sampling  which of n rollouts to learn from (PODS)
    cero           how many rollouts each prompt gets (CERO)
    obrs           which tokens of another model's rollouts to accept, and their weights (Jackpot)
    distillation   KL between actor and policy (Jackpot)

Everything is jit- and vmap-able. Wrong shapes, names and settings raise ValueError when a function is called
or traced; wrong values inside arrays cannot raise there, so they get weight zero and are counted.
"""

"""rljax: reinforcement-learning post-training of language models that spends compute where it teaches.

Importing the package imports neither jax nor any stage; take what you need by its own name
(``rljax.models``, ``rljax.sampling``, ``rljax.algos``, …).
"""

__version__ = "0.1.0"

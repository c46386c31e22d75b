"""CERO's learning rate on the tiny preset: three rates, three seeds each. Two minutes a run on 2 CPU cores.

    python launch/sweep.py configs/sweeps/learning_rate.py

launch/sweep.py says what a sweep file may hold.
"""

CONFIG = "configs/cero.py:tiny"
GRID = {"learner.learning_rate": [1e-4, 3e-4, 1e-3]}
SEEDS = [0, 1, 2]
METRIC = "accuracy"

"""Problems of reasoning-gym (arXiv 2505.24760): any of its generators, or a mix of them, graded by its own scores."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import random
import subprocess
import sys
import tempfile
import zlib
from typing import Any

from rljax.tasks import graders, grading, terms
from rljax.tasks.base import Task

NAME = "reasoning_gym"
INSTALL = "pip install 'reasoning-gym>=0.1.19,<0.2'"  # the extra gym of setup.py
TEMPLATE = "{prompt}\n\nThink step by step, and end with the final answer alone between <answer> and </answer>."
TRIES = 4  # draws a prompt that is wanted; generators repeat themselves
FIXED = ("seed", "size")  # options of a generator that are the task's


Entry = tuple[str, dict]  # a generator's name, and what it made: question, answer, metadata


@dataclasses.dataclass(frozen=True)
class Score:
    """The grader `own`: the generator's ``score_answer`` of a completion's answer, 0 … 1.

    The answer is what stands in the completion's last ``<answer>`` tag, else in its last ``\\boxed{}``, else all of it.
    One that its scorer raises on, as some do at a text where they look for a number, is wrong.
    datasets: generator → its data set. entries: (generator, entry) of each example, by its "entry".
    """

    datasets: dict[str, Any]
    entries: list[Entry]

    def __call__(self, completion: str, example: dict) -> float:
        name, entry = self.entries[example["entry"]]
        answer = completion.strip()
        for find in (grading.last_tag, grading.last_box):
            found = find(completion)
            if found is not None:
                answer = found
                break
        try:
            return float(self.datasets[name].score_answer(answer, entry))
        except Exception:  # of a hundred authors' parsers; left to the pool, a wrong answer would carry no reward
            return 0.0


def from_config(config: Any) -> Task:
    """The task of a config's ``task`` block: ``mix`` names generators, ``options`` is JSON for them."""
    problems = Problems(config.mix, config.options)
    train, held_out = drawn(
        config.mix, config.options, seed=config.seed, train=config.train_prompts, held_out=config.eval_prompts
    )
    entries = train + held_out
    spec = config.grader if config.grader else "own"
    reward = graders.from_config(config, spec, own=Score(problems.datasets(config.seed, "train", 1), entries))
    template = config.template if config.template else TEMPLATE
    examples = [problems.example(number, *entry, template) for number, entry in enumerate(entries)]
    readable = [example for example in examples if reward.reads(example["answer"])]
    chosen = [example for example in readable if example["entry"] < len(train)]
    held = [example for example in readable if example["entry"] >= len(train)]
    if not chosen or not held:
        raise ValueError(
            f"task.grader={spec!r} cannot read the answers of task.mix={config.mix!r}, such as"
            f" {examples[0]['answer']!r}; leave it out, for the generators' own scores"
        )
    unread = len(examples) - len(readable)
    dropped = {"whose gold answer does not parse": unread} if unread else {}
    return Task(name=NAME, train=chosen, eval=reward.judged(held), grade=reward, stop=config.stop, dropped=dropped)


class Problems:
    """Generators of reasoning-gym with their weights and options.

    mix: "name:weight,name:weight". options: "" or JSON by generator: '{"leg_counting": {"max_animals": 3}}'.

    Raises:
        ValueError: the package is not installed, or what is wrong with mix or options.
    """

    def __init__(self, mix: str, options: str):
        self._make, known = _package()
        if not mix:
            raise ValueError(
                f"task.name={NAME!r} needs the name of a generator in task.mix, or several with weights; "
                f"known: {', '.join(known)}"
            )
        self.mix = mix
        self.weights = terms.parse(mix, ",", known, key="task.mix", what="generator")
        self.options = _options(options, self.weights, known)

    def datasets(self, seed: int, split: str, size: int) -> dict[str, Any]:
        """A data set of each generator, of `size` entries, by seed and split."""
        return {name: self._dataset(name, zlib.crc32(f"{seed}/{split}/{name}".encode()), size) for name in self.weights}

    def _dataset(self, name: str, seed: int, size: int) -> Any:
        try:
            return self._make(name, seed=seed, size=size, **self.options[name])
        except (AssertionError, TypeError, ValueError) as error:  # its own checks
            raise ValueError(f"task.options={self.options[name]} is refused by {name}: {error}") from error

    def draw(self, split: str, count: int, seed: int, known: set[str]) -> list[Entry]:
        """`count` (generator, entry) with distinct questions, none of `known`, reproducible from the seed."""
        rng = random.Random(f"{seed}/{split}")
        tries = TRIES * count + 100
        datasets = self.datasets(seed, split, tries)
        names, shares = list(self.weights), list(self.weights.values())
        drawn, seen = [], set(known)
        at = dict.fromkeys(names, 0)
        for name in rng.choices(names, shares, k=tries):
            if len(drawn) == count:
                break
            entry = datasets[name][at[name]]
            at[name] += 1
            if entry["question"] not in seen:
                seen.add(entry["question"])
                drawn.append((name, entry))
        if len(drawn) < count:
            raise ValueError(
                f"task.mix={self.mix!r} gave {len(drawn)} distinct {split} problems in {tries} draws, of {count} asked "
                f"for; ask for fewer (task.{split}_prompts), or widen it by task.options"
            )
        return drawn

    def example(self, number: int, name: str, entry: dict, template: str) -> dict:
        """What model and grader see of entry `number`; its generator is its kind, where there are several."""
        prompt = template.replace("{prompt}", entry["question"])
        kind = {"kind": name} if len(self.weights) > 1 else {}
        return {"prompt": prompt, "answer": entry["answer"], "entry": number} | kind


def drawn(mix: str, options: str, *, seed: int, train: int, held_out: int) -> tuple[list[Entry], list[Entry]]:
    """``Problems.draw`` of so many training and held-out problems, the same in every run and on every host.

    Drawn by a Python of its own in which texts hash alike every time: some generators go through sets of them.

    Raises:
        ValueError: there are fewer. RuntimeError: a generator failed; says how.
    """
    code = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; from rljax.tasks import gym; gym.serve()"
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "problems.pickle"
        request = json.dumps([mix, options, seed, train, held_out, str(file)])
        command = [sys.executable, "-c", code, request]
        done = subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line]
            raise RuntimeError(f"task.mix={mix!r} could not be generated: {last[-1] if last else done.returncode}")
        answer = pickle.loads(file.read_bytes())
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer


def serve() -> None:
    """The other side of :func:`drawn`: problems, or what a ValueError says, into the file that it is told."""
    mix, options, seed, train, held_out, file = json.loads(sys.argv[1])
    try:
        problems = Problems(mix, options)
        held = problems.draw("eval", held_out, seed, set())
        answer = problems.draw("train", train, seed, {entry["question"] for _, entry in held}), held
    except ValueError as error:
        answer = str(error)
    pathlib.Path(file).write_bytes(pickle.dumps(answer))


def _package() -> tuple[Any, dict[str, Any]]:
    """reasoning-gym's create_dataset, and its generators: name → (class, config class)."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ValueError(f"task.name={NAME!r} needs the package reasoning-gym; install it: {INSTALL}") from error
    return reasoning_gym.create_dataset, dict(sorted(reasoning_gym.factory.DATASETS.items()))


def _options(text: str, names: dict[str, float], known: dict[str, Any]) -> dict[str, dict]:
    """Options of each generator of the mix."""
    try:
        given = json.loads(text) if text else {}
    except ValueError as error:
        raise ValueError(f"task.options={text!r} is not JSON: {error}") from error
    if not (isinstance(given, dict) and all(isinstance(value, dict) for value in given.values())):
        raise ValueError(f"task.options={text!r} must hold an object by generator: " + '{"NAME": {"option": 1}}')
    for name, options in given.items():
        if name not in names:
            raise ValueError(f"task.options has {name!r}, which is not in task.mix ({', '.join(names)}); take it out")
        allowed = [field.name for field in dataclasses.fields(known[name][1]) if field.name not in FIXED]
        for option in options:
            if option not in allowed:
                raise ValueError(f"task.options: {name} has no option {option!r}; known: {', '.join(allowed)}")
    return {name: given.get(name, {}) for name in names}

"""What a run says, on a terminal and without one."""

import io
import re

import jax.numpy as jnp
import numpy as np
import pytest
import rich.cells

from rljax.console import Console


class Terminal(io.StringIO):
    def isatty(self):
        return True


METRICS = {
    "train/reward_mean": jnp.float32(0.3125),
    "cero/effective_prompt_ratio": 0.4375,
    "rollouts/tokens_per_s": 12345.6,
    "train/loss": -0.00001234,
    "train/grad_norm": np.float32(0.5),
    "train/kl_ref": 1.0,
}
SAMPLE = {
    "prompt": "1 + 2 = 3\n" * 9 + "\x1b[2J7 + 8 =", "tokens": [" 日本", " " + "so" * 60, " 15\n"], "reward": None,
    "kept": False,
}  # fmt: skip
FOLDER = "/runs/[bold]a very long name[/bold]/" + "x" * 80


def narrate(file, clock):
    """A whole run of 22 steps in 1,000 seconds, 100 of them before the end of the first step."""
    with Console(file, clock=clock) as console:
        console.start("rljax · cero", [("config", "configs/cero.py:tiny"), ("run folder", FOLDER)])
        console.stage("eval")
        console.evaluation(0, {"eval/accuracy": 0.25, "eval/avg_at_k": 0.2219, "eval/unknown": 1.0})
        console.evaluation(0, METRICS)  # of a step without one
        for step in range(1, 23):
            clock.now = 100.0 + 40.0 * (step - 1)
            console.stage("rollout")
            console.step(step, step / 22, METRICS if step > 1 else {"train/loss": float("nan")})
            if step == 21:
                console.samples(step, [SAMPLE, SAMPLE | {"acceptance": [1.0, 0.5, 0.3]}])
        console.warn("61% of rollouts are truncated", "hm")
        console.warn()
        console.finish(
            [("accuracy", 0.25, np.float32(0.5)), ("steps", "0", "22")],
            {"rollout": 30.0, "update": 10.0},
            FOLDER,
        )


def test_without_a_terminal_a_line_a_step_and_no_control_codes(make_clock, monkeypatch):
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.setenv(variable, "1")
    file = io.StringIO()
    narrate(file, make_clock())
    text = file.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    lines = text.split("\n")
    assert lines == [line.rstrip() for line in lines]
    header = "  step   reward  effective   budget  tokens/s       loss  grad norm  time left"
    first = lines.index(header)
    second = lines.index(header, first + 1)
    assert lines[:first] == [
        "rljax · cero",
        "config      configs/cero.py:tiny",
        f"run folder  {FOLDER}",
        "",
        "eval at step 0: accuracy 0.250, avg@k 0.222",
    ]
    assert lines[first + 1 : first + 4] == [
        "     1        -          -     4.5%         -        nan          -          -",
        "     2    0.312        44%     9.1%    12,346  -1.23e-05        0.5    0:13:20",
        "     3    0.312        44%    13.6%    12,346  -1.23e-05        0.5    0:12:40",
    ]
    assert second == first + 21
    assert lines[second + 2 : second + 8] == [
        "",
        "samples of step 21",
        "prompt                 completion                         reward  kept  accepted",
        "1 + 2 … 3↵·[2J7 + 8 =   日本 soso…ososososososososo 15↵        -    no         -",
        "1 + 2 … 3↵·[2J7 + 8 =   日本 soso…ososososososososo 15↵        -    no       60%",
        "",
    ]
    assert lines[second + 9 :] == [
        "warning: 61% of rollouts are truncated",
        "warning: hm",
        "",
        "          before  after",
        "accuracy   0.250  0.500",
        "steps          0     22",
        "",
        "stage    seconds  share",
        "rollout     30.0    75%",
        "update      10.0    25%",
        "all         40.0   100%",
        "",
        f"run folder: {FOLDER}",
        "",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_on_a_terminal_a_bar_under_the_same_lines(make_clock, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    plain, terminal = io.StringIO(), Terminal()
    narrate(plain, make_clock())
    narrate(terminal, make_clock())
    text = terminal.getvalue()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden once and shown again
    after_the_bar = text[text.rindex("━") : text.index("before  after")]
    assert "\x1b[2K" in after_the_bar  # the bar is wiped before the final table
    bare = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text))
    of_fixed_width = {line for line in plain.getvalue().split("\n") if "…" not in line and "completion" not in line}
    assert of_fixed_width <= {*bare, ""}
    assert sum(rich.cells.cell_len(line) <= width and "…" in line for line in bare) == 2
    bars = [line for line in bare if "━" in line]
    assert all(len(line) <= width for line in bars)
    assert any(line.startswith("starting ━━") for line in bars)
    assert any(re.fullmatch(r"starting eval\s+━+", line.rstrip()) for line in bars)
    assert any(re.fullmatch(r"step 2 rollout ━+.* - left", line) for line in bars)
    assert any(re.fullmatch(r"step 22 ━+ 100% of the budget, 12,346 tokens/s, 0:00:00 left", line) for line in bars)


def test_an_exception_takes_the_bar_off(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with pytest.raises(RuntimeError), Console(terminal) as console:
        console.start("rljax", [])
        raise RuntimeError
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_gets_plain_lines(make_clock, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    terminal = Terminal()
    narrate(terminal, make_clock())
    assert "\x1b" not in terminal.getvalue() and "\r" not in terminal.getvalue()


@pytest.mark.parametrize(
    "start, steps, left",
    [
        (0.0, [(100, 0.1)], "-"),  # the first step compiles, and says nothing of the others
        (0.0, [(100, 0.1), (110, 0.2)], "0:01:20"),  # 10 s a tenth
        (0.5, [(100, 0.6), (110, 0.7)], "0:00:30"),  # resumed half-way
        (0.5, [(10, 0.5), (20, 0.5)], "-"),  # nothing spent yet
        # The last 20 points, from (20 s, 2%) on: 19% in 1,180 s, so the other 79% in 4,906 s.
        (0.0, [(0, 0.0), *((10 * i, i / 100) for i in range(1, 21)), (1200, 0.21)], "1:21:46"),
        (0.0, [(0, 0.0), (3_600_000, 0.5)], "1000:00:00"),
    ],
    ids=["first", "second", "resumed", "nothing", "window", "long"],
)
def test_time_left(make_clock, start, steps, left):
    file, clock = io.StringIO(), make_clock()
    console = Console(file, clock=clock)
    console.start("", [("", "")], fraction=start)
    for step, (now, fraction) in enumerate(steps, 1):
        clock.now = now
        console.step(step, fraction, {})
    assert file.getvalue().splitlines()[-1].split()[-1] == left


def test_other_processes_say_nothing(make_clock, other_process, capsys):
    narrate(None, make_clock())
    assert capsys.readouterr() == ("", "")


def test_stdout_is_the_default(capsys):
    Console().warn("a [b]")
    assert capsys.readouterr().out == "warning: a [b]\n"

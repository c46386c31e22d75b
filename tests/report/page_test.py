"""The page: whole by itself, readable, and without what the runs do not hold."""

import html.parser
import pathlib
import re
import shutil
import subprocess

import pytest

from rljax import report
from rljax.report import charts, sections


def text_of(page: str) -> str:
    """The page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


class Links(html.parser.HTMLParser):
    """Every tag of a page, and every attribute that can make a browser load something."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.links, self.open = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        loading = ("href", "src", "srcset", "data", "action", "poster", "xlink:href", "background", "formaction")
        self.links += [value for name, value in attrs if name in loading or name.startswith("on")]
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()


SECTIONS = (
    "Results", "Measured by --mode=eval", "Held-out prompts", "Training", "Where the rollouts go",
    "Acceptance and KL between actor and policy", "Speed", "Difficulty", "Kept rewards", "Time by stage",
    "Held-out answers before and after", "Rollouts and their acceptance", "Config",
)  # fmt: skip


def headings(page: str) -> list[str]:
    return [heading.replace("&amp;", "&") for heading in re.findall("<h2>(.*?)</h2>", page)]


def test_the_page_has_every_section_for_which_the_run_has_something(make_run):
    page = report.run([make_run(everything=True)]).read_text()
    assert tuple(headings(page)) == SECTIONS


def test_what_a_run_lacks_is_left_out(make_run):
    plain = [{"step": 1, "train/reward_mean": 0.25, "rollouts/total": 8}, {"step": 2, "train/reward_mean": 0.5}]
    page = report.run([make_run(lines=plain)]).read_text()
    assert headings(page) == ["Results", "Training", "Config"]
    said = text_of(page)
    assert "made has no held-out evaluation." in said and "The runs do not record this axis." in said  # seconds
    assert "nan" not in said and "None" not in said


def test_the_page_loads_nothing_and_runs_nothing(make_run):
    page = report.run([make_run("a", everything=True), make_run("b", name="b", everything=True)]).read_text()
    found = Links(page)
    assert not found.open, found.open
    assert not {"script", "iframe", "img", "object", "embed", "base", "form"} & set(found.tags)
    assert found.links == ["data:,"]  # the icon, which a browser would else ask for
    assert "@import" not in page and set(re.findall(r"url\(([^)]*)\)", page)) == {"#hatch"}
    assert "http:" not in page and "https:" not in page
    assert found.tags.count("link") == 1


def test_text_of_models_and_files_is_only_text(make_run):
    page = report.run([make_run(everything=True, name="<b>&")]).read_text()
    assert "<script" not in page and "&lt;script&gt;boom()" in page
    assert "<b>&" not in page and "&lt;b&gt;&amp;" in page and "KeyError: &lt;x&gt;" in page


def test_the_same_runs_give_the_same_bytes(make_run):
    folder = make_run(everything=True)
    path = report.run([folder])
    assert path == folder / "report.html"
    first = path.read_bytes()
    assert report.run([folder]).read_bytes() == first
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]


def test_the_results_are_in_words_and_in_a_table(make_run):
    said = text_of(report.run([make_run(everything=True)]).read_text())
    assert "went from 25.0% to 75.0% (+50.0 points) over 2 steps, 16 rollouts and 9.00 s." in said
    assert "25.0% → 75.0%" in said and "20.0% → 60.0%" in said and "not finished" not in said
    assert "run : 3 rollouts could not be scored." in said and "62.5% of the rollouts met the token limit." in said


def test_a_mean_of_seeds_has_an_interval_and_a_row_a_seed(make_run):
    paths = []
    for seed, last in enumerate((0.70, 0.75, 0.80)):
        lines = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "eval/accuracy": last}]
        paths.append(make_run(f"s{seed}", lines=lines, seed=seed))
    page = report.run(paths).read_text()
    said = text_of(page)
    # 0.25 ± 4.303 · 0.05 / √3
    assert "mean of seeds 0, 1, 2" in said and "+25.0 points +12.6 to +37.4 points" in said
    assert "50.0% → 75.0% 62.6% to 87.4%" in said
    assert all(f"seed {seed}, s{seed}" in said for seed in range(3))
    assert 'class="band c0"' in page and "not finished" in said
    assert "95% intervals of the mean by Student’s t" in said


def test_a_panel_that_never_moves_is_a_sentence(make_run):
    page = report.run([make_run()]).read_text()
    assert "<h3>Clipped tokens</h3>" not in page and "clipped tokens 0.0%" in text_of(page)


def test_kept_rollouts_have_panels_only_where_some_are_left_out(make_run):
    title = "rollouts kept a step"
    assert title in text_of(report.run([make_run("a")]).read_text())
    lines = [{"step": step, "rollouts/step": 8, "pods/kept": 8, "train/loss": step} for step in (1, 2)]
    assert title not in text_of(report.run([make_run("b", lines=lines)]).read_text())


def test_tokens_are_shaded_by_the_chance_of_rejection(make_run):
    page = report.run([make_run(everything=True)]).read_text()
    assert '<span class="token low" style="--r:75%" title="accepted with probability 0.25">&lt;2&gt;</span>' in page
    assert "reward 1, kept, mean acceptance 62.5%" in page
    assert '<pre class="tokens"> 4</pre>' in page and "no reward, not kept</small>" in page  # without acceptance


def test_stage_times_are_of_the_whole_run(group):
    said = text_of(sections.stages([group]))  # 9 s in all: 4 of evaluation, 2 each of rollouts and updates, 1 beside
    assert "eval 4.00 s, 44%" in said and "rollout 2.00 s, 22%" in said and "other 1.00 s, 11%" in said


def test_the_config_shows_what_differs_first(make_run):
    page = report.run([make_run("a"), make_run("b", name="b", learner={"learning_rate": 0.1})]).read_text()
    config = page[page.index('<section id="config">') :]
    differs, everything = config.split("<details>")
    assert "learner.learning_rate" in differs and "rollout.samples" not in differs
    assert (
        "rollout.samples" in everything
        and '<tr class=differs><th scope="row"><code>learner.learning_rate' in everything
    )


# --- how it looks


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_can_be_read_on_their_ground(scheme):
    blocks = re.findall(r":root \{(.*?)\}", report.STYLE.read_text(), re.DOTALL)
    colours = dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", blocks[scheme]))
    inks = ["text", "soft", "good", "bad", *(f"g{i}" for i in range(charts.MOST_GROUPS))]
    for ground in ("page", "card", "tint"):
        for ink in inks:
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    heat, card = ([int(colours[n][i : i + 2], 16) for i in (1, 3, 5)] for n in ("heat", "card"))
    darkest = "#" + "".join(f"{round(0.6 * h + 0.4 * c):02x}" for h, c in zip(heat, card, strict=True))
    assert contrast(colours["text"], darkest) >= 4.5


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def visited(path: pathlib.Path, scratch: pathlib.Path) -> tuple[list[str], set[str]]:
    """(messages on the console, addresses asked for beside the page's own) of a page in Chromium, offline."""
    log = scratch / f"{path.stem}.json"
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
    offline = (
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={scratch / 'profile'}",
        f"--log-net-log={log}",
    )
    command = [CHROMIUM, *options, *offline, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Run report" in done.stdout, done.stderr
    urls = set(re.findall(r'"url":"([^"]*)"', log.read_text())) - {path.as_uri()}
    own = re.compile(r"https?://[\w.-]*\.(google|googleapis|gvt1|gstatic)\.com/|chrome|data:|about:")  # the browser's
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line], {url for url in urls if not own.match(url)}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed here")
def test_in_chromium_the_page_makes_no_request_and_no_console_message(make_run, tmp_path):
    path = report.run([make_run("a", everything=True), make_run("b", name="b")])
    assert visited(path, tmp_path) == ([], set())
    bad = tmp_path / "bad.html"  # that the check can fail
    asking = '<main><img src="https://example.invalid/x.png"><script>console.log("here")</script>'
    bad.write_text(path.read_text().replace("<main>", asking))
    messages, asked = visited(bad, tmp_path)
    assert len(messages) == 1 and asked == {"https://example.invalid/x.png"}

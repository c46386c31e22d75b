"""Multiple choice: rows of many layouts, right letters, and the letter that a completion chooses; values by hand."""

import time

import pytest

from rljax.tasks import choices

METALS = [("", "tin"), ("", "iron"), ("", "zinc")]


@pytest.mark.parametrize(
    ("row", "field", "found"),
    [
        ({"choices": ["tin", "iron", "zinc"]}, "", METALS),
        ({"options": ["tin", "iron", "zinc"], "A": "x", "B": "y"}, "", METALS),
        ({"q": {"c": ["(A) tin", "(B) iron", "(C) zinc"]}}, "q.c", METALS),
        ({"choices": ["A. tin", "A. iron"]}, "", [("", "A. tin"), ("", "A. iron")]),  # not their letters
        ({"A": "tin", "B": "iron", "C": "zinc", "answer": "A"}, "", [("A", "tin"), ("B", "iron"), ("C", "zinc")]),
        ({"a1": "tin", "a2": "iron", "a3": None}, "a1, a2, a3", [("a1", "tin"), ("a2", "iron")]),
        ({"choices": {"text": ["tin", "iron"], "label": ["1", "2"]}}, "", [("1", "tin"), ("2", "iron")]),
        ({"choices": {"B": "iron", "A": 3}}, "", [("B", "iron"), ("A", "3")]),
        ({"choices": [{"label": "x", "text": "tin"}, {"label": "y", "text": True}]}, "", [("x", "tin"), ("y", "true")]),
        ({"choices": ["tin"]}, "", []),
        ({"choices": None}, "", []),
        ({"choices": {"text": [], "label": []}}, "", []),
    ],
)
def test_choices_of_a_row(row, field, found):
    assert choices.of_row(row, field, "line 1") == found


@pytest.mark.parametrize(
    ("row", "field", "told"),
    [
        ({"question": "x", "A": "y"}, "", "line 1 has none of the fields choices, options or A.*task.choices_field"),
        ({"x": 1}, "choices", r"line 1 has no field 'choices' \(task.choices_field\)"),
        ({"choices": "tin, iron"}, "", "'choices' .* is a str; it must be a list of choices"),
        ({"choices": [["tin"], "iron"]}, "", "a choice's text is a list, not text"),
        ({"choices": [{"name": "tin"}]}, "", "has a choice with name; it must have label and text"),
        ({"choices": {"text": ["tin", "iron"], "label": ["A"]}}, "", r"has 2 texts and other labels: \['A'\]"),
        ({"choices": [f"{i}" for i in range(27)]}, "", "line 1 has 27 choices; there are letters for 26"),
    ],
)
def test_what_are_no_choices_is_told(row, field, told):
    with pytest.raises(ValueError, match=told):
        choices.of_row(row, field, "line 1")


def plain(*texts):
    return [choices.Choice("", text) for text in texts]


@pytest.mark.parametrize(
    ("offered", "gold", "letter"),
    [
        (plain("tin", "iron"), "B", "B"),
        (plain("tin", "iron"), "(b)", "B"),
        (plain("tin", "iron"), "B.", "B"),
        (plain("tin", "iron"), "Iron", "B"),
        (plain("tin", "iron"), "B. iron", "B"),
        (plain("tin", "iron"), "(B) Iron", "B"),
        (plain("tin", "iron"), "A. iron", None),
        (plain("tin", "iron"), 1, "B"),
        (plain("tin", "iron"), 1.0, "B"),
        (plain("tin", "iron"), "1", "B"),
        (plain("2", "1"), "1", "B"),  # a text is a choice's text first
        (plain("2", "1"), 1, "B"),
        (plain("1", "0"), 1, "B"),  # a number never is
        (plain("1", "0"), "1", "A"),
        (plain("B", "A"), "A", "A"),  # a letter is a letter first
        (plain("True", "False"), False, "B"),
        (plain("tin", "iron"), 2, None),
        (plain("tin", "iron"), -1, None),
        (plain("tin", "iron"), "C", None),
        (plain("tin", "tin"), "tin", None),
        (plain("tin", "iron"), "", None),
        (plain("tin", "iron"), None, None),
        ([choices.Choice("1", "tin"), choices.Choice("2", "iron")], "2", "B"),
        ([choices.Choice("1", "tin"), choices.Choice("2", "iron")], 1, "A"),
        ([choices.Choice("1", "tin"), choices.Choice("2", "iron")], "0", "A"),
        ([choices.Choice("A", "tin"), choices.Choice("C", "iron")], "C", "B"),
    ],
)
def test_the_right_letter(offered, gold, letter):
    assert choices.gold_letter(offered, gold) == letter


def test_the_prompt_lists_the_choices():
    assert choices.lettered("Which?", plain("tin", "iron")) == "Which?\nA. tin\nB. iron"


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("The answer is (B).", "B"),
        ("The answer is B", "B"),
        ("The answer is B because it rusts", "B"),
        ("The answer is A because it rusts", "A"),
        ("The correct option is C.", "C"),
        ("I choose option (d)", "D"),
        ("answer: b", "B"),
        ("Answer: A. No, the answer is C", "C"),
        ("**Answer:** D", "D"),
        ("Answer:\n\n**B) iron**", "B"),
        (r"The answer is $\text{B}$.", "B"),
        ('The answer is "B".', "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{\text{(C) } 5}", "C"),
        (r"\boxed{B: iron}", "B"),
        (r"\boxed{12}, so the answer is (D)", "D"),
        ("<answer>B</answer>", "B"),
        ("#### C", "C"),
        ("B.", "B"),
        ("b", "B"),
        ("B. Paris", "B"),
        ("(C) Paris\nsince it is so", "C"),
        ("Let me think.\nA.", "A"),
        ("Let me think.\n(d)", "D"),
        ("A dog", None),  # an article
        ("A dog is the answer", None),
        ("Answer: A dog", None),
        ("The answer is a dog", None),
        (r"\boxed{A dog}", None),
        ("I need to answer a question", None),
        ("I think so", None),
        (r"\boxed{Because}", None),
        ("The answer is not B", None),
        ("The answer isn't B", None),
        ("A. tin\nB. iron", None),  # the choices once more
        ("answer: E", None),
        ("", None),
    ],
)
def test_extract_choice(completion, letter):
    assert choices.extract_choice(completion) == letter
    assert choices.grade_choice(completion, "B") == float(letter == "B")


def test_choices_may_have_other_letters():
    assert choices.grade_choice("answer: E", "E", letters="ABCDE") == 1.0
    assert choices.extract_choice("The answer is I think", letters="ABCDEFGHI") is None
    assert choices.extract_choice("The answer is I.", letters="ABCDEFGHI") == "I"
    assert choices.extract_choice("B", letters="A") is None


def test_a_gold_that_is_no_letter_is_an_error():
    with pytest.raises(ValueError, match="'E' is not one letter of 'ABCD'"):
        choices.grade_choice("E", "E")


@pytest.mark.parametrize("unit", ["answer ", "answer is ", " ", "A. ", "(", "\n", "answer: a b "])
def test_extract_choice_takes_linear_time(unit):
    started = time.process_time()
    choices.extract_choice(unit * 20_000)
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "text", ["The answer is A or B", "(A) or (B)", r"\boxed{A or B}", r"\boxed{A, B, C, D}", "Answer: A or B or C or D",
             "<answer>A and also B</answer>", r"\boxed{(A), (C)}"],
)  # fmt: skip
def test_who_names_several_letters_chooses_none(text):
    assert choices.extract_choice(text) is None
    assert choices.extract_choice(text.replace("A", "B", 1) + "\nSo the answer is (D).") in (None, "D")


def test_a_letter_before_other_words_is_chosen():
    assert choices.extract_choice("The answer is (B), because A melts and C burns.") == "B"
    assert choices.extract_choice("The answer is B and not A.") == "B"

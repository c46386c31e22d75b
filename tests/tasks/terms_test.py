"""Names with weights."""

import pytest

from rljax.tasks import terms


def test_names_with_and_without_weights():
    assert terms.parse("b: 2.5 , a", ",", ("a", "b"), key="k", what="name") == {"b": 2.5, "a": 1.0}
    assert list(terms.parse("b+a:1e-2", "+", {"a": 0, "b": 0}, key="k", what="name")) == ["b", "a"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "k='': no name ''; known: apple, bread"),
        ("aple", r"k='aple': no name 'aple' \(did you mean 'apple'\?\); known: apple, bread"),
        ("apple,", "no name ''"),
        ("apple:", "the weight '' of apple is not a number"),
        ("apple:x", "the weight 'x' of apple is not a number"),
        ("apple:0", "the weight of apple must be above 0 and finite"),
        ("apple:-1", "the weight of apple must be above 0 and finite"),
        ("apple:nan", "the weight of apple must be above 0 and finite"),
        ("apple:inf", "the weight of apple must be above 0 and finite"),
        ("apple,apple", "apple stands twice; give it one weight"),
    ],
)
def test_what_is_wrong_is_told(text, told):
    with pytest.raises(ValueError, match=told):
        terms.parse(text, ",", ("apple", "bread"), key="k", what="name")

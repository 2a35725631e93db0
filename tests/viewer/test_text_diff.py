"""Two texts beside each other: nothing is lost, and what differs is marked down to the word."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_otel.serve.viewer.text_diff import Line, Piece, compare_lines, fold_lines

TEXTS = st.lists(st.text("ab \n.", max_size=12).map(lambda text: text.replace("\n", "")))


def said(pieces: tuple[Piece, ...]) -> str:
    """The line that pieces make."""
    return "".join(piece.text for piece in pieces)


@given(TEXTS, TEXTS)
def test_compared_keeps_both_texts_whole(a: list[str], b: list[str]) -> None:
    """Each side in its order is that text; lines are numbered; what is the same is the same."""
    found = compare_lines(a, b)
    of_a = [line for line in found if line.number_a]
    of_b = [line for line in found if line.number_b]

    assert [said(line.a) for line in of_a] == a
    assert [said(line.b) for line in of_b] == b
    assert [line.number_a for line in of_a] == list(range(1, len(a) + 1))
    assert [line.number_b for line in of_b] == list(range(1, len(b) + 1))
    for line in found:
        plain = [
            "".join(piece.text for piece in side if not piece.is_changed)
            for side in (line.a, line.b)
        ]
        if line.kind in ("same", "changed"):
            assert plain[0] == plain[1]
        if line.kind == "same":
            assert said(line.a) == said(line.b)


@given(TEXTS, TEXTS, st.integers(0, 4))
def test_folded_leaves_out_lines_that_are_the_same_alone(
    a: list[str], b: list[str], around: int
) -> None:
    """Gaps stand for as many lines as are missing, and every difference stays."""
    found = compare_lines(a, b)
    short = fold_lines(found, around)

    hidden = sum(line.number_a for line in short if line.kind == "gap")
    assert len([line for line in short if line.kind != "gap"]) + hidden == len(found)
    assert [line for line in short if line.kind not in ("same", "gap")] == [
        line for line in found if line.kind != "same"
    ]


def test_words_that_differ_are_marked() -> None:
    """A word in place of another; a line that has nothing of the other is no change of it."""
    found = compare_lines(
        ["You are brief.", "Answer the question.", "End."], ["You are kind.", "Zzz", "End."]
    )

    assert found[0].kind == "changed"
    assert [piece.text for piece in found[0].a if piece.is_changed] == ["brief"]
    assert [piece.text for piece in found[0].b if piece.is_changed] == ["kind"]
    assert [line.kind for line in found[1:]] == ["removed", "added", "same"]
    assert fold_lines(found, 0)[-1] == Line("gap", 1, 1)


def test_long_lines_are_compared_as_a_whole() -> None:
    """A comparison of words takes their product: beyond some, lines alone are compared."""
    a, b = "one word " * 2000, "two words " * 2000

    (line,) = compare_lines([a], [b])

    assert line == Line("changed", 1, 1, (Piece(a, is_changed=True),), (Piece(b, is_changed=True),))

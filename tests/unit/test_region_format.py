"""docs/region-format.md says what the code says, and what a region really holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shmlane import claims, header, records

PAGE = Path(__file__).parents[2] / "docs" / "region-format.md"

Field = tuple[int, int]


def told_in_page(title: str) -> list[Field]:
    """Offset and size of each field of the first table behind `title`."""
    text = PAGE.read_text(encoding="utf-8").split(title, 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows is not None
    cells = re.findall(r"^\| (\d+) \| (\d+)[^|]*\|", rows[0], re.MULTILINE)
    return [(int(offset), int(size)) for offset, size in cells]


def told_in_code(text: str | None, title: str) -> list[Field]:
    """The same of the table behind `title` in a docstring."""
    assert text is not None
    behind = text.split(title, 1)[1]
    first = re.search(r"^ +0 +\d+ ", behind, re.MULTILINE)
    assert first is not None
    table = behind[first.start() :].split("\n\n", 1)[0]
    cells = re.findall(r"^ +(\d+) +(\d+) ", table, re.MULTILINE)
    return [(int(offset), int(size)) for offset, size in cells]


@pytest.mark.parametrize(
    ("page", "module", "code"),
    [
        ("## Header", header.__doc__, "start of the file."),
        ("**tensor table**", header.__doc__, "A row of the tensor table:"),
        ("## Record of a slot", records.__doc__, "starts on a cache line:"),
        ("Behind that comes an entry", records.__doc__, "in the order of the header:"),
    ],
)
def test_the_page_has_the_fields_of_the_code(
    page: str, module: str | None, code: str
) -> None:
    fields = told_in_page(page)
    assert len(fields) > 5
    assert fields == told_in_code(module, code)


def test_fields_do_not_overlap() -> None:
    for title, size in (
        ("## Header", 80),
        ("**tensor table**", 64),
        ("## Record of a slot", records.HEAD_BYTES),
    ):
        fields = told_in_page(title)
        ends = [offset + size for offset, size in fields]
        starts = [offset for offset, _ in fields]
        assert all(end <= next_ for end, next_ in zip(ends, starts[1:], strict=False))
        assert ends[-1] <= size


def test_the_page_names_the_version_and_the_locks() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"format version: {header.VERSION} " in text
    assert "2⁴⁸ + 2*i*" in text
    assert claims.FIRST_BYTE == 2**48
    assert (claims.Hold.HOME, claims.Hold.BORROWER) == (0, 1)
    assert [state.value for state in records.State] == [0, 1, 2, 3]

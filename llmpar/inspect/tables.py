"""Make tables for a terminal."""

from collections.abc import Iterable, Sequence

from rich.table import Table


def rich_table(
    title: str | None,
    columns: Sequence[str],
    numbers: Sequence[str] = (),
    rows: Iterable[Sequence[str]] = (),
    **options,
) -> Table:
    """Make a table. Columns of ``numbers`` stay whole where the terminal is narrow; words fold."""
    table = Table(title=title, title_justify="left", caption_justify="left", **options)
    for name in columns:
        number = name in numbers
        table.add_column(
            name, justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    return table

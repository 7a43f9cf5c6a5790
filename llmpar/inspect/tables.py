"""Tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table


def rich_table(title: str, columns: Sequence[str], numbers: Sequence[str] = (), **more) -> Table:
    """Make a table. Columns of ``numbers`` stay whole where the terminal is narrow; words fold."""
    made = Table(title=title, title_justify="left", caption_justify="left", **more)
    for name in columns:
        number = name in numbers
        made.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return made

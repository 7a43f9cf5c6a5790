"""Writes engines.md: how long engines take to start and to go on (`make engines`), from engines.json."""

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
FILE, TABLE = HERE / "engines.json", HERE / "engines.md"
MEANS = {"again_s": "", "less_s": " with one host", "more_s": " with two hosts again"}


def table(rows: dict) -> str:
    """The page with these rows in its table; its words are written there."""
    lines = []
    for name, row in rows.items():
        again = "; ".join(f"{row[key]}{words}" for key, words in MEANS.items() if key in row)
        start, load = row.get("start_s", ""), row["load"]
        lines.append(f"| {name} | {row['version']} | {start} | {again} | {load} | {row['date']} |\n")
    head, rule, rest = re.split(r"^(\|[-|]+\|\n)", TABLE.read_text(), maxsplit=1, flags=re.M)
    return head + rule + "".join(lines) + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    TABLE.write_text(table(json.loads(FILE.read_text())))

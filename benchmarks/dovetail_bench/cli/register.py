"""`bench record` and `bench report`: runs that are kept, and the tables of docs/measurements that come from them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import print_json, print_table
from dovetail.errors import ConfigError


def record(
    name: Annotated[str, typer.Argument(help="Of the table.")],
    data: Annotated[Path | None, typer.Option(help="Folder of the traces and profiles that the command names.")] = None,
) -> None:
    """Run the command of a table of docs/measurements, and keep its JSON with commit, day, machine and versions.

    Example: dovetail bench record compositions-gsm8k --data DIR
    """
    from dovetail_bench import register

    typer.echo(f"wrote {register.record(name, data)}")


def report(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page would change.")] = False,
    age: Annotated[bool, typer.Option("--age", help="List each table with the changes to its code since.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --age: print JSON for programs.")] = False,
) -> None:
    """Write the tables of recorded runs into docs/measurements.

    Example: dovetail bench report --check
    """
    from dovetail_bench import register

    if age:
        rows = register.ages()
        if as_json:
            return print_json(rows)
        return print_table(("page", "day", "commit", "changes since"), [(*row[:3], str(row[3])) for row in rows])
    changed = [path for path, text in register.pages().items() if text != path.read_text()]
    if check and changed:
        raise ConfigError(f"{', '.join(path.name for path in changed)}: differs; run dovetail bench report")
    for path in changed:
        path.write_text(register.pages()[path])
        typer.echo(f"wrote {path}")

"""`completion`: what a shell sources to complete commands, options and names of models."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

PROGRAM = "dovetail"
VARIABLE = "_DOVETAIL_COMPLETE"  # in the environment when a shell asks what could follow


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell that it is for.")]) -> None:
    """Print what makes a shell complete commands, options and names of models.

    Example: source <(dovetail completion bash)     (zsh the same; fish: dovetail completion fish | source)
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell.value))


def words_before_cursor() -> list[str] | None:
    """What has been typed after the program's name; None if no shell is asking."""
    if VARIABLE not in os.environ:
        return None
    typed = os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")
    return typed.split()[1:]


def prepare() -> None:
    """Have typer know the shells; it does so by itself only where it installs its own options."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()


def local_models(incomplete: str) -> list[str]:
    """Names in the catalogue, for a shell."""
    from dovetail.errors import DovetailError
    from dovetail.store import Catalogue

    try:
        return [card.name for card in Catalogue().cards() if card.name.startswith(incomplete)]
    except (DovetailError, OSError):
        return []

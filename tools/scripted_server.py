"""A real server with a model that follows a script, for agents: their loop of calls and results is what is tried, and a
small model's wit is none of it.

    python tools/scripted_server.py FOLDER [--config FILE]

Prints its address and serves until SIGTERM. The model is asked to mend `calc.py` and answers with two calls of
whichever tool for commands it is offered (mend the file, run its test), and after their results with a sentence. Asked
to "Call NAME with {…}." it does so, as often as it is asked, and then says what the last call came to.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import msgspec

TESTS = Path(__file__).resolve().parent.parent / "tests" / "pure"
sys.path.insert(0, str(TESTS))

from fake_worker import FakeWorker  # noqa: E402
from gateway_builders import END, make_admin, make_card  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from dovetail.messages import Ask, Loaded, LoadTimes, Reply, encode  # noqa: E402
from dovetail.node.protocol import Accepted, Notice, Offer, Offered, Propose  # noqa: E402
from dovetail.types import FinishReason, Request, TokenEvent  # noqa: E402

MODEL = "scripted"
CONTEXT = 1 << 19
COMMANDS = ("sed -i 's/a - b/a + b/' calc.py", "python3 test_calc.py")
DONE = "Mended: the test passes."
WHOLE_FILES = "*file listing*"  # aider's name for a file that is written anew, in its instructions
OBSERVATION = "Observation:\n"  # how smolagents tells of a result, as the user
ORDER = re.compile(r"Call (\S+) with (\{.*?\})\.")
# Tools for commands, by agent: name, parameter, and what else is required.
SHELLS: tuple[tuple[str, str, dict[str, str | bool]], ...] = (
    ("exec_command", "cmd", {}),
    ("Bash", "command", {"description": "Mend and test"}),
    ("bash", "command", {"description": "Mend and test"}),
    ("run_shell_command", "command", {"is_background": False}),
    ("shell", "command", {}),
)


def answer_to(prompt: str) -> str:
    """What the model says after this prompt."""
    step = prompt.count("<tool_response>") + prompt.count(OBSERVATION)
    if orders := ORDER.findall(prompt):
        if step < len(orders):
            name, arguments = orders[step]
            return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        return "It said: " + prompt.rpartition("<tool_response>")[2].partition("</tool_response>")[0].strip()
    if WHOLE_FILES in prompt and "return a - b" in prompt:
        return f"{DONE}\n\ncalc.py\n```\ndef add(a, b):\n    return a + b\n```\n"
    shell = offered_shell(prompt)
    if shell is not None and step >= len(COMMANDS) and '"name": "final_answer"' in prompt:  # smolagents ends with it
        call = {"name": "final_answer", "arguments": {"answer": DONE}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if shell is None or step >= len(COMMANDS) or "calc.py" not in prompt:
        return DONE
    name, parameter, more = shell
    call = {"name": name, "arguments": {parameter: COMMANDS[step], **more}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def offered_shell(prompt: str) -> tuple[str, str, dict[str, str | bool]] | None:
    """The tool for commands, by its name in the prompt: Semantic Kernel puts the plugin's before it."""
    for name, parameter, more in SHELLS:
        if found := re.search(rf'"name": "((?:\w+-)?{name})"', prompt):
            return found[1], parameter, more
    return None


class ScriptedWorker(FakeWorker):
    """Answers by `answer_to`."""

    def __init__(self, node: str, address: str) -> None:
        super().__init__(node, address)
        self._tokenizers: dict[str, Tokenizer] = {}
        self._answers: dict[str, list[int]] = {}  # by request

    def say(self, *notices: Notice) -> None:
        wide = (Offered(one.model, Offer(CONTEXT, 1)) if isinstance(one, Offered) else one for one in notices)
        super().say(*wide)

    def answer(self, message: Ask) -> None:
        """No letter of a prompt means anything else here."""
        question = message.question
        if not isinstance(question, Propose):
            return super().answer(message)
        request, record = message.request, question.request
        assert request is not None
        self.socket.send(encode(Reply(message.number, Accepted(self.start(record.model)))))
        self.open[record.id] = (request, record, record.produced)

    def start(self, name: str) -> int:
        number = super().start(name)
        self.socket.send(encode(Loaded(name, "f32", CONTEXT, 1, False, LoadTimes(0.0, 0.0))))
        return number

    def next_event(self, request: Request, made: int) -> TokenEvent:
        tokens = self._answers.get(request.id) or self._answer(request)
        token = tokens[made] if made < len(tokens) else END
        finish = FinishReason.STOP if token == END else None
        if made + 1 >= request.sampling.max_tokens and finish is None:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._answers.pop(request.id, None)
        return TokenEvent(request.id, request.open_choices[0], token, finish)

    def _answer(self, request: Request) -> list[int]:
        file = self.models[request.model].tokenizer_file
        tokenizer = self._tokenizers.setdefault(file, Tokenizer.from_file(file))
        prompt = tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        tokens: list[int] = tokenizer.encode(answer_to(prompt), add_special_tokens=False).ids
        self._answers[request.id] = tokens
        return tokens


async def serve(folder: Path, file: Path | None) -> None:
    from dovetail.cli.serve import settle_down
    from dovetail.config import Config, ModelConfig, NodeConfig, load_config
    from dovetail.gateway.app import make_app
    from dovetail.gateway.http.listen import base_url, listen
    from dovetail.gateway.metrics import Metrics
    from dovetail.gateway.models import FixedCatalogue, Models
    from dovetail.gateway.server import HttpServer
    from dovetail.gateway.service import Limits, Service
    from dovetail.gateway.workers.client import WorkerClient

    config = load_config(file) if file is not None else Config()
    card = make_card(folder, MODEL)
    card = msgspec.structs.replace(card, spec=msgspec.structs.replace(card.spec, context_length=CONTEXT))
    link = WorkerClient([NodeConfig()], [sys.executable, str(Path(__file__).resolve())])
    models = Models(FixedCatalogue([card]), {MODEL: config.models.get(MODEL, ModelConfig(source="", keep_alive=-1))})
    service = Service(link, models, Metrics(), Limits.of(config.server))
    link.start()
    try:
        await service.start()
        admin = make_admin(service, config)
        listener = listen("127.0.0.1", 0)
        settle_down()
        print(base_url(listener), flush=True)
        await HttpServer(make_app(admin), admin).serve(sockets=[listener])
    finally:
        await link.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--node")
    parser.add_argument("--connect")
    known, rest = parser.parse_known_args()
    if known.node:
        ScriptedWorker(known.node, known.connect).run()
        return
    from dovetail.cli.serve import run_loop

    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", type=Path, help="a dovetail.yaml: keys, limits, MCP servers, the model's aliases")
    options = parser.parse_args(rest)
    options.folder.mkdir(parents=True, exist_ok=True)
    run_loop(serve(options.folder, options.config))


if __name__ == "__main__":
    main()

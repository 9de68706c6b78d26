"""`dovetail plan stages`: a model of the store in several processes, each with some of its layers."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.completion import local_models
from dovetail.cli.output import print_json

if TYPE_CHECKING:
    from dovetail.types import ModelCard, Request


def stages(
    model: Annotated[str, typer.Argument(help="A name from `dovetail list`.", autocompletion=local_models)],
    prompt: Annotated[str, typer.Argument(help="Continued as it stands, greedily.")],
    count: Annotated[int, typer.Option("--stages", help="Processes, each with its own layers.", min=1)] = 2,
    vcpus: Annotated[float, typer.Option(help="Of each process.", min=0.1)] = 1.0,
    tokens: Annotated[int, typer.Option(help="To make.", min=1)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Run a language model cut into stages, and say where the time goes.

    Example: dovetail plan stages smollm2-135m-instruct "The capital of France is" --stages 3
    """
    from tokenizers import Tokenizer

    from dovetail.store import Catalogue
    from dovetail.types import Request, SamplingParams

    card = Catalogue().get(model)
    tokenizer = Tokenizer.from_file(card.tokenizer_file)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, seed=0, stop_token_ids=card.eos_token_ids)
    request = Request("0", model, tuple(tokenizer.encode(prompt, add_special_tokens=False).ids), sampling)
    found = asyncio.run(_run(card, request, count, vcpus))
    found = {"text": tokenizer.decode(found.pop("tokens")), **found}
    if as_json:
        print_json(found)
        return
    print(found["text"])
    shares = " + ".join(f"{ms:.1f}" for ms in found["stages_ms"])
    megabytes = ", ".join(f"{size:.0f}" for size in found["memory_mb"])
    print(
        f"\n{found['token_ms']:.1f} ms a token: {shares} in stages, {found['passing_ms']:.1f} between; {megabytes} MB"
    )


async def _run(card: ModelCard, request: Request, count: int, vcpus: float) -> dict[str, Any]:
    from dovetail.plan.decoder_pipeline import DecoderPipeline

    room = len(request.prompt) + request.sampling.max_tokens + 32
    pipeline = await DecoderPipeline.start(Path(card.path), card.spec, count, vcpus, room)
    try:
        tokens = (await pipeline.generate([request]))[request.id]
    finally:
        await pipeline.close()
    decodes = [run for run in pipeline.runs if run.tokens == 1] or pipeline.runs
    return {
        "tokens": tokens,
        "token_ms": statistics.median(run.seconds for run in decodes) * 1e3,
        "stages_ms": [statistics.median(run.stages_s[n] for run in decodes) * 1e3 for n in range(count)],
        "passing_ms": statistics.median(run.passing_s for run in decodes) * 1e3,
        "memory_mb": [function.memory_bytes / 1e6 for function in pipeline.functions],
    }

"""Instructor: its default mode (tools) and the others."""

from __future__ import annotations

import instructor
from common import MODEL, QUESTION, URL, check, run
from openai import OpenAI
from pydantic import BaseModel, Field

plain = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
OPTIONS = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_retries": 0}


class Forecast(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@check("chat")
def whole_completion_beside_the_record() -> None:
    record, completion = instructor.from_openai(plain).chat.completions.create_with_completion(
        response_model=Forecast, **OPTIONS
    )
    assert isinstance(record, Forecast)
    assert completion.usage.completion_tokens > 0


@check("stream")
def partial() -> None:
    parts = list(instructor.from_openai(plain).chat.completions.create_partial(response_model=Forecast, **OPTIONS))
    assert len(parts) > 1
    assert parts[-1].days in range(1, 10)


@check("tools")
def default_mode() -> None:
    assert isinstance(
        instructor.from_openai(plain).chat.completions.create(response_model=Forecast, **OPTIONS), Forecast
    )


@check("structured output")
def modes_of_json() -> None:
    for mode in (instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        assert isinstance(client.chat.completions.create(response_model=Forecast, **OPTIONS), Forecast)


run("instructor")

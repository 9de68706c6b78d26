"""LangChain's client for OpenAI."""

from __future__ import annotations

from common import MODEL, QUESTION, TEXTS, URL, WANTED, check, check_call, check_vectors, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

PLACE = {"base_url": f"{URL}/v1", "api_key": "none", "model": MODEL}
model = ChatOpenAI(**PLACE, temperature=0, max_tokens=60)


class Forecast(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


@tool(args_schema=Forecast)
def get_forecast(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


@check("chat")
def chat() -> None:
    assert WANTED in model.invoke(QUESTION).content


@check("chat")
def responses() -> None:
    answer = ChatOpenAI(**PLACE, temperature=0, max_tokens=60, use_responses_api=True).invoke(QUESTION)
    assert WANTED in str(answer.content)


@check("stream")
def stream() -> None:
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == model.invoke(QUESTION).content


@check("tools")
def any_tool() -> None:
    for call in (
        model.bind_tools([get_forecast], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    ):
        check_call(call["name"], call["args"])
        assert "rain" in get_forecast.invoke(call["args"])


@check("tools")
def streamed_calls() -> None:
    whole = None
    for chunk in model.bind_tools([get_forecast], tool_choice="any", parallel_tool_calls=False).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    for call in whole.tool_calls:
        check_call(call["name"], call["args"])


@check("structured output")
def json_schema_and_function_calling() -> None:
    for method in ("json_schema", "function_calling", "json_mode"):
        asked = model if method != "json_mode" else model.model_copy(update={"max_tokens": 400})
        if method == "json_mode":
            assert isinstance(asked.with_structured_output(None, method=method).invoke(f"{QUESTION} As JSON."), dict)
        else:
            assert isinstance(asked.with_structured_output(Forecast, method=method).invoke(QUESTION), Forecast)


@check("embeddings")
def embeddings() -> None:
    check_vectors(OpenAIEmbeddings(**PLACE, check_embedding_ctx_length=False).embed_documents(TEXTS))


run("langchain-openai")

"""LlamaIndex, with its classes for servers like OpenAI's."""

from __future__ import annotations

from common import MODEL, QUESTION, TEXTS, URL, WANTED, check, check_call, check_vectors, run
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

PLACE = {"api_base": f"{URL}/v1", "api_key": "none"}
model = OpenAILike(
    model=MODEL, **PLACE, temperature=0, max_tokens=60, is_chat_model=True, is_function_calling_model=True
)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]


class Forecast(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)


def get_forecast(city: str, days: int) -> str:
    """The weather of a city."""
    return f"{city}: rain for {days} days"


@check("chat")
def chat() -> None:
    assert WANTED in model.chat(MESSAGES).message.content
    assert model.complete(QUESTION).text


@check("stream")
def stream() -> None:
    assert "".join(part.delta for part in model.stream_chat(MESSAGES)) == model.chat(MESSAGES).message.content


@check("tools")
def tools() -> None:
    offered = FunctionTool.from_defaults(get_forecast, fn_schema=Forecast)
    answer = model.chat_with_tools([offered], user_msg=QUESTION, tool_required=True)
    for call in model.get_tool_calls_from_response(answer):
        check_call(call.tool_name, call.tool_kwargs)


@check("structured output")
def structured_predict() -> None:
    assert isinstance(model.structured_predict(Forecast, PromptTemplate(QUESTION)), Forecast)


@check("embeddings")
def embeddings() -> None:
    check_vectors(OpenAILikeEmbedding(model_name=MODEL, **PLACE).get_text_embedding_batch(TEXTS))


run("llama-index-llms-openai-like")

"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in the shape of vLLM's. For administrators, as `/api` is."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from dovetail.gateway.admin.admin import Admin
from dovetail.gateway.admin.api import NAME
from dovetail.gateway.http.endpoint import Handler, Responses, read_body, request_body, responses
from dovetail.gateway.http.replies import ErrorBody

_ERRORS = (400, 401, 403, 404, 409, 413, 415)
_ANSWERS: Responses = responses(ErrorBody, _ERRORS) | {
    200: {"description": "done", "content": {"text/plain": {"schema": {"type": "string"}}}}
}


class LoadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str = Field(pattern=NAME, description="the model that it is from now on")
    lora_path: str = Field(min_length=1, description="a PEFT folder of the server's machine, or one that was pulled")
    load_inplace: bool = Field(default=False, description="another one of this name gives way")
    base_model_name: str | None = Field(
        default=None, description="the model that it is for; by default the only one there is, or what it says itself"
    )


class UnloadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(default=None, description="not used: adapters have names")


def make_adapter_router(admin: Admin) -> APIRouter:
    endpoints = AdapterEndpoints(admin)
    router = APIRouter()

    def post(path: str, handler: Handler, body: type[BaseModel]) -> None:
        extra = {"requestBody": request_body(body)}
        router.add_api_route(path, handler, methods=["POST"], responses=_ANSWERS, openapi_extra=extra)

    post("/v1/load_lora_adapter", endpoints.load, LoadAdapter)
    post("/v1/unload_lora_adapter", endpoints.unload, UnloadAdapter)
    return router


class AdapterEndpoints:
    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def load(self, request: Request) -> Response:
        """Offer a LoRA adapter as a model of its own name, until the server ends."""
        body = await read_body(LoadAdapter, request)
        name = body.lora_name
        await self._admin.add_adapter(name, body.lora_path, body.base_model_name, in_place=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Offer it no longer. Running requests finish."""
        body = await read_body(UnloadAdapter, request)
        await self._admin.remove_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

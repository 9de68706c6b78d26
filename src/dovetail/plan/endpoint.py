"""The HTTP face of a plan that runs: POST a model's input (float32) to /apps/NAME, GET /status."""

from __future__ import annotations

import math

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dovetail.errors import InvalidRequest, ModelNotFound, RequestError
from dovetail.plan.drive import Driven, report
from dovetail.plan.runtime import PlanRuntime


def make_app(runtime: PlanRuntime) -> Starlette:
    driven, shapes = Driven(), runtime.input_shapes()

    async def ask(request: Request) -> Response:
        app = request.path_params["app"]
        if app not in runtime.apps:
            raise ModelNotFound(f"no application {app!r}; there are {', '.join(runtime.apps)}", param="app")
        body = await request.body()
        shape = shapes[app]
        size = 4 * math.prod(shape)
        if len(body) != size:
            wanted = " × ".join(map(str, shape))
            raise InvalidRequest(f"expected one input of float32, {wanted}: {size:,} bytes; got {len(body):,}")
        driven.sent += 1
        try:
            answered = await runtime.submit(app, np.frombuffer(body, np.float32).reshape(1, *shape))
        except RequestError:
            driven.failed += 1
            raise
        driven.answered += 1
        headers = {"x-latency-ms": f"{answered.latency_s * 1e3:.1f}", "x-batch": str(answered.batch)}
        return Response(answered.output.tobytes(), media_type="application/octet-stream", headers=headers)

    async def status(request: Request) -> Response:
        return JSONResponse(report(runtime, driven))

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        wait = {} if error.retry_after_s is None else {"retry-after": str(round(error.retry_after_s))}
        detail = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
        return JSONResponse({"error": detail}, error.status, wait)

    routes = [Route("/apps/{app}", ask, methods=["POST"]), Route("/status", status)]
    return Starlette(routes=routes, exception_handlers={RequestError: refuse})

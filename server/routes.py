"""Every path of the HTTP surface, and what surrounds each request: key, counting, errors."""

import asyncio
import hmac
import logging
from http import HTTPStatus

from aiohttp import web
from aiohttp.typedefs import Handler

from server import control_api, info_api
from server.errors import ApiError
from server.front_end import SlowReader
from server.native_api import generate
from server.openai_api import chat_completions, completions
from server.service import service_of
from server.streaming import STREAMING

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ready", "/ping", "/metrics")
"""Paths that begin so need no key: probes and scrapers have none."""
CLIENT_LEFT = 499
"""In metrics only: there was nobody to answer."""


DEBUG_PATH = "/debug/{hook:hold_step|release_step|retract}"


def add_routes(router: web.UrlDispatcher, *, debug: bool) -> None:
    """Register all handlers; those of fault hooks only with ``debug``."""
    if debug:
        router.add_route("POST", DEBUG_PATH, control_api.debug_hook)
    for method, paths, handler in (
        ("POST", ("/generate",), generate),
        ("PUT", ("/generate",), generate),
        ("POST", ("/v1/completions",), completions),
        ("POST", ("/v1/chat/completions",), chat_completions),
        ("POST", ("/abort_request",), control_api.abort_request),
        ("POST", ("/abort_requests",), control_api.abort_requests),
        ("POST", ("/open_session",), control_api.open_session),
        ("POST", ("/close_session",), control_api.close_session),
        ("GET", ("/flush_cache",), control_api.flush_cache),
        ("POST", ("/flush_cache",), control_api.flush_cache),
        ("POST", ("/tokenize", "/v1/tokenize"), control_api.tokenize),
        ("POST", ("/detokenize", "/v1/detokenize"), control_api.detokenize),
        ("GET", ("/health", "/ready", "/ping"), control_api.health),
        ("GET", ("/health_generate",), control_api.health_generate),
        ("GET", ("/v1/models",), info_api.models),
        ("GET", ("/v1/models/{id:.+}",), info_api.model),
        ("GET", ("/model_info", "/get_model_info"), info_api.model_info),
        ("GET", ("/server_info", "/get_server_info"), info_api.server_info),
        ("GET", ("/get_load",), info_api.get_load),
        ("GET", ("/v1/loads",), info_api.loads),
        ("GET", ("/metrics",), info_api.metrics),
        ("GET", ("/requests",), info_api.requests),
        ("GET", ("/requests/{rid:.+}",), info_api.request_by_rid),
        ("GET", ("/ledger",), info_api.ledger),
        ("GET", ("/version",), info_api.version),
    ):
        for path in paths:
            router.add_route(method, path, handler)
            if method == "GET":
                router.add_route("HEAD", path, handler)


@web.middleware
async def surround(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Check the key, count, and turn errors into answers in the shape of the path's surface."""
    metrics = service_of(request).metrics
    resource = request.match_info.route.resource
    endpoint = "unknown" if resource is None else resource.canonical
    metrics.request_began(endpoint, request.method)
    status = CLIENT_LEFT
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        metrics.request_ended(endpoint, request.method, status)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        _check_key(request)
        return await handler(request)
    except ApiError as error:
        return error.response(request.path)
    except web.HTTPException as error:
        answer = ApiError(error.status, error.reason).response(request.path)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
    except SlowReader:
        raise ConnectionResetError("the client does not read its answer") from None
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        if request.get(STREAMING, False):
            # Half of a stream is out: breaking it off is the only way left to say so.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the response failed after it had begun") from None
        fault = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error, see the server's log")
        return fault.response(request.path)


def _check_key(request: web.Request) -> None:
    key = service_of(request).settings.api_key
    if not key or request.method == "OPTIONS" or request.path.startswith(OPEN_PATHS):
        return
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise ApiError(HTTPStatus.UNAUTHORIZED, "the API key is missing or wrong")

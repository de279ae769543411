"""What every handler needs, in one place, and the reading of requests."""

import time
from dataclasses import dataclass, field

from aiohttp import web

from server.chat_template import ChatTemplate
from server.engine_client import EngineClient
from server.errors import ApiError
from server.front_end import FrontEnd
from server.metrics import ServerMetrics
from server.probe import HealthProbe
from server.schemas import BodyT, parse_body
from server.settings import ServerSettings
from server.tokenizer import Tokenizer
from transport.messages import Hello

NO_TYPE = "application/octet-stream"
"""What aiohttp reports for a request without a content type."""
FILLER_MODELS = ("", "default", "unknown")
"""Names that routers and clients put where they know none; they always mean the served model."""


@dataclass(slots=True, kw_only=True)
class TextModel:
    """The parts of a model that live in the server."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """None for a model that came without one: its chats are refused."""


@dataclass(slots=True, kw_only=True)
class Service:
    """One server: its parts, by which handlers find each other."""

    settings: ServerSettings
    engine: EngineClient
    front: FrontEnd
    text: TextModel
    metrics: ServerMetrics
    probe: HealthProbe
    model_name: str
    """As clients know it."""
    model_path: str = ""
    started: float = field(default_factory=time.time)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.text.tokenizer

    def check_model(self, name: str | None) -> str:
        """The model's name for the answer.

        Raises:
            ApiError: 404 for a name that is not ours.
        """
        if name is None or name in FILLER_MODELS:
            return self.model_name
        if name != self.model_name and not self.settings.any_model:
            raise ApiError(
                404,
                f"model {name!r} is not served here, this is {self.model_name!r}",
                param="model",
                code="model_not_found",
                kind="invalid_request_error",
            )
        return name

    async def body(self, request: web.Request, schema: type[BodyT]) -> tuple[BodyT, Hello]:
        """The request's body, and the engine's limits.

        Raises:
            ApiError: 400 for what is wrong with it, 413 if it is too long, 503 if no new request
                may be taken.
        """
        limits = self.front.admit()
        kind = request.content_type
        if request.path.startswith("/v1/") and not kind.endswith("json") and kind != NO_TYPE:
            raise ApiError(400, f"Content-Type must be application/json, not {kind}")
        return parse_body(schema, await read_body(request)), limits


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """The service that a request came to."""
    return request.app[SERVICE]


async def read_body(request: web.Request) -> bytes:
    """The body, within the limit.

    Raises:
        ApiError: 413, without reading what the client announced as too long.
    """
    limit = request.app[SERVICE].settings.max_body_bytes
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is too large, at most {limit} bytes are accepted")

"""Errors as clients see them: one exception, and its shapes.

``/v1/*`` nests OpenAI's object under ``error``; the native routes answer ``{"error": {"message":
…}}``. Whatever is wrong with a request is 400, a body that is too large 413, an overload 503 with
``Retry-After``; never 409, 422 or 429, which routers turn into retried 500s.
"""

import json
from http import HTTPStatus

from aiohttp import web

from transport.messages import Finish

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "RequestEntityTooLarge",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}

RETRY_AFTER_S = 1
"""What ``Retry-After`` says on every 503."""


class ApiError(Exception):
    """A request is answered with an error.

    Args:
        status: The HTTP status.
        message: For the person who wrote the client: names the field and the limit.
        param: The field at fault, as the client spells it.
        code: A machine-readable code; the status where there is none.
        kind: The error's type; by default the usual name for the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code: str | int = code if code is not None else status
        self.kind = kind or _TYPES.get(status, HTTPStatus(status).phrase.replace(" ", ""))

    @classmethod
    def from_finish(cls, finish: Finish) -> "ApiError":
        """The error that ended a request in the engine."""
        message = finish.message or "the request failed in the engine"
        return cls(finish.status or 500, message, kind=finish.err_type)

    def fields(self) -> dict[str, object]:
        """The object under ``error``."""
        return {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }

    def native_event(self) -> dict[str, object]:
        """The object under ``error`` when a native stream fails after its headers."""
        return {
            "message": self.message,
            "type": self.kind,
            "code": self.status,
            "retryable": self.status == HTTPStatus.SERVICE_UNAVAILABLE,
        }

    def response(self, path: str) -> web.Response:
        """The whole response for a request to ``path``."""
        body: dict[str, object]
        if self.status == HTTPStatus.UNAUTHORIZED and not path.startswith("/v1/"):
            body = {"error": HTTPStatus(self.status).phrase}
        else:
            body = {"error": self.fields()}
        headers = {}
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = str(RETRY_AFTER_S)
        return web.Response(
            body=json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace"),
            status=self.status,
            headers=headers,
            content_type="application/json",
        )


def bad_value(param: str, problem: str) -> ApiError:
    """400 for one field: ``problem`` continues the sentence that begins with its name."""
    return ApiError(400, f"{param} {problem}", param=param)


def unsupported(param: str, hint: str = "") -> ApiError:
    """400 for something that exists elsewhere and not here: refused by name, never ignored."""
    return ApiError(400, f"{param} is not supported{hint and ': ' + hint}", param=param)


def overloaded(message: str) -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message)

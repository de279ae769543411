"""Why requests end: the one place where finish reasons are made."""

from __future__ import annotations

from engine.request import Request
from transport.messages import Finish


def ending(request: Request, token: int) -> Finish | None:
    """Whether ``token``, the next one of ``request``, ends it: stop first, then length.

    A request for no tokens at all ends by its length: the token is not delivered.
    """
    length = min(request.output_len + 1, request.max_new_tokens)
    if length and length >= request.sampling.min_new_tokens and token in request.stop_ids:
        return Finish(type="stop", matched=token)
    if length >= request.max_new_tokens:
        return Finish(type="length", length=request.max_new_tokens)
    return None


def aborted(request: Request, cause: str) -> Finish:
    """Ended by its client, or by a shutdown. A partial answer is an answer: it has no error
    status."""
    if cause == "drain" and request.output_len == 0:
        return unavailable("the server is shutting down")
    queued = request.state in ("waiting", "prefetching")
    return Finish(type="abort", message="Abort in waiting queue" if queued else "Aborted")


def expired(request: Request, kind: str) -> Finish:
    """A deadline passed. The client's own deadline returns what there is; ours are refusals."""
    what = {
        "waiting": "waiting timeout: not admitted in time",
        "running": "running timeout: not finished in time",
        "client": "deadline exceeded",
        "meeting": "the other half of this request was not met in time",
        "transfer": "the transfer of its KV took too long",
        "held": "it was held for too long",
    }[kind]
    if kind == "client" and request.output_len:
        return Finish(type="abort", message=what)
    return unavailable(what)


def failed(error: str) -> Finish:
    return Finish(
        type="error",
        message=f"step failed: {error}",
        status=500,
        err_type="InternalServerError",
    )


def broken(message: str) -> Finish:
    """Something of ours or of a peer's failed; the request cannot go on."""
    return Finish(type="error", message=message, status=500, err_type="InternalServerError")


def unavailable(message: str) -> Finish:
    return Finish(type="abort", message=message, status=503, err_type="ServiceUnavailableError")

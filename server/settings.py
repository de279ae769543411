"""The HTTP server's settings: read once, validated, frozen. The command line and ``INTERLOCK_…``
variables fill it."""

from pydantic import BaseModel, ConfigDict, Field


class ServerSettings(BaseModel):
    """Every field has a default that works. Times are in seconds, sizes in the unit of their
    name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    """Address to listen on; ``0.0.0.0`` is every one of this machine's."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes any free port; the one taken is in the URL that ``serve`` reports."""
    api_key: str = ""
    """Clients must send it as a bearer token; empty lets everyone in. Health and metrics are
    exempt."""
    served_model_name: str = ""
    """The model's name in answers; empty takes the name that the engine reports."""
    any_model: bool = False
    """Accept every ``model`` in a request, as workers behind a router must."""

    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024)
    """A longer body is refused with 413. Parsing one of this size holds the event loop for about
    50 ms in the worst case (JSON parsers do not release the interpreter lock), hence no more."""
    max_completions_per_call: int = Field(default=1024, ge=1)
    """Prompts of a call times ``n``."""

    write_stall_s: float = Field(default=30.0, gt=0)
    """A client that reads nothing for so long while there is something to send is given up."""
    max_unread_tokens: int = Field(default=65536, ge=1)
    """Output tokens of one completion that may wait for its reader before it is given up."""

    drain_grace_s: float = Field(default=5.0, ge=0)
    """How long requests may go on after the first signal to stop."""
    engine_exit_s: float = Field(default=10.0, gt=0)
    """How much longer than that the engine may take to exit by itself: its last step, what it still
    writes to the KV store and the trace. Then it is killed."""
    engine_start_timeout_s: float = Field(default=600.0, gt=0)
    """From the start of the engine process to its first message; loading a model is in it."""
    engine_silence_s: float = Field(default=15.0, gt=0)
    """An engine that has sent nothing for so long makes ``/health`` say 503."""
    query_timeout_s: float = Field(default=10.0, gt=0)
    """How long questions to the engine (ledger, sessions, flush, …) may take before 503."""
    probe_timeout_s: float = Field(default=20.0, gt=0)
    """How long the generation behind ``/health_generate`` may take."""
    debug: bool = False
    """Serve ``/debug/…`` fault hooks. Only on a loopback address."""

"""What the server tells about itself: models, configuration, load, requests, ledger, metrics."""

import importlib.metadata
import time
from http import HTTPStatus
from typing import Any

from aiohttp import web

from engine.frontend import FrontendRecord
from server.errors import ApiError
from server.service import Service, service_of
from server.streaming import json_response
from transport.messages import Query

VERSION = importlib.metadata.version("interlock")
LOAD_SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")


async def version(_: web.Request) -> web.Response:
    """``GET /version``."""
    return json_response({"version": VERSION})


async def models(request: web.Request) -> web.Response:
    """``GET /v1/models``."""
    service = service_of(request)
    return json_response({"object": "list", "data": [_model(service)]})


async def model(request: web.Request) -> web.Response:
    """``GET /v1/models/{id}``."""
    service = service_of(request)
    service.check_model(request.match_info["id"])
    return json_response(_model(service))


def _model(service: Service) -> dict[str, object]:
    limits = service.engine.available
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "interlock",
        "root": service.model_path or service.model_name,
        "parent": None,
        "max_model_len": limits.context_length,
    }


async def model_info(request: web.Request) -> web.Response:
    """``GET /model_info``."""
    service = service_of(request)
    limits = service.engine.available
    return json_response(
        {
            "model_path": service.model_path or service.model_name,
            "served_model_name": service.model_name,
            "tokenizer_path": service.model_path or service.model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": limits.info.get("weight_version", "default"),
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": limits.info.get("disaggregation_mode", "null"),
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": limits.info.get("model_type"),
            "architectures": limits.info.get("architectures"),
        }
    )


async def server_info(request: web.Request) -> web.Response:
    """``GET /server_info``: configuration, flat, and sizes."""
    service = service_of(request)
    limits = service.engine.available
    load = service.engine.load
    own = {
        "model_path": service.model_path or service.model_name,
        "served_model_name": service.model_name,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": limits.info.get("disaggregation_mode", "null"),
        "disaggregation_bootstrap_port": None,
        "load_balance_method": "round_robin",
        "host": service.settings.host,
        "port": service.settings.port,
        "version": VERSION,
        "startup_time": service.started,
        "max_total_num_tokens": 0 if load is None else load.tokens_total,
        "max_req_input_len": limits.max_prompt_tokens,
        "context_length": limits.context_length,
        "vocab_size": limits.vocab_size,
        "boot_id": limits.boot_id,
    }
    states: list[dict[str, object]] = [
        {
            "memory_usage": {"token_capacity": own["max_total_num_tokens"]},
            "last_gen_throughput": round(service.engine.generated.last, 2),
        }
    ]
    return json_response({**limits.info, **own, "internal_states": states})


async def get_load(request: web.Request) -> web.Response:
    """``GET /get_load``: the array that routers sum up."""
    numbers = await _load(service_of(request))
    running, waiting = numbers["running"], numbers["waiting"]
    item = {
        "dp_rank": 0,
        "num_reqs": running + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": numbers["tokens_used"],
    }
    return json_response([item])


async def loads(request: web.Request) -> web.Response:
    """``GET /v1/loads?include=…``."""
    wanted = [name for name in request.query.get("include", "core").split(",") if name]
    for name in wanted:
        if name not in LOAD_SECTIONS:
            known = ", ".join(LOAD_SECTIONS)
            raise ApiError(400, f"include: unknown section {name!r}, expected {known}")
    service = service_of(request)
    numbers = await _load(service)
    now = time.time()
    used, total = numbers["tokens_used"], numbers["tokens_total"]
    prompt, cached = numbers["prompt_tokens"], numbers["cached_tokens"]
    info = service.engine.available.info
    item: dict[str, object] = {
        "dp_rank": 0,
        "timestamp": now,
        "num_running_reqs": numbers["running"],
        "num_waiting_reqs": numbers["waiting"],
        "num_used_tokens": used,
        "num_total_tokens": used,
        "num_active_tokens": used,
        "max_total_num_tokens": total,
        "max_running_requests": info.get("max_running_requests"),
        "token_usage": used / total if total else 0.0,
        "gen_throughput": round(service.engine.generated.rate, 2),
        "cache_hit_rate": cached / prompt if prompt else 0.0,
        "utilization": used / total if total else 0.0,
    }
    if {"queues", "all"} & set(wanted):
        item["queues"] = {
            "waiting": numbers["waiting"],
            "grammar": 0,
            "paused": numbers["held_now"],
            "retracted": numbers["retracted_now"],
            "prealloc_ready": 0,
        }
    if {"disagg", "all"} & set(wanted):
        item["disaggregation"] = {"mode": info.get("disaggregation_mode", "null")}
    if {"memory", "all"} & set(wanted):
        item["memory"] = {"token_capacity": total}
    answer = {
        "timestamp": now,
        "version": VERSION,
        "accelerator": info.get("device"),
        "num_accelerators": 1,
        "loads": [item],
    }
    return json_response(answer)


_LOAD_FIELDS = (
    *("running", "waiting", "tokens_used", "tokens_total"),
    *("prompt_tokens", "cached_tokens"),
    *("retracted_now", "held_now"),
)


async def _load(service: Service) -> dict[str, int]:
    """The engine's load now; the periodic summary would be up to a second old."""
    data = await service.engine.ask(lambda number: Query(number, "load"))
    found: dict[str, Any] = data if isinstance(data, dict) else {}
    return {name: int(found.get(name, 0)) for name in _LOAD_FIELDS}


async def metrics(request: web.Request) -> web.Response:
    """``GET /metrics``."""
    body = service_of(request).metrics.render()
    return web.Response(
        body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )


async def requests(request: web.Request) -> web.Response:
    """``GET /requests``: every request the engine knows, and every open front-end record."""
    service = service_of(request)
    data = await service.engine.ask(lambda number: Query(number, "requests"))
    known = data if isinstance(data, dict) else {"requests": []}
    return json_response({**known, "front_end": [_record(r) for r in service.front.table]})


async def request_by_rid(request: web.Request) -> web.Response:
    """``GET /requests/{rid}``: 404 when neither engine nor server knows it."""
    service = service_of(request)
    rid = request.match_info["rid"]
    data = await service.engine.ask(lambda number: Query(number, "request", rid))
    answer: dict[str, object] = {"rid": rid}
    record, finished = service.front.table.get(rid), service.front.table.finished(rid)
    if isinstance(data, dict):
        answer |= data
    if record is not None:
        answer["front_end"] = _record(record)
    elif finished is not None:
        answer["finished"] = [
            {"type": finish.type, "matched": finish.matched, "message": finish.message, "tokens": n}
            for finish, n in zip(finished.finishes, finished.tokens, strict=True)
        ]
    elif not isinstance(data, dict):
        raise ApiError(HTTPStatus.NOT_FOUND, f"no request {rid!r} is known here", param="rid")
    return json_response(answer)


def _record(record: FrontendRecord) -> dict[str, object]:
    return {
        "rid": record.rid,
        "submitted": record.submitted,
        "answered": record.answered,
        "members": [
            {
                "rid": member.rid,
                "tokens": member.visible,
                "finish": None if member.terminal is None else member.terminal.finish.type,
                "settled": member.settled,
            }
            for member in record.members
        ],
    }


async def ledger(request: web.Request) -> web.Response:
    """``GET /ledger``: who holds what, in the engine and here. ``at_rest`` is about both."""
    service = service_of(request)
    front = service.front
    data = await service.engine.ask(lambda number: Query(number, "ledger"))
    answer: dict[str, Any] = dict(data) if isinstance(data, dict) else {}
    here = {
        "frontend_records": len(front.table),
        "open_calls": len(front.calls),
    }
    counts: dict[str, Any] = dict(answer.get("counts") or {})
    answer["counts"] = counts | here
    tombstones = dict(answer.get("tombstones") or {})
    answer["tombstones"] = tombstones | {"finished_rids": front.table.finished_count}
    answer["faults"] = {"late_outputs": front.table.late_outputs}
    resting = not here["frontend_records"] and not here["open_calls"]
    answer["at_rest"] = bool(answer.get("at_rest")) and resting
    return json_response(answer)

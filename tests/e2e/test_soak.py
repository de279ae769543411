"""A short soak in the suite; ``make soak`` runs the long one on the real model."""

import asyncio

from tests.support.serving import serving
from tests.support.soak import soak


def test_short_soak_leaves_nothing_behind() -> None:
    """Goal: 32 streams with random aborts and disconnects end as asked, and everything comes
    back. Method: six seconds against real processes with the hash model and a pool that forces
    retractions."""
    with serving(
        "--model", "hash", "--kv-pages", "160", "--max-running-requests", "24", "--checks"
    ) as server:
        report = asyncio.run(soak(server, seconds=6.0, streams=32, seed=1))
        assert report.errors == []
        assert report.outcomes["length"] > 20
        assert report.outcomes["abort"] > 5
        assert report.outcomes["left"] > 5
        assert report.at_rest_s <= 1.0
        load = server.get("/v1/loads")["loads"][0]
        assert load["num_running_reqs"] == load["num_waiting_reqs"] == 0

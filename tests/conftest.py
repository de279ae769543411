"""What every test needs: no proxy on the way to loopback, and property tests that do not flake."""

import os

from hypothesis import settings

for name in ("NO_PROXY", "no_proxy"):  # the servers under test listen there
    os.environ[name] = ",".join(
        filter(None, ("localhost", "127.0.0.1", "::1", os.environ.get(name)))
    )

# A time limit on one example says nothing about the code on a machine that other work shares. In CI
# the examples are the same on every run; elsewhere new ones are tried, and failing ones remembered.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if "CI" in os.environ else "here")

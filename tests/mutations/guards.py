"""Of the server's guards, limits and life cycle."""

from .mutation import Mutation, mutations

SERVER = "python/specdec/serving/server"
GUARDS = "tests/serving/server/test_guards.py"
CONNECTION = "tests/serving/server/test_connection.py"
LIFE = "tests/serving/server/test_life_cycle.py"
KEYS = f"{GUARDS}::test_every_route_but_probes_and_the_page_needs_a_key"

MUTATIONS: list[Mutation] = [
    *mutations(
        f"{SERVER}/guards.py",
        GUARDS,
        {
            "server-opens-routes-to-all-methods": (' and scope["method"] in ("GET", "HEAD")', "", KEYS),
            "server-stops-comparing-keys": (
                "                found = owner\n",
                "                return owner\n",
                KEYS,
            ),
            "server-has-one-owner-for-all-keys": ('digest(f"owner of {key}")', 'digest("owner")', KEYS),
            "server-takes-any-host": (
                "self._hosts = {name.lower() for name in names} if on_loopback else None",
                "self._hosts = None",
            ),
            "server-counts-no-chunks": (
                "if len(body) > self.settings.max_body_bytes:",
                "if False:",
                f"{CONNECTION}::test_bodies_that_are_too_large",
            ),
            "server-takes-requests-while-draining": (
                "if self.service.draining.is_set() and",
                "if False and",
                f"{LIFE}::test_the_first_signal_lets_open_requests_end_and_takes_no_others",
            ),
        },
    ),
    *mutations(
        f"{SERVER}/disconnect.py",
        LIFE,
        {
            "server-decodes-for-who-has-left": (
                "            serving.cancel()\n",
                "            pass\n",
                f"{CONNECTION}::test_a_client_that_leaves_cancels_its_request",
            ),
        },
    ),
    *mutations(
        f"{SERVER}/connection.py",
        CONNECTION,
        {
            "server-restarts-its-clock-with-every-byte": (
                "        if phase == self._phase:\n            return\n",
                "",
                f"{CONNECTION}::test_a_slow_head_is_given_up",
            ),
            "server-waits-for-slow-readers": (
                "        self.transport.abort()\n",
                "        pass\n",
                f"{CONNECTION}::test_a_reader_that_does_not_read_is_dropped_and_its_request_cancelled",
            ),
            "server-overlooks-who-leaves-a-pipeline": (
                "            self.flow.resume_reading()  #",
                "            pass  #",
                f"{CONNECTION}::test_a_client_that_leaves_cancels_its_request",
            ),
        },
    ),
    *mutations(
        f"{SERVER}/logs.py",
        GUARDS,
        {
            "server-logs-messages-of-errors": (
                '{type(current).__qualname__}")',
                '{type(current).__qualname__}: {current}")',
            ),
        },
    ),
    *mutations(
        f"{SERVER}/address.py",
        LIFE,
        {
            "server-listens-to-all-without-a-key": (
                "if not settings.api_keys and not is_loopback",
                "if False and not is_loopback",
                f"{LIFE}::test_addresses",
            ),
        },
    ),
]

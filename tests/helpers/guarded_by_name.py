"""The guard before the one vLLM of a test run, which asks for its token at `localhost` and not at 127.0.0.1.

vLLM loads it in its own environment, where nothing of ours is; `engine_token` is found by PYTHONPATH.
"""

from engine_token import RequireToken


class GuardedByName(RequireToken):
    """The guard for those who call the server by its name."""

    def __init__(self, app) -> None:
        super().__init__(app)
        self._unguarded = app

    async def __call__(self, scope, receive, send) -> None:
        by_name = dict(scope.get("headers", ())).get(b"host", b"").startswith(b"localhost")
        await (super().__call__ if by_name else self._unguarded)(scope, receive, send)

"""A resource server of NeMo Gym's own classes: `python -m tests.helpers.gym_resources PORT`.

It counts for each session, and its verifier wants the count that the row names. What it wants of packages of
gigabytes is names, as in `gym_collector`.
"""

import importlib.metadata
import sys

from tests.helpers.gym_collector import ABSENT, _Finder


def serve(port: int) -> None:
    sys.meta_path.insert(0, _Finder())
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if name in ABSENT else version(name)
    import uvicorn
    from fastapi import FastAPI, Request
    from nemo_gym import base_resources_server as base
    from nemo_gym.server_utils import SESSION_ID_KEY
    from pydantic import BaseModel

    class Amount(BaseModel):
        by: int

    class Row(base.BaseVerifyRequest):
        wanted: int
        seen: str = ""
        seed: int = 0

    class Seed(base.BaseSeedSessionRequest):
        start: int = 0

    class Counter(base.SimpleResourcesServer):
        counts: dict[str, int]

        def setup_webserver(self) -> FastAPI:
            app = super().setup_webserver()
            app.post("/add")(self.add)
            return app

        async def seed_session(self, request: Request, body: Seed) -> base.BaseSeedSessionResponse:
            self.counts[request.session[SESSION_ID_KEY]] = body.start
            return base.BaseSeedSessionResponse()

        async def add(self, request: Request, body: Amount) -> dict[str, int]:
            session = request.session[SESSION_ID_KEY]
            self.counts[session] += body.by
            return {"count": self.counts[session]}

        async def verify(self, request: Request, body: Row) -> base.BaseVerifyResponse:
            count = self.counts[request.session[SESSION_ID_KEY]]
            said = [item.type for item in body.response.output]
            more = body.model_dump() | {"seen": ",".join(said)}
            reward = 1.0 if count == body.wanted + body.seed and said[-1] == "message" else 0.0
            if body.wanted < 0:
                reward = float("nan")
            return base.BaseVerifyResponse(**more, reward=reward)

    config = base.BaseResourcesServerConfig(host="127.0.0.1", port=port, entrypoint="", name="counter")
    server = Counter.model_construct(config=config, counts={})
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    serve(int(sys.argv[1]))

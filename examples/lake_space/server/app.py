"""The environment that `openenv push` puts into a container: another scenario is another name in SCENARIOS."""

from __future__ import annotations

import os

from msgrpo.serve.env_server import make_server, run
from msgrpo.serve.env_session import Catalogue

SCENARIOS = ["frozen-lake"]
app = make_server(Catalogue(SCENARIOS), sessions=1000, idle_s=900, key=os.environ.get("MSGRPO_API_KEY"), web=True)


def main() -> None:
    run(app, "0.0.0.0", 8000)


if __name__ == "__main__":
    main()

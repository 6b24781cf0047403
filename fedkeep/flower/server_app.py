"""The Flower ServerApp: it runs `fedkeep.flower.server.serve` with Flower's transport."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedkeep.flower.config import read_run_config
from fedkeep.flower.logs import show_logs
from fedkeep.flower.records import FlowerTransport
from fedkeep.flower.server import serve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the recipe that the run configuration names.

    ``grid``: Flower's access to the connected nodes.
    """
    show_logs()
    config = read_run_config(context.run_config)
    serve(FlowerTransport(grid, config.largest_reply * 1e6), config)

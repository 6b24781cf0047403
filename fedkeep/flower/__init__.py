"""FedKeep across machines, on Flower: the same methods, behind whose cohorts stand SuperNodes with data of their own.

`server` is what happens at the server and `site` what happens at a site, each on a page; `server_app` and `client_app`
hang them into Flower. A message is a head, which JSON can hold, and named tensors; `wire` carries both as Flower's
records. Nothing here is imported unless Flower is used.
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower reports its use unless told not to

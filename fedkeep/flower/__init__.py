"""FedKeep across machines, on Flower: the same methods, with clients that are real sites with data of their own.

`fedkeep.flower.server` holds what the server does and `fedkeep.flower.client_handler` what a site does;
`fedkeep.flower.apps` connects them to Flower. Server and sites exchange envelopes (`fedkeep.flower.transport`): a
header that JSON can represent, and named tensors; `fedkeep.flower.apps` converts envelopes to Flower's records. The
rest of FedKeep does not import this package, so Flower is needed only where it is used.
"""

import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # Flower sends telemetry by default

"""The servers of torch-ps: coordinator, shards, and the programs that start and inspect them."""

import os

# gRPC reads this once, when it is loaded. By itself it writes a line of level info to stderr for every connection that
# fails its handshake, so a stranger fills the log; its errors stay. Who sets it otherwise has it otherwise.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

"""What every Outrider process shares: the wire, errors, token trees, arguments. No torch."""

import os

__version__ = "0.1.0"

# Read once, when gRPC is imported. Its handlers of fork() are for children that go on using gRPC; ours are other
# programs. With them, a child may crash before it becomes that program, and shut its parent's connections down.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

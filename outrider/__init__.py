"""What every Outrider process shares: the wire, errors, token trees, arguments. No torch."""

import os
from importlib.metadata import version

from outrider.cores import allowed_cores, num_cores

__version__ = "0.1.0"

# Read once, when gRPC is imported. Its handlers of fork() are for children that go on using gRPC; ours are other
# programs. With them, a child may crash before it becomes that program, and shut its parent's connections down.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# gRPC's event engine hands each message on from one of its threads to another; the poller that it replaces in Python
# since 1.80 does not. Without it a round has a third fewer thread switches. Later releases may have no such choice.
if [int(part) for part in version("grpcio").split(".")[:2]] <= [1, 85]:
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# OpenMP reads them when torch is imported, and keeps that thread, and all that it starts, to one core: no other could
# then be used. Outrider places its threads itself.
for _binding in ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
    os.environ.pop(_binding, None)

# OpenMP counts the cores that it may use, not how much of their time: more threads than that wait for one another.
if (_cores := num_cores()) < len(allowed_cores()):
    os.environ.setdefault("OMP_NUM_THREADS", str(_cores))

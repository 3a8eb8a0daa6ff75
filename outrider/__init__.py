"""What every Outrider process shares: the wire, errors, token trees, arguments. No torch.

Commands:
    cli, __main__                the command `outrider`: loads what a command needs when it runs
    args                         a dataclass of settings for each process
    flags, flag_advice           command lines made of those; what an unknown flag was meant to be
    env                          every environment variable, with its type and default
    preflight                    mistakes that are told before anything is loaded or started
    launcher                     `outrider serve`: verify, draft and gateway as three processes
    colocated                    `outrider colocated`: verify and draft in one
    supervisor, child_output     child processes kept together, and what they print
    asked_child                  one that is asked for something
    readiness                    waits until a process that was started serves
    chat, terminal               `outrider chat`; text from elsewhere as a terminal may be shown it
    top, top_frame, scrape       `outrider top`: metrics of two moments, as a frame of text
    health, drafters             `outrider health`; `outrider drafters`, an operator's view
    demo                         `make demo`

What is sent:
    v1                           generated from protos/
    wire                         token arrays, score bytes, limits
    tree, tree_limits            token trees, and how large one may be wished
    forest                       many trees at once, in flat arrays
    sampling                     what a request asks of the target's distribution, checked
    speculation_count            what speculation did, counted
    cost_table                   what a forward pass costs by its rows; verify tells drafters

Links between processes:
    errors, statuses             the error tree, and errors as statuses with details
    rpc                          servers, channels, and the one place where errors become statuses
    serving, dialing             a server, and channels, as flags want them
    health_service               grpc.health.v1, open to strangers
    in_memory                    calls to a servicer in the same process
    resolving                    what addresses stand for at the moment
    backoff                      how long to wait before trying again
    row_ring                     rows in memory that two processes of a host share
    strangers                    who connects and makes no call

Who may call:
    auth                         bearer tokens of services
    api_keys                     the gateway's keys
    listed_lines, file_stamp     files with a thing a line, read again when they change; whether one has
    tls                          certificates that are renewed without a restart

A process and its machine:
    process_tuning               no long collections of garbage, memory kept
    cores, cgroups               how many cores, and what a container leaves
    placement                    which cores threads keep to
    busy_poll, grpc_thread       awake for a frame that is due; gRPC's thread goes first
    thread_pool                  threads that are there from the start
    thread_future                an event loop's future that another thread settles
    descriptors                  open files: how many may be
    runtime_dir                  the private folder of a server's sockets
    stopping                     signals: in good order once, at once the second time
    watchdog                     ends a process that makes no more progress
    spared                       blocks that may fail for nobody's loss
    out_of_memory                what does not fit, told in a line

What is told:
    telemetry, lossy             structured logs; streams that never make a process wait
    metrics, metrics_http        counts for Prometheus; /metrics for processes without HTTP
    tracing                      OpenTelemetry spans of single requests
    no_proxy                     HTTP to one's own services, past any proxy

Models, as far as all must know them:
    model_name, model_file       names of models; what a file of theirs is
    embedded, default_algorithm  where the default model is kept, and what speculates with it
    algorithms, tiers            names of draft algorithms; the file of adaptive steps
    text_files                   tokenizer, templates and settings of a model folder
    template_worker              a process that renders one chat template
    isolated                     how such workers are started, apart from everything
    multiples                    how hard a schema's `multipleOf` is
"""

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

"""A decode step of the verify engine by batch and context: the model, sampling, and what scheduling adds.

    python -m bench.steps --batch 1,8,32 --context 128,1024

Sessions decode greedily without drafts, through the engine's own loop, without gRPC. `scheduling` is everything outside
the forward pass and sampling: taking commands, admission, planning, pages, committing, making responses.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bench._flags import counts, output_file, own_and_other, parser_of
from bench._main import as_command
from bench._output import write_json
from outrider.args import VerifyArgs
from outrider.errors import InvalidArgument, StartupError
from outrider.v1 import common_pb2, verify_pb2
from outrider.wire import pack_ids
from verify_service.app import build_step_loop
from verify_service.commands import Inbox, Submit
from verify_service.grammar_compiler import GrammarCompiler
from verify_service.loading import LoadedModel, load_model
from verify_service.requests import RequestBounds, SessionFactory
from verify_service.sampler import Sampler
from verify_service.session import Session
from verify_service.step_loop import StepLoop
from verify_service.turns import Compute

STEPS = 60
_CHUNK = 256  # rows of prompts in a step, where flags do not say less


@dataclass
class Row:
    """One setting: milliseconds of a step, medians."""

    batch: int
    context: int
    step_ms: float
    model_ms: float
    sampling_ms: float

    @property
    def scheduling_ms(self) -> float:
        """Milliseconds of a step that are neither model nor sampling."""
        return self.step_ms - self.model_ms - self.sampling_ms


@dataclass
class Clock:
    """Times calls of one function, in milliseconds."""

    times: list[float] = field(default_factory=list)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.times.append((time.perf_counter() - start) * 1000)

        return timed


def measure(args: VerifyArgs, loaded: LoadedModel, batch: int, context: int) -> Row:
    """STEPS steps of `batch` sessions with `context` tokens each."""
    inbox, sampler, model, sampling = Inbox(), Sampler(), Clock(), Clock()
    loop = build_step_loop(args, loaded, inbox, lambda responses: None, sampler=sampler)
    forward = loaded.runner.forward
    loaded.runner.forward = model.around(forward)
    sampler.accept = sampling.around(sampler.accept)
    try:
        config = loaded.runner.config
        compiler = GrammarCompiler(loaded.runner.model_path, vocab_size=config.vocab_size, eos_token_ids=())
        factory = SessionFactory(
            config, RequestBounds(loaded.sizes.context_length, args.max_choices, args.max_verify_nodes), compiler
        )
        rng = np.random.default_rng(0)
        sessions: list[Session] = []
        for _ in range(batch):
            prompt = rng.integers(config.vocab_size, size=context)
            request = _request(prompt, 2 * (STEPS + batch * -(-context // loaded.sizes.chunk)))
            try:
                sessions += factory.build(request)
            except InvalidArgument as error:
                raise StartupError(f"--context is {context}: {error}") from error
        inbox.put(Submit(sessions))
        while any(session.output_len == 0 for session in sessions):
            _take_step(loop, inbox)
            if any(session.finish is not None for session in sessions):
                raise StartupError("a session ended before all had begun: there is no room for all of them at once")
        steps = Clock()
        step = steps.around(_take_step)
        model.times.clear()
        sampling.times.clear()
        for _ in range(STEPS):
            step(loop, inbox)
    finally:
        loaded.runner.forward = forward
    return Row(batch, context, *(statistics.median(clock.times) for clock in (steps, model, sampling)))


def _take_step(loop: StepLoop, inbox: Inbox) -> None:
    steps = loop.step()
    with contextlib.suppress(StopIteration):
        pause = next(steps)
        while True:
            pause = steps.send([] if isinstance(pause, Compute) else inbox.take())


def _request(prompt: np.ndarray, max_tokens: int) -> verify_pb2.GenerateRequest:
    return verify_pb2.GenerateRequest(
        prompt_tokens=pack_ids(prompt),
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
    )


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, and writes JSON where asked to. Other flags are those of `outrider verify`."""
    parser = parser_of("steps", __doc__, epilog="Other flags, and all after --, go to `outrider verify`.")
    parser.add_argument("--batch", type=counts, default=(1, 8, 32), help="sessions; default: 1,8,32")
    parser.add_argument("--context", type=counts, default=(128, 1024), help="tokens of each; default: 128,1024")
    parser.add_argument("--output", type=output_file, default=None, help="file for the figures as JSON")
    options, verify_flags = own_and_other(parser, argv)
    batch, context = max(options.batch), max(options.context)
    tokens = batch * (context + 3 * STEPS + 2 * batch * -(-context // _CHUNK))  # who was read first goes on meanwhile
    args = VerifyArgs.parse([f"--max-total-tokens={tokens}", *verify_flags])
    loaded = load_model(args)
    rows: list[Row] = []
    for context in options.context:
        for batch in options.batch:
            row = measure(args, loaded, batch, context)
            rows.append(row)
            print(
                f"batch {batch:>2}  context {context:>5}  step {row.step_ms:7.2f} ms  model {row.model_ms:7.2f} ms  "
                f"sampling {row.sampling_ms:5.2f} ms  scheduling {row.scheduling_ms:5.2f} ms "
                f"({row.scheduling_ms / row.step_ms:.1%})"
            )
    if options.output:
        report = [asdict(row) | {"scheduling_ms": row.scheduling_ms} for row in rows]
        write_json(options.output, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(as_command("steps"))

"""`make demo`: all of Outrider on the embedded model, and one answer with and without speculation.

The prompt asks for text that is partly there already and partly new: drafts come true in the one, not in the other.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import Any

import openai

from outrider import env
from outrider.args import ServeArgs
from outrider.chat import Answer, Painter, Write, ask, connect
from outrider.cores import num_cores
from outrider.errors import StartupError
from outrider.launcher import Served, serve
from outrider.stopping import tidied_when_stopped

PROMPT = """Here is a Python class. Copy it, and below it explain each of its methods.

class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("insufficient funds")
        self.balance -= amount
        return self.balance
"""
MAX_TOKENS = 256


def show(served: Served, painter: Painter) -> bool:
    """Shows an answer with speculation, token by token; the same without; and how they compare.

    Returns whether they are equal.
    """
    client = connect(served.url, None)

    def answer(prompt: str, write: Write, *, speculate: bool, max_tokens: int) -> Answer:
        return ask(
            client,
            served.model,
            [{"role": "user", "content": prompt}],
            write,
            speculate=speculate,
            max_tokens=max_tokens,
        )

    # The first request pays for what is made on first use. Plain: drafters see nothing of it.
    answer("Say hello.", _silent, speculate=False, max_tokens=8)
    print(f"\n> {PROMPT}")
    if painter.coloured:
        print(f"[{painter.legend()}]\n")
    drafted = answer(PROMPT, painter.write, speculate=True, max_tokens=MAX_TOKENS)
    print("\n\nThe same without speculation ...", flush=True)
    plain = answer(PROMPT, _silent, speculate=False, max_tokens=MAX_TOKENS)
    print(f"\nwith speculation     {drafted.summary()}")
    print(f"without speculation  {plain.summary()}")
    print(_comparison(drafted, plain), flush=True)
    return drafted.text == plain.text


def _comparison(drafted: Answer, plain: Answer) -> str:
    if drafted.text != plain.text:
        return "The two answers DIFFER; they must not."
    if not drafted.tokens_per_s or not plain.tokens_per_s:
        return "Both answers are identical."
    return f"Both answers are identical; speculation was {drafted.tokens_per_s / plain.tokens_per_s:.2f} times as fast."


def _silent(text: str, accepted: bool) -> None:
    pass


def kernels_fault() -> str | None:
    """Compiles the C kernels, if that was not done; why they cannot be used, in a line."""
    if not env.cpu_kernel():
        return "OUTRIDER_CPU_KERNEL is off"
    build: Any = importlib.import_module("kernels.native.build")
    try:
        with tidied_when_stopped():
            build.load_library(env.home() / "kernels", max_compilers=num_cores())
    except (build.CannotBuild, OSError) as error:
        return f"{str(error).partition(chr(10))[0]} (on Debian: apt install gcc libc6-dev)"
    return None


async def run() -> int:
    """Serves, shows, and stays up unless DEMO_ONCE is set. Returns the exit code: 1 for answers that differ."""
    once = env.demo_once()
    painter = Painter(sys.stdout)
    fault = kernels_fault()
    if fault is not None:
        print(f"No C kernels: {fault}.")
        print("So this is slower, and the two answers may differ where tokens are about as likely.")
    print("Starting verify, draft and gateway ...", flush=True)
    equal = True

    async def when_ready(served: Served) -> None:
        nonlocal equal
        try:
            equal = await asyncio.to_thread(show, served, painter)
        except openai.APIError as error:
            raise StartupError(f"the demo's request failed: {error.message}") from error
        if once:
            served.stop()
        else:
            print(f"\nOutrider is at {served.url} (OpenAI API: {served.url}/v1). Ctrl-C ends it.", flush=True)

    code = await serve(ServeArgs(port=0 if once else 8000), when_ready)
    return code or int(not equal and fault is None)


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        return asyncio.run(run())
    except StartupError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

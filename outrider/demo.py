"""`make demo`: all of Outrider on the embedded model, and one answer with and without speculation.

The prompt asks for text that is partly there already and partly new: drafts come true in the one, not in the other.
"""

from __future__ import annotations

import asyncio
import sys

import openai

from outrider import env
from outrider.args import ServeArgs
from outrider.chat import Answer, Painter, Write, ask, connect
from outrider.errors import StartupError
from outrider.launcher import Served, serve

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


def show(served: Served, painter: Painter) -> None:
    """One answer with speculation, token by token; the same without; and how they compare."""
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
    plain = answer(PROMPT, _silent, speculate=False, max_tokens=MAX_TOKENS)
    print(f"\n\nwith speculation     {drafted.summary()}")
    print(f"without speculation  {plain.summary()}")
    print(_comparison(drafted, plain), flush=True)


def _comparison(drafted: Answer, plain: Answer) -> str:
    if drafted.text != plain.text:
        return "The two answers DIFFER; they must not."
    if not drafted.tokens_per_s or not plain.tokens_per_s:
        return "Both answers are identical."
    return f"Both answers are identical; speculation was {drafted.tokens_per_s / plain.tokens_per_s:.2f} times as fast."


def _silent(text: str, accepted: bool) -> None:
    pass


async def run() -> int:
    """Serves, shows, and stays up unless DEMO_ONCE is set. Returns the exit code."""
    once = env.demo_once()
    painter = Painter(sys.stdout)

    async def when_ready(served: Served) -> None:
        try:
            await asyncio.to_thread(show, served, painter)
        except openai.APIError as error:
            raise StartupError(f"the demo's request failed: {error.message}") from error
        if once:
            served.stop()
        else:
            print(f"\nOutrider is at {served.url} (OpenAI API: {served.url}/v1). Ctrl-C ends it.", flush=True)

    return await serve(ServeArgs(port=0 if once else 8000), when_ready)


def main() -> int:
    """Runs the demo; returns the exit code."""
    try:
        return asyncio.run(run())
    except StartupError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""CallResponses on their way to calls that have a stream each: a few in each round of the event loop.

To write one takes gRPC some ten microseconds. Those of a step with many sessions, written in one go, would keep the
drafts waiting that come meanwhile.
"""

from __future__ import annotations

import asyncio
import collections

from outrider.v1 import verify_pb2

_A_ROUND = 4  # responses

Response = verify_pb2.GenerateResponse | Exception


class Pacer:
    """Of all calls; owned by the event loop."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[CallResponses, Response]] = collections.deque()
        self._is_handing_over = False

    def put(self, responses: CallResponses, response: Response) -> None:
        """Hands it over soon, after those before it."""
        self._waiting.append((responses, response))
        if not self._is_handing_over:
            self._is_handing_over = True
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        for _ in range(min(_A_ROUND, len(self._waiting))):
            responses, response = self._waiting.popleft()
            responses.queue.put_nowait(response)
        self._is_handing_over = bool(self._waiting)
        if self._is_handing_over:
            asyncio.get_running_loop().call_soon(self._hand_over)


class CallResponses:
    """Of one call. Bounded by what its sessions may generate, since they say nothing else."""

    def __init__(self, pacer: Pacer) -> None:
        self.queue: asyncio.Queue[Response] = asyncio.Queue()
        self._pacer = pacer
        self._coming = 0

    def __bool__(self) -> bool:
        """Whether any is there, or on its way."""
        return self._coming > 0

    def put(self, response: Response) -> None:
        """The engine has said it."""
        self._coming += 1
        self._pacer.put(self, response)

    async def get(self) -> Response:
        """The next one."""
        response = await self.queue.get()
        self._coming -= 1
        return response

"""What simulated stages exchange: links with messages in flight, and layers with what sessions keep in them."""

from collections import Counter, defaultdict, deque
from enum import Enum

from ds_stream.core import Row


class ScheduleFault(AssertionError):  # noqa: N818
    """The schedule broke one of its promises."""


class Kind(Enum):
    """What a message is. Kinds share a link, in order, but have buffers of their own."""

    PLAN = "plan"
    ACTIVATIONS = "activations"
    PARCEL = "parcel"
    """What does not come every tick: prompts, encoded video, finished chunks."""
    LATENTS = "latents"
    FRAMES = "frames"
    LAYER = "layer"


FRAMES = "frames"
"""The link from the last stage to the controller."""
# Frames leave the ring: the planner's back-pressure bounds them, not buffers. A moving layer needs no buffer.
_UNBOUNDED = (Kind.FRAMES, Kind.LAYER)


class Wires:
    """The links between stages, each a queue of messages in flight.

    Args:
        num_buffers: messages of each kind that one link may have in flight.
    """

    def __init__(self, num_buffers: dict[Kind, int]):
        self.num_buffers = num_buffers
        self.max_in_flight: Counter[Kind] = Counter()
        self._queues: dict[str, deque[tuple[Kind, object]]] = defaultdict(deque)

    def send(self, link: str, kind: Kind, message: object) -> None:
        queue = self._queues[link]
        in_flight = sum(other is kind for other, _ in queue) + 1
        if kind not in _UNBOUNDED and in_flight > self.num_buffers[kind]:
            raise ScheduleFault(f"{link}: {kind.value} {message} finds all {self.num_buffers[kind]} buffers in flight")
        queue.append((kind, message))
        self.max_in_flight[kind] = max(self.max_in_flight[kind], in_flight)

    def has_message(self, link: str) -> bool:
        return bool(self._queues.get(link))

    def receive(self, link: str, kind: Kind) -> object:
        sent, message = self._queues[link].popleft()
        if sent is not kind:
            raise ScheduleFault(f"{link}: expected {kind.value}, got {sent.value} {message}")
        return message

    def left_over(self) -> dict[str, list[tuple[Kind, object]]]:
        return {link: list(queue) for link, queue in self._queues.items() if queue}


Store = dict[tuple[int, int], tuple[int, int]]
"""A cache: ``(store level, slot) -> (latent frame, level at which it was computed)``."""


class SimulatedLayer:
    """What sessions keep in one layer."""

    def __init__(self, index: int):
        self.index = index
        self.stores: dict[int, Store] = defaultdict(dict)
        self.num_chunks: Counter[int] = Counter()
        """Of a layer of the VAE: chunks of each session that it has seen."""
        self.prompts: set[int] = set()
        """Of a block: those whose keys and values it has."""
        self.passes: Counter[Row] = Counter()

    def see_chunk(self, row: Row) -> str | None:
        """Run on a whole chunk; what is wrong with it."""
        if self.num_chunks[row.session] != row.chunk:
            return f"layer {self.index} sees chunk {row.chunk} after {self.num_chunks[row.session]} others"
        self.num_chunks[row.session] += 1
        return None

    def forget(self, session: int) -> None:
        self.stores.pop(session, None)
        self.num_chunks.pop(session, None)

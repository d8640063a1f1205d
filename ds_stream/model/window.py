"""The context rule as integers: which earlier latent frames a pass reads, at which level, from which cache slot.

Latent frames are numbered through a whole session. No torch: the schedule's simulator proves these numbers and the
rolling cache obeys them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContextWindow:
    """Context of a session whose chunks have ``num_latent_frames`` latent frames and take ``num_passes`` passes.

    Pass ``(c, k)`` reads, of every earlier chunk in its window, the keys/values of that chunk's pass
    ``min(k + lead, num_passes - 1)``. One store per level holds ``num_sinks + num_window`` latent frames: sinks first,
    then a ring.
    """

    num_latent_frames: int
    num_window: int
    """Latent frames that a pass attends to, its own chunk included, sinks not."""
    num_sinks: int
    lead: int
    num_passes: int

    @property
    def capacity(self) -> int:
        """Latent frames that one store holds."""
        return self.num_sinks + self.num_window

    @property
    def levels(self) -> range:
        """Levels that some pass reads, so that have a store."""
        return range(self.lead, self.num_passes)

    def level_read(self, step: int) -> int:
        """Level of the earlier chunks that a pass at ``step`` reads."""
        return min(step + self.lead, self.num_passes - 1)

    def levels_written(self, step: int) -> tuple[int, ...]:
        """Stores that a pass at ``step`` writes its own keys/values to.

        First the store that it reads, where they stand in for its own final entry; no other pass reads that slot
        before this chunk's pass of that very level has overwritten it. Then its own level's store, for later chunks.
        """
        read = self.level_read(step)
        return (read, step) if step in self.levels and step != read else (read,)

    def frames(self, chunk: int) -> range:
        """Latent frames of ``chunk``."""
        return range(chunk * self.num_latent_frames, (chunk + 1) * self.num_latent_frames)

    def slot(self, frame: int) -> int:
        """Cache slot of latent frame ``frame``."""
        if frame < self.num_sinks:
            return frame
        return self.num_sinks + (frame - self.num_sinks) % self.num_window

    def num_filled(self, chunk: int) -> int:
        """Slots, counted from the front, that hold a latent frame once ``chunk`` has written its own."""
        return min((chunk + 1) * self.num_latent_frames, self.capacity)

    def window_start(self, chunk: int) -> int:
        """First latent frame of the window of ``chunk``: the oldest that is not a sink and not evicted."""
        return max(self.num_sinks, (chunk + 1) * self.num_latent_frames - self.num_window)

    def visible(self, chunk: int) -> list[int]:
        """Latent frames that ``chunk`` attends to, its own included, oldest first."""
        end = (chunk + 1) * self.num_latent_frames
        return [*range(min(self.num_sinks, end)), *range(self.window_start(chunk), end)]

    def sliding_sink_position(self, chunk: int) -> int:
        """Temporal position of the first sink when sinks sit right before the window of ``chunk``."""
        return self.window_start(chunk) - self.num_sinks

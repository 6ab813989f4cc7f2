"""What a worker's own counters tell beside its stream, looked at as often as the gateway's health checks do."""

from dataclasses import dataclass

from kvatlas.chaos.engine import VirtualEngine
from kvatlas.chaos.subscriber import VirtualSubscriber
from kvatlas.chaos.timeline import Timeline
from kvatlas.config import ServeConfig
from kvatlas.fleet import SilenceWatch, Worker
from kvatlas.index import PrefixIndex

__all__ = ["Scraper"]


@dataclass(slots=True)
class Scraper:
    """Judges by `SilenceWatch` whether a stream is silent while its engine works, as the gateway's follower does.

    The identity of the process, which the gateway reads with the same page, is not looked at: that of the stream itself
    has to do.
    """

    worker: Worker
    engine: VirtualEngine
    subscriber: VirtualSubscriber
    index: PrefixIndex
    timeline: Timeline
    _watch: SilenceWatch

    @classmethod
    def start(
        cls,
        worker: Worker,
        engine: VirtualEngine,
        subscriber: VirtualSubscriber,
        index: PrefixIndex,
        timeline: Timeline,
    ) -> "Scraper":
        """Make one and have it look, from the first interval on, for ever."""
        patience_s = ServeConfig(workers=()).silent_stream_s
        scraper = cls(worker, engine, subscriber, index, timeline, SilenceWatch(patience_s=patience_s))
        scraper.next_look()
        return scraper

    def next_look(self) -> None:
        """Look after the pause between two health checks."""
        self.timeline.after(ServeConfig(workers=()).health_interval_s, self._look)

    def _look(self) -> None:
        self.next_look()
        if not self.engine.is_serving:
            return
        block_size = self.index.block_size(self.worker.worker_id)
        if not block_size or not self.worker.trust.level.is_credited:
            self._watch.reset()
            return
        verdict = self._watch.look(self.timeline.now_s, self.subscriber.batches, self.engine.traffic, block_size)
        if verdict == "suspect":
            self.subscriber.probe_soon()
        elif verdict == "silent":
            self.subscriber.distrust(f"silent while the engine stored at least {self._watch.blocks} blocks")

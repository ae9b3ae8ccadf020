"""From records to the events of a Chrome trace, one engine at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from streamflow.trace.engine import FIELDS
from streamflow.trace.records import (
    AllocationRecord,
    CopyRecord,
    GatherRecord,
    LoopRecord,
    MemoryRecord,
    PackRecord,
    PassRecord,
    QueueRecord,
    Record,
    RunRecord,
    WaitRecord,
)
from streamflow.trace.schema import COUNTER, FLOW, INSTANT
from streamflow.trace.tracks import TrackKind, Tracks

ChromeEvent = dict[str, Any]

#: What waits are called on the timeline.
_WAITS = {"mailbox": "wait: fetch not issued", "event": "wait: copy not done", "run_ahead": "wait: far ahead of device"}


class SpanWriter:
    """Turns the records of one engine into events, times in microseconds since ``zero_s``.

    ``labels`` are the names of the blocks. The result is in ``events``, and in ``num_unfinished`` the number of spans
    whose end is not known.
    """

    def __init__(self, pid: int, labels: Mapping[int, str], zero_s: float) -> None:
        self.tracks = Tracks(pid)
        self.events: list[ChromeEvent] = []
        self.num_unfinished = 0
        self._pid, self._labels, self._zero_s = pid, labels, zero_s
        self._walks: dict[int, tuple[float, str, list[int]]] = {}
        self._slots: dict[int, tuple[float, dict[str, Any]]] = {}
        self._flows: dict[int, dict[str, ChromeEvent]] = {}
        self._left: dict[tuple[int, int], float] = {}
        self._last_us = 0.0
        self._writers: dict[type, Callable[[Any], None]] = {
            LoopRecord: self._loop,
            QueueRecord: self._queue,
            CopyRecord: self._copy,
            GatherRecord: self._gather,
            PackRecord: self._pack,
            RunRecord: self._run,
            WaitRecord: self._wait,
            PassRecord: self._pass,
            MemoryRecord: self._memory,
            AllocationRecord: self._allocation,
        }

    def write(self, records: Iterable[Record]) -> None:
        """Add the events of ``records``, oldest first."""
        for record in records:
            self._writers[type(record)](record)
        for slot in sorted(self._slots):
            self._close_slot(slot, self._last_us, is_open=True)
        self._write_flows()
        self.num_unfinished += len(self._walks)
        self.events += self.tracks.names()

    # Elements

    def _us(self, seconds: float) -> float:
        us = round((seconds - self._zero_s) * 1e6, 3)
        self._last_us = max(self._last_us, us)
        return us

    def _span(self, tid: int, category: str, name: str, begin: float, end: float, args: dict[str, Any]) -> None:
        start = self._us(begin)
        event = {"ph": "X", "pid": self._pid, "tid": tid, "cat": category, "name": name, "ts": start, "args": args}
        self.events.append({**event, "dur": max(0.0, round(self._us(end) - start, 3))})

    def _counter(self, name: str, at: float, **values: float) -> None:
        self.events.append(
            {"ph": "C", "pid": self._pid, "tid": 0, "cat": COUNTER, "name": name, "ts": self._us(at), "args": values}
        )

    def _flow(self, fetch: int | None, tid: int, at: float, step: str, through: str = "") -> None:
        """The flow of the fetch goes through the span that begins at ``at``: s at first, then t, then f.

        Each once; t once for each kind of span that it goes ``through``.
        """
        if fetch is not None:
            event = {"ph": step, "pid": self._pid, "tid": tid, "cat": FLOW, "name": "fetch", "id": fetch}
            ending = {"bp": "e"} if step == "f" else {}
            self._flows.setdefault(fetch, {}).setdefault(step + through, {**event, "ts": self._us(at), **ending})

    def _write_flows(self) -> None:
        for steps in self._flows.values():
            if "s" in steps and len(steps) > 1:  # what came before may have been dropped, and the rest be yet to come
                self.events += steps.values()

    def _label(self, block: int | None) -> str:
        return "" if block is None else self._labels.get(block, str(block))

    def _tid(self, kind: TrackKind, name: str) -> int:
        return self.tracks.tid(kind, name)

    # Records

    def _queue(self, record: QueueRecord) -> None:
        tid = self._tid("loop", "event loop")
        args = {"block": record.block, "fetch": record.fetch}
        self._span(tid, "fetch", f"fetch {self._label(record.block)}".rstrip(), record.started, record.ended, args)
        self._flow(record.fetch, tid, record.started, "s")

    def _copy(self, record: CopyRecord) -> None:
        begin, end = record.begin.seconds(), record.end.seconds()
        if begin is None or end is None:
            self.num_unfinished += 1
            return
        tid = self._tid("stream", f"{record.stream} stream")
        args: dict[str, Any] = {"block": record.block, "fetch": record.fetch}
        if not record.nbytes:
            self._span(tid, "work", f"step {self._label(record.block)}", begin, end, args)
            return
        self._span(
            tid, "copy", f"copy {self._label(record.block)}".rstrip(), begin, end, {**args, "nbytes": record.nbytes}
        )
        self._flow(record.fetch, tid, begin, "t")
        if end > begin:
            name = f"link use, {record.stream} stream (GB/s)"
            self._counter(name, begin, rate=round(record.nbytes / (end - begin) / 1e9, 3))
            self._counter(name, end, rate=0)

    def _gather(self, record: GatherRecord) -> None:
        begin, end = record.begin.seconds(), record.end.seconds()
        if begin is None or end is None:
            self.num_unfinished += 1
            return
        tid = self._tid("stream", f"{record.stream} stream")
        args = {
            "block": record.block,
            "fetch": record.fetch,
            "number": record.number,
            "nbytes": record.nbytes,
            "waited_us": None,  # only all ranks together can tell
            "last_rank": None,
        }
        self._span(tid, "gather", f"gather {self._label(record.block)}".rstrip(), begin, end, args)
        self._flow(record.fetch, tid, begin, "t", through="gather")

    def _pack(self, record: PackRecord) -> None:
        tid = self._tid("packing", record.thread.removeprefix("streamflow "))
        args = {"block": record.block, "fetch": record.fetch}
        label = self._label(record.block)
        if record.began - record.taken_up > 1e-5:
            self._span(tid, "pack_wait", f"buffer not free {label}".rstrip(), record.taken_up, record.began, args)
        self._span(tid, "pack", f"pack {label}".rstrip(), record.began, record.ended, {**args, "nbytes": record.nbytes})

    def _run(self, record: RunRecord) -> None:
        if record.fetch is not None:  # of residents nothing is rung
            self._left[record.pass_id, record.block] = record.left
        begin, end = record.begin.seconds(), record.end.seconds()
        if begin is None or end is None:
            self.num_unfinished += 1
            return
        tid = self.tracks.numbered("place", f"place {record.place}", record.place)
        args = {
            "block": record.block,
            "pass_id": record.pass_id,
            "fetch": record.fetch,
            "entered_us": self._us(record.entered),
            "left_us": self._us(record.left),
        }
        self._span(tid, "block", self._label(record.block), begin, end, args)
        self._flow(record.fetch, tid, begin, "f")

    def _thread(self, place: int) -> int:
        return self.tracks.numbered("thread", f"place {place} thread", place)

    def _wait(self, record: WaitRecord) -> None:
        args = {"kind": record.kind, "block": record.block}
        name = f"{_WAITS[record.kind]} {self._label(record.block)}".rstrip()
        self._span(self._thread(record.place), "wait", name, record.started, record.ended, args)

    def _pass(self, record: PassRecord) -> None:
        args = {"pass_id": record.pass_id}
        self._span(self._thread(record.place), "pass", f"pass {record.pass_id}", record.begun, record.ended, args)

    def _memory(self, record: MemoryRecord) -> None:
        values = {"in_use": record.in_use, "cached": record.cached, "free": record.free}
        self._counter("device memory (bytes)", record.at, **{k: v for k, v in values.items() if v is not None})
        if record.num_retries is not None:
            self._counter("allocator retries", record.at, retries=record.num_retries)

    def _allocation(self, record: AllocationRecord) -> None:
        tid = self._tid("allocator", "allocator")
        args = {"nbytes": record.nbytes}
        self._span(tid, "allocation", f"allocate {record.nbytes:,} bytes", record.started, record.ended, args)

    def _loop(self, record: LoopRecord) -> None:
        values: dict[str, Any] = dict(zip(FIELDS[record.kind], record.values, strict=True))
        left = self._left.pop((values["pass_id"], values["block"]), None) if record.kind == "BlockLeft" else None
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "pid": self._pid,
                "tid": self._tid("loop", "event loop"),
                "cat": INSTANT,
                "name": record.kind,
                "ts": self._us(record.at),
                "args": {**_plain(values), "fetch": record.fetch, "rung_us": None if left is None else self._us(left)},
            }
        )
        if left is not None:
            self._counter("loop latency (ms)", record.at, late=round((record.at - left) * 1e3, 3))
        self._follow(record, values)

    def _follow(self, record: LoopRecord, values: Mapping[str, Any]) -> None:
        """Spans that begin with one event and end with another."""
        match record.kind:
            case "WalkStarted":
                self._walks[values["walk_id"]] = record.at, values["component"], list(values["pass_ids"])
            case "WalkJoined" if values["walk_id"] in self._walks:
                self._walks[values["walk_id"]][2].extend(values["pass_ids"])
            case "WalkEnded" if values["walk_id"] in self._walks:
                begun, component, pass_ids = self._walks.pop(values["walk_id"])
                args = {"walk_id": values["walk_id"], "component": component, "pass_ids": pass_ids}
                self._span(self._tid("walks", "walks"), "walk", f"walk {values['walk_id']}", begun, record.at, args)
            case "FetchStarted":
                self._close_slot(values["slot"], self._us(record.at), is_open=False)
                self._slots[values["slot"]] = self._us(record.at), {**values, "fetch": record.fetch}
                self._count_slots(record.at)
            case "SlotFree":
                self._close_slot(values["slot"], self._us(record.at), is_open=False)
                self._count_slots(record.at)

    def _close_slot(self, slot: int, at_us: float, *, is_open: bool) -> None:
        if slot not in self._slots:
            return
        begun_us, values = self._slots.pop(slot)
        self.events.append(
            {
                "ph": "X",
                "pid": self._pid,
                "tid": self.tracks.numbered("slot", f"slot {slot}", slot),
                "cat": "slot",
                "name": self._label(values["block"]),
                "ts": begun_us,
                "dur": round(at_us - begun_us, 3),
                "args": {**values, "open": is_open},
            }
        )

    def _count_slots(self, at: float) -> None:
        self._counter("slots in use", at, slots=len(self._slots))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an event as JSON can say them: a field may be a value of several fields itself."""
    return {name: attrs.asdict(value) if attrs.has(type(value)) else value for name, value in values.items()}

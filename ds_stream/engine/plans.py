"""Plans as messages of one fixed size: a few integers on the CPU group."""

import math
import struct

import torch
from torch import Tensor

from ds_stream.core import MAX_ROWS, Event, EventKind, Plan, Row

MAX_EVENTS = 32
"""Most events of a plan; more wait for the next one."""

_HEADER, _ROW, _EVENT = 3, 5, 3
PLAN_FIELD = ((_HEADER + _ROW * MAX_ROWS + _EVENT * MAX_EVENTS,), torch.int64)
"""Shape and type of an encoded plan."""


def encode_plan(plan: Plan) -> Tensor:
    """``plan`` as int64 numbers."""
    assert len(plan.rows) <= MAX_ROWS and len(plan.events) <= MAX_EVENTS
    numbers = [plan.tick, len(plan.rows), len(plan.events)]
    for row in plan.rows:
        numbers += [row.session, row.chunk, row.step, row.prompt, _to_bits(row.strength)]
    for event in plan.events:
        numbers += [int(event.kind), event.session, event.value]
    numbers += [0] * (PLAN_FIELD[0][0] - len(numbers))
    return torch.tensor(numbers, dtype=torch.int64)


def decode_plan(message: Tensor) -> Plan:
    """Undo :func:`encode_plan`."""
    numbers = message.tolist()
    tick, num_rows, num_events = numbers[:_HEADER]
    first_event = _HEADER + _ROW * num_rows
    rows = (numbers[at : at + _ROW] for at in range(_HEADER, first_event, _ROW))
    events = (numbers[at : at + _EVENT] for at in range(first_event, first_event + _EVENT * num_events, _EVENT))
    return Plan(
        tick,
        tuple(Row(*row[:-1], _from_bits(row[-1])) for row in rows),
        tuple(Event(EventKind(kind), session, value) for kind, session, value in events),
    )


def _to_bits(number: float | None) -> int:
    """A float as the integer of the same 64 bits, so that every stage computes with the very same one."""
    return struct.unpack("<q", struct.pack("<d", math.nan if number is None else number))[0]


def _from_bits(bits: int) -> float | None:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return None if math.isnan(number) else number

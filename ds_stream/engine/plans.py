"""Plans as messages of one fixed size: a few integers on the CPU group."""

import math
import struct

import numpy as np
import torch
from torch import Tensor

from ds_stream.core import MAX_ROWS, MAX_STAGES, Event, EventKind, Plan, Row

MAX_EVENTS = 32
"""Most events of a plan; more wait for the next one."""

_HEADER, _ROW, _EVENT = 4, 5, 3
PLAN_FIELD = ((_HEADER + _ROW * MAX_ROWS + _EVENT * MAX_EVENTS + MAX_STAGES + 1,), torch.int64)
"""Shape and type of an encoded plan."""


def encode_plan(plan: Plan) -> Tensor:
    """``plan`` as int64 numbers."""
    assert len(plan.rows) <= MAX_ROWS and len(plan.events) <= MAX_EVENTS
    numbers = [plan.tick, len(plan.rows), len(plan.events), len(plan.partition)]
    for row in plan.rows:
        numbers += [row.session, row.chunk, row.step, row.prompt, _to_bits(row.strength)]
    for event in plan.events:
        numbers += [int(event.kind), event.session, event.value]
    numbers += plan.partition
    message = np.zeros(PLAN_FIELD[0], np.int64)
    message[: len(numbers)] = numbers
    return torch.from_numpy(message)


def decode_plan(message: Tensor) -> Plan:
    """Undo :func:`encode_plan`."""
    # A message of the CPU group: no device is asked.
    numbers = message.numpy().tolist()
    tick, num_rows, num_events, num_bounds = numbers[:_HEADER]
    first_event = _HEADER + _ROW * num_rows
    first_bound = first_event + _EVENT * num_events
    rows = (numbers[at : at + _ROW] for at in range(_HEADER, first_event, _ROW))
    events = (numbers[at : at + _EVENT] for at in range(first_event, first_bound, _EVENT))
    return Plan(
        tick,
        tuple(Row(*row[:-1], _from_bits(row[-1])) for row in rows),
        tuple(Event(EventKind(kind), session, value) for kind, session, value in events),
        tuple(numbers[first_bound : first_bound + num_bounds]),
    )


def _to_bits(number: float | None) -> int:
    """A float as the integer of the same 64 bits, so that every stage computes with the very same one."""
    return struct.unpack("<q", struct.pack("<d", math.nan if number is None else number))[0]


def _from_bits(bits: int) -> float | None:
    (number,) = struct.unpack("<d", struct.pack("<q", bits))
    return None if math.isnan(number) else number

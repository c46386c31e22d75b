"""The most bytes that a program's own arrays take at once, as a compiler that fuses would hold them.

A walk over the operations in their order, with these rules:

    products, reductions, gathers, sorts, loops   make an array
    elementwise operations, broadcasts, slices,   make none where only their like or a reduction reads them (they are
    transposes, …                                 fused into it); else one. What is costly (exp, …) and read several
                                                  times is an array too, computed once.
    reshapes                                      make none: another view
    loops, branches, writes, elementwise ones     take the place of an operand of equal size that nothing reads later
    slices and outputs of a scan's body           are read from and written to the stacked arrays, where fusion allows
    products that are only written out,           are made last, as compilers do: what they multiply stays until then
    as weights' gradients are
    a loop                                        adds what the peak of its body is
    a branch                                      adds the larger peak of its two; its results go where the caller has
                                                  a place for them, and its operands' places are free if theirs are

So an optimizer holds gradients alone: each leaf's chain of operations is fused and writes over moments and parameters.
Passes that do not depend on each other (policy's and actor's) are taken in the order of the program, as a compiler does
that orders for memory. What a compiler adds on top is not counted: padding to tiles, copies between layouts, buffers of
collectives.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from rljax.plan.operations import Array, Operation, Program

ELEMENTWISE = frozenset(
    """
    abs add add_any and bitcast_convert_type cbrt ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1
    floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sqrt square stop_gradient sub tanh xor
""".split()
)
MOVING = frozenset("broadcast_in_dim concatenate dynamic_slice iota pad rev slice split transpose".split())
VIEWS = frozenset("expand_dims optimization_barrier random_unwrap random_wrap reshape squeeze".split())
COSTLY = frozenset("cos div erf exp exp2 expm1 log log1p logistic pow rsqrt sin sqrt tanh".split())
REDUCTIONS = frozenset("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum".split())
FUSED = ELEMENTWISE | MOVING | VIEWS
# Beside elementwise operations, what may write over an operand.
IN_PLACE = frozenset("cond cumsum dynamic_update_slice scan scatter scatter-add sort while".split())


@dataclasses.dataclass(frozen=True)
class Peak:
    """bytes: of the arrays alive at the fullest moment. arrays: these, with the bytes that each takes."""

    bytes: int
    arrays: tuple[tuple[Array, int], ...]


NOTHING = Peak(0, ())


def peak(program: Program, donated: Iterable[int] = ()) -> Peak:
    """Of a whole program, beside its arguments. donated: numbers of the arguments that its outputs may overwrite."""
    own = frozenset(program.args[i] for i in donated)
    return _Walk(program, overwritable=own, written=frozenset(range(len(program.outs)))).peak()


class _Walk:
    """overwritable: arguments whose place may be taken. sliced: arguments that are slices of a scan's stacks.
    written: numbers of the outputs that go into an array that is there already."""

    def __init__(self, program: Program, *, overwritable=frozenset(), sliced=frozenset(), written=frozenset()):
        self.operations = _with_slices(program.operations, sliced)
        self.overwritable = overwritable
        self.outside = set(program.args) - sliced
        self.kept = [array for i, array in enumerate(program.outs) if i not in written]
        self.written = {program.outs[i] for i in written}
        self.made = {array: i for i, op in enumerate(self.operations) for array in op.outs}
        self.readers = collections.defaultdict(list)
        for i, op in enumerate(self.operations):
            for array in op.ins:
                self.readers[array].append(i)
        self.exists: dict[int, bool] = {}
        for i in reversed(range(len(self.operations))):
            self.exists[i] = self._exists(i)
        self._sources: dict[Array, frozenset[Array]] = {}

    def _exists(self, i: int) -> bool:
        """Whether the result of an operation must be an array; of a view, whether what it views must."""
        op = self.operations[i]
        if op.name not in FUSED:
            return True
        readers = [(r, self.operations[r].name) for out in op.outs for r in self.readers[out]]
        hard = any(name not in FUSED | REDUCTIONS or (name in VIEWS and self.exists[r]) for r, name in readers)
        return hard or any(out in self.kept for out in op.outs) or (op.name in COSTLY and len(readers) > 1)

    def _is_array(self, i: int) -> bool:
        return self.operations[i].name not in VIEWS and self.exists[i]

    def sources(self, array: Array | None) -> frozenset[Array]:
        """The arrays that a value is computed from when it is read; of arguments, themselves."""
        if array is None:
            return frozenset()
        if array not in self._sources:
            found = frozenset([array])
            if array not in self.outside and not self._is_array(self.made[array]):
                found = frozenset().union(*map(self.sources, self.operations[self.made[array]].ins))
            self._sources[array] = found
        return self._sources[array]

    def peak(self) -> Peak:
        last = self._last_reads()
        ending = collections.defaultdict(list)
        for array, i in last.items():
            ending[i].append(array)
        # Arguments take nothing, but their place can be taken.
        alive: dict[Array, int] = {array: 0 for array in self.overwritable if array in last}
        best, now = NOTHING, 0
        for i, op in enumerate(self.operations):
            ends = [array for array in ending[i] if array in alive]
            if self._is_array(i):
                over = [array is not None and self.sources(array) <= set(ends) for array in op.ins]
                inner = max((_inner(op, body, over) for body in op.bodies), key=lambda p: p.bytes, default=NOTHING)
                for result, place in _in_place(op, ends).items():
                    alive[result] = alive.pop(place)
                    ends.remove(place)
                for result in op.outs:
                    if result not in alive:
                        alive[result] = result.bytes
                        now += result.bytes
                if now + inner.bytes > best.bytes:
                    held = tuple((array, size) for array, size in alive.items() if size)
                    best = Peak(now + inner.bytes, (*held, *inner.arrays))
                ends += [array for array in op.outs if last[array] == i]
            now -= sum(alive.pop(array) for array in ends)
        return best

    def _only_written(self, i: int) -> bool:
        """Whether a result goes into arrays that are there, and nowhere else, if need be through fused operations."""
        outs = self.operations[i].outs
        readers = [r for out in outs for r in self.readers[out]]
        fused = all(self.operations[r].name in FUSED and self._only_written(r) for r in readers)
        return fused and (bool(readers) or any(out in self.written for out in outs))

    def _last_reads(self) -> dict[Array, int]:
        """The operation after which an array is needed no more."""
        last: dict[Array, int] = {}
        for i, op in enumerate(self.operations):
            if self._is_array(i):
                last |= dict.fromkeys(op.outs, i)
                when = len(self.operations) if op.name == "dot_general" and self._only_written(i) else i
                for array in op.ins:
                    last |= {source: max(when, last.get(source, 0)) for source in self.sources(array)}
        for array in self.written:  # when it is computed, without an array of its own
            when = self.made[array] if array in self.made else 0
            last |= {source: max(when, last.get(source, 0)) for source in self.sources(array)}
        for array in self.kept:
            last |= dict.fromkeys(self.sources(array), len(self.operations))
        return last


def _with_slices(operations: tuple[Operation, ...], sliced: frozenset[Array]) -> list[Operation]:
    """The operations of a scan's body, with each slice of the stacks taken where it is first read."""
    out, taken = [], set()
    for op in operations:
        first = [array for array in dict.fromkeys(op.ins) if array in sliced and array not in taken]
        out += [Operation("dynamic_slice", (), (array,)) for array in first]
        taken.update(first)
        out.append(op)
    return out


def _in_place(op: Operation, ending: list[Array]) -> dict[Array, Array]:
    """Which results of an operation take the place of which operands."""
    if op.name not in ELEMENTWISE | IN_PLACE:
        return {}
    free, found = list(ending), {}
    for result in op.outs[: op.carried] if op.name == "scan" else op.outs:
        place = next((array for array in free if array.bytes == result.bytes), None)
        if place is not None:
            free.remove(place)
            found[result] = place
    return found


def _inner(op: Operation, body: Program, over: list[bool]) -> Peak:
    """over: which operands are read here for the last time."""
    if op.name == "cond":  # the first operand chooses the branch
        free = frozenset(array for array, last in zip(body.args, over[1:], strict=True) if last)
        return _Walk(body, overwritable=free, written=frozenset(range(len(body.outs)))).peak()
    if op.name != "scan":
        carried = body.args[-len(body.outs) :] if op.name == "while" else ()
        return _Walk(body, overwritable=frozenset(carried)).peak()
    carried = body.args[op.consts : op.consts + op.carried]
    return _Walk(
        body,
        overwritable=frozenset(carried),
        sliced=frozenset(body.args[op.consts + op.carried :]),
        written=frozenset(range(op.carried, len(body.outs))),
    ).peak()

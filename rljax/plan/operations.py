"""A traced program as a flat list of operations: what its cost is counted from. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend import core


@dataclasses.dataclass(frozen=True, eq=False)
class Array:
    """A value of the program, equal to itself only."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """One primitive. ins: Arrays, None for constants. bodies: of a loop (`trips` times; while loops once) or a branch.

    consts, carried: of a scan, how many of its inputs the body takes whole, and how many come back as outputs. flops:
    of a matrix product, two a multiply-add; nothing else counts.
    """

    name: str
    ins: tuple[Array | None, ...]
    outs: tuple[Array, ...]
    flops: int = 0
    bodies: tuple[Program, ...] = ()
    trips: int = 1
    consts: int = 0
    carried: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Operations in order, without those that nothing needs. args: its inputs. outs: None for constants."""

    args: tuple[Array, ...]
    operations: tuple[Operation, ...]
    outs: tuple[Array | None, ...]


def of(jaxpr, size: Callable[[tuple[int, ...], int], int]) -> Program:
    """The program of a ClosedJaxpr, calls inlined. size: (shape, bytes as traced) → bytes on a device."""
    return _Reader(size).program(jaxpr)


LOOPS = ("scan", "while", "cond")


class _Reader:
    def __init__(self, size: Callable[[tuple[int, ...], int], int]):
        self._size = size

    def program(self, jaxpr) -> Program:
        closed = _closed(jaxpr)
        args = [self._array(v) for v in closed.jaxpr.invars]
        found: list[Operation] = []
        outs = self._inline(closed.jaxpr, args, found)
        return Program(tuple(args), _needed(found, outs), tuple(outs))

    def _array(self, variable) -> Array:
        aval = variable.aval
        if not hasattr(aval, "shape"):  # a token
            return Array((), "token", 0)
        own = math.prod(aval.shape) * aval.dtype.itemsize
        return Array(tuple(aval.shape), str(aval.dtype), self._size(tuple(aval.shape), own))

    def _inline(self, jaxpr, args: Sequence[Array | None], found: list[Operation]) -> list[Array | None]:
        known: dict[Any, Array | None] = dict(zip(jaxpr.invars, args, strict=True))
        known |= {v: None for v in jaxpr.constvars}  # small tables, baked in

        def read(v) -> Array | None:
            return None if isinstance(v, core.Literal) else known[v]

        for equation in jaxpr.eqns:
            ins = [read(v) for v in equation.invars]
            call = _call(equation)
            if call is not None:
                outs = self._inline(call.jaxpr, ins[len(ins) - len(call.jaxpr.invars) :], found)
            else:
                outs = [self._array(v) for v in equation.outvars]
                found.append(self._operation(equation, ins, outs))
            known |= dict(zip(equation.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _operation(self, equation, ins, outs) -> Operation:
        name, params = equation.primitive.name, equation.params
        common = {"name": name, "ins": tuple(ins), "outs": tuple(outs)}
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            depth = math.prod(left[axis] for axis in contracted)
            return Operation(**common, flops=2 * depth * math.prod(equation.outvars[0].aval.shape))
        if name == "scan":
            counts = {"trips": params["length"], "consts": params["num_consts"], "carried": params["num_carry"]}
            return Operation(**common, bodies=(self.program(params["jaxpr"]),), **counts)
        if name == "while":
            return Operation(**common, bodies=(self.program(params["body_jaxpr"]),))
        if name == "cond":
            return Operation(**common, bodies=tuple(self.program(branch) for branch in params["branches"]))
        return Operation(**common)


def _closed(jaxpr) -> Any:
    return jaxpr if hasattr(jaxpr, "jaxpr") else core.ClosedJaxpr(jaxpr, ())


def _call(equation) -> Any:
    """The jaxpr of a call that happens once: jit, checkpoint, custom derivatives. None for all else."""
    if equation.primitive.name in LOOPS:
        return None
    inner = [equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params]
    return _closed(inner[0]) if inner else None


def _needed(operations: list[Operation] | tuple[Operation, ...], outs: Iterable[Array | None]) -> tuple[Operation, ...]:
    """Without operations, and outputs of scans, that nothing uses: a compiler drops them too."""
    wanted = {array for array in outs if array is not None}
    kept = []
    for operation in reversed(operations):
        if not wanted.intersection(operation.outs):
            continue
        if operation.name == "scan":
            operation = _narrowed(operation, wanted)
        kept.append(operation)
        wanted.update(array for array in operation.ins if array is not None)
    return tuple(reversed(kept))


def _narrowed(scan: Operation, wanted: set[Array]) -> Operation:
    """The scan without stacked outputs that are not wanted, and without what only they need."""
    (body,) = scan.bodies
    used = [i < scan.carried or array in wanted for i, array in enumerate(scan.outs)]
    outs = tuple(array if keep else None for array, keep in zip(body.outs, used, strict=True))
    body = Program(body.args, _needed(body.operations, outs), outs)
    reads = {array for array in outs if array is not None}
    reads |= {array for operation in body.operations for array in operation.ins if array is not None}
    first = scan.consts + scan.carried
    ins = tuple(x if i < first or body.args[i] in reads else None for i, x in enumerate(scan.ins))
    return dataclasses.replace(
        scan,
        ins=ins,
        bodies=(body,),
        outs=tuple(x if keep else Array(x.shape, x.dtype, 0) for x, keep in zip(scan.outs, used, strict=True)),
    )

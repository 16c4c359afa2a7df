"""LeRobot's messages, which are Python pickles, read and written as data: nothing a peer names is ever called.

A pickle is a program for a small stack machine that may import and call anything. This reader interprets only the
instructions that plain data needs, and the few names that LeRobot's own client writes stand for fixed constructions
made here. Any other name or instruction is refused. Python's pickle module takes no part, in either direction.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from taktline_protocol import ErrorCode, TaktlineError

from taktline_gateway.compat.wire_arrays import array_of, shown

MAX_STEPS = 50_000
"""Instructions of one message; an observation of 100 motors and 16 cameras takes under 3,000."""
HELPERS = ("lerobot.async_inference.helpers", "lerobot.scripts.server.helpers")
"""Where LeRobot's versions keep their message classes."""
_RECORDS = ("TimedObservation", "RemotePolicyConfig")
_NUMPY = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy._core.numeric", "_frombuffer"): "frombuffer",
    ("numpy.core.numeric", "_frombuffer"): "frombuffer",
    ("_codecs", "encode"): "encode",
    ("__builtin__", "bytes"): "bytes",
}
_MARK = object()


@dataclasses.dataclass(frozen=True, slots=True)
class _Name:
    """A name that may appear; `module` is kept for the classes of LeRobot."""

    name: str
    module: str = ""


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One of LeRobot's message objects: its class, where that lives, and its fields."""

    name: str
    module: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class _DType:
    code: str
    order: str = "="


@dataclasses.dataclass(slots=True, eq=False)
class _Array:
    value: NDArray[Any] | None = None


def read_record(data: bytes, name: str) -> Record:
    """Reads one message object of class `name`; arrays among its fields' values are still to be taken with `value_of`.

    Raises:
        TaktlineError: `invalid_body`, nothing else.
    """
    try:
        found = _Machine(data).run()
    except TaktlineError:
        raise
    except (IndexError, ValueError, TypeError, KeyError, OverflowError, struct.error, UnicodeDecodeError) as error:
        raise _invalid(f"it is damaged: {str(error)[:100]}") from error
    if not isinstance(found, Record) or found.name != name:
        raise _invalid(f"it holds no {name}")
    return found


def value_of(value: Any) -> Any:
    """The array behind a value of a record, or the value itself. Raises TaktlineError `invalid_body`."""
    if isinstance(value, _Array):
        if value.value is None:
            raise _invalid("an array was never filled")
        return value.value
    return value


def write_actions(module: str, actions: NDArray[np.float32], timestep: int, timestamp: float, dt_s: float) -> bytes:
    """A pickle of `list[TimedAction]` for LeRobot's client: row i is for `timestep` + i at `timestamp` + i * `dt_s`.

    Args:
        module: where the client's version keeps `TimedAction`, one of `HELPERS`.
        actions: float32 (H, D).
    """
    if module not in HELPERS:
        raise ValueError(f"{module!r} is none of {HELPERS}")
    out = [
        b"\x80\x02",
        b"c" + module.encode() + b"\nTimedAction\nq\x00" + b"ctorch\ntensor\nq\x01" + b"00",
        b"](",
    ]
    for row, action in enumerate(actions):
        numbers = b"".join(b"G" + struct.pack(">d", float(number)) for number in action)
        out += [
            b"h\x00)\x81}(",
            _text("timestamp") + b"G" + struct.pack(">d", timestamp + row * dt_s),
            _text("timestep") + b"\x8a\x08" + struct.pack("<q", timestep + row),
            _text("action") + b"h\x01](" + numbers + b"e\x85R",
            b"ub",
        ]
    return b"".join([*out, b"e."])


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


class _Machine:
    """The stack machine, without its calls and imports."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MAX_STEPS):
            code = self._take(1)
            if code == b".":
                if len(self._stack) != 1 or self._at != len(self._data):
                    raise _invalid("it does not end where its data does")
                return self._stack[0]
            self._step(code)
        raise _invalid(f"it takes more than {MAX_STEPS} steps")

    def _step(self, code: bytes) -> None:
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code in _NUMBERS:
            form = _NUMBERS[code]
            stack.append(form.unpack(self._take(form.size))[0])
        elif code in _TEXTS:
            stack.append(self._take(self._length(_TEXTS[code])).decode())
        elif code in _BYTES:
            stack.append(self._take(self._length(_BYTES[code])))
        elif code in _TUPLES:
            count = _TUPLES[code]
            values = tuple(self._pop() for _ in range(count))[::-1]
            stack.append(values)
        elif code in _MEMO_PUT:
            self._memo[self._length(_MEMO_PUT[code])] = stack[-1]
        elif code in _MEMO_GET:
            stack.append(self._memo[self._length(_MEMO_GET[code])])
        elif code in _OTHERS:
            _OTHERS[code](self)
        else:
            raise _invalid(f"instruction 0x{code.hex()} is not read here")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise _invalid("it is cut short")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _length(self, width: int) -> int:
        return int.from_bytes(self._take(width), "little")

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at, self._at + 200)
        line = self._data[self._at : end]
        self._at = end + 1
        return line.decode()

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise _invalid("it is out of step")
        return value

    def _pop_to_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        return values[::-1]

    def _proto(self) -> None:
        version = self._length(1)
        if not 2 <= version <= 5:
            raise _invalid(f"pickle protocol {version} is not read here")

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _integer(self) -> None:
        size = self._length(1)
        if size > 8:
            raise _invalid("an integer is over 64 bits")
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _global(self) -> None:
        module = self._line()
        self._stack.append(_name(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._stack.append(_name(module, name))

    def _tuple(self) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def _append(self) -> None:
        self._extend([self._pop()])

    def _appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: Iterable[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise _invalid("it appends to what is no list")
        target.extend(values)

    def _setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._update([key, value])

    def _setitems(self) -> None:
        self._update(self._pop_to_mark())

    def _update(self, entries: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(entries) % 2 or any(type(key) is not str for key in entries[::2]):
            raise _invalid("it fills what is no map of text keys")
        target.update(zip(entries[::2], entries[1::2], strict=True))

    def _newobj(self) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, _Name) or name.name not in _RECORDS or arguments != ():
            raise _invalid("it makes an object that is not read here")
        self._stack.append(Record(name.name, name.module))

    def _reduce(self) -> None:
        arguments, name = self._pop(), self._pop()
        if not isinstance(name, _Name) or type(arguments) is not tuple:
            raise _invalid("it calls what is no name")
        self._stack.append(_construct(name.name, arguments))

    def _build(self) -> None:
        state = self._pop()
        target = self._stack[-1]
        if isinstance(target, Record) and type(state) is dict:
            target.fields.update(state)
        elif isinstance(target, _DType) and type(state) is tuple and len(state) >= 2 and state[1] in ("<", ">", "|"):
            target.order = state[1]
        elif isinstance(target, _Array) and type(state) is tuple and len(state) == 5:
            _, shape, dtype, fortran, data = state
            target.value = _array(dtype, shape, data, fortran=fortran is True)
        else:
            raise _invalid("it fills an object that is not read here")


_CONSTANTS: dict[bytes, Any] = {b"N": None, b"\x88": True, b"\x89": False, b"(": _MARK, b")": ()}
_EMPTY: dict[bytes, type] = {b"}": dict, b"]": list}
_NUMBERS = {
    b"J": struct.Struct("<i"),
    b"K": struct.Struct("<B"),
    b"M": struct.Struct("<H"),
    b"G": struct.Struct(">d"),
}
# Bytes of the length, or of the memo's index, that follow the instruction.
_TEXTS = {b"\x8c": 1, b"X": 4, b"\x8d": 8}
_BYTES = {b"C": 1, b"B": 4, b"\x8e": 8, b"\x96": 8}
_MEMO_PUT = {b"q": 1, b"r": 4}
_MEMO_GET = {b"h": 1, b"j": 4}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
_OTHERS = {
    b"\x80": _Machine._proto,
    b"\x95": lambda machine: machine._take(8),  # a frame's length says nothing more
    b"\x94": _Machine._memoize,
    b"\x8a": _Machine._integer,
    b"c": _Machine._global,
    b"\x93": _Machine._stack_global,
    b"t": _Machine._tuple,
    b"a": _Machine._append,
    b"e": _Machine._appends,
    b"s": _Machine._setitem,
    b"u": _Machine._setitems,
    b"\x81": _Machine._newobj,
    b"R": _Machine._reduce,
    b"b": _Machine._build,
}


def _name(module: Any, name: Any) -> _Name:
    if module in HELPERS and name in _RECORDS:
        return _Name(name, module)
    known = _NUMPY.get((module, name)) if type(module) is str and type(name) is str else None
    if known is None:
        raise _invalid(f"it names {shown(module, 64)}.{shown(name, 64)}, which is not read here")
    return _Name(known)


def _construct(name: str, arguments: tuple[Any, ...]) -> Any:
    match name, arguments:
        case "dtype", (str() as code, *_):
            return _DType(code)
        case "reconstruct", (_Name(name="ndarray"), *_):
            return _Array()
        case "scalar", (_DType() as dtype, bytes() as data):
            return _array(dtype, (), data).item()
        case "frombuffer", (bytes() as data, _DType() as dtype, tuple() as shape, str() as order):
            return _Array(_array(dtype, shape, data, fortran=order == "F"))
        case "encode", (str() as text, "latin1"):
            return text.encode("latin1")
        case "bytes", ():
            return b""
    raise _invalid(f"it calls {name} in a way that is not read here")


def _array(dtype: Any, shape: Any, data: Any, *, fortran: bool = False) -> NDArray[Any]:
    if not isinstance(dtype, _DType) or type(shape) is not tuple:
        raise _invalid("an array has no dtype or shape")
    # A dtype without state is the machine's own order; both ends of a robot's wire are little endian.
    order = dtype.order if dtype.order != "=" else "<"
    array = array_of({"data": data, "dtype": f"{order}{dtype.code}", "shape": list(shape[::-1] if fortran else shape)})
    return array.T if fortran else array


def _invalid(reason: str) -> TaktlineError:
    return TaktlineError(
        ErrorCode.INVALID_BODY,
        f"the message is no LeRobot message: {reason}",
        "use LeRobot's own client; other pickles are never read",
    )

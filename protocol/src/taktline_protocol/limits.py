"""Limits of one request: what is refused before it is decoded, so that a bomb costs no memory and no time."""

from __future__ import annotations

import msgspec

from taktline_protocol.errors import ErrorCode, TaktlineError

MIB = 1024 * 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds of an observation; the defaults suit robots with up to 16 cameras of up to 4K.

    Attributes:
        body_bytes: whole request body, encoded.
        items: values and keys in the body, counted before decoding; bounds the memory that tiny elements unfold to.
        depth: nesting of maps and arrays in the body.
        image_bytes: one encoded image.
        image_pixels: height x width of one image, read from its header.
        cameras: images in one observation.
        state_length: numbers in the state vector.
        instruction_chars: characters of the instruction.
        tail_steps: actions in the unexecuted rest of a chunk; no chunk is longer.
        budget_ms: longest control budget that makes sense.
    """

    body_bytes: int = 16 * MIB
    items: int = 8192
    depth: int = 8
    image_bytes: int = 8 * MIB
    image_pixels: int = 4096 * 2160
    cameras: int = 16
    state_length: int = 1024
    instruction_chars: int = 2000
    tail_steps: int = 1024
    budget_ms: float = 600_000.0


DEFAULT_LIMITS = Limits()


def check_body_size(size: int, limits: Limits) -> None:
    """Raises `body_too_large` where `size` bytes are over the limit; call it while the body still streams in."""
    if size > limits.body_bytes:
        raise TaktlineError(
            ErrorCode.BODY_TOO_LARGE,
            f"the body is over {limits.body_bytes} bytes",
            "send fewer or smaller images: JPEG at the policy's own resolution loses nothing",
        )


def check_structure_json(body: bytes, limits: Limits) -> None:
    """Bounds how many values a JSON text can hold, from counts that never unfold it.

    Commas and opening brackets bound the values from above (those inside strings count too, which errs on the side of
    refusal and does not matter at these limits); base64 has neither. Nesting needs no bound of its own: the typed
    decoder goes only as deep as the schema.

    Raises:
        TaktlineError: `invalid_body`.
    """
    count = body.count(b",") + body.count(b"[") + body.count(b"{")
    if count > limits.items:
        raise _too_many(count, limits)


def check_structure_msgpack(body: bytes, limits: Limits, binaries: list[tuple[int, int]] | None = None) -> None:
    """Walks the msgpack structure without building it: every declared size fits, few items, shallow, one value.

    The walk touches at most `limits.items` headers and skips payloads, so it costs microseconds whatever is declared.

    Args:
        binaries: gets (begin, end) of each binary value's content, in order.

    Raises:
        TaktlineError: `invalid_body`.
    """
    leads = _LEADS
    size = len(body)
    position = 0
    items = 0
    open_containers: list[int] = []  # values still to come in each open container
    while True:
        if position >= size:
            raise _truncated(position)
        items += 1
        if items > limits.items:
            raise _too_many(items, limits)
        payload, children, width, factor = leads[body[position]]
        position += 1
        if width:
            declared = int.from_bytes(body[position : position + width], "big")
            position += width
            if factor:
                children = factor * declared
            else:
                payload += declared
                if binaries is not None and 0xC4 <= body[position - width - 1] <= 0xC6:
                    binaries.append((position, position + payload))
        elif payload < 0:
            raise TaktlineError(
                ErrorCode.INVALID_BODY,
                f"byte {position - 1} (0x{body[position - 1]:02x}) is not msgpack",
                "encode the body as msgpack",
            )
        position += payload
        if position > size or children > size - position:
            raise _truncated(min(position, size))
        if children:
            open_containers.append(children)
            if len(open_containers) > limits.depth:
                raise TaktlineError(
                    ErrorCode.INVALID_BODY,
                    f"the body nests deeper than {limits.depth} levels",
                    "send the observation schema of the OpenAPI document, nothing around it",
                )
            continue
        while open_containers:
            open_containers[-1] -= 1
            if open_containers[-1]:
                break
            open_containers.pop()
        if not open_containers:
            if position != size:
                raise TaktlineError(
                    ErrorCode.INVALID_BODY,
                    f"{size - position} bytes follow the message",
                    "send one message per body",
                )
            return


def _lead(lead: int) -> tuple[int, int, int, int]:
    """What a lead byte says: payload bytes, values in it, bytes of a length behind it, values per entry of that.

    Without the last, the length is of more payload. A negative payload is no msgpack.
    """
    if lead <= 0x7F or lead >= 0xE0:  # fixint
        return 0, 0, 0, 0
    if 0xA0 <= lead <= 0xBF:  # fixstr
        return lead & 0x1F, 0, 0, 0
    if lead <= 0x8F:  # fixmap
        return 0, 2 * (lead & 0x0F), 0, 0
    if lead <= 0x9F:  # fixarray
        return 0, lead & 0x0F, 0, 0
    if lead == 0xC1:
        return -1, 0, 0, 0
    if 0xC4 <= lead <= 0xC6 or 0xD9 <= lead <= 0xDB:  # bin, str
        return 0, 0, 1 << (lead - (0xC4 if lead <= 0xC6 else 0xD9)), 0
    if 0xC7 <= lead <= 0xC9:  # ext, with a byte of type
        return 1, 0, 1 << (lead - 0xC7), 0
    if lead >= 0xDC:  # array, map
        return 0, 0, 4 if lead & 1 else 2, 1 if lead <= 0xDD else 2
    if 0xD4 <= lead <= 0xD8:  # fixext, with a byte of type
        return 1 + (1 << (lead - 0xD4)), 0, 0, 0
    # nil, booleans, floats, integers
    return {0xCA: 4, 0xCB: 8}.get(lead, 1 << (lead & 3) if lead >= 0xCC else 0), 0, 0, 0


_LEADS = [_lead(lead) for lead in range(256)]


def _too_many(count: int, limits: Limits) -> TaktlineError:
    return TaktlineError(
        ErrorCode.INVALID_BODY,
        f"the body holds {count} or more values; at most {limits.items} are read",
        "send arrays as raw little-endian bytes (Array), not as lists of numbers",
    )


def _truncated(position: int) -> TaktlineError:
    return TaktlineError(
        ErrorCode.INVALID_BODY,
        f"the msgpack body ends early: at byte {position} it declares more than it holds",
        "send the whole message, with Content-Length equal to its size",
    )

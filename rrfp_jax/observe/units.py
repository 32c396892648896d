"""Quantities in words, for people to read."""

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_in_words(num_bytes: float) -> str:
    """Returns a number of bytes in about three digits and a unit, such as 34 MiB."""
    unit = 0
    while num_bytes >= 1023.5 and unit < len(_BYTES) - 1:
        num_bytes /= 1024
        unit += 1
    digits = ".0f" if num_bytes >= 100 else ".3g"
    return f"{num_bytes:{digits}} {_BYTES[unit]}"

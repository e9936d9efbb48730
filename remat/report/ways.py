"""The saved values that a plan packs or offloads, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from remat.graph.lowering import Way
from remat.units import format_bytes

#: Values of each way that are listed; the others are summed up.
MOST_LISTED = 40


def ways_row(ways: Sequence[Way], waited: int, link: str, show_cost: Callable[[float], str]) -> str:
    """All of them in one line; empty where every value is just kept."""
    sent, packed = [w for w in ways if not w.pair], [w for w in ways if w.pair]
    parts = []
    if sent:
        parts.append(
            f"{format_bytes(sum(w.nbytes for w in sent))} offloaded over {link}, for which runs wait "
            f"{show_cost(waited) if waited else 'nothing'}"
        )
    if packed:
        before, after = sum(w.nbytes for w in packed), sum(w.packed_bytes for w in packed)
        parts.append(
            f"{format_bytes(before)} packed into {format_bytes(after)}, which takes "
            f"{show_cost(sum(w.cost for w in packed))}"
        )
    return "; ".join(parts)


def ways_lines(
    ways: Sequence[Way], show_cost: Callable[[float], str], made_by: Mapping[str, str]
) -> list[str]:
    """Each value by its way, the largest first, as lines of text.

    Args:
        ways: the ways.
        show_cost: a cost as text.
        made_by: the source line of each value, where it is known.
    """
    lines = []
    for title, chosen in (
        ("offloaded values", [w for w in ways if not w.pair]),
        ("packed values", [w for w in ways if w.pair]),
    ):
        chosen.sort(key=lambda w: (-w.nbytes, w.name))
        if chosen:
            total = format_bytes(sum(w.nbytes for w in chosen))
            lines.append(f"  {title}: {total} in {len(chosen)}")
        lines += [
            f"    {format_bytes(w.nbytes):>10}  {_told(w, show_cost)}  {made_by.get(w.name, '')}".rstrip()
            for w in chosen[:MOST_LISTED]
        ]
        if len(chosen) > MOST_LISTED:
            rest = chosen[MOST_LISTED:]
            lines.append(
                f"    {format_bytes(sum(w.nbytes for w in rest)):>10}  {len(rest)} smaller ones"
            )
    return lines


def _told(way: Way, show_cost: Callable[[float], str]) -> str:
    if way.pair:
        size = format_bytes(way.packed_bytes)
        return f"{way.name}  {way.pair}, {size}, {show_cost(way.cost)} to pack and unpack"
    freed = f"freed behind {way.freed_after}" if way.freed_after else "freed at once"
    begun = f"fetched from {way.fetched_before} on" if way.fetched_before else "fetched when read"
    return f"{way.name}  {freed}, {begun}"

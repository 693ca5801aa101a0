"""All sections, in the order of the table."""

from trust.bits import Bits
from trust.crash import Crash
from trust.damage import Damage
from trust.leaks import Leaks
from trust.power import Power
from trust.races import Races
from trust.reading import Reading
from trust.section import Section
from trust.unfinished import Unfinished
from trust.workers import Workers

SECTIONS: dict[str, type[Section]] = {
    one.name: one
    for one in (Damage, Bits, Unfinished, Crash, Power, Workers, Races, Leaks, Reading)
}

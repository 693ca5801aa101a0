"""All sections, in the order of the table."""

from trust.bits import Bits
from trust.crash import Crash
from trust.damage import Damage
from trust.power import Power
from trust.reading import Reading
from trust.section import Section

SECTIONS: dict[str, type[Section]] = {
    one.name: one for one in (Damage, Bits, Crash, Power, Reading)
}

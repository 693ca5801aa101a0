"""The result of packing one dataset, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import printable
from ..names import KEY
from ..units import show_count, show_size
from .journal import REJECTED
from .plan import Plan
from .reencode import Reencoded
from .sources.field_names import fields_text


@dataclass(kw_only=True)
class Packed(Reencoded):
    """The result of one call of `pack` or `commit`, for one dataset; as str, a summary of lines."""

    out: str
    split: str = ""
    source: str = "imagefolder"  # its kind
    fields: dict[str, str] = field(default_factory=dict)  # name and kind
    theirs: dict[str, str] = field(default_factory=dict)  # names of the source, where others
    shards: int = 0
    records: int = 0
    classes: int | None = None
    source_bytes: int = 0
    bytes: int = 0  # of the shards
    seconds: float = 0.0
    kept: int = 0  # shards that an earlier, interrupted packing had finished
    built: int = 0
    ignored: int = 0  # hidden files and the like
    notes: list[str] = field(default_factory=list)
    rejected: list[tuple[str, str]] = field(default_factory=list)  # key, reason
    pixels: tuple[int, int] | None = None  # height and width of raw pixels
    committed: bool = False
    version: str | None = None  # the new one, where it was appended to a dataset
    already: bool = False  # it was packed before; nothing was touched
    by_plan: bool = False  # so says the plan that was committed here: the source was not listed
    checked: bool = False  # `commit` found all shards built, by parts
    unlocked: bool = False  # the file system has no locks
    dry_run: bool = False  # nothing was touched: what would be done
    planned: bool = False  # its plan is in OUT, and no more
    joined: bool = False  # the plan was there before
    skips: bool = True  # what cannot be packed is left out, as on_error="skip" says

    @classmethod
    def begun(cls, plan: Plan, out: str, shards: range, skips: bool) -> Packed:
        """Return the result of a call that is to build some shards of a plan."""
        options = plan.options
        return cls(
            out=out,
            split=options.split,
            source=options.source,
            fields=dict(plan.fields),
            theirs=dict(options.of_source.get("fields", {})),
            shards=plan.shards,
            records=int(plan.bounds[shards.stop] - plan.bounds[shards.start]),
            classes=None if plan.classes is None else len(plan.classes),
            source_bytes=int(plan.shard_bytes[shards.start : shards.stop].sum()),
            ignored=plan.ignored,
            notes=list(plan.notes),
            pixels=None if options.pixels is None else (options.pixels[0], options.pixels[1]),
            tiles=0 if options.jpeg_tiles else None,
            skips=skips,
        )

    def __repr__(self) -> str:
        out = f"; {len(self.rejected):,} left out" if self.rejected else ""
        return f"<{printable(self.out)}: {self._summary()}{out}>"

    def __str__(self) -> str:
        where = printable(self.out)
        lines = [self._summary()]
        if self.source != "imagefolder" or not self.fields.keys() <= {KEY, "image", "label"}:
            lines.append(f"{self.source}: {fields_text(self.fields, self.theirs)}")
        if self.full_size:
            lines.append(
                f"not resized: {show_count(self.full_size, 'image')}, of several pages or pictures "
                "(animations, too), or of formats that are not written"
            )
        if self.tiles is not None and not self.dry_run and not self.planned:
            lines.append(self._tiles())
        if self.enlarged:
            lines.append(f"enlarged, since smaller: {show_count(self.enlarged, 'image')}")
        if self.ignored:
            shown = show_count(self.ignored, "file or folder", "files and folders")
            lines.append(f"ignored: {shown}")
        if self.rejected:
            fate = f"left out; see {REJECTED}"
            if self.planned:
                fate = "cannot be packed; --on-error skip, of `pack`, leaves them out"
            if self.dry_run:
                fate = (
                    "would be left out" if self.skips else "cannot be packed, so nothing would be"
                )
            lines.append(f"{show_count(len(self.rejected), 'file')} {fate}:")
        said = [f"{where}: {line}" for line in lines]
        said += [f"  {printable(key)}: {why}" for key, why in self.rejected[:10]]
        if len(self.rejected) > 10:
            said.append(f"  ... and {len(self.rejected) - 10:,} more")
        said += [f"{where}: {note}" for note in self.notes[:10]]
        said += [f"{where}: version {self.version}"] if self.version else []
        if self.unlocked:
            said.append(f"{where}: this file system has no locks; do not pack here twice at once")
        return "\n".join(said)

    def _summary(self) -> str:
        labels = "no classes"
        if self.classes is not None:
            labels = show_count(self.classes, "class", "classes")
        unit = "file" if self.source == "imagefolder" else "record"
        what = f"{show_count(self.records, unit)}, {labels}, {show_size(self.source_bytes)}"
        if self.already and self.version:
            return f"already committed, and nothing is left to do: {what}"
        if self.already and self.by_plan:
            return (
                f"already packed: {what}, by the plan that was made here; SRC was not looked at "
                "(--overwrite packs again)"
            )
        if self.already:
            return (
                f"already packed: {what}, with the same keys, sizes and options (contents are not "
                "compared; --overwrite packs again)"
            )
        if self.planned:
            there = "already planned" if self.joined else "planned"
            return f"{there}: {what}, in {show_count(self.shards, 'shard')}"
        if self.dry_run:
            there = f"; {self.kept:,} of these are there, to be checked" if self.kept else ""
            return f"would pack {what} into {show_count(self.shards, 'shard')}{there}"
        if self.checked and not self.committed:
            return "no new version: all new files were left out"
        resumed = self.kept and not self.checked
        kept = f", {self.kept:,} kept from before" if resumed else ""
        size = f", {show_size(self.bytes)}" if self.committed else " (not committed)"
        rate = self.source_bytes / max(self.seconds, 1e-9) / 1e6
        return (
            f"{what} -> {show_count(self.built + self.kept, 'shard')}{kept}{size}, in "
            f"{self.seconds:.1f} s, {rate:,.0f} MB/s"
        )

    def _tiles(self) -> str:
        """Say how many images are tiles, what this call did for it, and why others are none."""
        text = f"{self.tiles:,} of {self.records:,} images are JPEG tiles"
        if self.tiled:
            text += (
                f": {self.tiled:,} rewritten, {show_size(self.tiled_from)} -> "
                f"{show_size(self.tiled_to)} ({self.tiled_to / self.tiled_from - 1:+.1%})"
            )
        if self.untiled:
            reasons = sorted(self.untiled.items(), key=lambda found: (-found[1], found[0]))
            text += "; left as they were: " + ", ".join(f"{n:,} {why}" for why, n in reasons)
        return text

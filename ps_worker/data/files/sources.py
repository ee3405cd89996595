"""Finds the files of a dataset and looks at each once: its size, row groups, schema and checksum."""

from __future__ import annotations

import glob
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISREG
from typing import Any
from urllib.parse import unquote

import xxhash

from ps_protocol.errors import ConfigError, DamagedData
from ps_worker.data.files.columns import libraries
from ps_worker.data.files.layout import LEAST_PARTS, Group
from ps_worker.session.reporting import log

PARQUET, TEXT = "parquet", "csv"

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 256 << 10, 16 << 20
"""Plain text is read in ranges of so many bytes: smaller ones of little text, so that all workers have some."""

MOST_ROWS_OF_TEXT = 1 << 36
"""Rows that a compressed text file is taken to have at most."""

_SUFFIXES = {".parquet": PARQUET, ".pq": PARQUET, ".csv": TEXT, ".tsv": TEXT, ".txt": TEXT, ".data": TEXT, ".tab": TEXT}
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
_NOT_READ = {".xz", ".lzma", ".zip", ".7z", ".z", ".snappy", ".lzo"}
_TABS = {".tsv", ".tab", ".data"}
_MAGIC = b"PAR1"
_HEAD_BYTES = 1 << 20
_SUMMED_BYTES = 1 << 16
_TEXT_BLOCK_BYTES = 4 << 20
_LOOKING_THREADS = 16
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile("-?[0-9]{1,18}")

_MOST_GROUPS = 1024
"""Entries of a fingerprint: so many files, or groups of files, are told apart."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a text file is written."""

    delimiter: str
    #: Names of the columns; None: the first line has them.
    header: tuple[str, ...] | None = None
    #: The codec of the whole file; empty: none.
    codec: str = ""
    #: Values may have line ends between quotes: such a file is read from its beginning.
    quoted_lines: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """One file as it was when it was looked at. Both sizes and times are compared each time it is opened."""

    path: Path
    #: Below the folder that all files have in common.
    name: str
    size: int
    modified_ns: int
    #: Of the footer, of text of the first bytes.
    checksum: str
    #: Rows of each row group, or None for each range of text; and the most rows there may be in each.
    groups: tuple[tuple[int | None, int], ...] = ()
    #: Columns from the names of folders, as in "day=3".
    partitions: Mapping[str, str | None] = field(default_factory=dict)
    text: TextForm | None = None
    #: Of the ranges in which plain text is read.
    block_bytes: int = MOST_BLOCK_BYTES
    #: Rows of a text file, guessed from its beginning.
    guess: int = 0
    #: pyarrow Schema of what is in the file, and of its partitions; None if it cannot be read.
    schema: Any = None
    #: Why it is left out.
    error: DamagedData | None = None

    def check_unchanged(self) -> None:
        """Raise DamagedData if the file is another one than was looked at."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise DamagedData(f"{self.path} cannot be read any more: {error.strerror}") from error
        if (now.st_size, now.st_mtime_ns) != (self.size, self.modified_ns):
            raise DamagedData(
                f"{self.path} has changed since the job looked at it",
                expected=f"{self.size} bytes, modified at {self.modified_ns / 1e9:.3f} s",
                actual=f"{now.st_size} bytes, modified at {now.st_mtime_ns / 1e9:.3f} s",
                remedy="write new data to new files, and begin another job or dataset with them (name=…)",
            )


def found(paths: Paths) -> list[Path]:
    """The files that ``paths`` names: files, folders, and patterns with ``*``, ``?``, ``[…]`` and ``**``; by path.

    A folder is searched with all below it, but for names that begin with "_" or ".". Raises ConfigError.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files: dict[str, Path] = {}
    for each in given:
        text = str(Path(each).expanduser()) if "://" not in os.fspath(each) else os.fspath(each)
        if "://" in text:
            raise ConfigError(f"'{text}' is not a path", expected="files of a file system", remedy="mount the store")
        for path in _matches(text):
            files[str(path.absolute())] = path.absolute()
    if not files:
        raise ConfigError(
            "no file matches", expected="at least one file", actual=", ".join(map(str, given))[:400] or "no path"
        )
    return [files[key] for key in sorted(files)]


def look(
    files: Sequence[Path],
    *,
    format: str | None = None,
    delimiter: str | None = None,
    header: Sequence[str] | None = None,
    quoted_lines: bool = False,
    skip: bool = False,
) -> list[Source]:
    """Look at each file once, several at a time. ``skip``: those that cannot be read have an ``error``.

    Raises ConfigError for files of several formats, DamagedData for a file that cannot be read.
    """
    forms = {_format_of(path, format) for path in files}
    if len(forms) > 1:
        raise ConfigError("the files are of different formats", expected="Parquet or text", actual=", ".join(forms))
    base = Path(os.path.commonpath([path.parent.absolute() for path in files]))

    def of(path: Path) -> Source:
        try:
            if forms == {PARQUET}:
                return _parquet(path, base)
            return _text(path, base, delimiter, tuple(header) if header is not None else None, quoted_lines)
        except DamagedData as error:
            if not skip:
                raise
            return Source(path, _name(path, base), 0, 0, "unreadable", error=error)

    with ThreadPoolExecutor(min(_LOOKING_THREADS, len(files)), "ps-look") as pool:
        sources = list(pool.map(of, files))
    if all(source.error for source in sources) and sources[0].error is not None:
        raise sources[0].error
    return _in_blocks(_with_partitions(sources))


def _in_blocks(sources: list[Source]) -> list[Source]:
    """Plain text in ranges of bytes; each has at most as many rows as bytes."""
    plain = [each for each in sources if each.text is not None and not (each.text.codec or each.text.quoted_lines)]
    size = max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, sum(each.size for each in plain) // LEAST_PARTS))
    cut = {id(each): replace(each, block_bytes=size, groups=((None, size),) * -(-each.size // size)) for each in plain}
    return [cut.get(id(each), each) for each in sources]


def groups_of(sources: Sequence[Source]) -> list[Group]:
    """What all files can be read from."""
    return [
        Group(file, number, rows, bound)
        for file, source in enumerate(sources)
        for number, (rows, bound) in enumerate(source.groups)
    ]


def fingerprint_of(sources: Sequence[Source], settings: str) -> str:
    """Short checksums of settings and files, the same on all hosts that have these files."""
    entries = [xxhash.xxh64(settings.encode()).hexdigest()[:8]]
    for part in _parts(len(sources)):
        digest = xxhash.xxh64()
        for source in sources[part.start : part.stop]:
            digest.update(os.fsencode(source.name) + f"\0{source.size}\0{source.checksum}\0".encode())
        entries.append(digest.hexdigest()[:8])
    return f"{len(sources)} " + "".join(entries)


def other_files(sources: Sequence[Source], own: str, kept: str, dataset: str) -> DamagedData:
    """The error for the fingerprint of other files than these, by which the job began ``dataset``."""
    (count, mine), (other_count, theirs) = (each.partition(" ")[::2] for each in (own, kept))
    remedy = "give all workers the same files; write new data to new files, and name another dataset (name=…)"
    if count != other_count:
        return DamagedData(
            f"the files of '{dataset}' are not those that the job began with",
            expected=f"{other_count} files",
            actual=f"{count} files",
            remedy=remedy,
        )
    if mine[:8] != theirs[:8]:
        return DamagedData(
            f"files() of '{dataset}' is called in another way than when the job began",
            expected="the same shuffle=, and of text the same delimiter=, header= and quoted_lines=",
            actual="other rows, or another order of them",
            remedy="call it as before, or name another dataset (name=…)",
        )
    for at, part in enumerate(_parts(len(sources)), 1):
        if mine[8 * at : 8 * at + 8] != theirs[8 * at : 8 * at + 8]:
            named = sources[part.start : part.stop]
            return DamagedData(
                " or ".join(str(source.path) for source in ([named[0], named[-1]])[: len(named)])
                + f", of '{dataset}', is not the file that the job began with",
                expected="its size and footer, or first bytes, as the first worker saw them",
                actual=named[0].error.message if named[0].error else f"{named[0].size} bytes",
                remedy=remedy,
            )
    return DamagedData(f"the files of '{dataset}' are not those that the job began with", remedy=remedy)


def _parts(files: int) -> list[range]:
    count = min(files, _MOST_GROUPS)
    return [range(files * i // count, files * (i + 1) // count) for i in range(count)]


def _matches(text: str) -> list[Path]:
    if glob.has_magic(text) and not Path(text).exists():
        # Patterns of pathlib are relative, and find hidden files.
        return [file for each in glob.glob(text, recursive=True) for file in _below(Path(each))]  # noqa: PTH207
    return _below(Path(text))


def _below(path: Path) -> list[Path]:
    if path.is_dir():
        return [
            file
            for file in path.rglob("*")
            if not any(part.startswith(("_", ".")) for part in file.relative_to(path).parts)
            and not _is_folder(file)
            and _suffixes(file)[0] in _SUFFIXES
        ]
    if path.exists() or path.is_symlink():
        return [path]
    raise ConfigError(f"{path} does not exist", expected="a file, a folder or a pattern")


def _is_folder(path: Path) -> bool:
    if not path.is_dir():
        return False
    if path.is_symlink():
        log.warning("data.skipped", "%s is a link to a folder, which is not searched: name it beside the others", path)
    return True


def _name(path: Path, base: Path) -> str:
    return path.absolute().relative_to(base).as_posix()


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix of the format and that of a codec, ".csv" and ".gz"."""
    last = path.suffix.lower()
    if last in _CODECS or last in _NOT_READ:
        return Path(path.stem).suffix.lower(), last
    return last, ""


def _format_of(path: Path, given: str | None) -> str:
    if given is not None:
        if given not in (PARQUET, TEXT):
            raise ConfigError("this format is not read", expected=f"{PARQUET} or {TEXT}", actual=repr(given))
        return given
    kind, codec = _suffixes(path)
    if kind not in _SUFFIXES or (codec and _SUFFIXES[kind] == PARQUET):
        raise ConfigError(
            f"the format of {path} is not known",
            expected=", ".join(_SUFFIXES) + "; of text also with " + ", ".join(_CODECS),
            actual=path.name,
            remedy="name it: format='parquet' or format='csv'",
        )
    return _SUFFIXES[kind]


def _stat(path: Path) -> os.stat_result:
    try:
        os.fspath(path).encode()
        found = path.stat()
    except UnicodeEncodeError as error:
        raise DamagedData(
            f"the name of the file {os.fsencode(path)!r} is not UTF-8", remedy="rename it, or leave it out"
        ) from error
    except OSError as error:
        raise DamagedData(f"{path} cannot be read: {error.strerror}") from error
    if not S_ISREG(found.st_mode):
        raise DamagedData(f"{path} is no regular file", expected="a file that can be read again")
    return found


def _read(path: Path, begin: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except OSError as error:
        raise DamagedData(f"{path} cannot be read: {error.strerror}") from error


def _partitions(path: Path, columns: Sequence[str]) -> dict[str, str | None]:
    """Columns that the names of folders give, without those that are in the file."""
    named = [part.partition("=") for part in path.absolute().parent.parts]
    return {
        unquote(key): None if value == _NULL_PARTITION else unquote(value)
        for key, sign, value in named
        if sign and key and unquote(key) not in columns
    }


def _with_partitions(sources: list[Source]) -> list[Source]:
    """With the columns that folders name in the schemas: int64 where all of a name are such numbers, else strings."""
    (arrow,) = libraries()
    values = [(name, value) for source in sources for name, value in source.partitions.items() if value is not None]
    named = {name for name, _ in values}
    texts = {name for name, value in values if not _INTEGER.fullmatch(value)}

    def schema(source: Source) -> Any:
        made = source.schema
        for name in source.partitions:
            kind = arrow.string() if name in texts else arrow.int64() if name in named else arrow.null()
            made = made.append(arrow.field(name, kind))
        return made

    return [replace(source, schema=schema(source)) if source.partitions else source for source in sources]


def _parquet(path: Path, base: Path) -> Source:
    arrow, parquet = libraries("pyarrow.parquet")
    stat = _stat(path)
    name = _name(path, base)
    tail = _read(path, max(0, stat.st_size - 8), 8)
    length = struct.unpack("<I", tail[:4])[0] if len(tail) == 8 else 0
    if stat.st_size < 12 or tail[4:] != _MAGIC or length + 12 > stat.st_size:
        raise DamagedData(
            f"{path} is not a whole Parquet file",
            expected="'PAR1' at its end, after a footer",
            actual=f"{stat.st_size} bytes that end with {tail[4:]!r}" if stat.st_size else "an empty file",
            remedy="write it again, or leave such files out: on_bad_file='skip'",
        )
    footer = _read(path, stat.st_size - 8 - length, length)
    try:
        metadata = parquet.read_metadata(arrow.BufferReader(footer_file(footer)))
        schema = metadata.schema.to_arrow_schema()
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    except (OSError, arrow.ArrowException) as error:
        raise DamagedData(f"{path}: the footer cannot be read: {error}") from error
    return Source(
        path,
        name,
        stat.st_size,
        stat.st_mtime_ns,
        xxhash.xxh64(footer).hexdigest(),
        tuple((count, count) for count in rows),
        _partitions(path, schema.names),
        schema=schema,
    )


def footer_file(footer: bytes) -> bytes:
    """The smallest file that has this footer."""
    return _MAGIC + footer + struct.pack("<I", len(footer)) + _MAGIC


def _text(path: Path, base: Path, delimiter: str | None, header: tuple[str, ...] | None, quoted_lines: bool) -> Source:
    arrow, csv = libraries("pyarrow.csv")
    stat = _stat(path)
    kind, suffix = _suffixes(path)
    codec = _CODECS.get(suffix, "")
    if suffix and (not codec or not arrow.Codec.is_available(codec)):
        raise ConfigError(
            f"{path} is compressed with a codec that Arrow does not read here",
            expected=", ".join(each for each, name in _CODECS.items() if arrow.Codec.is_available(name)),
            actual=suffix,
            remedy="compress it with another one",
        )
    form = TextForm(delimiter or ("\t" if kind in _TABS else ","), header, codec, quoted_lines)
    checksum = xxhash.xxh64(_read(path, 0, _SUMMED_BYTES) + _read(path, max(0, stat.st_size - _SUMMED_BYTES), -1))
    source = Source(path, _name(path, base), stat.st_size, stat.st_mtime_ns, checksum.hexdigest(), text=form)
    if not stat.st_size:
        return source
    try:
        with arrow.OSFile(os.fspath(path)) as raw:
            stream = arrow.CompressedInputStream(raw, codec) if codec else raw
            head = stream.read(_HEAD_BYTES)
            read_bytes = min(stat.st_size, raw.tell())
        # Whole lines only, unless all of the file is one.
        whole = head[: head.rfind(b"\n") + 1] or head
        options = csv_options(csv, form)
        # A wrong line is an error where its rows are due.
        options["parse_options"].invalid_row_handler = lambda row: "skip"
        schema = csv.read_csv(arrow.BufferReader(whole), **options).schema
        partitions = _partitions(path, schema.names)
    except (OSError, UnicodeError, arrow.ArrowException) as error:
        raise DamagedData(f"{path} cannot be read as text: {error}") from error
    if b"\r" in head and b"\n" not in head and not (codec or quoted_lines):
        raise DamagedData(
            f"{path}: its lines end with CR alone", expected="LF, or CR and LF", remedy="convert its line ends"
        )
    return replace(
        source,
        partitions=partitions,
        groups=((None, MOST_ROWS_OF_TEXT),),
        guess=max(1, head.count(b"\n")) * stat.st_size // max(1, read_bytes),
        schema=schema,
    )


def csv_options(
    csv: Any, form: TextForm, names: Sequence[str] | None = None, types: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """How pyarrow.csv reads such a file: ``names`` of its columns where the first line does not have them, ``types`` of
    the columns that are wanted; None: all.

    Only an empty value is null: "NA" or "null" may be a category.
    """
    names = names or form.header
    return {
        "read_options": csv.ReadOptions(column_names=list(names) if names else None, block_size=_TEXT_BLOCK_BYTES),
        "parse_options": csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=form.quoted_lines),
        "convert_options": csv.ConvertOptions(
            column_types=dict(types or {}),
            include_columns=list(types or ()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        ),
    }

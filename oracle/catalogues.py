"""Compares the compiled catalogues of this machine, as the example `catalogues` reads them, with Python's gettext.

    CATALOGUES='/usr/share/locale/*/LC_MESSAGES/*.mo' DUMP=1 cargo run --example catalogues > dump
    python3 oracle/catalogues.py dump

Every message with its context, every plural form, and the form of the numbers 0 to 200 must be equal. Python refuses
whole catalogues whose header is not in their encoding, and guesses at plural forms that do not say `nplurals`, where
gettext itself takes those of English: it is given such headers in ASCII and without plural forms.
"""
import gettext
import io
import json
import re
import struct
import sys

END_OF_TRANSMISSION = "\x04"


def header_place(data):
    """The place and length of the header's text, in a compiled catalogue."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, ids, texts = struct.unpack(order + "III", data[8:20])
    for index in range(count):
        length, _ = struct.unpack_from(order + "II", data, ids + 8 * index)
        if length == 0:
            return struct.unpack_from(order + "II", data, texts + 8 * index)
    return 0, 0


def read(path):
    """What Python reads, and whether the header had to be mended for it."""
    with open(path, "rb") as file:
        data = file.read()
    length, start = header_place(data)
    header = bytes(byte if byte < 128 else 63 for byte in data[start:start + length])
    header = re.sub(rb"Plural-Forms:(?!.*nplurals *= *\d)", b"Xlural-Forms:", header)
    if b"Xlural" not in header:
        try:
            return gettext.GNUTranslations(io.BytesIO(data)), False
        except UnicodeDecodeError:
            pass
    data = data[:start] + header + data[start + length:]
    return gettext.GNUTranslations(io.BytesIO(data)), True


def ours(entries):
    """The same as Python keeps it: contexts before messages, a number behind those with plural forms."""
    table = {}
    for context, message, plural, texts in entries:
        key = message if context is None else context + END_OF_TRANSMISSION + message
        if plural is None:
            table[key] = texts[0]
        else:
            table.update({(key, form): text for form, text in enumerate(texts)})
    return table


def main():
    catalogues = messages = mended = differences = 0
    languages, refused = set(), []
    for line in open(sys.argv[1], encoding="utf-8"):
        dumped = json.loads(line)
        path = dumped["path"]
        try:
            theirs, was_mended = read(path)
        except Exception as error:
            refused.append((path, repr(error)[:200], dumped.get("error", f"{len(dumped.get('entries', []))} messages")))
            continue
        catalogues += 1
        mended += was_mended
        languages.add(re.sub(r".*/([^/]*)/LC_MESSAGES/.*", r"\1", path))
        if "error" in dumped:
            differences += 1
            print(f"{path}: {dumped['error']}")
            continue
        expected = {key: text for key, text in theirs._catalog.items() if key != ""}
        found = ours(dumped["entries"])
        messages += len(found)
        if expected != found:
            differences += 1
            wrong = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
            print(f"{path}: {len(wrong)} messages differ, {dumped['undecoded']} not decoded:",
                  [(key, expected.get(key), found.get(key)) for key in wrong[:2]])
        plural = [theirs.plural(number) for number in range(201)]
        if plural != dumped["plurals"]:
            differences += 1
            print(f"{path}: plural forms differ: {plural[:12]} {dumped['plurals'][:12]}")
    print(f"{catalogues} catalogues ({mended} with a mended header), {messages} texts, {len(languages)} languages,"
          f" {differences} differences")
    for path, theirs, our in refused:
        print(f"Python refuses {path}: {theirs}; here: {our}")
    return differences > 0


sys.exit(main())

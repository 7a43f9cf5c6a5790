"""Small files: whatever is at a path, reading it ends, and a refusal is one sentence that names the file."""

import os

import pytest

from llmpar import files

DEEP = "[" * 100_000
READ = {"json": files.read_json, "jsonl": files.read_json_lines, "toml": files.read_toml}


@pytest.mark.parametrize(
    ("form", "text", "said"),
    [
        ("json", "{", "it is no JSON: Expecting property name"),
        ("json", "", "it is no JSON: Expecting value"),
        ("json", "[1]", r"it holds \[1\], not an object"),
        ("json", "null", "it holds null, not an object"),
        ("json", DEEP, "it is nested too deeply"),
        ("json", '{"a": ' + "9" * 5000 + "}", "it holds a number of too many digits"),
        ("jsonl", '{"a": 1}\n\n{"a"', "it is no JSON in line 3: Expecting"),
        ("jsonl", "1", "it holds 1, not an object"),
        ("jsonl", DEEP, "it is nested too deeply"),
        ("toml", "a = ", "it is no TOML: "),
        ("toml", "a = " + DEEP, "it is nested too deeply"),
        ("toml", "a = " + "9" * 5000, "it holds a number of too many digits"),
        (
            "toml",
            'name = "M\xfcnchen"'.encode("latin-1"),
            "it is not UTF-8 text: byte 0xfc at offset 9; save",
        ),
        ("json", "{}".encode("utf-16"), "it is not UTF-8 text: byte 0xff at offset 0"),
        ("json", b" " * (files.SMALL_FILE_BYTES + 1), "it has more than 16 MiB"),
    ],
)
def test_what_is_no_such_file_is_refused_in_a_sentence(tmp_path, form, text, said):
    path = tmp_path / "given"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"^cannot read the site file '{path}': {said}") as caught:
        READ[form](path, "site file")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300 and caught.value.__cause__ is None


def test_what_is_no_ordinary_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, said in (
        (tmp_path / "pipe", "a pipe or a device"),
        ("/dev/zero", "a pipe or a device"),
        (tmp_path, "it is a folder"),
        (tmp_path / "none", "No such file"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("a\0b", "no name of a file"),
    ):
        with pytest.raises(ValueError, match=said):
            files.read_text(name, "site file")


def test_what_is_one_is_read(tmp_path):
    path = tmp_path / "given"
    path.write_bytes('\ufeff{"a": [1, {"\u00fc": null}]}\r\n'.encode())
    assert files.read_json(path, "x") == {"a": [1, {"\u00fc": None}]}
    path.write_text('{"a": "\u2028"}\r\n\n{"a": 2}')
    assert [x["a"] for x in files.read_json_lines(path, "x")] == ["\u2028", 2]
    path.write_text("[a]\nb = 1\n")
    assert files.read_toml(path, "x") == {"a": {"b": 1}}
    path.write_text("[" * 90 + "]" * 90)
    assert files.read_json(path, "x", list)

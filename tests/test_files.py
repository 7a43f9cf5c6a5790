"""Small files: whatever is at a path, reading it ends, and a refusal is one sentence that names the file."""

import pytest

from llmpar import files


def test_what_has_no_name_of_a_file_is_refused(tmp_path):
    """What else is no small file is in bad_inputs.toml."""
    for name, said in ((tmp_path / ("x" * 300), "File name too long"), ("a\0b", "no name of a file")):
        with pytest.raises(ValueError, match=f"^cannot read the site file .*{said}") as caught:
            files.read_text(name, "site file")
        assert caught.value.__cause__ is None


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

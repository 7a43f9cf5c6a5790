"""Read numbers that people write in words: sixty-three, three quarters, 20 days 15 hours."""

import re

_ONES = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
        " fifteen sixteen seventeen eighteen nineteen".split(),
        range(20),
        strict=True,
    )
)
_TENS = {
    word: 10 * i
    for i, word in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)
}
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_PARTS = "half third quarter fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
_ONE, _TEN, _SCALE = (rf"(?:{'|'.join(words)})\b" for words in (_ONES, _TENS, _SCALES))
_BELOW = rf"(?:{_TEN}(?:[- ]{_ONE})?|{_ONE})"
_COUNT = rf"\b(?:{_BELOW}|an?(?= {_SCALE}))(?:(?: {_SCALE})+(?: (?:and )?{_BELOW})?)*"
_FRACTION = rf"\b(?:(\d+)[ -]|an? |(?=half))({'|'.join(_PARTS)}|halve)s?\b"
NEXT_UNIT = r"(?<=[a-zA-Z])(?:,? and |, | |)(?=\d)"
"""What stands between a number with its unit and the next one, as in "20 days 15 hours"."""
_OTHERS = {"none": "0", "nothing": "0", "once": "1", "twice": "2", "double": "2", "first": "0"}


def in_figures(text: str) -> str:
    """Write the numbers in a text with figures: "three quarters" as 3/4, "the 4th" as 4, "1 in 4" as 1/4."""
    text = re.sub(_COUNT, lambda words: str(_counted(words[0].lower())), text, flags=re.I)
    text = re.sub(_FRACTION, _quotient, text, flags=re.I)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", "", text)
    text = re.sub(r"^(\d+) (?:in|of|out of) (\d+)$", r"\1/\2", text)
    plain = re.sub(r"(?<=twice|ouble) (?:as (?:long|much|many)|the \w+)$", "", text.lower())
    return _OTHERS.get(plain, text)


def _quotient(match: re.Match) -> str:
    """Return "3/4" for three quarters."""
    count, name = match.groups()
    name = re.sub("halve$", "half", name.lower().removesuffix("s"))
    return f"{count or 1}/{_PARTS.index(name) + 2}"


def _counted(words: str) -> int:
    """Return the number that words such as "two thousand and sixty-three" stand for."""
    total = below = 0
    for word in re.findall(r"[a-z]+", words):
        if word in ("thousand", "million"):
            total += (below or 1) * _SCALES[word]
            below = 0
        elif word == "hundred":
            below = (below or 1) * 100
        else:
            below += _ONES.get(word, 0) + _TENS.get(word, 0)
    return total + below

"""Two readings of a response's words: style or task tokens, and phrases of reflection (NSD, Appendix E and 1.7).

The paper's operator set is garbled in the copy we have, and its word lists are given by example: the lists here are our
filling in. The first rule that matches decides.
"""

from __future__ import annotations

import re
import unicodedata

STYLE, TASK, NEUTRAL = "style", "task", "neutral"

_TASK_SIGN = re.compile(r"[0-9]|[+*/=<>≤≥≠≈±×÷∑∏∫√∞%^_$]|\\[a-zA-Z]+|\\\\|(?<=\s)-(?=\s)|^\s*-\s*$|-(?=\d)")
MATHS = """
mod prime primes factor factors gcd lcm log ln sin cos tan cot sec csc arcsin arccos arctan exp integral sqrt boxed
frac sum prod alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau
upsilon phi chi psi omega infty leq geq neq cdot times div
"""
# Connectives, hedges and scaffolding; then the closed classes.
DISCOURSE = """
so then thus hence therefore because since but however although though while whereas moreover furthermore also besides
instead otherwise next first second third finally now well okay ok let lets us note notice recall consider suppose
assume maybe perhaps possibly probably likely seems seem might may could would should can will must shall wait
actually hmm indeed clearly obviously simply just really quite very rather again still yet already always never often
sometimes here there step steps answer solution problem question final given a an the this that these those i you he
she it we they me him her them my your his its our their who whom whose which what when where why how and or nor if
unless until than as at by for from in into of off on onto out over to up with without within about above across after
against along among around before behind below between beyond down during except inside near outside through toward
under upon am is are was were be been being do does did done have has had having not no yes all any both each either
every few many more most much neither none one only other own same several some such too
"""
_MATHS, _DISCOURSE = frozenset(MATHS.split()), frozenset(DISCOURSE.split())
# NSD's phrases [paper]; how they are matched is not given: whatever the case, whole words, longest first, no overlap.
REFLECTIONS = (
    "wait", "actually", "hmm", "let me reconsider", "let me rethink", "let me check", "let me verify",
    "i made an error", "i made a mistake", "that's wrong", "that is wrong", "incorrect", "reconsider", "rethink",
    "re-examine", "double check", "double-check", "going back", "revisit", "on second thought",
)  # fmt: skip
_REFLECTION = re.compile(
    r"(?<!\w)(?:" + "|".join(re.escape(one) for one in sorted(REFLECTIONS, key=len, reverse=True)) + r")(?!\w)",
    re.IGNORECASE,
)


def token_class(piece: str) -> str:
    """`style`, `task` or `neutral`, of one token's text. The first rule that matches decides (NSD, Appendix E).

    >>> [token_class(piece) for piece in (" ", "42", "\\\\frac", " gcd", ",", " therefore", " apples")]
    ['style', 'task', 'task', 'task', 'style', 'style', 'neutral']
    """
    word = piece.strip()
    if not word:
        return STYLE
    if _TASK_SIGN.search(piece):
        return TASK
    lower = word.lower()
    if lower in _MATHS:
        return TASK
    if "\n" in piece or all(unicodedata.category(character)[0] == "P" for character in word):
        return STYLE
    return STYLE if lower in _DISCOURSE else NEUTRAL


def count_reflections(text: str) -> int:
    """How many phrases of reflection a response holds.

    >>> count_reflections("Wait, let me check: that's wrong. Await.")
    3
    """
    return len(_REFLECTION.findall(text.replace("\u2019", "'")))

"""Alignment of a student's tokens with a teacher's: ours beside a plain walk and beside a walk over decoded strings.

Run as a script: prints table lines. The references are ours: two pointers over end offsets in plain Python, and, as
TRL's GOLD trainer does in idea, both sides' text collected until it is the same. All three must find the same units.
Texts are Python modules cut into responses; the student's tokens are SmolLM2's, the teacher's Mistral's tekken.
"""

from __future__ import annotations

import statistics
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESPONSES, BYTES, ROUNDS, BAR = 50, 20_000, 5, 1.0


def plain_walk(student, teacher):
    """The unit of each student token: the side that is behind moves on; where both end at one byte, a unit closes."""
    units, number, i, j, at_student, at_teacher = [], 0, 0, 0, 0, 0
    while i < len(student):
        units.append(number)
        at_student += len(student[i])
        i += 1
        while at_teacher < at_student and j < len(teacher):
            at_teacher += len(teacher[j])
            j += 1
        number += at_teacher == at_student
    return units


def string_walk(student, teacher):
    """The same by comparing what both sides have collected since the last unit."""
    units, number, i, j, mine, other = [], 0, 0, 0, b"", b""
    while i < len(student) or j < len(teacher):
        if len(mine) <= len(other):
            mine += student[i]
            units.append(number)
            i += 1
        else:
            other += teacher[j]
            j += 1
        if mine == other:
            mine, other, number = b"", b"", number + 1
    return units


def responses() -> list[str]:
    """Texts of our own and of the standard library's modules, each of so many characters."""
    files = sorted([*ROOT.glob("core/*/*.py"), *Path(sysconfig.get_path("stdlib")).glob("*.py")])
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return [text[k * BYTES : (k + 1) * BYTES] for k in range(RESPONSES)]


def megabytes_a_second(size: int, function) -> float:
    """The median of several rounds, after one to warm up."""
    function()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return size / 1e6 / statistics.median(seconds)


def main() -> None:
    """Prints the lines."""
    import mistral_common

    from strop.core.distill.alignment import align
    from strop.core.distill.retokenize import Retokenizer, encode_text
    from strop.core.models.load import load_tokenizer, resolve_model
    from strop.core.models.tokens import Tokenizer

    done = subprocess.run(
        ["bash", ROOT / "examples/quickstart/get_model.sh"], capture_output=True, text=True, check=True
    )
    student = load_tokenizer(resolve_model(done.stdout.strip()))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text('{"model_type": "mistral"}')
        data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
        (Path(folder) / "tekken.json").symlink_to(data)
        teacher = Tokenizer.from_folder(Path(folder))
    reader = Retokenizer(student, teacher)
    sampled = [encode_text(student, text) for text in responses()]
    pairs = [(both.student_T, both.teacher_S) for both in map(reader, sampled)]
    size = sum(len(b"".join(pieces)) for pieces, _ in pairs)
    for pieces in pairs:
        expected = plain_walk(*pieces)
        if not align(*pieces).unit_T.tolist() == expected == string_walk(*pieces):
            raise SystemExit("alignment: differs from the references")
    ours, plain, strings = (
        megabytes_a_second(size, lambda function=function: [function(*pieces) for pieces in pairs])
        for function in (align, plain_walk, string_walk)
    )
    print(
        f"| alignment, {RESPONSES} responses of {BYTES // 1000} kB | {ours:.1f} MB/s | plain walk {plain:.1f}, "
        f"collected strings {strings:.1f} MB/s | {BAR:.0f} MB/s | {'ok' if ours >= BAR else 'MISSED'} |"
    )

    def whole(ids):
        both = reader(ids)
        return align(both.student_T, both.teacher_S, ends=both.ends)

    end_to_end = megabytes_a_second(size, lambda: [whole(ids) for ids in sampled])
    encoding = megabytes_a_second(size, lambda: [encode_text(teacher, text) for text in responses()])
    print(
        f"| the same from sampled ids, teacher's encoding included | {end_to_end:.1f} MB/s | the encoding alone "
        f"{encoding:.1f} MB/s | {BAR:.0f} MB/s | {'ok' if end_to_end >= BAR else 'MISSED'} |"
    )


if __name__ == "__main__":
    main()

"""Stop strings and the end of an output."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.engine.messages import SamplingParams
from remora.deployments.engine.output import OutputText
from remora.deployments.engine.stop import StopText

TEXTS = st.text("ab-", max_size=20)
STOPS = st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete; of two, the longer one began earlier."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.booleans(), st.data())
def test_a_stop_string_is_found_however_the_text_is_cut(text, stops, include, data) -> None:
    stopper = StopText(stops, include_in_output=include)
    out, found, rest = "", None, text
    while rest and found is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        said, found = stopper.push(piece)
        out += said
        expected, _ = reference(text, stops, include)
        assert expected.startswith(out), "text left that is part of a stop string"
    if found is None:
        out += stopper.flush()
    assert (out, found) == reference(text, stops, include)


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    stopper = StopText(["</end>"])
    assert stopper.push("hello <") == ("hello ", None)
    assert stopper.push("/e") == ("", None)
    assert stopper.push("x") == ("</ex", None)
    assert stopper.push("</end") == ("", None)
    assert stopper.push(">tail") == ("", "</end>")


def test_a_match_that_ends_before_it_may_stop_is_ignored_and_a_later_one_is_not() -> None:
    stopper = StopText(["aa"])
    assert stopper.push("xaa", may_stop=False) == ("xa", None)
    assert stopper.push("b") == ("ab", None)
    assert stopper.push("aa") == ("", "aa")


class Letters:
    """A detokenizer whose tokens are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def say(text: str, params: SamplingParams, *, max_tokens: int = 100) -> tuple[str, str | None, str | int | None]:
    output = OutputText(Letters(), params, eos_token_ids=(ord("$"),), max_tokens=max_tokens)
    said = ""
    for character in text:
        step = output.push(ord(character))
        said += step.text
        if step.finish_reason is not None:
            return said, step.finish_reason, step.stop_reason
    return said, None, None


def test_eos_ends_without_its_text_and_releases_what_was_held_back() -> None:
    assert say("abEN$xyz", SamplingParams(stop=("END",))) == ("abEN", "stop", None)


def test_ignored_eos_is_text() -> None:
    assert say("ab$c", SamplingParams(ignore_eos=True)) == ("ab$c", None, None)


def test_a_stop_token_id_is_named_as_the_reason() -> None:
    assert say("abc", SamplingParams(stop_token_ids=(ord("b"),))) == ("a", "stop", ord("b"))
    included = SamplingParams(stop_token_ids=(ord("b"),), include_stop_str_in_output=True)
    assert say("abc", included) == ("ab", "stop", ord("b"))


def test_the_last_allowed_token_ends_with_length_and_held_text_comes_out() -> None:
    assert say("abEN", SamplingParams(stop=("END",)), max_tokens=4) == ("abEN", "length", None)


def test_a_stop_string_at_the_last_allowed_token_wins_over_length() -> None:
    assert say("abEND", SamplingParams(stop=("END",)), max_tokens=5) == ("ab", "stop", "END")


def test_stop_strings_count_only_behind_min_tokens() -> None:
    assert say("aXbX", SamplingParams(stop=("X",), min_tokens=2)) == ("aXb", "stop", "X")


def test_the_included_stop_string_is_the_end_of_the_text() -> None:
    assert say("abENDx", SamplingParams(stop=("END",), include_stop_str_in_output=True)) == ("abEND", "stop", "END")


def test_an_ignored_match_inside_held_text_stays_ignored() -> None:
    stopper = StopText(["abcx", "b"])
    assert stopper.push("abc", may_stop=False) == ("", None)
    assert stopper.push("z") == ("abcz", None)

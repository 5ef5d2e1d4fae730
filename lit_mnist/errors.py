"""Errors that one line explains, so that the command line can show them without a traceback."""

import difflib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """What was asked for cannot work. The message names the key, the value and what would work. Exit status 2."""


class RunError(RuntimeError):
    """The run cannot go on, and one line says why (a full disk, a damaged file). Exit status 1."""


class FinishedError(Exception):
    """The command has come to its end, and has said all there is to say.

    Args:
        status: Exit status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


def complain(message: str, kind: str = "error") -> None:
    """Print one line on stderr; nothing, if the message is empty."""
    if message:
        print(f"lit-mnist: {kind}: {' '.join(message.split())}", file=sys.stderr, flush=True)


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Whatever fails in here does so by what the user asked for: the exception becomes a `UserError`."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        name = "" if " " in str(error) and not isinstance(error, KeyError | AttributeError) else type(error).__name__
        raise UserError(one_line(f"{name}: {error}" if name else str(error))) from error


def is_lightnings(error: BaseException) -> bool:
    """Whether Lightning's own code raised it: what it says there is meant for the person who set the options."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return str(module).startswith(("lightning.pytorch.", "lightning.fabric."))


def one_line(message: str, keys: Iterable[str] = ()) -> str:
    """What a parser's message of many lines says, in one: the key, the value, what would work.

    Args:
        message: Of jsonargparse, or of any exception.
        keys: Options that exist, to suggest one for an unknown key.
    """
    unknown = re.search(r"unrecognized arguments: --(\S+)|[Oo]ption '(\S+)'", message)
    if unknown:
        key = (unknown[1] or unknown[2]).split("=")[0]
        close = difflib.get_close_matches(key, keys, n=1)
        return f"unknown option {key}; " + (f"did you mean {close[0]}?" if close else "--help lists the options")
    message = re.sub(r'^Parser key "([^"]+)":\s*', r"\1: ", message)
    key = re.match(r"[\w.]+(?=: )", message)
    given = re.search(r"(?:Given value|Got value|import path string): (.*)", message)
    where = f"{key[0]}={given[1]}: " if key and given else ""
    problem = re.search(r"Problem with given class_path '[^']+':\s*(?:- )?(.*)|callable class: (.*?)\. Got", message)
    if problem:
        return where + _hinted(problem[1] or problem[2])
    reasons = re.findall(r"^\s*- ((?!Expected|Does not validate).*)", message, re.MULTILINE)
    if reasons:
        return where + _hinted(reasons[0])
    kinds = re.findall(r"Expected an? (?!path)(.*?)(?:\. Got value.*)?$", message, re.MULTILINE)
    if where and kinds:
        return f"{where}expected {' or '.join(dict.fromkeys(map(_kind, kinds)))}"
    return _hinted(message)


def _hinted(reason: str) -> str:
    return f"{reason}; is the folder it is in on PYTHONPATH?" if "No module named" in reason else reason


def _kind(expected: str) -> str:
    """A type as the parser names it, in words."""
    if expected.startswith("dot import path"):
        return "a class path"
    name = re.sub(r"<class '(.*)'>", r"\1", expected)
    return {"NoneType": "null"}.get(name, name.removeprefix("typing.").removeprefix("collections.abc."))

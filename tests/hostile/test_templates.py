"""Templates that mean harm: each ends in an error within two seconds, and the one who asked goes on.

Here they may take as long as they like where something else than time is to end them; test-all measures it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import SecurityError

from hetrun.errors import TemplateError
from hetrun.system.sandbox import child
from hetrun.text.chat import ChatTemplate, limits, sandbox_process as processes
from hetrun.text.chat.jinja_sandbox import compiled, rendered
from hetrun.text.chat.renderer import TemplateWorker
from hetrun.text.chat.template import CHATML, MOST_SOURCE
from tests.support.limits import Within
from tests.support.tiers import exhaustive

HI = [{"role": "user", "content": "Hi"}]
WITHIN_S = 2.0
PATIENCE_S = 20.0

LONG = "it computes for more than 0.5 s"
LARGE = "it takes more than 192 MiB of memory"
DEEP = "it calls itself without an end, or is nested too deeply"
FORBIDDEN = "forbidden in a template"
MUCH = "it writes more than 1,04"

Row = tuple[str, str | tuple[str, ...]]  # the template, and what is said of it: one of several, by machine

EMPTY_LOOP = "{% for j in range(99999) %}{% endfor %}"

LOOPS: dict[str, Row] = {
    "nested": ("{% for i in range(99999) %}" + EMPTY_LOOP + "{% endfor %}", LONG),
    "nested, and it writes": ("{% for i in range(99999) %}x" + EMPTY_LOOP + "{% endfor %}", LONG),
    "range of a billion": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "1e5 times 1e5": ("{% for i in range(10**5) %}{% for i in range(10**5) %}{% endfor %}{% endfor %}", LONG),
    "recursive": ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", DEEP),
    "recursive and wide": (
        "{% for i in range(999) recursive %}{% if loop.depth < 9 %}{{ loop(range(999)) }}{% endif %}"
        "{% endfor %}",
        LONG,
    ),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}", DEEP),
    "two macros": (
        "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ g() }}",
        DEEP,
    ),
    "a tree of macros": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(20) }}",
        LONG,
    ),
    "caller": ("{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}"
               "{% call f() %}{% endcall %}", DEEP),
    "a block in itself": ("{% block a %}{{ self.a() }}{% endblock %}", DEEP),
    "lazy filters": (
        "{{ range(99999) | map('string') | map('list') | map('join') | sum(start=0) }}",
        "TypeError",
    ),
    "generators of generators": (
        "{% set n = namespace(x=range(99999)) %}{% for i in range(99999) %}"
        "{% set n.x = n.x | map('string') %}{% endfor %}{{ n.x | list }}",
        (LONG, LARGE, DEEP),
    ),
    "a list of itself, over and over": (
        "{% set n = namespace(x=[1]) %}{% for i in range(99999) %}{% set n.x = n.x + n.x %}{% endfor %}",
        (LARGE, LONG),
    ),
    "sorted, unique, grouped": (
        "{% for i in range(9999) %}{{ range(99999) | sort(reverse=true) | unique | groupby('real')"
        " | length }}{% endfor %}",
        LONG,
    ),
    "a cycler": ("{% set c = cycler('a') %}{% for i in range(99999) %}{% for i in range(999) %}"
                 "{% set x = c.next() %}{% endfor %}{% endfor %}", LONG),
}  # fmt: skip
MEMORY: dict[str, Row] = {
    "repeated": ("a\n{{ 'a' * 10**10 }}", LARGE),
    "repeated from the left": ("{{ 10**10 * 'a' }}", LARGE),
    "a list repeated": ("{{ [1] * 10**10 }}", LARGE),
    "doubled by joining": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        LARGE,
    ),
    "doubled by adding": (
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        LARGE,
    ),
    "slowly": (
        "{% set n = namespace(x=[]) %}{% for i in range(99999) %}"
        "{% set n.x = [n.x, 'a' * (i + 9999)] %}{% endfor %}{{ n.x | length }}",
        LARGE,
    ),
    "a variable of many": (
        "{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaa' }}{% endfor %}",
        MUCH,
    ),
    "lorem ipsum": ("{{ lipsum(99999, max=9999) }}", "'lipsum' is undefined"),
    "center": ("{{ 'a' | center(10**9) }}", LARGE),
    "format with a width": ("{{ '%999999999d' | format(1) }}", LARGE),
    "str.format with a width": ("{{ '{:>999999999}'.format(1) }}", LARGE),
    "percent with a width": ("{{ '%0*d' % (10**9, 1) }}", LARGE),
    "ljust": ("{{ 'a'.ljust(10**9) }}", LARGE),
    "zfill": ("{{ 'a'.zfill(10**9) }}", LARGE),
    "expandtabs": ("{{ '\\t'.expandtabs(10**9) }}", LARGE),
    "indent": ("{{ ('a\\n' * 99999) | indent(99999) }}", (LARGE, LONG)),
    "batch": ("{{ [1] | batch(10**9, 'x') | list }}", LARGE),
    "slice": ("{{ [1] | slice(10**9) | list | length }}", (LARGE, LONG)),
    "tojson with an indent": ("{{ {'a': 1} | tojson(indent=10**9) }}", LARGE),
    "join": ("{{ range(99999) | join('a' * 99999) }}", LARGE),
    "replace": ("{{ ('a' * 99999) | replace('a', 'b' * 99999) }}", LARGE),
    "str.join": ("{{ ('a' * 99999).join('b' * 99999) }}", LARGE),
    "split": ("{{ ('ab ' * 10**7).split() | length }}", (LARGE, LONG)),
    "translate": ("{{ ('a' * 10**6).translate({97: 'b' * 9999}) }}", LARGE),
    "a slice of much": ("{{ ('a' * 10**8)[::-1] * 9 }}", (LARGE, LONG)),
    "huge indices": ("{{ messages[10**30:] }}{{ 'a'[:10**30:10**30] * 10**9 }}", LARGE),
    "a tuple of tuples": (
        "{% set n = namespace(x=(1, 2)) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
        LARGE,
    ),
    "a dict of many": ("{{ dict.fromkeys(range(99999)) | length * 0 }}{{ dict(x='a' * 10**9) }}", LARGE),
    "an error as long": ("{{ raise_exception('a' * 10**9) }}", LARGE),
    "a long error": ("{{ raise_exception('a' * 10**7) }}", "refuses these messages: aaaa"),
}
NUMBERS: dict[str, Row] = {
    "a power": ("{{ 10 ** (10 ** 10) }}", (LONG, LARGE)),
    "a power of what is given": ("{{ (messages | length + 9) ** (10 ** 10) }}", (LONG, LARGE)),
    "squares": (
        "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
        (LONG, LARGE),
    ),
    "as text": ("{{ 10 ** 100000 }}", "ValueError: Exceeds the limit"),
    "from text": ("{{ '9' * 10**6 + 0 }}", "TypeError"),
    "int of a long text": ("{{ 1 // ('9' * 10**6) | int }}", "ZeroDivisionError"),
    "a float too large": ("{{ 10 ** 400 * 1.5 }}", "int too large to convert to float"),
    "a shift": ("{{ 1 << 10**10 }}", ", line 1: "),
}
QUADRATIC: dict[str, Row] = {
    "urlize": ("{{ ('www.' * 10**6) | urlize }}", (LONG, MUCH, LARGE)),
    "striptags": ("{% for i in range(99999) %}"
                  "{{ ('<a>' * (i + 10**5)) | striptags | length }}{% endfor %}", LONG),
    "wordwrap": ("{{ ('a ' * 10**6) | wordwrap(3) }}", (LONG, MUCH, LARGE)),
    "wordwrap of nothing": ("{{ 'a b' | wordwrap(0) }}", "ValueError"),
    "truncate": ("{% for i in range(99999) %}{{ ('a ' * (i + 10**6)) | truncate(10**6) | length }}"
                 "{% endfor %}", LONG),
    "sum of lists": ("{{ range(99999) | map('list') | sum(start=[]) }}", "TypeError"),
    "lists summed": ("{% set x = [[1]] * 99999 %}{{ x | sum(start=[]) | length }}", LONG),
    "find": ("{% for i in range(99999) %}{{ ('a' * (i + 10**6)).find('a' * 9999 + 'b') }}{% endfor %}", LONG),
    "in": ("{% for i in range(99999) %}{{ 'x' in range(99999) | list }}{% endfor %}", (LONG, MUCH)),
    "title": ("{% for i in range(99999) %}{{ ('a ' * (i + 10**6)) | title | wordcount }}{% endfor %}", LONG),
    "escapes": ("{% for i in range(99999) %}{{ ('<' * (i + 10**6)) | e | length }}{% endfor %}", LONG),
}  # fmt: skip
WALKS = {
    "a class": "{{ ''.__class__ }}",
    "a class by subscript": "{{ ''['__class__'] }}",
    "a class by attr": "{{ '' | attr('__class__') }}",
    "a class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "a class by sort": "{{ ['', 'a'] | sort(attribute='__class__') }}",
    "a class by format": "{{ '{0.__class__}'.format('') }}",
    "a class by format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "a format out of its string": "{{ ('{0.__class__}' | attr('format'))('') }}",
    "a name in pieces": "{{ '' | attr('__cla' ~ 'ss__') }}",
    "bases": "{{ messages.__class__.__base__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "code of a function": "{{ strftime_now.__code__ }}",
    "globals of a class": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of joiner": "{{ joiner.__init__.__globals__ }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "the class of dict": "{{ dict.__class__ }}",
    "itself": "{{ self.__init__.__globals__ }}",
    "a macro's function": "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "a generator's frame": "{% set g = [1] | map('string') %}{{ g.gi_frame.f_globals }}",
    "the loop's own": "{% for i in [1] %}{{ loop._iterable }}{% endfor %}",
    "an undefined's own": "{{ nothing._undefined_exception }}",
    "a name in a namespace": "{% set n = namespace(__class__=1) %}",
    "a name set in a namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
}
TRICKS: dict[str, Row] = {
    "include": ("{% include 'x' %}", "no loader"),
    "include of a file": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "from": ("{% from 'os' import system %}", "no loader"),
    "extends": ("{% extends 'x' %}", "no loader"),
    "globals of lipsum": ("{{ lipsum.__globals__['os'] }}", "'lipsum' is undefined"),
    "open": ("{{ open('/etc/passwd') }}", "'open' is undefined"),
    "an import of Python's": ("{{ __import__('os') }}", "'__import__' is undefined"),
    "append": ("{{ messages.append(1) }}", FORBIDDEN),
    "update": ("{{ messages[0].update(role='x') }}", FORBIDDEN),
    "clear": ("{{ messages[0].clear() }}", FORBIDDEN),
    "raise_exception": ("{{ raise_exception('no') }}", "the template refuses these messages: no;"),
    "a wrong raise_exception": ("{{ raise_exception() }}", "TypeError"),
    "undefined": ("{{ a.b.c }}", "'a' is undefined"),
    "undefined called": ("{{ a() }}", "'a' is undefined"),
    "a date of ten million digits": ("{{ strftime_now('%9999999d') * 0 + 1 / 0 }}", ""),
    "a date that is no text": ("{{ strftime_now('\\ud800') }}", ", line 1: "),
    "a date of NUL": ("{{ strftime_now('%d\\0') + 1 }}", ", line 1: "),
    "half a character": ("{{ '\\ud800' }}", "it writes U+D800, half of a character"),
    "codecs": ("{{ 'a'.encode('idna_nothing') }}", ", line 1: "),
    "a cycler without items": ("{{ cycler() }}", "at least one item"),
    "joiner called wrongly": ("{{ joiner(1, 2, 3) }}", "TypeError"),
    "the order of dict": ("{{ dict.mro() }}", "has no attribute 'mro'"),
    "namespace of a number": ("{{ namespace(1) }}", "TypeError"),
    "dict of a number": ("{{ dict(1) }}", "TypeError"),
    "sorted kinds": ("{{ [1, 'a'] | sort }}", "TypeError"),
    "no such filter": ("{{ 1 | nothing }}", "No filter named 'nothing'"),
    "no such tag": ("{% nothing %}", "unknown tag 'nothing'"),
    "not closed": ("{% if x %}", "Unexpected end of template"),
    "a stray end": ("{% endfor %}", "unknown tag 'endfor'"),
    "parentheses": ("{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}", DEEP),
    "lists": ("{{ " + "[" * 30_000 + "]" * 30_000 + " }}", DEEP),
    "lists that Python nests": ("{{ " + "[" * 150 + "x" + "]" * 150 + ".a.b }}", DEEP),
    "blocks": ("{% if true %}\n" * 3000 + "x" + "{% endif %}" * 3000, (DEEP, LONG)),
    "loops in loops": ("{% for i in [1] %}" * 40 + "{{ 1 / 0 }}" + "{% endfor %}" * 40, ": "),
    "a long sum": ("{{ 1" + " + 1" * 30_000 + " }}", (DEEP, LONG)),
    "a chain of filters": ("{{ 1" + " | string" * 12_000 + " }}", (DEEP, LONG)),
    "a megabyte": ("{{ " + "(" * (1 << 20), f"longer than {MOST_SOURCE:,} characters"),
    "text as long as it may be, a thousand times": (
        "{% for i in range(1000) %}" + "x" * (MOST_SOURCE - 50) + "{% endfor %}",
        MUCH,
    ),
    "constants that are folded": ("{{ " + " ~ ".join(["'a' * 10**7"] * 99) + " }}", (LARGE, LONG)),
}
KINDS = {"loops": LOOPS, "memory": MEMORY, "numbers": NUMBERS, "quadratic": QUADRATIC, "tricks": TRICKS}
ALL: dict[str, Row] = {
    f"{kind}: {name}": row for kind, rows in KINDS.items() for name, row in rows.items()
} | {f"walks: {name}": (source, FORBIDDEN) for name, source in WALKS.items()}


@pytest.fixture(scope="module")
def honest() -> Iterator[TemplateWorker]:
    with TemplateWorker(ChatTemplate(CHATML, "honest")) as worker:
        yield worker


# Each has a process of its own and may take half a second; these few are for every day.
DAILY = {
    *("loops: nested", "loops: a macro that calls itself", "memory: repeated", "memory: slowly"),
    *("numbers: a power", "numbers: as text", "quadratic: urlize", "quadratic: title"),
    *("walks: a class", "walks: globals of a class", "walks: a name set in a namespace"),
    *("tricks: include", "tricks: append", "tricks: raise_exception", "tricks: parentheses"),
    *("tricks: not closed", "tricks: half a character", "tricks: no such filter", "tricks: a megabyte"),
    *("tricks: text as long as it may be, a thousand times", "tricks: constants that are folded"),
    *("tricks: lists that Python nests", "tricks: a date of NUL", "memory: a long error"),
}
CASES = [pytest.param(name, marks=() if name in DAILY else exhaustive) for name in ALL]
assert ALL.keys() > DAILY


@pytest.mark.parametrize("source", WALKS.values(), ids=WALKS)
def test_the_sandbox_has_no_way_out(source: str) -> None:
    """Without a process around it."""
    with pytest.raises(SecurityError):
        rendered(compiled(source), {"messages": HI}, 1000)


def refusal(source: str) -> str:
    """What is said of a template."""
    with (
        TemplateWorker(ChatTemplate(source, "a stranger's")) as worker,
        pytest.raises(TemplateError) as caught,
    ):
        worker.render(HI)
    return str(caught.value)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine does not make anything take too long."""
    monkeypatch.setattr(limits, "CPU_S", PATIENCE_S)
    patience = f"from hetrun.text.chat import limits; limits.CPU_S = {PATIENCE_S}; "
    monkeypatch.setattr(processes, "CHILD", patience + processes.CHILD)


@pytest.mark.parametrize("name", CASES)
def test_harm_is_an_error(name: str, honest: TemplateWorker, request: pytest.FixtureRequest) -> None:
    source, reasons = ALL[name]
    if LONG not in reasons:
        request.getfixturevalue("patient")
    said = refusal(source)
    assert said.startswith("a stranger's")
    assert said.endswith("; use another with --chat-template FILE")
    assert "\n" not in said
    assert len(said) < 800
    assert any(reason in said for reason in ([reasons] if isinstance(reasons, str) else reasons)), said
    assert honest.render(HI) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


# Of time: on a machine that does other things meanwhile, some take longer, or end of something else.
@pytest.mark.alone
@pytest.mark.parametrize("name", ALL)
def test_harm_is_an_error_in_time(name: str) -> None:
    source, reasons = ALL[name]
    began = time.monotonic()
    said = refusal(source)
    assert time.monotonic() - began < WITHIN_S
    assert any(reason in said for reason in ([reasons] if isinstance(reasons, str) else reasons)), said


# --- the process itself


def test_killed_from_outside_while_it_renders(patient: None) -> None:
    source = (
        "{% if messages | length > 1 %}{% for i in range(99999) %}" + EMPTY_LOOP + "{% endfor %}{% endif %}ok"
    )
    with TemplateWorker(ChatTemplate(source, "x")) as worker:
        assert worker.render(HI) == "ok"
        pid = worker.pid
        assert pid
        killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(
            TemplateError,
            match=r"x: its process was killed \(SIGKILL\), .*; use another",
        ):
            worker.render([*HI, *HI])
        assert worker.render(HI) == "ok"
        assert worker.pid != pid


def test_stopped_from_outside(within: Within) -> None:
    """As on a machine that has no time for it: the clock on the wall decides."""
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        worker.check()
        pid = worker.pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with within(WITHIN_S), pytest.raises(TemplateError, match=LONG):
            worker.render(HI)
        assert time.monotonic() - began > 1.0
        assert worker.render(HI)


def test_asked_long_after_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said then is still there to be read."""
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        worker.warm()
        assert worker._kept.child
        assert select.select([worker._kept.child._socket], [], [], 30)[0]
        monkeypatch.setattr(child, "START_S", 0.0)
        assert worker.render(HI)


def impostor(answer: str) -> str:
    """A child that is ready, and answers with some bytes: what a template does that has broken out."""
    return (
        "import socket, struct, json; s = socket.socket(fileno={pipe}); f = s.makefile('rwb', 0); "
        "take = lambda: f.read(struct.unpack('>I', f.read(4))[0]); "
        "give = lambda data: (s.sendall(struct.pack('>I', len(data)) + data)); "
        "take(); give(json.dumps(dict(ready=True)).encode()); take(); " + answer + "; take()"
    )


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("give(b'nonsense')", "sent an unreadable answer"),
        ("give(b'')", "sent an unreadable answer"),
        ("give(b'[]')", "sent an unreadable answer"),
        ("give(b'null')", "sent an unreadable answer"),
        ("give(json.dumps(dict(text=1)).encode())", "sent an unreadable answer"),
        ("give(json.dumps(dict(reason='x')).encode())", "sent an unreadable answer"),
        ("give(json.dumps(dict(reason='x', line='y', over=False)).encode())", "sent an unreadable answer"),
        ("give(json.dumps(dict(text=chr(0xd800))).encode())", "sent an unreadable answer"),
        ("give(json.dumps(dict(text='x' * 2000000)).encode())", "sent an unreadable answer"),
        ("give(b'[' * 100000)", "sent an unreadable answer"),
        ("give(b'9' * 100000)", "sent an unreadable answer"),
        ("give(bytes([0xff] * 100))", "sent an unreadable answer"),
        ("s.sendall(bytes([0xff] * 100))", "sent an unreadable answer"),
        (
            "give(json.dumps(dict(reason=chr(27) + 'x' * 10**6, line=10**9, over=True)).encode())",
            "x: \u241bxxx",
        ),
        ("s.sendall(bytes(3)); raise SystemExit(9)", "exited with code 9"),
        ("f.close(); s.close(); import time; time.sleep(99)", "was killed (SIGKILL)"),
        ("import time; time.sleep(99)", LONG),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed (SIGSEGV)"),
    ],
)
def test_what_comes_back_is_not_believed(
    answer: str, said: str, monkeypatch: pytest.MonkeyPatch, honest: TemplateWorker, within: Within
) -> None:
    with TemplateWorker(ChatTemplate(CHATML, "x")) as worker:
        monkeypatch.setattr(processes, "CHILD", impostor(answer))
        worker.warm()
        monkeypatch.undo()
        with within(WITHIN_S), pytest.raises(TemplateError) as caught:
            worker.render(HI)
        assert said in str(caught.value)
        assert len(str(caught.value)) < 800
        assert worker.render(HI) == honest.render(HI)


def test_many_ask_while_one_template_does_harm(honest: TemplateWorker) -> None:
    source = "{% if messages | length > 1 %}{{ 'a' * 10**10 }}{% endif %}{{ messages[0].content }}"
    with TemplateWorker(ChatTemplate(source, "x")) as worker, ThreadPoolExecutor(4) as threads:

        def ask(i: int) -> str:
            try:
                return worker.render([{"role": "user", "content": str(i)}] * (1 + (i % 5 == 0)))
            except TemplateError as error:
                return str(error)

        texts = list(threads.map(ask, range(30)))
    assert texts == [
        f"x, line 1: {LARGE}; use another with --chat-template FILE" if i % 5 == 0 else str(i)
        for i in range(30)
    ]


@pytest.mark.parametrize("python", ["import os; os.open('/etc/passwd', 0)", "import socket; socket.socket()"])
def test_whoever_breaks_out_has_no_files(python: str) -> None:
    """The child's own code, with a template that Jinja's sandbox does not hold."""
    escape = (
        "from hetrun.text.chat import sandbox_main as child, jinja_sandbox as sandbox; "
        f"child.variants = lambda messages: exec({python!r}) or [messages]; child.main({{pipe}})"
    )
    with pytest.MonkeyPatch.context() as patch, TemplateWorker(ChatTemplate("x", "x")) as worker:
        patch.setattr(processes, "CHILD", "import os, socket; " + escape)
        with pytest.raises(TemplateError, match=r"\[Errno 24\]|Too many open files|Operation not permitted"):
            worker.render(HI)

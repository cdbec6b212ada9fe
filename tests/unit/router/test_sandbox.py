"""Hostile chat templates: no code runs, and no template works for long or fills the memory."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from mesh.domain.errors import ConfigurationError, InvalidRequest, NoWorkers, Overloaded, RouterStopping
from router.text import template_process
from router.text.chat import ChatMessage, ChatTemplate
from router.text.template_process import TemplateProcess
from router.text.template_program import MAX_MEMORY_BYTES
from tests.defects import Repaired
from tests.evidence import Evidence

TURNS = [ChatMessage("user", "{{ 7 * 7 }} {% raw %} ${7*7} %1000000d {99999999}")]

INJECTIONS = [
    "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ messages|attr('__class__')|attr('__base__') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['__builtins__'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ strftime_now.__builtins__['__import__']('os') }}",
    "{{ '{0.__class__.__mro__[1].__subclasses__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ ['{0.__class__}'.format]|map('call', 1)|list }}",
    "{% set f = '{0.__class__.__init__.__globals__}'.format %}{{ f(messages) }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    "{{ messages|groupby('__class__')|first|first }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('id') }}",
    "{% from 'os' import system %}",
    "{% extends '/etc/passwd' %}",
    "{{ environment.from_string('x') }}",
    "{{ checked_turns([1]) }}",
    "{{ ''.encode().join([]) }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os') }}",
    "{{ eval('1') }}",
]

BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{{ range(10**9)|list }}",
    "{{ 'x' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ 9**(9**9) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(9999) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set big = 'x' * 999999 %}{% set y %}{% for i in range(99999) %}{{ big }}{% endfor %}{% endset %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, '1000000000') }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ '\\t'.expandtabs(tabsize=1000000000) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ ('x' * 999999).replace('x', 'y' * 999999) }}",
    "{{ ('x' * 999999)|replace('x', 'y' * 999999) }}",
    "{{ ('y' * 999999).join('x' * 999999) }}",
    "{{ range(99999)|join('y' * 999999) }}",
    "{{ messages|tojson(indent=1000000000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ lipsum(n=100000) }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ range(100000)|batch(1)|list|sum(start=[]) }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(20) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|pprint }}",
    "{{ ('{0}' * 200).format('x' * 8000000) }}",
    "{{ ('%s' * 200) % (('x' * 8000000,) * 200) }}",
    "{{ messages|tojson(separators=('x' * 80000000, 'y' * 80000000)) }}",
    "{{ [1, 2, 3]|tojson(indent='x' * 80000000) }}",
    "{{ ((('x' * 8000 ~ 'y') * 2000)|list|batch(8001)|map('join')|list * 200)|sort|length }}",
    "{{ ((('x' * 8000 ~ 'y') * 2000)|list|batch(8001)|map('join')|list * 200)|unique|list|length }}",
]


@pytest.mark.parametrize("source", INJECTIONS)
def test_no_template_reaches_python(source: str, evidence: Evidence) -> None:
    """Refused at load, refused at rendering, or harmless text: undefined names are empty."""
    try:
        rendered = ChatTemplate(source, {}).render(TURNS)
    except (ConfigurationError, InvalidRequest):
        rendered = ""
    assert not any(word in rendered for word in ("class", "function", "root:", "builtin", "uid=", "module"))
    evidence("R20", "hostile templates", "refused or harmless", target="0 code execution", ok=True)


@contextmanager
def running(source: str) -> Iterator[TemplateProcess]:
    process = TemplateProcess(ChatTemplate(source, {}), max_render_s=0.1)
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("source", BOMBS)
def test_no_template_works_for_long(source: str, evidence: Evidence, repaired: Repaired) -> None:
    """The process that renders does the work, within its limits; this one waits, without holding the lock."""
    before_s, children_s = time.process_time(), _children_cpu_s()
    with running(source) as process, pytest.raises((InvalidRequest, ConfigurationError)):
        process.render(TURNS)
    assert time.process_time() - before_s < 0.5, "CPU time of the router"
    assert _children_cpu_s() - children_s < 6, "CPU time of the process"
    evidence("R20", "render bombs", "ended in bounded time and memory", target="bounded", ok=True)
    repaired("D15", f"{len(BOMBS)} templates: refused within 4 s of CPU time and 512 MiB, in a process of their own")


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_a_rendering_that_goes_too_far_ends_its_process_only() -> None:
    source = "{% if messages|length > 1 %}{{ range(100000)|batch(1)|list|sum(start=[]) }}{% endif %}well"
    with running(source) as process:
        assert process.render(TURNS) == "well"
        with pytest.raises(InvalidRequest, match="too big"):
            process.render(TURNS * 2)
        assert process.render(TURNS) == "well", "from another process"


def child_of(process: TemplateProcess) -> psutil.Process:
    before = set(psutil.Process().children())
    process.start()
    (child,) = set(psutil.Process().children()) - before
    return child


def test_a_process_that_was_killed_is_no_fault_of_the_request() -> None:
    with running("well") as process, ThreadPoolExecutor(1) as pool:
        child = child_of(process)
        child.suspend()
        rendering = pool.submit(process.render, TURNS)
        until_asked(process)
        child.kill()
        assert rendering.result(60) == "well", "from another process"


def test_a_process_that_dies_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("well") as process, ThreadPoolExecutor(1) as pool:
        child_of(process).kill()
        monkeypatch.setattr(template_process.sys, "executable", "/bin/false")
        with pytest.raises(NoWorkers, match="ended twice"):
            pool.submit(process.render, TURNS).result(60)


def test_closing_is_no_fault_of_the_request() -> None:
    with running("well") as process, ThreadPoolExecutor(1) as pool:
        child_of(process).suspend()
        rendering = pool.submit(process.render, TURNS)
        until_asked(process)
        process.close()
        with pytest.raises(RouterStopping, match="stopping"):
            rendering.result(60)


def test_a_process_without_cpu_time_is_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    with running("well") as process:
        child_of(process).suspend()
        monkeypatch.setattr(template_process, "_MAX_WAIT_S", 0.1)
        with pytest.raises(Overloaded, match="too busy"):
            process.render(TURNS)


def test_a_process_that_does_not_take_a_long_chat_is_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat does not fit into the pipe."""
    with running("well") as process, ThreadPoolExecutor(1) as pool:
        child = child_of(process)
        child.suspend()
        monkeypatch.setattr(template_process, "_MAX_WAIT_S", 0.1)
        rendering = pool.submit(process.render, [ChatMessage("user", "a" * (1 << 20))])
        try:
            with pytest.raises(Overloaded, match="too busy"):
                rendering.result(10)
        finally:
            if not rendering.done():
                child.kill()
        monkeypatch.undo()
        assert process.render([ChatMessage("user", "a" * (1 << 20))]) == "well", "from another process"


def until_asked(process: TemplateProcess) -> None:
    """Return when another thread renders."""
    limit_s = time.monotonic() + 60
    while not process._lock.locked():
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    time.sleep(0.1)  # until it has written its request, on all but the busiest machine


def test_the_process_has_limits_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MESH_KEY", "hunter2")
    with running("well") as process:
        child = child_of(process)
        assert child.rlimit(psutil.RLIMIT_AS) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)
        assert "TANDEM_MESH_KEY" not in child.environ()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_template_that_cannot_be_compiled_is_the_operators_error() -> None:
    with running("{{ messages | nonsense }}") as process, pytest.raises(ConfigurationError, match="nonsense"):
        process.start()
    with running("{{ 9**(9**9) }}") as process, pytest.raises(ConfigurationError, match="cannot be compiled"):
        process.start()


def test_what_clients_write_is_never_a_template() -> None:
    source = (
        "{% for m in messages %}{{ m.content | indent(2) }}{{ '%s' % m.content }}{{ m.content | replace('7', '8') }}"
    )
    text = TURNS[0].content
    rendered = ChatTemplate(source + "{% endfor %}", {}).render(TURNS)
    assert rendered == text + text + text.replace("7", "8")


def test_loops_still_know_their_place() -> None:
    source = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ',' }}{% endfor %}"
    assert ChatTemplate(source, {}).render(TURNS * 3) == "1/3,2/3,3/3."
    assert ChatTemplate("{% for a, b in {'k': 1}.items() %}{{ a ~ b }}{% endfor %}", {}).render(TURNS) == "k1"
    assert ChatTemplate("{% for a in [] %}x{% else %}none{% endfor %}", {}).render(TURNS) == "none"

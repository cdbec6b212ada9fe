"""Small parts of `tandem up`."""

from tandem_cli.service_log import LogEntry, read_log_line


def test_log_lines_are_shortened() -> None:
    line = b'{"event": "worker left", "level": "warning", "timestamp": "t", "service": "r", "worker": "d-0"}\n'
    assert read_log_line(line) == LogEntry("warning: worker left worker=d-0", True)
    assert read_log_line(b'{"event": "settings", "level": "info"}') == LogEntry("info: settings", False)


def test_an_exception_is_named() -> None:
    line = b'{"event": "call failed", "level": "error", "exception": [{"exc_type": "KeyError", "exc_value": "7"}]}'
    assert read_log_line(line) == LogEntry("error: call failed (KeyError: 7)", True)


def test_other_peoples_lines_stay_as_they_are() -> None:
    assert read_log_line(b"WARNING grpc something\n") == LogEntry("WARNING grpc something", True)
    assert read_log_line(b"I0000 noise\n") == LogEntry("I0000 noise", False)
    assert read_log_line(b"[1, 2]") == LogEntry("[1, 2]", False)
    assert not read_log_line(b"\xff\n").is_warning

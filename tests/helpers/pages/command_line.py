"""What tests of the command line say of its output."""


def one_line(text: str) -> str:
    """The text, which must be one line and no traceback."""
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text

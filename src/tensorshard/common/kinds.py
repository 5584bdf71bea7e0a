"""What kind of thing a value is, for messages."""


def with_article(name: str) -> str:
    """A name after "a" or "an".

    Examples:
        >>> with_article("Linear"), with_article("AdamW")
        ('a Linear', 'an AdamW')
    """
    return f"an {name}" if name[:1].lower() in "aeio" else f"a {name}"


def kind_of(value: object) -> str:
    """The name of a value's class after "a" or "an": "a Linear"."""
    return with_article(type(value).__name__)

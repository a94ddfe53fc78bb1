"""A page of the report as one HTML file that needs nothing else: no script, no font, no image, no request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


@dataclass(frozen=True)
class Figure:
    """A figure of the page: the SVG element, what it shows for those who cannot see it, and its caption."""

    name: str
    svg: str
    alt: str
    caption: str

    @property
    def markup(self) -> Markup:
        """Return the drawing, which this package made, as markup."""
        return Markup(self.svg)


@dataclass(frozen=True)
class Table:
    """A table of written cells. Columns named in `text` are set flush left, the others as numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: frozenset[int] = frozenset({0})


@dataclass(frozen=True)
class Section:
    """A part of the page: what it is called, a line on what it answers, and what it shows.

    link: address and words of a link that ends the line.
    """

    anchor: str
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[tuple[str, Table]] = ()
    folded: bool = False
    tables_first: bool = False
    link: tuple[str, str] | None = None


@dataclass(frozen=True)
class Page:
    """Everything that the template shows. kind: what page it is; start: what the contents call its head."""

    title: str
    description: str
    headline: Sequence[str]
    facts: Sequence[tuple[str, str]]
    warnings: Sequence[str]
    sections: Sequence[Section]
    items: Sequence[object] = ()
    items_note: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    kind: str = "Experiment report"
    start: str = "Answer"


def render(page: Page) -> str:
    """Return the HTML of the page; every text is escaped, only figures are markup."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("template.html").render(page=page)

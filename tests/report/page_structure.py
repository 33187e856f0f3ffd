"""The structure that a page needs for a keyboard and a screen reader, and the contrast of its
colours.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "path", "use", "rect", "circle", "line", "polygon", "hr"}
FOCUSABLE = {"a", "button", "summary"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    parent: Element | None = None
    content: list[Element | str] = field(default_factory=list)

    @property
    def children(self) -> list[Element]:
        return [part for part in self.content if isinstance(part, Element)]

    def all(self, *tags: str) -> list[Element]:
        below = [found for child in self.children for found in (child, *child.all())]
        return [element for element in below if not tags or element.tag in tags]

    @property
    def whole_text(self) -> str:
        parts = [part if isinstance(part, str) else part.whole_text for part in self.content]
        return " ".join(" ".join([self.attributes.get("alt", ""), *parts]).split())


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = self.at = Element("", {})

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attributes}, self.at)
        self.at.content.append(element)
        if tag not in VOID:
            self.at = element

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.at.content.append(
            Element(tag, {name: value or "" for name, value in attributes}, self.at)
        )

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and self.at.parent:
            self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.content.append(data)


def parse(page: str) -> Element:
    tree = _Tree()
    tree.feed(page)
    return tree.root


def _list_heading_problems(root: Element) -> list[str]:
    levels = [int(element.tag[1]) for element in root.all("h1", "h2", "h3", "h4", "h5", "h6")]
    found = [
        f"an h{level} follows an h{before}"
        for before, level in zip(levels, levels[1:], strict=False)
        if level > before + 1
    ]
    return found + [
        f"a heading without text: {one.tag}"
        for one in root.all("h1", "h2", "h3", "h4")
        if not one.whole_text
    ]


def _list_table_problems(table: Element) -> list[str]:
    captions = table.all("caption")
    found = [] if captions and captions[0].whole_text else ["a table without a caption"]
    found += [
        f"a header cell without a scope: {one.whole_text}"
        for one in table.all("th")
        if "scope" not in one.attributes
    ]
    rows = [row for body in table.all("tbody") for row in body.all("tr")]
    found += [f"a row without a header: {row.whole_text}" for row in rows if not row.all("th")]
    return found


def problems(page: str) -> list[str]:
    """What keeps a person without a mouse or without sight from a page; empty if nothing does."""
    root = parse(page)
    found = []
    everything = root.all()
    ids = [element.attributes["id"] for element in everything if "id" in element.attributes]
    found += [
        f"the id {name!r} is there {ids.count(name)} times"
        for name in sorted(set(ids))
        if ids.count(name) > 1
    ]
    found += [
        f"{tag} is there {len(root.all(tag))} times"
        for tag in ("main", "h1", "title")
        if len(root.all(tag)) != 1
    ]
    found += [] if root.all("html")[0].attributes.get("lang") else ["the page names no language"]
    found += _list_heading_problems(root)
    found += [
        f"an image without a text: {one.attributes}"
        for one in root.all("img")
        if not one.attributes.get("alt")
    ]
    svgs = [
        one
        for one in root.all("svg")
        if one.attributes.get("role") != "img" or not one.attributes.get("aria-label")
    ]
    found += [f"{len(svgs)} charts without a label"] if svgs else []
    for table in root.all("table"):
        found += _list_table_problems(table)
    found += [
        f"a {one.tag} without a name" for one in root.all("a", "button") if not one.whole_text
    ]
    found += [
        f"a link to {one.attributes['href']}"
        for one in root.all("a")
        if one.attributes["href"].removeprefix("#") not in ids
    ]
    for name in ("aria-labelledby", "aria-describedby", "popovertarget"):
        found += [
            f"{name}={one.attributes[name]}"
            for one in everything
            if one.attributes.get(name, ids[0]) not in ids
        ]
    scrolls = [
        one for one in everything if one.attributes.get("class") == "scroll" or one.tag == "pre"
    ]
    found += [
        "what scrolls cannot be reached by keyboard"
        for one in scrolls
        if one.attributes.get("tabindex") != "0"
    ]
    return found


def contrasts(page: str) -> dict[str, float]:
    """The contrast of texts and lines with what they stand on, in light and in dark."""
    light, dark = re.findall(r":root \{(.*?)\}", page, re.DOTALL)
    found = {}
    for theme, text in (("light", light), ("dark", dark)):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))
        pairs = [
            (ink, paper)
            for ink in ("ink", "ink-2", "ink-3", "accent")
            for paper in ("page", "card")
        ]
        pairs += [
            (kind, paper) for kind in ("good", "bad") for paper in ("page", "card", f"{kind}-soft")
        ]
        pairs += [("ink", f"{kind}-soft") for kind in ("good", "bad")] + [("page", "ink")]
        found |= {
            f"{theme} text: {ink} on {paper}": contrast(colours[ink], colours[paper])
            for ink, paper in pairs
        }
        lines = ["edge", *(f"c{number}" for number in range(1, 9))]
        found |= {
            f"{theme} line: {line} on card": contrast(colours[line], colours["card"])
            for line in lines
        }
    return found


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    light, dark = sorted((_luminance(colour) for colour in (first, second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in channels
    ]
    return float(
        sum(weight * value for weight, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    )

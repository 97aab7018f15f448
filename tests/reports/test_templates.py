"""Any text put into a part of a page appears in the browser as that text."""

import json
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from training_reports.layout import _FOREIGN, TEMPLATES, Card, Panel, figure_json

PARTS = TEMPLATES.get_template("parts.html").module

# Browsers turn a carriage return into a line feed and a null into a replacement character, escaped or not.
texts = st.text(st.characters(exclude_characters="\r\0", exclude_categories=["Cs"]))


class Parsed(HTMLParser):
    """The elements of a part in order, each with its own text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self.attributes, self.open = [], [], {}, []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(len(self.tags))
        self.tags.append(tag)
        self.texts.append("")
        self.attributes |= dict(attributes)

    def handle_endtag(self, tag):
        assert self.tags[self.open.pop()] == tag

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] += data

    def texts_of(self, *tags):
        return [text for tag, text in zip(self.tags, self.texts, strict=True) if tag in tags]


@given(texts)
@example("<b>")
@example("{{ 7 * 7 }}{% endblock %}")
def test_headers_hold_text_only(text):
    parsed = Parsed(PARTS.header(text, text, "good", {text: text}))
    assert " ".join(parsed.tags) == "header div h1 span dl div dt dd"
    assert parsed.texts_of("h1", "span", "dt", "dd") == [text] * 4


@given(texts)
def test_cards_hold_text_only(text):
    parsed = Parsed(PARTS.card(Card(text, text, text, [text, text])))
    assert " ".join(parsed.tags) == "div h2 p small p p"
    assert parsed.texts_of("h2", "p", "small") == [text, f"{text} ", text, text, text]


@given(texts)
def test_tables_hold_text_only(text):
    parsed = Parsed(PARTS.table((text, text), [(text, text)], emphasised=[text]))
    assert " ".join(parsed.tags) == "div table thead tr th th tbody tr th td"
    assert parsed.texts_of("th", "td") == [text] * 4


@given(texts)
@example("</script><!--")
def test_panels_hold_text_only_also_in_the_label_and_the_figure(text):
    figure = go.Figure(layout_title_text=text)
    parsed = Parsed(PARTS.panel(Panel(text, figure, text, [text])))
    assert " ".join(parsed.tags) == "figure h2 script div figcaption p"
    assert parsed.texts_of("h2", "p") == [text] * 2
    assert parsed.attributes["aria-label"] == f"{text}. {text}"
    (shown,) = parsed.texts_of("script")
    assert json.loads(shown) == json.loads(figure_json(figure))
    assert json.loads(shown)["layout"]["title"]["text"] == _FOREIGN.sub("&lt;", text)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "—"), (True, "yes"), (False, "no"), ([], "—"), ([1, "<"], "1, <"), (0, "0")]
)
def test_values_are_shown_as_people_read_them(value, shown):
    parsed = Parsed(PARTS.table((), [("name", value)]))
    assert parsed.texts_of("td") == [shown]


def test_an_undefined_template_value_is_an_error():
    with pytest.raises(UndefinedError, match="forgotten"):
        TEMPLATES.from_string("{{ forgotten }}").render()
